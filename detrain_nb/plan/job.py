"""The spec of a job as its script reads it: frozen dataclasses with the spec's names, every number resolved.

    from detrain_nb import job_spec

    job = job_spec()
    print(job.training.epochs, job.parallelism.dp_shard)

It needs nothing but Python 3.10.
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

JOB_VARIABLE = "DETRAIN_NB_JOB"  # in the environment of every process of a job: its id and node rank
ARTIFACTS_VARIABLE = "DETRAIN_NB_ARTIFACTS"  # the folder for the script's results
JOB_SPEC_VARIABLE = "DETRAIN_NB_JOB_SPEC"  # the file of the job's spec
_SECTIONS = ("parallelism.", "training.", "data.", "model.", "checkpoint.")  # a script's command line may change these
_JOB_AXES = ("pp", "dp_replicate", "dp_shard", "tp")
_LAYOUT = {
    "training.batch_size",
    *(f"parallelism.{name}" for name in (*_JOB_AXES, "schedule", "microbatches")),
}  # fields from which others are resolved
_FORMAT = 1
_LIMIT_BYTES = 1_000_000
_DEV_STEPS = 3


@dataclass(frozen=True)
class JobParallelism:
    """The size of every axis of the mesh, and the layout of the model over it; for a script no size is -1."""

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
    """Settings of the training loop; ``batch_size`` counts the samples per step of all replicas together.

    What is None is not in the spec, and left to the script.
    """

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
    """The URL, format and parts of the data."""

    url: str
    format: str | None = None
    chunks: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobModel:
    """The URL, format and parts of the model."""

    url: str
    format: str | None = None
    chunks: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobCheckpoint:
    """Where checkpoints are written, every how many steps, and how many are kept; ``keep`` None: all."""

    url: str
    interval: int | None = None
    keep: int | None = 3
    resume: bool = True
    asynchronous: bool = False


@dataclass(frozen=True)
class JobNode:
    """A node and its ranks; the name is empty for a job on the machine of the submitter."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class JobSpec:
    """The resolved spec of a job: the axes have their sizes, the batch is split. Parts that the spec lacks are None.

    When ``nodes_vary``, as in an elastic job, `job_spec` resolves it for the current ranks, while ``nodes`` are those
    of the submission.
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
        """Return the spec for the ranks of ``nodes``."""
        return replace(self, nodes=tuple(nodes), world_size=sum(len(node.ranks) for node in nodes), batch=batch)

    def for_dev(self) -> JobSpec:
        """Return the spec for a trial run if ``training.dev`` is set: a few steps, each logged, no checkpoint."""
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
        """Return the spec as JSON, which ``from_json`` reads back as an equal spec."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, *, where: str = "job spec") -> JobSpec:
        """Read a spec from JSON; unknown keys, as of a later release, are ignored. Raises: SpecError."""
        if len(text) > _LIMIT_BYTES:
            raise SpecError(f"{where}: larger than {_LIMIT_BYTES // 1_000_000} MB, so not the spec of a job")
        data = read_json(text, where=where)
        if not isinstance(data, Mapping) or data.get("format") != _FORMAT:
            found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            raise SpecError(f"{where}: has format {found!r}, this release reads {_FORMAT}: submit the job again")
        return build(cls, data, where=where)

    def with_overrides(self, words: Sequence[str]) -> JobSpec:
        """Return the spec with the overrides in ``words``, such as ``--training.epochs 2``; other words are ignored.

        Changes of the axes or the batch are resolved again. Raises: SpecError.
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
        """Resolve axes and batch. Raises: SpecError when the axes do not fit the ranks, or the batch the axes."""
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
    """Read the spec of this job; options on the command line such as ``--training.epochs 2`` override its fields.

    The rank processes of a job find it by the variable ``DETRAIN_NB_JOB_SPEC``.

    ``argv``: the arguments, by default those of the script. Options without a dot, or not beginning with a section of
    a spec, are the script's own and ignored here.
    Raises: SpecError when the process has no spec, or it is invalid, also with the overrides.
    """
    path = os.environ.get(JOB_SPEC_VARIABLE)
    if not path:
        raise SpecError(
            f"{JOB_SPEC_VARIABLE} is not set, so this process has no spec: submit the script as a job, or set the "
            "variable to the file of a spec"
        )
    try:
        with Path(path).open("rb") as file:
            text = file.read(_LIMIT_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as exc:
        raise SpecError(f"{JOB_SPEC_VARIABLE}={path!r} cannot be read: {exc}") from None
    job, words = JobSpec.from_json(text, where=path), sys.argv[1:] if argv is None else argv
    return _of_round(job, words) if job.nodes_vary else job.with_overrides(words)


def _of_round(job: JobSpec, words: Sequence[str]) -> JobSpec:
    """Resolve the spec for the current ranks, which torchrun has counted. Raises: SpecError."""
    counted = os.environ.get("WORLD_SIZE", "")
    here = replace(job, world_size=int(counted) if counted.isdecimal() else job.world_size)
    try:
        return here.with_overrides(words)._resolve()
    except SpecError as exc:
        raise SpecError(f"with the {count_ranks(here.world_size)} of this round: {exc}") from None
