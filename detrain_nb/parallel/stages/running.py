"""Torch's side of a pipeline: torch's stages and schedules around ours, and names for what a rank waits for."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_leaves

from ...errors import SpecError
from ..microbatches import Passage
from ..model import autocast_left
from ..operators import storage_of
from .schedules import Schedule


class Waits:
    """Tensors that the stages of this rank have requested from others and not received yet."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, int, int], Callable[[], str]] = {}  # by kind, stage and microbatch: a description
        self._idle_since_s = time.monotonic()

    def ask(self, kind: str, stage: int, microbatch: int, what: Callable[[], str]) -> None:
        self._asked[kind, stage, microbatch] = what

    def take(self, kind: str, stage: int, microbatch: int) -> None:
        self._asked.pop((kind, stage, microbatch), None)

    def begin(self) -> None:
        """Note that this rank computes nothing from now on, until it gets what it waits for."""
        self._idle_since_s = time.monotonic()

    def clear(self) -> None:
        self._asked.clear()
        self.begin()

    def describe(self, schedule: Any) -> str:
        """Describe what the schedule waits for: a tensor not merely requested ahead, or the receipt of what it sent."""
        ahead = {(kind, *key) for kind in ("fwd", "bwd") for key in getattr(schedule, f"{kind}_recv_ops", ())}
        now_s = time.monotonic() - self._idle_since_s
        awaited = (what() for key, what in self._asked.items() if key not in ahead)
        return f"{next(awaited, 'this rank waited for another to receive what it sent')} for {now_s:.1f} s"


