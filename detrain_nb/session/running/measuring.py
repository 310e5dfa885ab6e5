"""Orders to the nodes of a session to measure resource use while a live view is open; each order expires by itself."""

from __future__ import annotations

import contextlib
import time

from ...errors import DetrainError
from ...wire import Measure
from .core import Core

_FOR_S = 5.0  # of one order: nodes go on measuring this long after the kernel has died
_AGAIN_S = 2.0


class Measuring:
    """The measuring orders of one session."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._every_s = 0.0
        self._again_at = 0.0

    def due_at(self) -> float | None:
        """Return when the next order is due; None while no live view is open."""
        return self._again_at if self._every_s else None

    def go_on(self, every_s: float) -> None:
        """Have each reachable node measure every ``every_s``; with 0, stop them."""
        if not every_s and not self._every_s:
            return
        now = time.monotonic()
        if every_s == self._every_s and now < self._again_at:
            return
        self._every_s, self._again_at = every_s, now + _AGAIN_S
        self._core.state.measurements.want(every_s)
        for node in self._nodes():
            with contextlib.suppress(DetrainError):  # the node is being lost, which views show as well
                self._core.link.send_to(node, Measure(every_s or _FOR_S, _FOR_S if every_s else 0.0))

    def _nodes(self) -> list[int]:
        """Return the reachable nodes whose agent supports the order: older agents reject it and stop reading."""
        broken = self._core.link.broken_s(now=0.0)
        links = enumerate(self._core.link.node_links)
        reached = [node for node, link in links if not link.is_closed and node not in broken]
        return [node for node in reached if self._core.state.can_measure(node)]
