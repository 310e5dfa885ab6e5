"""A model without a pipeline: on every rank as a whole, or in shards of all its layers."""

from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ..errors import SpecError
from .arguments import fails_on_a_part
from .costs.profiler import require_known
from .deferred import fill, is_deferred, require_values
from .losses import Loss
from .microbatches import Passage
from .model import Arrangement, ParallelModel, autocast_left
from .own_passes import FAILED, ReplicatedPasses, ShardedPasses


class WholeModel(ParallelModel):
    """A model without stages: plain, or sharded and replicated by ``prepare``. Microbatches accumulate gradients."""

    is_first = is_last = True

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Loss | None = None,
        num_microbatches: int = 1,
        loss_weight: Callable[[Any], Tensor | float] | None = None,
        device: torch.device | str | None = None,
        arrangement: Arrangement | None = None,
        shared_inputs: Collection[str] = (),
    ) -> None:
        """Move ``model`` to ``device`` and lay it out in place according to ``arrangement``.

        A deferred model gets its values, as from ``materialize``; under an ``arrangement``, only those of this rank's
        part. ``loss``, ``loss_weight``: as in ``PipelineStages``. ``shared_inputs``: as named by a profile.
        Collective: the ranks of ``arrangement``. Raises: SpecError when the number of microbatches, the loss or the
        model is not supported.
        """
        if num_microbatches < 1:
            raise SpecError(f"num_microbatches={num_microbatches}: give 1 or more")
        super().__init__(loss, loss_weight, device=device, arrangement=arrangement, shared_inputs=shared_inputs)
        self.num_microbatches = num_microbatches
        prepare = self.arrangement.prepare
        if is_deferred(model):
            require_values(model)
            if prepare is None:
                fill([model], device=self.device)
        elif not any(tensor.is_meta for tensor in model.parameters()) and not _is_on(model, self.device):
            model = model.to(self.device)
        self.modules = (model,)
        self._called = prepare(self.modules[0], True) if prepare is not None else self.modules[0]
        self.called = (self._called,)
        self._passes: ReplicatedPasses | ShardedPasses | None = None
        self._has_ddp_failed = False
        if isinstance(self._called, DistributedDataParallel):
            model.register_forward_pre_hook(_warn_of_call_past_ddp)
        self._note_layout()
        if isinstance(self._called, FSDPModule):
            self._passes = ShardedPasses()
        elif self.arrangement.replicas:
            self._passes = ReplicatedPasses(list(self.parameters()), self.arrangement.replicas)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model in a training loop of your own; return the output for this rank's rows, with gradients.

        ``backward()`` of a loss, usually a mean over rows, leaves the mean of the gradients of all replicas. The caller
        handles modes, microbatches and weights. Collective: all ranks of the model, which must then run the same
        backward passes. Raises: SpecError when only ``train_step`` completes the gradients of some parameters.
        """
        if self._replicated and torch.is_grad_enabled():
            raise SpecError(
                "the model has parameters without a dimension, whose gradients only train_step averages over the "
                "replicas: use train_step, give them one dimension, or use dp_replicate instead of dp_shard"
            )
        self._require_no_failed_pass()
        if torch.is_grad_enabled():
            self._later_hooks.require_none()
        self._look_at_kinds(args, kwargs)
        is_averaged_later = isinstance(self._called, DistributedDataParallel)
        with self.surroundings(), self._in_sync(is_last=not is_averaged_later), _told_of_shards(self._called):
            output = self._known(self._called(*args, **kwargs))
        if self._passes is not None and torch.is_grad_enabled():
            self._passes.follow([leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)])
        return output

    def _send(self, passage: Passage, *, is_training: bool) -> None:
        self._require_no_failed_pass()
        passes = self._passes
        with passes.left_to_ddp() if isinstance(passes, ReplicatedPasses) else _told_of_shards(self._called):
            self._send_parts(passage, is_training=is_training)

    def _require_no_failed_pass(self) -> None:
        if isinstance(self._passes, ShardedPasses):
            self._passes.require_no_failure()
        if self._has_ddp_failed and torch.is_grad_enabled():
            raise SpecError(FAILED.format(whose="DDP"))

    @contextlib.contextmanager
    def _failure_noted(self) -> Iterator[None]:
        """Note when a backward pass fails."""
        try:
            yield
        except BaseException:
            if isinstance(self._passes, ShardedPasses):
                self._passes.note_failure()
            self._has_ddp_failed = isinstance(self._called, DistributedDataParallel)
            raise

    def _send_parts(self, passage: Passage, *, is_training: bool) -> None:
        for index, (args, kwargs) in enumerate(passage.parts):
            with self._in_sync(is_last=index + 1 == len(passage.parts)):
                with fails_on_a_part(len(passage.parts)):
                    passage.take(index, self._known(self._called(*args, **kwargs)))  # keeps the only reference
                if is_training:
                    with autocast_left(self.device), _told_of_ddp(), self._failure_noted():
                        passage.losses[index].backward()

    def _known(self, output: Any) -> Any:
        """Return ``output`` if DDP and FSDP2 can find all tensors in it, to handle gradients. Raises: SpecError."""
        if isinstance(self._called, (FSDPModule, DistributedDataParallel)):
            require_known(output)
        return output

    def _in_sync(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Exchange gradients between replicas only once, in the last microbatch."""
        if isinstance(self._called, FSDPModule):
            self._called.set_requires_gradient_sync(is_last)
            self._called.set_is_last_backward(is_last)
        elif isinstance(self._called, DistributedDataParallel) and not is_last:
            no_sync: contextlib.AbstractContextManager[None] = self._called.no_sync()
            return no_sync
        return contextlib.nullcontext()


def _warn_of_call_past_ddp(module: nn.Module, args: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled() and DistributedDataParallel._get_active_ddp_module() is None:
        warnings.warn(
            f"{type(module).__name__} was called directly, so gradients are not averaged over its replicas: call what "
            "parallelize returned instead",
            stacklevel=4,
        )


@contextlib.contextmanager
def _told_of_ddp() -> Iterator[None]:
    """Raise SpecError if a parameter gets a gradient that DDP did not expect from the output."""
    try:
        yield
    except RuntimeError as exc:
        if "mark a variable ready only once" not in str(exc):
            raise
        found = re.search(r"with name (\S+)", str(exc))
        raise SpecError(
            f"the gradient of {found[1] if found else 'a parameter'} bypasses the forward, where DDP does not see it: "
            "have the model return what a loss computes with its parameters, and recompute activations by "
            "torch.utils.checkpoint with use_reentrant=False"
        ) from exc


@contextlib.contextmanager
def _told_of_shards(model: nn.Module) -> Iterator[None]:
    """Raise SpecError if a layer runs while FSDP2 has not gathered its parameters, outside its block's forward."""
    try:
        yield
    except RuntimeError as exc:
        if "mixed torch.Tensor and DTensor" not in str(exc) or not isinstance(model, FSDPModule):
            raise
        names = {module: name for name, module in model.named_modules()}
        owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(exc.__traceback__)]
        name = next((names[owner] for owner in reversed(owners) if isinstance(owner, nn.Module) and owner in names), "")
        raise SpecError(
            f"{name or 'a layer'} runs outside the forward of its block, but dp_shard gathers a block's parameters "
            "only for that forward: recompute activations by torch.utils.checkpoint with use_reentrant=False, call "
            "the block instead of what is in it, or cut its layers (tp)"
        ) from exc


def _is_on(model: nn.Module, device: torch.device) -> bool:
    return all(tensor.device == device for tensor in (*model.parameters(), *model.buffers()))
