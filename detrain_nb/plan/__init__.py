"""The plan: which ranks run on which node and device, and which part of a pipeline each one has.

Frozen dataclasses and arithmetic only, so it runs on a node and in a notebook without torch.
"""

from __future__ import annotations

from .batch import Batch, split_batch
from .choices import SCHEDULES
from .costs import Layer, StageCost, StageCosts, bubble_of, imbalance_of, join_layers, step_of
from .description import PlanDescription
from .memory import MeshMemory, RankBytes
from .mesh import AXES, DATA_AXES, Mesh, resolve_axes
from .nodes import DEVICES, MOST_RANKS, NodeOffer, NodePlan, Plan, plan_nodes, plan_one_node
from .passes import PASSES, StepTimeline, Work
from .picture import RankRow
from .pipeline import plan_pipeline
from .ranks import parse_ranks, split_names
from .soundness import MOST_LAYERS, MOST_PASSES
from .stages import StageLayout

__all__ = [
    "AXES",
    "DATA_AXES",
    "DEVICES",
    "MOST_LAYERS",
    "MOST_PASSES",
    "MOST_RANKS",
    "PASSES",
    "SCHEDULES",
    "Batch",
    "Layer",
    "Mesh",
    "MeshMemory",
    "NodeOffer",
    "NodePlan",
    "Plan",
    "PlanDescription",
    "RankBytes",
    "RankRow",
    "StageCost",
    "StageCosts",
    "StageLayout",
    "StepTimeline",
    "Work",
    "bubble_of",
    "imbalance_of",
    "join_layers",
    "parse_ranks",
    "plan_nodes",
    "plan_one_node",
    "plan_pipeline",
    "resolve_axes",
    "split_batch",
    "split_names",
    "step_of",
]
