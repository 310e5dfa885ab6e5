"""The arguments with which torchrun is started."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from detrain_nb.launch import NodeLaunch, Program, RankConfig, Rendezvous, launch_job, launch_node
from detrain_nb.plan import NodeOffer, plan_nodes, plan_one_node


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_ranks_that_are_started_again_do_not_look_into_the_store_of_those_before(start: str) -> None:
    plan = plan_one_node(ranks=2, device="cpu", backend=None, gpus=0)
    config = RankConfig("agent.sock", "folder", "cpu", "gloo", seed=0, threads=1)
    store = {"store": ("127.0.0.1", 4711), "interface": "lo", "extra_env": {}}
    launch = launch_node(plan, config, node_rank=0, python="python", run_id="mine", start=start, **store)
    assert launch.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_nodes_that_do_not_reach_each_other_have_a_store_each_on_the_loopback() -> None:
    plan = plan_nodes([NodeOffer(name, (), "cpu", 2) for name in ("a", "b")], device="cpu", backend=None, ranks=None)
    config = RankConfig("agent.sock", "folder", "cpu", "gloo", seed=0, threads=1)
    options = {"run_id": "mine", "start": "fork", "store": None, "interface": "eth0", "extra_env": {}}
    launch = launch_node(plan, config, node_rank=1, python="python", **options)
    assert {"--nnodes=1", "--rdzv-endpoint=127.0.0.1:0", "--nproc-per-node=2"} <= set(launch.argv)
    told = RankConfig.from_env(launch.env)
    assert (told.first_rank, told.world_size, told.is_apart, config.is_apart) == (2, 4, True, False)


def _read_back(launch: NodeLaunch, *, local_rank: int) -> list[str]:
    """Return the command of a rank, read by torchrun's own parser and templates."""
    import torch.distributed.run as torchrun
    from torch.distributed.elastic.utils import macros

    with mock.patch.dict(os.environ):  # torchrun sets OMP_NUM_THREADS
        config, command, arguments = torchrun.config_from_args(torchrun.parse_args(launch.argv[4:]))
    assert config.nproc_per_node == 2
    return [str(command), *macros.substitute(arguments, str(local_rank))]


_SERVER = Rendezvous("detrain-job", "job-1", ("127.0.0.1", 4711))
_NODES: dict[str, Any] = {"nodes": 2, "ranks": 2, "node_rank": 1, "python": "python"}


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
@example(["--", "$$", "${local_rank}", "--nnodes=7", "a b", "$(true)", "'\"", "\n", "-"])
@settings(deadline=None)
def test_a_program_gets_the_arguments_that_were_given(arguments: list[str]) -> None:
    command = launch_job(_SERVER, Program("command", ("python3", *arguments)), **_NODES)
    assert _read_back(command, local_rank=1) == ["python3", *arguments]
    script = launch_job(_SERVER, Program("script", ("train.py", *arguments)), **_NODES)
    assert _read_back(script, local_rank=1) == [sys.executable, "-u", "train.py", *arguments]


def test_names_that_look_like_options_of_torchrun_are_none() -> None:
    script = launch_job(_SERVER, Program("script", ("-$x.py", "a")), **_NODES)
    assert _read_back(script, local_rank=0)[2:] == ["./-$x.py", "a"]
    module = launch_job(_SERVER, Program("module", ("-m",)), **_NODES)
    assert _read_back(module, local_rank=0)[2:] == ["-m", "-m"]


def test_what_the_nodes_of_a_job_are_told() -> None:
    elastic = Rendezvous("detrain-elastic", "job-1", ("fd00::1", 4711), timeout_s=9, max_restarts=3, silence_s=30)
    more: dict[str, Any] = {**_NODES, "nodes": (1, 4), "key": "ab" * 32, "local_address": "fd00::2"}
    launch = launch_job(elastic, Program("module", ("trainer",)), interface="eth0", node_names=["a", "b"], **more)
    assert launch.argv[4:] == [
        *("--nnodes=1:4", "--nproc-per-node=2", "--rdzv-backend=detrain-elastic", "--rdzv-endpoint=[fd00::1]:4711"),
        *("--rdzv-id=job-1", "--rdzv-conf=join_timeout=9,silence=30,rank=1", "--max-restarts=3"),
        *("--local-addr=fd00::2", "-m", "--", "trainer"),
    ]
    assert launch.env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert launch.env["DETRAIN_NB_JOB_NODES"] == '["a", "b"]'
    assert "ab" * 32 not in f"{launch.argv} {launch!r}"


@pytest.mark.parametrize(
    ("rendezvous", "changed", "said"),
    [
        (_SERVER, {"nodes": (1, 2)}, "needs a fixed number of nodes, not 1:2"),
        (replace(_SERVER, max_restarts=1), {}, "max_restarts=1 needs the detrain-elastic rendezvous"),
    ],
)
def test_what_does_not_go_together_is_refused(rendezvous: Rendezvous, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        launch_job(rendezvous, Program("script", ("train.py",)), **{**_NODES, **changed})
