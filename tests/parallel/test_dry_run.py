"""Layouts without ranks: what a dry run says is what ranks hold."""

from __future__ import annotations

import math
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
from .tensor_models import Llama

TOKENS = torch.zeros(2, 16, dtype=torch.long)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    yield from _start(2)


def _start(ranks: int) -> Iterator[Session]:
    with Session.start(ranks, device="cpu") as started:
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


def test_it_leaves_tracebacks_as_they_were() -> None:
    """torch puts a rank before every line of them when a process group is made."""
    before = sys.excepthook
    dry_run(GPT(), {"pp": 2}, example_inputs=TOKENS)
    assert sys.excepthook is before


def test_norms_of_another_stage_are_not_sharded() -> None:
    """What stands for one is of its class, to isinstance."""
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8)]
    axes = {"pp": 2, "dp_shard": 2}
    found = dry_run(nn.Sequential(*layers), axes, example_inputs=torch.zeros(4, 8), pp=["2"], precision="bf16")
    assert len(found.rows) == 2


def require_largest(session: Session, axes: dict[str, int]) -> None:
    """Names and shapes of the largest parameters are those on the rank that the row is of, and no other is larger."""
    held = session.run_cell(f"mixed_ranks.shapes_here({axes})", timeout_s=60).values
    rows = dry_run(Llama(layers=4), axes, example_inputs=TOKENS).rows
    for row in rows:
        shapes = held[row.ranks[0]]
        largest = dict(row.largest)
        assert len(largest) == 3 and largest.items() <= shapes.items()
        others = [math.prod(shape) for name, shape in shapes.items() if name not in largest]
        assert min(map(math.prod, largest.values())) >= max(others)
    ends = dict(rows[0].largest) | dict(rows[-1].largest)
    assert ends["embed.weight"] == ends["head.weight"] == (49, 32), "of 97 rows"


def test_the_largest_parameters_are_told_as_a_rank_has_them(session: Session) -> None:
    require_largest(session, {"tp": 2})


@pytest.mark.slow
def test_it_says_what_stages_of_parts_hold() -> None:
    axes = {"pp": 2, "tp": 2}
    for four_ranks in _start(4):
        held = four_ranks.run_cell(f"mixed_ranks.bytes_here({axes})", timeout_s=60).values
        found = dry_run(GPT(), axes, example_inputs=TOKENS)
        assert [row.ranks for row in found.rows] == [(0, 1), (2, 3)]
        for row in found.rows:
            assert (row.parameter_bytes, row.optimizer_bytes) == held[row.ranks[0]]
            assert held[row.ranks[1]][0] <= row.parameter_bytes
        require_largest(four_ranks, axes)


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


def test_stages_of_parts_of_the_sequence_and_of_the_classes() -> None:
    """A plan for both; the weights are cut as without."""
    axes, options = {"pp": 2, "tp": 2}, {"sequence_parallel": True, "loss_parallel": True}
    found = dry_run(Llama(), axes, example_inputs=TOKENS, **options)
    usual = dry_run(Llama(), axes, example_inputs=TOKENS)
    assert found.plan is not None and found.plan.sequence is not None and found.plan.shard_head
    assert [row.parameter_bytes for row in found.rows] == [row.parameter_bytes for row in usual.rows]


def test_wrong_sizes_are_told() -> None:
    with pytest.raises(SpecError, match="dp_shard=-1: a dry run needs every size"):
        dry_run(GPT(), {"dp_shard": -1}, example_inputs=TOKENS)
    with pytest.raises(SpecError, match="no axis of a mesh"):
        dry_run(GPT(), {"dq": 2}, example_inputs=TOKENS)
    with pytest.raises(SpecError, match="stages"):
        dry_run(nn.Linear(4, 4), {"pp": 3}, example_inputs=torch.zeros(2, 4))


def test_options_of_a_mesh_without_the_axis_are_refused_as_parallelize_does() -> None:
    with pytest.raises(SpecError, match="no pp axis"):
        dry_run(GPT(), {"dp_shard": 2}, example_inputs=TOKENS, pp=["blocks.1"])
    with pytest.raises(SpecError, match="a tp axis"):
        dry_run(GPT(), {"dp_shard": 2}, example_inputs=TOKENS, sequence_parallel=True)
    with pytest.raises(SpecError, match="cp=2: torch's context parallel"):
        dry_run(GPT(), {"cp": 2}, example_inputs=TOKENS)
