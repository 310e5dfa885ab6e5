"""One cell while it runs: what has come from which rank, and when it is over."""

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
    """Gathers what the ranks say of one cell. Fed by the background thread, waited for by the caller's.

    ``brings_values``: those of its last expression are to come here before another cell of its ranks begins.
    ``is_from_log``: it is shown once more, and the user has asked for all of it.
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
        self.incarnations: Final[Mapping[int, int]] = dict(incarnations or {})  # of the interpreters it is meant for
        self.began_at: Final = time.time()  # here: one that runs since an attach has begun earlier
        self._lost_before = ""
        self._hosts = dict(hosts)
        self._is_at_home = is_at_home  # less of what ranks on other machines show is safe
        self._is_from_log = is_from_log
        self._news = threading.Event()  # who waits should look: it is done, a rank was lost, the node is gone
        self.values_brought: Final = threading.Event()  # its values are here, or will not come, or nobody wants them
        if not brings_values:
            self.values_brought.set()
        self._outcomes: dict[int, CellDone | CellFailed | RankEnded] = {}
        self._presses = 0
        self._stopping = threading.Condition()
        self._num_stops, self._stop_story = 0, ""  # under way, and what became of the last
        self._is_cut_off = False
        self._lost_after_its_end: dict[int, RankEnded] = {}
        self._cleaners: dict[tuple[int, str], PieceCleaner] = {}
        self._bundles: dict[int, Bundle] = {}

    @property
    def outcomes(self) -> dict[int, CellDone | CellFailed | RankEnded]:
        """How it ended on those ranks that have ended it."""
        return dict(self._outcomes)

    @property
    def presses(self) -> int:
        """Of stop, so far: see rescue.py."""
        return self._presses

    @property
    def lost_before(self) -> str:
        """How ranks ended before it began, in words, where nobody who shows it has shown that: for its error."""
        return self._lost_before

    def tell_losses(self, words: str) -> None:
        """How ranks ended before it began."""
        if not self.observers:
            self._lost_before = words

    @property
    def is_cut_off(self) -> bool:
        """Nothing more will come: the node is gone."""
        return self._is_cut_off

    @property
    def is_done(self) -> bool:
        return not self.running

    def wait(self, limit_s: float, *, ranks: Iterable[int] | None = None, or_loss: bool = False) -> bool:
        """Wait until every rank (of ``ranks``) has ended the cell, or nothing will come any more; True when all have.

        With ``or_loss``: also no longer than until a rank is lost.
        """
        wanted = set(self.ranks if ranks is None else ranks)
        self._wait_until(lambda: wanted <= self._outcomes.keys() or or_loss and bool(self.lost), limit_s)
        return wanted <= self._outcomes.keys()

    def wait_for_loss(self, limit_s: float) -> None:
        """Wait until a rank is lost, where one may be; what the others raised can arrive before that news."""
        self._wait_until(lambda: bool(self.lost) or not self.may_have_lost_a_rank, limit_s)

    def wait_for_ending(self, limit_s: float) -> None:
        """Wait until the ranks that end because of what they raised have ended: that takes a GPU's process a while."""
        self._wait_until(lambda: self.ending <= self.lost.keys(), limit_s)

    def _wait_until(self, is_so: Callable[[], bool], limit_s: float) -> None:
        """Wait until ``is_so``, or nothing will come any more."""
        deadline = time.monotonic() + limit_s
        while not is_so() and not self._is_cut_off and (left_s := deadline - time.monotonic()) > 0:
            self._news.clear()
            if not is_so() and not self._is_cut_off:
                self._news.wait(left_s)

    @property
    def ending(self) -> set[int]:
        """The ranks whose process ends because of what they raised."""
        return {rank for rank, outcome in self.outcomes.items() if getattr(outcome, "is_ending", False)}

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks that have not ended the cell."""
        return tuple(rank for rank in self.ranks if rank not in self._outcomes)

    @property
    def lost(self) -> dict[int, RankEnded]:
        """The ranks whose process ended before the cell had ended on all."""
        lost = {rank: outcome for rank, outcome in self.outcomes.items() if isinstance(outcome, RankEnded)}
        return lost | self._lost_after_its_end

    @property
    def is_collective(self) -> bool:
        """A rank that has ended the cell began something with other ranks in it."""
        return any(getattr(outcome, "is_collective", False) for outcome in self.outcomes.values())

    @property
    def may_have_lost_a_rank(self) -> bool:
        """A rank ends, or failed as it does when another one hangs up; that one of them ended may be told later."""
        return bool(self.ending) or any(
            isinstance(outcome, CellFailed) and not outcome.interrupted and HUNG_UP.search(outcome.message)
            for outcome in self.outcomes.values()
        )

    def press(self, *, at_most: int) -> int:
        """Stop was pressed; returns how often."""
        self._presses = min(self._presses + 1, at_most)
        return self._presses

    def note_stop(self) -> None:
        """It was stopped, and nobody has pressed: the next press is the second."""
        self._presses = max(self._presses, 1)

    @contextmanager
    def being_stopped(self) -> Iterator[list[str]]:
        """While a thread stops it; what the thread puts into the list is the story of that, told where it ends it."""
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
        """What became of it, in words, where another thread has stopped it; waits for one that still does."""
        with self._stopping:
            self._stopping.wait_for(lambda: not self._num_stops, limit_s)
            return self._stop_story

    def close(self) -> None:
        """Nothing more will come; whoever waits is told."""
        self._is_cut_off = True
        self._news.set()

    def know_hosts(self, hosts: Mapping[int, str]) -> None:
        """Ranks have said where they are."""
        self._hosts.update(hosts)

    def shown_so_far(self) -> Callable[[], bool]:
        """A question: has all that was taken so far been shown? With no observer, it is at the end of the cell."""
        question = self.observers.shown_so_far() if self.observers else None

        def is_shown() -> bool:
            nonlocal question
            if question is None and self.observers:  # it was added since, and got what was logged before
                question = self.observers.shown_so_far()
            return question() if question else not self.running or self._is_cut_off

        return is_shown

    def go_on_from(self, shown: Cell) -> None:
        """Take over what ``shown`` has of this cell: ranks that have ended it, what has half arrived."""
        self._outcomes = shown._outcomes | self._outcomes
        self._bundles = shown._bundles | self._bundles
        if not self.observers:
            self._cleaners = shown._cleaners

    def read_bundle(self, message: object) -> Bundle | None:
        """What of a message may be shown as a rich output: takes a while, so before anything is locked for ``take``.

        None where nobody wants that. Raises: WireError when it is none.
        """
        is_wanted = isinstance(message, CellDone) and message.body and message.rank in self.running
        if not is_wanted and not (isinstance(message, Display) and self.observers):
            return None
        assert isinstance(message, (CellDone, Display))
        is_at_home = self._is_at_home(message.rank)
        rest_is_in = "" if is_at_home or self._is_from_log else f"%distributed log --cell {self.number}"
        return safe_bundle(parse_bundle(message.body), is_this_machine=is_at_home, rest_is_in=rest_is_in)

    def take(self, message: Logged | RankEnded, bundle: Bundle | None = None) -> None:
        """What a rank said in this cell; ``bundle`` as it was read. Raises: WireError when it does not run it."""
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
            bundle = bundle or self.read_bundle(message) or {}  # somebody may look only since a moment ago
            self.observers.display(message.rank, bundle, message.display_id, message.update)

    def _take_end(self, message: CellDone | CellFailed | RankEnded, bundle: Bundle | None) -> None:
        if isinstance(message, RankEnded) and message.rank in self._outcomes:
            self._lost_after_its_end[message.rank] = message
            self._news.set()
            return
        if message.rank in self.lost:
            return  # it had ended the cell when it was lost
        if message.rank not in self.running:
            raise WireError(f"rank {message.rank} ended cell {self.number}, which it does not run")
        if isinstance(message, CellDone) and message.body:
            self._bundles[message.rank] = bundle or self.read_bundle(message) or {}
            message = replace(message, body=b"")
        self._outcomes[message.rank] = message
        if not self.running and (words := self.describe_overwritten()):
            self.observers.notice(words)
        self._news.set()

    def describe_overwritten(self) -> str:
        """What the cell has overwritten of the variables that ranks begin with, in words, or nothing."""
        return describe_overwritten({rank: getattr(end, "overwritten", ()) for rank, end in self.outcomes.items()})

    def withdraw(self, rank: int) -> None:
        """A rank has never got the cell: the caller was interrupted before it was sent."""
        never = CellFailed(rank, self.number, 0.0, False, False, "KeyboardInterrupt", "", [], True)
        self._outcomes.setdefault(rank, never)
        self._news.set()

    def errors(self) -> dict[int, RemoteError]:
        """What the cell raised, by rank."""
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
        """The rich form of the cell's value, by rank, where it has one."""
        return dict(self._bundles)
