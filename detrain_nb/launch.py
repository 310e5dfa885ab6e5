"""A plan -> the torchrun command line and the environment of every node: the one place that knows them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from .guarded import RUN_MODULE
from .plan import Plan

__all__ = ["NodeLaunch", "RankConfig", "launch_node"]

WORKER_MODULE = "detrain_nb.node.rank.worker"
LAUNCHER_MODULE = "detrain_nb.node.rank.launcher"
RENDEZVOUS_BACKEND = "detrain-bound"
RENDEZVOUS_HANDLER = "detrain_nb.node.rank.rendezvous:make_handler"
RANK_CONFIG_VARIABLE = "DETRAIN_NB_RANK_CONFIG"
STORE_FD_VARIABLE = "DETRAIN_NB_STORE_FD"  # a bound socket that the agent hands to the launcher
WARM_FD_VARIABLE = "DETRAIN_NB_WARM_FD"  # where the agent gives orders to its warm process
GPUS_VARIABLE = "DETRAIN_NB_GPUS"  # which of the GPUs that the agent has counted: it writes CUDA_VISIBLE_DEVICES
TERMINAL_COLUMNS, TERMINAL_ROWS = 80, 24  # what programs on a rank believe that they draw on
LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"  # where the ranks of a session's only node listen
_RENDEZVOUS_LIMIT_S = 120  # the other nodes may be slower to import torch


@dataclass(frozen=True)
class RankConfig:
    """What a worker and its interpreter must know beside torchrun's own variables; travels in the environment."""

    agent_socket: str
    folder: str
    device: str
    backend: str
    seed: int
    threads: int
    group_timeout_s: float = 0.0  # 0: torch's own
    is_only_node: bool = False  # no rank is on another
    is_work_folder: bool = False  # it was made for the session, and may be nobody else's

    def to_env(self) -> dict[str, str]:
        return {RANK_CONFIG_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> RankConfig:
        return cls(**json.loads(env[RANK_CONFIG_VARIABLE]))


@dataclass(frozen=True)
class NodeLaunch:
    """What the agent of a node starts: a command line and what to add to its environment."""

    argv: list[str]
    env: dict[str, str] = field(repr=False)  # it may hold secrets


def launch_node(
    plan: Plan,
    config: RankConfig,
    *,
    node_rank: int,
    python: str,
    run_id: str,
    store: tuple[str, int],
    interface: str,
    start: str,
    extra_env: Mapping[str, str],
) -> NodeLaunch:
    """Write the command line of one node of a session.

    ``start`` is "fork" (torchrun's engine in our launcher, ranks forked) or "exec" (the plain torchrun command).
    ``store`` is where the store listens: an address of node 0, and the port there. ``interface`` is the one that the
    ranks of this node reach the others through.
    """
    node = plan.nodes[node_rank]
    address, port = store
    options = [
        f"--nnodes={len(plan.nodes)}",
        f"--nproc-per-node={len(node.ranks)}",
        f"--rdzv-backend={RENDEZVOUS_BACKEND}",
        f"--rdzv-endpoint={f'[{address}]' if ':' in address else address}:{port}",
        f"--rdzv-id={run_id}",
        f"--rdzv-conf=rank={node_rank},timeout={_RENDEZVOUS_LIMIT_S}",
        "--start-method=fork",
        "--monitor-interval=0.05",
        "--log-dir=torchelastic",  # in the session's folder, and gone with it
        *("--no-python", python, "-c", RUN_MODULE, WORKER_MODULE),
    ]
    module = LAUNCHER_MODULE if start == "fork" else "torch.distributed.run"
    env = {
        # torch reads it at import, before the fork: no thread of OpenMP or OpenBLAS may exist then
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
        # the flight recorder keeps the last collectives of a rank, on gloo too
        "TORCH_FR_BUFFER_SIZE": "128",  # a dump takes 25 us an entry, with the GIL held
        # our own watch ends a wait; what torch logs then, with its C++ stack, would stand in the cell
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        # ranks that are started again would find in torchrun's own store where those before them listened
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYTHONUNBUFFERED": "1",
        # the notebook draws as a terminal does what a rank prints: tqdm asks for its size, rich for what it can do
        "COLUMNS": str(TERMINAL_COLUMNS),
        "LINES": str(TERMINAL_ROWS),
        "TTY_COMPATIBLE": "1",
        **({} if node.gpus is None else {GPUS_VARIABLE: ",".join(map(str, node.gpus))}),
        **extra_env,
        # a group is connected when it is made: who is at the other ends is looked up before it is used
        "TORCH_GLOO_LAZY_INIT": "0",
        **config.to_env(),
    }
    return NodeLaunch([python, "-c", RUN_MODULE, module, *options], env)


def threads_per_rank(ranks: int, *, cpus: int) -> int:
    """How many threads torch may use in each of ``ranks`` ranks that share ``cpus`` processors."""
    return max(1, cpus // ranks)


def usable_cpus() -> int:
    """The processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
