"""One cell while it runs: what each rank has sent, and when the cell has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from ...errors import HUNG_UP, RemoteError, WireError
from ...wire import CellDone, CellFailed, ClearOutput, Display, Output, RankEnded, parse_bundle
from ..output.log import Logged
from ..output.safe_output import Bundle, PieceCleaner, one_line, safe_bundle, show_hidden
from .cell_observer import CellObserver, Observers
from .overwritten import describe_overwritten


class Cell:
    """The messages of all ranks about one cell. A background thread adds them, the caller's thread waits for them.

    ``brings_values``: the values of its last expression are brought here before its ranks begin another cell.
    ``is_from_log``: it is shown again from the log, and the user has asked for all of it.
    """

    def __init__(
        self,
        number: int,
        ranks: Iterable[int],
        observer: CellObserver | None,
        hosts: Mapping[int, str],
        *,
        is_at_home: Callable[[int], bool],
        incarnations: Mapping[int, int] | None = None,
        brings_values: bool = False,
        is_from_log: bool = False,
    ) -> None:
        self.number: Final = number
        self.ranks: Final = tuple(ranks)  # those that run it
        self.observers: Final = Observers() if observer is None else Observers(observer)
        self.incarnations: Final[Mapping[int, int]] = dict(incarnations or {})  # of the interpreters that are to run it
        self.began_at: Final = time.time()  # in this process: after an attach, the cell began earlier
        self._lost_before = ""
        self._hosts = dict(hosts)
        self._is_at_home = is_at_home  # output of ranks on other machines is trusted less
        self._is_from_log = is_from_log
        self._news = threading.Event()  # wakes waiting threads: the cell is done, or a rank or the node was lost
        self.values_brought: Final = threading.Event()  # its values have arrived, or never will, or are not wanted
        if not brings_values:
            self.values_brought.set()
        self._outcomes: dict[int, CellDone | CellFailed | RankEnded] = {}
        self._presses = 0
        self._stopping = threading.Condition()
        self._num_stops, self._stop_story = 0, ""  # stops in progress, and the outcome of the last one
        self._is_cut_off = False
        self._lost_after_its_end: dict[int, RankEnded] = {}
        self._cleaners: dict[tuple[int, str], PieceCleaner] = {}
        self._bundles: dict[int, Bundle] = {}

    @property
    def outcomes(self) -> dict[int, CellDone | CellFailed | RankEnded]:
        """How the cell ended, by rank, for the ranks that have ended it."""
        return dict(self._outcomes)

    @property
    def presses(self) -> int:
        """How often stop was pressed: see rescue.py."""
        return self._presses

    @property
    def lost_before(self) -> str:
        """A description of ranks that died before the cell began, if no observer has shown it; for the cell's error."""
        return self._lost_before

    def tell_losses(self, words: str) -> None:
        """Keep the description of ranks that died before the cell began, unless observers have been told."""
        if not self.observers:
            self._lost_before = words

    @property
    def is_cut_off(self) -> bool:
        """No more messages will arrive: the session has failed, or the cell was shown from the log."""
        return self._is_cut_off

    @property
    def is_done(self) -> bool:
        return not self.running

    def wait(self, limit_s: float, *, ranks: Iterable[int] | None = None, or_loss: bool = False) -> bool:
        """Wait until all ranks (or ``ranks``) have ended the cell, or no more messages can arrive; True when all have.

        With ``or_loss``: also stop waiting when a rank is lost.
        """
        wanted = set(self.ranks if ranks is None else ranks)
        self._wait_until(lambda: wanted <= self._outcomes.keys() or or_loss and bool(self.lost), limit_s)
        return wanted <= self._outcomes.keys()

    def wait_for_loss(self, limit_s: float) -> None:
        """Wait until a rank is lost, if one may be: the errors of the others can arrive before that news."""
        self._wait_until(lambda: bool(self.lost) or not self.may_have_lost_a_rank, limit_s)

    def wait_for_ending(self, limit_s: float) -> None:
        """Wait for the exit of ranks whose error ends their process: a process with a GPU takes a while to exit."""
        self._wait_until(lambda: self.ending <= self.lost.keys(), limit_s)

    def _wait_until(self, is_so: Callable[[], bool], limit_s: float) -> None:
        """Wait until ``is_so`` returns True, or no more messages can arrive."""
        deadline = time.monotonic() + limit_s
        while not is_so() and not self._is_cut_off and (left_s := deadline - time.monotonic()) > 0:
            self._news.clear()
            if not is_so() and not self._is_cut_off:
                self._news.wait(left_s)

    @property
    def ending(self) -> set[int]:
        """The ranks whose error ends their process."""
        return {rank for rank, outcome in self.outcomes.items() if getattr(outcome, "is_ending", False)}

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks that have not ended the cell."""
        return tuple(rank for rank in self.ranks if rank not in self._outcomes)

    @property
    def lost(self) -> dict[int, RankEnded]:
        """The ranks whose process died before the cell had ended on all ranks."""
        lost = {rank: outcome for rank, outcome in self.outcomes.items() if isinstance(outcome, RankEnded)}
        return lost | self._lost_after_its_end

    @property
    def is_collective(self) -> bool:
        """A rank that has ended the cell began a collective or message in it."""
        return any(getattr(outcome, "is_collective", False) for outcome in self.outcomes.values())

    @property
    def may_have_lost_a_rank(self) -> bool:
        """A rank is exiting, or failed as ranks do when a peer closes its connection: news of a death may follow."""
        return bool(self.ending) or any(
            isinstance(outcome, CellFailed) and not outcome.interrupted and HUNG_UP.search(outcome.message)
            for outcome in self.outcomes.values()
        )

    def press(self, *, at_most: int) -> int:
        """Count a press of stop, up to ``at_most``; returns the count."""
        self._presses = min(self._presses + 1, at_most)
        return self._presses

    def note_stop(self) -> None:
        """Count a stop that no user has pressed: the next press counts as the second."""
        self._presses = max(self._presses, 1)

    @contextmanager
    def being_stopped(self) -> Iterator[list[str]]:
        """Mark the cell as being stopped; the text that the caller puts into the list becomes ``stop_story``."""
        with self._stopping:
            self._num_stops += 1
        told: list[str] = []
        try:
            yield told
        finally:
            with self._stopping:
                self._num_stops -= 1
                self._stop_story = told[0] if told and self.is_done else ""
                self._stopping.notify_all()

    def stop_story(self, limit_s: float) -> str:
        """Return how another thread's stop of the cell ended, or nothing; waits for a stop in progress."""
        with self._stopping:
            self._stopping.wait_for(lambda: not self._num_stops, limit_s)
            return self._stop_story

    def close(self) -> None:
        """Mark the cell as cut off and wake the waiting threads: no more messages will arrive."""
        self._is_cut_off = True
        self._news.set()

    def know_hosts(self, hosts: Mapping[int, str]) -> None:
        """Set the hosts of ranks that have reported them."""
        self._hosts.update(hosts)

    def shown_so_far(self) -> Callable[[], bool]:
        """Return a function that returns True once all taken so far has been shown.

        Without observers: once the cell has ended, or no more messages can arrive.
        """
        question = self.observers.shown_so_far() if self.observers else None

        def is_shown() -> bool:
            nonlocal question
            if question is None and self.observers:  # an observer added since, which received the log before that
                question = self.observers.shown_so_far()
            return question() if question else not self.running or self._is_cut_off

        return is_shown

    def go_on_from(self, shown: Cell) -> None:
        """Take over the state of ``shown``, the same cell shown from the log: outcomes and half-received output."""
        self._outcomes = shown._outcomes | self._outcomes
        self._bundles = shown._bundles | self._bundles
        if not self.observers:
            self._cleaners = shown._cleaners

    def read_bundle(self, message: object) -> Bundle | None:
        """Read the rich output in a message and make it safe; slow, so done before the lock is held for ``take``.

        None when the message has none that is wanted. Raises: WireError when it is malformed.
        """
        is_wanted = isinstance(message, CellDone) and message.body and message.rank in self.running
        if not is_wanted and not (isinstance(message, Display) and self.observers):
            return None
        assert isinstance(message, (CellDone, Display))
        is_at_home = self._is_at_home(message.rank)
        rest_is_in = "" if is_at_home or self._is_from_log else f"%distributed log --cell {self.number}"
        return safe_bundle(parse_bundle(message.body), is_this_machine=is_at_home, rest_is_in=rest_is_in)

    def take(self, message: Logged | RankEnded, bundle: Bundle | None = None) -> None:
        """Take a message of a rank, with its ``bundle`` if it was read.

        Raises: WireError when the rank does not run the cell.
        """
        if isinstance(message, Output):
            self._take_output(message)
        elif isinstance(message, (Display, ClearOutput)):
            self._take_display(message, bundle)
        else:
            self._take_end(message, bundle)

    def _take_output(self, message: Output) -> None:
        if not self.observers or message.stream not in ("stdout", "stderr"):
            return
        source = (message.rank, message.stream)
        cleaner = self._cleaners.setdefault(source, PieceCleaner())
        if text := cleaner.clean(message.body):
            self.observers.output(message.rank, message.stream, text)

    def _take_display(self, message: Display | ClearOutput, bundle: Bundle | None) -> None:
        if isinstance(message, ClearOutput):
            self.observers.clear(message.rank, message.wait)
        elif self.observers:
            bundle = bundle or self.read_bundle(message) or {}  # not read before if the observer was added since
            self.observers.display(message.rank, bundle, message.display_id, message.update)

    def _take_end(self, message: CellDone | CellFailed | RankEnded, bundle: Bundle | None) -> None:
        if isinstance(message, RankEnded) and message.rank in self._outcomes:
            self._lost_after_its_end[message.rank] = message
            self._news.set()
            return
        if message.rank in self.lost:
            return  # the rank had ended the cell when it was lost
        if message.rank not in self.running:
            raise WireError(f"rank {message.rank} reported the end of cell {self.number}, which it does not run")
        if isinstance(message, CellDone) and message.body:
            self._bundles[message.rank] = bundle or self.read_bundle(message) or {}
            message = replace(message, body=b"")
        self._outcomes[message.rank] = message
        if not self.running and (words := self.describe_overwritten()):
            self.observers.notice(words)
        self._news.set()

    def describe_overwritten(self) -> str:
        """Describe which of the variables that ranks begin with the cell has overwritten; empty for none."""
        return describe_overwritten({rank: getattr(end, "overwritten", ()) for rank, end in self.outcomes.items()})

    def withdraw(self, rank: int) -> None:
        """Mark the cell as interrupted on a rank that never received it: the caller was interrupted before."""
        never = CellFailed(rank, self.number, 0.0, False, False, "KeyboardInterrupt", "", [], True)
        self._outcomes.setdefault(rank, never)
        self._news.set()

    def errors(self) -> dict[int, RemoteError]:
        """Return what the cell raised, by rank."""
        return {
            outcome.rank: RemoteError(
                outcome.rank,
                self._hosts.get(outcome.rank, ""),
                one_line(outcome.name),
                show_hidden(outcome.message),
                tuple(show_hidden(line) for line in outcome.traceback),
                outcome.interrupted,
            )
            for outcome in self.outcomes.values()
            if isinstance(outcome, CellFailed)
        }

    def bundles(self) -> dict[int, Bundle]:
        """Return the rich form of the cell's value, by rank, for ranks that have one."""
        return dict(self._bundles)
