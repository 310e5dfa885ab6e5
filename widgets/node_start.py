"""The progress of a start as a table: the phases of each node, and which other nodes it waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..deploy.start_steps import PHASES, Phase, StartStep
from ..session.output.safe_output import show_hidden

__all__ = ["StartTable"]

_MOST_CHARS = 1000
_MOST_NAMED = 3


@dataclass
class _Cell:
    state: str  # running, done, failed, stopped
    begun: float
    seconds: float = 0.0
    done: int = 0
    total: int = 0


@dataclass
class StartTable:
    """The progress of each node; steps arrive in any thread."""

    nodes: Sequence[str]
    errors: dict[str, str] = field(default_factory=dict)  # by node
    _cells: dict[tuple[str, Phase], _Cell] = field(default_factory=dict)
    _is_stopped: bool = False
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def take(self, step: StartStep) -> None:
        """Note a step. Earlier phases count as done: a node that needs no files reports no step for them."""
        if step.node not in self.nodes:
            return
        now = time.monotonic()
        with self._changing:
            for phase in PHASES[: PHASES.index(step.phase)]:
                cell = self._cells.setdefault((step.node, phase), _Cell("done", now))
                cell.state = "done"
            cell = self._cells.setdefault((step.node, step.phase), _Cell(step.state, now))
            cell.state, cell.done, cell.total = step.state, step.done, step.total
            if step.state != "running":
                cell.seconds = now - cell.begun
            if step.error:
                self.errors[step.node] = show_hidden(step.error)[:_MOST_CHARS]

    def stop(self) -> None:
        """Mark running phases as stopped: the start has failed."""
        with self._changing:
            for cell in self._cells.values():
                cell.state = "stopped" if cell.state == "running" else cell.state
            self._is_stopped = True

    def told(self) -> list[dict[str, Any]]:
        """Return a row for each node, for pages."""
        with self._changing:
            return [{"node": node, "cells": [self._tell(node, phase) for phase in PHASES]} for node in self.nodes]

    def _tell(self, node: str, phase: Phase) -> dict[str, Any]:
        cell = self._cells.get((node, phase))
        if cell is not None:
            parts = [f"{cell.done} of {cell.total}"] * bool(cell.total)
            parts += [f"{cell.seconds:.1f} s"] * (cell.state == "done" and cell.seconds >= 0.05)
            share = cell.done / cell.total if cell.total and cell.state == "running" else None
            return {"is": cell.state, "text": ", ".join(parts), "share": share}
        number = PHASES.index(phase)
        before = PHASES[number - 1] if number else None
        if before is None or self._is_stopped or not self._is_done(node, before):
            return {"is": "idle", "text": "", "share": None}
        others = [other for other in self.nodes if not self._is_done(other, before)]
        more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        waits = f"for {', '.join(others[:_MOST_NAMED])}{more}" if others else ""
        return {"is": "wait" if others else "idle", "text": waits, "share": None}

    def _is_done(self, node: str, phase: Phase) -> bool:
        cell = self._cells.get((node, phase))
        return cell is not None and cell.state == "done"
