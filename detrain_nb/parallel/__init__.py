"""How a model is split over a mesh of ranks: its costs, its cuts, and what each rank holds. It needs no session."""

from __future__ import annotations

from ..plan import SCHEDULES
from .costs.partitioner import Partition, StageNode, partition
from .costs.profiler import ModelProfile, Unit, profile
from .deferred import deferred, materialize
from .describing import describe_plan
from .dry_run import dry_run
from .mesh import make_mesh
from .model import ParallelModel
from .norms import clip_grad_norm, grad_norm
from .objective import loss_on_parts
from .parallelize import parallelize
from .pictures import draw_mesh, draw_partition, show_mesh
from .rank_memory import DryRun
from .stages.pipeline import PipelineStages
from .stages.schedules import Schedule, WrittenSchedule, stages_of_rank
from .stages.splitter import Split, split
from .stages.timeline import Timeline, timeline
from .tensor.apply import apply_tensor_plan, from_saved_order, to_saved_order
from .tensor.plan import TensorPlan
from .tensor.planner import tp_plan
from .whole import WholeModel

__all__ = [
    "SCHEDULES",
    "DryRun",
    "ModelProfile",
    "ParallelModel",
    "Partition",
    "PipelineStages",
    "Schedule",
    "Split",
    "StageNode",
    "TensorPlan",
    "Timeline",
    "Unit",
    "WholeModel",
    "WrittenSchedule",
    "apply_tensor_plan",
    "clip_grad_norm",
    "deferred",
    "describe_plan",
    "draw_mesh",
    "draw_partition",
    "dry_run",
    "from_saved_order",
    "grad_norm",
    "loss_on_parts",
    "make_mesh",
    "materialize",
    "parallelize",
    "partition",
    "profile",
    "show_mesh",
    "split",
    "stages_of_rank",
    "timeline",
    "to_saved_order",
    "tp_plan",
]
