"""A question for the passphrase of a key, asked in a page; the answer is kept by nobody."""

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
    """Asks pages for a passphrase, in the thread that needs it.

    ``publish`` tells pages the question, or None when there is none. ``look`` is called again and again meanwhile; what
    it raises ends the waiting.
    """

    def __init__(self, publish: Callable[[dict[str, Any] | None], None], look: Callable[[], None]) -> None:
        self.asked: dict[str, Any] | None = None
        self._publish = publish
        self._look = look
        self._number = 0
        self._answer: SecretStr | None = None
        self._is_answered = threading.Event()

    def ask(self, path: str) -> str | None:
        """The passphrase of the key at ``path``; None where nobody says it in time."""
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
        """Raises: Refused where it was not asked, or somebody has answered already."""
        if self.asked is None or number != self.asked["number"] or self._is_answered.is_set():
            raise Refused("nobody waits for this passphrase any more")
        self._answer = passphrase
        self._is_answered.set()
