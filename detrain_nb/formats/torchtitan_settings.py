"""What torchtitan is told of a spec, whichever of its forms says it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ..errors import SpecError
from ..plan import Plan
from ..plan.job import JobSpec
from ..spec import PipelineSpec
from .job_script import list_unused_in_dev

_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam"}
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_PROGRAM = "torchtitan.train"
_ARGUMENTS = {  # of torchtitan 0.2.2, which no field of a spec stands for
    "model": "model.name",
    "flavor": "model.flavor",
    "seq_len": "training.seq_len",
    "hf_assets": "model.hf_assets_path",
    "dataset": "training.dataset",
    "local_batch_size": "training.local_batch_size",
}
_RATIO, _DEGREE = re.compile(r"(?:0?\.[0-9]{1,12}|1(?:\.0)?)"), re.compile(r"[1-9][0-9]{0,5}")
_NUMBER = re.compile(r"(?:[0-9]{1,6}\.?[0-9]{0,20}|\.[0-9]{1,20})(?:[eE][+-]?[0-9]{1,2})?")
_MORE: dict[str, dict[str, tuple[re.Pattern[str], type]]] = {  # which today's torchtitan calls the same
    "lr_scheduler": {
        "decay_ratio": (_RATIO, float),
        "decay_type": (re.compile("linear|sqrt|cosine"), str),
        "min_lr_factor": (_NUMBER, float),
    },
    "optimizer": dict.fromkeys(("beta1", "beta2", "eps", "weight_decay"), (_NUMBER, float)),
    "parallelism": {f"{axis}_parallel_degree": (_DEGREE, int) for axis in ("context", "expert")},
}
_DUMP_FOLDER = "outputs/"  # below which torchtitan puts what has no whole path
_PATH = re.compile(r"[^\x00-\x1f\x7f]{1,1000}")
_USED = (
    *(f"training.{name}" for name in ("steps", "batch_size", "learning_rate", "optimizer", "loss", "scheduler")),
    *(f"training.{name}" for name in ("warmup_steps", "clip", "seed", "log_every", "evaluate_every", "dev")),
    *(f"parallelism.{name}" for name in ("pp", "dp_replicate", "dp_shard", "tp", "schedule", "microbatches")),
    *(f"parallelism.{name}" for name in ("activations", "compile", "precision", "algorithm")),
    *(f"checkpoint.{name}" for name in ("url", "interval", "keep", "asynchronous")),
    *(f"nodes.{name}" for name in ("name", "host", "ranks", "devices")),  # whoever starts torchtitan knows them
)


def list_used(spec: PipelineSpec) -> list[str]:
    """Return the fields that torchtitan is told of, or that are its own program."""
    used = [*_USED, *(["source.module"] if spec.source.module == _PROGRAM else [])]
    unused = list_unused_in_dev(spec)
    return [name for name in used if name not in unused and name.partition(".")[0] not in unused]


@dataclass(frozen=True)
class Options:
    """What no spec has a field for; empty: as torchtitan has it."""

    model: str = "llama3"
    flavor: str = "debugmodel"
    seq_len: int = 2048
    hf_assets: str = "./tests/assets/tokenizer"
    dataset: str = "c4_test"
    local_batch_size: int | None = None  # where no batch of all replicas is given


def read_options(spec: PipelineSpec, given: Mapping[str, str]) -> Options:
    """Return those ``given``, else those of ``source.arguments`` where it is torchtitan's. Raises: SpecError."""
    said = {**_said_in_arguments(spec), **{name: value for name, value in given.items() if value}}
    model, flavor, dataset = (said.get(name, "") for name in ("model", "flavor", "dataset"))
    seq_len, hf_assets, local = (said.get(name, "") for name in ("seq_len", "hf_assets", "local_batch_size"))
    for name, value in {"model": model, "flavor": flavor, "dataset": dataset}.items():
        if value and not (_MODULE if name == "model" else _NAME).fullmatch(value):
            raise SpecError(f"--{name} {value!r}: give a name that torchtitan has, as {getattr(Options, name)}")
    if seq_len and not re.fullmatch(r"[1-9][0-9]{0,8}", seq_len):
        raise SpecError(f"--seq-len {seq_len!r}: give a number of tokens, as 8192")
    if hf_assets and not _PATH.fullmatch(hf_assets):
        raise SpecError(f"--hf-assets {hf_assets!r}: give the path of a folder, on one line")
    return Options(
        model or Options.model,
        flavor or Options.flavor,
        int(seq_len or Options.seq_len),
        hf_assets or Options.hf_assets,
        dataset or Options.dataset,
        int(local) if re.fullmatch(r"[1-9][0-9]{0,8}", local) else None,
    )


def describe_arguments(spec: PipelineSpec) -> list[str]:
    """Say in a comment which of torchtitan's own arguments stand in the file, as most have no field of a spec."""
    more = [f"{section}.{name}" for section in _MORE for name in _say_more(spec, section)]
    said = ", ".join(f"--{name}" for name in [*(_ARGUMENTS[name] for name in _said_in_arguments(spec)), *more])
    return [f"# Taken from source.arguments, unless an option of the export says otherwise: {said}."] if said else []


def _said_in_arguments(spec: PipelineSpec) -> dict[str, str]:
    """What the arguments say of the options."""
    said = _read_arguments(spec)
    return {name: said[option] for name, option in _ARGUMENTS.items() if option in said}


