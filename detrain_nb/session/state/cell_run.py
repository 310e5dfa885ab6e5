"""One cell while it runs: what has come from which rank, and when it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from ...errors import HUNG_UP, RemoteError, WireError
from ...wire import CellDone, CellFailed, ClearOutput, Display, Output, RankEnded, parse_bundle
from ..output.safe_output import Bundle, PieceCleaner, clean_text, one_line, safe_bundle, show_hidden
from .overwritten import describe_overwritten


class CellObserver(Protocol):
    """Who shows a cell. All methods are called while it runs, most of them in a background thread; none may block.

    A subclass that leaves some of them out shows nothing of that kind.
    """

    draws: bool = False  # it follows the cursor: its ``output`` is given what moves that and what erases, too

    def begin(self, cell: int) -> None:
        """The cell is about to be sent to its ranks, under this number; before, it may have waited for them."""

    def output(self, rank: int, stream: str, text: str) -> None:
        """Text that a rank wrote to ``stream`` ("stdout" or "stderr"), free of control sequences but colours."""

    def display(self, rank: int, bundle: Bundle, display_id: str, is_update: bool) -> None:
        """A rich output, safe to show."""

    def clear(self, rank: int, wait: bool) -> None:
        """The cell wants its earlier output on this rank gone."""

    def waiting(self, text: str) -> None:
        """Which ranks the cell still waits for, and where they are; empty when it waits for none."""

    def notice(self, text: str) -> None:
        """Something the user should know."""

    def checkpoint(self) -> Callable[[], bool]:
        """A question: has all that was given so far been shown?"""
        return lambda: True


def tell_begin(observer: CellObserver | None, cell: int) -> None:
    """To one that wants to know: an observer need have no more methods than it uses."""
    if begin := getattr(observer, "begin", None):
        begin(cell)


class CellRun:
    """Gathers what the ranks say of one cell. Fed by the background thread, waited for by the caller's.

    ``news`` is set when the caller should look: the cell is done, a rank was lost, the node is gone.
    """

    def __init__(
        self,
        cell: int,
        ranks: tuple[int, ...],
        observer: CellObserver | None,
        hosts: dict[int, str],
        *,
        is_at_home: Callable[[int], bool],
    ) -> None:
        self.cell = cell
        self.ranks = ranks
        self.news = threading.Event()
        self.has_given = threading.Event()  # its values are here, or nobody wants them
        self.has_given.set()
        self.outcomes: dict[int, CellDone | CellFailed | RankEnded] = {}
        self.presses = 0  # of stop, so far: see rescue.py
        self.observer = observer
        self.is_over = False  # nothing more will come: the node is gone
        self.hosts = hosts
        self._is_at_home = is_at_home  # less of what ranks on other machines show is safe
        self.is_from_log = False  # the user has asked for all of it
        self.incarnations: dict[int, int] = {}  # of the interpreters it is meant for, by rank
        self._lost_after_its_end: dict[int, RankEnded] = {}
        self._cleaners: dict[tuple[int, str], PieceCleaner] = {}
        self._bundles: dict[int, Bundle] = {}

    @property
    def is_done(self) -> bool:
        return not self.running

    def wait(self, limit_s: float, *, ranks: Iterable[int] | None = None, or_loss: bool = False) -> bool:
        """Wait until every rank (of ``ranks``) has ended the cell, or nothing will come any more; True when all have.

        With ``or_loss``: also no longer than until a rank is lost.
        """
        wanted = set(self.ranks if ranks is None else ranks)
        deadline = time.monotonic() + limit_s
        while wanted - self.outcomes.keys() and (left := deadline - time.monotonic()) > 0:
            self.news.clear()
            if self.is_over or or_loss and self.lost:
                break
            if wanted - self.outcomes.keys():
                self.news.wait(left)
        return not wanted - self.outcomes.keys()

    def wait_for_loss(self, limit_s: float) -> None:
        """Wait until a rank is lost, where one may be; what the others raised can arrive before that news."""
        deadline = time.monotonic() + limit_s
        while self.may_have_lost_a_rank and not (self.lost or self.is_over) and time.monotonic() < deadline:
            self.news.clear()
            if not self.lost:
                self.news.wait(max(0.0, deadline - time.monotonic()))

    def wait_for_ending(self, limit_s: float) -> None:
        """Wait until the ranks that end because of what they raised have ended: that takes a GPU's process a while."""
        deadline = time.monotonic() + limit_s
        while self.ending - self.lost.keys() and not self.is_over and time.monotonic() < deadline:
            self.news.clear()
            if self.ending - self.lost.keys():
                self.news.wait(max(0.0, deadline - time.monotonic()))

    @property
    def ending(self) -> set[int]:
        """The ranks whose process ends because of what they raised."""
        return {rank for rank, outcome in self.outcomes.items() if getattr(outcome, "is_ending", False)}

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks that have not ended the cell."""
        return tuple(rank for rank in self.ranks if rank not in self.outcomes)

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

    def has_ended(self, message: CellDone | CellFailed) -> bool:
        """The rank's end is known already."""
        return message.rank in self.outcomes

    def add_observer(self, observer: CellObserver) -> None:
        """Somebody else wants to see what comes from now on, too."""
        self.observer = observer if self.observer is None else _Both(self.observer, observer)

    def remove_observer(self, observer: CellObserver) -> None:
        """One that was added wants to see no more."""
        if self.observer is observer:
            self.observer = None
        elif isinstance(self.observer, _Both):
            self.observer = self.observer.without(observer)

    def checkpoint(self) -> Callable[[], bool]:
        """A question: has all that was taken so far been shown? With no observer, it is at the end of the cell."""
        question = self.observer.checkpoint() if self.observer else None

        def is_shown() -> bool:
            nonlocal question
            if question is None and self.observer:  # it was added since, and got what was logged before
                question = self.observer.checkpoint()
            return question() if question else not self.running or self.is_over

        return is_shown

    def go_on_from(self, shown: CellRun) -> None:
        """Take over what ``shown`` has of this cell: ranks that have ended it, what has half arrived."""
        self.outcomes = shown.outcomes | self.outcomes
        self._bundles = shown._bundles | self._bundles
        if self.observer is None:
            self._cleaners = shown._cleaners

    def read_bundle(self, message: object) -> Bundle | None:
        """What of a message may be shown as a rich output: takes a while, so before anything is locked for ``take``.

        None where nobody wants that. Raises: WireError when it is none.
        """
        is_wanted = isinstance(message, CellDone) and message.body and message.rank in self.running
        if not is_wanted and not (isinstance(message, Display) and self.observer is not None):
            return None
        assert isinstance(message, (CellDone, Display))
        is_at_home = self._is_at_home(message.rank)
        rest_is_in = "" if is_at_home or self.is_from_log else f"%distributed log --cell {self.cell}"
        return safe_bundle(parse_bundle(message.body), is_this_machine=is_at_home, rest_is_in=rest_is_in)

    def take(
        self,
        message: Output | Display | ClearOutput | CellDone | CellFailed | RankEnded,
        bundle: Bundle | None = None,
    ) -> None:
        """What a rank said in this cell; ``bundle`` as it was read. Raises: WireError when it does not run it."""
        if isinstance(message, Output):
            self._take_output(message)
        elif isinstance(message, (Display, ClearOutput)):
            self._take_display(message, bundle)
        else:
            self._take_end(message, bundle)

    def _take_output(self, message: Output) -> None:
        if self.observer is None or message.stream not in ("stdout", "stderr"):
            return
        source = (message.rank, message.stream)
        cleaner = self._cleaners.setdefault(source, PieceCleaner())
        if text := cleaner.clean(message.body):
            _give_output(self.observer, message.rank, message.stream, text)

    def _take_display(self, message: Display | ClearOutput, bundle: Bundle | None) -> None:
        if self.observer is None:
            return
        if isinstance(message, ClearOutput):
            self.observer.clear(message.rank, message.wait)
        else:
            bundle = bundle or self.read_bundle(message) or {}  # somebody may look only since a moment ago
            self.observer.display(message.rank, bundle, message.display_id, message.update)

    def _take_end(self, message: CellDone | CellFailed | RankEnded, bundle: Bundle | None) -> None:
        if isinstance(message, RankEnded) and message.rank in self.outcomes:
            self._lost_after_its_end[message.rank] = message
            self.news.set()
            return
        if message.rank in self.lost:
            return  # it had ended the cell when it was lost
        if message.rank not in self.running:
            raise WireError(f"rank {message.rank} ended cell {self.cell}, which it does not run")
        if isinstance(message, CellDone) and message.body:
            self._bundles[message.rank] = bundle or self.read_bundle(message) or {}
            message = replace(message, body=b"")
        self.outcomes[message.rank] = message
        if self.observer and not self.running and (words := self.describe_overwritten()):
            self.observer.notice(words)
        self.news.set()

    def describe_overwritten(self) -> str:
        """What the cell has overwritten of the variables that ranks begin with, in words, or nothing."""
        return describe_overwritten({rank: getattr(end, "overwritten", ()) for rank, end in self.outcomes.items()})

    def withdraw(self, rank: int) -> None:
        """A rank has never got the cell: the caller was interrupted before it was sent."""
        never = CellFailed(rank, self.cell, 0.0, False, False, "KeyboardInterrupt", "", [], True)
        self.outcomes.setdefault(rank, never)
        self.news.set()

    def errors(self) -> dict[int, RemoteError]:
        """What the cell raised, by rank."""
        return {
            outcome.rank: RemoteError(
                outcome.rank,
                self.hosts.get(outcome.rank, ""),
                one_line(outcome.name),
                show_hidden(outcome.message),
                tuple(show_hidden(line) for line in outcome.traceback),
                outcome.interrupted,
            )
            for outcome in list(self.outcomes.values())
            if isinstance(outcome, CellFailed)
        }

    def bundles(self) -> dict[int, Bundle]:
        """The rich form of the cell's value, by rank, where it has one."""
        return dict(self._bundles)


