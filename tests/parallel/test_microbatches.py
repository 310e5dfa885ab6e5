"""A batch cut into microbatches: each may be written into, as the whole batch may."""

from __future__ import annotations

import torch
from torch import nn

from detrain_nb.parallel.microbatches import cut_batch


def test_writing_into_one_part_leaves_what_was_computed_of_another() -> None:
    batch, weight = torch.ones(4, 3), nn.Parameter(torch.ones(3))
    first, second = (part["x"] for part in cut_batch({"x": batch}, rows=4, count=2))
    loss = (first * weight).sum()
    second.zero_()
    loss.backward()
    assert weight.grad is not None and weight.grad.tolist() == [2, 2, 2]
    assert batch.tolist() == [[1, 1, 1]] * 2 + [[0, 0, 0]] * 2
