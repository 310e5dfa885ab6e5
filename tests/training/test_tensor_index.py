"""The parts of a tensor, as an index names them."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from detrain_nb.errors import DetrainError
from detrain_nb.storage import locate
from detrain_nb.training import plain, tensor_index
from detrain_nb.training.plain import from_json
from detrain_nb.training.tensor_files import Piece
from detrain_nb.training.tensor_index import TensorIndex

Part = tuple[tuple[int, ...], tuple[int, ...]]  # its offsets and its sizes


def index_of(shape: tuple[int, ...], parts: list[Part]) -> TensorIndex:
    sizes_bytes = [torch.Size(sizes).numel() for _, sizes in parts]
    places = zip(itertools.accumulate(sizes_bytes, initial=0), sizes_bytes)
    chunks = [
        (begin, "file", Piece(torch.uint8, sizes, at, at + size)) for (begin, sizes), (at, size) in zip(parts, places)
    ]
    return TensorIndex.of({"w": shape}, {"w": chunks}, {})


@some.composite
def grids(draw: some.DrawFn) -> tuple[tuple[int, ...], list[Part]]:
    """Draw a shape and a grid of parts that covers it, as shards of a mesh do; some parts may have no elements."""
    cuts = draw(some.lists(some.lists(some.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=3))
    shape = tuple(map(sum, cuts))
    ends = [list(itertools.accumulate(sizes, initial=0)) for sizes in cuts]
    places = itertools.product(*(list(zip(begins, sizes)) for begins, sizes in zip(ends, cuts)))
    parts = [(tuple(begin for begin, _ in place), tuple(size for _, size in place)) for place in places]
    return shape, draw(some.permutations(parts))


@given(grids())
def test_parts_that_cover_a_tensor_are_taken(grid: tuple[tuple[int, ...], list[Part]]) -> None:
    assert index_of(*grid).shape("w") == grid[0]


@given(grids(), some.data())
def test_part_in_the_place_of_another_is_refused(
    grid: tuple[tuple[int, ...], list[Part]], data: some.DataObject
) -> None:
    shape, parts = grid
    number = data.draw(some.integers(0, len(parts) - 1))
    begin, sizes = parts[number]
    moved = tuple(data.draw(some.integers(0, whole - size)) for whole, size in zip(shape, sizes))
    parts[number] = moved, sizes
    if moved == begin or 0 in sizes:
        index_of(shape, parts)
    else:
        with pytest.raises(ValueError, match="parts of 'w' overlap"):
            index_of(shape, parts)


def test_parts_that_are_no_grid_are_taken() -> None:
    """Four parts surround a fifth in the middle, so no straight cut goes through the whole tensor."""
    spiral = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert index_of((3, 3), spiral).shape("w") == (3, 3)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_many_parts_cut_along_many_dimensions_take_no_minutes() -> None:
    """A mesh of eight axes can have as many parts, and an index that others wrote may list them."""
    cuts = list(itertools.product(range(4), repeat=8))[: 4**8]
    parts: list[Part] = [(begin, (1,) * 8) for begin in cuts]
    assert index_of((4,) * 8, parts).shape("w") == (4,) * 8
    parts[1] = parts[0]
    with pytest.raises(ValueError, match="parts of 'w' overlap"):
        index_of((4,) * 8, parts)


def test_parts_that_are_no_grid_are_taken_along_four_dimensions_and_refused_along_more() -> None:
    """A part has two corners along each dimension; a product of spirals is a grid along none of its dimensions."""
    spiral = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]

    def of_spirals(count: int) -> list[Part]:
        found: list[Part] = [((), ())]
        for number in range(count):
            turned = spiral if number % 2 else [(begin[::-1], sizes[::-1]) for begin, sizes in spiral]
            found = [(a + b, c + d) for a, c in found for b, d in turned]
        return found

    assert index_of((3,) * 4, of_spirals(2)).shape("w") == (3,) * 4
    with pytest.raises(ValueError, match="no grid are cut along more than 4 dimensions"):
        index_of((3,) * 6, of_spirals(3))


def test_parts_of_the_same_bytes_are_refused() -> None:
    """Otherwise an index of a few MB could turn a small file into a tensor of any size."""
    chunks = [((at, 0), "file", Piece(torch.uint8, (1, 4), 8, 12)) for at in range(3)]
    with pytest.raises(ValueError, match="parts of 'w' share the same bytes"):
        TensorIndex.of({"w": (3, 4)}, {"w": chunks}, {})


@pytest.mark.parametrize("text", [json.dumps([[]] * 999), json.dumps([{}] * 99)])
def test_index_of_more_than_any_has_is_not_parsed(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_index, "MOST_INDEX_VALUES", 1000)
    monkeypatch.setattr(tensor_index, "_MOST_INDEX_OBJECTS", 50)
    (tmp_path / "index").write_text(text)
    with pytest.raises(DetrainError, match=r"it has more than [\d,]+ (values|objects)"):
        TensorIndex.read(locate(str(tmp_path)), "index", {})


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-16", "utf-32-le", "utf-32-be", "utf-32"])
def test_values_are_not_hidden_in_another_encoding(encoding: str) -> None:
    """The bytes of U+2200, or of a quote that has more than one byte, look like the beginning of a string."""
    text = '["\u2200",' + ",".join(["[]"] * 2000) + "]"
    with pytest.raises(ValueError):
        plain.parse_json(text.encode(encoding), most_values=1000)
    with pytest.raises(ValueError):
        plain.parse_json("[1]".encode(encoding), most_values=1000)


@pytest.mark.parametrize("text", [b"\xef\xbb\xbf[1]", b'["\xff"]', b'["\xed\xa0\x80"]'])
def test_text_that_is_no_utf_8_is_not_taken(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"utf-8|UTF-8"):
        plain.parse_json(text, most_values=1000)
    assert plain.parse_json('["\u2200\u00e4"]'.encode(), most_values=1000) == ["\u2200\u00e4"]


def test_name_of_a_dtype_imports_nothing() -> None:
    """torch imports some of its modules when they are accessed as attributes."""
    assert from_json({"$dtype": "bfloat16"}) is torch.bfloat16
    before = set(sys.modules)
    for name in ("_inductor", "onnx", "_export"):
        with pytest.raises(ValueError, match="has an invalid value"):
            from_json({"$dtype": name})
    assert set(sys.modules) == before


def test_parts_cut_along_too_many_dimensions_are_refused() -> None:
    """31 parts, each one half of the rest, would have 33 billion corners."""
    dims = 30
    parts = [
        ((0,) * dim + (1,) + (0,) * (dims - dim - 1), (1,) * (dim + 1) + (2,) * (dims - dim - 1)) for dim in range(dims)
    ]
    with pytest.raises(ValueError, match="cut along 30 dimensions, more than 8"):
        index_of((2,) * dims, [*parts, ((0,) * dims, (1,) * dims)])


def test_part_behind_the_end_of_its_file_is_refused_before_it_has_memory(tmp_path: Path) -> None:
    index = {"values": {}, "files": ["f"], "tensors": {"w": ["F32", [1 << 40], [[[0], [1 << 40], 0, 0, 4 << 40]]]}}
    (tmp_path / "index").write_text(json.dumps(index))
    with pytest.raises(DetrainError, match="a part is beyond the end of its file"):
        TensorIndex.read(locate(str(tmp_path)), "index", {"f": 100})


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["$set", "$dict", "$counter"])
def test_elements_of_one_hash_are_refused(kind: str) -> None:
    alike = [number * ((1 << 61) - 1) for number in range(200_000)]
    with pytest.raises(ValueError, match="have the same hash"):
        from_json({kind: alike if kind == "$set" else [[key, 1] for key in alike]})


def test_hashes_are_not_counted_under_numbers_that_a_file_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are added by ``add_keys`` of values.py, which counts hashes under numbers that the file cannot know."""
    taken: list[int] = []
    monkeypatch.setattr(plain, "add_keys", lambda keys, add: (taken.extend(keys), add(keys, 0)))
    assert from_json({"$set": [1, 2]}) == {1, 2}
    assert from_json({"$counter": [[3, 1]]}) == {3: 1} == from_json({"$dict": [[3, 1]]})
    assert sorted(taken) == [1, 2, 3, 3]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("shape", [[0.5, 0], [-1, 0], "ab", 3, [10**4000] * 3000, [1] * 65, [1 << 63]])
def test_shape_that_is_none_is_refused(tmp_path: Path, shape: object) -> None:
    offsets = [0] * len(shape) if isinstance(shape, (list, str)) else []
    index = {"values": {}, "files": ["f"], "tensors": {"w": ["F32", shape, [[offsets, shape, 0, 0, 0]]]}}
    (tmp_path / "index").write_text(json.dumps(index))
    with pytest.raises(DetrainError):
        TensorIndex.read(locate(str(tmp_path)), "index", {"f": 0})
