"""The launcher's own process, from which all ranks are forked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from detrain_nb.launch import RankConfig, launch_node
from detrain_nb.plan import plan_one_node

# A process that has queried CUDA for its GPUs, as is_available() does, cannot fork processes that use them.
_CODE = """
import sys
import torch

def ask_cuda(*args):
    sys.exit("CUDA was called before the fork")

asked = ("is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_properties")
for name in asked:
    setattr(torch.cuda, name, ask_cuda)
from detrain_nb.node.rank.launcher import read_config
from detrain_nb.node.rank.preload import preload

preload()
config = read_config(sys.argv[1:])
assert all(getattr(torch.cuda, name) is ask_cuda for name in asked), "ranks find torch as it was"
print(config.nproc_per_node, config.start_method)
"""


def test_nothing_asks_cuda_before_the_ranks_are_forked(tmp_path: Path) -> None:
    """The test also works without a GPU, where a query would do no harm, and with a torch that has no CUDA."""
    plan = plan_one_node(ranks=3, device="cpu", backend=None, gpus=0)
    config = RankConfig("agent.sock", "folder", "cpu", "gloo", seed=0, threads=1)
    more = {"store": ("127.0.0.1", 4711), "interface": "lo", "extra_env": {}, "start": "fork"}
    launch = launch_node(plan, config, node_rank=0, python="python", run_id="mine", **more)
    command = [sys.executable, "-c", _CODE, *launch.argv[4:]]
    # torchrun creates a folder in its working directory
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "3 fork\n"), ended.stderr
