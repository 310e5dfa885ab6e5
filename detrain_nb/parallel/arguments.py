"""What users give to this package: what is of a wrong kind gets one clear error."""

from __future__ import annotations

import contextlib
import inspect
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from ..errors import DetrainError, SpecError


def require_model(model: Any) -> None:
    """Raises: SpecError for what is no nn.Module, has TorchScript in it, or parameters without a shape."""
    if inspect.isclass(model):
        raise SpecError(f"the model is the class {model.__name__}: make one, as {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise SpecError(f"the model is {_shown(model)}: give an nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise SpecError(
                f"{name or 'the model'} is TorchScript, which has no hooks to cut it at: "
                "give the module that it was made from"
            )
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise SpecError("the model has lazy parameters, without a shape: call it once, with inputs of the right shape")


def require_mesh(mesh: Any) -> None:
    """Raises: SpecError for what is no mesh, or no longer one."""
    if not isinstance(mesh, DeviceMesh):
        raise SpecError(f"the mesh is {_shown(mesh)}: give what make_mesh returns")
    try:
        mesh.get_all_groups()
    except RuntimeError as exc:
        raise SpecError(
            "the mesh has process groups that have been ended since: make it again, with make_mesh"
        ) from exc


def require_whole(least: int = 1, **given: Any) -> None:
    """Raises: SpecError for what is neither None nor a whole number, ``least`` or more."""
    for name, value in given.items():
        if value is None or (is_whole(value) and value >= least):
            continue
        raise SpecError(f"{name}={value!r}: give a whole number, {least} or more")


def require_sizes(sizes: Any) -> None:
    """Raises: SpecError for what has no whole numbers by axis."""
    if not isinstance(sizes, Mapping):
        raise SpecError(f"the sizes of the mesh are {_shown(sizes)}: give them by axis, as {{'pp': 2, 'dp_shard': 4}}")
    for axis, size in sizes.items():
        if not is_whole(size):
            raise SpecError(f"{axis}={size!r}: a number of ranks is a whole number")


def require_names(**given: Any) -> None:
    """Raises: SpecError for a text, or a number, in the place of a list of names."""
    for name, value in given.items():
        if (
            isinstance(value, str)
            or not isinstance(value, Sequence)
            or not all(isinstance(each, str) for each in value)
        ):
            raise SpecError(f"{name}={value!r}: give a list of the names of modules, as ['layers.4', 'layers.8']")


@contextlib.contextmanager
def fails_on_a_part(num_microbatches: int) -> Iterator[None]:
    """What a model raises here for one of several microbatches is told with that: it may need the whole batch."""
    try:
        yield
    except (DetrainError, dist.DistError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, LookupError) as exc:
        if num_microbatches > 1:
            note = (
                f"the model was given one of {num_microbatches} microbatches, in which each tensor that has the "
                "batch's first dimension is cut along it: where the model needs the whole, as of a graph, give "
                "num_microbatches=1 (of the schedules of a pipeline GPipe takes that)"
            )
            told: Any = exc
            told.__notes__ = [*getattr(exc, "__notes__", ()), note]  # add_note is Python 3.11's
        raise


def is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
