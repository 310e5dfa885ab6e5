"""The state of the main thread as seen by its process: its stack, the call it is in, and what it awaits.

The stack ends at the last Python frame: it does not show whether that calls ``time.sleep(60)`` or ``request.wait()``,
nor at which line the event loop will continue. Call from any thread: it holds the GIL, so the main thread pauses.
"""

from __future__ import annotations

import itertools
import linecache
import sys
import threading
import types
from typing import Any

_MAX_CHARS = 80
_MAX_FRAMES = 50
_MAX_STACK = 100  # as many as faulthandler dumps


def read_stack() -> list[list[Any]]:
    """Return ``[file, line, function]`` of the frames of the main thread, innermost first."""
    found: list[list[Any]] = []
    frame = _main_frame()
    while frame is not None and len(found) < _MAX_STACK:
        found.append([frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name])
        frame = frame.f_back
    return found


def read_call() -> list[Any]:
    """Return ``[file, line, text]`` of the call that the innermost Python frame of the main thread is in.

    ``text`` is its source on one line, such as ``request.wait()``; empty if there is no call or no source. Before
    Python 3.11 it is the whole line.
    """
    frame = _main_frame()
    if frame is None:
        return []
    return [frame.f_code.co_filename, frame.f_lineno or 0, _source_of_call(frame)[:_MAX_CHARS]]


def read_awaited() -> list[list[Any]]:
    """Return ``[file, line, function]`` of every coroutine that waits for the next, innermost first, in the event loop.

    Empty unless the main thread waits in an event loop until something happens.
    """
    innermost = frame = _main_frame()
    while frame is not None and frame.f_code.co_name != "run_until_complete":
        frame = frame.f_back
    if innermost is None or frame is None or innermost.f_code.co_name != "select":
        return []
    get_coroutine = getattr(frame.f_locals.get("future"), "get_coro", None)
    step = get_coroutine() if get_coroutine else None
    found: list[list[Any]] = []
    while step is not None and len(found) < _MAX_FRAMES:
        below = getattr(step, "cr_frame", None) or getattr(step, "gi_frame", None)
        if below is None:
            break
        found.append([below.f_code.co_filename, below.f_lineno or 0, below.f_code.co_name])
        step = getattr(step, "cr_await", None) or getattr(step, "gi_yieldfrom", None)
    return found[::-1]


def _main_frame() -> types.FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _source_of_call(frame: types.FrameType) -> str:
    lines = linecache.getlines(frame.f_code.co_filename)
    positions: Any = getattr(frame.f_code, "co_positions", None)
    if positions is None:
        return lines[frame.f_lineno - 1].strip() if 0 < frame.f_lineno <= len(lines) else ""
    span: tuple[Any, ...] = next(itertools.islice(positions(), frame.f_lasti // 2, None), (None,))
    if None in span or not 0 < span[0] <= span[1] <= len(lines):
        return ""
    first, last, start, end = span
    encoded = [line.encode() for line in lines[first - 1 : last]]  # columns count bytes
    encoded[-1] = encoded[-1][:end]
    encoded[0] = encoded[0][start:]
    text = " ".join(b"".join(encoded).decode(errors="replace").split())
    return text if text.endswith(")") else ""
