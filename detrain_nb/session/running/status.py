"""Where every rank of a session is, as a table; on several nodes the ranks of each stand together."""

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
_BAD = "background:#f8d7da;color:#842029"  # as doctor/report.py has it


@dataclass(frozen=True)
class RankStatus:
    """One rank: ``line`` is the line of the running cell (0: none), ``seconds`` what its last cell took.

    ``pid`` is 0 while its process is gone.
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
    """One node: ``name`` and ``where`` (how it is reached) as the user wrote them.

    ``fault`` is why it cannot be reached now, empty while there is a connection.
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
    """The nodes of ``plan`` that have a name and ranks, for a `SessionStatus`.

    ``lost`` says why a node is, ``broken_s`` for how many seconds there has been no connection, by its position.
    """
    return tuple(
        NodeStatus(placed.name, where_is(transport), placed.ranks, fault_of(node, lost=lost, broken_s=broken_s))
        for node, (transport, placed) in enumerate(zip(transports, plan.nodes))
        if placed.name and placed.ranks
    )


def fault_of(node: int, *, lost: Mapping[int, str], broken_s: Mapping[int, float]) -> str:
    """Why the node at that position cannot be reached now; empty while there is a connection."""
    if node in lost:
        return f"lost: {lost[node]}"
    return f"no connection for {broken_s[node]:.0f} s, trying again" if node in broken_s else ""


def where_is(transport: Transport) -> str:
    """``user@host:port``, as far as the user wrote it."""
    node = transport.node
    if node is None:
        return ""
    user = f"{node.user}@" if node.user else ""
    host = f"[{node.host}]" if ":" in node.host else node.host
    return f"{user}{host}{f':{node.port}' if node.port else ''}"


@dataclass(frozen=True)
class SessionStatus:
    """A session and its ranks; ``nodes`` is empty where they are all on this machine.

    ``group_timeout_s`` is how long a collective waits for another rank; 0 is as long as torch does by itself. ``over``
    says why the session has ended, and what to do; it is empty while it goes on.
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
        """Below the name of a node its ranks need not say it again, nor what no rank has: terminals are narrow."""
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
        """What holds for all ranks, a line each."""
        notes = [self.over] if self.over else []
        if self.group_timeout_s:
            notes.append(f"collectives wait up to {self.group_timeout_s:g} s for another rank (--group-timeout)")
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
        """The name of a node, whether it is reached, and what its ranks do."""
        counts = Counter(one_line(rank.state) for rank in self.ranks if rank.rank in node.ranks)
        states = ", ".join(f"{count} {state}" if len(counts) > 1 else state for state, count in counts.items())
        return f"{node.title}: {self._fault_of(node) or 'reached'}; {format_ranks(node.ranks)}: {states}"

    def _fault_of(self, node: NodeStatus) -> str:
        """A connection that has been cut without a word is noticed later than that nobody there answers."""
        states = {rank.state for rank in self.ranks if rank.rank in node.ranks}
        return one_line(node.fault) or (f"{_NO_ANSWER} from any rank" if states == {_NO_ANSWER} else "")


def look(core: Core, *, limit_s: float) -> SessionStatus:
    """Ask every rank; one that does not answer in time has what is known of it."""
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
    """In one line why the session has ended, and what to do; empty while it goes on."""
    words = str(core.why_over or "").splitlines()
    return one_line("; ".join(words), most_chars=_LONGEST_REASON)


def _state_of_silent(core: Core, rank: int) -> str:
    end = core.state.lost.get(rank)
    if end is None:
        return _NO_ANSWER
    return "down" if end.down else "starting"
