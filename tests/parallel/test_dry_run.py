"""Layouts without ranks: what a dry run says is what ranks hold."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from detrain_nb import Session
from detrain_nb.errors import SpecError
from detrain_nb.parallel import dry_run

from .models import GPT

TOKENS = torch.zeros(2, 16, dtype=torch.long)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session.start(2, device="cpu") as started:
        started.run_cell(f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import mixed_ranks")
        yield started


@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"pp": 2}, {"tp": 2}])
def test_it_says_what_real_ranks_hold(session: Session, axes: dict[str, int]) -> None:
    """Of 97 rows the first rank has 49: a row of the table is that of its first rank."""
    held = session.run_cell(f"mixed_ranks.bytes_here({axes})").values
    found = dry_run(GPT(), axes, example_inputs=TOKENS)
    for row in found.rows:
        assert (row.parameter_bytes, row.optimizer_bytes) == held[row.ranks[0]]
        assert row.gradient_bytes == row.parameter_bytes
        for rank in row.ranks:
            assert 0.99 * row.parameter_bytes < held[rank][0] <= row.parameter_bytes


@pytest.mark.slow
def test_five_hundred_gpus_on_one_machine() -> None:
    """A model of 8 billion parameters, with no memory for one of them."""
    with torch.device("meta"):
        model = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4096, 32, 16384, 0.0, batch_first=True, norm_first=True),
            40,
            enable_nested_tensor=False,
        )
        example = torch.empty(1, 2048, 4096)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert whole > 32e9
    began = time.monotonic()
    found = dry_run(model, {"pp": 4, "dp_replicate": 2, "dp_shard": 64}, example_inputs=example, activations="full")
    assert time.monotonic() - began < 60, "a deadline, not a measure"
    assert sum(len(row.ranks) for row in found.rows) == 512
    assert sum(row.parameter_bytes * len(row.ranks) for row in found.rows) == pytest.approx(2 * whole, rel=0.01)
    text = str(found)
    assert "pp=4 x dp_replicate=2 x dp_shard=64: 512 ranks, 1F1B" in text and "128-255" in text
    assert not dist.is_initialized() and all(parameter.is_meta for parameter in model.parameters())
    assert "<pre>" in found._repr_html_() and found.peak.total_bytes == max(row.total_bytes for row in found.rows)


def test_activations_and_frozen_parameters_count_as_they_are() -> None:
    model = GPT()
    kept = dry_run(model, {"dp_shard": 2}, example_inputs=TOKENS).peak
    again = dry_run(model, {"dp_shard": 2}, example_inputs=TOKENS, activations="full").peak
    assert again.activation_bytes < kept.activation_bytes / 4
    model.requires_grad_(False)
    frozen = dry_run(model, {"dp_shard": 2}, example_inputs=TOKENS, activations="full").peak
    assert (frozen.gradient_bytes, frozen.optimizer_bytes) == (0, 0)
    assert frozen.parameter_bytes == again.parameter_bytes
    assert "mixed_ranks" not in sys.modules


def test_wrong_sizes_are_told() -> None:
    with pytest.raises(SpecError, match="dp_shard=-1: a dry run needs every size"):
        dry_run(GPT(), {"dp_shard": -1}, example_inputs=TOKENS)
    with pytest.raises(SpecError, match="no axis of a mesh"):
        dry_run(GPT(), {"dq": 2}, example_inputs=TOKENS)
    with pytest.raises(SpecError, match="stages"):
        dry_run(nn.Linear(4, 4), {"pp": 3}, example_inputs=torch.zeros(2, 4))
