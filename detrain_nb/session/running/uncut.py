"""Work that goes on when the caller is interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable


def run_to_its_end(act: Callable[[], None], *, name: str) -> None:
    """Run ``act`` in a thread called ``name`` and wait for it; it goes on there when the caller is interrupted.

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
    except RuntimeError:  # Python is exiting, or the system cannot start a thread
        run()
    else:
        working.join()
    if failures:
        raise failures[0]
