"""Backward passes that DDP takes no notice of, in a loop of one's own: it exchanges gradients in one for each call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from .replicated import average

__all__ = ["LaterPasses"]


class LaterPasses:
    """Averages the gradients of all backward passes behind the first that follows a call.

    Gradients are the same on all replicas before such a pass, so their mean behind it is right, whoever made them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], replicas: Sequence[dist.ProcessGroup]) -> None:
        state = _State([parameter for parameter in parameters if parameter.requires_grad], replicas)
        self._state = state
        # DDP keeps these nodes too; each lives as long as it is kept, with its hooks, which lead to none of them.
        self._nodes = [get_gradient_edge(parameter).node for parameter in state.parameters]
        for node in self._nodes:
            node.register_prehook(state.on_gradient)

    def follow(self, outputs: Sequence[Tensor]) -> None:
        """Know of a call that DDP has made ready for a pass, by what it gave."""
        self._state.is_awaited, self._state.is_open = True, False
        for node in {output.grad_fn for output in outputs if output.grad_fn is not None}:
            node.register_prehook(self._state.on_pass)

    @contextlib.contextmanager
    def left_to_ddp(self) -> Iterator[None]:
        """In here passes are those of another call each, and nothing is done in them."""
        self._state.is_left = True
        try:
            yield
        finally:
            self._state.is_left = self._state.is_awaited = False


class _State:
    """``is_awaited``: DDP exchanges the gradients of the next pass. ``is_open``: one runs. ``is_left``: as they are."""

    def __init__(self, parameters: Sequence[nn.Parameter], replicas: Sequence[dist.ProcessGroup]) -> None:
        self.parameters, self._replicas = parameters, replicas
        self.is_awaited = self.is_open = self.is_left = self._has_gradients = False

    def on_pass(self, gradients: Any) -> None:
        """A pass has come to a call's output. In it others may run, those of checkpoints, which belong to it."""
        if not (self.is_open or self.is_left):
            self.is_open, self._has_gradients = True, False
            queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
            queue(self._end)

    def on_gradient(self, gradients: Any) -> None:
        """To a parameter, and not only to the input, as by `torch.autograd.grad`."""
        self.on_pass(gradients)
        self._has_gradients = True

    def _end(self) -> None:
        self.is_open = False
        if not self._has_gradients:
            return
        if self.is_awaited:
            self.is_awaited = False
            return
        with torch.no_grad():
            self._average()

    def _average(self) -> None:
        """Collective: all replicas."""
        has_gradient = torch.tensor([each.grad is not None for each in self.parameters], dtype=torch.float32)
        has_gradient = has_gradient.to(self.parameters[0].device)
        for group in self._replicas:
            dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=group)
        for parameter, is_there in zip(self.parameters, has_gradient.tolist()):
            if not is_there:  # on any replica
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse:
                dense, rows = parameter.grad.to_dense(), parameter.grad.sparse_dim()
                average(dense, self._replicas)
                parameter.grad = dense.to_sparse(rows)
            else:
                average(parameter.grad, self._replicas)
