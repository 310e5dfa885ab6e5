"""What a Trainer is given, looked at before it trains: an error says what is wrong and what to give."""

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
_HERE = {  # as others call it
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
_OF_METHODS = dict.fromkeys(("metrics", "compute_metrics"), "override Trainer.score, which gives sums and counts")
_T = TypeVar("_T")
_FEW = 100  # characters of a value in a message


def require_names(init: Callable[..., Any], positional: tuple[Any, ...], given: Iterable[str]) -> None:
    """Raises: SpecError for arguments that a Trainer's ``init`` does not take, which says where each belongs."""
    known = dict(list(inspect.signature(init).parameters.items())[1:])
    if any(each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in known.values()):
        return
    if len(positional) > sum(each.kind == each.POSITIONAL_OR_KEYWORD for each in known.values()):
        raise SpecError("after the model all is given by name: Trainer(model, train=..., steps=...)")
    if strange := [name for name in given if name not in known]:
        raise SpecError("; ".join(f"{name}= {_place_of(name, known)}" for name in strange))


def _place_of(name: str, known: Mapping[str, Any]) -> str:
    laid_out = inspect.signature(parallelize).parameters
    if name in laid_out or name in _OF_PARALLELIZE:
        there = _OF_PARALLELIZE.get(name, name)
        return f"belongs to how the model is laid out: give parallelize {there}=, and the Trainer what it returns"
    if name in _OF_A_LOADER:
        return "belongs to the DataLoader: give it there, and the Trainer the loader as train="
    if name in _OF_OPTIMIZERS:
        key = "lr" if name == "learning_rate" else name
        return f'belongs to the optimizer: give optimizer_options={{"{key}": ...}}'
    if name in _OF_SCHEDULES:
        return f'belongs to the scheduler: give scheduler_options={{"{name}": ...}}'
    if name in _OF_METHODS:
        return f"is no argument: {_OF_METHODS[name]}"
    near = [_HERE[name]] if name in _HERE else difflib.get_close_matches(name, known, n=1)
    return f"is unknown: did you mean {near[0]}=?" if near else f"is unknown: there is {', '.join(known)}"


def require_model(model: Any) -> None:
    if inspect.isclass(model):
        raise SpecError(f"the model is the class {model.__name__}: make one")
    if not isinstance(model, (ParallelModel, nn.Module)):
        raise SpecError(f"the model is {_shown(model)}: give an nn.Module, or what parallelize returns")


def plain_numbers(**given: Any) -> dict[str, Any]:
    """Return Python's numbers for what is given, None for None.

    ``clip`` and what begins with ``flops`` or ``peak`` is a number above 0, ``seed`` a whole one of 64 bits, all else a
    whole number, 1 or more. Raises: SpecError.
    """
    return {name: None if value is None and name != "seed" else _plain(name, value) for name, value in given.items()}


def _plain(name: str, value: Any) -> float | int:
    number = number_of(value)
    if name == "clip":
        if number is None or not number > 0:
            raise SpecError(f"clip={value!r}: a norm is above 0, or None for none")
    elif name in ("flops_per_sample", "peak_flops"):
        if number is None or not 0 < number < math.inf:
            raise SpecError(f"{name}={value!r}: give a number above 0, or None")
    elif name == "seed":
        if not isinstance(number, int) or not -(1 << 63) <= number < 1 << 64:
            raise SpecError(f"seed={value!r}: give a whole number of 64 bits")
    else:
        return whole_number(name, value, least=1)
    return number


def whole_number(name: str, value: Any, *, least: int) -> int:
    """Raises: SpecError for what is none, or less than ``least``."""
    number = number_of(value)
    if number is None or not least <= number < math.inf or number != int(number):
        raise SpecError(f"{name}={value!r}: give a whole number, {least} or more")
    return int(number)


def number_of(value: Any) -> float | int | None:
    """Python's number for one of Python, of numpy or in a tensor of no dimension; None for what is none."""
    if isinstance(value, Tensor) and not value.dim() and not value.is_meta:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    return int(value) if isinstance(value, Integral) else float(value)


def require_resume(resume: Any) -> None:
    """Raises: SpecError for what is neither True nor False, such as the place of a checkpoint."""
    if not isinstance(resume, bool):
        raise SpecError(
            f"resume={_shown(resume)}: give True or False; fit() goes on from what is at checkpoint=, and what is in "
            "another place training.load(...) brings into the model before"
        )


def require_options(**given: Any) -> None:
    """Raises: SpecError for options that are no dict with names."""
    for name, value in given.items():
        if value is not None and (not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value)):
            raise SpecError(f'{name}={_shown(value)}: give a dict by name, such as {{"lr": 0.001}}')


def require_places(**given: Any) -> None:
    """Raises: SpecError for what is no folder and no URL."""
    for name, value in given.items():
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise SpecError(f"{name}={_shown(value)}: give a folder or a URL")


def require_loader(name: str, loader: Any, *, is_unpacked_by_user: bool = False) -> None:
    """Raises: SpecError for what gives no batches; what these are is the user's who has an ``unpack``."""
    if loader is None or isinstance(loader, (str, bytes, Tensor, Mapping)) or inspect.isclass(loader):
        raise SpecError(f"{name}={_shown(loader)} gives no batches: give a DataLoader, or a list of (inputs, target)")
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise SpecError(f"{name} is a {type(loader).__name__}, which gives samples: give a DataLoader of it")
    is_of_tensors = isinstance(loader, (tuple, list)) and loader and all(isinstance(each, Tensor) for each in loader)
    if is_of_tensors and not is_unpacked_by_user:
        raise SpecError(f"{name} is a {type(loader).__name__} of tensors: give batches, such as [(inputs, target)]")
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise SpecError(f"{name}={_shown(loader)} cannot be iterated: give a DataLoader")


def tuple_of_callbacks(callbacks: Any, base: type[_T]) -> tuple[_T, ...]:
    """Raises: SpecError for what does not give callbacks."""
    if isinstance(callbacks, (base, str, Mapping)) or not isinstance(callbacks, Iterable):
        raise SpecError(f"callbacks={_shown(callbacks)}: give a list of them")
    found = tuple(callbacks)
    for number, each in enumerate(found):
        if isinstance(each, base):
            continue
        if inspect.isclass(each) and issubclass(each, base):
            raise SpecError(f"callbacks[{number}] is the class {each.__name__}: make one, {each.__name__}()")
        raise SpecError(
            f"callbacks[{number}] is {_shown(each)}, and no Callback: derive its class from "
            "detrain_nb.training.Callback, and override on_begin, on_step, on_evaluation or on_end"
        )
    return found


def _shown(value: Any) -> str:
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    if isinstance(value, (str, bytes, int, float, list, tuple, dict, type(None))):
        return repr(value)[:_FEW]
    return f"a {type(value).__name__}"
