"""Train PyTorch models on many machines without leaving the notebook.

``%load_ext detrain_nb`` gives the magics; the same in plain Python starts with ``Session``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from detrain_nb.magics import current_session

    from .metrics import log_metrics, read_metrics
    from .plan.job import JobSpec, job_spec
    from .session.running.results import CellResult, RankResult
    from .session.session import Session

__all__ = [
    "CellResult",
    "JobSpec",
    "RankResult",
    "Session",
    "__version__",
    "current_session",
    "job_spec",
    "log_metrics",
    "read_metrics",
]

_HOMES = {
    "CellResult": ".session.running.results",
    "JobSpec": ".plan.job",
    "RankResult": ".session.running.results",
    "Session": ".session.session",
    "current_session": ".magics",
    "job_spec": ".plan.job",
    "log_metrics": ".metrics",
    "read_metrics": ".metrics",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that a node that imports one module does not import them all."""
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(ipython: Any) -> None:
    """Load the magics, for ``%load_ext detrain_nb``."""
    from detrain_nb.magics import load_ipython_extension as load

    load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Remove the magics, for ``%unload_ext detrain_nb``."""
    from detrain_nb.magics import unload_ipython_extension as unload

    unload(ipython)
