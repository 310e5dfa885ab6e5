"""One rank's training step on tensors without memory: layout, schedule and loss are real, and storages are noted.

Torch's fake backend replaces all other ranks. If a model has many equal blocks, only a few run: each further
one adds as much as the last one did.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from .costs.profiler import ExampleInputs, as_call, quiet
from .interrupts import HeldInterrupts
from .kept import State
from .losses import Loss
from .microbatches import Passage
from .model import ParallelModel
from .module_copies import ghost_of, replace_tensors
from .recorders import TensorMemo, modules_watched
from .stages.boundaries import Boundaries
from .stages.schedules import Schedule
from .stages.splitter import Split
from .stages.stage import StageForward
from .storages import Peak, Storages
from .writes import writes_undone


@contextlib.contextmanager
def fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    """Make this process one of ``world_size`` ranks in the block; the others do not exist."""
    import torch.distributed._tools.fake_collectives  # noqa: F401 - collectives on tensors without memory
    from torch.testing._internal.distributed.fake_pg import FakeStore

    excepthook = sys.excepthook  # torch prefixes traceback lines with the rank, and never resets this
    with HeldInterrupts() as interrupts:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            interrupts.let_through()
            yield
        finally:
            interrupts.hold()
            dist.destroy_process_group()
            _forget_collectives()
            sys.excepthook = excepthook


def _forget_collectives() -> None:
    """Drop torch's cache entries of collectives: no operator will use a destroyed group again."""
    for key in [key for key in FakeTensorMode.cache if getattr(key.key[0], "namespace", "") in _OF_COLLECTIVES]:
        FakeTensorMode.cache.pop(key, None)


_OF_COLLECTIVES = ("c10d", "_c10d_functional")


def as_one_rank_runs(schedule: Schedule) -> Schedule:
    """Return a schedule that accepts fewer microbatches than all ranks together need."""
    return _FewMicrobatches(schedule.name) if schedule.name == "1F1B" else schedule


class _FewMicrobatches(Schedule):
    """1F1B with fewer microbatches than stages; torch checks their number when it is made, not when it runs."""

    def require_microbatches(self, count: int, *, num_stages: int, num_ranks: int) -> None:
        """Accept any number, as no other rank exists here."""

    def make(self, stages: Sequence[Any], count: int, loss: Callable[..., Any] | None) -> Any:
        made = super().make(stages, max(count, stages[0].num_stages), loss)
        made._n_microbatches = count
        return made


