"""The names that a spec chooses from, for who has no torch: what they mean is in parallel/ and training/."""

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

ARTIFACTS = ("*.pt", "*.safetensors", "artifacts/")  # what is fetched of a job whose spec says nothing of it

TIMEOUT_S, SILENCE_S = 600.0, 60.0  # within which all nodes of a job come; after which a silent one is lost

# Of each line one field at most is given; an override of one leaves out the others.
ONE_OF: tuple[tuple[str, ...], ...] = (
    ("training.epochs", "training.steps"),
    tuple(f"source.{kind}" for kind in ("script", "script_text", "notebook", "git", "path", "module")),
)
