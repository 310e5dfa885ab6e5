"""WHO does what: which ranks run on which node, on which device. Frozen dataclasses, arithmetic only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .errors import SpecError

__all__ = ["NodePlan", "Plan", "parse_ranks", "plan_one_node"]

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class NodePlan:
    """The ranks of one node; the position in ``ranks`` is the local rank."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A launch, resolved: the nodes in order of node rank, the device type of all ranks, the group's backend."""

    nodes: tuple[NodePlan, ...]
    device: str
    backend: str

    @property
    def world_size(self) -> int:
        return sum(len(node.ranks) for node in self.nodes)


def plan_one_node(*, ranks: int | None, device: str, backend: str | None, gpus: int) -> Plan:
    """Place ``ranks`` ranks on one node that has ``gpus`` GPUs; by default one rank a GPU, else two on the CPU.

    Raises: SpecError when the numbers do not fit.
    """
    if device not in DEVICES:
        raise SpecError(f"device {device!r} is none of {', '.join(DEVICES)}")
    if device == "auto":
        device = "cuda" if gpus and (ranks is None or ranks <= gpus) else "cpu"
        if gpus and device == "cpu":
            raise SpecError(f"{ranks} ranks but {gpus} GPUs: use --device cpu, or at most {gpus} ranks")
    if device == "cuda":
        if not gpus:
            raise SpecError("device cuda but no GPU was found: use --device cpu, or check nvidia-smi")
        if ranks is not None and ranks > gpus:
            raise SpecError(f"{ranks} ranks on cuda need {ranks} GPUs but this machine has {gpus}: use -n {gpus}")
    if ranks is None:
        ranks = gpus if device == "cuda" else 2
    if ranks < 1:
        raise SpecError(f"{ranks} ranks: a session needs at least 1")
    default_backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    return Plan((NodePlan(tuple(range(ranks))),), device, backend or default_backend)


def parse_ranks(text: str | int | Iterable[int] | None, *, world_size: int) -> tuple[int, ...]:
    """Resolve a choice of ranks: ``"0,2"``, ``"0-3"``, ``"-1"`` (the last), ``"all"``, a number, a list, None for all.

    Returns the ranks in ascending order, each once. Raises: SpecError.
    """
    if text is None:
        return tuple(range(world_size))
    if isinstance(text, int):
        chosen = [_one_rank(text, world_size)]
    elif isinstance(text, str):
        chosen = [rank for part in text.split(",") for rank in _part_of_ranks(part.strip(), world_size)]
    else:
        chosen = [_one_rank(rank, world_size) for rank in text]
    if not chosen:
        raise SpecError("no rank was chosen: give ranks like 0,2 or 0-3 or all")
    return tuple(sorted(set(chosen)))


def _part_of_ranks(part: str, world_size: int) -> list[int]:
    if part == "all":
        return list(range(world_size))
    first, dash, last = part.partition("-") if not part.startswith("-") else (part, "", "")
    try:
        start, end = int(first), int(last) if dash else int(first)
    except ValueError:
        raise SpecError(f"{part!r} is no choice of ranks: give ranks like 0,2 or 0-3 or -1 or all") from None
    if not dash:
        return [_one_rank(start, world_size)]
    if end < start:
        raise SpecError(f"{part!r} runs backwards: give {end}-{start}")
    return [_one_rank(rank, world_size) for rank in range(start, end + 1)]


def _one_rank(rank: int, world_size: int) -> int:
    if not -world_size <= rank < world_size:
        raise SpecError(f"rank {rank} is not there: {world_size} ranks run, 0-{world_size - 1}")
    return rank % world_size
