"""The torchrun command line and environment of every node of a plan; no other module writes them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from .guarded import RUN_MODULE
from .plan import Plan

__all__ = ["NodeLaunch", "Program", "RankConfig", "Rendezvous", "launch_in_operator", "launch_job", "launch_node"]

WORKER_MODULE = "detrain_nb.node.rank.worker"
LAUNCHER_MODULE = "detrain_nb.node.rank.launcher"
RENDEZVOUS_BACKEND = "detrain-bound"
JOB_BACKEND, ELASTIC_BACKEND = "detrain-job", "detrain-elastic"
_DYNAMIC = (ELASTIC_BACKEND, "c10d")  # nodes may come and go
# Where torchrun finds our rendezvous, by the entry points of its group ``torchrun.handlers``.
RENDEZVOUS_HANDLERS = {
    RENDEZVOUS_BACKEND: "detrain_nb.node.rank.rendezvous:make_handler",
    JOB_BACKEND: "detrain_nb.node.job.rendezvous:make_handler",
    ELASTIC_BACKEND: "detrain_nb.node.job.elastic:make_handler",
}
RANK_CONFIG_VARIABLE = "DETRAIN_NB_RANK_CONFIG"
STORE_FD_VARIABLE = "DETRAIN_NB_STORE_FD"  # a bound socket that the agent passes to the launcher
JOB_KEY_VARIABLE = "DETRAIN_NB_JOB_KEY"  # hex: the nodes of an elastic job authenticate each other's entries with it
JOB_NODES_VARIABLE = "DETRAIN_NB_JOB_NODES"  # their names as a JSON list, by node rank
JOB_END_VARIABLE = "DETRAIN_NB_JOB_END"  # the file in which a node's rendezvous writes why it stopped the ranks
NOT_SHARED_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # else restarted ranks get the store of the old ones
WARM_FD_VARIABLE = "DETRAIN_NB_WARM_FD"  # where the agent sends orders to its warm process
GPUS_VARIABLE = "DETRAIN_NB_GPUS"  # GPU indices as the agent counts them; it sets CUDA_VISIBLE_DEVICES by them
TERMINAL_COLUMNS, TERMINAL_ROWS = 80, 24  # the terminal size that programs on a rank are given
LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"  # where the ranks of a session's only node listen
_ALWAYS_FIT = 8  # ranks that any node is assumed to have room for
_PER_PROCESSOR = 4
_RANK_BYTES = 250_000_000  # memory of torch, a process group and a small model


@dataclass(frozen=True)
class RankConfig:
    """Settings of a worker and its interpreter besides torchrun's own variables; passed in the environment."""

    agent_socket: str
    folder: str
    device: str
    backend: str
    seed: int
    threads: int
    group_timeout_s: float = 0.0  # 0: torch's own
    is_only_node: bool = False  # no rank is on another
    is_work_folder: bool = False  # the folder was created for the session, and must not be another user's
    # When the nodes cannot reach each other, torchrun knows this node alone: its first rank, and the real world size.
    first_rank: int = 0
    world_size: int = 0

    @property
    def is_apart(self) -> bool:
        return self.world_size > 0

    def to_env(self) -> dict[str, str]:
        return {RANK_CONFIG_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> RankConfig:
        return cls(**json.loads(env[RANK_CONFIG_VARIABLE]))


@dataclass(frozen=True)
class Rendezvous:
    """How the nodes of a launch find each other.

    ``kind`` is one of ours ("detrain-bound" for sessions, "detrain-job", "detrain-elastic") or torchrun's "static" or
    "c10d". ``endpoint`` is where node 0's store listens. The other nodes have ``timeout_s`` seconds to join, and a
    node that is silent for ``silence_s`` seconds counts as lost.
    """

    kind: str
    run_id: str
    endpoint: tuple[str, int]
    timeout_s: float = 120.0  # the other nodes may be slower to import torch
    max_restarts: int = 0
    silence_s: float = 60.0


@dataclass(frozen=True)
class Program:
    """The program of every rank: a script or a module under Python, or a command, with its arguments."""

    kind: str  # "script", "module", "command"
    argv: tuple[str, ...]


@dataclass(frozen=True)
class NodeLaunch:
    """The process to start on a node: a command line and the variables to add to its environment."""

    argv: list[str]
    env: dict[str, str] = field(repr=False)  # it may hold secrets


def launch_node(
    plan: Plan,
    config: RankConfig,
    *,
    node_rank: int,
    python: str,
    run_id: str,
    store: tuple[str, int] | None,
    interface: str,
    start: str,
    extra_env: Mapping[str, str],
) -> NodeLaunch:
    """Write the command line of one node of a session.

    ``start`` is "fork" (torchrun's elastic agent in our launcher, with forked ranks) or "exec" (plain torchrun).
    ``store`` is the address and port of node 0 at which the store listens. ``interface`` is the network interface
    through which the ranks of this node reach the other nodes. Without a ``store`` the nodes cannot reach each other:
    each has a store of its own, and no process group is created.
    """
    node, nodes = plan.nodes[node_rank], len(plan.nodes)
    if store is None:
        config = replace(config, first_rank=node.ranks[0], world_size=plan.world_size)
        node_rank, nodes = 0, 1
    rendezvous = Rendezvous(RENDEZVOUS_BACKEND, run_id, store or (LOOPBACK, 0))
    options = [
        *_write_options(rendezvous, nodes=nodes, ranks=len(node.ranks), node_rank=node_rank),
        "--start-method=fork",
        "--monitor-interval=0.05",
        "--log-dir=torchelastic",  # in the session's folder, and removed with it
        *("--no-python", python, "-c", RUN_MODULE, WORKER_MODULE),
    ]
    module = LAUNCHER_MODULE if start == "fork" else "torch.distributed.run"
    env = {
        # torch reads it at import, before the fork: no OpenMP or OpenBLAS thread may exist at the fork
        "OMP_NUM_THREADS": "1",
        **_listen_at(interface),
        # the flight recorder keeps the last collectives of a rank, on gloo too
        "TORCH_FR_BUFFER_SIZE": "128",  # a dump takes 25 us an entry, with the GIL held
        # our own watch ends a hung wait; torch's log of that, with its C++ stack, would appear in the cell
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        NOT_SHARED_VARIABLE: "1",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYTHONUNBUFFERED": "1",
        # the notebook renders a rank's output as a terminal does: tqdm queries its size, rich its abilities
        "COLUMNS": str(TERMINAL_COLUMNS),
        "LINES": str(TERMINAL_ROWS),
        "TTY_COMPATIBLE": "1",
        **({} if node.gpus is None else {GPUS_VARIABLE: ",".join(map(str, node.gpus))}),
        **extra_env,
        # connect a group when it is created, so that its peers are checked before it is used
        "TORCH_GLOO_LAZY_INIT": "0",
        **config.to_env(),
    }
    return NodeLaunch([python, "-c", RUN_MODULE, module, *options], env)


def launch_job(
    rendezvous: Rendezvous,
    program: Program,
    *,
    nodes: int | tuple[int, int],
    ranks: int,
    node_rank: int,
    python: str,
    interface: str = "",
    local_address: str = "",
    node_names: Sequence[str] = (),
    key: str = "",
    end_file: str = "",
    options: Sequence[str] = (),
    extra_env: Mapping[str, str] | None = None,
) -> NodeLaunch:
    """Write the command line of one node of a job: plain torchrun, with the user's program as its ranks.

    ``nodes`` is the number of nodes, or the fewest and the most of an elastic job. ``ranks`` is the number of ranks of
    this node, which reaches the other nodes through ``interface`` and is reached at ``local_address``; empty: as torch
    finds them. ``key`` is the secret that the nodes of an elastic job share, 32 bytes in hex. ``options`` are further
    options of torchrun.
    Raises: ValueError when the arguments do not fit together.
    """
    _check_together(rendezvous, program, nodes)
    is_ours = rendezvous.kind in RENDEZVOUS_HANDLERS
    begins_anew = bool(rendezvous.max_restarts) or (not isinstance(nodes, int) and nodes[0] < nodes[1])
    argv = [
        # with our code at hand, torchrun must not import modules from the job's folder
        *((python, "-c", RUN_MODULE, "torch.distributed.run") if is_ours else (python, "-m", "torch.distributed.run")),
        *_write_options(rendezvous, nodes=nodes, ranks=ranks, node_rank=node_rank),
        *([f"--local-addr={local_address}"] if local_address else []),
        *options,
        *_write_program(program),
    ]
    env = {
        "OMP_NUM_THREADS": "1",  # what torchrun would set, with a warning
        "PYTHONUNBUFFERED": "1",
        **(_listen_at(interface) if interface else {}),
        **({NOT_SHARED_VARIABLE: "1"} if rendezvous.kind == "c10d" and begins_anew else {}),
        **({JOB_KEY_VARIABLE: key} if key else {}),
        **({JOB_NODES_VARIABLE: json.dumps(list(node_names))} if node_names else {}),
        **({JOB_END_VARIABLE: end_file} if end_file else {}),
        **(extra_env or {}),
    }
    return NodeLaunch(argv, env)


def launch_in_operator(program: Program, *, python: str) -> NodeLaunch:
    """Write the command line of one node when a Kubernetes operator sets torchrun's own variables.

    These are PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT.
    """
    _check_program(program)
    argv = [python, "-m", "torch.distributed.run", *_write_program(program)]
    return NodeLaunch(argv, {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})


def _check_together(rendezvous: Rendezvous, program: Program, nodes: int | tuple[int, int]) -> None:
    _check_program(program)
    if rendezvous.kind not in _DYNAMIC and not isinstance(nodes, int):
        raise ValueError(f"the {rendezvous.kind} rendezvous needs a fixed number of nodes, not {nodes[0]}:{nodes[1]}")
    if rendezvous.kind == JOB_BACKEND and rendezvous.max_restarts:
        raise ValueError(f"max_restarts={rendezvous.max_restarts} needs the {ELASTIC_BACKEND} rendezvous")


def _check_program(program: Program) -> None:
    if not program.argv:
        raise ValueError("the program is empty: name a script, a module or a command")


def _write_options(
    rendezvous: Rendezvous, *, nodes: int | tuple[int, int], ranks: int, node_rank: int
) -> tuple[str, ...]:
    """Write torchrun's options about the nodes."""
    address, port = rendezvous.endpoint
    conf = {"join_timeout" if rendezvous.kind in _DYNAMIC else "timeout": round(rendezvous.timeout_s)}
    if rendezvous.kind == "c10d":
        conf["is_host"] = int(node_rank == 0)
    if rendezvous.kind in (JOB_BACKEND, ELASTIC_BACKEND):
        conf["silence"] = round(rendezvous.silence_s)
    if rendezvous.kind in RENDEZVOUS_HANDLERS:
        conf["rank"] = node_rank  # torchrun passes --node-rank only to its own static rendezvous
    return (
        f"--nnodes={nodes if isinstance(nodes, int) else ':'.join(map(str, nodes))}",
        f"--nproc-per-node={ranks}",
        *([f"--node-rank={node_rank}"] if rendezvous.kind == "static" else []),
        f"--rdzv-backend={rendezvous.kind}",
        f"--rdzv-endpoint={f'[{address}]' if ':' in address else address}:{port}",
        f"--rdzv-id={rendezvous.run_id}",
        "--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in conf.items()),
        *([f"--max-restarts={rendezvous.max_restarts}"] if rendezvous.max_restarts else []),
    )


def _write_program(program: Program) -> list[str]:
    """Write the program for torchrun, whose parser drops one ``--`` and expands ``$`` in arguments."""
    first, *arguments = program.argv
    if program.kind == "script" and first.startswith("-"):  # Python would take it for an option
        first = os.path.join(os.curdir, first)
    kept = [argument.replace("$", "$$") for argument in arguments]
    if program.kind == "command":
        return ["--no-python", "--", first, *kept]
    return [*(["-m"] if program.kind == "module" else []), "--", first.replace("$", "$$"), *kept]


def _listen_at(interface: str) -> dict[str, str]:
    """Set the network interface on which gloo and NCCL listen and connect."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def threads_per_rank(ranks: int, *, cpus: int) -> int:
    """Return the number of threads torch may use in each of ``ranks`` ranks that share ``cpus`` processors."""
    return max(1, cpus // ranks)


def most_ranks(*, cpus: int, free_bytes: int) -> int:
    """Return how many ranks fit on a node with ``cpus`` processors and ``free_bytes`` of memory; 0 bytes: unknown."""
    fitting = _PER_PROCESSOR * cpus
    return max(_ALWAYS_FIT, min(fitting, free_bytes // _RANK_BYTES) if free_bytes else fitting)


def describe_crowd(ranks: int, *, where: str, cpus: int, free_bytes: int) -> str:
    """Describe what ``ranks`` ranks need on a node, and what the node has."""
    free = f" and {free_bytes / 1e9:.1f} GB of free memory" if free_bytes else ""
    processors = "1 processor" if cpus == 1 else f"{cpus} processors"
    has = f"{where}, which has {processors}{free}"
    return f"{ranks:,} ranks on {has}: they need about {ranks * _RANK_BYTES / 1e9:.0f} GB and share the processors"


def usable_cpus() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
