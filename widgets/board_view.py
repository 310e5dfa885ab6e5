"""A session at a glance: a tile for each rank, which ranks wait for which, and buttons to act on them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import DetrainError, format_ranks, short_ranks
from ..plan import MOST_RANKS
from ..session.output.safe_output import one_line
from ..session.running.board import Board
from ..session.running.views import Watch
from ..session.session import Session
from .actions import Refused, action, describe_failure, one_of, text, whole
from .board_history import CellHistory, format_time, settle
from .board_panes import PANES, Panes
from .board_rows import dead_ranks, fresh_of, head_of, host_row, layout_of, notes_of, rank_row, rates_of
from .displays import Settled
from .live_view import LiveView

__all__ = ["BoardView"]

_SPARK_POINTS, _SPARK_S = 60, 1.0  # of the rate of each rank
_QUIET_S = 2.0  # an idle session is no longer sampled after this time
_FIRST_LIMIT_S = 2.0
_MOST_STOPS = 3  # at the same time: pressing stop again goes further
_MOST_ORDERS = 16  # at the same time: a restart and a replay for each set of ranks
_CHOICE = text(most=1000)
_MOST_CHARS, _MOST_LINES = 2000, 20  # of the result of an order


class BoardView(LiveView):
    """The live view of one session. It follows changes while a page shows it, and samples ranks while they are busy."""

    name = "board_view"

    def __init__(self, session: Session) -> None:
        self._session = session
        self._board: Board | None = None
        self._seen = CellHistory()
        self._rates: deque[list[float | None]] = deque(maxlen=_SPARK_POINTS)
        self._rated_at = 0.0
        self._busy_at = 0.0  # when ranks were last seen at work
        self._watching = threading.Lock()
        self._watch: Watch | None = None
        self._stop_listening: Callable[[], None] | None = None
        self._said: dict[str, Any] = {}
        self._orders: list[threading.Thread] = []
        self._ordering = threading.Lock()
        self._panes = Panes(session, self.publish)
        super().__init__()

    # ---- what it shows

    def state(self) -> dict[str, Any]:
        parts = {"said": self._said, "rates": [*self._rates]}
        return {**parts, **(self._parts(self._board) if self._board else {})}

    def settled(self) -> Settled:
        if self._board is None:
            self._take_one()
        number = self._seen.number
        is_well = bool(number and self._seen.ended_at) and not self._session.log.has_failed(number)
        failure = self._said["text"] if self._said.get("is") == "failed" else ""
        return settle(self._board, self._seen, self._session.name, is_well=is_well, failure=failure)

    def _take_one(self) -> None:
        """Get a first board, for front ends without a live view."""
        came = threading.Event()
        with self._session.watch(lambda _: came.set()) as watch:
            if watch.latest is None:
                came.wait(_FIRST_LIMIT_S)
            if watch.latest is not None and self._board is None:
                self._board = watch.latest
                self._seen = self._seen.take(watch.latest)

    def _parts(self, board: Board) -> dict[str, Any]:
        """Return ``board`` for pages, part by part; unchanged parts are not sent."""
        dead = dead_ranks(board)
        node_of = {rank: node for node in board.nodes for rank in node.ranks}
        rows = {view.rank: rank_row(view, dead, node_of.get(view.rank)) for view in board.ranks}
        for view in board.ranks:
            rows[view.rank]["fresh"] = fresh_of(view, dead)
        hosts = [host_row(node) for node in board.nodes if node.ranks]
        return {
            "layout": layout_of(board),
            "head": {**head_of(board), **self._since(board)},
            "notes": notes_of(board),
            "hosts": hosts,
            **{f"rank{rank}": row for rank, row in rows.items()},
        }

    def _since(self, board: Board) -> dict[str, Any]:
        """Return, for an idle session, the cell that ran last and the time it ended."""
        if board.cell or not self._seen.number:
            return {"last": "", "ended": None}
        number, after = self._seen.number, format_time(self._seen.took_s)
        how = "failed or was stopped after" if self._session.log.has_failed(number) else "took"
        return {"last": f"cell [{number}] {how} {after}", "ended": self._seen.ended_at}

    # ---- changes of the session

    def on_pages(self, *, are_there: bool) -> None:
        if not are_there:
            self._end_listening()
            return
        self._panes.open()
        with self._watching:
            if self._stop_listening is None:
                self._stop_listening = self._session.on_change(self._look_again)
        self._look_again()

    def _end_listening(self) -> None:
        self._panes.close()
        with self._watching:
            stop, self._stop_listening = self._stop_listening, None
            watch, self._watch = self._watch, None
        if stop:
            stop()
        if watch:
            watch.close()

    def _look_again(self) -> None:
        """Follow boards again after a change, until the session is quiet."""
        with self._watching:
            self._busy_at = time.monotonic()
            if self._watch is None and self._stop_listening is not None:
                self._watch = self._session.watch(self.show)
            last = self._watch.latest if self._watch else None
        if last is not None and last.over:  # the session has ended: no more boards follow
            self.show(last)

    def show(self, board: Board) -> None:
        """Show ``board`` on the pages. Called in the session's thread."""
        self._seen = self._seen.take(board)
        if self._board and [view.rank for view in board.ranks] != [view.rank for view in self._board.ranks]:
            self._rates.clear()
        self._board = board
        for part, value in self._parts(board).items():
            self.publish(part, value)
        self._note_rates(board)
        if board.over:
            self._end_listening()
            self.settle()
        elif self._is_quiet(board):
            with self._watching:
                watch, self._watch = self._watch, None
            if watch:
                watch.close()

    def _note_rates(self, board: Board) -> None:
        rates = rates_of(board.ranks)
        if board.cell and board.clock_s - self._rated_at >= 0.9 * _SPARK_S and any(rate is not None for rate in rates):
            self._rated_at = board.clock_s
            with self._sending:  # a page that opens meanwhile gets the point with its state or as news
                self._rates.append(rates)
                self.append("rates", [rates])

    def _is_quiet(self, board: Board) -> bool:
        now = time.monotonic()
        if board.cell or any(view.state == "starting" for view in board.ranks):
            self._busy_at = now
        return now - self._busy_at >= _QUIET_S

    def close(self) -> None:
        self._end_listening()
        super().close()

    # ---- what a page asks

    @action()
    def stop(self) -> None:
        """Stop the running cells, as the notebook's stop button does."""
        self._order("stop", self._stop_cells, most=_MOST_STOPS)

    @action(ranks=_CHOICE)
    def interrupt(self, ranks: str) -> None:
        """Raise KeyboardInterrupt on the chosen ranks."""
        chosen = self._choose(ranks)
        if not any(set(chosen).intersection(running) for running in self._session.log.running_cells.values()):
            raise Refused(f"no cell is running on {format_ranks(chosen)}")

        def send() -> str:
            self._session.ranks.interrupt(chosen)
            return f"KeyboardInterrupt sent to {format_ranks(chosen)}"

        self._order("interrupt", send)

    @action(ranks=_CHOICE)
    def restart(self, ranks: str) -> None:
        """Replace the chosen ranks with fresh ones."""
        chosen = self._choose(ranks)

        def replace() -> str:
            self._session.restart(chosen)
            short = short_ranks(chosen)
            return f"{format_ranks(chosen)} restarted; %distributed replay -r {short} runs earlier cells there again"

        self._order(f"restart of {format_ranks(chosen)}", replace)

    @action(ranks=_CHOICE)
    def replay(self, ranks: str) -> None:
        """Run earlier cells again on fresh ranks, which lack the variables of those cells."""
        chosen = self._choose(ranks)

        def run_again() -> str:
            replayed = self._session.log.replay(chosen)
            words = f"on {format_ranks(chosen)}:\n{self._session.log.describe_replay(replayed)}"
            if any(replayed.values()):
                raise DetrainError(words)
            return words

        self._order(f"replay on {format_ranks(chosen)}", run_again)

    @action(what=one_of(*PANES), rank=whole(0, MOST_RANKS))
    def look(self, what: str, rank: int) -> None:
        """Keep the last lines or the stack of a rank up to date for some seconds."""
        self._choose(str(rank))
        self._panes.look(what, rank)

    def _choose(self, ranks: str) -> tuple[int, ...]:
        if not ranks.strip():
            raise Refused("give the ranks, as 0,2 or 0-3 or all")
        return self._session.ranks.choose(ranks.strip())

    def _stop_cells(self) -> str:
        stories = [f"cell {number}: {story}" for number, story in self._session.stop_cells().items()]
        return "\n".join(stories) or "no cell is running"

    def _order(self, what: str, do: Callable[[], str], *, most: int = 1) -> None:
        """Run ``do`` in a thread of its own: a stop never waits for a restart. Raises: Refused while it is running."""
        with self._ordering:
            self._orders = [thread for thread in self._orders if thread.is_alive()]
            if sum(thread.name == what for thread in self._orders) >= most:
                raise Refused(f"the {what} is still running")
            if len(self._orders) >= _MOST_ORDERS and what not in ("stop", "interrupt"):
                raise Refused(f"{len(self._orders)} orders are still running: wait for one to finish")
            thread = threading.Thread(target=self._carry_out, args=(what, do), name=what, daemon=True)
            self._orders.append(thread)
            thread.start()

    def _carry_out(self, what: str, do: Callable[[], str]) -> None:
        self._say("running", f"{what} …")
        try:
            self._say("done", do())
        except (DetrainError, ValueError, OSError) as exc:
            self._say("failed", describe_failure(exc))
        except Exception as exc:
            self._say("failed", describe_failure(exc))
            raise
        with contextlib.suppress(DetrainError):
            self._look_again()

    def _say(self, state: str, words: str) -> None:
        lines = [one_line(line, most_chars=_MOST_CHARS) for line in words.splitlines()[:_MOST_LINES]]
        self._said = {"is": state, "text": "\n".join(lines)[:_MOST_CHARS]}
        self.publish("said", self._said)
