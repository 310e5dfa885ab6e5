"""A plan -> the torchrun command line and the environment of every node: the one place that knows them."""

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
STORE_FD_VARIABLE = "DETRAIN_NB_STORE_FD"  # a bound socket that the agent hands to the launcher
JOB_KEY_VARIABLE = "DETRAIN_NB_JOB_KEY"  # hex: the nodes of an elastic job know what they have written by it
JOB_NODES_VARIABLE = "DETRAIN_NB_JOB_NODES"  # their names as a JSON list, by node rank
JOB_END_VARIABLE = "DETRAIN_NB_JOB_END"  # the file in which a node's rendezvous writes why it has ended the ranks
NOT_SHARED_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # else ranks that are started again get the old ones' store
WARM_FD_VARIABLE = "DETRAIN_NB_WARM_FD"  # where the agent gives orders to its warm process
GPUS_VARIABLE = "DETRAIN_NB_GPUS"  # which of the GPUs that the agent has counted: it writes CUDA_VISIBLE_DEVICES
TERMINAL_COLUMNS, TERMINAL_ROWS = 80, 24  # what programs on a rank believe that they draw on
LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"  # where the ranks of a session's only node listen
_ALWAYS_FIT = 8  # ranks of a node, whatever it has
_PER_PROCESSOR = 4
_RANK_BYTES = 250_000_000  # what torch, a group and a small model take


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
    # Where the nodes do not reach each other, and torchrun knows this one alone: its first rank, and how many in all.
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
    "c10d". ``endpoint`` is where node 0's store listens. The others may come ``timeout_s`` after it, and a node of
    which nothing is heard for ``silence_s`` counts as lost.
    """

    kind: str
    run_id: str
    endpoint: tuple[str, int]
    timeout_s: float = 120.0  # the other nodes may be slower to import torch
    max_restarts: int = 0
    silence_s: float = 60.0


@dataclass(frozen=True)
class Program:
    """What every rank runs: a script or a module under Python, or a command; and its arguments."""

    kind: str  # "script", "module", "command"
    argv: tuple[str, ...]


@dataclass(frozen=True)
class NodeLaunch:
    """What is started on a node: a command line and what to add to its environment."""

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

    ``start`` is "fork" (torchrun's engine in our launcher, ranks forked) or "exec" (the plain torchrun command).
    ``store`` is where the store listens: an address of node 0, and the port there. ``interface`` is the one that the
    ranks of this node reach the others through. No ``store``: the nodes do not reach each other, each has one of its
    own, and no group is made.
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
        "--log-dir=torchelastic",  # in the session's folder, and gone with it
        *("--no-python", python, "-c", RUN_MODULE, WORKER_MODULE),
    ]
    module = LAUNCHER_MODULE if start == "fork" else "torch.distributed.run"
    env = {
        # torch reads it at import, before the fork: no thread of OpenMP or OpenBLAS may exist then
        "OMP_NUM_THREADS": "1",
        **_listen_at(interface),
        # the flight recorder keeps the last collectives of a rank, on gloo too
        "TORCH_FR_BUFFER_SIZE": "128",  # a dump takes 25 us an entry, with the GIL held
        # our own watch ends a wait; what torch logs then, with its C++ stack, would stand in the cell
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        NOT_SHARED_VARIABLE: "1",
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

    ``nodes`` is how many there are, or how few and how many there may be. ``ranks`` are those of this node, which
    reaches the others through ``interface`` and is reached at ``local_address``; empty: as torch finds them.
    ``key`` is what nodes of an elastic job share, 32 bytes in hex. ``options`` are more of torchrun's own.
    Raises: ValueError where they do not go together.
    """
    _check_together(rendezvous, program, nodes)
    is_ours = rendezvous.kind in RENDEZVOUS_HANDLERS
    begins_anew = bool(rendezvous.max_restarts) or (not isinstance(nodes, int) and nodes[0] < nodes[1])
    argv = [
        # only where our code is must torchrun not import what lies in the job's folder
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
    """Write the command line of one node where an operator of Kubernetes says all else, in torchrun's own variables.

    These are PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT.
    """
    _check_program(program)
    argv = [python, "-m", "torch.distributed.run", *_write_program(program)]
    return NodeLaunch(argv, {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})


def _check_together(rendezvous: Rendezvous, program: Program, nodes: int | tuple[int, int]) -> None:
    _check_program(program)
    if rendezvous.kind not in _DYNAMIC and not isinstance(nodes, int):
        raise ValueError(f"the {rendezvous.kind} rendezvous takes a fixed number of nodes, not {nodes[0]}:{nodes[1]}")
    if rendezvous.kind == JOB_BACKEND and rendezvous.max_restarts:
        raise ValueError(f"max_restarts={rendezvous.max_restarts} needs the {ELASTIC_BACKEND} rendezvous")


def _check_program(program: Program) -> None:
    if not program.argv:
        raise ValueError("the program is empty: name a script, a module or a command")


def _write_options(
    rendezvous: Rendezvous, *, nodes: int | tuple[int, int], ranks: int, node_rank: int
) -> tuple[str, ...]:
    """What torchrun must know of the nodes."""
    address, port = rendezvous.endpoint
    conf = {"join_timeout" if rendezvous.kind in _DYNAMIC else "timeout": round(rendezvous.timeout_s)}
    if rendezvous.kind == "c10d":
        conf["is_host"] = int(node_rank == 0)
    if rendezvous.kind in (JOB_BACKEND, ELASTIC_BACKEND):
        conf["silence"] = round(rendezvous.silence_s)
    if rendezvous.kind in RENDEZVOUS_HANDLERS:
        conf["rank"] = node_rank  # torchrun passes --node-rank on to its own static rendezvous alone
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
    """Name the program as torchrun takes it, whose parser eats one ``--`` and which fills in ``$`` in arguments."""
    first, *arguments = program.argv
    if program.kind == "script" and first.startswith("-"):  # Python would take it for an option
        first = os.path.join(os.curdir, first)
    kept = [argument.replace("$", "$$") for argument in arguments]
    if program.kind == "command":
        return ["--no-python", "--", first, *kept]
    return [*(["-m"] if program.kind == "module" else []), "--", first.replace("$", "$$"), *kept]


def _listen_at(interface: str) -> dict[str, str]:
    """Where gloo and NCCL listen, and go out from."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def threads_per_rank(ranks: int, *, cpus: int) -> int:
    """How many threads torch may use in each of ``ranks`` ranks that share ``cpus`` processors."""
    return max(1, cpus // ranks)


def most_ranks(*, cpus: int, free_bytes: int) -> int:
    """How many ranks a node with so many processors and so much free memory has room for; 0 bytes are not known."""
    fitting = _PER_PROCESSOR * cpus
    return max(_ALWAYS_FIT, min(fitting, free_bytes // _RANK_BYTES) if free_bytes else fitting)


def describe_crowd(ranks: int, *, where: str, cpus: int, free_bytes: int) -> str:
    """Say what so many ranks take of a node, beside what it has."""
    free = f" and {free_bytes / 1e9:.1f} GB of free memory" if free_bytes else ""
    processors = "1 processor" if cpus == 1 else f"{cpus} processors"
    has = f"{where}, which has {processors}{free}"
    return f"{ranks:,} ranks on {has}: they take about {ranks * _RANK_BYTES / 1e9:.0f} GB and share the processors"


def usable_cpus() -> int:
    """The processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
