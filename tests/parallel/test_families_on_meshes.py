"""Every family of models in every layout, on real ranks: losses, gradients, their norm, AdamW's steps of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from detrain_nb import Session

FAMILIES = ("MLP", "ResNet", "U-Net", "nn.Transformer", "GPT tied")
OF_TRANSFORMERS = ("GPT-2", "Llama", "Qwen3", "Mixtral", "Bert", "T5", "ViT")
CLOSE = 2e-5  # relative, in float32
IMPORT = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import family_ranks"


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Session]:
    with Session.start(2, device="cpu") as started:
        started.run_cell(IMPORT, timeout_s=60)
        yield started


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Session]:
    with Session.start(4, device="cpu") as started:
        started.run_cell(IMPORT, timeout_s=60)
        yield started


def require_close(session: Session, family: str, axes: dict[str, int], **options: Any) -> None:
    if family in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    found = session.run_cell(f"family_ranks.train({family!r}, {axes}{given})", timeout_s=90).values
    for rank, apart in found.items():
        assert all(value < CLOSE for value in apart.values()), (rank, apart)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *OF_TRANSFORMERS])
@pytest.mark.parametrize("axes", [{"pp": 2}, {"tp": 2}, {"dp_shard": 2}], ids=str)
def test_on_two_ranks(two_ranks: Session, family: str, axes: dict[str, int]) -> None:
    require_close(two_ranks, family, axes)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *OF_TRANSFORMERS])
def test_stages_of_parts_on_four_ranks(four_ranks: Session, family: str) -> None:
    require_close(four_ranks, family, {"pp": 2, "tp": 2})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ResNet", "nn.Transformer", "GPT-2", "Mixtral", "T5"])
@pytest.mark.parametrize("axes", [{"pp": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids="x".join)
def test_shards_on_four_ranks(four_ranks: Session, family: str, axes: dict[str, int]) -> None:
    require_close(four_ranks, family, axes)
