"""The doctor measures the GPUs that ranks would use, all at the same time."""

from __future__ import annotations

import pytest

from detrain_nb.doctor import examine
from detrain_nb.node.agent.agent import count_gpus
from detrain_nb.spec.node import Node

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(count_gpus() == 0, reason="no GPU on this machine"),
]


def test_speed_is_that_of_the_gpus() -> None:
    ranks = count_gpus()
    cell = examine([Node(host="localhost")], speed=True).cell("speed", "localhost")
    assert cell.state == "good"
    assert cell.text.endswith("(1 rank with a GPU)" if ranks == 1 else f"({ranks} ranks at once, each with a GPU)")
