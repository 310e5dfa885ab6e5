"""What a model over several ranks offers, however it is split: batches go in, losses and gradients come out."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..errors import SpecError
from .costs.profiler import ExampleInputs, as_call
from .kinds import KnownKinds
from .limits import LaterHooks
from .losses import Loss
from .mesh import usual_device
from .microbatches import Passage, cut_batch, cut_call, require_rows_in_tensors, rows_of
from .objective import Objective
from .replicated import average_gradients, averaged, replicated_in
from .running import RunningBuffers

_GIVE_LOSS = (
    "pass loss=, a function of the output and the target, to parallelize (or to the Trainer, for a plain model)"
)
# Shards a rank's module in place. Takes the module and whether it computes the model's output; returns the module to
# call instead, as DDP wraps the module in another.
Prepare = Callable[[nn.Module, bool], nn.Module]


@dataclass(frozen=True)
class Arrangement:
    """How a model is laid out on the axes of its mesh other than ``pp``; ``parallelize`` makes it.

    ``replicas``: this rank's group on each axis along which ranks have different data; ``tensor_group``: the ranks that
    have the other parts of the same layers. ``prepare``: cuts and shards a rank's module. ``autocast``: the dtype to
    compute in; ``boundary_dtype``: the dtype of tensors between stages, if it is not the model's own.
    ``is_loss_parallel``: each rank of ``tensor_group`` has its part of the classes.
    """

    replicas: tuple[dist.ProcessGroup, ...] = ()
    tensor_group: dist.ProcessGroup | None = None
    prepare: Prepare | None = None
    autocast: torch.dtype | None = None
    boundary_dtype: torch.dtype | None = None
    is_loss_parallel: bool = False


class ParallelModel(abc.ABC):
    """A model of which this rank has a part or a copy: a ``PipelineStages`` or a ``WholeModel``.

    ``modules`` are this rank's, with the parameter names of the whole model. Gradients are those of the loss over the
    whole batch of all ranks, even if parts of the batch have different weights; they are added to existing gradients,
    as in ``backward()``.
    """

    modules: tuple[nn.Module, ...]
    called: tuple[nn.Module, ...]  # in place of ``modules``
    num_microbatches: int
    tied_names: Sequence[Sequence[str]] = ()  # names of one shared parameter, in the whole model
    list_lengths: Mapping[str, int] | None = None  # of the lists in the example inputs
    known_kinds: KnownKinds | None = None  # kinds of arguments, under a tensor plan
    called_with: frozenset[str] | None = None  # keywords of the example inputs, if there were any
    device: torch.device  # where this rank computes
    link_device: torch.device  # where tensors are that this rank sends along its pipeline
    pipeline_group: dist.ProcessGroup | None = None  # the ranks that have the other stages

    def __init__(
        self,
        loss: Loss | None,
        loss_weight: Callable[[Any], Tensor | float] | None,
        *,
        device: torch.device | str | None,
        arrangement: Arrangement | None,
        shared_inputs: Collection[str],
    ) -> None:
        """Note the loss and the layout; ``shared_inputs``: places of tensors in a call that no microbatch cuts."""
        self._shared_inputs = shared_inputs
        self.device = self.link_device = torch.device(device) if device is not None else usual_device()
        self.arrangement = arrangement or Arrangement()
        self.objective = Objective(
            loss,
            loss_weight,
            replicas=self.arrangement.replicas,
            device=self.device,
            is_in_parts=self.arrangement.is_loss_parallel,
        )
        self._is_evaluating = False
        self._modes: list[bool] = []

    @property
    @abc.abstractmethod
    def is_first(self) -> bool:
        """Whether this rank passes the batch to the model."""

    @property
    @abc.abstractmethod
    def is_last(self) -> bool:
        """Whether this rank has the model's output, and so the loss."""

    @property
    def is_main(self) -> bool:
        """Whether this rank is the first of all ranks of the model."""
        inner = (self.pipeline_group, self.arrangement.tensor_group)
        return self.replica == 0 and all(group is None or dist.get_rank(group) == 0 for group in inner)

    def gather(self, value: Any, *, of_one_copy: bool = False) -> list[Any]:
        """Return the values of all ranks of the model, or of this replica. Collective: these ranks."""
        values = [value]
        outer = () if of_one_copy else self.arrangement.replicas
        for group in (self.pipeline_group, self.arrangement.tensor_group, *outer):
            if group is not None:
                every: list[list[Any]] = [values] * dist.get_world_size(group)
                dist.all_gather_object(every, values, group=group)
                values = [each for part in every for each in part]
        return values

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is set on any rank of the model. Collective: all ranks of the model."""
        told = torch.tensor(float(flag), device=self.link_device)
        groups = (self.pipeline_group, self.arrangement.tensor_group, *self.arrangement.replicas)
        for group in groups:
            if group is not None:
                dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        return bool(told)

    def back_to_training(self) -> None:
        """Give every module the training mode that it had before the first evaluation."""
        self._set_mode(is_training=True)

    @property
    def num_replicas(self) -> int:
        """Number of copies of the model, or of its stages and shards, that work on different data."""
        return self.objective.num_replicas

    @property
    def replica(self) -> int:
        """Number of the replica that this rank belongs to."""
        return self.objective.replica

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank, for its optimizer."""
        yield from (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, each once, with their names in the whole model."""
        met: set[int] = set()
        for module in self.modules:
            for name, parameter in module.named_parameters():
                if id(parameter) not in met:
                    met.add(id(parameter))
                    yield name, parameter

    def own_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that no earlier rank of the pipeline has, so that its ranks together yield each once."""
        yield from self.parameters()

    def train_step(self, batch: ExampleInputs, target: Any = None) -> Tensor | None:
        """Run a batch forward and backward; return its whole loss on the last stage's rank, None on the others.

        ``batch`` is what the model is called with. ``target`` goes to the loss; leave it out if the loss uses only the
        output, as with a model that is given labels. In both, tensors with the batch's first dimension are cut, and
        everything else goes to each microbatch. Collective: all ranks of the model; the ranks of one replica (of a
        pipeline, of a tensor parallel group) pass the same batch. Raises: SpecError when there is no loss, the loss
        cannot take the target, the batch cannot be cut, or gradients are disabled.
        """
        if self.objective.loss is None:
            raise SpecError(f"there is no loss to train with: {_GIVE_LOSS}")
        self.objective.require_target(target)
        if not torch.is_grad_enabled():
            raise SpecError("train_step was called under torch.no_grad(): call it outside, or call evaluate")
        with self._gradients_completed():
            return self.objective.over_replicas(self._run(batch, target, is_training=True).loss)

    def evaluate(self, batch: ExampleInputs, target: Any = None) -> Tensor | None:
        """Return the loss of a batch on the last stage's rank, None on the others; gradients are left as they are.

        Arguments, collective and errors are those of ``train_step``. The model stays in evaluation mode until the next
        ``train_step`` or ``back_to_training``.
        """
        if self.objective.loss is None:
            raise SpecError(f"there is no loss to evaluate: {_GIVE_LOSS}, or call predict")
        self.objective.require_target(target)
        with torch.no_grad():
            return self.objective.over_replicas(self._run(batch, target, is_training=False).loss)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model in a training loop of your own, unless it is a pipeline. Raises: SpecError."""
        raise SpecError(
            "pipeline stages cannot be called: use train_step to run a batch forward and backward (with loss= of "
            "parallelize), evaluate and predict to run it without gradients"
        )

    def predict(self, batch: ExampleInputs) -> Any:
        """Return the model's output for this replica's batch on the last stage's rank, None on the others.

        Needs no loss; gradients are left as they are. The model stays in evaluation mode, as after ``evaluate``.
        Collective: all ranks of the model; the ranks of one replica pass the same batch. Raises: SpecError.
        """
        with torch.no_grad():
            return self._run(batch, None, is_training=False, has_loss=False).output()

    def rehearse(self, passage: Passage, around: contextlib.AbstractContextManager[None]) -> None:
        """Train on a batch that is already cut and weighted, inside ``around``, which sees this rank's work only."""
        self._set_mode(is_training=True)
        with self.surroundings():
            self._make_ready(passage)
            with around, self._gradients_completed():
                self._send(passage, is_training=True)

    # ---- a batch

    def _make_ready(self, passage: Passage) -> None:  # noqa: B027 - most models keep nothing
        """Prepare what is kept between batches of this kind, for training."""

    @abc.abstractmethod
    def _send(self, passage: Passage, *, is_training: bool) -> None:
        """Run all parts forward and, when training, backward."""

    def _count_microbatches(self, rows: int) -> int:
        """Return ``num_microbatches``, or the next smaller number that cuts ``rows`` into equal parts."""
        fit = (number for number in range(min(self.num_microbatches, rows), 0, -1) if rows % number == 0)
        return next(filter(self._accepts, fit))

    def _accepts(self, count: int) -> bool:
        """Return whether a batch may be cut into ``count`` parts."""
        return True

    def _note_layout(self) -> None:
        """Note the layout once ``modules`` are laid out, before anything is computed with them."""
        self._replicated = replicated_in(self.modules)
        is_sharded = any(isinstance(module, FSDPModule) for module in self.modules)
        hooked = self.named_parameters() if self.arrangement.replicas else ()
        self._later_hooks = LaterHooks(hooked, axis="dp_shard" if is_sharded else "dp_replicate")
        self._trained_at_first = {parameter for parameter in self.parameters() if parameter.requires_grad}
        self._running = RunningBuffers(self.modules, device=self.device)

    @contextlib.contextmanager
    def _gradients_completed(self) -> Iterator[None]:
        """Average and add up the gradients, computed in the block, of parameters that replicas and stages share.

        Collective: all ranks of the model.
        """
        self._later_hooks.require_none()
        with averaged(self._replicated, self.arrangement.replicas), self._gradients_added_up():
            yield
        average_gradients(self._trained_later(), self.arrangement.replicas)

    def _trained_later(self) -> list[nn.Parameter]:
        """Return parameters that were frozen when DDP was made, which therefore misses them; FSDP2 does not."""
        if not self.arrangement.replicas or any(isinstance(module, FSDPModule) for module in self.modules):
            return []
        return [each for each in self.parameters() if each.requires_grad and each not in self._trained_at_first]

    def _gradients_added_up(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _run(self, batch: ExampleInputs, target: Any, *, is_training: bool, has_loss: bool = True) -> Passage:
        self._set_mode(is_training=is_training)
        args, kwargs = as_call(batch)
        self._look_at_kinds(args, kwargs)
        rows = rows_of((args, kwargs))
        count = self._count_microbatches(self.objective.common_rows(rows)) if self.num_microbatches > 1 else 1
        if count > 1:
            require_rows_in_tensors((args, kwargs), rows=rows, lengths=self.list_lengths)
            require_rows_in_tensors(target, rows=rows)
        parts = cut_call(args, kwargs, rows=rows, count=count, device=self.device, shared=self._shared_inputs)
        targets = cut_batch(target, rows=rows, count=count, device=self.device)
        has_loss = has_loss and self.is_last
        weights, look = (self.objective.weigh(targets), self.objective.looker(count)) if has_loss else ([], None)
        passage = Passage(parts, targets, weights, self.objective.compute, look)
        try:
            with self.surroundings():
                self._send(passage, is_training=is_training)
                passage.look_at_loss()
        finally:
            if not is_training:
                self._reshard()
        return passage

    def _look_at_kinds(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.known_kinds is not None and self.is_main:
            self.known_kinds.warn_of_others(args, kwargs)

    def _reshard(self) -> None:
        """Reshard parameters after a pass without backward, as the optimizer expects shards."""
        for module in self.modules:
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def share_statistics(self) -> None:
        """Copy the first replica's buffers, such as running statistics, to all; evaluation and checkpoints use them.

        Collective: the replicas.
        """
        self._running.share(self.arrangement.replicas)

    @contextlib.contextmanager
    def surroundings(self) -> Iterator[None]:
        """Set the context in which the model and its loss are computed: autocast and loss_parallel."""
        with contextlib.ExitStack() as stack:
            if self.arrangement.autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, self.arrangement.autocast))
            if self.arrangement.is_loss_parallel:
                from torch.distributed.tensor.parallel import loss_parallel

                stack.enter_context(loss_parallel())
            yield

    def _set_mode(self, *, is_training: bool) -> None:
        """Switch all modules to evaluation, or back to the modes that they had before.

        A module that the user had put into another mode, such as a frozen BatchNorm, is frozen again.
        """
        if is_training != self._is_evaluating:
            return
        self._is_evaluating = not is_training
        parts = [part for module in self.modules for part in module.modules()]
        if is_training:
            for part, mode in zip(parts, self._modes):  # from the outermost, whose train() may be the user's own
                if part.training != mode or part in self.modules:
                    part.train(mode)
        else:
            self._modes = [part.training for part in parts]
            for module in self.modules:
                module.eval()
            self.share_statistics()


def autocast_left(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context without autocast, for a backward pass: each operator keeps the dtype of its forward."""
    is_on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else contextlib.nullcontext()
