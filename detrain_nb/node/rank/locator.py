"""The position of a rank: stack and collectives from the interpreter's control thread, processor time from /proc.

While C code holds the GIL, that thread cannot answer; faulthandler then writes the stack in response to a signal. It is
not used while the main thread may be running Python: it reads frames that may be half made. If C code calls Python at
that moment (hooks, the key function of ``sorted``), a rank on Python 3.11 dies of SIGSEGV about once in a few hundred
attempts.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from typing import Any, NamedTuple

from ...wire import Collectives, Link, LinkClosed, Locate, Position
from ..system import own_files
from ..system.processes import main_thread_asleep_in, main_thread_seconds, memory_bytes

WHERE_SIGNAL = signal.SIGRTMIN + 7  # not SIGUSR1, on which code for clusters saves its state and exits

_DUMP_LIMIT_S = 0.5
_DUMP_GAP_S = 0.05  # a dump arrives in many pieces; it ends with one of our frames, or else with a pause this long
_KNOWN_LIMIT_S = 0.2  # no answer by then: C code holds the GIL, and the previous answer is reported with its age
# A main thread that is awake may also be running Python, with the control thread still waiting for a processor.
_AWAKE_LIMIT_S = 0.5
_KNOWN_GAP_S = 0.02
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_OURS = own_files.PACKAGE + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_CRASH = b"Fatal Python error: "
_HEAD = b"(most recent call first):"
_FRAME = re.compile(r'File "(.*)", line (\d+|\?\?\?) in (.*)')
_RUNS_CELLS = re.compile(re.escape(own_files.RUNS_CELLS) + r'", line \d+ in (_run_cell|run)\n')
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_CELL = re.compile(r"<cell (\d+)>")
_FRAME_CHARS = 300  # longer frames are cut at the front: the end of the path and the line number remain
_TIMED = "<timed exec>"  # the rest of a cell whose first line is %%time


class _Frame(NamedTuple):
    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}"


class _Question(NamedTuple):
    """A request, and what the main thread was doing before the request itself kept it busy."""

    request: int
    cpu_s: float
    clock_s: float
    asleep_in: str
    wants_stack: bool


class Locator:
    """The position of one interpreter. Runs in the worker's only thread, which calls ``answers`` at ``answer_at``."""

    def __init__(self, rank: int, pid: int, control: Link, where: int) -> None:
        self.rank = rank
        self._pid = pid
        self._control = control
        self._where = where
        self._questions: list[_Question] = []
        self._dump = b""
        self._dump_until = 0.0  # 0: no dump is awaited
        self._known_until = 0.0  # 0: no answer of the control thread is awaited
        self._is_asked = False  # whether the control thread still has to answer
        self._known: dict[str, Any] = {}
        self._call: object = None
        self._awaited: object = None
        self._stack: list[_Frame] | None = None  # from the control thread
        self._is_stack_wanted = False
        self._known_at = 0.0

    @property
    def answer_at(self) -> float | None:
        """The latest time to answer the open questions; None if there are none."""
        return max(self._dump_until, self._known_until) if self._questions else None

    def ask(self, message: Locate, *, state: str) -> None:
        """Start collecting what a ``Position`` message contains."""
        now = time.monotonic()
        asleep_in = main_thread_asleep_in(self._pid)
        wants_stack = message.stack and state == "running"
        cpu_s = main_thread_seconds(self._pid)
        self._questions.append(_Question(message.request, cpu_s, now, asleep_in, wants_stack))
        self._is_stack_wanted |= wants_stack
        if state in ("running", "idle") and not self._known_until:
            self._known_until = now + _KNOWN_LIMIT_S
            if not self._is_asked:  # a rank that holds the GIL should not have many requests to answer later
                with contextlib.suppress(LinkClosed):
                    self._control.send(message)
                    self._is_asked = True

    def take(self, message: Collectives) -> None:
        """Take the control thread's answer."""
        known = message.known if isinstance(message.known, dict) else {}
        self._call, self._awaited = known.pop("call", None), known.pop("awaited", None)
        self._stack = _checked_frames(known.pop("stack", None))
        if self._stack is not None:
            self._is_stack_wanted = False
        self._known = known
        self._known_at = time.monotonic()
        self._known_until, self._is_asked = 0.0, False

    def _ask_for_dump(self, now: float) -> None:
        """Request a dump, as the control thread has not answered in time; wait a moment first if it may do harm."""
        asked = max(question.clock_s for question in self._questions if question.wants_stack)
        if now < asked + _AWAKE_LIMIT_S and not main_thread_asleep_in(self._pid):
            self._known_until = now + _KNOWN_GAP_S
            return
        self._is_stack_wanted = False
        self.read_dump()  # discard what arrived too late for the last answer
        self._take_dump()
        self._dump_until = now + _DUMP_LIMIT_S
        os.kill(self._pid, WHERE_SIGNAL)

    def on_where(self) -> None:
        """Read a piece of a dump, and note when the dump is complete."""
        self.read_dump()
        if self._dump_until:
            gap_s = 0.0 if _is_complete(self._dump) else _DUMP_GAP_S
            self._dump_until = min(self._dump_until, time.monotonic() + gap_s)

    def read_dump(self) -> bytes:
        """Read and return everything that faulthandler has written since the last dump was taken."""
        with contextlib.suppress(BlockingIOError):
            self._dump += os.read(self._where, 1 << 16)
        return self._dump

    def _take_dump(self) -> bytes:
        dump = self._dump
        if _CRASH not in dump:  # a crash is kept for the report of the rank's end
            self._dump = b""
        return dump

    def answers(self, *, state: str, cell: int, since: float) -> list[Position]:
        """Return the answers to all open questions once they are complete or their time is up; else none."""
        now = time.monotonic()
        if not self._questions or max(self._dump_until, self._known_until) > now:
            return []
        if self._is_stack_wanted and state == "running":
            self._ask_for_dump(now)
            return []
        questions, self._questions = self._questions, []
        self._is_stack_wanted = False
        dump = self._take_dump()
        self._dump_until = self._known_until = 0.0
        is_known = self._known_at > since  # else the answer is about an earlier cell
        is_known_now = is_known and self._known_at >= questions[0].clock_s
        wants_stack = any(question.wants_stack for question in questions)
        frames, call = self._stack_and_call(dump if wants_stack else None, is_known_now=is_known_now)
        line, function = _place_in_cell(frames, cell)
        return [
            Position(
                self.rank,
                question.request,
                self._pid,
                state,
                cell,
                line,
                function,
                seconds=now - since,
                rss_bytes=memory_bytes(self._pid),
                stack=[str(frame)[-_FRAME_CHARS:] for frame in frames],
                cpu_s=question.cpu_s,
                clock_s=question.clock_s,
                collectives=self._known if is_known else {},
                age_s=now - self._known_at if is_known else -1.0,
                call=call,
                asleep_in=question.asleep_in,
            )
            for question in questions
        ]

    def _stack_and_call(self, dump: bytes | None, *, is_known_now: bool) -> tuple[list[_Frame], str]:
        """Return the stack down to the cell, and the innermost call: from the control thread, else from ``dump``.

        ``dump`` is None if the stack was not requested.
        """
        frames: list[_Frame] = []
        if dump is not None:
            frames = self._stack if is_known_now and self._stack is not None else _read_frames(dump)
        if not is_known_now:
            return _down_to_cell(frames), ""
        if isinstance(self._awaited, list) and not any(_CELL.fullmatch(frame.path) for frame in frames):
            frames = [*(_Frame(*awaited) for awaited in self._awaited), *frames]
        return _down_to_cell(frames), _call_of(frames, self._call)


