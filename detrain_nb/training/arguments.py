"""Checks of a Trainer's arguments, before it trains: each error names the argument and what to give."""

from __future__ import annotations

import difflib
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from ..errors import SpecError
from ..parallel import ParallelModel, parallelize

_OF_A_LOADER = ("batch_size", "shuffle", "num_workers", "collate_fn", "drop_last", "sampler", "data_collator")
_OF_OPTIMIZERS = ("lr", "learning_rate", "weight_decay", "betas", "eps", "momentum")
_OF_SCHEDULES = ("warmup_steps", "decay_steps", "min_ratio")
_HERE = {  # the names that other libraries use, and ours
    **dict.fromkeys(("train_dataset", "train_loader", "train_dataloader", "train_dataloaders", "data"), "train"),
    **dict.fromkeys(("eval_dataset", "eval_loader", "val_dataloaders", "val_loader", "validation"), "evaluate"),
    **dict.fromkeys(("max_steps", "num_steps"), "steps"),
    **dict.fromkeys(("max_epochs", "num_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val", "grad_clip"), "clip"),
    **dict.fromkeys(("criterion", "loss_fn", "loss_function"), "loss"),
    **dict.fromkeys(("optim", "optimizers"), "optimizer"),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type"), "scheduler"),
    **dict.fromkeys(("output_dir", "checkpoint_dir", "save_dir", "default_root_dir"), "checkpoint"),
    **dict.fromkeys(("save_steps", "checkpoint_every"), "save_every"),
    **dict.fromkeys(("eval_steps", "eval_every"), "evaluate_every"),
    "save_total_limit": "keep",
    "resume_from_checkpoint": "checkpoint",
    "callback": "callbacks",
}
_OF_PARALLELIZE = {
    **dict.fromkeys(("bf16", "fp16", "dtype", "amp", "mixed_precision"), "precision"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "num_microbatches"),
    "gradient_checkpointing": "activations",
    "torch_compile": "compile",
}
_OF_METHODS = dict.fromkeys(("metrics", "compute_metrics"), "override Trainer.score, which returns sums and counts")
_T = TypeVar("_T")
_FEW = 100  # characters of a value in a message


def require_names(init: Callable[..., Any], positional: tuple[Any, ...], given: Iterable[str]) -> None:
    """Check that a Trainer's ``init`` takes its arguments. Raises: SpecError that says where unknown ones belong."""
    known = dict(list(inspect.signature(init).parameters.items())[1:])
    if any(each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in known.values()):
        return
    if len(positional) > sum(each.kind == each.POSITIONAL_OR_KEYWORD for each in known.values()):
        raise SpecError("all arguments after the model are keyword-only: Trainer(model, train=..., steps=...)")
    if strange := [name for name in given if name not in known]:
        raise SpecError("; ".join(f"{name}= {_place_of(name, known)}" for name in strange))


def _place_of(name: str, known: Mapping[str, Any]) -> str:
    laid_out = inspect.signature(parallelize).parameters
    if name in laid_out or name in _OF_PARALLELIZE:
        there = _OF_PARALLELIZE.get(name, name)
        return f"is an argument of parallelize: pass {there}= to parallelize, and its result to the Trainer"
    if name in _OF_A_LOADER:
        return "is an argument of the DataLoader: pass it there, and the loader to the Trainer as train="
    if name in _OF_OPTIMIZERS:
        key = "lr" if name == "learning_rate" else name
        return f'belongs to the optimizer: give optimizer_options={{"{key}": ...}}'
    if name in _OF_SCHEDULES:
        return f'belongs to the scheduler: give scheduler_options={{"{name}": ...}}'
    if name in _OF_METHODS:
        return f"is not an argument: {_OF_METHODS[name]}"
    near = [_HERE[name]] if name in _HERE else difflib.get_close_matches(name, known, n=1)
    return f"is unknown: did you mean {near[0]}=?" if near else f"is unknown: choose from {', '.join(known)}"


def require_model(model: Any) -> None:
    if inspect.isclass(model):
        raise SpecError(f"the model is the class {model.__name__}: pass an instance")
    if not isinstance(model, (ParallelModel, nn.Module)):
        raise SpecError(f"the model is {_shown(model)}: give an nn.Module or the result of parallelize")


