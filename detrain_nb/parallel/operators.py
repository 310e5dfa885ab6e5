"""Watching operators: a dispatch mode that can be interrupted, and helpers for the arguments of operators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .interrupts import HeldInterrupts

_TREES = (list, tuple, dict)


class OperatorMode(TorchDispatchMode):
    """A dispatch mode that can be interrupted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._entered: list[HeldInterrupts] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            self.on_question(args[0])
            return args[0].device
        return self.on_operator(func, types, args, dict(kwargs or {}))

    def on_operator(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Handle an operator, as ``__torch_dispatch__`` does, except for the most frequent: queries of a device."""
        raise NotImplementedError

    def on_question(self, tensor: Tensor) -> None:
        """Handle that code queries the device of ``tensor``."""

    def __enter__(self) -> Any:
        with contextlib.ExitStack() as undone:
            held = undone.enter_context(HeldInterrupts())
            mode = super().__enter__()  # type: ignore[no-untyped-call]
            self._entered.append(held)
            undone.pop_all()
        held.let_through()
        return mode

    def __exit__(self, *exc: Any) -> None:
        with contextlib.ExitStack() as stack:
            held = self._entered.pop()
            stack.push(held)
            held.hold()
            super().__exit__(*exc)  # type: ignore[no-untyped-call]


def run_operator(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator. Adds what an LSTM on a CPU keeps for its gradients, which torch leaves out without memory."""
    result = func(*args, **kwargs)
    if func is not torch.ops.aten.mkldnn_rnn_layer.default or not isinstance(result[3], FakeTensor):
        return result
    num_steps, num_rows, width = result[0].shape
    per_step = 6 * max(width, args[0].shape[-1]) + 5 * width
    num_bytes = num_rows * (4 * width * num_steps + per_step * (num_steps + 1)) * result[0].element_size()
    return (*result[:3], result[3].new_empty(num_bytes))


def leaves_of(args: Iterable[Any], kwargs: Mapping[str, Any] | None = None) -> list[Any]:
    """Return ``tree_leaves((args, kwargs))`` in a third of the time, as operators have few containers."""
    found: list[Any] = []
    for each in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(each, _TREES):
            found += tree_leaves(each)
        else:
            found.append(each)
    return found


def tensors_of(args: Iterable[Any], kwargs: Mapping[str, Any] | None = None) -> list[Tensor]:
    """Return the tensors among the leaves of arguments."""
    return [leaf for leaf in leaves_of(args, kwargs) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> int:
    """Return an id that is equal for tensors on one storage while it lives; sparse tensors get their own."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)
