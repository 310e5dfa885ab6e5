"""What a session needs to know of the notebook it belongs to: its name, and when its kernel ends."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any


def session_name(user_ns: dict[str, Any], kernel: str) -> str:
    """A name from the notebook's file, so that the same notebook finds its session again; else from its ``kernel``'s.

    Where there is neither, as in a terminal, a unique one.
    `detrain-nb run` says the file in DETRAIN_NB_NOTEBOOK, JupyterLab in JPY_SESSION_NAME, VS Code in a variable.
    """
    path = (
        os.environ.get("DETRAIN_NB_NOTEBOOK") or os.environ.get("JPY_SESSION_NAME") or user_ns.get("__vsc_ipynb_file__")
    )
    if not isinstance(path, str) or not path:
        digest = hashlib.sha256(kernel.encode()).hexdigest()[:12]
        return f"kernel-{digest}" if kernel else f"kernel-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).stem).strip("-._")[:40] or "notebook"
    return f"{stem}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"


def connection_file(ipython: Any) -> str:
    """Of the kernel; the same after a restart. Empty in a terminal."""
    app = getattr(getattr(ipython, "kernel", None), "parent", None)
    return str(getattr(app, "abs_connection_file", ""))


def kernel_name(ipython: Any) -> str:
    """Of the kernel, the same after a restart, though the notebook may have another name then; empty in a terminal."""
    return Path(connection_file(ipython)).name


def on_shutdown(ipython: Any, end: Callable[[], None], detach: Callable[[], None]) -> Callable[[], None]:
    """Call ``end`` when the kernel is shut down for good, ``detach`` when it restarts; returns what undoes it."""
    kernel = getattr(ipython, "kernel", None)
    if kernel is None:
        return lambda: None
    shut_down = kernel.do_shutdown

    def do_shutdown(restart: bool) -> Any:
        (detach if restart else end)()
        return shut_down(restart)

    return replace_methods(kernel, do_shutdown=do_shutdown)


def replace_methods(owner: Any, **methods: Callable[..., Any]) -> Callable[[], None]:
    """Have ``owner`` call these instead of its own; returns what undoes it."""
    before = {name: getattr(owner, name) for name in methods}
    vars(owner).update(methods)
    return lambda: vars(owner).update(before)
