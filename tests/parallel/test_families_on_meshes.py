"""Model families in every layout, on real ranks: losses, gradients, norms and AdamW's steps equal the whole model's."""

from __future__ import annotations

from typing import Any

import pytest

from detrain_nb import Session

FAMILIES = ("MLP", "ResNet", "U-Net", "nn.Transformer", "GPT tied")
OF_TRANSFORMERS = ("GPT-2", "Llama", "Qwen3", "Mixtral", "Bert", "T5", "ViT")
ON_TWO_RANKS = ({"pp": 2}, {"tp": 2}, {"dp_shard": 2})
ON_FOUR_RANKS = ({"pp": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2})
# Families much like another one on these axes are left to `make test-thorough`; test_tensor_parallel has more with tp.
LIKE_ANOTHER = {
    "pp": ("Qwen3", "Bert", "ViT"),
    "tp": ("ResNet", "GPT-2", "Llama", "Qwen3", "Mixtral", "Bert"),
    "dp_shard": ("U-Net", "nn.Transformer", "GPT-2", "Qwen3", "Bert", "ViT"),
}
# Four ranks are slow, so each pair of axes has another kind of model.
SLOW_ON_FOUR_RANKS = {"ppxtp": ("Llama",), "ppxdp_shard": ("ResNet",), "dp_shardxtp": ("GPT tied",)}
CLOSE = 2e-5  # relative, in float32


@pytest.fixture(scope="module")
def two_ranks(two_ranks: Session) -> Session:
    two_ranks.run_cell("import family_ranks", timeout_s=60)
    return two_ranks


@pytest.fixture(scope="module")
def four_ranks(four_ranks: Session) -> Session:
    four_ranks.run_cell("import family_ranks", timeout_s=60)
    return four_ranks


def require_close(session: Session, family: str, axes: dict[str, int], **options: Any) -> None:
    if family in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    found = session.run_cell(f"family_ranks.train({family!r}, {axes}{given})", timeout_s=90).values
    for rank, apart in found.items():
        assert all(value < CLOSE for value in apart.values()), (rank, apart)


@pytest.mark.parametrize(
    "axes, family",
    [
        pytest.param(axes, family, marks=mark, id=f"{axes}-{family}")
        for axes in ON_TWO_RANKS
        for family in (*FAMILIES, *OF_TRANSFORMERS)
        for mark in [pytest.mark.thorough if family in LIKE_ANOTHER["x".join(axes)] else pytest.mark.slow]
    ],
)
def test_on_two_ranks(two_ranks: Session, family: str, axes: dict[str, int]) -> None:
    require_close(two_ranks, family, axes)


@pytest.mark.parametrize(
    "axes, family",
    [
        pytest.param(axes, family, marks=mark, id=f"{'x'.join(axes)}-{family}")
        for axes in ON_FOUR_RANKS
        for family in (*FAMILIES, *OF_TRANSFORMERS)
        for mark in [pytest.mark.slow if family in SLOW_ON_FOUR_RANKS["x".join(axes)] else pytest.mark.thorough]
    ],
)
def test_two_axes_on_four_ranks(four_ranks: Session, family: str, axes: dict[str, int]) -> None:
    require_close(four_ranks, family, axes)


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_stages_of_shards_of_parts_on_eight_ranks(eight_ranks: Session) -> None:
    eight_ranks.run_cell("import family_ranks", timeout_s=60)
    for family in ("GPT-2", "Llama"):
        require_close(eight_ranks, family, {"pp": 2, "dp_shard": 2, "tp": 2})


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_stages_count_statistics_of_each_microbatch(two_ranks: Session, schedule: str) -> None:
    """A ResNet trains its BatchNorms; the whole model runs the same microbatches."""
    for rank, apart in two_ranks.run_cell(f"family_ranks.train_with_statistics({schedule!r})").values.items():
        assert apart["counted"] == 12 and all(apart[name] < CLOSE for name in apart if name != "counted"), (rank, apart)