def _give_output(observer: CellObserver, rank: int, stream: str, text: str) -> None:
    """Who does not say that it draws has never heard of cursors."""
    observer.output(rank, stream, text if getattr(observer, "draws", False) else clean_text(text))


class _Both:
    """Two observers of one cell."""

    draws = True  # or one of them

    def __init__(self, first: CellObserver, second: CellObserver) -> None:
        self._observers = (first, second)

    def without(self, observer: CellObserver) -> CellObserver:
        first, second = self._observers
        if observer in self._observers:
            return second if observer is first else first
        return _Both(first.without(observer), second) if isinstance(first, _Both) else self

    def begin(self, cell: int) -> None:
        for observer in self._observers:
            tell_begin(observer, cell)

    def output(self, rank: int, stream: str, text: str) -> None:
        for observer in self._observers:
            _give_output(observer, rank, stream, text)

    def display(self, rank: int, bundle: Bundle, display_id: str, is_update: bool) -> None:
        for observer in self._observers:
            observer.display(rank, bundle, display_id, is_update)

    def clear(self, rank: int, wait: bool) -> None:
        for observer in self._observers:
            observer.clear(rank, wait)

    def waiting(self, text: str) -> None:
        for observer in self._observers:
            observer.waiting(text)

    def notice(self, text: str) -> None:
        for observer in self._observers:
            observer.notice(text)

    def checkpoint(self) -> Callable[[], bool]:
        questions = [observer.checkpoint() for observer in self._observers]
        return lambda: all(question() for question in questions)
