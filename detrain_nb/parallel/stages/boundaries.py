"""Tensors that cross between the stages of a split model, for batches of any shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import SpecError
from ..compiled import as_written
from ..costs.profiler import ModelProfile, profile_call
from ..kept import state_kept
from ..module_copies import ghost_of
from ..recorders import modules_watched
from ..recording import device_of, first_float_tensor, modules_around
from ..writes import writes_undone
from .splitter import Split
from .stage import build_stage


class Boundaries:
    """Shapes at the boundaries for any batch; keeps the model's structure and buffers, not its parameters."""

    def __init__(self, found: Split, dtype: torch.dtype | None = None) -> None:
        """Take the split; ``dtype``: of float tensors at the boundaries, if it is not the model's own."""
        self._dtype = dtype
        self._cuts = found.cuts
        self._uses = [found.uses(stage) for stage in range(found.num_stages)]
        self._ghost = ghost_of(found.model)
        self._on_zeros: nn.Module | None = None
        if found.cuts:
            self._on_zeros = build_stage(
                found.model,
                cut_in=None,
                cut_out=found.cuts[-1],
                replaceable=found.profile.computing,
                runs={outer for cut in found.cuts for outer in modules_around(cut)},
                holds=set(),
                outputs=found.profile.outputs,
                is_on_zeros=True,
            )
        self.rewrites_parameters = found.profile.rewrites_parameters  # in a mode that occurred

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_training: bool) -> list[Tensor]:
        """Return the tensors, on the meta device, that enter the second and each later stage.

        Raises: SpecError if the model cannot be cut there for this batch.
        """
        self._ghost.train(is_training)
        try:
            found = profile_call(self._ghost, args, kwargs, device=device_of((args, kwargs)))
        except (SpecError, RuntimeError, LookupError, TypeError, ValueError, AssertionError):  # a ghost has no values
            return self._walk(args, kwargs, is_training=is_training)
        self.rewrites_parameters |= found.rewrites_parameters
        by_cut = {unit.cut: unit for unit in found.units}
        if gone := [cut for cut in self._cuts if cut not in by_cut]:
            when = "" if is_training else " in evaluation mode"
            if why := found.hindrances.get(gone[0]):
                raise SpecError(
                    f"with this batch{when} the model cannot be cut at {gone[0]!r}: {why}; split it with example "
                    "inputs like this batch"
                )
            raise SpecError(
                f"with this batch{when} the model does not call {gone[0]!r}, where a stage begins: if a class or a "
                "global holds it, call it as an attribute of its module; otherwise split with example inputs like "
                "this batch"
            )
        self._require_same_stages(found)
        return [self._on_meta(by_cut[cut].input_shape, by_cut[cut].input_dtype) for cut in self._cuts]

    def _require_same_stages(self, found: ModelProfile) -> None:
        """Raise SpecError if a stage uses another stage's parameters for this batch, as layers run in another order."""
        stage = 0
        for unit in found.units:
            stage = self._cuts.index(unit.cut) + 1 if unit.cut in self._cuts else stage
            if others := [name for name in unit.parameters if name not in self._uses[stage]]:
                raise SpecError(
                    f"with this batch, stage {stage} uses {others[0]}, unlike with the example inputs: the model runs "
                    "other layers or a different order; split it with example inputs like this batch"
                )

    def _walk(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_training: bool) -> list[Tensor]:
        """Run the model's own code on this batch as far as the last cut, with zeros for what it would compute."""
        stage = self._on_zeros
        if stage is None:
            return []
        reached: dict[str, Tensor] = {}
        device = device_of((args, kwargs))
        buffers = {name: buffer.to(device, copy=True) for name, buffer in stage.named_buffers()}

        def note(cut: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensor = first_float_tensor(args, kwargs)
            if tensor is not None:
                reached[cut] = tensor

        stage.train(is_training)
        with (
            modules_watched([(cut, stage.get_submodule(cut)) for cut in self._cuts], note, is_first=True),
            state_kept(stage, args, kwargs, device=device) as tensors,
            writes_undone(tensors),
            as_written(),
            torch.no_grad(),
        ):
            torch.func.functional_call(stage, buffers, args, kwargs)
        if gone := [cut for cut in self._cuts if cut not in reached]:
            raise SpecError(f"with this batch the model does not reach {gone[0]!r}, where a stage begins")
        return [self._on_meta(tuple(reached[cut].shape), reached[cut].dtype) for cut in self._cuts]

    def _on_meta(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        is_float = dtype.is_floating_point
        return torch.empty(shape, dtype=is_float and self._dtype or dtype, device="meta", requires_grad=is_float)
