"""One order of the notebook, served: by the program that copies files, and by that of jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from .json_lines import Failed, FilesError, Talk

Handler: TypeAlias = Callable[[Talk, dict[str, Any]], None]

_ORDER_BYTES = 1 << 22  # may name many files


def serve_order(
    talk: Talk, handlers: Mapping[str, Handler], *, errors: tuple[type[Exception], ...] = ()
) -> FilesError | None:
    """Hear one, and do it by the handler of its type. Returns why it could not be done, which has been said.

    That is `Failed` where there is nobody to say more to. ``errors`` of handlers are for the user, as `FilesError` is.
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
