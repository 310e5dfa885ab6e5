"""Work that an interrupt of the caller does not cut."""

from __future__ import annotations

import threading
from collections.abc import Callable


def run_to_its_end(act: Callable[[], None], *, name: str) -> None:
    """Wait for ``act``, which runs in a thread called ``name`` and goes on there when the caller is interrupted.

    Raises: what ``act`` raises, KeyboardInterrupt.
    """
    failures: list[Exception] = []

    def run() -> None:
        try:
            act()
        except Exception as exc:  # noqa: BLE001  it is raised below
            failures.append(exc)

    working = threading.Thread(target=run, name=name, daemon=True)
    try:
        working.start()
    except RuntimeError:  # Python itself is ending, or the system has no room for a thread
        run()
    else:
        working.join()
    if failures:
        raise failures[0]
