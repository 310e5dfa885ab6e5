"""The settings of a spec for torchtitan, shared by both forms of its configuration."""

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
_ARGUMENTS = {  # options of torchtitan 0.2.2 that have no field in a spec
    "model": "model.name",
    "flavor": "model.flavor",
    "seq_len": "training.seq_len",
    "hf_assets": "model.hf_assets_path",
    "dataset": "training.dataset",
    "local_batch_size": "training.local_batch_size",
}
_RATIO, _DEGREE = re.compile(r"(?:0?\.[0-9]{1,12}|1(?:\.0)?)"), re.compile(r"[1-9][0-9]{0,5}")
_NUMBER = re.compile(r"(?:[0-9]{1,6}\.?[0-9]{0,20}|\.[0-9]{1,20})(?:[eE][+-]?[0-9]{1,2})?")
_MORE: dict[str, dict[str, tuple[re.Pattern[str], type]]] = {  # with the same names in current torchtitan
    "lr_scheduler": {
        "decay_ratio": (_RATIO, float),
        "decay_type": (re.compile("linear|sqrt|cosine"), str),
        "min_lr_factor": (_NUMBER, float),
    },
    "optimizer": dict.fromkeys(("beta1", "beta2", "eps", "weight_decay"), (_NUMBER, float)),
    "parallelism": {f"{axis}_parallel_degree": (_DEGREE, int) for axis in ("context", "expert")},
}
_DUMP_FOLDER = "outputs/"  # torchtitan resolves relative paths against it
_PATH = re.compile(r"[^\x00-\x1f\x7f]{1,1000}")
_USED = (
    *(f"training.{name}" for name in ("steps", "batch_size", "learning_rate", "optimizer", "loss", "scheduler")),
    *(f"training.{name}" for name in ("warmup_steps", "clip", "seed", "log_every", "evaluate_every", "dev")),
    *(f"parallelism.{name}" for name in ("pp", "dp_replicate", "dp_shard", "tp", "schedule", "microbatches")),
    *(f"parallelism.{name}" for name in ("activations", "compile", "precision", "algorithm")),
    *(f"checkpoint.{name}" for name in ("url", "interval", "keep", "asynchronous")),
    *(f"nodes.{name}" for name in ("name", "host", "ranks", "devices")),  # given by whoever starts torchtitan
)


def list_used(spec: PipelineSpec) -> list[str]:
    """Return the fields that the configuration uses, and those that name torchtitan's program."""
    used = [*_USED, *(["source.module"] if spec.source.module == _PROGRAM else [])]
    unused = list_unused_in_dev(spec)
    return [name for name in used if name not in unused and name.partition(".")[0] not in unused]


@dataclass(frozen=True)
class Options:
    """Settings that no field of a spec has, with torchtitan's own defaults."""

    model: str = "llama3"
    flavor: str = "debugmodel"
    seq_len: int = 2048
    hf_assets: str = "./tests/assets/tokenizer"
    dataset: str = "c4_test"
    local_batch_size: int | None = None  # used if no global batch is given


def read_options(spec: PipelineSpec, given: Mapping[str, str]) -> Options:
    """Return the options ``given``, else those in ``source.arguments`` for torchtitan. Raises: SpecError."""
    said = {**_said_in_arguments(spec), **{name: value for name, value in given.items() if value}}
    model, flavor, dataset = (said.get(name, "") for name in ("model", "flavor", "dataset"))
    seq_len, hf_assets, local = (said.get(name, "") for name in ("seq_len", "hf_assets", "local_batch_size"))
    for name, value in {"model": model, "flavor": flavor, "dataset": dataset}.items():
        if value and not (_MODULE if name == "model" else _NAME).fullmatch(value):
            raise SpecError(f"--{name} {value!r}: give a name that torchtitan has, such as {getattr(Options, name)}")
    if seq_len and not re.fullmatch(r"[1-9][0-9]{0,8}", seq_len):
        raise SpecError(f"--seq-len {seq_len!r}: give a number of tokens, such as 8192")
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
    """Return a comment that lists torchtitan's own arguments in the file, as most have no field in a spec."""
    more = [f"{section}.{name}" for section in _MORE for name in _say_more(spec, section)]
    said = ", ".join(f"--{name}" for name in [*(_ARGUMENTS[name] for name in _said_in_arguments(spec)), *more])
    return [f"# Taken from source.arguments, unless an option of the export overrides it: {said}."] if said else []


def _said_in_arguments(spec: PipelineSpec) -> dict[str, str]:
    """Return the options in the arguments, by their names here."""
    said = _read_arguments(spec)
    return {name: said[option] for name, option in _ARGUMENTS.items() if option in said}


