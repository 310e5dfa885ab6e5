"""The placement of ranks on nodes and devices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ..errors import SpecError, count_ranks
from ..text import ShownAsText
from .batch import Batch
from .mesh import Mesh
from .picture import RankRow, draw_html, draw_text

DEVICES = ("auto", "cpu", "cuda")
MOST_RANKS = 1 << 16  # of one session


@dataclass(frozen=True)
class NodeOffer:
    """The GPUs of a node, and what the user wants to run on it.

    ``gpus`` are the indices of its usable GPUs. ``devices`` is "auto", "cpu", "cuda", or the wanted indices. ``ranks``
    is the number of ranks; None: one per GPU, or one on the CPU.
    """

    name: str
    gpus: tuple[int, ...]
    devices: str | tuple[int, ...] = "auto"
    ranks: int | None = None


@dataclass(frozen=True)
class NodePlan:
    """The ranks of one node; the position in ``ranks`` is the local rank.

    ``name`` is empty for this machine. ``gpus`` are GPU indices by local rank; None: the node's GPUs in their order.
    """

    ranks: tuple[int, ...]
    device: str
    name: str = ""
    gpus: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Plan(ShownAsText):
    """A resolved launch: the nodes in order of node rank, and the backend of the process group.

    The plan of a pipeline also has a mesh, and the batch of a step if its size was given; ``stages[i]`` are the stages
    at coordinate ``i`` of the pp axis.
    """

    nodes: tuple[NodePlan, ...]
    backend: str
    mesh: Mesh | None = None
    batch: Batch | None = None
    stages: tuple[tuple[int, ...], ...] = ()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(len(node.ranks) for node in self.nodes)

    @property
    def device(self) -> str:
        """The device type of the ranks, ``cpu+cuda`` when they differ."""
        return "+".join(sorted({node.device for node in self.nodes}))

    @property
    def node_of(self) -> dict[int, int]:
        """The position of every rank's node."""
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
        """The name of every rank's node, without nodes that have no name."""
        return {rank: name for name, ranks in self.hosts.items() for rank in ranks}

    def without(self, gone: Collection[int]) -> tuple[Plan, dict[int, int]]:
        """Return the plan without the ranks ``gone``, the others renumbered from 0, and the new number of each.

        The nodes keep their positions; a node may have no ranks left. The new plan has no mesh.
        """
        left = [rank for rank in range(self.world_size) if rank not in gone]
        number = {rank: new for new, rank in enumerate(left)}
        nodes = [
            replace(node, ranks=tuple(number[rank] for rank in node.ranks if rank in number)) for node in self.nodes
        ]
        return replace(self, nodes=tuple(nodes), mesh=None, batch=None, stages=()), number

    def rank_rows(self) -> list[RankRow]:
        """Return for every rank its node and device, its place on the mesh, and its stages."""
        return [
            self._row(rank, node, number, local)
            for number, node in enumerate(self.nodes)
            for local, rank in enumerate(node.ranks)
        ]

    def _row(self, rank: int, node: NodePlan, number: int, local: int) -> RankRow:
        device = node.device if node.device == "cpu" else f"{node.device}:{node.gpus[local] if node.gpus else local}"
        places = self.mesh.coordinates(rank) if self.mesh else {}
        stages = self.stages[places["pp"]] if self.stages else ()
        return RankRow(rank, node.name, number, local, device, places, stages)

    def __str__(self) -> str:
        return draw_text(self.rank_rows(), axes=self._shown_axes, caption=self._caption)

    def _repr_html_(self) -> str:
        return draw_html(self.rank_rows(), axes=self._shown_axes, caption=self._caption)

    @property
    def _shown_axes(self) -> list[str]:
        return [axis for axis, size in self.mesh.axes.items() if size > 1] if self.mesh else []

    @property
    def _caption(self) -> list[str]:
        nodes = f" on {len(self.nodes)} nodes" if len(self.nodes) > 1 else ""
        world = f"{count_ranks(self.world_size)}{nodes}, {self.device}, {self.backend}"
        return [
            *([f"mesh {self.mesh}: {world}"] if self._shown_axes else [world]),
            *([str(self.batch)] if self.batch else []),
        ]


def plan_one_node(*, ranks: int | None, device: str, backend: str | None, gpus: int) -> Plan:
    """Place ``ranks`` ranks on one node that has ``gpus`` GPUs; by default one rank per GPU, else two on the CPU.

    Raises: SpecError when the numbers do not fit.
    """
    if device not in DEVICES:
        raise SpecError(f"unknown device {device!r}: choose from {', '.join(DEVICES)}")
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
    """Plan the ranks of several nodes, numbered in the order of the nodes.

    ``ranks`` and ``device`` apply to nodes that set no number of ranks, or have the device "auto".
    Raises: SpecError when the numbers do not fit.
    """
    if device not in DEVICES:
        raise SpecError(f"unknown device {device!r}: choose from {', '.join(DEVICES)}")
    nodes: list[NodePlan] = []
    first = 0
    for offer in offers:
        wanted = device if offer.devices == "auto" else offer.devices
        chosen = _gpus_to_use(offer, wanted, offer.ranks or ranks)
        count = offer.ranks or ranks or max(1, len(chosen))
        if chosen and count > len(chosen):
            raise SpecError(f"{count} ranks on node {offer.name} need {count} GPUs, but it has {_list(offer.gpus)}")
        if first + count > MOST_RANKS:
            raise SpecError(f"{first + count} ranks up to node {offer.name}: a session can have at most {MOST_RANKS}")
        kind = "cuda" if chosen else "cpu"
        numbers = tuple(range(first, first + count))
        nodes.append(NodePlan(numbers, kind, offer.name, chosen[:count] if chosen else None))
        first += count
    return Plan(tuple(nodes), backend or _default_backend({node.device for node in nodes}))


def _gpus_to_use(offer: NodeOffer, wanted: str | tuple[int, ...], ranks: int | None) -> tuple[int, ...]:
    """Return the GPUs that the ranks of a node use; empty when they use the CPU."""
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
