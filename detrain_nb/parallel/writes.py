"""Tensors left as they were: what a model writes into them in a trial run is undone afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from .operators import OperatorMode, storage_of, tensors_of

# Their schemas do not show that they write the running statistics.
_BATCH_NORMS = {torch.ops.aten.native_batch_norm, torch.ops.aten.cudnn_batch_norm, torch.ops.aten.miopen_batch_norm}


@contextlib.contextmanager
def writes_undone(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Restore the values of those ``tensors`` that are written into in the block.

    Yields a list, which contains the written tensors at the end. Only these are copied.
    """
    written: list[Tensor] = []
    mode = _Writes(tensors)
    try:
        with mode:
            yield written
    finally:
        mode.put_back()
        written.extend(mode.written)


@contextlib.contextmanager
def values_kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore the values of all ``tensors`` after the block, whatever happens to them."""
    undos = [_note_memory(tensor) for tensor in tensors]
    try:
        yield
    finally:
        for undo in undos:
            undo()


def has_own_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's values can be kept: not those of a sparse tensor or one composed of others."""
    return tensor.layout == torch.strided and not tensor.is_meta and not is_traceable_wrapper_subclass(tensor)


def _note_memory(tensor: Tensor) -> Callable[[], None]:
    """Return a function that restores the contents of a tensor's memory, but not its version."""
    storage = tensor.untyped_storage()
    with _disable_current_modes():  # modes without values would copy nothing
        was = storage.clone()

    def undo() -> None:
        if storage.nbytes() != was.nbytes():  # a tensor on it was resized
            storage.resize_(was.nbytes())
        storage.copy_(was)

    return undo


class _Writes(OperatorMode):
    """Mode that keeps the contents of a tensor before the first write into it."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._on_storage: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            if has_own_memory(tensor):
                self._on_storage.setdefault(storage_of(tensor), []).append(tensor)
        self._undos: dict[int, Callable[[], None]] = {}  # by storage

    @property
    def written(self) -> list[Tensor]:
        return [tensor for storage in self._undos for tensor in self._on_storage[storage]]

    def put_back(self) -> None:
        for undo in self._undos.values():
            undo()

    def on_operator(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        for tensor in written_by(func, args, kwargs):
            storage = storage_of(tensor)
            if storage in self._on_storage and storage not in self._undos:
                self._undos[storage] = _note_memory(tensor)
        return func(*args, **kwargs)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an in-place operator writes into."""
    schema = func._schema
    if not (schema.is_mutable or func._overloadpacket in _BATCH_NORMS):
        return []
    arguments = schema.arguments
    if func._overloadpacket in _BATCH_NORMS:
        named = {argument.name: value for argument, value in zip(arguments, args)} | dict(kwargs)
        statistics = (named["running_mean"], named["running_var"]) if named["training"] else ()
        return [tensor for tensor in statistics if tensor is not None]
    given = [*zip(arguments, args)]
    given += [(argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs]
    return tensors_of([value for argument, value in given if argument.is_write])
