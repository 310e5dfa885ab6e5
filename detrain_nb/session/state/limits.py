"""The timeouts and intervals of a session, and how much data is queued between it and a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import SpecError
from ...wire import ALIVE_GAP_S

_MOST = 1 << 32  # Python's clocks overflow at twice as many seconds


@dataclass
class Limits:
    """Limits of one session: `Session.start(limits=...)`, later `session.settings.limits`. Times are in seconds.

    limits = Limits(start_s=300, value_s=3600)  # from detrain_nb.session.state.limits
    session.settings.limits.end_s = 20

    Slow machines or networks may need larger ones of these: ``start_s`` (for the next rank to come up), ``attach_s``
    (for a node to answer an attach), ``end_s`` (for the ranks to stop), ``idle_s`` (how long a cell waits for a rank
    that was stopped or is starting), ``value_s`` (for a pull, push or broadcast), ``group_s`` (to make a process
    group).

    Raises: SpecError for an unknown name, or a value that is not a number from 0 to 2**32.
    """

    # start, attach and stop
    start_s: float = 120.0  # for the next rank to come up
    attach_s: float = 30.0  # for the answer of a node other than the first
    catch_up_s: float = 60.0  # for the next twentieth of the output that was missed on a node
    catch_up_all_s: float = 600.0  # for all the output that was missed on all nodes
    end_s: float = 8.0  # for the agents and their processes to stop
    close_s: float = 5.0
    last_words_s: float = 5.0  # for reading what a node sent before it closed its connection

    # cells, values and groups
    idle_s: float = 30.0  # how long a cell waits for a rank that was stopped, or is starting
    value_s: float = 600.0
    room_s: float = 60.0  # for a node that reads nothing of a value sent to it
    locate_s: float = 1.0
    look_gap_s: float = 1.0  # between two looks at the ranks of a cell
    ending_s: float = 10.0  # from a rank's error to the exit of its process, if it exits: GPU drivers are slow here
    loss_s: float = 0.5  # from the errors of the others to the news that a rank has died
    message_s: float = 60.0  # how long a message between ranks may be in transit before its receiver counts as hung
    group_s: float = 60.0
    group_end_s: float = 0.8  # a rank whose C code holds the GIL takes longer to end its groups
    tell_gap_s: float = 1.0  # between two texts about what a cell waits for

    # a stop
    press_s: float = 0.15  # ranks that run Python code stop within this time
    judge_gap_s: float = 0.1  # between two looks that show which ranks use the processor
    known_s: float = 1.0  # how long ranks that have ended a cell are asked how far they are in their groups
    freed_s: float = 0.5  # from the end of a generation to the end of the cell on the ranks that waited in it
    compute_s: float = 4.0  # how long a stop waits for a rank that computes before it gives the prompt back
    replace_s: float = 3.0
    story_s: float = 5.0  # for another thread's report of its stop, once all ranks have ended the cell
    free_s: float = 5.0  # how long freed ranks may take to end a cell that the user has not stopped
    after_death_s: float = 0.1  # how long the other ranks may take to fail by themselves after a loss

    # the byte stream to a node
    alive_gap_s: float = ALIVE_GAP_S  # between two keep-alive messages
    acknowledge_gap_s: float = 0.1
    unasked_bytes: int = 32 << 20  # of unsolicited message headers, apart from kinds that are unbounded
    full_bytes: int = 16 << 20  # of queued data: an interrupt must not wait behind gigabytes

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in Limits.__dataclass_fields__:
            raise SpecError(f"unknown limit {name!r}: give one of {', '.join(Limits.__dataclass_fields__)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST:
            raise SpecError(f"limit {name} {value!r}: give a number from 0 to {_MOST:,}")
        object.__setattr__(self, name, value)


def checked_limits(limits: Any) -> Limits:
    """Return ``limits``, or the defaults for None. Raises: SpecError."""
    if limits is not None and not isinstance(limits, Limits):
        raise SpecError(f"limits {limits!r}: give Limits(...) from detrain_nb.session.state.limits")
    return limits or Limits()
