"""Batches through the stages of a split model, by any schedule that torch has.

torch.distributed.pipelining runs the schedules. Every rank has the whole batch, and cuts it into microbatches itself:
the schedule is given their numbers alone, so that masks, keywords and whole structures reach every stage. Shapes at the
boundaries are known beforehand, so no pass is run to find them. Each kind of batch (its shapes, with or without a
backward pass) has a schedule, and stages, of its own around the same modules.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_leaves, tree_map

from ...errors import SessionError, SpecError
from ..deferred import fill, is_deferred, require_values
from ..mesh import can_send_from
from ..microbatches import Loss, Passage
from ..model import Arrangement, ParallelModel, autocast_left
from .boundaries import Boundaries
from .schedules import Schedule, find_schedule
from .splitter import Split
from .tied import TiedParameters
from .written import WrittenBuffers

__all__ = ["PipelineStages"]

_MOST_PLANS = 4  # kept at once: each holds the buffers of its microbatches


class PipelineStages(ParallelModel):
    """The stages of a model that this rank runs, and what it takes to send batches through all of them.

    Parameters that several stages use have the sum of the gradients of these stages.
    """

    def __init__(
        self,
        found: Split,
        group: DeviceMesh | dist.ProcessGroup | None = None,
        *,
        loss: Loss | None = None,
        schedule: str | Schedule = "1F1B",
        num_microbatches: int | None = None,
        loss_weight: Callable[[Any], Tensor | float] | None = None,
        device: torch.device | str | None = None,
        arrangement: Arrangement | None = None,
    ) -> None:
        """Make this rank's stages of ``found`` on ``device``; it is one of ``group``, by default all ranks.

        ``loss(output, target)`` is a mean over what counts in its target, or, where it says so itself
        (``loss.reduction == "sum"``), a sum. ``loss_weight(target)`` is how much that is, by default the number of
        rows, or of targets that are not ``loss.ignore_index``. ``num_microbatches`` is by default two for each stage.
        ``schedule``: a name of ``SCHEDULES``, or a file ``*.csv``, the same on every rank (``WrittenSchedule``).

        ``arrangement``: how the stages lie on the other axes of a mesh; ``parallelize`` makes it.

        Collective: all ranks of ``group``, with the same arguments. Raises: SpecError.
        """
        self._group = group.get_group() if isinstance(group, DeviceMesh) else group or _all_ranks()
        num_ranks, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        self.schedule = find_schedule(schedule)
        self.num_stages = found.num_stages
        self.indices = self.schedule.stages_of_rank(rank, num_ranks=num_ranks, num_stages=self.num_stages)
        self.num_microbatches = num_microbatches or self.schedule.num_microbatches(self.num_stages)
        self.schedule.require_microbatches(self.num_microbatches, num_stages=self.num_stages)
        shared_inputs = found.profile.shared_inputs
        super().__init__(loss, loss_weight, device=device, arrangement=arrangement, shared_inputs=shared_inputs)
        self._require_same_cuts(found)
        self._link_device = self._find_link()
        require_values(found.model)
        self._boundaries = Boundaries(found, self.arrangement.boundary_dtype)
        self.tied_names = tuple(tuple(found.aliases(name)) for name in found.shared)
        prepare = self.arrangement.prepare
        stages = [found.stage(index) for index in self.indices]
        if is_deferred(found.model):  # of those that others have too the values are sent, so they are wanted here
            tied = {name for names in self.tied_names for name in names}
            fill(stages, device=self.device, names=None if prepare is None else tied)
        else:  # not stage.to(): it would take the parameters of the user's model along
            fill(stages, device=self.device)
        self.modules = self._called = tuple(stages)
        self._tied = TiedParameters(found, self.modules, self._group, self.schedule, link=self._link_device)
        if prepare is not None:
            lasts = (index == self.num_stages - 1 for index in self.indices)
            self._called = tuple(prepare(module, is_last) for module, is_last in zip(self.modules, lasts))
            self._tied.find_again(self.modules)
        self._written = WrittenBuffers(
            found, self.modules, self.indices, self._group, self.schedule, link=self._link_device
        )
        self._note_layout()
        self._plans: OrderedDict[Any, _Plan] = OrderedDict()

    def _require_same_cuts(self, found: Split) -> None:
        """Raises: SpecError, on every rank, where one would run other stages, or run them otherwise. Collective."""
        own = dist.get_rank(), ", ".join(found.cuts), self.schedule.fingerprint(), self.num_microbatches
        (first, cuts, order, count), *others = sorted(self.gather(own))
        for rank, other_cuts, other_order, other_count in others:
            if other_cuts != cuts:
                raise SpecError(
                    f"the model is cut at {other_cuts} on rank {rank}, and at {cuts} on rank {first}: take the cuts of "
                    "one of them (Split.cuts), and give them to all as pp= or at="
                )
            if other_order != order:
                raise SpecError(
                    f"the schedule of rank {rank} is not that of rank {first}: give all the same {self.schedule}"
                )
            if other_count != count:
                raise SpecError(
                    f"{other_count} microbatches on rank {rank}, and {count} on rank {first}: give all as many"
                )

    def _find_link(self) -> torch.device:
        """Where tensors are on their way to another stage: on the CPU, where stages are on unlike devices.

        Raises: SpecError, on every rank, where these would not agree what a layer gives.
        """
        kinds = set(self.gather(self.device.type, of_one_copy=True))
        if len(kinds) > 1 and self.arrangement.autocast is not None:
            raise SpecError(
                f"bf16 beside stages on {' and '.join(sorted(kinds))}: autocast gives the output of some layers in "
                "float32 on one of them alone; use precision='fp32' there, or a model whose parameters are bfloat16"
            )
        is_direct = len(kinds) == 1 and can_send_from(self.device.type, self._group)
        return self.device if is_direct else torch.device("cpu")

    @property
    def link_device(self) -> torch.device:
        return self._link_device

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        return self._group

    @property
    def is_first(self) -> bool:
        return 0 in self.indices

    @property
    def is_last(self) -> bool:
        return self.num_stages - 1 in self.indices

    def own_parameters(self) -> Iterator[nn.Parameter]:
        yield from (parameter for parameter in self.parameters() if not self._tied.is_of_earlier(parameter))

    def share_statistics(self) -> None:
        super().share_statistics()
        self._written.share()

    # ---- a batch

    def _gradients_added_up(self) -> contextlib.AbstractContextManager[None]:
        return self._tied.added_up()

    def _send(self, passage: Passage, *, is_training: bool) -> None:
        key = self._key_of(passage.parts[0], len(passage.parts), is_training=is_training)
        plan = self._plan_for(key, passage.parts[0], len(passage.parts), is_training=is_training)
        try:
            plan.step(passage)
        except BaseException:  # it stands in the middle of a step
            self._plans.pop(key, None)
            raise

    def _count_microbatches(self, rows: int) -> int:
        """As many as wanted, or the next smaller number that cuts the batch into equal parts."""
        wanted = min(self.num_microbatches, rows)
        num_ranks = dist.get_world_size(self._group)
        fit = (number for number in range(wanted, 0, -1) if rows % number == 0)
        return next(number for number in fit if self.schedule.accepts(number, num_ranks=num_ranks))

    def _key_of(self, part: tuple[Any, Any], count: int, *, is_training: bool) -> tuple[Any, ...]:
        """Of batches that take the same way: shapes and dtypes on it are equal."""
        kind = self._device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        return repr(tree_map(_look_of, part)), count, is_training, autocast

    def _plan_for(self, key: tuple[Any, ...], part: tuple[Any, Any], count: int, *, is_training: bool) -> _Plan:
        if key in self._plans:
            self._plans.move_to_end(key)
        else:
            boundaries = self._boundaries.find(*part, is_training=is_training)
            if self._boundaries.rewrites_parameters:  # what fails for that, and runs again, would write twice
                for module in self.modules:
                    module.be_careful()  # type: ignore[operator]
            stages = [
                _Stage(module, index, self.num_stages, self.device, self.link_device, self._group, boundaries)
                for index, module in zip(self.indices, self._called)
            ]
            self._plans[key] = _Plan(stages, self.schedule, count, is_training=is_training)
            while len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)
        return self._plans[key]


def _all_ranks() -> dist.ProcessGroup:
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise SessionError("a pipeline needs a process group: start the session with one, or call init_process_group()")
    return dist.group.WORLD


def _look_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), str(leaf.dtype)
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__


# ---- torch's side


class _Stage(PipelineStage):
    """A stage that gets the number of a microbatch, and looks up the rest.

    A pass without a backward one leaves gradients alone, and asks for none. For torch the stage is where its tensors
    are on their way; the module itself may be on another device.
    """

    passage: Passage

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        device: torch.device,
        link: torch.device,
        group: dist.ProcessGroup,
        boundaries: Sequence[Tensor],
    ) -> None:
        """``boundaries``: what comes into the second and each further stage, on the meta device."""
        inputs = (boundaries[index - 1],) if index else ()
        outputs = boundaries[index] if index + 1 < num_stages else torch.empty(1, device="meta", requires_grad=True)
        super().__init__(module, index, num_stages, link, input_args=inputs, output_args=(outputs,), group=group)
        self._promised = outputs
        self._device = device

    def forward_maybe_with_nosync(self, *received: Tensor, microbatch: Tensor) -> Any:
        index = int(microbatch)
        args, kwargs = self.passage.parts[index]
        here = (tensor.to(self._device) for tensor in received)
        output = super().forward_maybe_with_nosync(*here, *args, **kwargs)  # type: ignore[no-untyped-call]
        if not self.is_last:
            if (output.shape, output.dtype) != (self._promised.shape, self._promised.dtype):
                given, promised = _look_of(output), _look_of(self._promised)
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


class _Plan:
    """A schedule over stages of its own, for batches of one kind."""

    def __init__(self, stages: Sequence[_Stage], schedule: Schedule, count: int, *, is_training: bool) -> None:
        self._stages = stages
        self._numbers = torch.arange(count)
        self._schedule = schedule.make(stages, count, self._loss if is_training else None)

    def step(self, passage: Passage) -> None:
        for stage in self._stages:
            stage.passage = passage
        try:
            self._schedule.step(microbatch=self._numbers, target=self._numbers, return_outputs=False)
        except RuntimeError as exc:
            if exc.__cause__ is not None and "ailed to run" in str(exc):  # the user's own, without what torch adds
                raise exc.__cause__ from None
            raise
        finally:
            for stage in self._stages:
                stage.clear_runtime_states()
                del stage.passage

    def _loss(self, output: Any, number: Tensor) -> Tensor:
        return self._stages[-1].passage.weighted_loss(int(number))
