"""A `Board` as plain JSON for its page, with its wording; all text from nodes is cleaned once more."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable
from typing import Any

from ..errors import format_ranks
from ..session.output.safe_output import one_line
from ..session.running.board import Board, BoardNote, NodeView, RankView

SHOWN_STATES = ("running", "waits", "awaited", "died", "unknown", "starting", "idle")  # in the order of the counts
_NOTE_CHARS, _LINE_CHARS = 2000, 200
_FRESH = {"idle": "replaced by a fresh rank without its variables", "starting": "a fresh rank is starting"}


def head_of(board: Board) -> dict[str, Any]:
    """Return the facts of the first line."""
    cell = board.cell
    rates = [view.steps_per_s for view in board.ranks if view.steps_per_s]
    return {
        "name": one_line(board.name),
        "ranks": len(board.ranks),
        "hosts": sum(bool(node.name) for node in board.nodes),
        "cell": cell.number if cell else None,
        "seconds": int(max(0.0, board.as_of - cell.began_at)) if cell else None,
        "rate": rounded(statistics.median(rates)) if rates and cell else None,
        "counts": counts_of(board),
        "over": one_line(board.over, most_chars=_NOTE_CHARS),
    }


def counts_of(board: Board) -> dict[str, int]:
    """Count the ranks shown in each state."""
    dead = dead_ranks(board)
    shown = [shown_state(view, dead) for view in board.ranks]
    return {state: shown.count(state) for state in SHOWN_STATES}


def layout_of(board: Board) -> list[dict[str, Any]]:
    """Return the hosts in order, each with its ranks: the fixed layout of the board."""
    placed = {rank for node in board.nodes for rank in node.ranks}
    known = {view.rank for view in board.ranks}
    hosts = [
        {"name": one_line(node.name), "where": one_line(node.where), "ranks": sorted(known.intersection(node.ranks))}
        for node in board.nodes
    ]
    if left := sorted(known - placed):
        hosts.append({"name": "", "where": "", "ranks": left})
    return [host for host in hosts if host["ranks"]]


def host_row(node: NodeView) -> dict[str, Any]:
    """Return what a host uses."""
    return {
        "cpu": _whole(node.cpu_percent),
        "used": rounded(node.memory_used_bytes),
        "total": rounded(node.memory_total_bytes),
        "fault": one_line(node.fault, most_chars=_LINE_CHARS),
    }


def rank_row(view: RankView, dead: Collection[int], node: NodeView | None) -> dict[str, Any]:
    """Return the content of a tile, for a rank of ``node``."""
    state = shown_state(view, dead)
    has_gpu = view.gpu_total_bytes is not None
    return {
        "state": state,
        "word": f"waits {view.waits_s:.0f} s" if state == "waits" and view.waits_s else state,
        "at": _place(view, state),
        "more": one_line(view.detail, most_chars=_NOTE_CHARS),
        "cpu": _whole(view.cpu_percent),
        "gpu": _whole(view.gpu_percent) if has_gpu else None,
        "used": rounded(view.gpu_used_bytes if has_gpu else view.rss_bytes),
        "total": rounded(view.gpu_total_bytes if has_gpu else node.memory_total_bytes if node else None),
        "rate": rounded(view.steps_per_s),
        "last": one_line(view.last_line, most_chars=_LINE_CHARS),
        "host": one_line(node.name or node.host if node else view.node),
        "device": one_line(view.device),
        "pid": view.pid,
        "runs": _runs(view),
    }


def _runs(view: RankView) -> bool:
    """Return whether the rank runs a cell; an awaited rank may have finished it."""
    return view.state in ("running", "waits") or (view.state == "awaited" and view.line > 0)


def _place(view: RankView, state: str) -> str:
    """Return where the rank is, in a few words."""
    if state == "died":
        said = view.exit or view.detail
    elif state == "waits":
        said = f"{view.collective}{f' for {format_ranks(view.waits_for)}' if view.waits_for else ''}"
    elif view.line and view.source:
        of = f" of cell {view.earlier_cell}" if view.earlier_cell else ""
        said = f"line {view.line}{of}: {view.source}"
    else:
        said = view.detail
    return one_line(said, most_chars=_LINE_CHARS)


def fresh_of(view: RankView, dead: Collection[int]) -> str:
    """Return what has replaced a rank that died."""
    return _FRESH.get(view.state, "") if view.rank in dead else ""


def dead_ranks(board: Board) -> frozenset[int]:
    """Return the ranks that have died, until their next cell begins; ranks that the user replaced do not count."""
    return frozenset(rank for note in board.notes if note.kind in ("died", "lost") for rank in note.ranks)


def shown_state(view: RankView, dead: Collection[int]) -> str:
    """Return the state to show; a rank that died is shown as dead even after a fresh one has replaced it."""
    state = view.state if view.state in SHOWN_STATES else "unknown"
    return "died" if view.rank in dead and state in ("idle", "starting") else state


def notes_of(board: Board) -> list[dict[str, Any]]:
    """Return the notes that need attention, with the ranks that their buttons act on."""
    by_rank = {view.rank: view for view in board.ranks}
    return [
        {
            "kind": note.kind,
            "ranks": list(note.ranks),
            "whom": _whom(note, by_rank),
            "down": note.kind == "died" and all(_is_down(by_rank.get(rank)) for rank in note.ranks),
            "ready": all(rank in by_rank and by_rank[rank].state == "idle" for rank in note.ranks),
            "text": one_line(note.text, most_chars=_NOTE_CHARS),
        }
        for note in board.notes
    ]


def _whom(note: BoardNote, by_rank: dict[int, RankView]) -> list[int]:
    """Return the ranks that those of the note wait for and that are running the cell."""
    if note.kind != "waits":
        return []
    waiting = (by_rank[rank] for rank in note.ranks if rank in by_rank)
    return sorted({rank for view in waiting for rank in view.waits_for if rank in by_rank and _runs(by_rank[rank])})


def _is_down(view: RankView | None) -> bool:
    return view is not None and view.state == "died"


def rates_of(ranks: Iterable[RankView]) -> list[float | None]:
    """Return the rate of every rank, in order."""
    return [rounded(view.steps_per_s) for view in ranks]


def rounded(number: float | None) -> float | None:
    """Round to three digits, so that smaller changes are not sent."""
    if number is None:
        return None
    short = float(f"{number:.3g}")
    return int(short) if short == int(short) else short


def _whole(number: float | None) -> int | None:
    return None if number is None else round(number)
