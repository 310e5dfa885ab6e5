"""Times that each unit of a model takes, forward and backward, on the model's device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ...errors import SpecError
from ..kept import State
from ..recorders import TensorMemo, modules_watched
from ..recording import device_of, first_float_tensor, tensors_in
from ..writes import values_kept, writes_undone

_FEWEST_PASSES, _MOST_PASSES = 5, 30
_ENOUGH_S = 1.0  # small models run more often: other load on the machine lasts as long as one of their passes


def measure_units(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cuts: Sequence[str]
) -> list[tuple[float, float]]:
    """Measure the seconds of each unit's forward and backward: the median of 5 passes after one warm-up pass.

    If passes are short, more are made for up to one second, 30 at most. The whole model runs on its own device, with
    copies of the inputs; buffers, gradients and random state are restored. Other load on the machine affects the times.

    Raises: SpecError for a model on the meta device.
    """
    device = device_of([*model.parameters(), *model.buffers()])
    if device.type == "meta":
        raise SpecError("cannot measure on the meta device: give a model with real parameters")
    state = State(model, args, kwargs)
    with state.kept(device), writes_undone(state.tensors) as written:
        _Pass(device, cuts).run(model, args, kwargs)
    passes: list[list[tuple[float, float]]] = []
    began = time.perf_counter()
    while len(passes) < _FEWEST_PASSES or len(passes) < _MOST_PASSES and time.perf_counter() - began < _ENOUGH_S:
        with state.kept(device), values_kept(written):
            passes.append(_Pass(device, cuts).run(model, args, kwargs))
    return [
        (statistics.median(forward_s for forward_s, _ in of_unit), statistics.median(back_s for _, back_s in of_unit))
        for of_unit in zip(*passes)
    ]


class _Pass:
    """One forward and one backward pass, with the times at which each cut is reached."""

    def __init__(self, device: torch.device, cuts: Sequence[str]) -> None:
        self._device = device
        self._cuts = cuts
        self._entered_s: dict[str, float] = {}
        self._returned_s: dict[str, float] = {}
        self._is_forward = True

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[float, float]]:
        """Return (forward_s, backward_s) of each unit."""
        to_device = TensorMemo(lambda tensor: tensor.detach().clone().to(self._device))
        args, kwargs = tree_map(to_device, (args, kwargs))
        buffers = tensors_in(model, "_buffers", TensorMemo(lambda tensor: tensor.detach().clone()))
        cuts = ((cut, model.get_submodule(cut)) for cut in self._cuts)
        with modules_watched(cuts, self._on_entry, is_first=True), torch.enable_grad():
            begin_s = self._now_s()
            outputs = torch.func.functional_call(model, buffers, args, kwargs, tie_weights=False)
            turned_s = self._now_s()
            self._is_forward = False
            end_s = self._now_s() if self._go_back(model, outputs) else turned_s
        entered_s = [begin_s, *(self._entered_s[cut] for cut in self._cuts), turned_s]
        # If no gradient reaches a cut, the units before it have no backward.
        returned_s = [end_s, *(self._returned_s.get(cut, end_s) for cut in self._cuts), turned_s]
        return [
            (entered_s[unit + 1] - entered_s[unit], max(0.0, returned_s[unit] - returned_s[unit + 1]))
            for unit in range(len(self._cuts) + 1)
        ]

    def _on_entry(self, cut: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_forward:  # a checkpoint runs again
            return
        argument = first_float_tensor(args, kwargs)
        if argument is not None and argument.requires_grad:
            argument.register_hook(lambda gradient: self._returned_s.update({cut: self._now_s()}))
        self._entered_s[cut] = self._now_s()

    def _go_back(self, model: nn.Module, outputs: Any) -> bool:
        """Compute the gradient of every parameter and discard it; return False if there is none."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        ends = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if parameters and ends:
            ones = [torch.ones_like(end) for end in ends]
            torch.autograd.grad(ends, parameters, ones, allow_unused=True)
        return bool(parameters and ends)

    def _now_s(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()
