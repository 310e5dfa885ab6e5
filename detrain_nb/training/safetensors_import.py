"""Import of a model's values from files of transformers and others: safetensors, one file or several with an index.

Each rank reads the part that it has, whatever the layout.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..errors import DetrainError, SpecError
from ..storage import Location, shown
from ..text import name_some
from . import saving
from .plain import parse_json
from .safetensors_export import INDEX, MOST_INDEX_BYTES, MOST_INDEX_VALUES, ONE_FILE
from .state import ModelState
from .tensor_files import Piece, foreign_errors, locate_safetensors, read_header, read_whole
from .tensor_index import TensorIndex
from .tensor_store import read_tensors

_SHOWN = 4  # names in a message

_Pieces = dict[str, tuple[str, Piece]]  # by name: the file, and the place in it


def import_safetensors(url: str, model: Any, *, files: Any = None) -> list[str]:
    """Read values from a file, or from a folder as transformers writes it, into a model in any layout.

    Values are converted to the model's dtypes. Returns the names in the files that the model does not have, with a
    warning. Every tensor of the model must be in the files, in the model's shape; one name of tied parameters suffices.

    Collective: all ranks. Raises: SpecError, before anything is changed, when the files do not match the model;
    DetrainError when they cannot be read.
    """
    ranks = saving.begin()
    pieces = ranks.first(lambda: _find_pieces(url, files))
    states: list[ModelState] = []
    located: list[Location] = []

    def describe() -> list[tuple[str, ...]]:
        located[:] = locate_safetensors(url, files=files)[:1]
        states[:] = [ModelState(model)]
        return states[0].tied()

    tied = [names for groups in ranks.gather(describe) for names in groups]
    [state], [place] = states, located
    sources = _match(state.tensors, pieces, tied, _base_prefix(state))
    index = _index_of({name: pieces[source] for name, source in sources.items()})
    wrong = dict.fromkeys(text for texts in ranks.gather(lambda: state.check(index, "")) for text in texts)
    if wrong:
        some = name_some([shown(text) for text in wrong], most=_SHOWN, separator="; ")
        raise SpecError(f"{place.name} does not match the model: {some}")

    def read() -> set[str]:
        tensors = state.tensors
        with torch.no_grad():
            read_tensors(place, index, tensors, may_be_links=True)
            state.put_in_order()
            state.take({**state.values, **tensors})
        return set(sources.values())

    used: set[str] = set().union(*ranks.gather(read))
    others = {other for names in tied if used.intersection(names) for other in names}
    unused = sorted(pieces.keys() - used - others)
    if unused and ranks.rank == 0:
        some = name_some([shown(name) for name in unused], most=_SHOWN)
        warnings.warn(f"{place.name} has tensors that the model does not have: {some}", stacklevel=2)
    return unused


def _find_pieces(url: str, files: Any) -> _Pieces:
    """Read the headers of all files. Raises: SpecError when there are no files, DetrainError for a damaged one."""
    place, name = locate_safetensors(url, files=files)
    there = (place / name if name else place).exists()
    if not there:
        raise SpecError(f"{(place / name if name else place).name} does not exist")
    found: _Pieces = {}
    for file_name in [name] if name else _list_files(place):
        found |= {tensor: (file_name, piece) for tensor, piece in read_header(place / file_name).items()}
    return found


def _list_files(place: Location) -> list[str]:
    names = place.names()
    if INDEX in names:
        with foreign_errors((place / INDEX).name, "read"):
            text = read_whole(place / INDEX, limit_bytes=MOST_INDEX_BYTES, may_be_link=True)
            index = parse_json(text, most_values=MOST_INDEX_VALUES)
            weight_map = index.get("weight_map") if isinstance(index, dict) else None
            if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
                raise ValueError("it has no weight_map, which names the file of each tensor")
            wanted = sorted(set(weight_map.values()))
        there = set(names)
        if missing := [name for name in wanted if name not in there]:
            raise DetrainError(
                f"{place.name}: {shown(missing[0])} is missing, one of {len(wanted)} files that {INDEX} names"
            )
        return wanted
    found = [ONE_FILE] if ONE_FILE in names else [name for name in names if name.endswith(".safetensors")]
    if len(found) != 1:
        raise SpecError(f"{place.name} has {len(found)} safetensors files and no {INDEX}: give the path of one file")
    return found


def _match(names: Iterable[str], pieces: _Pieces, tied: Sequence[Sequence[str]], prefix: str) -> dict[str, str]:
    """Return the name in the files of each name in the model: its own, a tied one's, or with another prefix."""
    found = {}
    for name in names:
        others = [other for group in tied if name in group for other in group]
        for other in (name, *others):
            candidates = (other, other.removeprefix(prefix), prefix + other)
            if source := next((candidate for candidate in candidates if candidate in pieces), None):
                found[name] = source
                break
    return found


def _base_prefix(state: ModelState) -> str:
    """Return transformers' prefix of the base model, which the names of a model without its head lack."""
    module = state.modules[0] if state.modules else None
    prefix = getattr(module, "base_model_prefix", "")
    return f"{prefix}." if isinstance(prefix, str) and prefix else ""


def _index_of(pieces: Mapping[str, tuple[str, Piece]]) -> TensorIndex:
    shapes = {name: piece.shape for name, (_, piece) in pieces.items()}
    chunks = {name: [((0,) * len(piece.shape), file_name, piece)] for name, (file_name, piece) in pieces.items()}
    return TensorIndex.of(shapes, chunks, {})
