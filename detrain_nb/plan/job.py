"""What a job's script knows of its spec: frozen dataclasses with the spec's names, every number resolved.

    from detrain_nb import job_spec

    job = job_spec()
    print(job.training.epochs, job.parallelism.dp_shard)

It needs Python 3.10 alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..errors import SpecError, count_ranks
from .batch import Batch
from .choices import ARTIFACTS, ActivationsKept, PrecisionName, SchedulerName, SyncAlgorithm
from .fields import build, read_json, read_override, set_fields, split_overrides
from .pipeline import lay_out

__all__ = [
    "ARTIFACTS_VARIABLE",
    "JOB_SPEC_VARIABLE",
    "JOB_VARIABLE",
    "JobCheckpoint",
    "JobData",
    "JobModel",
    "JobNode",
    "JobParallelism",
    "JobSpec",
    "JobTraining",
    "job_spec",
]

JOB_VARIABLE = "DETRAIN_NB_JOB"  # in the environment of all that belongs to a job: its id and node rank
ARTIFACTS_VARIABLE = "DETRAIN_NB_ARTIFACTS"  # names the folder for what the script makes
JOB_SPEC_VARIABLE = "DETRAIN_NB_JOB_SPEC"  # names the file of the job's spec
_SECTIONS = ("parallelism.", "training.", "data.", "model.", "checkpoint.")  # a script's command line may change these
_JOB_AXES = ("pp", "dp_replicate", "dp_shard", "tp")
_LAYOUT = {
    "training.batch_size",
    *(f"parallelism.{name}" for name in (*_JOB_AXES, "schedule", "microbatches")),
}  # what these say, others follow
_FORMAT = 1
_LIMIT_BYTES = 1_000_000
_DEV_STEPS = 3


@dataclass(frozen=True)
class JobParallelism:
    """The size of every axis of the mesh, and how the model is laid out over it; a script sees none that is -1."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    schedule: str = "1F1B"
    microbatches: int | None = None
    activations: ActivationsKept = "none"
    compile: bool = False
    precision: PrecisionName | None = None
    algorithm: SyncAlgorithm = "sync"


@dataclass(frozen=True)
class JobTraining:
    """How long, with what and how often; ``batch_size`` is that of all replicas together."""

    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    learning_rate: float = 1e-3
    optimizer: str = "adamw"
    loss: str | None = None
    scheduler: SchedulerName | None = None
    warmup_steps: int = 0
    clip: float | None = None
    seed: int = 0
    log_every: int = 10
    evaluate_every: int | None = None
    dev: bool = False


@dataclass(frozen=True)
class JobData:
    """Where data is, in what form, and its parts."""

    url: str
    format: str | None = None
    chunks: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobModel:
    """Where a model is, in what form, and its parts."""

    url: str
    format: str | None = None
    chunks: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobCheckpoint:
    """Where checkpoints go, after how many steps each, and how many stay; ``keep`` None: all."""

    url: str
    interval: int | None = None
    keep: int | None = 3
    resume: bool = True
    asynchronous: bool = False


