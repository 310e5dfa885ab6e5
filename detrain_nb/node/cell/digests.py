"""A checksum of a value, to check that ranks have the same one: of tensors, arrays or plain Python, in bounded time.

No code of the value's class is run. Large values are sampled, which is reported. A missing checksum has a reason.
"""

from __future__ import annotations

import datetime
import decimal
import functools
import hashlib
import pathlib
import re
import struct
import sys
import time
import types
import uuid
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ... import values
from .untouched import (
    Inside,
    as_array,
    as_tensor,
    is_dense,
    is_dtensor,
    is_of,
    module_of,
    name_of,
    plain_torch,
    tensors_of,
)

WHOLE_BYTES = 8 << 20  # of a tensor or a text; larger ones are sampled
SAMPLE = 1 << 16  # elements
_PART_BYTES, _PART_SAMPLE = 64 << 10, 1 << 10  # of each tensor of a module: there may be thousands
_MOST_ITEMS = 100_000  # of a list or a dict, nested ones included
_MOST_DEPTH = 50
_NAMES_ALONE = re.compile(r"torch\.(u?int[1-7]|bits[0-9x]+)")
_DEVICE_WAIT_S = 0.5
_LOOK_S = 0.0005

_BY_TEXT: tuple[type, ...] = (
    torch.dtype, torch.device, datetime.date, datetime.timedelta, decimal.Decimal, uuid.UUID,
    type(pathlib.PurePosixPath()), type(pathlib.Path()),
)  # fmt: skip


@dataclass(frozen=True)
class Digest:
    """The checksum of a value; ``is_sample`` if it was not read completely. If it is empty, ``why`` is the reason."""

    text: str = ""
    is_sample: bool = False
    why: str = ""


class NotCompared(Exception):
    """There is no checksum; the message is the reason."""


def digest_of(value: object, *, deadline: float) -> Digest:
    """Compute the checksum of ``value``, ready at ``deadline`` (of time.monotonic) or soon after."""
    hashing = _Hashing(deadline)
    try:
        with plain_torch():
            hashing.add(value)
    except NotCompared as exc:
        return Digest(why=str(exc))
    except Exception as exc:  # noqa: BLE001  torch rejects a layout, a thread changes a dict: the rank must survive
        return Digest(why=f"it could not be read: {name_of(type(exc))}")
    return Digest(hashing.text, hashing.is_sample)


