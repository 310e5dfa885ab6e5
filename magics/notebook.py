"""Facts about the notebook: its name, the end of its kernel, and whether its file lacks cells that ran."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any


def session_name(user_ns: dict[str, Any], kernel: str) -> str:
    """Return a name from the notebook's file, so that it finds its session again; else from its ``kernel``'s name.

    In a terminal, which has neither, the name is unique.
    """
    path = _notebook_path(user_ns)
    if not path:
        digest = hashlib.sha256(kernel.encode()).hexdigest()[:12]
        return f"kernel-{digest}" if kernel else f"kernel-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).stem).strip("-._")[:40] or "notebook"
    return f"{stem}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"


def _notebook_path(user_ns: dict[str, Any]) -> str:
    """Return the path that `detrain-nb run`, JupyterLab (both in the environment) or VS Code (a variable) set."""
    path = (
        os.environ.get("DETRAIN_NB_NOTEBOOK") or os.environ.get("JPY_SESSION_NAME") or user_ns.get("__vsc_ipynb_file__")
    )
    return path if isinstance(path, str) else ""


class RunCells:
    """The cells of the open notebook as they were run last, by the ids that a front end gives them."""

    def __init__(self, ipython: Any) -> None:
        self._ipython = ipython
        self._texts: dict[str, str] = {}
        self._last = ""
        ipython.events.register("pre_run_cell", self._note)

    def close(self) -> None:
        self._ipython.events.unregister("pre_run_cell", self._note)

    def are_newer_than(self, path: str) -> bool:
        """Return whether the file at ``path`` is this notebook's and lacks cells that ran; False elsewhere."""
        saved: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            path = os.path.expanduser(path)
            if not os.path.samefile(path, _notebook_path(self._ipython.user_ns)):
                return False
            cells = json.loads(Path(path).read_text("utf-8-sig"))["cells"]
            saved = {cell["id"]: "".join(cell["source"]) for cell in cells if "id" in cell}
        known = [cell for cell in self._texts if cell in saved]
        is_new = bool(known) and self._last not in saved  # else this front end has other ids than the file
        return is_new or any(self._texts[cell].rstrip() != saved[cell].rstrip() for cell in known)

    def _note(self, info: Any) -> None:
        if cell := str(info.cell_id or ""):
            self._texts[cell], self._last = info.raw_cell, cell


def connection_file(ipython: Any) -> str:
    """Return the path of the kernel's connection file, which a restart keeps; empty in a terminal."""
    app = getattr(getattr(ipython, "kernel", None), "parent", None)
    return str(getattr(app, "abs_connection_file", ""))


def kernel_name(ipython: Any) -> str:
    """Return the kernel's name, which a restart keeps even if the notebook is renamed; empty in a terminal."""
    return Path(connection_file(ipython)).name


def on_shutdown(ipython: Any, end: Callable[[], None], detach: Callable[[], None]) -> Callable[[], None]:
    """Call ``end`` when the kernel is shut down for good, ``detach`` when it restarts; returns the undo."""
    kernel = getattr(ipython, "kernel", None)
    if kernel is None:
        return lambda: None
    shut_down = kernel.do_shutdown

    def do_shutdown(restart: bool) -> Any:
        (detach if restart else end)()
        return shut_down(restart)

    return replace_methods(kernel, do_shutdown=do_shutdown)


def replace_methods(owner: Any, **methods: Callable[..., Any]) -> Callable[[], None]:
    """Replace methods of ``owner``; returns the undo."""
    before = {name: getattr(owner, name) for name in methods}
    vars(owner).update(methods)
    return lambda: vars(owner).update(before)