class Actor:
    """A model, its inputs and loss without memory; or, with ``has_values``, copies, for code that reads values."""

    def __init__(
        self, model: nn.Module, example_inputs: ExampleInputs, target: Any, loss: Loss, *, has_values: bool
    ) -> None:
        self._fakes = None
        if not has_values:
            self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
            self._fakes.fake_tensor_converter = _Forgetful()
        self.model, self._loss = model, loss
        self._state = State(model, example_inputs, target, loss)
        self._boundaries: Boundaries | None = None
        self.example_inputs, self._example, self._target = example_inputs, as_call(example_inputs), target

    @contextlib.contextmanager
    def model_kept(self) -> Iterator[None]:
        """Restore after the block what the copies share with the user's model: all except parameters and buffers."""
        copied = {
            *map(id, (*self.model.parameters(), *self.model.buffers(), *tree_leaves((self._example, self._target))))
        }
        shared = [tensor for tensor in self._state.tensors if id(tensor) not in copied]
        with self._state.kept(), writes_undone(shared) if shared else contextlib.nullcontext():
            yield

    def copy(self) -> nn.Module:
        """Return a copy of the model, to be laid out."""
        return self._copy_of(self.model)

    def copy_of_loss(self) -> Loss:
        """Return a copy of a loss module; any other loss keeps the user's state, which is restored."""
        return self._copy_of(self._loss) if isinstance(self._loss, nn.Module) else self._loss

    def _copy_of(self, module: nn.Module) -> nn.Module:
        made = TensorMemo(self._copy)
        copied = ghost_of(module, made)
        for part in copied.modules():  # recurrent layers also have their parameters in a list
            replace_tensors(part, lambda tensor: tensor if tensor.is_cpu and not made.has(tensor) else made(tensor))
        return copied

    def _copy(self, tensor: Tensor) -> Tensor:
        if self._fakes is None:
            made = tensor.detach().to("meta" if tensor.is_meta else "cpu", copy=True)
        else:
            with self._fakes:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)

    def boundaries(self, found: Split | None, dtype: torch.dtype | None) -> Boundaries | None:
        """Return the stage boundaries, the same for every rank, as every batch is the example."""
        if found is not None and self._boundaries is None:
            self._boundaries = _OfOneBatch(found, dtype)
        return self._boundaries

    def play(self, laid_out: ParallelModel, *, keeps_sent: bool) -> list[Peak]:
        """Train on one batch as one rank; return what it holds, by phase. ``keeps_sent``: as in the schedule."""
        laid_out.objective.require_target(self._target)
        storages = Storages(are_fake=self._fakes is not None, keeps_sent=keeps_sent)
        for module in laid_out.modules:
            storages.tell((*module.parameters(), *module.buffers()), "weights")
            if isinstance(module, StageForward):
                module.be_thrown_away()
        count = laid_out.num_microbatches
        make = lambda leaf: self._copy(leaf) if isinstance(leaf, Tensor) else leaf  # noqa: E731
        parts, targets = ([tree_map(make, tree) for _ in range(count)] for tree in (self._example, self._target))
        storages.tell(tree_leaves((parts, targets)), "activations")
        weights = [1 / count] * count if laid_out.is_last else []
        passage = Passage(parts, targets, weights, _noted_loss(laid_out.objective.compute, storages))
        with quiet(), _noted_passes(laid_out, storages):
            laid_out.rehearse(passage, self._watched(storages))
        storages.let_go()
        storages.begin("optimizer")
        parameters = [parameter for module in laid_out.modules for parameter in module.parameters()]
        storages.tell((parameter.grad for parameter in parameters), "gradients")
        return storages.peaks()

    @contextlib.contextmanager
    def _watched(self, storages: Storages) -> Iterator[None]:
        with self._fakes or contextlib.nullcontext(), storages.watched():
            yield


class _Forgetful(FakeTensorConverter):
    """Converter that keeps no weak references to results: with them, torch refuses a stage's swaps of tensors."""

    def set_tensor_memo(self, t: Tensor, v: FakeTensor) -> None:
        pass


class _OfOneBatch(Boundaries):
    """Boundaries from the profile or, if autocast decides the dtypes, from a run under autocast."""

    def __init__(self, found: Split, dtype: torch.dtype | None) -> None:
        self._found, self._dtype = found, dtype
        by_cut = {unit.cut: unit for unit in found.profile.units}
        self._known = [self._on_meta(by_cut[cut].input_shape, by_cut[cut].input_dtype) for cut in found.cuts]
        self._autocast: list[Tensor] | None = None
        self.rewrites_parameters = found.profile.rewrites_parameters

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_training: bool) -> list[Tensor]:
        if not torch.is_autocast_enabled("cpu"):
            return self._known
        if self._autocast is None:
            self._autocast = Boundaries(self._found, self._dtype).find(args, kwargs, is_training=is_training)
        return self._autocast


def _noted_loss(loss: Callable[..., Tensor] | None, storages: Storages) -> Callable[..., Tensor]:
    def compute(output: Any, target: Any) -> Tensor:
        storages.begin("loss")
        storages.tell((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn), "working")
        assert loss is not None
        found = loss(output, target)
        storages.begin("backward")
        return found

    return compute


def _noted_passes(laid_out: ParallelModel, storages: Storages) -> contextlib.AbstractContextManager[None]:
    def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        storages.tell(module.parameters(), "working")  # parameters that FSDP2 has gathered; its shards are weights
        storages.begin("backward")

    for module in laid_out.called:
        if isinstance(module, DistributedDataParallel):
            module.register_comm_hook(None, lambda _, bucket: _already_sent(bucket))
    called = (("", module) for module in laid_out.called)
    return modules_watched(called, lambda *_: storages.begin("forward"), after, is_first=True)


def _already_sent(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
