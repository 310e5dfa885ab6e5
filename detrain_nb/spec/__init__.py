"""WHAT to run: pydantic models that are checked once, here, and then passed on; frozen."""

from __future__ import annotations

from .findings import Finding, worst
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
    "parse_nodes",
    "read_nodes",
    "worst",
    "write_nodes",
]
