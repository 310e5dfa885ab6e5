"""Validate node messages: a node speaks of its own ranks, in its time, of cells that were run."""

from __future__ import annotations

from ...errors import WireError
from ...node.agent.snapshot import CHARS_BESIDE, MOST_REMEMBERED_CHARS
from ...plan import DEVICES
from ...wire import (
    Attached,
    CellDone,
    CellFailed,
    Display,
    Measured,
    Message,
    Output,
    Piece,
    Position,
    RanCell,
    RankEnded,
    RankUp,
    Unfinished,
)
from ..output.log import Logged
from .history import History
from .measurements import check_measured
from .overwritten import check_overwritten
from .rank_owners import MOST_RANKS, RankOwners

LONGEST_S = 1e10
_BYTES = (0, 1 << 60)
_RANGES: dict[type[Message], dict[str, tuple[float, float]]] = {
    Attached: {"gpus": (0, 1 << 10), "cpus": (0, 1 << 20), "free_bytes": _BYTES, "generation": (0, 1 << 31)},
    Position: {"seconds": (0, LONGEST_S), "rss_bytes": _BYTES, "age_s": (-1, LONGEST_S)},
    RankEnded: {"signal": (0, 64), "exit_code": (-1, 255)},
}
_MOST_ID_CHARS = 2000  # of a display; a rank makes none as long
_CHARS_OF_A_RANK = 8  # in a list
_MOST_AHEAD = 1000  # generations that a node may have been told of and the first one not


class MessageChecks:
    """Those of one session: they raise WireError, and change nothing that the session knows."""

    def __init__(self, history: History, owners: RankOwners) -> None:
        self._history = history
        self._owners = owners
        self._remembered: dict[int, int] = {}  # by node: how much it has said before it was attached to

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
        elif isinstance(message, Measured):
            ranks = message.ranks
        elif isinstance(message, Attached):
            ranks = [*message.ranks, *message.with_group]
        for rank in ranks:
            if not self._owners.may_speak_for(rank, node):
                raise WireError(f"a node speaks for rank {rank}, which it does not have")

    def check_time(self, message: Message, node: int, *, is_attached: bool) -> None:
        """Raises: WireError for what an agent says at another time, of another cell, or in other numbers."""
        for name, (least, most) in _RANGES.get(type(message), {}).items():
            if not least <= getattr(message, name) <= most:
                raise WireError(f"it says {name} {getattr(message, name)}")
        if isinstance(message, (Attached, RanCell, Unfinished)):
            self._check_memory(message, node, is_attached=is_attached)
        if isinstance(message, RanCell) and message.cell < 0:
            raise WireError(f"there is no cell {message.cell}")
        if isinstance(message, RankUp):
            self._check_world_size(message, node)
        if isinstance(message, Measured):
            if not is_attached:
                raise WireError("it has measured something before it was attached to")
            check_measured(message)
        if isinstance(message, Attached):
            if len(set(message.ranks)) < len(message.ranks):
                raise WireError("it names a rank twice")
            if self._owners.first is not None and not self._owners.is_known:
                self._check_by(self._owners.first, message)
        if isinstance(message, Logged):
            if not is_attached:
                raise WireError(f"rank {message.rank} speaks of a cell before its node was attached to")
            self.check_cell(message)
        if isinstance(message, Display) and len(message.display_id) > _MOST_ID_CHARS:
            raise WireError(f"rank {message.rank} displays under an id of {len(message.display_id)} characters")
        if isinstance(message, (CellDone, CellFailed)):
            check_overwritten(message.overwritten)
        if isinstance(message, (Output, Unfinished)) and message.stream not in ("stdout", "stderr"):
            raise WireError(f"rank {message.rank} has no such stream")

    def check_cell(self, message: Logged | Unfinished) -> None:
        """Raises: WireError where it was not run."""
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
        measure = 0 if self._owners.is_known else self._owners.world_size
        is_other = bool(node and measure) and message.world_size != measure
        if is_other or not message.rank < message.world_size <= MOST_RANKS:
            raise WireError(f"rank {message.rank} says world_size {message.world_size}")

    def _check_by(self, first: Attached, said: Attached) -> None:
        """What another node than the first says. Where no rank of the first is up, less of it can be judged."""
        if said.generation > first.generation + _MOST_AHEAD:
            raise WireError(f"it says generation {said.generation}, the first node {first.generation}")
        world_size = self._owners.world_size
        if world_size and not (said.ranks and max(said.ranks) < world_size):
            raise WireError(f"it says that it has {len(said.ranks)} ranks, up to {max(said.ranks, default=-1)}")
        if said.ranks and not (isinstance(said.info, dict) and said.info.get("device") in DEVICES):
            raise WireError("it does not say on which device its ranks are")
