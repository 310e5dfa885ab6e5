"""Questions to the user from worker threads, asked in the thread that waits for them, as a notebook requires."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

_LOOK_GAP_S = 0.05


class Questions:
    """Callable that any thread calls with a question; ``ask`` runs in the thread of ``serve``, one question at a time.

    While ``serve`` is not running, the answer is None and ``ask`` is not called.
    """

    def __init__(self, ask: Callable[[str], str | None], *, meanwhile: Callable[[], None] | None = None) -> None:
        """Set ``meanwhile``, called repeatedly in the thread of ``serve``; an exception from it ends the waiting."""
        self._ask = ask
        self._meanwhile = meanwhile
        self._waiting: queue.Queue[tuple[str, Future[str | None]]] = queue.Queue()
        self._owner: int | None = None

    def __call__(self, question: str) -> str | None:
        if self._owner is None:
            return None
        if threading.get_ident() == self._owner:
            return self._ask(question)
        answer: Future[str | None] = Future()
        self._waiting.put((question, answer))
        while self._owner is not None:
            with contextlib.suppress(TimeoutError):
                return answer.result(_LOOK_GAP_S)
        return None

    def serve(self, work: Collection[Future[Any]]) -> None:
        """Answer questions until all of ``work`` is done."""
        self._owner = threading.get_ident()
        try:
            left = set(work)
            while left:
                left = wait(left, _LOOK_GAP_S, return_when=FIRST_COMPLETED).not_done
                if left and self._meanwhile:
                    self._meanwhile()
                while not self._waiting.empty():
                    self._answer(*self._waiting.get())
        finally:
            self._owner = None
            while not self._waiting.empty():  # after an interrupt: release the threads that wait for an answer
                self._waiting.get()[1].set_result(None)

    def _answer(self, question: str, answer: Future[str | None]) -> None:
        said = None
        try:
            said = self._ask(question)
        finally:
            answer.set_result(said)
