"""The history of cells that a board keeps, and its plain form in a saved notebook."""

from __future__ import annotations

import html
import time
from dataclasses import dataclass, field

from ..errors import count_ranks, format_ranks
from ..session.output.safe_output import one_line
from ..session.running.board import Board, RankView
from ..text import count_of, describe_seconds, format_size, table_lines
from .board_rows import dead_ranks, rounded
from .displays import Settled

_MOST_ROWS, _LAST_CHARS = 64, 80
_LEFT, _RIGHT = "text-align:left", "text-align:right"  # short: repeated in every cell of the saved table
_COLUMNS = ("Rank", "Host", "Device", "State", "Steps/s", "Peak", "Last line")
_NUMBERS = {"Steps/s", "Peak"}
_WELL, _ENDED, _ARE_WELL = "✓ done", "○ ended", "✓○▶"


@dataclass
class CellHistory:
    """The cell that ran last, as boards have shown it."""

    number: int = 0
    began_at: float = 0.0
    ended_at: float = 0.0  # 0 while it runs
    peaks: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    devices: dict[int, str] = field(default_factory=dict)
    deaths: dict[int, float] = field(default_factory=dict)  # seconds after it began

    @property
    def took_s(self) -> float | None:
        return max(0.0, self.ended_at - self.began_at) if self.number and self.ended_at else None

    def take(self, board: Board) -> CellHistory:
        """Record ``board``; returns this history, or a new one when the board shows a new cell."""
        if board.cell and board.cell.number != self.number:
            return CellHistory(board.cell.number, board.cell.began_at).take(board)
        if self.number and not board.cell and not self.ended_at:
            self.ended_at = board.as_of
        for rank in dead_ranks(board):
            self.deaths.setdefault(rank, max(0.0, board.as_of - (self.began_at or board.as_of)))
        if board.cell:
            self._measure(board)
        return self

    def _measure(self, board: Board) -> None:
        for view in board.ranks:
            used = view.gpu_used_bytes if view.gpu_used_bytes is not None else view.rss_bytes
            self.peaks[view.rank] = max(self.peaks.get(view.rank, 0.0), used or 0.0)
            if view.device:
                self.devices[view.rank] = view.device
            if view.steps_per_s:
                self.rates[view.rank] = view.steps_per_s


def settle(board: Board | None, seen: CellHistory, name: str, *, is_well: bool, failure: str = "") -> Settled:
    """Return a summary with a row for each rank; of more than 64 ranks, only those with problems have a row.

    ``is_well``: the last cell failed on no rank. ``failure``: why the last order from a page failed.
    """
    if board is None:
        return Settled(f"Session {one_line(name)}: the ranks have not been queried yet")
    summary, where = _summary(board, seen, is_well), _where(board)
    dead = dead_ranks(board)
    host_of = {rank: node.name or node.host for node in board.nodes for rank in node.ranks}
    rows = [_row(view, host_of.get(view.rank, ""), dead, seen, is_well) for view in board.ranks]
    rest = failure
    if len(rows) > _MOST_ROWS:
        kept = [row for row in rows if row[3][:1] not in _ARE_WELL][:_MOST_ROWS]
        left = f"{count_ranks(len(rows) - len(kept))} of {len(rows)} not listed"
        rest = f"{left}; {failure}" if failure else left
        rows = kept
    text = "\n".join(filter(None, [f"{summary} {where}", *(table_lines([_COLUMNS, *rows]) if rows else []), rest]))
    return Settled(text, _page(summary, where, rows, rest))


def _summary(board: Board, seen: CellHistory, is_well: bool) -> str:
    if not seen.number:
        return f"{count_ranks(len(board.ranks))}, no cell seen yet."
    took = f" ended after {format_time(seen.took_s)}" if seen.took_s is not None else " is running"
    died = f"✕ {format_ranks(seen.deaths)} died" if seen.deaths else ""
    left = len(board.ranks) - len(seen.deaths.keys() & {view.rank for view in board.ranks})
    others = f"✓ {count_ranks(left)} done" if is_well else "failed or stopped on a rank" if seen.ended_at else ""
    story = ", ".join(filter(None, [others, died]))
    return f"Cell [{seen.number}]{took}{f': {story}' if story else ''}."


def _where(board: Board) -> str:
    hosts = sum(bool(node.name) for node in board.nodes)
    on = f" on {count_of(hosts, 'host')}" if hosts else ""
    over = f"; {one_line(board.over, most_chars=500)}" if board.over else ""
    at = time.strftime("%H:%M", time.localtime(board.as_of))
    return f"Session {one_line(board.name)}, {count_ranks(len(board.ranks))}{on}, {at}{over}."


def _row(view: RankView, host: str, dead: frozenset[int], seen: CellHistory, is_well: bool) -> tuple[str, ...]:
    rate, peak = seen.rates.get(view.rank), seen.peaks.get(view.rank)
    return (
        str(view.rank),
        one_line(host),
        one_line(view.device or seen.devices.get(view.rank, "")),
        _state(view, dead, seen, is_well),
        f"{rounded(rate)}" if rate else "-",
        format_size(peak) if peak else "-",
        one_line(view.last_line, most_chars=_LAST_CHARS),
    )


def _state(view: RankView, dead: frozenset[int], seen: CellHistory, is_well: bool) -> str:
    if view.rank in seen.deaths:
        came = ", replaced" if view.state != "died" else ""
        return f"✕ died at {format_time(seen.deaths[view.rank])}{came}"
    if view.state in ("idle", "unknown") or view.rank in dead:
        return (_WELL if is_well else _ENDED) if seen.number else "○ idle"
    return {"running": "▶ running", "waits": "⧗ waits", "awaited": "⚠ awaited"}.get(view.state, view.state)


def format_time(seconds: float | None) -> str:
    """Format a time as ``0.4 s``, ``34 s`` or ``1 min 24 s``."""
    seconds = seconds or 0.0
    return f"{seconds:.1f} s" if seconds < 10 else describe_seconds(seconds)


def _page(summary: str, where: str, rows: list[tuple[str, ...]], rest: str) -> str:
    """Return the HTML, with inline style only; it stays readable where styles are removed."""
    style = "font:12px/18px var(--jp-ui-font-family, system-ui, sans-serif);font-variant-numeric:tabular-nums"
    head = f"<b>{html.escape(summary)}</b> {html.escape(where)}"
    if not rows:
        return f"<div style='{style}'>{head}{' ' + html.escape(rest) if rest else ''}</div>"
    places = [_RIGHT if name in _NUMBERS else _LEFT for name in _COLUMNS]
    top = "".join(f"<th style='{place}'>{name}</th>" for place, name in zip(places, _COLUMNS))
    body = "".join(f"<tr>{''.join(map(_cell, places, row, _COLUMNS))}</tr>" for row in rows)
    below = f"<p>{html.escape(rest)}</p>" if rest else ""
    return (
        f"<details open style='{style}'><summary style='cursor:pointer'>{head}</summary><table "
        f"cellpadding='4' style='border-collapse:collapse;margin:6px 0 0 12px;white-space:nowrap'>"
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
        f"</table>{below}</details>"
    )


def _cell(place: str, text: str, column: str) -> str:
    shown = html.escape(text)
    if column == "Last line":
        return f"<td style='{place}'><code>{shown}</code></td>"
    shown = shown.replace(" ", "\u00a0")
    if text.startswith("✕"):
        shown = f"✕ <b>{shown[2:]}</b>"
    return f"<td style='{place}'>{shown}</td>"
