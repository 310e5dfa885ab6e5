"""Torch's side of a pipeline: stages and schedules of torch around ours, and what a rank waits for, by name."""

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
    """What the stages of this rank have asked others for, and do not have yet."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, int, int], Callable[[], str]] = {}  # by kind, stage and microbatch: what it is
        self._idle_since_s = time.monotonic()

    def ask(self, kind: str, stage: int, microbatch: int, what: Callable[[], str]) -> None:
        self._asked[kind, stage, microbatch] = what

    def take(self, kind: str, stage: int, microbatch: int) -> None:
        self._asked.pop((kind, stage, microbatch), None)

    def begin(self) -> None:
        """This rank computes nothing from now on, until it has what it waits for."""
        self._idle_since_s = time.monotonic()

    def clear(self) -> None:
        self._asked.clear()
        self.begin()

    def describe(self, schedule: Any) -> str:
        """What the schedule waits for: what it did not just ask for ahead, or that what it sent is taken."""
        ahead = {(kind, *key) for kind in ("fwd", "bwd") for key in getattr(schedule, f"{kind}_recv_ops", ())}
        now_s = time.monotonic() - self._idle_since_s
        awaited = (what() for key, what in self._asked.items() if key not in ahead)
        return f"{next(awaited, 'this rank waited for another to take what it sent')} for {now_s:.1f} s"


class TorchStage(PipelineStage):
    """A stage that gets the number of a microbatch, and looks up the rest.

    A pass without a backward one leaves gradients alone, and asks for none. For torch the stage is where its tensors
    are on their way; the module itself may be on another device.
    """

    passage: Passage
    microbatch: int  # the one that goes forward

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
        """``boundaries``: what comes into the second and each further stage, on the meta device.

        ``buffers``: those that the backward pass of a microbatch reads as they were when it went forward.
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
                    f"stage {self.stage_index} gives {given}, and {promised} was expected: the model gives for this "
                    "batch what cannot be told from its shapes; use batches like the example"
                )
            return output.to(self.device)
        self.passage.take(index, output)
        if isinstance(output, Tensor):
            return output
        leaves = tuple(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        return leaves if len(leaves) > 1 else leaves[0]

    def _require_values(self, output: Tensor) -> None:
        """Raises: SpecError for what torch would take to be sent, while the next stage waits for it."""
        if active_fake_mode() is not None:  # a rehearsal, of which nothing is sent
            return
        if isinstance(output, FakeTensor) or output.is_meta and self._device.type != "meta":
            raise SpecError(
                f"stage {self.stage_index} gives a {'fake' if isinstance(output, FakeTensor) else 'meta'} tensor, "
                "without values, which cannot be sent: something that it uses was kept from a pass on such tensors, as "
                "in a cache or a global: empty that, or make the model anew"
            )

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """Torch before 2.13 looks at what the last stage gives too, which is promised to nobody."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Torch before 2.13 lets neighbours greet each other, two on one rank too, which gloo cannot do."""
        greetings: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [each for each in greetings if each.peer != dist.get_rank()]

    # What is waited for is told by name where it does not come.

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
        if backward_type == "input":  # they are sent as they lie in memory; a whole backward pass lays them out itself
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
    """In here autograd keeps copies of these: another microbatch writes into them before this one's backward pass."""
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
            if exc.__cause__ is not None and "ailed to run" in str(exc):  # the user's own, without what torch adds
                raise exc.__cause__ from None
            if _is_of_waiting(exc):
                waited = self._waits.describe(self._schedule)
                exc.args = (f"{waited}, in vain: that rank failed, or does something else: {exc}",)
            raise
        finally:
            for stage in self._stages:
                stage.clear_runtime_states()
                del stage.passage

    def _loss(self, output: Any, number: Tensor) -> Tensor:
        loss = self._stages[-1].passage.losses[int(number)]
        if not loss.requires_grad:  # torch's schedules would leave its backward pass out
            raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
        return loss


def _is_of_waiting(exc: BaseException) -> bool:
    """Whether it was raised where a schedule waits for other ranks, and not in what it computes."""
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(exc.__traceback__)]
    return "_wait_batch_p2p" in frames


def look_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), str(leaf.dtype)
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__