def _checked_frames(told: object) -> list[_Frame] | None:
    """Validate frames as ``read_stack`` makes them; returns None for anything else."""
    if not isinstance(told, list) or not told:
        return None
    found = [_Frame(*each) for each in told if isinstance(each, list) and [*map(type, each)] == [str, int, str]]
    return found if len(found) == len(told) else None


def _is_complete(dump: bytes) -> bool:
    """Return whether the dump reaches the frames that run the cell, or faulthandler's frame limit."""
    text = dump.rpartition(_HEAD)[2].decode(errors="replace")
    return _RUNS_CELLS.search(text) is not None or text.endswith("\n  ...\n")


def _read_frames(dump: bytes) -> list[_Frame]:
    """Parse the frames of the last dump, innermost first."""
    _, head, text = dump.rpartition(_HEAD)
    if not head:
        return []
    return [
        _Frame(_unescape(match[1]), int(match[2]) if match[2].isdigit() else 0, _unescape(match[3]))
        for match in _FRAME.finditer(text.decode(errors="replace"))
    ]


def _down_to_cell(frames: list[_Frame]) -> list[_Frame]:
    """Drop the frames that run the cell."""
    outermost = max((index for index, frame in enumerate(frames) if _CELL.fullmatch(frame.path)), default=-1)
    return frames[: outermost + 1] or frames


def _unescape(text: str) -> str:
    """Undo the escapes of faulthandler, which writes ASCII only."""
    return _ESCAPE.sub(lambda match: _character(match[1] or match[2] or match[3]), text)


def _character(code: str) -> str:
    number = int(code, 16)
    return chr(number) if number <= 0x10FFFF else "?"


def _call_of(frames: list[_Frame], call: object) -> str:
    """Return the innermost frame's call, if the control thread saw the main thread at the same place; else empty."""
    if not frames or not isinstance(call, list) or len(call) != 3:
        return ""
    return str(call[2]) if call[:2] == [frames[0].path, frames[0].line] else ""


def _place_in_cell(frames: list[_Frame], cell: int) -> tuple[int, str]:
    """Return the innermost line of the cell, and the user's innermost function (empty at the cell's own level)."""
    named = (frame.function for frame in frames if _is_users(frame.path) and not frame.function.startswith("<"))
    function = next(named, "")  # not <module>, <lambda>, <listcomp>: their line number identifies them
    for index, frame in enumerate(frames):
        if frame.path == f"<cell {cell}>":
            timed = [inner for inner in frames[:index] if inner.path == _TIMED]
            is_timed = bool(timed) and timed[-1].function == "<module>"
            return frame.line + (timed[0].line if is_timed else 0), function
    return 0, function


def _is_users(path: str) -> bool:
    if _CELL.fullmatch(path) or path == _TIMED:
        return True
    return not path.startswith((_LIBRARY, _OURS, "<")) and not any(part in path for part in _INSTALLED)
