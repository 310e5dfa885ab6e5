"""Checks of arguments from users: each wrong kind gets one clear error."""

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
    """Raise SpecError if ``model`` is not an nn.Module, contains TorchScript or has parameters without a shape."""
    if inspect.isclass(model):
        raise SpecError(f"the model is the class {model.__name__}: pass an instance, {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise SpecError(f"the model is {_shown(model)}: give an nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise SpecError(
                f"{name or 'the model'} is TorchScript, which has no hooks to cut it at: give the nn.Module that it "
                "was made from"
            )
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise SpecError("the model has lazy parameters without a shape: call it once with inputs of the right shape")


def require_mesh(mesh: Any) -> None:
    """Raise SpecError if ``mesh`` is not a mesh, or its process groups have been destroyed."""
    if not isinstance(mesh, DeviceMesh):
        raise SpecError(f"the mesh is {_shown(mesh)}: give what make_mesh returns")
    try:
        mesh.get_all_groups()
    except RuntimeError as exc:
        raise SpecError("the process groups of the mesh have been destroyed: make a new mesh with make_mesh") from exc


def require_whole(least: int = 1, **given: Any) -> None:
    """Raise SpecError if a value is neither None nor a whole number of at least ``least``."""
    for name, value in given.items():
        if value is None or (is_whole(value) and value >= least):
            continue
        raise SpecError(f"{name}={value!r}: give a whole number, {least} or more")


def require_sizes(sizes: Any) -> None:
    """Raise SpecError if ``sizes`` is not a mapping of axes to whole numbers."""
    if not isinstance(sizes, Mapping):
        raise SpecError(f"the sizes of the mesh are {_shown(sizes)}: give them by axis, as {{'pp': 2, 'dp_shard': 4}}")
    for axis, size in sizes.items():
        if not is_whole(size):
            raise SpecError(f"{axis}={size!r}: give a whole number of ranks")


def require_names(**given: Any) -> None:
    """Raise SpecError if a value is not a list of names."""
    for name, value in given.items():
        if (
            isinstance(value, str)
            or not isinstance(value, Sequence)
            or not all(isinstance(each, str) for each in value)
        ):
            raise SpecError(f"{name}={value!r}: give a list of module names, such as ['layers.4', 'layers.8']")


@contextlib.contextmanager
def fails_on_a_part(num_microbatches: int) -> Iterator[None]:
    """Add a note to errors that a model raises on one of several microbatches, as it may need the whole batch."""
    try:
        yield
    except (DetrainError, dist.DistError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, LookupError) as exc:
        if num_microbatches > 1:
            note = (
                f"the model was given one of {num_microbatches} microbatches, and every tensor with the batch's first "
                "dimension is cut along it: if the model needs all of it, as with a graph, give num_microbatches=1 "
                "(among the schedules of a pipeline, GPipe accepts that)"
            )
            told: Any = exc
            told.__notes__ = [*getattr(exc, "__notes__", ()), note]  # add_note is Python 3.11's
        raise


def is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
