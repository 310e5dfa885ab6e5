"""The status of every rank of a session, as a table; with several nodes, grouped by node."""

from __future__ import annotations

import html
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import format_ranks
from ...text import HERE, html_cells, html_table, table_lines
from ..output.safe_output import one_line

if TYPE_CHECKING:
    from ...plan import Plan
    from ...transport import Transport
    from .core import Core

_COLUMNS = ("rank", "host", "pid", "device", "state", "line", "memory", "last cell")
_NO_ANSWER = "no answer"
_LONGEST_REASON = 4000
_LEFT = "text-align:left"
_BAD = "background:#f8d7da;color:#842029"  # as in doctor/report.py


@dataclass(frozen=True)
class RankStatus:
    """One rank: ``cell`` and ``line`` are where it is (0: none), ``seconds`` the duration of its last cell.

    ``state`` is a word or two, such as idle, running or down. ``pid`` is 0 while it has no process. ``rss_bytes`` is
    its resident memory, 0 if unknown.
    """

    rank: int
    host: str
    pid: int
    device: str
    state: str
    cell: int
    line: int
    rss_bytes: int
    seconds: float | None

    def cells(self) -> tuple[str, ...]:
        line = f"cell {self.cell}, line {self.line}" if self.line else ""
        memory = f"{self.rss_bytes / 1e6:,.0f} MB" if self.rss_bytes else ""
        last = "" if self.seconds is None else f"{self.seconds:.3f} s"
        shown = (str(self.rank), self.host, str(self.pid or ""), self.device, self.state, line, memory, last)
        return tuple(map(one_line, shown))


@dataclass(frozen=True)
class NodeStatus:
    """One node: ``name`` and ``where`` (its address) as the user wrote them.

    ``fault`` says why the node is unreachable; it is empty while there is a connection.
    """

    name: str
    where: str
    ranks: tuple[int, ...]
    fault: str = ""

    @property
    def title(self) -> str:
        name, where = one_line(self.name), one_line(self.where)
        return f"{name} ({where})" if where not in ("", name) else name


def node_statuses(
    transports: Sequence[Transport], plan: Plan, *, lost: Mapping[int, str], broken_s: Mapping[int, float]
) -> tuple[NodeStatus, ...]:
    """Return the status of the nodes of ``plan`` that have a name and ranks, for a `SessionStatus`.

    By position of the node, ``lost`` has the reason of a loss, ``broken_s`` the seconds without a connection.
    """
    return tuple(
        NodeStatus(placed.name, where_is(transport), placed.ranks, fault_of(node, lost=lost, broken_s=broken_s))
        for node, (transport, placed) in enumerate(zip(transports, plan.nodes))
        if placed.name and placed.ranks
    )


def fault_of(node: int, *, lost: Mapping[int, str], broken_s: Mapping[int, float]) -> str:
    """Return why the node at that position is unreachable; empty while there is a connection."""
    if node in lost:
        return f"lost: {lost[node]}"
    return f"no connection for {broken_s[node]:.0f} s, trying again" if node in broken_s else ""


def where_is(transport: Transport) -> str:
    """Return ``user@host:port``, as far as the user wrote it."""
    node = transport.node
    if node is None:
        return ""
    user = f"{node.user}@" if node.user else ""
    host = f"[{node.host}]" if ":" in node.host else node.host
    return f"{user}{host}{f':{node.port}' if node.port else ''}"


