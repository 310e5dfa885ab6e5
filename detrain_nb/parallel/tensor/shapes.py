"""A module's outputs over ranks, as shapes only: most wrong plans do not even run, which is cheap to find out."""

from __future__ import annotations

import traceback
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ..kept import State
from ..module_copies import ghost_of
from ..recording import without_fused_layers
from ..writes import writes_undone
from .copies import copied_or_shared
from .layer_flow import float_outputs
from .layout import lay_out
from .plan import Layout, TensorPlan
from .ranks import cut
from .thread_ranks import ThreadRanks


class Shapes:
    """Shapes of a module with its call; the module is restored. ``unread``: numbers of outputs that nothing reads."""

    def __init__(
        self, module: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], unread: Collection[int]
    ) -> None:
        self._unread = unread
        self._call = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, call)
        self._expected: list[tuple[int, ...]] = []
        self.why_unknown = ""  # why the outputs' shapes are unknown: then only a proof can tell
        try:
            self._ghost = ghost_of(module).eval()
            self._state = State(self._ghost, self._call)
            with self._state.kept():
                self._expected = self._given_by(self._ghost)
        except Exception as exc:  # noqa: BLE001 - the user's code may read values
            self.why_unknown = f"it does not run without values: {in_short(exc)}"

    def find_fault(self, plan: TensorPlan) -> str | None:
        """Return why the module fails in parts or returns other shapes; None also if this is unknown."""
        if self.why_unknown:
            return None
        ranks = _NoRanks(plan.tp)

        def distribute(parameter: nn.Parameter, layout: Layout | None) -> nn.Parameter:
            if layout is None:
                return parameter
            mine = cut(parameter.detach(), layout.dim, rank=0, size=plan.tp, packed=layout.packed)
            return nn.Parameter(mine, requires_grad=False)

        module = None
        try:
            with self._state.kept():  # a ghost shares everything but tensors and containers
                module = ghost_of(self._ghost)
                lay_out(module, plan, ranks, distribute)
                found = self._given_by(module)
        except Exception as exc:  # noqa: BLE001 - whatever the user's code raises on parts is why they cannot be
            return in_short(exc, module)
        return None if found == self._expected else f"it returns {found} instead of {self._expected}"

    def _given_by(self, module: nn.Module) -> list[tuple[int, ...]]:
        args, kwargs = tree_map(copied_or_shared, self._call)
        with writes_undone(self._state.tensors), torch.no_grad(), without_fused_layers(), _WithKeys():
            outputs = float_outputs(module(*args, **kwargs))
        return [tuple(each.shape) for index, each in enumerate(outputs) if index not in self._unread]


class _WithKeys(TorchFunctionMode):
    """Mode that refuses attention without key heads, which makes torch before 2.13 divide by zero and crash."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is functional.scaled_dot_product_attention and kwargs.get("enable_gqa"):
            key = args[1] if len(args) > 1 else kwargs["key"]
            if key.dim() > 2 and not key.shape[-3]:
                raise ValueError("the attention has no key heads")
        return function(*args, **kwargs)


class _NoRanks(ThreadRanks):
    """The first of several ranks, for which the others send the same as it does."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def add_up(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor] * self.size


def in_short(error: Exception, module: nn.Module | None = None) -> str:
    """Return the error's first line, and which of the modules in ``module`` raised it, if one did."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    names = {id(part): name for name, part in module.named_modules()} if module is not None else {}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    where = next((name for frame in reversed(frames) if (name := names.get(id(frame.f_locals.get("self")), ""))), "")
    return f"{type(error).__name__}: {first_line[:120]}" + (f" (in {where})" if where else "")
