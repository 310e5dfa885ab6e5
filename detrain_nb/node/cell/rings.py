"""Reference rings of an error: it knows its frames, a frame knows its callers, and one of these may know the error.

A ring keeps all that the user's functions held alive until garbage is collected, on a GPU too. Since Python 3.12
every failed cell would make one: a coroutine's frame knows its callers too, and IPython runs a cell in a coroutine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import FrameType

import IPython

from ..system import own_files

_LIBRARIES = tuple(
    os.path.join(path, "")
    for path in (
        os.path.dirname(IPython.__file__),
        os.path.join(os.path.dirname(os.__file__), "asyncio"),
        own_files.ON_NODE,
    )
)


def break_rings(error: BaseException) -> None:
    """Clear the finished frames of IPython, asyncio and ours that ``error`` went through or was called from.

    The user's own frames stay: a generator among them may go on.
    """
    for each in errors_behind(error):
        step = each.__traceback__
        caller = step.tb_frame.f_back if step else None
        while caller is not None:
            _empty(caller)
            caller = caller.f_back
        while step is not None:
            _empty(step.tb_frame)
            step = step.tb_next


def errors_behind(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and all that caused it or were being handled when it was raised."""
    known: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in known:
            known.add(id(each))
            left += [each.__cause__, each.__context__]
            yield each


def _empty(frame: FrameType) -> None:
    if frame.f_code.co_filename.startswith(_LIBRARIES):
        with contextlib.suppress(RuntimeError):  # it is running
            frame.clear()
