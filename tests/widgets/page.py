"""The page of a view, without a browser: the messages that it sends and receives, and the resulting state."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable
from typing import Any

from detrain_nb.widgets import LiveView

LIMIT_S = 100.0


class WithPage(LiveView):
    """A view with its page "p": tests mix it in before the class of the view."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sent: queue.Queue[dict[str, Any]] = queue.Queue()  # messages that were not taken yet
        self.all_sent: list[dict[str, Any]] = []
        self.seen: dict[str, Any] = {}  # the state of the page; empty until it has the whole state
        super().__init__(*args, **kwargs)

    def send(self, content: dict[str, Any], buffers: Any = None) -> None:
        json.dumps(content, allow_nan=False, ensure_ascii=False).encode()  # raises for content that cannot be sent
        self.all_sent.append(content)
        self.sent.put(content)

    def hears(self, do: str, page: object = "p", **more: object) -> None:
        """Receive a message of a page."""
        self._handle_custom_msg({"do": do, "page": page, **more}, [])

    def wait_until_idle(self) -> None:
        """Wait until the view's own threads have finished."""
        for thread in list(self._workers.values()):
            thread.join(LIMIT_S)
            assert not thread.is_alive(), thread.name

    def open_page(self) -> dict[str, Any]:
        """Open a page; returns its state."""
        self.seen = {}
        self.hears("hello")
        return self.wait_for(bool)

    def asks(self, action: str, page: str = "p", **arguments: object) -> Any:
        """Return the answer of an action. Raises: RuntimeError with the error line that the page shows."""
        self.hears("call", page, call="c", action=action, arguments=arguments)
        while (said := self.take())["tell"] != "answer":
            pass
        if "error" in said:
            raise RuntimeError(said["error"])
        return said["value"]

    def refusal(self, action: str, **arguments: object) -> str:
        """Return the error line that the page shows instead of an answer."""
        try:
            answer = self.asks(action, **arguments)
        except RuntimeError as exc:
            return str(exc)
        raise AssertionError(f"{action} was answered: {answer!r}")

    def take(self, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """Return the next message to pages and update the page's state. Raises: queue.Empty after ``limit_s``."""
        said = self.sent.get(timeout=max(0.0, limit_s))
        if said["tell"] == "state":
            self.seen = dict(said.get("state", {}))
        elif said["tell"] == "news" and self.seen:  # like a real page: the state already includes earlier news
            self.seen |= said["parts"]
            for name, items in said["added"].items():
                self.seen[name] = [*self.seen.get(name, []), *items]
        return said

    def wait_for(self, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Wait until ``holds`` is true of the page's state; returns the state."""
        deadline = time.monotonic() + LIMIT_S
        while not holds(self.seen):
            try:
                self.take(deadline - time.monotonic())
            except queue.Empty:
                raise AssertionError(f"not within {LIMIT_S:g} s: {json.dumps(self.seen)[:3000]}") from None
        return self.seen

    def wait_for_part(self, part: str, holds: Callable[[Any], object] = lambda value: True) -> Any:
        """Wait until ``holds`` is true of one part of the state; returns the part."""
        return self.wait_for(lambda seen: part in seen and holds(seen[part]))[part]

    def messages_within(self, seconds: float) -> list[dict[str, Any]]:
        """Return all messages that arrive within this time."""
        found, deadline = [], time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                found.append(self.take(left))
            except queue.Empty:
                break
        return found