@dataclass(frozen=True)
class SessionStatus:
    """A session and its ranks; ``nodes`` is empty when all ranks are on this machine.

    ``group_timeout_s`` is the timeout of collectives; 0 means torch's default. ``over`` says why the session has ended,
    and what to do; it is empty while the session is running.
    """

    name: str
    ranks: tuple[RankStatus, ...]
    nodes: tuple[NodeStatus, ...] = ()
    group_timeout_s: float = 0.0
    over: str = ""

    def __repr__(self) -> str:
        columns, groups = self._columns, self._groups()
        indent = "  " if self._is_grouped else ""
        table = [_COLUMNS, *(rank.cells() for _, ranks in groups for rank in ranks)]
        laid_out = (f"{indent}{line}" for line in table_lines([[row[column] for column in columns] for row in table]))
        lines = [self._title, *self._notes, next(laid_out)]
        for node, ranks in groups:
            lines += [self._heading(node)] if node else []
            lines += itertools.islice(laid_out, len(ranks))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        columns = self._columns
        head = html_cells((_COLUMNS[column] for column in columns), tag="th")
        bodies = []
        for node, ranks in self._groups():
            rows = ""
            if node:
                style = f"{_LEFT};{_BAD}" if self._fault_of(node) else _LEFT
                heading = html.escape(self._heading(node))
                rows = f"<tr><th colspan='{len(columns)}' scope='rowgroup' style='{style}'>{heading}</th></tr>"
            for rank in ranks:
                cells = rank.cells()
                rows += f"<tr>{html_cells(cells[column] for column in columns)}</tr>"
            bodies.append(rows)
        return html_table(head, *bodies, caption=[self._title, *self._notes])

    @property
    def _is_grouped(self) -> bool:
        return len(self.nodes) > 1

    @property
    def _columns(self) -> tuple[int, ...]:
        """The columns to show; grouped by node, without the host and without empty columns: terminals are narrow."""
        if not self._is_grouped:
            return tuple(range(len(_COLUMNS)))
        rows = [rank.cells() for rank in self.ranks]
        return tuple(n for n, name in enumerate(_COLUMNS) if name != "host" and any(row[n] for row in rows))

    @property
    def _title(self) -> str:
        nodes = f" on {len(self.nodes)} nodes" if self._is_grouped else ""
        return f"session {self.name}: {len(self.ranks)} ranks{nodes}"

    @property
    def _notes(self) -> list[str]:
        """Lines about the session as a whole."""
        notes = [self.over] if self.over else []
        if self.group_timeout_s:
            notes.append(f"collectives time out after {self.group_timeout_s:g} s (--group-timeout)")
        if self._is_grouped and (away := [node for node in self.nodes if self._fault_of(node)]):
            names = ", ".join(one_line(node.name) for node in away)
            notes.append(f"{len(away)} of {len(self.nodes)} nodes cannot be reached: {names}")
        elif not self._is_grouped:
            notes += [f"{node.title}: {fault}" for node in self.nodes if (fault := self._fault_of(node))]
        return notes

    def _groups(self) -> list[tuple[NodeStatus | None, list[RankStatus]]]:
        if not self._is_grouped:
            return [(None, list(self.ranks))]
        by_rank = {rank.rank: rank for rank in self.ranks}
        return [(node, [by_rank[rank] for rank in node.ranks if rank in by_rank]) for node in self.nodes]

    def _heading(self, node: NodeStatus) -> str:
        """Return the name of a node, its connection state, and the states of its ranks."""
        counts = Counter(one_line(rank.state) for rank in self.ranks if rank.rank in node.ranks)
        states = ", ".join(f"{count} {state}" if len(counts) > 1 else state for state, count in counts.items())
        return f"{node.title}: {self._fault_of(node) or 'connected'}; {format_ranks(node.ranks)}: {states}"

    def _fault_of(self, node: NodeStatus) -> str:
        """Return the fault of a node; a silently cut connection shows first as ranks that do not answer."""
        states = {rank.state for rank in self.ranks if rank.rank in node.ranks}
        return one_line(node.fault) or (f"{_NO_ANSWER} from any rank" if states == {_NO_ANSWER} else "")


def look(core: Core, *, limit_s: float) -> SessionStatus:
    """Ask every rank for its position; a rank that does not answer in time is shown from what is known."""
    state = core.state
    everyone = range(core.state.world_size)
    positions = core.link.locate(everyone, limit_s=limit_s) if core.is_alive else {}
    rows = []
    for rank in everyone:
        up, position = state.up.get(rank), positions.get(rank)
        rows.append(
            RankStatus(
                rank,
                up.host if up else core.state.plan.node_names.get(rank) or HERE,
                up.pid if up and rank not in state.lost else 0,
                up.device if up else "",
                position.state if position else _state_of_silent(core, rank),
                position.cell if position else 0,
                position.line if position and position.state == "running" else 0,
                position.rss_bytes if position else 0,
                state.last_seconds.get(rank),
            )
        )
    broken_s = core.link.broken_s(now=time.monotonic())
    nodes = node_statuses(core.transports, core.state.plan, lost=state.lost_nodes, broken_s=broken_s)
    return SessionStatus(core.name, tuple(rows), nodes, state.groups.timeout_s, describe_over(core))


def describe_over(core: Core) -> str:
    """Return in one line why the session has ended, and what to do; empty while it is running."""
    words = str(core.why_over or "").splitlines()
    return one_line("; ".join(words), most_chars=_LONGEST_REASON)


def _state_of_silent(core: Core, rank: int) -> str:
    end = core.state.lost.get(rank)
    if end is None:
        return _NO_ANSWER
    return "down" if end.down else "starting"
