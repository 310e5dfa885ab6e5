"""Tensors in files of the safetensors format, written and read in parts, wherever fsspec reaches.

A file is the length of its header in 8 bytes, the header (JSON: by name the dtype, the shape and from where to where
the bytes are), and the bytes. The library of that name reads and writes whole files of this machine; this needs none.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DetrainError, SpecError
from ..storage import Location, is_local, locate, named_errors, whole_file
from .digests import BLOCK_BYTES, Damaged, digests, require_digest, require_digests
from .plain import parse_json

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH_BYTES = 8
_MOST_BYTES, _MOST_DIMENSIONS = 1 << 63, 64  # of a file, and of a tensor: torch has no more
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
_MOST_HEADER_VALUES = 1 << 23  # of half a million tensors
_OF_BROKEN_FILES = (ValueError, RecursionError, FileNotFoundError)
_TEXT_BYTES = 1 << 20  # at once, of what is read to its end: Python takes memory for all that is asked for
_READ_BYTES = 16 << 20  # at once: each read is a request where the file is far away


@dataclass(frozen=True)
class Piece:
    """Where the bytes of one tensor are in its file; ``digests`` (digests.py) is empty where nobody knows them."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    digests: str = ""

    def __post_init__(self) -> None:
        """Raises: ValueError for numbers that do not go together."""
        self.require_shape(self.shape)
        is_whole = all(type(at) is int and 0 <= at < _MOST_BYTES for at in (self.begin, self.end))
        if not is_whole or self.end - self.begin != math.prod(self.shape) * self.dtype.itemsize:
            raise ValueError(f"{self.end} - {self.begin} bytes are no {self.dtype} of {list(self.shape)}")

    @staticmethod
    def require_shape(shape: Sequence[object]) -> None:
        """Before it is multiplied. Raises: ValueError for what is the shape of no tensor."""
        is_shape = len(shape) <= _MOST_DIMENSIONS
        if not is_shape or any(type(size) is not int or not 0 <= size < _MOST_BYTES for size in shape):
            raise ValueError(f"{str(shape[:3])[:80]}... is the shape of no tensor")

    def bytes_of_rows(self, first: int, count: int) -> tuple[int, int]:
        """Where these rows of the first dimension begin and end among its bytes."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        return first * row_bytes, (first + count) * row_bytes

    def around(self, begin: int, end: int) -> tuple[int, int]:
        """Which of its bytes have to be read for some of them: whole blocks, where it has digests of those."""
        if not self.digests:
            return begin, end
        return begin // BLOCK_BYTES * BLOCK_BYTES, min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, self.end - self.begin)


def name_of_dtype(dtype: torch.dtype) -> str:
    """Raises: SpecError for one that the format has no name for."""
    if dtype not in _NAMES:
        raise SpecError(f"tensors of {dtype} cannot be kept: the safetensors format has {', '.join(_DTYPES)}")
    return _NAMES[dtype]


def dtype_of_name(name: Any) -> torch.dtype:
    """Raises: ValueError."""
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"{str(name)[:40]!r} is no dtype that is known")
    return _DTYPES[name]


# ---- writing


def make_header(
    tensors: Mapping[str, tuple[torch.dtype, Iterable[int]]], notes: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Piece]]:
    """The first bytes of a file with these tensors in this order, and where each of them will be."""
    entries: dict[str, Any] = {"__metadata__": dict(notes)} if notes else {}
    places, begin = {}, 0
    for name, (dtype, sizes) in tensors.items():
        shape = tuple(sizes)
        end = begin + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": name_of_dtype(dtype), "shape": list(shape), "data_offsets": [begin, end]}
        places[name] = (dtype, shape, begin, end)
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    start = _LENGTH_BYTES + len(text)
    pieces = {name: Piece(dtype, shape, start + b, start + e) for name, (dtype, shape, b, e) in places.items()}
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, pieces


def write_file(place: Location, header: bytes, tensors: Iterable[Tensor]) -> list[str]:
    """Write a new file of what `make_header` gave and the tensors, in its order; a machine that goes down keeps it.

    Return the digests of each tensor: of the bytes that were in memory when they were written. On this machine its
    folder has to be no link: where a group can write, others may have put it there.
    """
    with foreign_errors(place.name, "written"):
        to = whole_file(place.path, may_be_link=False) if is_local(place.files) else place.files.open(place.path, "wb")
        with to as file:
            file.write(header)
            return [_write_tensor(file, tensor) for tensor in tensors]


def _write_tensor(file: Any, tensor: Tensor) -> str:
    own = tensor.detach().cpu().contiguous()
    file.write(bytes_of(own))
    return digests(bytes_of(own))


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, to be read or written while the tensor is kept."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


@contextlib.contextmanager
def open_whole(place: Location) -> Iterator[Any]:
    """Give a file to write to, which is at ``place`` at the end of the block, whole, or not at all."""
    if is_local(place.files):
        with foreign_errors(place.name, "written"):
            os.makedirs(os.path.dirname(place.path), exist_ok=True)
            with whole_file(place.path) as file:
                yield file
        return
    with tempfile.TemporaryDirectory() as folder:
        part = os.path.join(folder, "part")
        with open(part, "wb") as file:
            yield file
        place.put(part)


# ---- reading


def read_whole(place: Location, *, limit_bytes: int, may_be_link: bool = False) -> bytes:
    """Read a small file. Raises: Damaged where it has more than ``limit_bytes`` or is not there, else DetrainError."""
    data = bytearray()
    with foreign_errors(place.name, "read"), place.open(may_be_link=may_be_link) as file:
        while chunk := file.read(min(_TEXT_BYTES, limit_bytes + 1 - len(data))):
            data += chunk
            if len(data) > limit_bytes:
                raise ValueError(f"it has more than {limit_bytes} bytes")
    return bytes(data)


def read_header(place: Location) -> dict[str, Piece]:
    """Where each tensor of a file is. Raises: Damaged for what is no safetensors file, or not a whole one."""
    with foreign_errors(place.name, "read"), place.open() as file:
        return read_header_of(file)


def read_header_of(file: Any, *, digest: str = "", what: str = "it") -> dict[str, Piece]:
    """The same of a file that is open, called ``what``, and compared where its ``digest`` is known.

    Raises: ValueError, DetrainError.
    """
    file.seek(0, os.SEEK_END)  # which tells nothing over SFTP
    size_bytes = file.tell()
    file.seek(0)
    begin = file.read(_LENGTH_BYTES)
    length = int.from_bytes(begin, "little")
    if not 0 < length <= min(size_bytes - _LENGTH_BYTES, _MOST_HEADER_BYTES):
        raise ValueError(f"it is no safetensors file, or not a whole one ({size_bytes} bytes)")
    text = file.read(length)
    if digest:
        require_digest(begin + text, digest, f"{what}: its header")
    entries = parse_json(text, most_values=_MOST_HEADER_VALUES)
    if not isinstance(entries, dict):
        raise ValueError("its header is no object with tensors by name")
    start = _LENGTH_BYTES + length
    pieces = {name: _read_entry(entry, start) for name, entry in entries.items() if name != "__metadata__"}
    last = start
    for piece in sorted(pieces.values(), key=lambda piece: (piece.begin, piece.end)):
        if piece.begin < last:
            raise ValueError("its tensors overlap each other, or its header")
        last = piece.end
    if last > size_bytes:
        raise ValueError(f"it has {size_bytes} bytes, and its tensors need {last}")
    return pieces


def _read_entry(entry: Any, start: int) -> Piece:
    is_entry = isinstance(entry, dict) and all(isinstance(entry.get(key), list) for key in ("data_offsets", "shape"))
    if not is_entry or len(entry["data_offsets"]) != 2 or any(type(at) is not int for at in entry["data_offsets"]):
        raise ValueError("its header has an entry that is no dtype, shape and offsets")
    begin, end = entry["data_offsets"]
    return Piece(dtype_of_name(entry.get("dtype")), tuple(entry["shape"]), start + begin, start + end)


def read_rows(file: Any, piece: Piece, first: int, count: int, *, what: str) -> Tensor:
    """Rows of the first dimension of a tensor in an open file; little more of it is read.

    What is read is compared where its digests are known. Raises: ValueError, DetrainError with ``what`` it is.
    """
    begin, end = piece.bytes_of_rows(first, count)
    low, high = piece.around(begin, end)
    made = torch.empty(high - low, dtype=torch.uint8)
    _read_into(bytes_of(made), file, piece, low, what)
    shape = (count, *piece.shape[1:]) if piece.shape else ()
    return made[begin - low : end - low].view(piece.dtype).reshape(shape)


def compare_rows(file: Any, piece: Piece, first: int, count: int, *, what: str) -> None:
    """Read the same, compare it, and keep nothing; what has no digests is not read. Raises: as `read_rows`."""
    if not piece.digests:
        return
    low, high = piece.around(*piece.bytes_of_rows(first, count))
    memory = memoryview(bytearray(min(_READ_BYTES, high - low)))
    for at in range(low, high, _READ_BYTES):
        _read_into(memory[: high - at], file, piece, at, what)


def _read_into(memory: memoryview, file: Any, piece: Piece, begin: int, what: str) -> None:
    """The bytes of a tensor from ``begin`` on, where a block of it begins if it has digests."""
    file.seek(piece.begin + begin)
    for at in range(0, len(memory), _READ_BYTES):
        part, done = memory[at : at + _READ_BYTES], 0
        while done < len(part):
            taken = file.readinto(part[done:])
            if not taken:
                raise ValueError(f"it ends at {file.tell()} bytes, and more were to come")
            done += taken
        if piece.digests:
            require_digests(part, piece.digests, begin + at, what)


# ---- both


def locate_safetensors(url: str | os.PathLike[str], *, files: Any = None) -> tuple[Location, str | None]:
    """The folder, and the name of the file, where ``url`` names one, and not a folder of them. Raises: SpecError."""
    text = os.fspath(url)
    if not text.endswith(".safetensors"):
        return locate(url, files=files), None
    folder, slash, name = text.rpartition("/")
    return locate(folder or slash or ".", files=files), name


def foreign_errors(name: str, done: str) -> contextlib.AbstractContextManager[None]:
    """What a file system or a broken file raises is a DetrainError with the name; no secret of a URL is in it.

    It is a Damaged where the file is what is wrong, and not who has it.
    """
    return named_errors(name, done, kind_of=lambda exc: Damaged if isinstance(exc, _OF_BROKEN_FILES) else DetrainError)
