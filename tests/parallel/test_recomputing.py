"""Activations that are computed again, and blocks that are compiled: not only the same numbers, but that it happens."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from detrain_nb import Session

from .test_parallelize import CLOSE

AXES = [
    {"dp_shard": 2},
    pytest.param({"dp_replicate": 2}, marks=pytest.mark.thorough),
    pytest.param({"tp": 2}, marks=pytest.mark.thorough),
    pytest.param({"pp": 2}, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session.start(2, device="cpu") as started:
        started.run_cell(f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import recomputing_ranks")
        yield started


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_what_is_computed_again_is_not_kept(session: Session, axes: dict[str, int]) -> None:
    """Four blocks with four matrix products each, two microbatches of two blocks with "pp".

    "full" runs all again but the last product of a block, whose output nobody asks for; "selective" no product, and
    everything else. Of what is kept in memory the first frees two thirds, and the other a fifth.
    """
    none, selective, full = (
        session.run_cell(f"recomputing_ranks.step({axes}, {activations!r})", timeout_s=30).values
        for activations in ("none", "selective", "full")
    )
    for rank in range(2):
        assert [found[rank]["products"] for found in (none, selective, full)] == [16, 16, 28]
        assert [found[rank]["gelu"] for found in (none, selective, full)] == [4, 8, 8]
    last = max(none, key=lambda rank: none[rank]["bytes"])  # only there is a loss to look at
    kept = [found[last]["bytes"] for found in (none, selective, full)]
    assert kept[0] > 1.1 * kept[1] and kept[1] > 2 * kept[2] > 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(
    "axes", [{"dp_shard": 2}, pytest.param({"tp": 2}, marks=pytest.mark.thorough), {"pp": 2}], ids=str
)
def test_blocks_are_compiled_on_every_rank(session: Session, axes: dict[str, int]) -> None:
    """One graph for all blocks, with gradients and without, as they have one code; and numbers as of the whole."""
    for apart, frames, graphs in session.run_cell(
        f"recomputing_ranks.compile_blocks({axes}, compile=True)", timeout_s=100
    ).values.values():
        assert frames >= 2 and graphs >= 2
        assert all(apart[name] < limit for name, limit in CLOSE.items()), apart


def test_nothing_is_compiled_where_nobody_asks_for_it(session: Session) -> None:
    for _, frames, graphs in session.run_cell(
        "recomputing_ranks.compile_blocks({'pp': 2}, compile=False)", timeout_s=60
    ).values.values():
        assert (frames, graphs) == (0, 0)
