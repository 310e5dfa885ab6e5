"""The index of a checkpoint: its tensors, their parts, and where each part is in which file."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from ..storage import Location
from .digests import is_digests, require_digest
from .plain import from_json, parse_json
from .tensor_files import Piece, dtype_of_name, foreign_errors, name_of_dtype, read_whole

_MOST_INDEX_BYTES = 1 << 30
MOST_INDEX_VALUES = 1 << 25  # enough for two million parts: 700 tensors with two states each on a thousand ranks
_MOST_INDEX_OBJECTS = 1 << 20
_MOST_CUT_DIMENSIONS = 8  # a named mesh has no more dimensions that cut tensors
_MOST_CORNER_DIMENSIONS = 4  # of parts that form no grid: each then has 16 corners


@dataclass(frozen=True)
class TensorIndex:
    """The tensors in torch's terms, the places of their bytes, and the values that are not tensors."""

    metadata: Metadata
    pieces: Mapping[MetadataIndex, tuple[str, Piece]]
    values: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)  # the digest of each file's header, if known

    @classmethod
    def read(cls, folder: Location, name: str, files: Mapping[str, int], *, digest: str | None = None) -> TensorIndex:
        """Read an index from its file ``name``.

        ``files``: the checkpoint's files, with their sizes in bytes. ``digest``: the index's own; None: the checkpoint
        has no digests. Raises: Damaged for an index that is damaged, does not cover its tensors, or names what is not
        in ``files``.
        """
        with foreign_errors((folder / name).name, "read"):
            try:
                text = read_whole(folder / name, limit_bytes=_MOST_INDEX_BYTES)
                if digest is not None:
                    require_digest(text, digest, (folder / name).name)
                if text.count(b"{") > _MOST_INDEX_OBJECTS:  # objects take far more memory than lists
                    raise ValueError(f"it has more than {_MOST_INDEX_OBJECTS:,} objects")
                index = parse_json(text, most_values=MOST_INDEX_VALUES)
                values = {fqn: from_json(value) for fqn, value in index["values"].items()}
                if any(file_name not in files for file_name in index["files"]):
                    raise ValueError("it names a file that is not in the checkpoint")
                has_digests = digest is not None
                headers = {file: index["headers"][file] for file in index["files"]} if has_digests else {}
                if any(not is_digests(header, 1) for header in headers.values()):
                    raise ValueError("the digest of a header is invalid")
                chunks = {
                    fqn: _read_chunks(entry, index["files"], has_digests=has_digests)
                    for fqn, entry in index["tensors"].items()
                }
                if any(piece.end > files[file] for parts in chunks.values() for _, file, piece in parts):
                    raise ValueError("a part is beyond the end of its file")
            except (KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError) as exc:
                raise ValueError(f"it is not of this format: {exc}") from exc
            shapes = {fqn: tuple(entry[1]) for fqn, entry in index["tensors"].items()}
            return replace(cls.of(shapes, chunks, values), headers=headers)

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, Sequence[int]],
        chunks: Mapping[str, Sequence[tuple[Sequence[int], str, Piece]]],
        values: Mapping[str, Any],
    ) -> TensorIndex:
        """Build an index; ``chunks``: the offsets, file and place of each part of each tensor. Raises: ValueError."""
        pieces: dict[MetadataIndex, tuple[str, Piece]] = {}
        kept: dict[str, Any] = {fqn: BytesStorageMetadata() for fqn in values}
        for fqn, shape in shapes.items():
            if not chunks[fqn] or sum(math.prod(piece.shape) for _, _, piece in chunks[fqn]) != math.prod(shape):
                raise ValueError(f"parts of {fqn!r} are missing")
            filled = [(file, piece.begin) for _, file, piece in chunks[fqn] if piece.end > piece.begin]
            if len(set(filled)) < len(filled):  # otherwise a small file could make a tensor of any size
                raise ValueError(f"parts of {fqn!r} share the same bytes")
            parts = []
            for offsets, file_name, piece in chunks[fqn]:
                if any(begin + size > whole for begin, size, whole in zip(offsets, piece.shape, shape)):
                    raise ValueError(f"a part of {fqn!r} exceeds its shape")
                parts.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(piece.shape)))
                pieces[MetadataIndex(fqn, offsets)] = file_name, piece
            _require_no_overlap(fqn, shape, parts)
            properties = TensorProperties(chunks[fqn][0][2].dtype)
            kept[fqn] = TensorStorageMetadata(properties, torch.Size(shape), parts)
        return cls(Metadata(kept), pieces, values)

    def shape(self, fqn: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, or None if there is none of that name."""
        kept = self.metadata.state_dict_metadata.get(fqn)
        return tuple(kept.size) if isinstance(kept, TensorStorageMetadata) else None

    def dtype(self, fqn: str) -> torch.dtype:
        kept = self.metadata.state_dict_metadata[fqn]
        assert isinstance(kept, TensorStorageMetadata)
        return kept.properties.dtype


def _require_no_overlap(fqn: str, shape: Sequence[int], parts: Sequence[ChunkStorageMetadata]) -> None:
    """Check that parts inside a tensor cover each element once. Raises: ValueError when they do not.

    The time grows with the number of parts, not with its square.
    """
    filled = [part for part in parts if math.prod(part.sizes)]
    cut = [dim for dim, size in enumerate(shape) if any(part.sizes[dim] != size for part in filled)]
    if len(cut) > _MOST_CUT_DIMENSIONS:
        raise ValueError(f"{fqn!r} is cut along {len(cut)} dimensions, more than {_MOST_CUT_DIMENSIONS}")
    if _is_overlapping(filled, cut):
        raise ValueError(f"parts of {fqn!r} overlap")


def _is_overlapping(parts: Sequence[ChunkStorageMetadata], cut: Sequence[int]) -> bool:
    """Return whether parts with the size of the whole overlap: one dimension after the other, as meshes cut them."""
    if len(parts) < 2 or not cut:
        return len(parts) > 1
    dim, *others = cut
    slices: dict[tuple[int, int], list[ChunkStorageMetadata]] = {}
    for part in parts:
        slices.setdefault((part.offsets[dim], part.offsets[dim] + part.sizes[dim]), []).append(part)
    ends = sorted(slices)
    if all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends)):
        return any(_is_overlapping(slice_, others) for slice_ in slices.values())
    return _is_overlapping_anywhere(parts, cut)


def _is_overlapping_anywhere(parts: Sequence[ChunkStorageMetadata], cut: Sequence[int]) -> bool:
    """Return whether parts overlap: boxes cover one exactly if their corners, with alternating signs, sum to its own.

    Raises: ValueError when there would be too many corners.
    """
    if len(cut) > _MOST_CORNER_DIMENSIONS:
        raise ValueError(f"parts that form no grid are cut along more than {_MOST_CORNER_DIMENSIONS} dimensions")
    corners: Counter[tuple[int, ...]] = Counter()
    for part in parts:
        for ends in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(part.offsets[dim] + end * part.sizes[dim] for dim, end in zip(cut, ends))
            corners[corner] += (-1) ** sum(ends)
    low = [min(part.offsets[dim] for part in parts) for dim in cut]
    high = [max(part.offsets[dim] + part.sizes[dim] for part in parts) for dim in cut]
    outer = itertools.product(*zip(low, high))
    return bool({corner for corner, count in corners.items() if count} - set(outer))


def _read_chunks(entry: Any, files: Sequence[str], *, has_digests: bool) -> list[tuple[tuple[int, ...], str, Piece]]:
    name, shape, chunks = entry
    dtype = dtype_of_name(name)
    Piece.require_shape(shape)
    found = []
    for offsets, sizes, number, begin, end, *more in chunks:
        if not len(offsets) == len(sizes) == len(shape) or any(type(x) is not int or x < 0 for x in (*offsets, number)):
            raise ValueError("a part has invalid dimensions for its tensor")
        piece = Piece(dtype, tuple(sizes), begin, end, *more)
        if len(more) != has_digests or (has_digests and not is_digests(piece.digests, end - begin)):
            raise ValueError("the digests of a part are invalid")
        found.append((tuple(offsets), files[number], piece))
    return found


@dataclass(frozen=True)
class WrittenPiece:
    """The place where a part of a tensor was written; ``header`` is the digest of its file's header."""

    file_name: str
    header: str
    piece: Piece


def make_index(metadata: Metadata, results: Sequence[WriteResult]) -> dict[str, Any]:
    """Return as JSON what `TensorIndex.read` reads, and ``sizes`` of all files in bytes."""
    values = {result.index.fqn: json.loads(result.storage_data) for result in results if _is_value(result)}
    sizes: dict[str, int] = {}
    headers: dict[str, str] = {}
    where: dict[MetadataIndex, WrittenPiece] = {}
    for result in results:
        if not _is_value(result):
            where[result.index] = written = result.storage_data
            sizes[written.file_name] = max(written.piece.end, sizes.get(written.file_name, 0))
            headers[written.file_name] = written.header
    names = list(sizes)
    numbers = {name: number for number, name in enumerate(names)}
    tensors: dict[str, Any] = {}
    for fqn, kept in metadata.state_dict_metadata.items():
        if isinstance(kept, TensorStorageMetadata):
            chunks = []
            for chunk in kept.chunks:
                written = where[MetadataIndex(fqn, chunk.offsets)]
                piece, number = written.piece, numbers[written.file_name]
                chunks.append([list(chunk.offsets), list(chunk.sizes), number, piece.begin, piece.end, piece.digests])
            tensors[fqn] = [name_of_dtype(kept.properties.dtype), list(kept.size), chunks]
    return {"files": names, "headers": headers, "tensors": tensors, "values": values, "sizes": sizes}


def _is_value(result: WriteResult) -> bool:
    return isinstance(result.storage_data, str)
