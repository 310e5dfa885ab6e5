"""Models and losses that do more than compute: right in every layout, or refused by name on all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from detrain_nb import Session
from detrain_nb.errors import RankError


@pytest.fixture(scope="module")
def ranks() -> Iterator[Session]:
    with Session.start(2, device="cpu") as started:
        started.run_cell(f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import unusual_ranks")
        yield started


def require_refusal(ranks: Session, code: str, message: str) -> None:
    """On all ranks, with the same words."""
    with pytest.raises(RankError) as caught:
        ranks.run_cell(code, timeout_s=60)
    told = {rank: (error.name, error.message) for rank, error in caught.value.errors.items()}
    assert sorted(told) == [0, 1] and len(set(told.values())) == 1, told
    assert told[0][0] == "SpecError" and re.search(message, told[0][1]), told


@pytest.mark.parametrize("axes", [{"dp_replicate": 2}, {"dp_shard": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_the_models_own_train_and_eval_are_called(ranks: Session, axes: dict[str, int]) -> None:
    for rank, apart in ranks.run_cell(f"unusual_ranks.evaluate_and_train({axes})", timeout_s=60).values.items():
        assert all(each < 1e-6 for each in apart), (rank, apart)
