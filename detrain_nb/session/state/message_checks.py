"""What a node may say: of its own ranks, in its time, of cells that were run. Who says more is no agent of ours."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import WireError
from ...node.agent.snapshot import CHARS_BESIDE, MOST_REMEMBERED_CHARS
from ...plan import DEVICES
from ...wire import (
    Attached,
    CellDone,
    CellFailed,
    ClearOutput,
    Display,
    Message,
    Output,
    Piece,
    RanCell,
    RankUp,
    Unfinished,
)
from .history import History
from .overwritten import check_overwritten

_MOST_RANKS, _MOST_GPUS = 1 << 16, 1 << 10
_LAST_GENERATION = 1 << 31
_MOST_ID_CHARS = 2000  # of a display; a rank makes none as long
_CHARS_OF_A_RANK = 8  # in a list
_MOST_AHEAD = 1000  # generations that a node may have been told of and the first one not


class Claims:
    """Those of the nodes of one session."""

    def __init__(self, history: History) -> None:
        self.node_of: dict[int, int] = {}  # which node has a rank
        self._history = history
        self._first: Attached | None = None
        self._world_size = 0  # as the ranks of the first node say; 0 where none is up
        self._has_plan = False  # which ranks there are is known
        self._is_noted = False  # until then: who had which was noted down here
        self.disputed: dict[int, tuple[int, int]] = {}  # ranks that two nodes say they have, neither of them the first
        self._remembered: dict[int, int] = {}  # by node: how much it has said before it was attached to

    def know_ranks(self, node_of: Mapping[int, int]) -> None:
        """These are the ranks that there are, and their nodes."""
        self._has_plan = True
        self.node_of = dict(node_of)

    def measure_by(self, first: Attached, *, world_size: int, noted: Mapping[int, int]) -> None:
        """What the first node says is the measure for the others, until it is known which ranks there are.

        ``noted``: which node had a rank. It counts if the first node agrees: since then the session may have shrunk.
        """
        own = {rank for rank, owner in noted.items() if owner == 0}
        self._is_noted = len(noted) == world_size and own == set(first.ranks)
        if self._is_noted:
            self.node_of = dict(noted)
        self._first, self._world_size = first, world_size

    @property
    def is_measured(self) -> bool:
        return self._first is not None

    def check_owner(self, message: Message, node: int) -> None:
        """A node speaks for its own ranks only; before they are known, for those that no other one has.

        Raises: WireError.
        """
        ranks = [] if getattr(message, "rank", None) is None else [message.rank]  # type: ignore[attr-defined]
        if isinstance(message, Piece):
            ranks = message.ranks[:2]
            if len(ranks) != 1:
                raise WireError("a node sent a piece of a value that is not of one rank")
        elif isinstance(message, RanCell):
            ranks = [*message.ranks, *message.running]
        elif isinstance(message, Attached):
            ranks = [*message.ranks, *message.with_group]
        for rank in ranks:
            owner = self._owner_of(rank, node)
            if owner and owner != node and not self._has_plan and not self._is_noted:
                self.disputed.setdefault(rank, (owner, node))
            if owner != node:
                raise WireError(f"a node speaks for rank {rank}, which it does not have")

    def _owner_of(self, rank: int, node: int) -> int | None:
        if self._has_plan:
            return self.node_of.get(rank)
        is_its_turn = node == 0 or self.is_measured  # else it could take a rank of the first
        return self.node_of.setdefault(rank, node) if is_its_turn and 0 <= rank < _MOST_RANKS else None

    def check_time(self, message: Message, node: int, *, is_attached: bool) -> None:
        """Raises: WireError for what an agent says at another time, of another cell, or in other numbers."""
        if isinstance(message, (Attached, RanCell, Unfinished)):
            self._check_memory(message, node, is_attached=is_attached)
        if isinstance(message, RanCell) and message.cell < 0:
            raise WireError(f"there is no cell {message.cell}")
        if isinstance(message, RankUp):
            self._check_world_size(message, node)
        if isinstance(message, Attached):
            _check_numbers(message)
            if self._first is not None and not self._has_plan:
                self._check_by(self._first, message)
        if isinstance(message, (Output, Display, ClearOutput, CellDone, CellFailed, Unfinished)):
            self._check_cell(message, is_attached=is_attached)
        if isinstance(message, Display) and len(message.display_id) > _MOST_ID_CHARS:
            raise WireError(f"rank {message.rank} displays under an id of {len(message.display_id)} characters")
        if isinstance(message, (CellDone, CellFailed)):
            check_overwritten(message.overwritten)
        if isinstance(message, (Output, Unfinished)) and message.stream not in ("stdout", "stderr"):
            raise WireError(f"rank {message.rank} has no such stream")

    def _check_cell(
        self, message: Output | Display | ClearOutput | CellDone | CellFailed | Unfinished, *, is_attached: bool
    ) -> None:
        if not is_attached and not isinstance(message, Unfinished):
            raise WireError(f"rank {message.rank} speaks of a cell before its node was attached to")
        if not self._history.knows(message.cell):
            raise WireError(f"rank {message.rank} speaks of cell {message.cell}, which was not run")

    def _check_memory(self, message: Attached | RanCell | Unfinished, node: int, *, is_attached: bool) -> None:
        """What an agent remembers comes before it has been attached to, and has bounds."""
        if is_attached:
            raise WireError(f"{type(message).__name__} came after it had been attached to")
        said = len(getattr(message, "body", b""))
        if isinstance(message, RanCell):
            for ranks in (message.ranks, message.running):
                if len(set(ranks)) < len(ranks):
                    raise WireError(f"it names a rank of cell {message.cell} twice")
            said = len(message.code) + _CHARS_OF_A_RANK * (len(message.ranks) + len(message.running))
        self._remembered[node] = self._remembered.get(node, 0) + CHARS_BESIDE + said
        if self._remembered[node] > MOST_REMEMBERED_CHARS:
            raise WireError("it remembers more than a session has")

    def _check_world_size(self, message: RankUp, node: int) -> None:
        is_other = bool(node and self._world_size and not self._has_plan) and message.world_size != self._world_size
        if is_other or not message.rank < message.world_size <= _MOST_RANKS:
            raise WireError(f"rank {message.rank} says world_size {message.world_size}")

    def _check_by(self, first: Attached, said: Attached) -> None:
        """What another node than the first says. Where no rank of the first is up, less of it can be judged."""
        if said.generation > first.generation + _MOST_AHEAD:
            raise WireError(f"it says generation {said.generation}, the first node {first.generation}")
        if self._world_size and not (said.ranks and max(said.ranks) < self._world_size):
            raise WireError(f"it says that it has {len(said.ranks)} ranks, up to {max(said.ranks, default=-1)}")
        if said.ranks and not (isinstance(said.info, dict) and said.info.get("device") in DEVICES):
            raise WireError("it does not say on which device its ranks are")


def _check_numbers(said: Attached) -> None:
    limits = {"gpus": _MOST_GPUS, "cpus": 1 << 20, "free_bytes": 1 << 60, "generation": _LAST_GENERATION}
    for name, limit in limits.items():
        if not 0 <= getattr(said, name) <= limit:
            raise WireError(f"it says {name} {getattr(said, name)}")
    if len(set(said.ranks)) < len(said.ranks):
        raise WireError("it names a rank twice")
