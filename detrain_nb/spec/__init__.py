"""WHAT to run: pydantic models that are checked once, here, and then passed on; frozen."""

from __future__ import annotations

from .node import Node
from .nodes_file import parse_nodes, read_nodes, write_nodes

__all__ = ["Node", "parse_nodes", "read_nodes", "write_nodes"]
