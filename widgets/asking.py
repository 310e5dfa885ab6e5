"""The question for the passphrase of a key, shown in a page; the answer is not kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from pydantic import SecretStr

from ..session.output.safe_output import one_line
from .actions import Refused

__all__ = ["PassphraseQuestion"]

_ANSWER_LIMIT_S = 300.0
_LOOK_GAP_S = 0.1


class PassphraseQuestion:
    """A question for a passphrase, asked by the thread that needs the answer.

    ``publish`` sends the question to pages, and None once it is closed. ``look`` is called repeatedly during the wait;
    an exception that it raises ends the wait.
    """

    def __init__(self, publish: Callable[[dict[str, Any] | None], None], look: Callable[[], None]) -> None:
        self.asked: dict[str, Any] | None = None
        self._publish = publish
        self._look = look
        self._number = 0
        self._answer: SecretStr | None = None
        self._is_answered = threading.Event()

    def ask(self, path: str) -> str | None:
        """Return the passphrase of the key at ``path``; None if it is empty or no page answers within 300 seconds."""
        self._number += 1
        self._answer = None
        self._is_answered.clear()
        self.asked = {"number": self._number, "key": one_line(path)}
        self._publish(self.asked)
        deadline = time.monotonic() + _ANSWER_LIMIT_S
        try:
            while not self._is_answered.wait(_LOOK_GAP_S) and time.monotonic() < deadline:
                self._look()
            return self._answer.get_secret_value() or None if self._answer else None
        finally:
            self._answer = self.asked = None
            self._publish(None)

    def answer(self, number: int, passphrase: SecretStr) -> None:
        """Take the answer of a page. Raises: Refused when the question is closed or already answered."""
        if self.asked is None or number != self.asked["number"] or self._is_answered.is_set():
            raise Refused("this passphrase is no longer needed")
        self._answer = passphrase
        self._is_answered.set()
