"""The steps of a session's start, node by node, as they are told to whoever draws them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["PHASES", "OnStep", "Phase", "StartStep", "StartWatch", "ignore_step"]

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


@dataclass(frozen=True)
class StartWatch:
    """Who follows a start. ``on_progress`` gets lines, as in `Session.start`, and ``on_step`` the steps of each node.

    ``say`` gets what the user should know; ``ask_passphrase`` is asked for the passphrase of a key.
    """

    on_progress: Callable[[str], None]
    on_step: OnStep
    say: Callable[[str], None]
    ask_passphrase: Callable[[str], str | None]


def ignore_step(step: StartStep) -> None:
    """Nobody draws it."""
