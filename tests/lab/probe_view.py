"""A view with one element of every kind, for the tests of what all views share."""

from __future__ import annotations

import threading
from typing import Any

from detrain_nb.widgets import LiveView, Refused, Settled, action
from detrain_nb.widgets.actions import text, whole


class ProbeView(LiveView):
    name = "probe_view"

    def __init__(self) -> None:
        self.count, self.heard = 0, list[str]()
        self.pressed, self.are_pages_there = threading.Event(), threading.Event()
        super().__init__()

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "lines": self.heard}

    def settled(self) -> Settled:
        return Settled(f"count {self.count}", f"<b>count {self.count}</b>")

    def on_pages(self, *, are_there: bool) -> None:
        (self.are_pages_there.set if are_there else self.are_pages_there.clear)()

    def count_to(self, count: int) -> None:
        self.count = count
        self.publish("count", count)

    @action(said=text(most=20))
    def press(self, said: str) -> str:
        self.heard.append(said)
        self.pressed.set()
        self.append("lines", [said])
        return f"heard {said} in {threading.current_thread() is threading.main_thread()}"

    @action(number=whole(0, 10))
    def fail(self, number: int) -> None:
        if number:
            raise Refused(f"{number} is not 0: give 0")
        raise TypeError("wrong")

    @action()
    def take_long(self) -> None:
        self.work("counting", lambda: self.count_to(100))
