"""Models of the zoo on GPUs, in every layout: each rank has its own GPU, or the ranks share one over gloo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from detrain_nb.node.agent.agent import count_gpus

from ..parallel.zoo.cases import QUICK, SLOW, require_expected
from ..parallel.zoo.trials import Trials

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(count_gpus() == 0, reason="no GPU on this machine"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    with Trials("cuda") as started:
        yield started


@pytest.mark.parametrize("layout", ["looks", "pp", "tp", "dp_shard"])
@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_model_is_right_or_refused_with_a_reason(trials: Trials, name: str, layout: str) -> None:
    require_expected(trials, name, layout)
