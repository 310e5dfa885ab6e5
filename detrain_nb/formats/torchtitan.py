"""A pipeline as a torchtitan configuration: the Python function that it takes now, and the TOML of older releases."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..documents import format_document
from ..errors import SpecError
from ..plan import Plan
from ..plan.job import JobSpec
from ..plan.targets import CHOICES
from ..spec import PipelineSpec
from .configuration import write_head
from .job_script import describe
from .torchtitan_settings import (
    Options,
    check_job,
    describe_arguments,
    describe_optimizer,
    lay_out,
    list_used,
    read_options,
    say_checkpoints,
    schedule_rate,
)

__all__ = ["export", "export_toml"]

# The modules of torchtitan's names in that function.
_HOMES = {
    "CheckpointManager": "torchtitan.components.checkpointer",
    "ConcatThenSplitPackingConfig": "torchtitan.components.data",
    "GrainDataLoader": "torchtitan.components.data",
    "ChunkedLossWrapper": "torchtitan.components.loss",
    "CrossEntropyLoss": "torchtitan.components.loss",
    "MetricsProcessor": "torchtitan.components.metrics",
    "LRSchedulersContainer": "torchtitan.components.optimizer",
    "default_adamw": "torchtitan.components.optimizer",
    "Validator": "torchtitan.components.validate",
    "CompileConfig": "torchtitan.config",
    "DebugConfig": "torchtitan.config",
    "ParallelismConfig": "torchtitan.config",
    "TrainingConfig": "torchtitan.config",
    "FullAC": "torchtitan.distributed.activation_checkpoint",
    "SelectiveAC": "torchtitan.distributed.activation_checkpoint",
    "DATASETS": "torchtitan.hf_datasets.text_datasets",
    "HuggingFaceTextDataLoader": "torchtitan.hf_datasets.text_datasets",
    "decoder_vocab_size": "torchtitan.models.common.config_utils",
    "Trainer": "torchtitan.trainer",
}


def export_toml(
    spec: PipelineSpec,
    plan: Plan,
    **given: str,
) -> str:
    """Return the file for ``--job.config_file``, with the sections of v0.2.2; ``given`` are options.

    Raises: SpecError for a spec that torchtitan cannot train.
    """
    options = read_options(spec, given)
    job = check_job(spec, plan)
    how, axes = job.training, job.parallelism
    content: dict[str, Any] = {
        "job": {"description": spec.description or spec.name},
        "metrics": {"log_freq": how.log_every},
        "model": {"name": options.model, "flavor": options.flavor, "hf_assets_path": options.hf_assets},
        "optimizer": describe_optimizer(spec, job),
        "lr_scheduler": schedule_rate(spec, job),
        "training": {**_count_samples(job, options), **_train(job), "dataset": options.dataset},
        "parallelism": {**lay_out(spec, job), **_size_microbatches(job)},
        "checkpoint": say_checkpoints(job),
        "activation_checkpoint": {"mode": axes.activations},
        "compile": {"enable": axes.compile},
        "validation": {"enable": how.evaluate_every is not None, **_every(how.evaluate_every)},
        "debug": {"seed": how.seed},
    }
    run = f"torchtitan of 2025, up to v0.2.2: torchrun ... -m torchtitan.train --job.config_file {spec.name}.toml"
    head = write_head(
        spec, f"{describe(spec, plan)}. For {run}", used=(*list_used(spec), "description"), by="torchtitan"
    )
    return "\n".join([*head, *describe_arguments(spec)]) + "\n" + format_document(content, ".toml")


def _every(steps: int | None) -> dict[str, int]:
    return {"freq": steps} if steps else {}


def _train(job: JobSpec) -> dict[str, Any]:
    """Return the settings of training that have the same names in both forms."""
    how, precision = job.training, job.parallelism.precision
    return {
        **({"max_norm": how.clip} if how.clip is not None else {}),
        **({"steps": how.steps} if how.steps is not None else {}),
        **({"mixed_precision_param": {"bf16": "bfloat16", "fp32": "float32"}[precision]} if precision else {}),
    }


def _count_samples(job: JobSpec, options: Options) -> dict[str, int]:
    """Count a replica's samples per forward pass: a pipeline splits them; without one, gradients are accumulated."""
    said, batch, local = {"seq_len": options.seq_len}, job.batch, options.local_batch_size
    if batch is None:
        return {"local_batch_size": local, **said} if local else said
    local = batch.replica_size if job.parallelism.pp > 1 else batch.micro_size
    return {"local_batch_size": local, "global_batch_size": batch.global_size, **said}


def _size_microbatches(job: JobSpec) -> dict[str, int]:
    return {"pipeline_parallel_microbatch_size": job.batch.micro_size} if job.batch and job.parallelism.pp > 1 else {}


# In Python