def _say_more(spec: PipelineSpec, section: str) -> dict[str, int | float | str]:
    """What the arguments say of a section of torchtitan's where a field of the spec says less, or nothing."""
    arguments, said = _read_arguments(spec), {}
    for name, (form, kind) in _MORE[section].items():
        value = arguments.get(f"{section}.{name}", "")
        if form.fullmatch(value) and (spec.training.scheduler == "wsd" or not name.startswith("decay_")):
            said[name] = kind(value)
    return said


def _read_arguments(spec: PipelineSpec) -> dict[str, str]:
    """Read those of torchtitan, as ``--model.flavor=8B`` or in two words; the last one holds."""
    if spec.source.module != _PROGRAM:
        return {}
    words = spec.source.arguments
    said: dict[str, str] = {}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        option, equals, value = word.partition("=")
        said[option.removeprefix("--")] = value if equals else following
    return said


def check_job(spec: PipelineSpec, plan: Plan, *, optimizers: Collection[str] = ("adamw", "adam")) -> JobSpec:
    """Return what is trained, with every number resolved. Raises: SpecError for what torchtitan cannot do."""
    job = spec.job_spec(plan)
    how, saved = job.training, job.checkpoint
    if how.epochs is not None:
        raise SpecError(f"training.epochs {how.epochs}: torchtitan counts steps: give training.steps")
    if how.optimizer.lower() not in optimizers:
        raise SpecError(
            f"training.optimizer {how.optimizer!r}: torchtitan takes {' or '.join(optimizers)} here: give that"
        )
    if how.loss not in (None, "cross_entropy"):
        raise SpecError(f"training.loss {how.loss!r}: torchtitan trains with cross_entropy: give that, or leave it out")
    if how.scheduler is not None and how.steps is None:
        raise SpecError(f"training.scheduler {how.scheduler!r}: it ends with the last step: give training.steps")
    if saved and ("://" in saved.url or saved.url.startswith("~")):
        raise SpecError(
            f"checkpoint.url {saved.url}: torchtitan writes into a folder that all ranks see: give its whole path"
        )
    if saved and saved.keep == 1:
        raise SpecError("checkpoint.keep 1: torchtitan keeps two or more, as the last one may be half written: give 2")
    if spec.rendezvous.fewest(len(plan.nodes)) < len(plan.nodes):
        raise SpecError("rendezvous.min_nodes: the axes and the batch of torchtitan are fixed: leave it out")
    return _cut_as_said(spec, job)


def _cut_as_said(spec: PipelineSpec, job: JobSpec) -> JobSpec:
    """Have a pass as many samples as the arguments say, where the spec does not say how a batch is cut."""
    said, batch = _said_in_arguments(spec).get("local_batch_size", ""), job.batch
    if batch is None or job.parallelism.pp > 1 or spec.parallelism.microbatches or not _DEGREE.fullmatch(said):
        return job
    passes, rest = divmod(batch.replica_size, int(said))
    return job if rest else replace(job, batch=replace(batch, microbatches=passes, micro_size=int(said)))


def describe_optimizer(spec: PipelineSpec, job: JobSpec) -> dict[str, int | float | str]:
    """Return its name among those of torch, and its numbers, in the words of 0.2.2."""
    name = _OPTIMIZERS[job.training.optimizer.lower()]
    return {"name": name, "lr": job.training.learning_rate, **_say_more(spec, "optimizer")}


def schedule_rate(spec: PipelineSpec, job: JobSpec) -> dict[str, int | float | str]:
    """Say how the learning rate goes, in torchtitan's words. Without a scheduler it decays as torchtitan has it."""
    kinds: dict[str | None, dict[str, int | float | str]] = {
        "constant": {"decay_ratio": 0.0},
        "linear": {"decay_type": "linear"},
        "cosine": {"decay_type": "cosine"},
        "wsd": {"decay_type": "linear", "decay_ratio": 0.2},  # the last fifth, as with our own
    }
    kind = {**kinds.get(job.training.scheduler, {}), **_say_more(spec, "lr_scheduler")}
    return {"warmup_steps": job.training.warmup_steps, **kind}


def lay_out(spec: PipelineSpec, job: JobSpec) -> dict[str, int | str]:
    """Return the degrees of all axes, and the schedule of a pipeline; what is left stays -1 for shards."""
    axes = job.parallelism
    said: dict[str, int | str] = {
        "data_parallel_replicate_degree": axes.dp_replicate,
        "data_parallel_shard_degree": -1 if spec.parallelism.dp_shard == -1 else axes.dp_shard,
        "tensor_parallel_degree": axes.tp,
        "pipeline_parallel_degree": axes.pp,
        **_say_more(spec, "parallelism"),  # type: ignore[dict-item]  # degrees, as the others
    }
    if axes.pp > 1:
        is_file = axes.schedule.endswith(".csv")
        said["pipeline_parallel_schedule"] = "PipelineScheduleMulti" if is_file else axes.schedule
        said |= {"pipeline_parallel_schedule_csv": axes.schedule} if is_file else {}
    return said


def say_checkpoints(job: JobSpec) -> dict[str, bool | int | str]:
    """Say when checkpoints are written, and where: torchtitan goes on from the newest one that is there."""
    if (saved := job.checkpoint) is None:
        return {"enable": False}
    interval = saved.interval or job.training.steps  # the last step is saved whatever the interval
    return {
        "enable": True,
        "folder": saved.url.removeprefix("./").removeprefix(_DUMP_FOLDER),
        **({"interval": interval} if interval else {}),
        "keep_latest_k": saved.keep or 0,
        "async_mode": "async" if saved.asynchronous else "disabled",
    }
