"""Backward passes in a loop of one's own. Over replicas DDP, which wants one to each parameter, has no part in them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge

from ..errors import SpecError
from .replicated import average_gradients

FAILED = (
    "a backward pass ended in an error, or was stopped, in the middle of the work of {whose}; gradients would be wrong "
    "from then on: make the model anew, lay it out again, and load what was saved of it"
)


class ReplicatedPasses:
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
        _hook_into(outputs, self._state.on_pass)

    @contextlib.contextmanager
    def left_to_ddp(self) -> Iterator[None]:
        """In here passes are those of `train_step`, and nothing is done in them."""
        self._state.is_left = True
        try:
            yield
        finally:
            self._state.is_left = False


class ShardedPasses:
    """Refuses what FSDP2 would do wrong: gradients of gradients, and all that follows a pass that ended in an error."""

    def __init__(self) -> None:
        self._running = _RunningPass(lambda: None)

    def follow(self, outputs: Sequence[Tensor]) -> None:
        """Know of a call by what it gave."""
        _hook_into(outputs, self._on_pass)

    def note_failure(self) -> None:
        """Of a pass that was not followed."""
        self._running.has_failed = True

    def require_no_failure(self) -> None:
        """Raises: SpecError."""
        if self._running.has_failed:
            raise SpecError(FAILED.format(whose="FSDP2"))

    def _on_pass(self, gradients: Any) -> None:
        self.require_no_failure()
        self._running.note()
        if torch.is_grad_enabled():
            raise SpecError(
                "gradients of gradients were asked for (create_graph=True), for which FSDP2 has not kept what it put "
                "together of the shards: lay the model out without dp_shard (dp_replicate, tp)"
            )


def _hook_into(outputs: Sequence[Tensor], hook: Callable[[Any], None]) -> None:
    for node in {output.grad_fn for output in outputs if output.grad_fn is not None}:
        node.register_prehook(hook)


class _State:
    """``is_left``: passes are as they are."""

    def __init__(self, parameters: Sequence[nn.Parameter], replicas: Sequence[dist.ProcessGroup]) -> None:
        self._parameters, self._replicas = parameters, replicas
        self._running = _RunningPass(self._end)
        self.is_left = self._has_gradients = False

    def on_pass(self, gradients: Any) -> None:
        """A pass has come to a call's output. In it others may run, those of checkpoints, which belong to it."""
        if not self.is_left and self._running.note():
            self._has_gradients = False

    def on_gradient(self, gradients: Any) -> None:
        """To a parameter, and not only to the input, as by `torch.autograd.grad`."""
        if not self.is_left and torch.is_grad_enabled():
            raise SpecError(
                "backward(create_graph=True) was called over replicas: the graph of a parameter's gradient is that of "
                "this replica alone, of which no mean can be made: take gradients by torch.autograd.grad(..., "
                "create_graph=True), and call backward() of what is made of them"
            )
        self.on_pass(gradients)
        self._has_gradients = True

    def _end(self) -> None:
        if self._has_gradients:
            average_gradients(self._parameters, self._replicas)


class _RunningPass:
    """Autograd keeps what it has to call behind a pass, and lets go of it with a pass that ends in an error too."""

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = at_end
        self._noted: Callable[[], object] | None = None

    @property
    def has_failed(self) -> bool:
        return self._noted is not None and self._noted() is None

    @has_failed.setter
    def has_failed(self, has_failed: bool) -> None:
        self._noted = (lambda: None) if has_failed else None

    def note(self) -> bool:
        """Return whether it has just begun."""
        if self._noted is not None and self._noted() is not None:
            return False
        end = functools.partial(self.end)  # of each pass its own, which autograd alone keeps
        self._noted = weakref.ref(end)
        queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
        queue(end)
        return True

    def end(self) -> None:
        self.has_failed = False
        self._at_end()