def export(
    spec: PipelineSpec,
    plan: Plan,
    *,
    release: str = "0.3",
    **given: str,
) -> str:
    """Return a module with a function that builds torchtitan's configuration; ``given`` are options.

    ``release`` is "0.3", or "main", which counts tokens instead of samples. Raises: SpecError for a spec that
    torchtitan cannot train.
    """
    if release not in CHOICES["release"]:
        raise SpecError(f"--release {release!r}: give 0.3, or main for the main branch of 2026-08")
    options, job = read_options(spec, given), check_job(spec, plan, optimizers=("adamw",))
    name, config = _name_function(spec), _configure(spec, job, options, release)
    lines = [
        f"def {name}() -> Trainer.Config:",
        f"    model_spec = model_registry({_write(options.flavor, indent=0)})",
        f"    return {_write(config, indent=1)}",
    ]
    used = {word for word in re.findall(r"\w+", "\n".join(lines)) if word in _HOMES}
    run = f"torchrun ... -m torchtitan.train --module NAME_OF_THIS_MODULE --config {name}"
    which = "torchtitan 0.3" if release == "0.3" else "the main branch of torchtitan in 2026-08"
    head = write_head(spec, f"{describe(spec, plan)}. For {which}: {run}", used=list_used(spec), by="torchtitan")
    return "\n".join([*head, *describe_arguments(spec), *_write_imports(used, options.model), "", "", *lines]) + "\n"


def _name_function(spec: PipelineSpec) -> str:
    name = re.sub(r"\W", "_", spec.name, flags=re.ASCII)
    is_other = keyword.iskeyword(name) or name[0].isdigit() or name in (*_HOMES, "model_registry")
    return f"config_{name}" if is_other else name


@dataclass(frozen=True)
class _Call:
    """A name of torchtitan, called with keywords; with None, the name alone."""

    name: str
    keywords: Mapping[str, Any] | None = None


def _write(value: Any, *, indent: int) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # also valid Python
    if not isinstance(value, _Call) or value.keywords is None:
        return value.name if isinstance(value, _Call) else repr(value)
    margin = "    " * indent
    words = [f"{name}={_write(each, indent=indent + 1)}" for name, each in value.keywords.items()]
    if len(words) < 2 and "\n" not in "".join(words):
        return f"{value.name}({''.join(words)})"
    return "\n".join([f"{value.name}(", *(f"{margin}    {word}," for word in words), f"{margin})"])


def _write_imports(used: set[str], model: str) -> Iterator[str]:
    homes = {home: sorted(name for name in used if _HOMES[name] == home) for home in _HOMES.values()}
    yield from (f"from {home} import {', '.join(names)}" for home, names in homes.items() if names)
    yield f"from torchtitan.models.{model} import model_registry"


def _configure(spec: PipelineSpec, job: JobSpec, options: Options, release: str) -> _Call:
    how, axes = job.training, job.parallelism
    loss = _Call("CrossEntropyLoss.Config", {"global_vocab_size": _Call("decoder_vocab_size(model_spec)")})
    kept = {"none": None, "selective": _Call("SelectiveAC.Config", {}), "full": _Call("FullAC.Config", {})}
    if release == "main":
        packed = _Call("ConcatThenSplitPackingConfig", {"dataset": _Call(f'DATASETS["{options.dataset}"]')})
        data = _Call("GrainDataLoader.Config", {"dataset": packed})
        batch, microbatches = _count_tokens(job, options), _count_microbatches(job)
    else:
        data = _Call("HuggingFaceTextDataLoader.Config", {"dataset": options.dataset})
        batch, microbatches = _count_samples(job, options), _size_microbatches(job)
    without_graphs = {"disable_cuda_graphs": True} if axes.pp > 1 else {}  # torchtitan refuses them with a pipeline
    validation = {"enable": True, **_every(how.evaluate_every)}
    keywords = {
        "loss": _Call("ChunkedLossWrapper.Config", {"loss_fn": loss}),
        "hf_assets_path": options.hf_assets,
        "model_spec": _Call("model_spec"),
        "optimizer": _Call("default_adamw", _name_betas(describe_optimizer(spec, job))),
        "lr_scheduler": _Call("LRSchedulersContainer.Config", schedule_rate(spec, job)),
        "training": _Call("TrainingConfig", {**batch, **_train(job), **without_graphs}),
        "dataloader": data,
        "parallelism": _Call("ParallelismConfig", {**lay_out(spec, job), **microbatches}),
        "checkpoint": _Call("CheckpointManager.Config", say_checkpoints(job)),
        "activation_checkpoint": kept[axes.activations],
        "compile": _Call("CompileConfig", {"enable": axes.compile}),
        "metrics": _Call("MetricsProcessor.Config", {"log_freq": how.log_every}),
        "debug": _Call("DebugConfig", {"seed": how.seed}),
        **({"validator": _Call("Validator.Config", validation)} if how.evaluate_every else {}),
    }
    return _Call("Trainer.Config", keywords)


def _name_betas(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of AdamW under torch's names."""
    betas = {"betas": (said.get("beta1", 0.9), said.get("beta2", 0.95))} if {"beta1", "beta2"} & said.keys() else {}
    return {"lr": said["lr"], **betas, **{name: said[name] for name in ("eps", "weight_decay") if name in said}}


def _count_tokens(job: JobSpec, options: Options) -> dict[str, int]:
    """Count a replica's tokens per forward pass, or per microbatch of its pipeline."""
    said, batch, local = {"max_context_length": options.seq_len}, job.batch, options.local_batch_size
    if batch is None and local and job.parallelism.pp == 1:
        return {"num_tokens_per_microbatch_per_dp_rank": local * options.seq_len, **said}
    if batch is None:
        return said
    counts = {
        "num_tokens_per_microbatch_per_dp_rank": batch.micro_size,
        "num_tokens_per_train_step": batch.global_size,
    }
    return {**{name: count * options.seq_len for name, count in counts.items()}, **said}


def _count_microbatches(job: JobSpec) -> dict[str, int]:
    return {"num_pp_microbatches": job.batch.microbatches} if job.batch and job.parallelism.pp > 1 else {}
