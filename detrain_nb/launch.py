"""A plan -> the torchrun command line and the environment of every node: the one place that knows them."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from .plan import Plan

__all__ = ["NodeLaunch", "RankConfig", "launch_node"]

WORKER_MODULE = "detrain_nb.node.worker"
LAUNCHER_MODULE = "detrain_nb.node.launcher"
RENDEZVOUS_BACKEND = "detrain-bound"
_CONFIG_VARIABLE = "DETRAIN_NB_RANK_CONFIG"


@dataclass(frozen=True)
class RankConfig:
    """What a worker and its interpreter must know beside torchrun's own variables; travels in the environment."""

    agent_socket: str
    folder: str
    device: str
    backend: str
    seed: int
    threads: int

    def to_env(self) -> dict[str, str]:
        return {_CONFIG_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> RankConfig:
        return cls(**json.loads(env[_CONFIG_VARIABLE]))


@dataclass(frozen=True)
class NodeLaunch:
    """What the agent of a node starts: a command line and what to add to its environment."""

    argv: list[str]
    env: dict[str, str]


def launch_node(
    plan: Plan,
    config: RankConfig,
    *,
    node_rank: int,
    python: str,
    store_address: str,
    start: str,
    extra_env: Mapping[str, str],
) -> NodeLaunch:
    """Write the command line of one node of a session.

    ``start`` is "fork" (torchrun's engine in our launcher, ranks forked) or "exec" (the plain torchrun command).
    ``store_address`` is the one address that the store listens on; the system picks the port.
    """
    options = [
        f"--nnodes={len(plan.nodes)}",
        f"--nproc-per-node={len(plan.nodes[node_rank].ranks)}",
        f"--rdzv-backend={RENDEZVOUS_BACKEND}",
        f"--rdzv-endpoint={store_address}:0",
        f"--rdzv-id={uuid.uuid4().hex}",
        f"--rdzv-conf=rank={node_rank}",
        "--start-method=fork",
        "--monitor-interval=0.05",
        "--log-dir=torchelastic",  # in the session's folder, and gone with it
        "-m",
        WORKER_MODULE,
    ]
    module = LAUNCHER_MODULE if start == "fork" else "torch.distributed.run"
    env = {
        # torch reads it at import, before the fork: no thread of OpenMP or OpenBLAS may exist then
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # the flight recorder keeps the last collectives of a rank, on gloo too
        "TORCH_FR_BUFFER_SIZE": "2000",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYTHONUNBUFFERED": "1",
        **extra_env,
        **config.to_env(),
    }
    return NodeLaunch([python, "-m", module, *options], env)


def threads_per_rank(ranks: int, *, cpus: int) -> int:
    """How many threads torch may use in each of ``ranks`` ranks that share ``cpus`` processors."""
    return max(1, cpus // ranks)


def usable_cpus() -> int:
    """The processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
