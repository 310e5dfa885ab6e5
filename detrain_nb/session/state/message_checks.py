"""Validate node messages: own ranks, right phase, known cells."""

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
    Attached: {
        "pid": (1, 1 << 22),  # as far as Linux counts
        "gpus": (0, 1 << 10),
        "cpus": (0, 1 << 20),
        "free_bytes": _BYTES,
        "generation": (0, 1 << 31),
    },
    Position: {"seconds": (0, LONGEST_S), "rss_bytes": _BYTES, "age_s": (-1, LONGEST_S)},
    RankEnded: {"signal": (0, 64), "exit_code": (-1, 255)},
}
_MOST_ID_CHARS = 2000  # of a display id; a rank makes none this long
_CHARS_OF_A_RANK = 8  # in a list
_MOST_AHEAD = 1000  # generations that a node may have been told of but the first node was not


class MessageChecks:
    """Checks of the messages of one session: they raise WireError and change no state of the session."""

    def __init__(self, history: History, owners: RankOwners) -> None:
        self._history = history
        self._owners = owners
        self._remembered: dict[int, int] = {}  # by node: characters it has sent before it was attached to

    def check_owner(self, message: Message, node: int) -> None:
        """Check that a node speaks only for its own ranks; before these are known, for ranks that no other node has.

        Raises: WireError.
        """
        ranks = [] if getattr(message, "rank", None) is None else [message.rank]  # type: ignore[attr-defined]
        if isinstance(message, Piece):
            ranks = message.ranks[:2]
            if len(ranks) != 1:
                raise WireError(f"a node sent a piece of a value for {len(message.ranks)} ranks, not for 1")
        elif isinstance(message, RanCell):
            ranks = [*message.ranks, *message.running]
        elif isinstance(message, Measured):
            ranks = message.ranks
        elif isinstance(message, Attached):
            ranks = [*message.ranks, *message.with_group]
        for rank in ranks:
            if not self._owners.may_speak_for(rank, node):
                raise WireError(f"a node sent a message for rank {rank}, which it does not have")

    def check_time(self, message: Message, node: int, *, is_attached: bool) -> None:
        """Check the phase of a message, its cell and its numbers. Raises: WireError."""
        for name, (least, most) in _RANGES.get(type(message), {}).items():
            if not least <= getattr(message, name) <= most:
                raise WireError(f"reported {name} {getattr(message, name)} is out of range ({least} to {most})")
        if isinstance(message, (Attached, RanCell, Unfinished)):
            self._check_memory(message, node, is_attached=is_attached)
        if isinstance(message, RanCell) and message.cell < 0:
            raise WireError(f"cell number {message.cell} is negative")
        if isinstance(message, RankUp):
            self._check_world_size(message, node)
        if isinstance(message, Measured):
            if not is_attached:
                raise WireError("measurements arrived before the node was attached to")
            check_measured(message)
        if isinstance(message, Attached):
            if len(set(message.ranks)) < len(message.ranks):
                raise WireError("the node lists a rank twice")
            if self._owners.first is not None and not self._owners.is_known:
                self._check_by(self._owners.first, message)
        if isinstance(message, Logged):
            if not is_attached:
                raise WireError(f"rank {message.rank} sent a message about a cell before its node was attached to")
            self.check_cell(message)
        if isinstance(message, Display) and len(message.display_id) > _MOST_ID_CHARS:
            raise WireError(
                f"display id of rank {message.rank} has {len(message.display_id)} characters, "
                f"more than {_MOST_ID_CHARS}"
            )
        if isinstance(message, (CellDone, CellFailed)):
            check_overwritten(message.overwritten)
        if isinstance(message, (Output, Unfinished)) and message.stream not in ("stdout", "stderr"):
            raise WireError(f"rank {message.rank} sent output to a stream other than stdout and stderr")

    def check_cell(self, message: Logged | Unfinished) -> None:
        """Check that the cell of a message was run. Raises: WireError."""
        if not self._history.knows(message.cell):
            raise WireError(f"rank {message.rank} sent a message about cell {message.cell}, which was not run")

    def _check_memory(self, message: Attached | RanCell | Unfinished, node: int, *, is_attached: bool) -> None:
        """Check that what an agent remembers arrives before it is attached to, and is bounded."""
        if is_attached:
            raise WireError(f"{type(message).__name__} arrived after the node had been attached to")
        said = len(getattr(message, "body", b""))
        if isinstance(message, RanCell):
            for ranks in (message.ranks, message.running):
                if len(set(ranks)) < len(ranks):
                    raise WireError(f"the node lists a rank of cell {message.cell} twice")
            said = len(message.code) + _CHARS_OF_A_RANK * (len(message.ranks) + len(message.running))
        self._remembered[node] = self._remembered.get(node, 0) + CHARS_BESIDE + said
        if self._remembered[node] > MOST_REMEMBERED_CHARS:
            raise WireError(f"the node remembers more than {MOST_REMEMBERED_CHARS:,} characters of the session")

    def _check_world_size(self, message: RankUp, node: int) -> None:
        measure = 0 if self._owners.is_known else self._owners.world_size
        is_other = bool(node and measure) and message.world_size != measure
        if is_other or not message.rank < message.world_size <= MOST_RANKS:
            raise WireError(f"rank {message.rank} reports an invalid world_size {message.world_size}")

    def _check_by(self, first: Attached, said: Attached) -> None:
        """Check a node against the first one; less thoroughly if no rank of the first node is up."""
        if said.generation > first.generation + _MOST_AHEAD:
            raise WireError(f"the node reports generation {said.generation}, the first node {first.generation}")
        world_size = self._owners.world_size
        if world_size and not (said.ranks and max(said.ranks) < world_size):
            raise WireError(
                f"the node reports {len(said.ranks)} ranks, up to {max(said.ranks, default=-1)}, "
                f"but the world size is {world_size}"
            )
        if said.ranks and not (isinstance(said.info, dict) and said.info.get("device") in DEVICES):
            raise WireError("the node does not report the device of its ranks")