@dataclass(frozen=True)
class JobNode:
    """A node and its ranks; the name is empty for a job on the submitter's machine."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class JobSpec:
    """The spec of a job, resolved; where ``nodes_vary``, as they may in an elastic job, `job_spec` resolves it for the
    ranks that there are. ``nodes`` are then those of the submission.
    """

    name: str
    description: str = ""
    world_size: int = 1
    nodes: tuple[JobNode, ...] = ()
    parallelism: JobParallelism = JobParallelism()
    training: JobTraining = JobTraining()
    batch: Batch | None = None
    data: JobData | None = None
    model: JobModel | None = None
    checkpoint: JobCheckpoint | None = None
    artifacts: tuple[str, ...] = ARTIFACTS
    nodes_vary: bool = False

    def on(self, nodes: Sequence[JobNode], *, batch: Batch | None) -> JobSpec:
        """Return it for the ranks of ``nodes``."""
        return replace(self, nodes=tuple(nodes), world_size=sum(len(node.ranks) for node in nodes), batch=batch)

    def for_dev(self) -> JobSpec:
        """Return it as ``training.dev`` wants it, where that is set: a few steps, each of them told, no checkpoint."""
        how = self.training
        if not how.dev:
            return self
        steps = min(how.steps or _DEV_STEPS, _DEV_STEPS)
        few = replace(
            how,
            epochs=None,
            steps=steps,
            warmup_steps=min(how.warmup_steps, steps),
            log_every=1,
            evaluate_every=None if how.evaluate_every is None else min(how.evaluate_every, steps),
        )
        return replace(self, training=few, checkpoint=None)

    def to_json(self) -> str:
        """Write it as JSON, which ``from_json`` reads as an equal one."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, *, where: str = "job spec") -> JobSpec:
        """Read it from JSON; keys that a later release has are left out. Raises: SpecError."""
        if len(text) > _LIMIT_BYTES:
            raise SpecError(f"{where}: larger than {_LIMIT_BYTES // 1_000_000} MB: this is no job's spec")
        data = read_json(text, where=where)
        if not isinstance(data, Mapping) or data.get("format") != _FORMAT:
            found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            raise SpecError(f"{where}: has format {found!r}, this release reads format {_FORMAT}: submit the job anew")
        return build(cls, data, where=where)

    def with_overrides(self, words: Sequence[str]) -> JobSpec:
        """Return it with what ``words`` of a command line say, as ``--training.epochs 2``; others are left alone.

        What they say of the axes or the batch is resolved anew. Raises: SpecError.
        """
        found, _ = split_overrides(words, is_ours=lambda name: name.startswith(_SECTIONS))
        values = {name: read_override(name, text, JobSpec, where="--") for name, text in found.items()}
        if not values:
            return self
        before = self
        if values.get("training.dev"):
            before = replace(self, training=replace(self.training, dev=True)).for_dev()
        changed: JobSpec = build(JobSpec, set_fields(asdict(before), values), where="--")
        return changed._resolve() if not _LAYOUT.isdisjoint(values) else changed

    def _resolve(self) -> JobSpec:
        """Raises: SpecError where its axes do not fit its ranks, or its batch its axes."""
        how = self.parallelism
        mesh, _, batch = lay_out(
            self.world_size,
            axes={axis: getattr(how, axis) for axis in _JOB_AXES},
            batch_size=self.training.batch_size,
            microbatches=how.microbatches,
            schedule=how.schedule,
        )
        resolved = dict(mesh.axes) | ({"microbatches": batch.microbatches} if batch else {})
        return replace(self, batch=batch, parallelism=build(JobParallelism, asdict(how) | resolved, where="--"))


def job_spec(argv: Sequence[str] | None = None) -> JobSpec:
    """Read the spec of this job; ``--training.epochs 2`` on the command line wins over what it says.

    ``argv``: the arguments, by default those of the script. What has no dot, or begins with no part of a spec, is the
    script's own. Raises: SpecError.
    """
    path = os.environ.get(JOB_SPEC_VARIABLE)
    if not path:
        raise SpecError(
            f"{JOB_SPEC_VARIABLE} is not set, so this process has no spec: submit the script as a job, or name there "
            "the file of one"
        )
    try:
        with Path(path).open("rb") as file:
            text = file.read(_LIMIT_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as exc:
        raise SpecError(f"{JOB_SPEC_VARIABLE}={path!r} cannot be read: {exc}") from None
    job, words = JobSpec.from_json(text, where=path), sys.argv[1:] if argv is None else argv
    return _of_round(job, words) if job.nodes_vary else job.with_overrides(words)


def _of_round(job: JobSpec, words: Sequence[str]) -> JobSpec:
    """Resolve it for the ranks that run, which torchrun has counted. Raises: SpecError."""
    counted = os.environ.get("WORLD_SIZE", "")
    here = replace(job, world_size=int(counted) if counted.isdecimal() else job.world_size)
    try:
        return here.with_overrides(words)._resolve()
    except SpecError as exc:
        raise SpecError(f"with the {count_ranks(here.world_size)} of this round: {exc}") from None
