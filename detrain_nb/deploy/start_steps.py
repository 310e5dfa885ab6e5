"""How far the start of a session is on each of its nodes: what whoever draws it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["PHASES", "OnStep", "Phase", "StartStep", "ignore_step"]

Phase: TypeAlias = Literal["connect", "send", "ranks", "group"]
PHASES: tuple[Phase, ...] = ("connect", "send", "ranks", "group")  # in this order


@dataclass(frozen=True)
class StartStep:
    """A node has begun a phase, has ``done`` so much of ``total`` (0: that is not counted), or has ended it.

    ``node`` is its name, empty for this machine where no node was named; ``error`` says why it has failed.
    """

    node: str
    phase: Phase
    state: Literal["running", "done", "failed"]
    done: int = 0
    total: int = 0
    error: str = ""


OnStep: TypeAlias = Callable[[StartStep], None]


def ignore_step(step: StartStep) -> None:
    """Nobody draws it."""
