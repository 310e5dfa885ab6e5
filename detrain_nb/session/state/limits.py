"""How long a session waits for what, and how often it looks; how much stands between it and a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import SpecError
from ...wire import ALIVE_GAP_S

_MOST = 1 << 32  # a clock of Python runs over at twice as many seconds


@dataclass
class Limits:
    """Those of one session: `Session.start(limits=...)`, later `session.settings.limits`. In seconds.

    Raises: SpecError for a name that is none of these, or what is no number of 0 or more.
    """

    # the beginning and the end
    start_s: float = 120.0  # without a further rank that has come up
    attach_s: float = 30.0  # to a node that others can do without
    catch_up_s: float = 60.0  # without a further twentieth of what a node says was missed
    catch_up_all_s: float = 600.0  # until all nodes have sent all of it
    end_s: float = 8.0  # for what a stop ends
    close_s: float = 5.0
    last_words_s: float = 5.0  # for what a node that hung up has said, and was not read yet

    # cells, values and groups
    idle_s: float = 30.0  # how long a cell waits for a rank that was stopped, or is starting
    value_s: float = 600.0
    room_s: float = 60.0  # for a node that takes nothing of a value
    locate_s: float = 1.0
    look_gap_s: float = 1.0  # between two looks at the ranks of a cell
    ending_s: float = 10.0  # from what a rank raised to its end, where that follows: a driver takes back what it had
    loss_s: float = 0.5  # from what the others raise to the news that a rank has ended
    message_s: float = 60.0  # how long a message from rank to rank may be on its way before its receiver waits in vain
    group_s: float = 60.0
    group_end_s: float = 0.8  # a rank whose C code holds the GIL ends it later
    tell_gap_s: float = 1.0  # between two words about what is waited for

    # a stop
    press_s: float = 0.15  # ranks that run Python end within that
    judge_gap_s: float = 0.1  # between two looks that tell who uses the processor
    known_s: float = 1.0  # how long ranks that have ended a cell are asked how far they are in their groups
    freed_s: float = 0.5  # from the end of a generation to the end of the cell on the ranks that waited in it
    compute_s: float = 4.0  # how long a stop waits for a rank that computes before it gives the prompt back
    replace_s: float = 3.0
    story_s: float = 5.0  # for what another thread says of its stop, when all ranks have ended the cell
    free_s: float = 5.0  # how long ranks that were freed may take to end a cell that nobody has stopped
    after_death_s: float = 0.1  # how long ranks may go on by themselves when one was lost

    # the byte stream to a node
    alive_gap_s: float = ALIVE_GAP_S  # between two signs of life
    acknowledge_gap_s: float = 0.1
    unasked_bytes: int = 32 << 20  # of headers that nobody asked for, beside those that may come without end
    full_bytes: int = 16 << 20  # of what is queued: an interrupt does not stand behind gigabytes

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in Limits.__dataclass_fields__:
            raise SpecError(f"limit {name!r} is none: there are {', '.join(Limits.__dataclass_fields__)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST:
            raise SpecError(f"limit {name} {value!r}: give a number from 0 to {_MOST:,}")
        object.__setattr__(self, name, value)


def checked_limits(limits: Any) -> Limits:
    """Those that were given, else the usual. Raises: SpecError."""
    if limits is not None and not isinstance(limits, Limits):
        raise SpecError(f"limits {limits!r}: give Limits(...) of detrain_nb.session.state.limits")
    return limits or Limits()
