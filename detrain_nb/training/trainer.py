"""The loop: batches in, optimizer steps, numbers out. ``fit`` reads from top to bottom: copy it for your own."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_map

from ..at_exit import wait_for_gloo_at_exit
from ..errors import DetrainError, NotFinite, SpecError
from ..parallel import ParallelModel, WholeModel, clip_grad_norm, grad_norm
from ..parallel.losses import Loss
from ..parallel.microbatches import rows_of
from ..parallel.replicated import local_part
from ..plan.job import JOB_VARIABLE
from . import saving
from .arguments import (
    plain_numbers,
    require_loader,
    require_model,
    require_names,
    require_options,
    require_places,
    require_resume,
    tuple_of_callbacks,
)
from .batches import for_replica, require_same_batch
from .checkpoint import checkpoints, load, save
from .epochs import Epochs
from .recipe import make_optimizer, make_scheduler
from .reports import Record, Reports, Result
from .scores import Scores, count_right
from .unpacking import inputs_of, unpack, usual_loss

_T = TypeVar("_T", bound="Trainer")


class Callback:
    """Hooks that a Trainer calls, on every rank; override those that you need."""

    def on_begin(self, trainer: Trainer) -> None:
        """Run before the first step."""

    def on_step(self, trainer: Trainer, record: Record) -> None:
        """Run after a step of the optimizer; ``trainer.stop()`` ends the training after this step."""

    def on_evaluation(self, trainer: Trainer, record: Record) -> None:
        """Run after an evaluation."""

    def on_end(self, trainer: Trainer, result: Result) -> None:
        """Run after the last step, when everything is saved."""


class Trainer:
    """The training of a model from ``parallel.parallelize``, or of a plain one; every rank creates its own Trainer.

    Each part of the loop is a method that a subclass may override: ``unpack`` (splits what the loader yields),
    ``train_one`` (one step), ``evaluate``, ``score`` (what an evaluation counts).
    """

    def __new__(cls: type[_T], *args: Any, **given: Any) -> _T:
        """Check the arguments' names. Raises: SpecError that says where an unknown argument belongs."""
        require_names(cls.__init__, args, given)
        return super().__new__(cls)

    def __init__(
        self,
        model: ParallelModel | nn.Module,
        *,
        train: Iterable[Any],
        steps: int | None = None,
        epochs: int | None = None,
        loss: Loss | None = None,
        optimizer: str | Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] = "adamw",
        optimizer_options: Mapping[str, Any] | None = None,
        scheduler: Any = None,
        scheduler_options: Mapping[str, Any] | None = None,
        clip: float | None = None,
        evaluate: Iterable[Any] | None = None,
        evaluate_every: int | None = None,
        callbacks: Sequence[Callback] = (),
        checkpoint: str | None = None,
        save_every: int | None = None,
        keep: int | None = 3,
        resume: bool = True,
        seed: int = 0,
        metrics_folder: str | None = None,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
        show_progress: bool = True,
    ) -> None:
        """Set up a training of ``steps`` steps, or of as many as ``epochs`` have.

        ``train`` yields pairs of the model's input and the loss's target, or dicts (unpacking.py). A DataLoader with
        torch's default sampler, shuffled or not, gives each replica its own part of an epoch; one with a custom sampler
        is used as it is. ``loss``: of a plain model (None: the one that it computes from its labels); a parallelized
        model has its own. ``optimizer``, ``scheduler``: names, objects or functions (recipe.py), with their options.
        ``clip``: the maximum norm of all gradients together. ``evaluate``: a loader like ``train``, run at the end, and
        every ``evaluate_every`` steps or after each of the ``epochs``. ``checkpoint``: a URL, saved to at the end and
        every ``save_every`` steps, and resumed from if it has a checkpoint, unless ``resume`` is False. ``keep``: how
        many checkpoints are kept; None: all. ``seed``: of the order of the samples. ``metrics_folder``: where the main
        rank writes a line of metrics for each step, as ``log_metrics`` does. ``flops_per_sample`` (forward) and
        ``peak_flops`` (of one rank, per second) give the MFU. ``callbacks``: instances of ``Callback``.
        Raises: SpecError for arguments that are invalid or do not fit together.
        """
        if (steps is None) == (epochs is None):
            raise SpecError("give either steps= or epochs=")
        require_model(model)
        counts = plain_numbers(
            steps=steps, epochs=epochs, evaluate_every=evaluate_every, save_every=save_every, keep=keep, seed=seed
        )
        rates = plain_numbers(clip=clip, flops_per_sample=flops_per_sample, peak_flops=peak_flops)
        require_options(optimizer_options=optimizer_options, scheduler_options=scheduler_options)
        if "steps" in (scheduler_options or {}):
            raise SpecError("scheduler_options have steps, which the Trainer sets: leave them out")
        require_places(checkpoint=checkpoint, metrics_folder=metrics_folder)
        require_resume(resume)
        wait_for_gloo_at_exit()
        self.callbacks = tuple_of_callbacks(callbacks, Callback)
        is_unpacked_by_user = type(self).unpack is not Trainer.unpack
        require_loader("train", train, is_unpacked_by_user=is_unpacked_by_user)
        if evaluate is not None:
            require_loader("evaluate", evaluate, is_unpacked_by_user=is_unpacked_by_user)
            if _length_of(evaluate) == 0:
                raise SpecError("the evaluation data have no batches")
        if save_every is not None and checkpoint is None:
            raise SpecError(f"save_every={save_every} needs checkpoint=: give a URL to save to")
        if evaluate_every is not None and evaluate is None:
            raise SpecError(f"evaluate_every={evaluate_every} needs evaluate=: give a loader to evaluate on")
        if isinstance(model, nn.Module):
            model = _one_copy(model, loss)
        elif loss is not None:
            raise SpecError("a parallelized model has its own loss: pass loss= to parallelize, not to the Trainer")
        self.model = model
        self.train = Epochs(train, model, seed=counts["seed"])
        if epochs is not None:
            if not self.train.steps_of_one():
                raise SpecError("the training data have no batches")
            counts["steps"] = counts["epochs"] * self.train.steps_of_one()
            counts["evaluate_every"] = counts["evaluate_every"] or self.train.steps_of_one()
        self.steps, self.step = counts["steps"], 0
        self.optimizer = make_optimizer(optimizer, list(model.parameters()), **(optimizer_options or {}))
        self.scheduler = make_scheduler(scheduler, self.optimizer, steps=self.steps, **(scheduler_options or {}))
        self.evaluation = evaluate
        self.clip, self.evaluate_every = rates["clip"], counts["evaluate_every"]
        self.checkpoint, self.resume = checkpoint, resume
        self.save_every, self.keep = counts["save_every"], counts["keep"]
        self._reports = Reports(
            model,
            metrics_folder=metrics_folder,
            flops_per_sample=rates["flops_per_sample"],
            peak_flops=rates["peak_flops"],
            show_progress=show_progress,
        )
        self._is_stopped = False

    @property
    def result(self) -> Result:
        """The result of the current ``fit``, or of the last one."""
        return self._reports.result

    # ---- the loop

    def fit(self) -> Result:
        """Train to the last step, from the beginning or from the last checkpoint. Collective: all ranks.

        Raises: NotFinite when the loss or a gradient is not finite, before the optimizer makes a step with it;
        SpecError when ranks differ in their settings or the data do not fit; DetrainError when a checkpoint cannot be
        read, or the last one cannot be written.
        """
        self._is_stopped = False
        self._require_same_on_ranks()
        self._reports.begin(Result(self.step))
        if self.checkpoint is not None and self.resume:
            _warn_of_restarts()
            self._go_on()
        self.model.back_to_training()
        for module in self.model.modules:
            if not module.training:  # from_pretrained returns it in evaluation mode
                module.train()
        self._call("on_begin")
        self._is_stopped = self.model.any(self._is_stopped)
        began, first_step = time.perf_counter(), self.step
        try:
            self._train_to_the_end()
        finally:
            self.result.steps, self.result.seconds = self.step, time.perf_counter() - began
        if self.step == first_step and self.evaluation is not None:
            self._evaluate_now()
        if self.checkpoint is not None and self.step > first_step:
            self._save(is_last=True)
        self._call("on_end", self.result)
        return self.result

    def _require_same_on_ranks(self) -> None:
        """Check that all ranks will make as many steps and saves. Raises: SpecError, on all ranks."""
        names = ("steps", "evaluate_every", "save_every", "clip", "checkpoint", "resume")
        own = {name: getattr(self, name) for name in names} | {"evaluate": self.evaluation is not None}
        rank = dist.get_rank() if dist.is_initialized() else 0
        (first, known), *others = self.model.gather((rank, own))
        for other, told in others:
            for name, value in told.items():
                if value != known[name]:
                    raise SpecError(
                        f"{name} is {known[name]} on rank {first} and {value} on rank {other}, and they would "
                        "deadlock: give the same on all ranks, and with epochs= as many batches"
                    )
        self._require_same_optimizer(rank)
        lengths = self.model.gather(_length_of(self.train.loader), of_one_copy=True)
        if len(set(lengths)) > 1:
            raise SpecError(
                f"ranks of one model copy have unequal batch counts per epoch ({', '.join(map(str, lengths))}) and "
                "would deadlock: give all of them the same loader"
            )

    def _require_same_optimizer(self, rank: int) -> None:
        """Check that ranks update the same parameters alike; stages may differ. Raises: SpecError, on all ranks."""
        names = tuple(name for name, _ in self.model.named_parameters())
        known: dict[Any, tuple[int, dict[str, Any]]] = {}
        for other, stage, told in self.model.gather((rank, names, _options_of(self.optimizer))):
            first, options = known.setdefault(stage, (other, told))
            for name in {**options, **told}:
                if options.get(name) != told.get(name):
                    raise SpecError(
                        f"the optimizer has {name}={options.get(name)} on rank {first} and {told.get(name)} on rank "
                        f"{other}, for the same parameters: give the same on all ranks"
                    )

    def _train_to_the_end(self) -> None:
        bar = self._reports.bar(self.steps, initial=self.step)
        with bar as show, contextlib.closing(self._batches()) as batches:
            while self.step < self.steps and not self._is_stopped:
                began = time.perf_counter()
                batch, target = next(batches)
                record = self.train_one(batch, target)
                self.step += 1
                self.train.done_with()
                self._reports.step(self.step, record, batch, seconds=time.perf_counter() - began)
                show(record)
                self._call("on_step", record)
                self._is_stopped = self.model.any(self._is_stopped)
                is_end = self.step == self.steps or self._is_stopped
                if self.evaluation is not None and (is_end or _is_due(self.step, self.evaluate_every)):
                    self._evaluate_now()
                    self._is_stopped = self.model.any(self._is_stopped)
                if self.checkpoint is not None and not is_end and _is_due(self.step, self.save_every):
                    self._save(is_last=False)

    def unpack(self, given: Any) -> tuple[Any, Any]:
        """Return the model's input and the loss's target from what the loader yielded: a pair, or a dict."""
        return unpack(given, self.model)

    def train_one(self, batch: Any, target: Any) -> Record:
        """Make one step: gradients, their norm, the optimizer, the scheduler; return loss, norm and learning rate.

        The loss is that of all ranks. Collective: all ranks. Raises: NotFinite, before the optimizer makes its step.
        """
        for parameter in self.model.parameters():  # the optimizer may lack some, or an error has left some
            parameter.grad = None
        loss = self._shared(self.model.train_step(batch, target))
        norm = grad_norm(self.model) if self.clip is None else clip_grad_norm(self.model, self.clip)
        record = {"loss": float(loss), "grad_norm": float(norm), "lr": float(self.optimizer.param_groups[0]["lr"])}
        self._require_finite(record)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        return record

    def evaluate(self, loader: Iterable[Any] | None = None) -> Record:
        """Return the loss over all samples of all ranks, and what ``score`` counts, in evaluation mode.

        Collective: all ranks. Raises: SpecError when there is nothing to evaluate, or ranks have unequal batch counts.
        """
        loader = self.evaluation if loader is None else loader
        if loader is None:
            raise SpecError("there is nothing to evaluate: pass evaluate= to the Trainer, or a loader to evaluate()")
        loader = for_replica(loader, replica=self.model.replica, num_replicas=self.model.num_replicas, seed=0)
        lengths = self.model.gather(_length_of(loader))
        if len(set(lengths)) > 1:
            raise SpecError(
                f"ranks have unequal batch counts ({', '.join(map(str, lengths))}) and would deadlock: give each as "
                "many batches, or a DataLoader with torch's default sampler, which is split between them"
            )
        scores = Scores(self.model)
        try:
            for given in loader:
                batch, target = self.unpack(given)
                if self.model.objective.loss is not None:
                    self.model.objective.require_target(target)
                output = self.model.predict(batch)
                if self.model.is_last:
                    scores.add(output, tree_map(self._place, target), self.score, rows=rows_of(batch))
        finally:
            self.model.back_to_training()
        return scores.over_all()

    def score(self, output: Any, target: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Return sums and counts by name; their quotients over all samples are reported. By default the accuracy.

        Called on the ranks of the last stage, once per batch. Shapes: each sum and each count is a scalar.
        """
        ignored = self.model.objective.ignore_index
        return count_right(output, target, ignored=-100 if ignored is None else ignored)

    def predict(self, loader: Iterable[Any]) -> list[Any]:
        """Return the model's output for each batch of inputs, on the rank of the last stage; else an empty list.

        In dicts, a target that the model does not take is left out. Collective: all ranks of the model, with as many
        batches each. Raises: SpecError for a dict that does not fit the model.
        """
        try:
            outputs = [self.model.predict(inputs_of(batch, self.model)) for batch in loader]
        finally:
            self.model.back_to_training()
        return outputs if self.model.is_last else []

    def stop(self) -> None:
        """Stop after this step, on all ranks; one rank's call is enough."""
        self._is_stopped = True

    # ---- batches

    def _batches(self) -> Generator[tuple[Any, Any], None, None]:
        is_first = True
        for given in self.train:
            batch, target = self.unpack(given)
            if is_first or self.train.batch == 0:
                require_same_batch((batch, target), self.model, step=self.step + 1)
            is_first = False
            yield batch, target

    def _place(self, leaf: Any) -> Any:
        return leaf.to(self.model.device) if isinstance(leaf, Tensor) else leaf

    # ---- reports

    def _shared(self, loss: Tensor | None) -> Tensor:
        """Return the loss on every rank of the pipeline."""
        place = self.model.link_device
        told = torch.zeros((), device=place) if loss is None else loss.detach().float().reshape(()).to(place)
        group = self.model.pipeline_group
        if group is not None:
            told = told if self.model.is_last else torch.zeros_like(told)
            dist.all_reduce(told, group=group)
        return told

    def _require_finite(self, record: Record) -> None:
        """Check loss and norm. Raises: NotFinite, on all ranks alike, with the first gradient at fault and its rank."""
        wrong = [name for name in ("loss", "grad_norm") if record[name] - record[name] != 0]
        if not wrong:
            return
        own = next((name for name, p in self.model.named_parameters() if _is_not_finite(p.grad)), "")
        rank = dist.get_rank() if dist.is_initialized() else 0
        where = [f"rank {rank} in {name!r}" for rank, name in sorted(self.model.gather((rank, own))) if name]
        values = ", ".join(f"{name} {record[name]}" for name in wrong)
        first = f"; gradients are not finite on {', '.join(where[:4])}" if where else ""
        raise NotFinite(
            f"step {self.step + 1}: {values}{first}: parameters are unchanged since step {self.step}; lower the "
            "learning rate, clip, or check this batch"
        )

    def _evaluate_now(self) -> None:
        scores = self.evaluate()
        self._reports.evaluation(self.step, scores)
        self._call("on_evaluation", scores)

    def _call(self, event: str, *given: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *given)

    # ---- checkpoints

    def _save(self, *, is_last: bool) -> None:
        assert self.checkpoint is not None
        try:
            saving.begin()
        except (DetrainError, OSError) as exc:  # of the previous save, which has ended: this one may succeed
            warnings.warn(f"a checkpoint was not saved: {exc}", stacklevel=2)
        saved = save(
            self.checkpoint,
            self.model,
            self.optimizer,
            self.scheduler,
            step=self.step,
            data_position=self.train.position,
            keep=self.keep,
            is_async=not is_last,
        )
        if is_last:
            saved.result()

    def _go_on(self) -> None:
        url = self.checkpoint
        assert url is not None
        there = saving.begin().first(lambda: [(each.name, each.is_unfinished) for each in checkpoints(url)])
        if all(is_unfinished for _, is_unfinished in there):
            if there and self.model.is_main:
                warnings.warn(
                    f"{there[-1][0]}: its save has not finished, and there is no complete one: starting over",
                    stacklevel=3,
                )
            return
        try:
            found = load(url, self.model, self.optimizer, self.scheduler)
        except SpecError as exc:
            raise SpecError(f"{exc}; to start over, give resume=False, or another checkpoint=") from exc
        if isinstance(self.scheduler, LambdaLR):  # its steps= may differ from the saved one: the present one counts
            for group, rate, ratio in zip(
                self.optimizer.param_groups, self.scheduler.base_lrs, self.scheduler.lr_lambdas
            ):
                group["lr"] = rate * ratio(self.scheduler.last_epoch)
        self.step = found.step
        self.train.go_to(found.data_position)
        self._reports.begin(Result(self.step, resumed_from=found.name))


def _one_copy(model: nn.Module, loss: Loss | None) -> WholeModel:
    """Wrap a plain model, on this rank alone. Raises: SpecError when it is in DDP or FSDP."""
    if isinstance(model, (DistributedDataParallel, FSDPModule)):
        raise SpecError("the model is already wrapped: pass the bare one to parallelize, and its result to the Trainer")
    if dist.is_initialized() and dist.get_world_size() > 1:
        warnings.warn(
            "a plain model on several ranks: each rank trains its own copy; use parallelize to train one model",
            stacklevel=3,
        )
    loss = usual_loss(model) if loss is None else loss
    return WholeModel(model, loss=loss, device=next((p.device for p in model.parameters()), None))


def _warn_of_restarts() -> None:
    """Warn when torchrun may restart ranks: it shares its store with them, which then has addresses of dead ranks.

    Not in a job of ours, where restarted ranks have a new store.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    is_cured = JOB_VARIABLE in os.environ or os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1"
    if restarts != "0" and not is_cured:
        warnings.warn(
            f"torchrun may restart these ranks ({restarts} times), and on gloo they would then connect to addresses of "
            "dead ranks: start it as  TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun ...",
            stacklevel=3,
        )


_HOW_IT_COMPUTES = ("foreach", "fused", "capturable", "differentiable")


def _options_of(optimizer: Optimizer) -> dict[str, str]:
    """Return the optimizer's class and the plain options of its groups; a learning rate may be a tensor."""
    found = {"class": type(optimizer).__name__}
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if name not in _HOW_IT_COMPUTES and isinstance(value, (bool, int, float, str, tuple, type(None))):
                value = float(value) if isinstance(value, (bool, int)) else value  # 1 is 1.0
                found[f"{name} of group {index}" if index else name] = repr(value)
    return found


def _length_of(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # unknown before the end
        return None


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _is_not_finite(grad: Tensor | None) -> bool:
    return grad is not None and not bool(torch.isfinite(local_part(grad)).all())
