"""Training over ranks: the loop, and checkpoints in any layout of ranks, at any URL. It needs no session."""

from __future__ import annotations

from .batches import ReplicaSampler, make_loader
from .catalog import Checkpoint, Checkpoints
from .checkpoint import Loaded, checkpoints, load, save
from .randomness import set_seed
from .recipe import make_optimizer, make_scheduler
from .reports import Result
from .safetensors_export import export_safetensors
from .safetensors_import import import_safetensors
from .saving import Saving
from .trainer import Callback, Trainer

__all__ = [
    "Callback",
    "Checkpoint",
    "Checkpoints",
    "Loaded",
    "ReplicaSampler",
    "Result",
    "Saving",
    "Trainer",
    "checkpoints",
    "export_safetensors",
    "import_safetensors",
    "load",
    "make_loader",
    "make_optimizer",
    "make_scheduler",
    "save",
    "set_seed",
]
