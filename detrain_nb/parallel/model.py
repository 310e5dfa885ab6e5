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

_GIVE_LOSS = "give parallelize, or the Trainer of a plain model, loss=, a function of the output and the target"
# Shards what a rank has, in place: the module, and whether it gives the model's output. What it returns is called in
# the module's place: DDP is a module around another.
Prepare = Callable[[nn.Module, bool], nn.Module]


@dataclass(frozen=True)
class Arrangement:
    """How a model lies on the axes of its mesh, the pipeline's left out; ``parallelize`` makes it.

    ``replicas``: this rank's group on each axis along which ranks have other data; ``tensor_group``: the ranks that
    have other parts of the same layers. ``prepare``: cuts and shards what a rank has. ``autocast``:
    what to compute in; ``boundary_dtype``: of what lies between stages, where it is not the model's own.
    ``is_loss_parallel``: each rank of ``tensor_group`` has its part of the classes.
    """

    replicas: tuple[dist.ProcessGroup, ...] = ()
    tensor_group: dist.ProcessGroup | None = None
    prepare: Prepare | None = None
    autocast: torch.dtype | None = None
    boundary_dtype: torch.dtype | None = None
    is_loss_parallel: bool = False


class ParallelModel(abc.ABC):
    """A model of which this rank has a part, or a copy. Its kinds are ``PipelineStages`` and ``WholeModel``.

    ``modules`` are this rank's, with the parameter names of the whole model. Gradients are those of the loss over the
    whole batch of all ranks, also where parts of it count differently; they are added to those that are there, as
    ``backward()`` does.
    """

    modules: tuple[nn.Module, ...]
    called: tuple[nn.Module, ...]  # in their place
    num_microbatches: int
    tied_names: Sequence[Sequence[str]] = ()  # of one parameter, in the whole model
    list_lengths: Mapping[str, int] | None = None  # of those in the example
    known_kinds: KnownKinds | None = None  # of arguments, under a tensor plan
    called_with: frozenset[str] | None = None  # the keywords of the example that it was laid out with, if there was one
    device: torch.device  # where this rank computes
    link_device: torch.device  # where tensors are that this rank sends to others of its pipeline
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
        """``shared_inputs``: where in a call the tensors are that every microbatch gets whole."""
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
        """This rank gives the batch to the model."""

    @property
    @abc.abstractmethod
    def is_last(self) -> bool:
        """This rank has the model's output, and the loss."""

    @property
    def is_main(self) -> bool:
        """This rank is the first of all those of the model."""
        inner = (self.pipeline_group, self.arrangement.tensor_group)
        return self.replica == 0 and all(group is None or dist.get_rank(group) == 0 for group in inner)

    def gather(self, value: Any, *, of_one_copy: bool = False) -> list[Any]:
        """Return what every rank of the model gives, or every one of this replica. Collective: these ranks."""
        values = [value]
        outer = () if of_one_copy else self.arrangement.replicas
        for group in (self.pipeline_group, self.arrangement.tensor_group, *outer):
            if group is not None:
                every: list[list[Any]] = [values] * dist.get_world_size(group)
                dist.all_gather_object(every, values, group=group)
                values = [each for part in every for each in part]
        return values

    def any(self, flag: bool) -> bool:
        """Whether it is set on any rank of the model. Collective: these ranks."""
        told = torch.tensor(float(flag), device=self.link_device)
        groups = (self.pipeline_group, self.arrangement.tensor_group, *self.arrangement.replicas)
        for group in groups:
            if group is not None:
                dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        return bool(told)

    def back_to_training(self) -> None:
        """After evaluations: every part has the mode again that it had before the first of them."""
        self._set_mode(is_training=True)

    @property
    def num_replicas(self) -> int:
        """How many copies of the model, or of its stages and shards, work on other data."""
        return self.objective.num_replicas

    @property
    def replica(self) -> int:
        """Which of them this rank belongs to."""
        return self.objective.replica

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this rank, for its optimizer."""
        yield from (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """By the names that they have in the whole model; each once."""
        met: set[int] = set()
        for module in self.modules:
            for name, parameter in module.named_parameters():
                if id(parameter) not in met:
                    met.add(id(parameter))
                    yield name, parameter

    def own_parameters(self) -> Iterator[nn.Parameter]:
        """Those that no earlier rank of the pipeline has too: over all its ranks, each once."""
        yield from self.parameters()

    def train_step(self, batch: ExampleInputs, target: Any = None) -> Tensor | None:
        """Send a batch through, forward and backward; the loss over all of it on the last stage's rank, else None.

        ``batch`` is what the model is called with, ``target`` what the loss is (nothing, for one that looks at the
        output alone, as of a model that is given labels); of both, tensors with the batch's first dimension are cut,
        everything else goes to each microbatch. Collective: all ranks of the model; those of one replica (of a
        pipeline, of a tensor parallel group) with the same batch. Raises: SpecError.
        """
        if self.objective.loss is None:
            raise SpecError(f"there is no loss to train with: {_GIVE_LOSS}")
        self.objective.require_target(target)
        if not torch.is_grad_enabled():
            raise SpecError("train_step was called under torch.no_grad(): evaluate is the one without gradients")
        with self._gradients_completed():
            return self.objective.over_replicas(self._run(batch, target, is_training=True).loss)

    def evaluate(self, batch: ExampleInputs, target: Any = None) -> Tensor | None:
        """The loss of a batch on the last stage's rank, else None; gradients stay as they are. As ``train_step``."""
        if self.objective.loss is None:
            raise SpecError(f"there is no loss to evaluate: {_GIVE_LOSS}, or call predict")
        self.objective.require_target(target)
        with torch.no_grad():
            return self.objective.over_replicas(self._run(batch, target, is_training=False).loss)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, in a loop of one's own, where it is whole on each rank or in shards. Raises: SpecError."""
        raise SpecError(
            "the stages of a pipeline cannot be called: train_step runs a batch forward and backward, with loss= of "
            "parallelize; evaluate and predict are without gradients"
        )

    def predict(self, batch: ExampleInputs) -> Any:
        """What the model gives for this replica's batch on the last stage's rank, else None. As ``train_step``."""
        with torch.no_grad():
            return self._run(batch, None, is_training=False, has_loss=False).output()

    def rehearse(self, passage: Passage, around: contextlib.AbstractContextManager[None]) -> None:
        """Train, ``around`` it, with a batch that is cut and weighed; nothing but what this rank does is looked at."""
        self._set_mode(is_training=True)
        with self.surroundings():
            self._make_ready(passage)
            with around, self._gradients_completed():
                self._send(passage, is_training=True)

    # ---- a batch

    def _make_ready(self, passage: Passage) -> None:  # noqa: B027 - as a rule there is nothing
        """Make what is kept for further batches of this kind, to train with them."""

    @abc.abstractmethod
    def _send(self, passage: Passage, *, is_training: bool) -> None:
        """Send all parts through, forward, and backward to train."""

    def _count_microbatches(self, rows: int) -> int:
        """As many as wanted, or the next smaller number that cuts ``rows`` into equal parts."""
        fit = (number for number in range(min(self.num_microbatches, rows), 0, -1) if rows % number == 0)
        return next(filter(self._accepts, fit))

    def _accepts(self, count: int) -> bool:
        """Whether a batch may be cut into so many parts."""
        return True

    def _note_layout(self) -> None:
        """Once ``modules`` are laid out, before anything is computed with them."""
        self._replicated = replicated_in(self.modules)
        is_sharded = any(isinstance(module, FSDPModule) for module in self.modules)
        hooked = self.named_parameters() if self.arrangement.replicas else ()
        self._later_hooks = LaterHooks(hooked, axis="dp_shard" if is_sharded else "dp_replicate")
        self._trained_at_first = {parameter for parameter in self.parameters() if parameter.requires_grad}
        self._running = RunningBuffers(self.modules, device=self.device)

    @contextlib.contextmanager
    def _gradients_completed(self) -> Iterator[None]:
        """Those that come in here, of what replicas and stages have in common. Collective: all ranks of the model."""
        self._later_hooks.require_none()
        with averaged(self._replicated, self.arrangement.replicas), self._gradients_added_up():
            yield
        average_gradients(self._trained_later(), self.arrangement.replicas)

    def _trained_later(self) -> list[nn.Parameter]:
        """Those that were frozen when DDP was made, which does not know of them; FSDP2 does."""
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
        """After a pass without a backward one: parameters are shards again, which is what an optimizer takes."""
        for module in self.modules:
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def share_statistics(self) -> None:
        """Have the buffers that the first replica has come to on all: they evaluate, and are saved, with these.

        Collective: the replicas.
        """
        self._running.share(self.arrangement.replicas)

    @contextlib.contextmanager
    def surroundings(self) -> Iterator[None]:
        """In here the model runs, and its loss is computed."""
        with contextlib.ExitStack() as stack:
            if self.arrangement.autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, self.arrangement.autocast))
            if self.arrangement.is_loss_parallel:
                from torch.distributed.tensor.parallel import loss_parallel

                stack.enter_context(loss_parallel())
            yield

    def _set_mode(self, *, is_training: bool) -> None:
        """What the user has put into another mode by itself, such as a frozen BatchNorm, has it again for training."""
        if is_training != self._is_evaluating:
            return
        self._is_evaluating = not is_training
        parts = [part for module in self.modules for part in module.modules()]
        if is_training:
            for part, mode in zip(parts, self._modes):  # from the outermost; what it does then is the user's own
                if part.training != mode or part in self.modules:
                    part.train(mode)
        else:
            self._modes = [part.training for part in parts]
            for module in self.modules:
                module.eval()
            self.share_statistics()


def autocast_left(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """For a backward pass: each of its operators computes in what its forward one did."""
    is_on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else contextlib.nullcontext()
