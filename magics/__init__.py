"""The notebook's magics: parse the line, call the core, show the result."""

from __future__ import annotations

from typing import Any

from .completion import route_to_ranks
from .distributed import DistributedMagics
from .notebook import on_shutdown

__all__ = ["DistributedMagics", "load_ipython_extension", "unload_ipython_extension"]

_MAGICS = "detrain_nb_magics"  # where the notebook's magics are found again, as an attribute of its IPython


def load_ipython_extension(ipython: Any) -> None:
    """Register the magics; loading twice keeps the session that runs."""
    if hasattr(ipython, _MAGICS):
        return
    magics = DistributedMagics(ipython)
    ipython.register_magics(magics)
    undo = [on_shutdown(ipython, magics.end_session), route_to_ranks(ipython, lambda: magics.session)]
    setattr(ipython, _MAGICS, (magics, undo))


def unload_ipython_extension(ipython: Any) -> None:
    """End the session and take the magics away."""
    magics, undo = ipython.__dict__.pop(_MAGICS, (None, []))
    if magics is None:
        return
    magics.end_session()
    for act in undo:
        act()
    for kind, names in magics.magics.items():
        for name in names:
            ipython.magics_manager.magics[kind].pop(name, None)
