"""Details of an error beyond its text: which variables fill the memory, whether the GPU is still usable."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping

import torch

from ...text import format_size
from .rings import errors_behind

_SHOWN = 5
_kept: list[object] = []  # C++ callbacks, kept alive as long as this process
_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
_CUDA = re.compile(r"CUDA error|device-side assert|illegal memory access|cudaError", re.IGNORECASE)


def is_out_of_memory(error: BaseException, text: str) -> bool:
    """Return whether an error means that memory of the CPU or a GPU is exhausted; ``text`` is the error's."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _MEMORY.search(text) is not None


def free_frames(error: BaseException) -> None:
    """Free what the frames of the traceback hold, on the GPU too; the traceback must already be formatted."""
    for each in errors_behind(error):
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def describe_largest(namespace: Mapping[str, object]) -> str:
    """List the variables whose tensors take the most memory, with their sizes; empty if none does."""
    sizes: dict[str, int] = {}
    for name, value in list(namespace.items()):
        if name.startswith("_"):
            continue
        with contextlib.suppress(Exception):  # a half-built module, or anything a user's class may do
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(value)}
            sizes[name] = sum(storages.values())
    largest = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])[:_SHOWN]
    return ", ".join(f"{name} {format_size(sizes[name], smallest='B')}" for name in largest)


def is_context_broken(error: BaseException, text: str) -> bool:
    """Return whether a CUDA error makes all later calls fail, so that the process has to be replaced."""
    if not torch.cuda.is_initialized() or isinstance(error, torch.cuda.OutOfMemoryError):
        return False
    if not isinstance(error, RuntimeError) or not _CUDA.search(text):
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def speak_before_abort(words: Callable[[], str]) -> None:
    """Write ``words()`` to stderr when C++ code aborts this process, as gloo does if tensor sizes differ.

    gloo calls ``std::terminate`` in its own thread: this is not a signal handler, so Python code may run.
    """
    with contextlib.suppress(OSError, AttributeError):  # not GCC's C++ library
        set_handler = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        set_handler.restype = ctypes.c_void_p
        handler = ctypes.CFUNCTYPE(None)

        def end() -> None:
            with contextlib.suppress(Exception):
                os.write(2, words().encode("utf-8", "replace"))
            usual()  # prints what was thrown, and aborts

        _kept.append(kept := handler(end))
        usual = handler(set_handler(kept))


def _tensors(value: object, depth: int = 3) -> Iterator[torch.Tensor]:
    """Yield the tensors in a variable: itself, in a module, in an optimizer's state, in containers."""
    if isinstance(value, torch.Tensor):
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_meta:
            yield value
        if isinstance(value, torch.Tensor) and value.is_leaf and value.grad is not None:
            yield from _tensors(value.grad, depth - 1)
    elif isinstance(value, torch.nn.Module):
        for tensor in (*value.parameters(), *value.buffers()):
            yield from _tensors(tensor, depth)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _tensors(dict(value.state), depth)
    elif depth > 0 and isinstance(value, Mapping):
        for part in list(value.values()):
            yield from _tensors(part, depth - 1)
    elif depth > 0 and isinstance(value, (list, tuple, set)):
        for part in list(value):
            yield from _tensors(part, depth - 1)
