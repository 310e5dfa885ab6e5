"""Export of a model to the files that transformers and others read: safetensors, with a config.json.

Whatever the layout, the files have the whole model under its plain names. Tensors are assembled one at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import SpecError
from ..storage import Location
from . import saving
from .arguments import number_of
from .plain import parse_json
from .ranks import Ranks
from .state import ModelState
from .tensor_files import bytes_of, foreign_errors, locate_safetensors, make_header, open_whole, read_whole

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MOST_INDEX_BYTES = 1 << 28
MOST_INDEX_VALUES = 1 << 23
_PART = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")


# ---- out


@dataclass(frozen=True)
class _Entry:
    """A tensor of the whole model, and the first rank that has it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owner: int

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def export_safetensors(url: str, model: Any, *, most_file_bytes: int = 5_000_000_000, files: Any = None) -> list[str]:
    """Write the whole model to the folder ``url``, or to the one file that it names; return the names of the files.

    A folder gets `model.safetensors` or, if that would have more than ``most_file_bytes``, several files and an index.
    If the model has a ``config``, the folder also gets what ``config.save_pretrained`` writes, and transformers'
    ``from_pretrained`` can read it. Tied parameters are written once, under their first name. Each file is written
    whole or not at all, the index last. Then the index of an earlier export and the files that it names are removed,
    and no others.

    Collective: all ranks. Raises: SpecError for invalid arguments, for shapes that differ between ranks, and when
    several files are to be written to a folder that has a `model.safetensors`; DetrainError when writing fails.
    """
    ranks = saving.begin()
    states: list[ModelState] = []
    located: list[tuple[Location, str | None]] = []

    def describe() -> tuple[list[_Entry], list[tuple[str, ...]]]:
        if (most := number_of(most_file_bytes)) is None or not most >= 1:
            raise SpecError(f"most_file_bytes={most_file_bytes!r}: give a number of bytes, 1 or more")
        located[:] = [locate_safetensors(url, files=files)]
        states[:] = [ModelState(model)]
        tensors = states[0].tensors
        entries = [_Entry(name, each.dtype, tuple(each.shape), ranks.rank) for name, each in tensors.items()]
        return entries, states[0].tied()

    entries = _whole(ranks.gather(describe))
    [(place, name)] = located
    parts = _cut(entries, most_file_bytes if name is None else None)
    names = _file_names(len(parts)) if name is None else [name]
    if name is None and len(parts) > 1:
        ranks.first(lambda: _require_no_whole(place))
    with torch.no_grad():
        tensors = states[0].in_saved_order()
        for file_name, part in zip(names, parts):
            _write_part(place / file_name, part, tensors, ranks)

    def finish() -> list[str]:
        if name is not None:
            return [name]
        earlier = _earlier(place)
        more = _write_config(place, model)
        if len(parts) > 1:
            weight_map = {entry.name: file_name for file_name, part in zip(names, parts) for entry in part}
            total = {"total_size": sum(entry.size_bytes for entry in entries)}
            text = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2)
            (place / INDEX).write(text.encode())
            more.append(INDEX)
        _remove(place, earlier - {*names, *more})
        return [*names, *more]

    return ranks.first(finish)


def _whole(told: list[tuple[list[_Entry], list[tuple[str, ...]]]]) -> list[_Entry]:
    """Return every tensor of the model once, in the order of the ranks. Raises: SpecError when shapes differ."""
    found: dict[str, _Entry] = {}
    for entries, _ in told:
        for entry in entries:
            first = found.setdefault(entry.name, entry)
            if first.shape != entry.shape:
                raise SpecError(
                    f"{entry.name} has shape {first.shape} on rank {first.owner}, {entry.shape} on rank {entry.owner}"
                )
    for tied in dict.fromkeys(names for _, groups in told for names in groups):
        for name in [name for name in tied if name in found][1:]:
            del found[name]
    return list(found.values())


def _cut(entries: list[_Entry], most_bytes: int | None) -> list[list[_Entry]]:
    parts: list[list[_Entry]] = [[]]
    size = 0
    for entry in entries:
        if most_bytes is not None and parts[-1] and size + entry.size_bytes > most_bytes:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += entry.size_bytes
    return parts


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [ONE_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_part(place: Location, part: list[_Entry], tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write one file, on the rank that owns its first tensor. Collective: all ranks, to the end, whichever fails."""
    writer = part[0].owner if part else 0
    brought = (_bring(entry, tensors.get(entry.name), writer, ranks) for entry in part)

    def write() -> None:
        try:
            if ranks.rank == writer:
                header, _ = make_header({entry.name: (entry.dtype, entry.shape) for entry in part}, {"format": "pt"})
                with open_whole(place) as file:
                    file.write(header)
                    for whole in brought:
                        assert whole is not None
                        file.write(bytes_of(whole))
        finally:  # the other ranks still send when this one cannot write
            for _ in brought:
                pass

    ranks.gather(write)


def _bring(entry: _Entry, tensor: Tensor | None, writer: int, ranks: Ranks) -> Tensor | None:
    """Return the whole tensor, on the CPU of the rank that writes it; None on other ranks."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()  # all ranks of its mesh have it
    if ranks.rank not in (entry.owner, writer):
        return None
    if ranks.rank == entry.owner:
        assert tensor is not None
        whole = tensor.detach().cpu().contiguous()
    else:
        whole = torch.empty(entry.shape, dtype=entry.dtype)
    if entry.owner != writer and entry.size_bytes:
        raw = whole.reshape(-1).view(torch.uint8)
        if ranks.rank == entry.owner:
            dist.send(raw, dst=writer, group=ranks.group)
        else:
            dist.recv(raw, src=entry.owner, group=ranks.group)
    return whole if ranks.rank == writer else None


def _write_config(place: Location, model: Any) -> list[str]:
    config = _find_config(model)
    if config is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        names = sorted(os.listdir(folder))
        for name in names:
            (place / name).put(os.path.join(folder, name))
    return names


def _find_config(model: Any) -> Any:
    """Return the config of the model itself, however it is wrapped."""
    for outer in ModelState(model).modules:
        for module in outer.modules():
            if hasattr(getattr(module, "config", None), "save_pretrained"):
                return module.config
    return None


def _earlier(place: Location) -> set[str]:
    """Return the files of an earlier export, which could be mistaken for this one's; the user's other files are not."""
    there = set(place.names())
    parts: set[str] = set()
    if INDEX in there:
        text = read_whole(place / INDEX, limit_bytes=MOST_INDEX_BYTES, may_be_link=True)
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):  # no index of ours
            weight_map = parse_json(text, most_values=MOST_INDEX_VALUES)["weight_map"]
            parts = {name for name in weight_map.values() if _PART.fullmatch(name)}
    return there & {INDEX, *parts}


def _require_no_whole(place: Location) -> None:
    """Check that no file of a whole model exists: readers prefer it to several with an index. Raises: SpecError."""
    if (place / ONE_FILE).exists():
        raise SpecError(f"{place.name} has a {ONE_FILE}, which would be read instead of several files: remove it")


def _remove(place: Location, names: set[str]) -> None:
    with foreign_errors(place.name, "cleared"):
        for name in names:
            if not place.files.isdir((place / name).path):
                place.files.rm_file((place / name).path)
