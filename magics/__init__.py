"""The notebook's magics: parse the line, call the core, show the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.core.magic import Magics

from ..errors import SessionError
from ..session.session import Session
from .completion import route_to_ranks
from .debugging import refuse_debugger
from .distributed import DistributedMagics, help_without_body
from .guard import guard
from .jobs import JobMagics
from .notebook import RunCells, on_shutdown
from .pipeline import PipelineMagics

__all__ = ["DistributedMagics", "JobMagics", "current_session", "load_ipython_extension", "unload_ipython_extension"]

_UNLOADED = "detrain_nb_unloaded"  # attribute of the IPython shell that keeps the magics after %unload_ext
_MAGICS = "detrain_nb_magics"  # attribute of the IPython shell that keeps the loaded magics


def current_session() -> Session:
    """Return the session of this notebook, for plain Python: ``current_session().ranks.where()`` in a timer, say.

    Raises: SessionError when the magics are not loaded or hold no session.
    """
    magics: DistributedMagics | None = getattr(get_ipython(), _MAGICS, (None, []))[0]
    session = magics.session if magics else None
    if session is None:
        raise SessionError("this notebook holds no session: %load_ext detrain_nb, then %distributed start")
    return session


def load_ipython_extension(ipython: Any) -> None:
    """Register the magics; loading them twice, or ``%reload_ext``, keeps the running session."""
    if hasattr(ipython, _MAGICS):
        return
    magics: DistributedMagics = ipython.__dict__.pop(_UNLOADED, None) or DistributedMagics(ipython)
    holder, run_cells = magics.holder, RunCells(ipython)
    undo = [
        _register(ipython, magics),
        _register(ipython, JobMagics(ipython, lambda: holder.settings, run_cells)),
        run_cells.close,
        _register(ipython, PipelineMagics(ipython)),
        on_shutdown(ipython, holder.end_own, holder.leave_to_restart),
        route_to_ranks(ipython, lambda: magics.session),
        help_without_body(ipython),
        refuse_debugger(ipython, guard.__code__),
    ]
    setattr(ipython, _MAGICS, (magics, undo))
    if there := holder.what_is_there:
        print(there)


def unload_ipython_extension(ipython: Any) -> None:
    """Remove the magics. The session stays for a later ``%load_ext``, and ends with this process."""
    magics, undo = ipython.__dict__.pop(_MAGICS, (None, []))
    if magics is None:
        return
    setattr(ipython, _UNLOADED, magics)
    if magics.session is not None:
        print(
            "the session keeps running: %load_ext detrain_nb brings it back; it ends with this kernel, or with "
            "%distributed stop"
        )
    for act in undo:
        act()


def _register(ipython: Any, magics: Magics) -> Callable[[], None]:
    """Register ``magics``; returns the function that removes them."""
    ipython.register_magics(magics)

    def take_away() -> None:
        for kind, names in magics.magics.items():
            for name in names:
                ipython.magics_manager.magics[kind].pop(name, None)

    return take_away
