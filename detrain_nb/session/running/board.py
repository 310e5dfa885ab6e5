"""What a live view of a session shows, as plain data: the ranks, their nodes, the cell that runs, who waits for whom.

`board_maker.py` makes a `Board`. All of its words are safe to show: control characters are gone, lengths are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RANK_STATES", "Board", "BoardNote", "CellView", "NodeView", "RankView"]

RANK_STATES = ("running", "waits", "awaited", "idle", "starting", "died", "unknown")


@dataclass(frozen=True)
class RankView:
    """One rank. What is not known, or was not measured in the last seconds, is None or empty.

    ``node`` is the ``name`` of its `NodeView`. ``state`` is one of ``RANK_STATES``; ``detail`` says more of it in
    words, without the number of the rank.
    ``line`` is the line of the cell that it is at, ``source`` what stands there; ``earlier_cell`` is the cell of that
    line where it is in a function of an earlier one, else 0. ``collective`` is what it waits in ("all_reduce #6"),
    ``waits_for`` the ranks that have not come there, ``waits_s`` for how long it has waited.

    ``cpu_percent`` is of one processor, so two busy threads have 200; it and ``rss_bytes`` are those of the rank's own
    process with all its threads, without the processes that it has started. The GPU is the one that the rank was given,
    whoever uses it. ``steps_per_s`` comes from the steps that the rank gave to ``log_metrics``, or that its Trainer has
    made, in the last seconds of the cell that it runs: None before there are some, 0 when no more come. ``exit`` says
    how the process of the rank ended, until the next cell begins there.
    """

    rank: int
    node: str
    state: str
    detail: str = ""
    line: int = 0
    collective: str = ""
    waits_for: tuple[int, ...] = ()
    waits_s: float | None = None
    source: str = ""
    device: str = ""
    pid: int = 0
    cpu_percent: float | None = None
    rss_bytes: int | None = None
    gpu_percent: float | None = None
    gpu_used_bytes: int | None = None
    gpu_total_bytes: int | None = None
    gpu_name: str = ""
    steps_per_s: float | None = None
    last_line: str = ""
    exit: str = ""
    earlier_cell: int = 0


@dataclass(frozen=True)
class NodeView:
    """One node: ``name`` and ``where`` (how it is reached) as the user wrote them, empty for this machine.

    ``host`` is what errors call it: ``name``, or else ``this machine``. ``fault`` says why it cannot be reached now; it
    is empty while there is a connection. ``cpu_percent`` is of all processors together, 100 at most. ``is_sampled``:
    its agent has measured something in the last seconds; one of an earlier release does not.
    """

    name: str
    where: str
    host: str
    ranks: tuple[int, ...]
    fault: str = ""
    cpu_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    is_sampled: bool = False


@dataclass(frozen=True)
class BoardNote:
    """What needs a person: ``kind`` is waits, died, lost (a node) or stuck (nobody is left who could come)."""

    kind: str
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class CellView:
    """The cell that runs; of several the newest. ``began_at`` is of ``time.time()``, ``ranks`` those that still run it.

    ``first_line`` is the first line of its code that is not blank.
    """

    number: int
    began_at: float
    first_line: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Board:
    """A session at one moment: ``as_of`` of ``time.time()``, ``clock_s`` of ``time.monotonic()``.

    ``name`` is that of the session. ``over`` says why it has ended; it is empty while it goes on.
    """

    name: str
    ranks: tuple[RankView, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    notes: tuple[BoardNote, ...] = ()
    cell: CellView | None = None
    as_of: float = 0.0
    clock_s: float = 0.0
    over: str = ""
