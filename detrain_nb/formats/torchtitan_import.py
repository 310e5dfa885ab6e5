"""torchtitan's TOML files, of three generations, as a spec that starts the same training with torchtitan 0.2.2.

0.2.2 is the last release that reads such files; it also accepts each key as an option. torchtitan does not read specs:
values with a field in a spec are put into it, and all values into ``source.arguments``.
"""

from __future__ import annotations

import posixpath
from typing import Any

from ..errors import SpecError
from ..plan.choices import SCHEDULERS, SCHEDULES
from .imported import Foreign, Imported, Importer
from .reading import Part, Whole
from .secret_words import warn_of_secrets
from .torchtitan_options import CHOICES, GONE, OPTIONS, name_today

_MODULE = "torchtitan.train"
_UNKNOWN = "torchtitan 0.2.2 has no such option"
_TOKENIZER = "torchtitan 0.2.2 does not read such files: give --model.hf_assets_path, a folder, in source.arguments"
# Values that a spec takes unchanged: the field, and torchtitan's default.
_FIELDS: dict[str, tuple[str, Any]] = {
    "job.description": ("description", None),
    "metrics.log_freq": ("training.log_every", 10),
    "optimizer.lr": ("training.learning_rate", 8e-4),
    "training.steps": ("training.steps", 10000),
    "debug.seed": ("training.seed", None),
    "compile.enable": ("parallelism.compile", False),
    "parallelism.data_parallel_replicate_degree": ("parallelism.dp_replicate", 1),
    "parallelism.data_parallel_shard_degree": ("parallelism.dp_shard", -1),
    "parallelism.pipeline_parallel_degree": ("parallelism.pp", 1),
    "parallelism.tensor_parallel_degree": ("parallelism.tp", 1),
}
_MOST_NAME_CHARS = 100  # longer than any option
_MARKS = ("job.dump_folder", "model.flavor", "training.seq_len", "training.dataset", "optimizer.lr")


def _is_one(foreign: Foreign) -> bool:
    document = foreign.document
    if not isinstance(document, dict) or "source" in document:  # "source" marks a spec
        return False
    tables = {section: table for section, table in document.items() if isinstance(table, dict)}
    return any(key in tables.get(section, ()) for section, key in (mark.split(".") for mark in _MARKS))


class _Titan:
    """The options of torchtitan 0.2.2 in a file, each with its place."""

    def __init__(self, whole: Whole) -> None:
        self.whole = whole
        self.arguments: list[str] = []
        self._places: dict[str, tuple[Part, str]] = {}
        self._take(whole, "")

    def _take(self, part: Part, above: str) -> None:
        for key in part:
            name = f"{above}{key}"
            if isinstance(part.look(key), dict):
                self._take(part.part(key), f"{name[:_MOST_NAME_CHARS]}.")  # copied for every option below it
            elif name in GONE:
                part.leave(key, GONE[name])
            elif name == "model.tokenizer_path" and str(part.look(key)).endswith(".model"):
                part.leave(key, _TOKENIZER)
            else:
                self._add(part, key, name_today(name))

    def _add(self, part: Part, key: str, name: str) -> None:
        if name not in OPTIONS:
            part.leave(key, _UNKNOWN)
            return
        if name in CHOICES and part.look(key) not in CHOICES[name]:
            part.leave(key, f"torchtitan 0.2.2 only accepts {', '.join(CHOICES[name])}")
            return
        if name in self._places:
            other, other_key = self._places[name]
            raise part.fault(key, f"is the same as {other.path}.{other_key}: leave out one")
        self._places[name] = part, key
        self.arguments.append(_write_option(part, key, name))

    def look(self, name: str, default: Any = None) -> Any:
        part, key = self._places.get(name, (None, ""))
        return default if part is None else part.look(key)

    def number(self, name: str, default: int) -> int:
        part, key = self._places.get(name, (None, ""))
        return default if part is None else part.whole_number(key, least=-1)

    def text(self, name: str, default: str = "") -> str:
        part, key = self._places.get(name, (None, ""))
        return default if part is None else part.text(key)

    def flag(self, name: str) -> bool:
        part, key = self._places.get(name, (None, ""))
        return part is not None and part.flag(key)

    def fault(self, name: str, said: str) -> SpecError:
        """Return the error for an option that is given."""
        part, key = self._places[name]
        return part.fault(key, said)

    def put(self, name: str, field: str, value: Any) -> None:
        """Put a value into a field of the spec; faults of it are reported at the option."""
        self.whole.put(field, value)
        if name in self._places:
            part, key = self._places[name]
            part.stands_for(key, field)


def _write_option(part: Part, key: str, name: str) -> str:
    value = part.take(key)
    if isinstance(value, bool):
        section, _, last = name.rpartition(".")
        return f"--{name}" if value else f"--{section}.no_{last}"
    if isinstance(value, list):
        if not all(isinstance(item, str) and "," not in item for item in value):
            raise part.fault(key, "give a list of texts without commas: torchtitan's option separates them by commas")
        value = ",".join(value)
    return f"--{name}={value}"


