"""One cell while it runs: what has come from which rank, and when it is over."""

from __future__ import annotations

import codecs
import threading
from typing import Any, Protocol

from ..errors import RemoteError, WireError
from ..wire import CellDone, CellFailed, ClearOutput, Display, Output, RankEnded, parse_json
from .safe_output import Bundle, clean_text, safe_bundle


class CellObserver(Protocol):
    """Who shows a cell. All methods are called while it runs, most of them in a background thread; none may block."""

    def output(self, rank: int, stream: str, text: str) -> None:
        """Text that a rank wrote to ``stream`` ("stdout" or "stderr"), free of control sequences."""

    def display(self, rank: int, bundle: Bundle, display_id: str, is_update: bool) -> None:
        """A rich output, safe to show."""

    def clear(self, rank: int, wait: bool) -> None:
        """The cell wants its earlier output on this rank gone."""

    def waiting(self, text: str) -> None:
        """Which ranks the cell still waits for, and where they are; empty when it waits for none."""

    def notice(self, text: str) -> None:
        """Something the user should know."""


class CellRun:
    """Gathers what the ranks say of one cell. Fed by the background thread, waited for by the caller's."""

    def __init__(self, cell: int, ranks: tuple[int, ...], observer: CellObserver | None, hosts: dict[int, str]) -> None:
        self.cell = cell
        self.ranks = ranks
        self.done = threading.Event()
        self.outcomes: dict[int, CellDone | CellFailed | RankEnded] = {}
        self.observer = observer
        self._hosts = hosts
        self._decoders: dict[tuple[int, str], codecs.IncrementalDecoder] = {}

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks that have not ended the cell."""
        return tuple(rank for rank in self.ranks if rank not in self.outcomes)

    @property
    def lost(self) -> dict[int, RankEnded]:
        return {rank: outcome for rank, outcome in self.outcomes.items() if isinstance(outcome, RankEnded)}

    def take(self, message: Output | Display | ClearOutput | CellDone | CellFailed | RankEnded) -> None:
        """What a rank said in this cell. Raises: WireError when it does not run it."""
        if isinstance(message, Output):
            self._take_output(message)
        elif isinstance(message, (Display, ClearOutput)):
            self._take_display(message)
        else:
            self._take_end(message)

    def _take_output(self, message: Output) -> None:
        if self.observer is None or message.stream not in ("stdout", "stderr"):
            return
        source = (message.rank, message.stream)
        decoder = self._decoders.setdefault(source, codecs.getincrementaldecoder("utf-8")("replace"))
        self.observer.output(message.rank, message.stream, clean_text(decoder.decode(message.body)))

    def _take_display(self, message: Display | ClearOutput) -> None:
        if self.observer is None:
            return
        if isinstance(message, ClearOutput):
            self.observer.clear(message.rank, message.wait)
        else:
            bundle = safe_bundle(parse_json(message.body), is_this_machine=True)
            self.observer.display(message.rank, bundle, message.display_id, message.update)

    def _take_end(self, message: CellDone | CellFailed | RankEnded) -> None:
        if message.rank not in self.running:
            raise WireError(f"rank {message.rank} ended cell {self.cell}, which it does not run")
        self.outcomes[message.rank] = message
        if not self.running:
            self.done.set()

    def errors(self) -> dict[int, RemoteError]:
        """What the cell raised, by rank."""
        return {
            outcome.rank: RemoteError(
                outcome.rank,
                self._hosts.get(outcome.rank, ""),
                clean_text(outcome.name),
                clean_text(outcome.message),
                tuple(clean_text(line) for line in outcome.traceback),
                outcome.interrupted,
            )
            for outcome in self.outcomes.values()
            if isinstance(outcome, CellFailed)
        }

    def bundles(self) -> dict[int, Bundle]:
        """The rich form of the cell's value, by rank, where it has one."""
        found: dict[int, Any] = {
            outcome.rank: parse_json(outcome.body)
            for outcome in self.outcomes.values()
            if isinstance(outcome, CellDone) and outcome.body
        }
        return {rank: safe_bundle(bundle, is_this_machine=True) for rank, bundle in found.items()}
