"""Tensors in files of the safetensors format, written and read in parts, wherever fsspec reaches.

A file is the length of its header in 8 bytes, the header (JSON: dtype, shape and byte range of each tensor by name) and
the bytes. The safetensors library, which only reads and writes whole local files, is not used.
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
_MOST_BYTES, _MOST_DIMENSIONS = 1 << 63, 64  # of a file, and of a tensor, as in torch
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
_MOST_HEADER_VALUES = 1 << 23  # of half a million tensors
_OF_BROKEN_FILES = (ValueError, RecursionError, FileNotFoundError)
_TEXT_BYTES = 1 << 20  # per read of a whole file: Python allocates all that is requested
_READ_BYTES = 16 << 20  # per read, each of which is a request to remote storage


@dataclass(frozen=True)
class Piece:
    """The place of one tensor's bytes in its file; ``digests`` (digests.py) is empty when they are unknown."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    digests: str = ""

    def __post_init__(self) -> None:
        """Check that the numbers agree. Raises: ValueError when they do not."""
        self.require_shape(self.shape)
        is_whole = all(type(at) is int and 0 <= at < _MOST_BYTES for at in (self.begin, self.end))
        if not is_whole or self.end - self.begin != math.prod(self.shape) * self.dtype.itemsize:
            raise ValueError(f"bytes {self.begin} to {self.end} are not a {self.dtype} of shape {list(self.shape)}")

    @staticmethod
    def require_shape(shape: Sequence[object]) -> None:
        """Check a shape before its sizes are multiplied. Raises: ValueError for an invalid one."""
        is_shape = len(shape) <= _MOST_DIMENSIONS
        if not is_shape or any(type(size) is not int or not 0 <= size < _MOST_BYTES for size in shape):
            raise ValueError(f"{str(shape[:3])[:80]}... is not a shape of a tensor")

    def bytes_of_rows(self, first: int, count: int) -> tuple[int, int]:
        """Return where these rows of the first dimension begin and end among its bytes."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        return first * row_bytes, (first + count) * row_bytes

    def around(self, begin: int, end: int) -> tuple[int, int]:
        """Return which of its bytes must be read for a range of them: whole blocks, if it has their digests."""
        if not self.digests:
            return begin, end
        return begin // BLOCK_BYTES * BLOCK_BYTES, min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, self.end - self.begin)


def name_of_dtype(dtype: torch.dtype) -> str:
    """Return a dtype's name in the format. Raises: SpecError for a dtype that has none."""
    if dtype not in _NAMES:
        raise SpecError(f"tensors of {dtype} cannot be saved: the safetensors format has {', '.join(_DTYPES)}")
    return _NAMES[dtype]


def dtype_of_name(name: Any) -> torch.dtype:
    """Return the dtype of a name in the format. Raises: ValueError for an unknown name."""
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"{str(name)[:40]!r} is not a known dtype")
    return _DTYPES[name]


# ---- writing


def make_header(
    tensors: Mapping[str, tuple[torch.dtype, Iterable[int]]], notes: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Piece]]:
    """Return the first bytes of a file with these tensors, in this order, and the place of each."""
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
    """Write a header of `make_header`, and its tensors in order, to a new file that survives a crash of the machine.

    Returns the digests of each tensor, of its bytes in memory as they were written. The folder of a local file must not
    be a link: where a group can write, others may have created it.
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
    """Return the memory of a contiguous CPU tensor, to be read or written while the tensor lives."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


@contextlib.contextmanager
def open_whole(place: Location) -> Iterator[Any]:
    """Yield a file to write to, which appears at ``place`` at the end of the block: whole, or not at all."""
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
    """Read a small file. Raises: Damaged when it has more than ``limit_bytes`` or is missing, else DetrainError."""
    data = bytearray()
    with foreign_errors(place.name, "read"), place.open(may_be_link=may_be_link) as file:
        while chunk := file.read(min(_TEXT_BYTES, limit_bytes + 1 - len(data))):
            data += chunk
            if len(data) > limit_bytes:
                raise ValueError(f"it has more than {limit_bytes} bytes")
    return bytes(data)


def read_header(place: Location) -> dict[str, Piece]:
    """Return the place of each tensor of a file. Raises: Damaged when it is not a whole safetensors file."""
    with foreign_errors(place.name, "read"), place.open() as file:
        return read_header_of(file)


