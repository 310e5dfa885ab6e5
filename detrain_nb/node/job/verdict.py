"""How a job ended on a node, and which rank or node caused it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from .folders import END_NAME, TORCHRUN_LOG, read_bounded
from .log_file import last_lines
from .order import JobRefused
from .outputs import Outputs, RankOutcome
from .status import Exit
from .terms import STOPPED
from .watch import MOST_REASON_CHARS

_LAST_LINES = 20
_SEE = "see torchrun.log for its exit"
_STOPPED = 128 + signal.SIGTERM


def judge(outputs: Outputs, code: int, *, folder: Path, log: str, stopped: bool) -> Exit:
    """Determine how the job ended; ``code`` is the exit code of the last command, which wrote to ``log``."""
    if stopped:
        return Exit(_STOPPED, state=STOPPED)
    if code == 0:
        return Exit(0)
    if log != TORCHRUN_LOG:
        return Exit(code, f"the setup {_say(code)}", last_lines=last_lines(folder / log, _LAST_LINES))
    if told := read_told(folder):
        return Exit(code, told)
    if code <= 128 and (first := _find_first(outputs)):  # else torchrun was killed, and the ranks with it
        code = first.exit_code or 0
        code = code if code >= 0 else 128 - code
        lines = last_lines(folder / f"rank-{first.rank}.log", _LAST_LINES)
        how = _say(code) if first.has_said else f"was lost with process {first.pid}, its parent: {_SEE}"
        return Exit(code, f"rank {first.rank} {how}", first.rank, lines)
    return Exit(code, f"torchrun {_say(code)}", last_lines=last_lines(folder / log, _LAST_LINES))


def _find_first(outputs: Outputs) -> RankOutcome | None:
    """Return the first rank that failed in the last start; the others were killed then, or failed as it was missing."""
    failed = [each for each in outputs.outcomes if each.exit_code and each.restart == outputs.restarts]
    return min(failed, key=lambda each: each.ended_at, default=None)


def read_told(folder: Path) -> str:
    """Read why torchrun stopped here because of another node or the store; empty if it did not."""
    try:
        said = json.loads(read_bounded(folder / END_NAME))
        return str(said["reason"])[:MOST_REASON_CHARS]
    except (OSError, ValueError, KeyError, TypeError, JobRefused):
        return ""


def _say(code: int) -> str:
    if code <= 128:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"exited with code {code}"
