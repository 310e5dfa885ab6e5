"""Batches through the stages of a split model, with any of torch's schedules.

torch.distributed.pipelining runs the schedules. Every rank has the whole batch and cuts it into microbatches itself:
the schedule gets only their numbers, so masks, keywords and whole structures reach every stage. Shapes at the
boundaries are known beforehand, so no pass is needed to find them. Each kind of batch (its shapes, with or without a
backward pass) has its own schedule and torch stages around the same modules.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from ...errors import SessionError, SpecError
from ..arguments import fails_on_a_part
from ..deferred import fill, is_deferred, require_values
from ..losses import Loss, require_no_parameters
from ..mesh import can_send_from
from ..microbatches import Passage
from ..model import Arrangement, ParallelModel
from .boundaries import Boundaries
from .running import Plan, TorchStage, Waits, look_of
from .schedules import Schedule, find_schedule
from .shared import TiedParameters, WrittenBuffers
from .splitter import Split

_MOST_PLANS = 4  # kept at once: each holds the buffers of its microbatches


class PipelineStages(ParallelModel):
    """Stages of a model that this rank runs, and what is needed to send batches through all stages.

    Parameters that several stages use get the sum of these stages' gradients.
    """

    pipeline_group: dist.ProcessGroup

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
        boundaries: Boundaries | None = None,
    ) -> None:
        """Make this rank's stages of ``found`` on ``device``; the rank is one of ``group``, by default all ranks.

        ``loss(output, target)`` is a mean over the entries of its target that count, or a sum, with
        ``loss.reduction == "sum"``. ``loss_weight(target)`` is the number of those entries, by default the number of
        rows, or of targets that are not ``loss.ignore_index``. ``num_microbatches`` is by default two for each stage.
        ``schedule``: a name in ``SCHEDULES``, or a file ``*.csv``, the same on every rank (``WrittenSchedule``).

        ``arrangement``: how the stages are laid out on the other axes of a mesh; ``parallelize`` makes it.
        ``boundaries``: finds the shapes between stages, if already made.

        Collective: all ranks of ``group``, with the same arguments.
        Raises: SpecError if ranks cut or schedule the model differently, or the schedule cannot run it.
        """
        self.pipeline_group = group.get_group() if isinstance(group, DeviceMesh) else group or _all_ranks()
        num_ranks, rank = dist.get_world_size(self.pipeline_group), dist.get_rank(self.pipeline_group)
        if num_ranks > 1:
            require_no_parameters(loss, found.model)
        self.schedule = find_schedule(schedule)
        self.num_stages = found.num_stages
        self.indices = self.schedule.stages_of_rank(rank, num_ranks=num_ranks, num_stages=self.num_stages)
        self.num_microbatches = num_microbatches or self.schedule.num_microbatches(self.num_stages)
        self.schedule.require_microbatches(self.num_microbatches, num_stages=self.num_stages, num_ranks=num_ranks)
        if self.num_microbatches > 1 and (layer := found.profile.cut_along_time):
            raise SpecError(
                f"{layer} has batch_first=False, so it takes the first dimension, along which batches are cut, for "
                "time: make the layer with batch_first=True, give inputs of (batch, time, ...) that the model "
                "transposes, or num_microbatches=1"
            )
        shared_inputs = found.profile.shared_inputs
        super().__init__(loss, loss_weight, device=device, arrangement=arrangement, shared_inputs=shared_inputs)
        self._require_same_cuts(found)
        self.link_device = self._find_link()
        require_values(found.model)
        self._boundaries = boundaries or Boundaries(found, self.arrangement.boundary_dtype)
        self.tied_names = tuple(tuple(found.aliases(name)) for name in found.shared)
        prepare = self.arrangement.prepare
        stages = [found.stage(index) for index in self.indices]
        if is_deferred(found.model):  # values of shared parameters are sent, so they are needed here
            tied = {name for names in self.tied_names for name in names}
            fill(stages, device=self.device, names=None if prepare is None else tied)
        else:  # not stage.to(): it would move the parameters of the user's model too
            fill(stages, device=self.device)
        self.modules = self.called = tuple(stages)
        rank_of = {
            stage: each
            for each in range(num_ranks)
            for stage in self.schedule.stages_of_rank(each, num_ranks=num_ranks, num_stages=self.num_stages)
        }
        self._tied = TiedParameters(found, self.modules, self.pipeline_group, rank_of, link=self.link_device)
        if prepare is not None:
            lasts = (index == self.num_stages - 1 for index in self.indices)
            self.called = tuple(prepare(module, is_last) for module, is_last in zip(self.modules, lasts))
            self._tied.find_again(self.modules)
        self._written = WrittenBuffers(
            found, self.modules, self.indices, self.pipeline_group, rank_of, link=self.link_device
        )
        self._buffers_saved = found.profile.buffers_saved
        self._note_layout()
        self._warn_of_nothing_to_train(found)
        self._plans: OrderedDict[Any, Plan] = OrderedDict()

    def _require_same_cuts(self, found: Split) -> None:
        """Raise SpecError on every rank if cuts, schedules or numbers of microbatches differ. Collective."""
        own = dist.get_rank(), ", ".join(found.cuts), self.schedule.fingerprint(), self.num_microbatches
        (first, cuts, order, count), *others = sorted(self.gather(own))
        for rank, other_cuts, other_order, other_count in others:
            if other_cuts != cuts:
                raise SpecError(
                    f"the model is cut at {other_cuts} on rank {rank}, but at {cuts} on rank {first}: take the cuts "
                    "of one of them (Split.cuts) and give them to all ranks as pp= or at="
                )
            if other_order != order:
                raise SpecError(
                    f"the schedule of rank {rank} differs from that of rank {first}: give all ranks the same "
                    f"{self.schedule}"
                )
            if other_count != count:
                raise SpecError(
                    f"{other_count} microbatches on rank {rank}, but {count} on rank {first}: give all ranks the same "
                    "num_microbatches"
                )

    def _warn_of_nothing_to_train(self, found: Split) -> None:
        """Warn a rank whose optimizer would have no parameters although other ranks have some to train."""
        if any(parameter.requires_grad for parameter in self.parameters()):
            return
        if any(parameter.requires_grad for parameter in found.model.parameters()):
            begins = [("the start", *found.cuts)[index] for index in self.indices]
            one = len(begins) == 1
            named = " and ".join(f"{index} (from {begin} on)" for index, begin in zip(self.indices, begins))
            has = "no parameters" if not any(True for _ in self.parameters()) else "no trainable parameters"
            warnings.warn(
                f"stage{'' if one else 's'} {named} ha{'s' if one else 've'} {has}, but torch's optimizers refuse an "
                "empty list: use fewer stages, cut elsewhere, or make no optimizer on this rank",
                stacklevel=3,
            )

    def _find_link(self) -> torch.device:
        """Return the device from which tensors are sent to other stages: the CPU if stages are on different devices.

        Raises: SpecError, on every rank, if those devices would return a layer's output in different dtypes.
        """
        kinds = set(self.gather(self.device.type, of_one_copy=True))
        if len(kinds) > 1 and self.arrangement.autocast is not None:
            raise SpecError(
                f"bf16 is not supported with stages on {' and '.join(sorted(kinds))}: autocast returns the output of "
                "some layers in float32 on only one of them; use precision='fp32', or a model with bfloat16 "
                "parameters"
            )
        is_direct = len(kinds) == 1 and can_send_from(self.device.type, self.pipeline_group)
        return self.device if is_direct else torch.device("cpu")

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

    def _make_ready(self, passage: Passage) -> None:
        self._plan_for(self._key_of(passage, is_training=True), passage, is_training=True)

    def _send(self, passage: Passage, *, is_training: bool) -> None:
        key = self._key_of(passage, is_training=is_training)
        if is_training and key not in self._plans and not self._has_trainable():
            raise RuntimeError("element 0 of tensors does not require grad: all parameters of the model are frozen")
        plan = self._plan_for(key, passage, is_training=is_training)
        try:
            plan.step(passage)
        except BaseException:  # the plan is left in the middle of a step
            self._plans.pop(key, None)
            raise

    def _accepts(self, count: int) -> bool:
        return self.schedule.accepts(count, num_ranks=dist.get_world_size(self.pipeline_group))

    def _key_of(self, passage: Passage, *, is_training: bool) -> tuple[Any, ...]:
        """Return a key that is equal for batches with equal shapes and dtypes at all boundaries."""
        kind = self.device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        return repr(tree_map(look_of, passage.parts[0])), len(passage.parts), is_training, autocast

    def _has_trainable(self) -> bool:
        """Return whether any stage has a trainable parameter. Collective: all ranks of this replica."""
        own = any(parameter.requires_grad for parameter in self.parameters())
        return any(self.gather(own, of_one_copy=True))

    def _plan_for(self, key: tuple[Any, ...], passage: Passage, *, is_training: bool) -> Plan:
        part, count = passage.parts[0], len(passage.parts)
        if key in self._plans:
            self._plans.move_to_end(key)
        else:
            with fails_on_a_part(count):
                boundaries, waits = self._boundaries.find(*part, is_training=is_training), Waits()
            if self._boundaries.rewrites_parameters:  # a pass that fails for that and is repeated would write twice
                for module in self.modules:
                    module.be_careful()  # type: ignore[operator]
            stages = [
                TorchStage(
                    called,
                    index,
                    self.num_stages,
                    self.device,
                    self.link_device,
                    self.pipeline_group,
                    boundaries,
                    waits,
                    functools.partial(self._buffers_to_keep, module) if is_training and count > 1 else tuple,
                )
                for index, called, module in zip(self.indices, self.called, self.modules)
            ]
            self._plans[key] = Plan(stages, self.schedule, count, waits, is_training=is_training)
            while len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)
        return self._plans[key]

    def _buffers_to_keep(self, module: nn.Module) -> list[Tensor]:
        named = module.named_buffers(remove_duplicate=False) if self._buffers_saved else ()
        return [buffer for name, buffer in named if name in self._buffers_saved]


def _all_ranks() -> dist.ProcessGroup:
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise SessionError("a pipeline needs a process group: start the session with one, or call init_process_group()")
    return dist.group.WORLD
