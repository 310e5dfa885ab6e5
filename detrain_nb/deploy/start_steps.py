"""Steps of a session's start, node by node, as reported to progress displays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["PHASES", "OnStep", "Phase", "StartStep", "StartWatch", "ignore_step"]

Phase: TypeAlias = Literal["connect", "send", "ranks", "group"]
PHASES: tuple[Phase, ...] = ("connect", "send", "ranks", "group")  # in this order


@dataclass(frozen=True)
class StartStep:
    """Progress of a node in a phase: begun, ``done`` of ``total`` units complete (total 0: not counted), or ended.

    ``node`` is the node's name, empty for this machine when no nodes were given; ``error`` is the reason of a failure.
    """

    node: str
    phase: Phase
    state: Literal["running", "done", "failed"]
    done: int = 0
    total: int = 0
    error: str = ""


OnStep: TypeAlias = Callable[[StartStep], None]


@dataclass(frozen=True)
class StartWatch:
    """Callbacks of an observer of a start. ``on_progress`` gets lines as in `Session.start`, ``on_step`` each step.

    ``say`` gets notices for the user; ``ask_passphrase`` asks for the passphrase of a key.
    """

    on_progress: Callable[[str], None]
    on_step: OnStep
    say: Callable[[str], None]
    ask_passphrase: Callable[[str], str | None]


def ignore_step(step: StartStep) -> None:
    """Do nothing: no display follows the start."""