def _say_more(spec: PipelineSpec, section: str) -> dict[str, int | float | str]:
    """Return the arguments of a section of torchtitan that the fields of the spec do not cover."""
    arguments, said = _read_arguments(spec), {}
    for name, (form, kind) in _MORE[section].items():
        value = arguments.get(f"{section}.{name}", "")
        if form.fullmatch(value) and (spec.training.scheduler == "wsd" or not name.startswith("decay_")):
            said[name] = kind(value)
    return said


def _read_arguments(spec: PipelineSpec) -> dict[str, str]:
    """Parse torchtitan's arguments, such as ``--model.flavor=8B`` or in two words; the last one wins."""
    if spec.source.module != _PROGRAM:
        return {}
    words = spec.source.arguments
    said: dict[str, str] = {}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        option, equals, value = word.partition("=")
        said[option.removeprefix("--")] = value if equals else following
    return said


def check_job(spec: PipelineSpec, plan: Plan, *, optimizers: Collection[str] = ("adamw", "adam")) -> JobSpec:
    """Return the resolved spec of the job. Raises: SpecError for a spec that torchtitan cannot train."""
    job = spec.job_spec(plan)
    how, saved = job.training, job.checkpoint
    if how.epochs is not None:
        raise SpecError(f"training.epochs {how.epochs}: torchtitan counts steps: give training.steps")
    if how.optimizer.lower() not in optimizers:
        raise SpecError(
            f"training.optimizer {how.optimizer!r}: this torchtitan format does not support it: "
            f"give {' or '.join(optimizers)}"
        )
    if how.loss not in (None, "cross_entropy"):
        raise SpecError(f"training.loss {how.loss!r}: torchtitan has only cross_entropy: give that, or leave it out")
    if how.scheduler is not None and how.steps is None:
        raise SpecError(f"training.scheduler {how.scheduler!r}: needs the number of steps: give training.steps")
    if saved and ("://" in saved.url or saved.url.startswith("~")):
        raise SpecError(
            f"checkpoint.url {saved.url}: torchtitan writes to a folder that all ranks share: give its absolute path"
        )
    if saved and saved.keep == 1:
        raise SpecError("checkpoint.keep 1: torchtitan keeps two or more, as the last may be incomplete: give 2")
    if spec.rendezvous.fewest(len(plan.nodes)) < len(plan.nodes):
        raise SpecError("rendezvous.min_nodes: torchtitan fixes its axes and batch: leave it out")
    return _cut_as_said(spec, job)


def _cut_as_said(spec: PipelineSpec, job: JobSpec) -> JobSpec:
    """Return the job with the arguments' samples per pass, if the spec itself does not split the batch."""
    said, batch = _said_in_arguments(spec).get("local_batch_size", ""), job.batch
    if batch is None or job.parallelism.pp > 1 or spec.parallelism.microbatches or not _DEGREE.fullmatch(said):
        return job
    passes, rest = divmod(batch.replica_size, int(said))
    return job if rest else replace(job, batch=replace(batch, microbatches=passes, micro_size=int(said)))


def describe_optimizer(spec: PipelineSpec, job: JobSpec) -> dict[str, int | float | str]:
    """Return the optimizer's name in torch, and its settings, under the names of 0.2.2."""
    name = _OPTIMIZERS[job.training.optimizer.lower()]
    return {"name": name, "lr": job.training.learning_rate, **_say_more(spec, "optimizer")}


def schedule_rate(spec: PipelineSpec, job: JobSpec) -> dict[str, int | float | str]:
    """Return torchtitan's settings of the learning rate's schedule; without a scheduler its own default decay holds."""
    kinds: dict[str | None, dict[str, int | float | str]] = {
        "constant": {"decay_ratio": 0.0},
        "linear": {"decay_type": "linear"},
        "cosine": {"decay_type": "cosine"},
        "wsd": {"decay_type": "linear", "decay_ratio": 0.2},  # the last fifth, as our own scheduler does
    }
    kind = {**kinds.get(job.training.scheduler, {}), **_say_more(spec, "lr_scheduler")}
    return {"warmup_steps": job.training.warmup_steps, **kind}


def lay_out(spec: PipelineSpec, job: JobSpec) -> dict[str, int | str]:
    """Return the degrees of all axes, and a pipeline's schedule; a dp_shard of -1 (the rest) stays -1."""
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
    """Return when and where checkpoints are saved: torchtitan resumes from the newest one that exists."""
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
