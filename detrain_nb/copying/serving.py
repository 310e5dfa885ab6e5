"""Serving one order of the notebook, for the program that copies files and the program of jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from .json_lines import Failed, FilesError, Talk

Handler: TypeAlias = Callable[[Talk, dict[str, Any]], None]

_ORDER_BYTES = 1 << 22  # may name many files


def serve_order(
    talk: Talk, handlers: Mapping[str, Handler], *, errors: tuple[type[Exception], ...] = ()
) -> FilesError | None:
    """Receive one order and pass it to the handler of its type; returns the error if it failed, else None.

    The error has been sent to the other side, except `Failed`, which means that the other side is unreachable.
    ``errors``: exceptions of handlers whose text, like that of `FilesError`, is for the user.
    """
    try:
        order = talk.hear(*handlers, most_bytes=_ORDER_BYTES)
        handlers[order["type"]](talk, order)
        talk.flush()
        return None
    except FilesError as exc:
        error = exc
    except errors as exc:
        error = FilesError(str(exc))
    except (OSError, MemoryError) as exc:
        where = exc.filename if isinstance(exc, OSError) else None
        error = FilesError(f"{where or 'our program'}: {exc}")
    if not isinstance(error, Failed):
        try:
            talk.say("failed", text=str(error))
            talk.flush()
        except Failed as exc:
            return exc
    return error