class TorchStage(PipelineStage):
    """Stage that gets the number of a microbatch and looks up its arguments.

    A pass without backward leaves gradients alone and requests none. To torch, the stage's device is the one from which
    tensors are sent; the module itself may be on another device.
    """

    passage: Passage
    microbatch: int  # the one in its forward pass

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        device: torch.device,
        link: torch.device,
        group: dist.ProcessGroup,
        boundaries: Sequence[Tensor],
        waits: Waits,
        buffers: Callable[[], Sequence[Tensor]] = tuple,
    ) -> None:
        """Wrap ``module``; ``boundaries``: inputs of the second and each later stage, on the meta device.

        ``buffers``: returns the buffers that a microbatch's backward pass reads as they were in its forward pass.
        """
        inputs = (boundaries[index - 1],) if index else ()
        outputs = boundaries[index] if index + 1 < num_stages else torch.empty(1, device="meta", requires_grad=True)
        super().__init__(module, index, num_stages, link, input_args=inputs, output_args=(outputs,), group=group)
        self._promised = outputs
        self._own_group = group
        self._device = device
        self._waits = waits
        self._buffers = buffers

    def forward_maybe_with_nosync(self, *received: Tensor) -> Any:
        index = self.microbatch
        args, kwargs = self.passage.parts[index]
        here = (tensor.to(self._device) for tensor in received)
        with _saved_apart(self._buffers()):
            output = super().forward_maybe_with_nosync(*here, *args, **kwargs)  # type: ignore[no-untyped-call]
        if not self.is_last:
            self._require_values(output)
            if (output.shape, output.dtype) != (self._promised.shape, self._promised.dtype):
                given, promised = look_of(output), look_of(self._promised)
                raise SpecError(
                    f"stage {self.stage_index} returned {given}, but {promised} was expected: the output for this "
                    "batch does not follow from its shapes; use batches like the example"
                )
            return output.to(self.device)
        self.passage.take(index, output)
        if isinstance(output, Tensor):
            return output
        leaves = tuple(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        return leaves if len(leaves) > 1 else leaves[0]

    def _require_values(self, output: Tensor) -> None:
        """Raise SpecError for a tensor that torch would count as sent while the next stage still waits for it."""
        if active_fake_mode() is not None:  # a rehearsal, which sends nothing
            return
        if isinstance(output, FakeTensor) or output.is_meta and self._device.type != "meta":
            raise SpecError(
                f"stage {self.stage_index} returned a {'fake' if isinstance(output, FakeTensor) else 'meta'} tensor, "
                "which has no values to send: it uses something kept from a pass on such tensors, in a cache or a "
                "global; clear that, or recreate the model"
            )

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """Skip the check: torch before 2.13 also checks the last stage's output, which no stage receives."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Drop greetings within a rank: torch before 2.13 has neighbours greet each other, which gloo cannot do."""
        greetings: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [each for each in greetings if each.peer != dist.get_rank()]

    # What does not arrive is named in the error.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_recv_ops(fwd_chunk_id)
        if ops:
            self._ask("fwd", fwd_chunk_id, self.stage_index - 1)
        return ops

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_bwd_recv_ops(bwd_chunk_id)
        if ops:
            self._ask("bwd", bwd_chunk_id, self.stage_index + 1)
        return ops

    def _ask(self, kind: str, microbatch: int, other: int) -> None:
        def words() -> str:
            rank = dist.get_global_rank(self._own_group, self.stage_index_to_group_rank[other])
            what = f"{'the gradient of ' if kind == 'bwd' else ''}microbatch {microbatch}"
            return f"stage {self.stage_index} waited for {what} from stage {other} on rank {rank}"

        self._waits.ask(kind, self.stage_index, microbatch, words)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._waits.take("fwd", self.stage_index, fwd_chunk_id)
        self.microbatch = fwd_chunk_id
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._waits.begin()
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._waits.take("bwd", self.stage_index, bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._waits.begin()

    def backward_maybe_with_nosync(self, backward_type: str, *args: Any, **kwargs: Any) -> Any:
        with autocast_left(self._device):
            gradients, groups = super().backward_maybe_with_nosync(backward_type, *args, **kwargs)
        if backward_type == "input":  # sent as laid out in memory; a full backward makes them contiguous
            gradients = tuple(None if each is None else each.contiguous() for each in gradients)
        return gradients, groups

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return [] if self.is_last else super().get_fwd_send_ops(fwd_chunk_id)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def scale_grads(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            super().scale_grads(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)


def _saved_apart(buffers: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
    """Have autograd save copies of ``buffers``: other microbatches write into them before this one's backward."""
    if not buffers or not torch.is_grad_enabled():
        return contextlib.nullcontext()
    storages = {storage_of(buffer) for buffer in buffers}

    def pack(tensor: Tensor) -> Tensor:
        return tensor.detach().clone() if storage_of(tensor) in storages else tensor

    return saved_tensors_hooks(pack, lambda tensor: tensor)


class Plan:
    """A schedule over stages of its own, for batches of one kind."""

    def __init__(
        self, stages: Sequence[TorchStage], schedule: Schedule, count: int, waits: Waits, *, is_training: bool
    ) -> None:
        self._stages, self._waits = stages, waits
        self._numbers = torch.arange(count)
        self._schedule = schedule.make(stages, count, self._loss if is_training else None)

    def step(self, passage: Passage) -> None:
        for stage in self._stages:
            stage.passage = passage
        self._waits.clear()
        try:
            self._schedule.step(target=self._numbers, return_outputs=False)
        except RuntimeError as exc:
            if exc.__cause__ is not None and "ailed to run" in str(exc):  # raise the user's error alone
                raise exc.__cause__ from None
            if _is_of_waiting(exc):
                waited = self._waits.describe(self._schedule)
                exc.args = (f"{waited}, without success: that rank failed or is doing something else: {exc}",)
            raise
        finally:
            for stage in self._stages:
                stage.clear_runtime_states()
                del stage.passage

    def _loss(self, output: Any, number: Tensor) -> Tensor:
        loss = self._stages[-1].passage.losses[int(number)]
        if not loss.requires_grad:  # torch's schedules would skip its backward pass
            raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
        return loss


def _is_of_waiting(exc: BaseException) -> bool:
    """Return whether the error was raised while a schedule waited for other ranks, not in a computation."""
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(exc.__traceback__)]
    return "_wait_batch_p2p" in frames


def look_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), str(leaf.dtype)
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__
