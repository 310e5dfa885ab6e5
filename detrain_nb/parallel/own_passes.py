"""Backward passes in a loop of one's own over replicas. DDP, which wants one to each parameter, has no part in them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge

from .replicated import average_gradients

__all__ = ["OwnPasses"]


class OwnPasses:
    """Averages the gradients of all replicas behind each pass that comes to a parameter.

    They are the same on all replicas before such a pass, so their mean behind it is right, whoever made them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], replicas: Sequence[dist.ProcessGroup]) -> None:
        self._parameters, self._state = parameters, _State(parameters, replicas)
        # Each lives as long as it is kept, with its hooks, which lead to none of them.
        self._nodes: dict[nn.Parameter, Node] = {}

    def follow(self, outputs: Sequence[Tensor]) -> None:
        """Know of a call by what it gave, and of parameters that are trained by now."""
        for parameter in self._parameters:
            if parameter.requires_grad and parameter not in self._nodes:
                self._nodes[parameter] = node = get_gradient_edge(parameter).node
                node.register_prehook(self._state.on_gradient)
        for node in {output.grad_fn for output in outputs if output.grad_fn is not None}:
            node.register_prehook(self._state.on_pass)

    @contextlib.contextmanager
    def left_to_ddp(self) -> Iterator[None]:
        """In here passes are those of `train_step`, and nothing is done in them."""
        self._state.is_left = True
        try:
            yield
        finally:
            self._state.is_left = False


class _State:
    """``is_left``: passes are as they are."""

    def __init__(self, parameters: Sequence[nn.Parameter], replicas: Sequence[dist.ProcessGroup]) -> None:
        self._parameters, self._replicas = parameters, replicas
        self.is_left = False
        self._running: Callable[[], _Pass | None] = lambda: None

    def on_pass(self, gradients: Any) -> None:
        """A pass has come to a call's output. In it others may run, those of checkpoints, which belong to it."""
        if not self.is_left:
            self._pass()

    def on_gradient(self, gradients: Any) -> None:
        """To a parameter, and not only to the input, as by `torch.autograd.grad`."""
        if not self.is_left:
            self._pass().has_gradients = True

    def _pass(self) -> _Pass:
        """The one that runs. Autograd keeps it, and lets it go with one that ends in an error too."""
        running = self._running()
        if running is None:
            running = _Pass(self)
            self._running = weakref.ref(running)
            queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
            queue(running)
        return running

    def end(self, ended: _Pass) -> None:
        self._running = lambda: None
        if ended.has_gradients:
            average_gradients(self._parameters, self._replicas)


class _Pass:
    """What autograd calls behind a pass."""

    def __init__(self, state: _State) -> None:
        self._state, self.has_gradients = state, False

    def __call__(self) -> None:
        self._state.end(self)
