"""A batch cut into microbatches: a model may write into each, as it may into the whole batch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from detrain_nb.errors import SpecError
from detrain_nb.parallel.microbatches import Passage, cut_batch, cut_call, require_rows_in_tensors


def test_writing_into_one_part_leaves_what_was_computed_of_another() -> None:
    batch, weight = torch.ones(4, 3), nn.Parameter(torch.ones(3))
    first, second = (part["x"] for part in cut_batch({"x": batch}, rows=4, count=2))
    loss = (first * weight).sum()
    second.zero_()
    loss.backward()
    assert weight.grad is not None and weight.grad.tolist() == [2, 2, 2]
    assert batch.tolist() == [[1, 1, 1]] * 2 + [[0, 0, 0]] * 2


def test_arguments_that_are_shared_go_whole_to_every_microbatch() -> None:
    mask, rows = torch.ones(4, 4), torch.arange(4)
    args, kwargs = (rows, mask, {"masks": [mask, rows]}), {"mask": mask, "rows": rows, "scale": 2.0}
    shared = {"[0][1]", "[0][2]['masks'][0]", "[1]['mask']"}
    (first, named), (second, _) = cut_call(args, kwargs, rows=4, count=2, shared=shared)
    assert first[0].tolist() == [0, 1] and second[0].tolist() == [2, 3]
    assert first[1] is mask and first[2]["masks"][0] is mask and second[2]["masks"][1].tolist() == [2, 3]
    assert named["mask"] is mask and named["rows"].tolist() == [0, 1] and named["scale"] == 2.0
    assert [each for each, _ in cut_call((), {}, rows=4, count=2)] == [(), ()]


@pytest.mark.parametrize(
    "batch, lengths, place",
    [
        ({"x": torch.ones(4, 2), "lengths": [1, 2, 1, 2]}, None, "['lengths']"),
        ({"x": torch.ones(4, 2), "lengths": torch.ones(4).numpy()}, None, "['lengths']"),
        (([torch.ones(4, 2)] * 3,), {"[0]": 2}, "[0]"),
    ],
)
def test_list_with_an_entry_for_each_row_is_refused(batch: Any, lengths: Any, place: str) -> None:
    with pytest.raises(SpecError, match=re.escape(f"({place}), one for each of its 4 rows")):
        require_rows_in_tensors(batch, rows=4, lengths=lengths)


def test_other_lists_go_to_every_microbatch() -> None:
    batch = {"x": torch.ones(4, 2), "sizes": (8, 8, 8, 8), "levels": [torch.ones(4, 2)] * 4, "names": ["a", "b"]}
    require_rows_in_tensors(batch, rows=4, lengths={"['names']": 2, "['levels']": 4})


@pytest.mark.parametrize("shape", [(3, 2, 8), (4, 2, 8), (5,), (1, 2)])
def test_output_without_rows_first_is_refused(shape: tuple[int, ...]) -> None:
    passage = Passage([torch.ones(2, 3)] * 2, [None] * 2, [], None)
    for part in range(2):
        passage.take(part, (torch.ones(2, 5), torch.ones(shape)))
    with pytest.raises(SpecError, match=re.escape(f"output[1] of the model has shape {shape} for 2 rows")):
        passage.output()
