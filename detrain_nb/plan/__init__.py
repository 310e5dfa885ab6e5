"""WHO does what: which ranks run on which node, on which device. Frozen dataclasses, arithmetic only."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import SpecError, count_ranks, short_ranks

__all__ = ["MOST_RANKS", "NodeOffer", "NodePlan", "Plan", "parse_ranks", "plan_nodes", "plan_one_node", "split_names"]

DEVICES = ("auto", "cpu", "cuda")
MOST_RANKS = 1 << 16  # of one session


@dataclass(frozen=True)
class NodeOffer:
    """What a node has, and what the user wants of it.

    ``gpus`` are the indices that it may use. ``devices`` is "auto", "cpu", "cuda", or the indices wanted; ``ranks`` is
    how many, None for one a GPU, on the CPU one.
    """

    name: str
    gpus: tuple[int, ...]
    devices: str | tuple[int, ...] = "auto"
    ranks: int | None = None


@dataclass(frozen=True)
class NodePlan:
    """The ranks of one node; the position in ``ranks`` is the local rank.

    ``name`` is empty for this machine. ``gpus`` are the indices of the GPUs, by local rank; None: those there are, in
    their order.
    """

    ranks: tuple[int, ...]
    device: str
    name: str = ""
    gpus: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Plan:
    """A launch, resolved: the nodes in order of node rank, and the group's backend."""

    nodes: tuple[NodePlan, ...]
    backend: str

    @property
    def world_size(self) -> int:
        return sum(len(node.ranks) for node in self.nodes)

    @property
    def device(self) -> str:
        """The device type of the ranks; of several, ``cpu+cuda``."""
        return "+".join(sorted({node.device for node in self.nodes}))

    @property
    def node_of(self) -> dict[int, int]:
        """Which node, by its position, has a rank."""
        return {rank: index for index, node in enumerate(self.nodes) for rank in node.ranks}

    @property
    def cuda_ranks(self) -> frozenset[int]:
        """The ranks whose device is a GPU."""
        return frozenset(rank for node in self.nodes if node.device == "cuda" for rank in node.ranks)

    @property
    def hosts(self) -> dict[str, tuple[int, ...]]:
        """The ranks of every node that has a name."""
        return {node.name: node.ranks for node in self.nodes if node.name and node.ranks}

    @property
    def node_names(self) -> dict[int, str]:
        """The name of every rank's node, of those that have one."""
        return {rank: name for name, ranks in self.hosts.items() for rank in ranks}

    def without(self, gone: Collection[int]) -> tuple[Plan, dict[int, int]]:
        """The plan of those that are left when ranks are ``gone``, numbered from 0 again; and the new number of each.

        The nodes keep their positions; one may be left without ranks.
        """
        left = [rank for rank in range(self.world_size) if rank not in gone]
        number = {rank: new for new, rank in enumerate(left)}
        nodes = [
            replace(node, ranks=tuple(number[rank] for rank in node.ranks if rank in number)) for node in self.nodes
        ]
        return replace(self, nodes=tuple(nodes)), number


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
    return Plan((NodePlan(tuple(range(ranks)), device),), backend or _default_backend({device}))


def plan_nodes(offers: Sequence[NodeOffer], *, device: str, backend: str | None, ranks: int | None = None) -> Plan:
    """Number the ranks of several nodes, in the order of the nodes. ``ranks`` is how many each of them has, where it
    does not say so itself; ``device`` what it uses, where it says "auto".

    Raises: SpecError when the numbers do not fit.
    """
    if device not in DEVICES:
        raise SpecError(f"device {device!r} is none of {', '.join(DEVICES)}")
    nodes: list[NodePlan] = []
    first = 0
    for offer in offers:
        wanted = device if offer.devices == "auto" else offer.devices
        chosen = _gpus_to_use(offer, wanted, offer.ranks or ranks)
        count = offer.ranks or ranks or max(1, len(chosen))
        if chosen and count > len(chosen):
            raise SpecError(f"{count} ranks on node {offer.name} need {count} GPUs, it has {_list(offer.gpus)}")
        kind = "cuda" if chosen else "cpu"
        numbers = tuple(range(first, first + count))
        nodes.append(NodePlan(numbers, kind, offer.name, chosen[:count] if chosen else None))
        first += count
    return Plan(tuple(nodes), backend or _default_backend({node.device for node in nodes}))