def read_header_of(file: Any, *, digest: str = "", what: str = "it") -> dict[str, Piece]:
    """Return the same for an open file, called ``what``; its header is compared if its ``digest`` is known.

    Raises: ValueError, DetrainError.
    """
    file.seek(0, os.SEEK_END)  # which returns nothing over SFTP
    size_bytes = file.tell()
    file.seek(0)
    begin = file.read(_LENGTH_BYTES)
    length = int.from_bytes(begin, "little")
    if not 0 < length <= min(size_bytes - _LENGTH_BYTES, _MOST_HEADER_BYTES):
        raise ValueError(f"it is not a safetensors file, or not a whole one ({size_bytes} bytes)")
    text = file.read(length)
    if digest:
        require_digest(begin + text, digest, f"{what}: its header")
    entries = parse_json(text, most_values=_MOST_HEADER_VALUES)
    if not isinstance(entries, dict):
        raise ValueError("its header is not a JSON object of tensors by name")
    start = _LENGTH_BYTES + length
    pieces = {name: _read_entry(entry, start) for name, entry in entries.items() if name != "__metadata__"}
    last = start
    for piece in sorted(pieces.values(), key=lambda piece: (piece.begin, piece.end)):
        if piece.begin < last:
            raise ValueError("its tensors overlap each other, or its header")
        last = piece.end
    if last > size_bytes:
        raise ValueError(f"it has {size_bytes} bytes but its tensors need {last}")
    return pieces


def _read_entry(entry: Any, start: int) -> Piece:
    is_entry = isinstance(entry, dict) and all(isinstance(entry.get(key), list) for key in ("data_offsets", "shape"))
    if not is_entry or len(entry["data_offsets"]) != 2 or any(type(at) is not int for at in entry["data_offsets"]):
        raise ValueError("its header has an entry without dtype, shape and offsets")
    begin, end = entry["data_offsets"]
    return Piece(dtype_of_name(entry.get("dtype")), tuple(entry["shape"]), start + begin, start + end)


def read_rows(file: Any, piece: Piece, first: int, count: int, *, what: str) -> Tensor:
    """Read rows of the first dimension of a tensor in an open file, and little more of the file.

    What is read is compared with its digests if they are known. Raises: ValueError, DetrainError that names ``what``.
    """
    begin, end = piece.bytes_of_rows(first, count)
    low, high = piece.around(begin, end)
    made = torch.empty(high - low, dtype=torch.uint8)
    _read_into(bytes_of(made), file, piece, low, what)
    shape = (count, *piece.shape[1:]) if piece.shape else ()
    return made[begin - low : end - low].view(piece.dtype).reshape(shape)


def compare_rows(file: Any, piece: Piece, first: int, count: int, *, what: str) -> None:
    """Read and compare the same rows, and keep nothing; without digests nothing is read. Raises: as `read_rows`."""
    if not piece.digests:
        return
    low, high = piece.around(*piece.bytes_of_rows(first, count))
    memory = memoryview(bytearray(min(_READ_BYTES, high - low)))
    for at in range(low, high, _READ_BYTES):
        _read_into(memory[: high - at], file, piece, at, what)


def _read_into(memory: memoryview, file: Any, piece: Piece, begin: int, what: str) -> None:
    """Read a tensor's bytes from ``begin`` on, which is the start of a block if it has digests."""
    file.seek(piece.begin + begin)
    for at in range(0, len(memory), _READ_BYTES):
        part, done = memory[at : at + _READ_BYTES], 0
        while done < len(part):
            taken = file.readinto(part[done:])
            if not taken:
                raise ValueError(f"it ends at {file.tell()} bytes, before the end of its tensors")
            done += taken
        if piece.digests:
            require_digests(part, piece.digests, begin + at, what)


# ---- both


def locate_safetensors(url: str | os.PathLike[str], *, files: Any = None) -> tuple[Location, str | None]:
    """Return the folder, and the file's name if ``url`` names a file, not a folder of them. Raises: SpecError."""
    text = os.fspath(url)
    if not text.endswith(".safetensors"):
        return locate(url, files=files), None
    folder, slash, name = text.rpartition("/")
    return locate(folder or slash or ".", files=files), name


def foreign_errors(name: str, done: str) -> contextlib.AbstractContextManager[None]:
    """Turn errors of a file system or a damaged file into a DetrainError with the name, without secrets of a URL.

    It is a Damaged when the file is at fault, not its storage.
    """
    return named_errors(name, done, kind_of=lambda exc: Damaged if isinstance(exc, _OF_BROKEN_FILES) else DetrainError)