def _read(foreign: Foreign) -> Imported:
    whole = Whole(foreign)
    titan = _Titan(whole)
    whole.put("name", whole.name_after())
    whole.put("source", {"module": _MODULE, "arguments": titan.arguments})
    whole.notes += warn_of_secrets(titan.arguments)
    for name, (field, usual) in _FIELDS.items():
        if (value := titan.look(name, usual)) is not None:
            titan.put(name, field, value)
    _read_training(titan)
    _read_parallelism(titan)
    _read_checkpoint(titan)
    return whole.imported("torchtitan")


def _read_training(titan: _Titan) -> None:
    titan.put("optimizer.name", "training.optimizer", titan.text("optimizer.name", "AdamW").lower())
    warmup = titan.number("lr_scheduler.warmup_steps", 200)
    titan.put("lr_scheduler.warmup_steps", "training.warmup_steps", min(warmup, titan.number("training.steps", 10000)))
    decay = titan.text("lr_scheduler.decay_type", "linear")
    ratio = titan.look("lr_scheduler.decay_ratio")
    if isinstance(ratio, int | float):  # the fraction of the steps in which the rate decays
        decay = "wsd" if ratio else "constant"
    if decay in SCHEDULERS:
        titan.put("lr_scheduler.decay_type", "training.scheduler", decay)
    norm = titan.look("training.max_norm", 1.0)
    if not isinstance(norm, int | float) or norm > 0:  # 0 and less: no clipping
        titan.put("training.max_norm", "training.clip", norm)
    if titan.flag("validation.enable"):
        titan.put("validation.freq", "training.evaluate_every", titan.number("validation.freq", 10))


def _read_parallelism(titan: _Titan) -> None:
    axes = [f"parallelism.data_parallel_{kind}_degree" for kind in ("replicate", "shard")]
    for axis in (*axes, "parallelism.pipeline_parallel_degree", "parallelism.tensor_parallel_degree"):
        if titan.number(axis, 1) == 0:
            raise titan.fault(axis, "0: give a number of ranks, or -1 for the rest")
    replicas, shards = titan.number(axes[0], 1), titan.number(axes[1], -1)
    if titan.number("parallelism.context_parallel_degree", 1) > 1:
        shards = -1  # a spec has no such axis: its ranks become shards instead
        titan.put(axes[1], "parallelism.dp_shard", shards)
    batch, local = titan.number("training.global_batch_size", -1), titan.number("training.local_batch_size", 8)
    if batch < 1 and shards > 0 and replicas > 0:
        batch = local * shards * replicas
    if batch > 0:
        name = "training.global_batch_size" if titan.number("training.global_batch_size", -1) > 0 else ""
        titan.put(name or "training.local_batch_size", "training.batch_size", batch)
    if titan.number("parallelism.pipeline_parallel_degree", 1) > 1:
        size = titan.number("parallelism.pipeline_parallel_microbatch_size", 1)
        if size > 0 and local > 0 and local % size == 0:
            titan.put("parallelism.pipeline_parallel_microbatch_size", "parallelism.microbatches", local // size)
    elif min(local, replicas, shards) > 0:
        passes, rest = divmod(batch, local * replicas * shards)
        if passes > 1 and not rest:  # gradients are accumulated over the passes
            titan.put("training.local_batch_size", "parallelism.microbatches", passes)
    schedule = titan.text("parallelism.pipeline_parallel_schedule")
    if schedule.lower() in map(str.lower, SCHEDULES):
        titan.put("parallelism.pipeline_parallel_schedule", "parallelism.schedule", schedule)
    if csv := titan.text("parallelism.pipeline_parallel_schedule_csv"):
        titan.put("parallelism.pipeline_parallel_schedule_csv", "parallelism.schedule", csv)
    if (mode := titan.text("activation_checkpoint.mode", "selective")) in ("none", "selective", "full"):
        titan.put("activation_checkpoint.mode", "parallelism.activations", mode)
    precision = {"bfloat16": "bf16", "float32": "fp32"}.get(titan.text("training.mixed_precision_param", "bfloat16"))
    if precision:
        titan.put("training.mixed_precision_param", "parallelism.precision", precision)


def _read_checkpoint(titan: _Titan) -> None:
    if not titan.flag("checkpoint.enable"):
        return
    folders = titan.text("job.dump_folder", "./outputs"), titan.text("checkpoint.folder", "checkpoint")
    titan.put("checkpoint.folder", "checkpoint.url", posixpath.normpath(posixpath.join(*folders)))
    titan.put("checkpoint.interval", "checkpoint.interval", titan.number("checkpoint.interval", 500))
    titan.put("checkpoint.keep_latest_k", "checkpoint.keep", titan.number("checkpoint.keep_latest_k", 10) or "all")
    mode = titan.text("checkpoint.async_mode", "disabled")
    titan.put("checkpoint.async_mode", "checkpoint.asynchronous", mode != "disabled")


TORCHTITAN = Importer(_is_one, _read, "a torchtitan configuration in TOML, of 2024 to 0.2.2")
