"""What torchrun is started with."""

from __future__ import annotations

import pytest

from detrain_nb.launch import RankConfig, launch_node
from detrain_nb.plan import plan_one_node


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_ranks_that_are_started_again_do_not_look_into_the_store_of_those_before(start: str) -> None:
    plan = plan_one_node(ranks=2, device="cpu", backend=None, gpus=0)
    config = RankConfig("agent.sock", "folder", "cpu", "gloo", seed=0, threads=1)
    store = {"store": ("127.0.0.1", 4711), "interface": "lo", "extra_env": {}}
    launch = launch_node(plan, config, node_rank=0, python="python", run_id="mine", start=start, **store)
    assert launch.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