class _Hashing:
    """The computation of one checksum."""

    def __init__(self, deadline: float) -> None:
        self.is_sample = False
        self._deadline = deadline
        self._hash = hashlib.blake2b(digest_size=8)
        self._left = _MOST_ITEMS
        self._depth = 0

    @property
    def text(self) -> str:
        return self._hash.hexdigest()

    def add(self, value: Any) -> None:
        self._left -= 1
        if self._left < 0:
            raise NotCompared(f"it has more than {_MOST_ITEMS:,} items")
        if time.monotonic() > self._deadline:
            raise NotCompared("no time was left to read it")
        if self._depth == _MOST_DEPTH:
            raise NotCompared("it is nested too deeply")
        self._depth += 1
        try:
            self._add(value)
        finally:
            self._depth -= 1

    def _add(self, value: Any) -> None:
        kind = type(value)
        if write := _SIMPLE.get(kind):
            self._write(kind.__name__, write(value))
        elif kind in (str, bytes, bytearray):
            self._add_text(value)
        elif kind in (list, tuple, torch.Size, deque):
            self._add_items(kind.__name__, value if kind is list else list(value))
        elif kind in (dict, OrderedDict, defaultdict):
            self._add_unordered(kind.__name__, list(dict.items(value)))
        elif kind in (set, frozenset):
            self._add_unordered(kind.__name__, list(value))
        elif kind in _BY_TEXT:
            self._write(kind.__name__, str(value).encode())
        elif kind is types.FunctionType:
            self._add_function(value)
        elif is_of(value, type):
            raise NotCompared("it is a class")
        elif is_of(value, torch.Tensor):
            self.add_tensor(value)
        elif (inside := tensors_of(value)) is not None:
            self._add_parts(kind, inside)
        else:
            self._add_numpy(value)

    def _write(self, tag: str, data: bytes | memoryview) -> None:
        self._hash.update(f"{tag} {len(data)} ".encode())
        self._hash.update(data)

    def _add_text(self, value: Any) -> None:
        half = WHOLE_BYTES // 8  # a character takes up to four bytes
        size = len(value)
        if size > 2 * half:
            self.is_sample = True
            value = value[:half] + value[-half:]
        raw = value.encode("utf-8", "surrogatepass") if type(value) is str else bytes(value)
        self._write(f"{type(value).__name__} {size}", raw)

    def _add_items(self, tag: str, items: list[Any]) -> None:
        step = max(1, -(-len(items) // max(1, self._left)))
        self.is_sample |= step > 1
        self._write(tag, struct.pack("<q", len(items)))
        for item in items[::step]:
            self.add(item)

    def _add_unordered(self, tag: str, items: list[Any]) -> None:
        """Add a dict's pairs, or the elements of a set: equal ones may be in another order on another rank."""
        if len(items) > self._left:
            raise NotCompared(f"it has more than {_MOST_ITEMS:,} items")
        outer, parts = self._hash, []
        try:
            for item in items:
                self._hash = hashlib.blake2b(digest_size=8)
                self.add(item)
                parts.append(self._hash.digest())
        finally:
            self._hash = outer
        self._write(tag, b"".join(sorted(parts)))

    def _add_function(self, function: types.FunctionType) -> None:
        if function.__closure__:
            raise NotCompared("it is a closure")
        self._add_code(function.__code__)
        self.add(function.__defaults__)
        self.add(function.__kwdefaults__)

    def _add_code(self, code: types.CodeType) -> None:
        self._write("code", code.co_code)
        self.add(code.co_names)
        self.add(code.co_varnames)
        for constant in code.co_consts:
            if type(constant) is types.CodeType:
                self._add_code(constant)
            else:
                self.add(constant)

    def _add_parts(self, kind: type, inside: Inside) -> None:
        """Add parameters, buffers, or the state of an optimizer."""
        self._write("parts", name_of(kind).encode())
        self.is_sample |= inside.is_cut
        for path, tensor in inside.tensors:
            self._write("path", path.encode("utf-8", "surrogatepass"))
            self.add_tensor(tensor, whole_bytes=_PART_BYTES, sample=_PART_SAMPLE)

    def add_tensor(self, value: object, *, whole_bytes: int = WHOLE_BYTES, sample: int = SAMPLE) -> None:
        if time.monotonic() > self._deadline:
            raise NotCompared("no time was left to read it")
        tensor = as_tensor(value)
        if tensor is None:
            raise NotCompared(f"{name_of(type(value))} is a custom class")
        if not is_dense(tensor):
            raise NotCompared("it is not a dense tensor")
        if not values.has_data(tensor):
            raise NotCompared("it has no data: it is on the meta device, or its memory was freed")
        kind = "DTensor" if is_dtensor(value) else "Tensor"
        self._write(f"{kind} {tensor.dtype}", struct.pack(f"<{tensor.ndim}q", *tensor.shape))
        is_whole = tensor.numel() * tensor.element_size() <= whole_bytes
        self.is_sample |= not is_whole
        require_done(tensor, by=self._deadline)
        picked = as_bytes(tensor)
        picked = picked if is_whole else sample_of(picked, sample)
        _, buffers = values.pack(picked, name="it")
        for buffer in buffers:
            self._hash.update(buffer)

    def _add_numpy(self, value: Any) -> None:
        numpy: Any = sys.modules.get("numpy")
        if (array := as_array(value)) is not None:
            if array.dtype.hasobject:
                raise NotCompared("it is an array of Python objects")
            self._write(f"array {array.dtype.str}", struct.pack(f"<{array.ndim}q", *array.shape))
            if array.nbytes > WHOLE_BYTES:
                self.is_sample = True
                array = array[numpy.unravel_index(numpy.array(_positions(array.size, SAMPLE)), array.shape)]
            self._hash.update(numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8).data)
        elif numpy and is_of(value, numpy.generic) and module_of(type(value)) == "numpy":
            self._add_numpy(numpy.asarray(value))
        else:
            raise NotCompared(f"{name_of(type(value))} is a custom class")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory as integers, for dtypes that torch barely supports: int4, uint3, bits8."""
    if not _NAMES_ALONE.fullmatch(str(tensor.dtype)):
        return tensor
    return tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.uint16)


def sample_of(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return up to ``count`` elements of a tensor, at the same positions on every rank, without copying it whole."""
    if tensor.numel() <= count:
        return tensor.reshape(-1)
    if tensor.dtype.is_floating_point and tensor.element_size() == 1:  # this operator does not support float8
        tensor = tensor.view(torch.uint8)
    left = torch.tensor(_positions(tensor.numel(), count), device=tensor.device)
    places: list[torch.Tensor] = []
    for size in reversed(tensor.shape):
        places.insert(0, left % size)
        left = left // size
    return tensor[tuple(places)]


@functools.lru_cache(maxsize=8)
def _positions(size: int, count: int) -> list[int]:
    """Spread positions evenly, including the first and the last."""
    return [position * (size - 1) // (count - 1) for position in range(count)]


def require_done(tensor: torch.Tensor, *, by: float) -> None:
    """Wait until a GPU has finished its queued work. Raises: NotCompared when it has not.

    Copying from it would wait for all of that, possibly for a collective that other ranks never enter.
    """
    if tensor.device.type != "cuda":
        return
    with torch.cuda.device(tensor.device):
        event = torch.cuda.Event()
        event.record()
        until = min(by, time.monotonic() + _DEVICE_WAIT_S)
        while not event.query():  # event.synchronize() has no timeout, and cannot be interrupted
            if time.monotonic() > until:
                raise NotCompared("its GPU is busy")
            time.sleep(_LOOK_S)


def _write_float(value: float) -> bytes:
    return struct.pack("<d", value) if value == value else b"nan"


_SIMPLE: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"",
    type(...): lambda value: b"",
    bool: lambda value: b"1" if value else b"0",
    int: lambda value: value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True),
    float: _write_float,
    complex: lambda value: _write_float(value.real) + _write_float(value.imag),
    range: lambda value: b",".join(b"%d" % number for number in (value.start, value.stop, value.step)),
}