def _gpus_to_use(offer: NodeOffer, wanted: str | tuple[int, ...], ranks: int | None) -> tuple[int, ...]:
    """Empty where the ranks of a node use the CPU."""
    if wanted == "cpu" or wanted == "auto" and not offer.gpus:
        return ()
    if isinstance(wanted, tuple):
        if missing := [index for index in wanted if index not in offer.gpus]:
            raise SpecError(f"node {offer.name} has no GPU {missing[0]}: it has {_list(offer.gpus)}")
        return wanted
    if not offer.gpus:
        raise SpecError(f"device cuda but node {offer.name} has no GPU: use --device cpu, or check nvidia-smi there")
    if wanted == "auto" and ranks is not None and ranks > len(offer.gpus):
        have = f"{ranks} ranks but {len(offer.gpus)} GPUs on node {offer.name}"
        raise SpecError(f"{have}: use --device cpu, or at most {len(offer.gpus)} ranks there")
    return offer.gpus


def _list(gpus: tuple[int, ...]) -> str:
    return f"GPUs {', '.join(map(str, gpus))}" if gpus else "none"


def _default_backend(devices: set[str]) -> str:
    return "cpu:gloo,cuda:nccl" if "cuda" in devices else "gloo"


def parse_ranks(
    text: str | int | Iterable[int] | None, *, world_size: int, hosts: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[int, ...]:
    """Resolve a choice of ranks: ``"0,2"``, ``"0-3"``, ``"-1"`` (the last), ``"all"``, a number, a list, None for all;
    with ``hosts``, a name among them that is no such choice is the ranks there.

    Returns the ranks in ascending order, each once. Raises: SpecError.
    """
    if text is None:
        return tuple(range(world_size))
    if isinstance(text, int):
        chosen = [_one_rank(text, world_size)]
    elif isinstance(text, str):
        if "" in (parts := [part.strip() for part in text.split(",")]) and len(parts) > 1:
            raise SpecError(
                f"{text!r} is no choice of ranks: nothing stands before or behind a comma, give them like 0,2"
            )
        chosen = [rank for part in parts for rank in _part_of_ranks(part, world_size, hosts or {})]
    elif isinstance(text, Iterable):
        chosen = [_one_rank(rank, world_size) for rank in text]
    else:
        raise SpecError(f"{text!r} is no choice of ranks: give a number, a list of them, or text like 0,2 or 0-3")
    if not chosen:
        raise SpecError("no rank was chosen: give ranks like 0,2 or 0-3 or all")
    return tuple(sorted(set(chosen)))


def split_names(names: str | Iterable[str]) -> list[str]:
    """Names as they are given: several with commas, or a list."""
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _part_of_ranks(part: str, world_size: int, hosts: Mapping[str, tuple[int, ...]]) -> list[int]:
    if part == "all":
        return list(range(world_size))
    first, dash, last = part.partition("-") if not part.startswith("-") else (part, "", "")
    try:
        start, end = int(first), int(last) if dash else int(first)
    except ValueError:
        if part in hosts:
            return list(hosts[part])
        known = f", or a host: {', '.join(hosts)}" if hosts else ""
        raise SpecError(f"{part!r} is no choice of ranks: give ranks like 0,2 or 0-3 or -1 or all{known}") from None
    if not dash:
        return [_one_rank(start, world_size)]
    if end < start:
        raise SpecError(f"{part!r} runs backwards: give {end}-{start}")
    return [_one_rank(rank, world_size) for rank in range(start, end + 1)]


def _one_rank(rank: int, world_size: int) -> int:
    try:
        rank = operator.index(rank)
    except TypeError:
        raise SpecError(f"{rank!r} is no rank: give a whole number") from None
    if not -world_size <= rank < world_size:
        raise SpecError(
            f"rank {rank} is not there: the session has {count_ranks(world_size)}, {short_ranks(range(world_size))}"
        )
    return rank % world_size