def plain_numbers(**given: Any) -> dict[str, Any]:
    """Return the arguments as Python's numbers, and None for None.

    ``clip``, ``flops_per_sample`` and ``peak_flops`` must be above 0, and ``seed`` a 64-bit integer that is not None;
    all others must be whole numbers, 1 or more. Raises: SpecError.
    """
    return {name: None if value is None and name != "seed" else _plain(name, value) for name, value in given.items()}


def _plain(name: str, value: Any) -> float | int:
    number = number_of(value)
    if name == "clip":
        if number is None or not number > 0:
            raise SpecError(f"clip={value!r}: give a norm above 0, or None for no clipping")
    elif name in ("flops_per_sample", "peak_flops"):
        if number is None or not 0 < number < math.inf:
            raise SpecError(f"{name}={value!r}: give a number above 0, or None")
    elif name == "seed":
        if not isinstance(number, int) or not -(1 << 63) <= number < 1 << 64:
            raise SpecError(f"seed={value!r}: give a 64-bit integer")
    else:
        return whole_number(name, value, least=1)
    return number


def whole_number(name: str, value: Any, *, least: int) -> int:
    """Return ``value`` as an int. Raises: SpecError when it is not a whole number, or less than ``least``."""
    number = number_of(value)
    if number is None or not least <= number < math.inf or number != int(number):
        raise SpecError(f"{name}={value!r}: give a whole number, {least} or more")
    return int(number)


def number_of(value: Any) -> float | int | None:
    """Return the Python number of a number of Python or numpy, or of a 0-dimensional tensor; None for anything else."""
    if isinstance(value, Tensor) and not value.dim() and not value.is_meta:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    return int(value) if isinstance(value, Integral) else float(value)


def require_resume(resume: Any) -> None:
    """Check that ``resume`` is True or False. Raises: SpecError for anything else, such as the URL of a checkpoint."""
    if not isinstance(resume, bool):
        raise SpecError(
            f"resume={_shown(resume)}: give True or False; fit() resumes from checkpoint=; to start from another "
            "place, call training.load(...) before"
        )


def require_options(**given: Any) -> None:
    """Check that options are dicts with text keys. Raises: SpecError."""
    for name, value in given.items():
        if value is not None and (not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value)):
            raise SpecError(f'{name}={_shown(value)}: give a dict of options, such as {{"lr": 0.001}}')


def require_places(**given: Any) -> None:
    """Check that each value is None, a folder or a URL. Raises: SpecError."""
    for name, value in given.items():
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise SpecError(f"{name}={_shown(value)}: give a folder or a URL")


def require_loader(name: str, loader: Any, *, is_unpacked_by_user: bool = False) -> None:
    """Check that ``loader`` yields batches; a user's own ``unpack`` decides what a batch is. Raises: SpecError."""
    if loader is None or isinstance(loader, (str, bytes, Tensor, Mapping)) or inspect.isclass(loader):
        raise SpecError(f"{name}={_shown(loader)} yields no batches: give a DataLoader, or a list of (inputs, target)")
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise SpecError(f"{name} is a {type(loader).__name__}, which yields samples: wrap it in a DataLoader")
    is_of_tensors = isinstance(loader, (tuple, list)) and loader and all(isinstance(each, Tensor) for each in loader)
    if is_of_tensors and not is_unpacked_by_user:
        raise SpecError(f"{name} is a {type(loader).__name__} of tensors: give batches, such as [(inputs, target)]")
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise SpecError(f"{name}={_shown(loader)} cannot be iterated: give a DataLoader")


def tuple_of_callbacks(callbacks: Any, base: type[_T]) -> tuple[_T, ...]:
    """Return ``callbacks`` as a tuple. Raises: SpecError when one is not a ``base``."""
    if isinstance(callbacks, (base, str, Mapping)) or not isinstance(callbacks, Iterable):
        raise SpecError(f"callbacks={_shown(callbacks)}: give a list of Callbacks")
    found = tuple(callbacks)
    for number, each in enumerate(found):
        if isinstance(each, base):
            continue
        if inspect.isclass(each) and issubclass(each, base):
            raise SpecError(f"callbacks[{number}] is the class {each.__name__}: pass an instance, {each.__name__}()")
        raise SpecError(
            f"callbacks[{number}] is {_shown(each)}, not a Callback: derive its class from "
            "detrain_nb.training.Callback, and override on_begin, on_step, on_evaluation or on_end"
        )
    return found


def _shown(value: Any) -> str:
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    if isinstance(value, (str, bytes, int, float, list, tuple, dict, type(None))):
        return repr(value)[:_FEW]
    return f"a {type(value).__name__}"
