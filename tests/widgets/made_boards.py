"""Synthetic boards, and stand-ins for a session that has them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from detrain_nb.session.running.board import Board, BoardNote, CellView, NodeView, RankView

GB = 10**9


def made_rank(rank: int, *, state: str = "running", node: str = "", **more: Any) -> RankView:
    source = "loss.backward()" if state == "running" else ""
    view = RankView(
        rank, node, state, line=9 if source else 0, source=source, device=f"cuda:{rank % 8}", pid=4000 + rank
    )
    view = replace(
        view, cpu_percent=104.0, rss_bytes=3 * GB, gpu_percent=90.0 + rank % 7, gpu_used_bytes=(60 + rank % 9) * GB
    )
    view = replace(
        view, gpu_total_bytes=80 * GB, gpu_name="H100", steps_per_s=3.4, last_line=f"step 1840 loss 2.4{rank:02}"
    )
    return replace(view, **more)


def made_board(count: int, *, per_node: int = 8, cell: int | None = 12, seconds: float = 42.0) -> Board:
    """Return a board on which all ranks run, ``per_node`` on each host."""
    ranks = tuple(made_rank(rank, node=f"gpu{rank // per_node + 1}") for rank in range(count))
    nodes = tuple(
        NodeView(
            f"gpu{first // per_node + 1}",
            f"alice@gpu{first // per_node + 1}.example.org",
            f"node-{first // per_node + 1}",
            tuple(range(first, min(first + per_node, count))),
            cpu_percent=41.0,
            memory_used_bytes=62 * GB,
            memory_total_bytes=256 * GB,
            is_sampled=True,
        )
        for first in range(0, count, per_node)
    )
    now = time.time()
    running = CellView(cell, now - seconds, "%%distributed", tuple(range(count))) if cell else None
    return Board("big", ranks, nodes, (), running, now, time.monotonic())


def with_ranks(board: Board, *views: RankView, notes: tuple[BoardNote, ...] = ()) -> Board:
    """Return the board with these ranks replaced, and with these notes."""
    by_rank = {view.rank: view for view in views}
    return replace(board, ranks=tuple(by_rank.get(view.rank, view) for view in board.ranks), notes=notes)


def board_with_a_hang(count: int = 64, *, host: int = 2, late: int = 19, dead: int = 37, fresh: int = 50) -> Board:
    """Return a board on which the ranks of one host wait for one of them, one rank has died, and one is starting."""
    board = made_board(count, seconds=187.0)
    waiting = [rank for rank in range(8 * host, 8 * host + 8) if rank != late]
    waits = [
        made_rank(
            rank,
            state="waits",
            node=f"gpu{host + 1}",
            detail="in all_reduce #6 (line 9)",
            collective="all_reduce #6",
            waits_for=(late,),
            waits_s=34.0,
            gpu_percent=0.0,
            steps_per_s=0.0,
        )
        for rank in waiting
    ]
    others = [
        made_rank(late, node=f"gpu{host + 1}", gpu_percent=3.0, steps_per_s=0.0, last_line="slow batch: 41 files"),
        made_rank(
            dead, state="starting", node=f"gpu{dead // 8 + 1}", exit="ended with signal 9 (SIGKILL)", gpu_used_bytes=0
        ),
        made_rank(
            fresh, state="starting", node=f"gpu{fresh // 8 + 1}", gpu_used_bytes=6 * GB, steps_per_s=None, last_line=""
        ),
    ]
    others[0] = replace(others[0], state="awaited", line=7, source="batch = next(it)", detail="computing at line 7")
    waits_for = f"7 ranks on gpu{host + 1} wait in all_reduce #6 (line 9) for rank {late}"
    notes = (
        BoardNote("died", (dead,), f"rank {dead} ended with signal 9 (SIGKILL); it is restarting"),
        BoardNote("waits", tuple(waiting), f"{waits_for}, for 34 s; rank {late} computes at line 7"),
    )
    return with_ranks(board, *waits, *others, notes=notes)


class MadeWatch:
    """Stand-in for the result of `Session.watch`."""

    def __init__(self, board: Board) -> None:
        self.latest: Board | None = board
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def __enter__(self) -> MadeWatch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class MadeLog:
    """Stand-in for the cells of a session."""

    running_cells: ClassVar[dict[int, tuple[int, ...]]] = {}
    cells: ClassVar[list[Any]] = []

    def has_failed(self, cell: int) -> bool:
        return False


class MadeRanks:
    """Stand-in for the ranks of a session."""

    def choose(self, ranks: str) -> tuple[int, ...]:
        return (int(ranks),)


class MadeSession:
    """Stand-in for a session: only the parts that a board needs."""

    def __init__(self, board: Board) -> None:
        self.name = board.name
        self.board = board
        self.watches: list[MadeWatch] = []
        self.log, self.ranks = MadeLog(), MadeRanks()
        self.listeners: list[Callable[[], None]] = []

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        self.listeners.append(callback)
        return lambda: self.listeners.remove(callback)

    def watch(self, callback: Callable[[Board], None]) -> MadeWatch:
        self.watches.append(MadeWatch(self.board))
        threading.Thread(target=callback, args=(self.board,), daemon=True).start()
        return self.watches[-1]
