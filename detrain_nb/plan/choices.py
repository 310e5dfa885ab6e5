"""Names that a spec can choose from, readable without torch; parallel/ and training/ implement them."""

from __future__ import annotations

from typing import Literal, get_args

# Each is kept as a type, for specs, and as a tuple, for messages.
ScheduleName = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
SchedulerName = Literal["constant", "linear", "cosine", "wsd"]
ActivationsKept = Literal["none", "selective", "full"]
PrecisionName = Literal["bf16", "fp32"]
SyncAlgorithm = Literal["sync", "diloco", "swarm"]
ArgumentStyle = Literal["plain", "detrain"]

SCHEDULES: tuple[str, ...] = get_args(ScheduleName)
SCHEDULERS: tuple[str, ...] = get_args(SchedulerName)

ARTIFACTS = ("*.pt", "*.safetensors", "artifacts/")  # what is fetched from a job by default

TIMEOUT_S, SILENCE_S = 600.0, 60.0  # for all nodes of a job to join; until a silent node counts as lost

# Mutually exclusive fields, a group per line; overriding one removes the others.
ONE_OF: tuple[tuple[str, ...], ...] = (
    ("training.epochs", "training.steps"),
    tuple(f"source.{kind}" for kind in ("script", "script_text", "notebook", "git", "path", "module")),
)
