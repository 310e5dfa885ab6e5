"""What a live view of a session shows, as plain data: ranks, nodes, the running cell, which ranks wait for which.

`board_maker.py` makes a `Board`. All of its texts are safe to show: without control characters, of bounded length.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RANK_STATES", "Board", "BoardNote", "CellView", "NodeView", "RankView"]

RANK_STATES = ("running", "waits", "awaited", "idle", "starting", "died", "unknown")


@dataclass(frozen=True)
class RankView:
    """One rank. A value that is unknown, or was not measured in the last seconds, is None or empty.

    ``node`` is the ``name`` of its `NodeView`. ``state`` is one of ``RANK_STATES``; ``detail`` describes it, without
    the number of the rank.
    ``line`` is the line of the cell that the rank is executing, ``source`` its text. If that line is in a function
    defined by an earlier cell, ``earlier_cell`` is the number of that cell, else 0. ``collective`` is what the rank
    waits in ("all_reduce #6"), ``waits_for`` the ranks that have not reached it, ``waits_s`` the wait so far.

    ``cpu_percent`` is of one processor, so two busy threads have 200; it and ``rss_bytes`` count the rank's own process
    with all its threads, not its child processes. GPU values are those of the device that the rank was given, including
    what other processes use of it. ``steps_per_s`` is the rate of the steps that the rank passed to ``log_metrics``, or
    that its Trainer made, in the last seconds of the running cell: None before the first ones, 0 when they stop.
    ``exit`` says how the process of the rank ended, until the next cell begins there.
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
    """One node: ``name`` and ``where`` (its address) as the user wrote them, empty for this machine.

    ``host`` is its name in errors: ``name``, or else ``this machine``. ``fault`` says why the node is unreachable; it
    is empty while there is a connection. ``cpu_percent`` is of all processors together, 100 at most. ``is_sampled``:
    its agent has sent measurements in the last seconds; the agent of an earlier release never does.
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
    """A problem for the user to look at: ``kind`` is waits, died, lost (a node) or stuck (a wait that cannot end)."""

    kind: str
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class CellView:
    """The running cell; of several the newest. ``began_at`` is a ``time.time()``, ``ranks`` those that still run it.

    ``first_line`` is the first line of its code that is not blank.
    """

    number: int
    began_at: float
    first_line: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Board:
    """A session at one moment: ``as_of`` is a ``time.time()``, ``clock_s`` a ``time.monotonic()``.

    ``name`` is the name of the session. ``over`` says why it has ended; it is empty while the session is running.
    """

    name: str
    ranks: tuple[RankView, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    notes: tuple[BoardNote, ...] = ()
    cell: CellView | None = None
    as_of: float = 0.0
    clock_s: float = 0.0
    over: str = ""
