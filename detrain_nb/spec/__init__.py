"""WHAT to run: frozen pydantic models, validated here once and then passed as arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .findings import Finding, worst
    from .lease import nodes_from_lease
    from .node import Node
    from .nodes_file import parse_nodes, read_nodes, write_nodes
    from .parallelism import Parallelism
    from .pipeline import PipelineSpec
    from .places import Checkpoint, Data, Model, Rendezvous
    from .source import Git, Source
    from .training import Training

__all__ = [
    "Checkpoint",
    "Data",
    "Finding",
    "Git",
    "Model",
    "Node",
    "Parallelism",
    "PipelineSpec",
    "Rendezvous",
    "Source",
    "Training",
    "nodes_from_lease",
    "parse_nodes",
    "read_nodes",
    "worst",
    "write_nodes",
]

_HOMES = {
    **dict.fromkeys(("Finding", "worst"), ".findings"),
    "Node": ".node",
    "nodes_from_lease": ".lease",
    **dict.fromkeys(("parse_nodes", "read_nodes", "write_nodes"), ".nodes_file"),
    "Parallelism": ".parallelism",
    "PipelineSpec": ".pipeline",
    **dict.fromkeys(("Checkpoint", "Data", "Model", "Rendezvous"), ".places"),
    **dict.fromkeys(("Git", "Source"), ".source"),
    "Training": ".training",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use: a session needs nodes, but no model of a pipeline."""
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
