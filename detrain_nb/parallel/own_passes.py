"""Backward passes in a user's own loop. Over replicas, DDP takes no part, as it expects one pass for each parameter."""

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
    "a backward pass failed or was stopped while {whose} was working, so further gradients would be wrong: "
    "recreate the model, lay it out again, and load its checkpoint"
)


class ReplicatedPasses:
    """Averages gradients over all replicas after each backward pass that reaches a parameter.

    Gradients are equal on all replicas before a pass, so their mean afterwards is right, whatever produced them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], replicas: Sequence[dist.ProcessGroup]) -> None:
        self._parameters, self._state = parameters, _State(parameters, replicas)
        # Nodes live only while referenced here; their hooks do not refer to them.
        self._nodes: dict[nn.Parameter, Node] = {}

    def follow(self, outputs: Sequence[Tensor]) -> None:
        """Watch passes through the ``outputs`` of a call, and parameters that have become trainable."""
        for parameter in self._parameters:
            if parameter.requires_grad and parameter not in self._nodes:
                self._nodes[parameter] = node = get_gradient_edge(parameter).node
                node.register_prehook(self._state.on_gradient)
        _hook_into(outputs, self._state.on_pass)

    @contextlib.contextmanager
    def left_to_ddp(self) -> Iterator[None]:
        """Ignore passes in the block: they are those of `train_step`."""
        self._state.is_left = True
        try:
            yield
        finally:
            self._state.is_left = False


class ShardedPasses:
    """Refuses what FSDP2 would compute wrongly: gradients of gradients, and anything after a failed pass."""

    def __init__(self) -> None:
        self._running = _RunningPass(lambda: None)

    def follow(self, outputs: Sequence[Tensor]) -> None:
        """Watch passes through the ``outputs`` of a call."""
        _hook_into(outputs, self._on_pass)

    def note_failure(self) -> None:
        """Note the failure of a pass that was not watched."""
        self._running.has_failed = True

    def require_no_failure(self) -> None:
        """Raise SpecError if an earlier pass failed."""
        if self._running.has_failed:
            raise SpecError(FAILED.format(whose="FSDP2"))

    def _on_pass(self, gradients: Any) -> None:
        self.require_no_failure()
        self._running.note()
        if torch.is_grad_enabled():
            raise SpecError(
                "create_graph=True asks for gradients of gradients, but FSDP2 has freed the gathered parameters that "
                "they need: lay the model out without dp_shard (dp_replicate, tp)"
            )


def _hook_into(outputs: Sequence[Tensor], hook: Callable[[Any], None]) -> None:
    for node in {output.grad_fn for output in outputs if output.grad_fn is not None}:
        node.register_prehook(hook)


class _State:
    """State shared by the hooks of passes; ``is_left``: passes are ignored."""

    def __init__(self, parameters: Sequence[nn.Parameter], replicas: Sequence[dist.ProcessGroup]) -> None:
        self._parameters, self._replicas = parameters, replicas
        self._running = _RunningPass(self._end)
        self.is_left = self._has_gradients = False

    def on_pass(self, gradients: Any) -> None:
        """Handle a pass that reaches a call's output. Passes of checkpoints inside it belong to it."""
        if not self.is_left and self._running.note():
            self._has_gradients = False

    def on_gradient(self, gradients: Any) -> None:
        """Handle a pass that reaches a parameter, not only an input, as with `torch.autograd.grad`."""
        if not self.is_left and torch.is_grad_enabled():
            raise SpecError(
                "backward(create_graph=True) was called over replicas, but the graph of a gradient exists on this "
                "replica alone and cannot be averaged: call torch.autograd.grad(..., create_graph=True), then "
                "backward() on what is computed from it"
            )
        self.on_pass(gradients)
        self._has_gradients = True

    def _end(self) -> None:
        if self._has_gradients:
            average_gradients(self._parameters, self._replicas)


class _RunningPass:
    """The pass that runs, if any: autograd holds its final callback, and drops it when the pass ends or fails."""

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
        """Note the running pass; return whether it has just begun."""
        if self._noted is not None and self._noted() is not None:
            return False
        end = functools.partial(self.end)  # one for each pass, kept alive by autograd alone
        self._noted = weakref.ref(end)
        queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
        queue(end)
        return True

    def end(self) -> None:
        self.has_failed = False
        self._at_end()
