"""Building a `Board` from the state of a session, the last look at its ranks, and the measurements of its nodes."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from functools import lru_cache

from ...errors import format_ranks
from ...wire import RankEnded
from ..diagnosis.diagnosis import Verdict, describe_wait, ranks_on_hosts
from ..output.safe_output import one_line
from ..state.cell import Cell
from ..state.measurements import NodeUse, RankUse
from ..state.rank_deaths import WITHOUT, how_it_ended, is_gone, what_to_do_about_down
from .board import Board, BoardNote, CellView, NodeView, RankView
from .core import Core
from .looks import Look
from .status import describe_over, fault_of, where_is

_SHOWN_WAIT_S = 1.0  # shorter waits are normal: ranks wait for each other all the time
_LINE_CHARS = 200
_TEXT_CHARS = 2000
_NOBODY_COMES = "no other rank can join: interrupt the cell to free them"
_ENDED = "this session has ended: %distributed board shows the running one"
_BEGAN_EARLIER_S = 1.0


def make_board(core: Core, look: Look) -> Board:
    """Build the board of a session; ``look`` is the last one at the ranks that run a cell."""
    return _Making(core, look).board()


class _Making:
    """Everything that one board is built from."""

    def __init__(self, core: Core, look: Look) -> None:
        self._core = core
        self._state = core.state
        self._look = look
        self._busy = core.state.busy
        self._lost = core.state.lost
        self._ends = core.state.ends
        self._over = _ENDED if core.is_stopped and not core.is_left else describe_over(core)
        self._now = time.monotonic()
        self._broken_s = core.link.broken_s(now=self._now)
        self._waiting = {rank: verdict for rank in self._busy if (verdict := self._wait_of(rank))}
        self._awaited = {rank for verdict in self._waiting.values() for rank in verdict.missing}

    def board(self) -> Board:
        return Board(
            self._core.name,
            tuple(map(self._rank, self._state.ranks)),
            self._nodes(),
            (*self._of_lost_nodes(), *self._of_the_dead(), *self._of_waits()),
            self._cell(),
            time.time(),
            self._now,
            self._over,
        )

    # ---- the ranks

    def _verdict_of(self, rank: int) -> Verdict | None:
        """Return the verdict on a rank if it is about the cell that the rank runs now."""
        verdict, cell = self._look.verdicts.get(rank), self._busy.get(rank)
        return verdict if verdict and cell and verdict.evidence.cell == cell.number else None

    def _wait_of(self, rank: int) -> Verdict | None:
        verdict = self._verdict_of(rank)
        is_shown = verdict and verdict.waits and self._look.waited_s.get(rank, 0.0) >= _SHOWN_WAIT_S
        return verdict if is_shown else None

    def _waited_s(self, rank: int) -> float:
        return self._look.waited_s.get(rank, 0.0) + self._now - self._look.clock_s

    def _rank(self, rank: int) -> RankView:
        state, detail = self._state_of(rank)
        up, verdict, wait = self._state.up.get(rank), self._verdict_of(rank), self._waiting.get(rank)
        is_up = up is not None and rank not in self._lost and not self._over
        cell, line = verdict.evidence.cell_line if verdict else (0, 0)
        end = self._ends.get(rank) or self._lost.get(rank)
        use = self._use_of(rank) if is_up else RankUse()
        return RankView(
            rank,
            one_line(self._state.plan.node_names.get(rank, "")),
            state,
            one_line(detail, most_chars=_TEXT_CHARS),
            line,
            one_line(wait.waits_in) if wait else "",
            wait.missing if wait else (),
            round(self._waited_s(rank), 1) if wait else None,
            source=self._source(cell, line) if line and rank in self._busy else "",
            device=up.device if up and is_up else "",
            pid=up.pid if up and is_up else 0,
            **vars(use),
            last_line=self._state.logbook.last_line(rank),
            exit=_exit_of(end) if end else "",
            earlier_cell=cell if verdict and cell != verdict.evidence.cell else 0,
        )

    def _use_of(self, rank: int) -> RankUse:
        cell = self._busy.get(rank)
        node, number = self._state.node_of.get(rank, 0), cell.number if cell else None
        return self._state.measurements.of_rank(rank, node, cell=number, now=self._now)

    def _state_of(self, rank: int) -> tuple[str, str]:
        """Return the state of a rank, one of ``RANK_STATES``, and a description of it."""
        if end := self._lost.get(rank):
            is_starting = end.asked and not end.down
            return ("starting", "") if is_starting else ("died", _what_became_of(end))
        if self._over:
            return "unknown", ""
        if rank not in self._state.up:
            return "starting", ""
        if fault := self._fault_of(self._state.node_of.get(rank, 0)):
            return "unknown", fault
        verdict, seen = self._verdict_of(rank), self._look.verdicts.get(rank)
        if seen and seen.kind == "no answer" and rank in self._busy:  # such a verdict names no cell
            return "unknown", "not responding"
        if wait := self._waiting.get(rank):
            whom = f" for {format_ranks(wait.missing)}" if wait.missing else ""
            return "waits", f"in {wait}{whom}, for {self._waited_s(rank):.0f} s"
        is_running = rank in self._busy
        if rank in self._awaited:
            return "awaited", str(verdict or "") if is_running else "has ended the cell"
        return ("running", str(verdict or "")) if is_running else ("idle", "")

    def _source(self, cell: int, line: int) -> str:
        """Return one line of the code of a cell; empty if that is unknown."""
        code, first_line = self._state.history.code_of(cell)
        lines = _lines_of(code)
        index = line - first_line
        return one_line(lines[index].strip(), most_chars=_LINE_CHARS) if 0 <= index < len(lines) else ""

    # ---- the nodes

    def _fault_of(self, node: int) -> str:
        return fault_of(node, lost=self._state.lost_nodes, broken_s=self._broken_s)

    def _nodes(self) -> tuple[NodeView, ...]:
        placed = enumerate(zip(self._core.transports, self._state.plan.nodes))
        return tuple(
            self._node(node, one_line(of.name), one_line(where_is(transport)), of.ranks)
            for node, (transport, of) in placed
            if of.ranks
        )

    def _node(self, node: int, name: str, where: str, ranks: tuple[int, ...]) -> NodeView:
        fault = one_line(self._fault_of(node), most_chars=_TEXT_CHARS)
        use = self._state.measurements.of_node(node, now=self._now)
        host = next((one_line(up.host) for rank in ranks if (up := self._state.up.get(rank))), name)
        return NodeView(name, where, host, ranks, fault, **vars(use or NodeUse()), is_sampled=use is not None)

    # ---- the cell

    def _cell(self) -> CellView | None:
        if not self._busy:
            return None
        cell = max(self._busy.values(), key=lambda cell: cell.number)
        lines = _lines_of(self._state.history.code_of(cell.number)[0])
        first_line = next((line for line in lines if line.strip()), "")
        ranks = tuple(rank for rank, of in self._busy.items() if of is cell)
        return CellView(cell.number, self._began_at(cell), one_line(first_line, most_chars=_LINE_CHARS), ranks)

    def _began_at(self, cell: Cell) -> float:
        """Return when a cell began; for one that began before this process attached, by what its ranks report."""
        of_cell = [verdict for rank in cell.running if (verdict := self._verdict_of(rank))]
        seconds = max((verdict.evidence.seconds for verdict in of_cell), default=0.0)
        seen = time.time() - (seconds + self._now - self._look.clock_s)
        return seen if of_cell and seen < cell.began_at - _BEGAN_EARLIER_S else cell.began_at

    # ---- problems for the user to look at

    def _of_lost_nodes(self) -> list[BoardNote]:
        notes = []
        for node, why in self._state.lost_nodes.items():
            ranks = tuple(rank for rank, owner in self._state.node_of.items() if owner == node)
            if ranks:
                gone = f"node {self._state.nodes[node]} is lost, with {format_ranks(ranks)}: {why}"
                notes.append(_note("lost", ranks, f"{gone}; the {WITHOUT}"))
        return notes

    def _of_the_dead(self) -> list[BoardNote]:
        down = {rank: end for rank, end in self._lost.items() if end.down}
        ends = {rank: end for rank, end in sorted((self._ends | down).items()) if not is_gone(end)}
        return [_note("died", (rank,), self._describe_death(end)) for rank, end in ends.items()]

    def _describe_death(self, end: RankEnded) -> str:
        where = ranks_on_hosts([end.rank], self._core.link.hosts)
        if end.rank in self._lost:
            return f"{where} {_what_became_of(end)}"
        return f"{where} {how_it_ended(end)}; it was restarted and its variables are lost"

    def _of_waits(self) -> list[BoardNote]:
        """Return a note for each group of ranks that have waited ``hang_s`` in the same place for the same ranks."""
        groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for rank, verdict in self._waiting.items():
            if self._look.waited_s[rank] >= max(_SHOWN_WAIT_S, self._core.settings.hang_s):
                groups.setdefault((str(verdict), verdict.missing), []).append(rank)
        if self._look.is_stuck:
            return [_note("stuck", self._waiting, f"{self._describe(self._waiting)}; {_NOBODY_COMES}")]
        if not groups:
            is_now = self._look.report and self._busy
            return [_note("waits", self._busy, self._look.report)] if is_now else []
        texts = {(*ranks,): self._describe_group(ranks, missing) for (_, missing), ranks in groups.items()}
        notes = [_note("waits", ranks, text) for ranks, text in texts.items()]
        return [*notes, *([_note("waits", self._waiting, self._look.mismatch)] if self._look.mismatch else [])]

    def _describe_group(self, ranks: list[int], missing: tuple[int, ...]) -> str:
        hosts = self._core.link.hosts
        whom = f" for {ranks_on_hosts(missing, hosts)}" if missing else ""
        since = f", for {max(map(self._waited_s, ranks)):.0f} s"
        return "; ".join(filter(None, [f"{self._describe(ranks)}{whom}{since}", self._describe(missing)]))

    def _describe(self, ranks: Collection[int]) -> str:
        verdicts = self._look.verdicts
        return describe_wait([verdicts[rank] for rank in ranks if rank in verdicts], hosts=self._core.link.hosts)


def _note(kind: str, ranks: Collection[int] | Mapping[int, object], text: str) -> BoardNote:
    return BoardNote(kind, tuple(sorted(ranks)), one_line(text, most_chars=_TEXT_CHARS))


def _what_became_of(end: RankEnded) -> str:
    if is_gone(end):
        return how_it_ended(end)
    return f"{how_it_ended(end)}; {what_to_do_about_down({end.rank: end}) if end.down else 'it is restarting'}"


def _exit_of(end: RankEnded) -> str:
    return "was replaced" if end.asked else one_line(how_it_ended(end), most_chars=_TEXT_CHARS)


@lru_cache(maxsize=4)
def _lines_of(code: str) -> list[str]:
    return code.splitlines()
