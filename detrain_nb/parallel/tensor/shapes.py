"""What a module gives over ranks, in shapes alone: most wrong plans do not even run, which costs little to see."""

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
    """Of a module that is called so; it is left as it is. ``unread``: outputs that nobody reads, by number."""

    def __init__(
        self, module: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], unread: Collection[int]
    ) -> None:
        self._unread = unread
        self._call = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, call)
        self._expected: list[tuple[int, ...]] = []
        self.why_unknown = ""  # what it gives, so that only a proof can tell
        try:
            self._ghost = ghost_of(module).eval()
            self._state = State(self._ghost, self._call)
            with self._state.kept():
                self._expected = self._given_by(self._ghost)
        except Exception as exc:  # noqa: BLE001 - the user's code, that looks at values, say
            self.why_unknown = f"it does not run without values: {in_short(exc)}"

    def find_fault(self, plan: TensorPlan) -> str | None:
        """Why the module does not run in parts, or gives something else; None also where nobody knows."""
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
            with self._state.kept():  # a ghost has in common with it what is no tensor, and no container
                module = ghost_of(self._ghost)
                lay_out(module, plan, ranks, distribute)
                found = self._given_by(module)
        except Exception as exc:  # noqa: BLE001 - whatever the user's code raises on parts is why they cannot be
            return in_short(exc, module)
        return None if found == self._expected else f"it gives {found} in the place of {self._expected}"

    def _given_by(self, module: nn.Module) -> list[tuple[int, ...]]:
        args, kwargs = tree_map(copied_or_shared, self._call)
        with writes_undone(self._state.tensors), torch.no_grad(), without_fused_layers(), _WithKeys():
            outputs = float_outputs(module(*args, **kwargs))
        return [tuple(each.shape) for index, each in enumerate(outputs) if index not in self._unread]


class _WithKeys(TorchFunctionMode):
    """Attention without a head of keys is an error: torch before 2.13 divides by their number, and the process ends."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is functional.scaled_dot_product_attention and kwargs.get("enable_gqa"):
            key = args[1] if len(args) > 1 else kwargs["key"]
            if key.dim() > 2 and not key.shape[-3]:
                raise ValueError("the attention has no head of keys")
        return function(*args, **kwargs)


class _NoRanks(ThreadRanks):
    """The first of ranks of which the others say what it says."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def add_up(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor] * self.size


def in_short(error: Exception, module: nn.Module | None = None) -> str:
    """What it says, and which of the modules in ``module`` raised it, if one did."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    names = {id(part): name for name, part in module.named_modules()} if module is not None else {}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    where = next((name for frame in reversed(frames) if (name := names.get(id(frame.f_locals.get("self")), ""))), "")
    return f"{type(error).__name__}: {first_line[:120]}" + (f" (in {where})" if where else "")
