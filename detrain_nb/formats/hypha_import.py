"""Hypha's jobs as specs: those of its RFC, in JSON or the RFC's notation, and those of its scheduler, in TOML."""

from __future__ import annotations

import re
from typing import Any

from .imported import Foreign, Imported, Importer
from .reading import Part, Whole, write_step
from .relaxed_json import read_relaxed

_SCRIPT = "torch_training.py"  # the script in the RFC
_NO_SCRIPT = f"source: a Hypha job has no script, as its workers bring their own: write {_SCRIPT}, with job_spec()"
_NOT_YET = 'belongs to DiLoCo: a spec so far has only the algorithm "sync", which synchronizes replicas in every step'
_ROUNDS = f"{_NOT_YET}; with max_batch_size, training.steps covers the same number of samples"
_PLACEHOLDER = "is a placeholder without a value"
_LEFT_OPEN = "left open"
_TOKEN = "a spec contains no token: name the variable that holds it in secrets"
_MARKET = "requirements and prices for Hypha's worker market: give nodes, each with its host"
_OF_NETWORK = "belongs to Hypha's own network: nodes are reached over SSH"
_BY_SCRIPT = "the script decides it"
_NO_SUCH_SCHEDULE = "a spec has no such learning rate schedule"

_IS_RFC = re.compile(r"""\btraining_definition["']?\s*:""")
_IS_PLACEHOLDER = re.compile(r"<[^<>]*>")
_SCHEDULES = {
    "cosine-with-warmup": "cosine",
    "linear-with-warmup": "linear",
    **{name: name for name in ("constant", "cosine", "linear", "wsd")},
}
_PRECISIONS = {"no": "fp32", "bf16": "bf16"}


def _is_one(foreign: Foreign) -> bool:
    return _is_scheduler(foreign) or (foreign.suffix != ".toml" and bool(_IS_RFC.search(foreign.text)))


def _is_scheduler(foreign: Foreign) -> bool:
    found = foreign.document.get("scheduler") if isinstance(foreign.document, dict) else None
    return isinstance(found, dict) and "job" in found


def _read(foreign: Foreign) -> Imported:
    whole = _read_scheduler(foreign) if _is_scheduler(foreign) else _read_rfc(foreign)
    whole.put("source.script", _SCRIPT)
    whole.notes.append(_NO_SCRIPT)
    return whole.imported("hypha")


# The RFC


def _read_rfc(foreign: Foreign) -> Whole:
    content, left_open = read_relaxed(foreign.text, where=foreign.name)
    placeholders: list[str] = []
    whole = Whole(foreign, _without_placeholders(content, "", placeholders))
    whole.notes += [f"{place}: {_PLACEHOLDER}" for place in dict.fromkeys(placeholders)]
    whole.notes += [f"{place}: {_LEFT_OPEN}" for place in dict.fromkeys(left_open)]
    if whole.text("driver", "torch_distributed") != "torch_distributed":
        raise whole.fault("driver", 'give "torch_distributed", the only one in the RFC')
    job = whole.text("job_id")
    whole.put("name", whole.name_after(job))
    if job and whole.fields["name"] != job:
        whole.leave("job_id", f"is not a valid pipeline name: replaced by {whole.fields['name']}")
    whole.carry("model", "model.url")
    data, training = whole.part("data"), whole.part("training_definition")
    data.carry("location", "data.url")
    if "location" in data:
        data.carry("chunk", "data.chunks")
    training.carry("loss_fn", "training.loss")
    training.leave("local_steps", _NOT_YET)
    training.carry("optimizer", "training.optimizer", training.text("optimizer").lower())
    _carry_schedule(training, "lr_scheduler")
    if isinstance(training.look("accelerate_config"), dict):
        config = training.part("accelerate_config")
        config.leave("num_processes", "is the number of ranks of a worker: give nodes, each with its ranks")
        if precision := _PRECISIONS.get(str(config.look("mixed_precision"))):
            config.carry("mixed_precision", "parallelism.precision", precision)
    return whole


def _without_placeholders(value: Any, place: str, found: list[str]) -> Any:
    """Return the value without its placeholders, and append their places to ``found``."""
    if isinstance(value, dict):
        return {key: _without_placeholders(item, write_step(place, key), found) for key, item in value.items()}
    if isinstance(value, list):
        items = [_without_placeholders(item, place, found) for item in value]
        return [item for item in items if item is not None] or (None if value else value)
    if isinstance(value, str) and _IS_PLACEHOLDER.fullmatch(value):
        found.append(place)
        return None
    return value


def _carry_schedule(part: Part, key: str) -> None:
    name = part.look(key)
    if isinstance(name, str) and name.lower() in _SCHEDULES:
        part.carry(key, "training.scheduler", _SCHEDULES[name.lower()])
    else:
        part.leave(key, _NO_SUCH_SCHEDULE)


# The scheduler


def _read_scheduler(foreign: Foreign) -> Whole:
    whole = Whole(foreign)
    scheduler = whole.part("scheduler")
    for part, known in ((whole, "scheduler"), (scheduler, "job")):
        for key in part:
            if key != known:
                part.leave(key, _OF_NETWORK)
    job = scheduler.part("job")
    if job.text("type", "diloco") != "diloco":
        raise job.fault("type", 'give "diloco", the only one in Hypha')
    job.leave("type", _NOT_YET)
    whole.put("name", whole.name_after())
    _read_model(job)
    _read_training(whole, job)
    job.leave("preprocessor", "a spec has no preprocessor: the script creates its own")
    job.leave("model_destination", "a job uploads nothing: fetch its files, or upload them in the script")
    job.leave("metrics", "a job records its own metrics")
    return whole


def _read_model(job: Part) -> None:
    model, dataset = job.part("model"), job.part("dataset")
    if "model" in job:
        model.need("repository")
        revision = model.text("revision")
        model.carry("repository", "model.url", f"hf://{model.text('repository')}{revision and '@' + revision}")
        model.carry("filenames", "model.chunks")
    model.leave("token", _TOKEN)
    for key in ("type", "input_names"):
        model.leave(key, _BY_SCRIPT)
    for part, key in ((job, "dataset_name"), (dataset, "dataset")):
        if key in part:
            part.carry(key, "data.url")  # data nodes name a dataset after its folder
            job.whole.put("data.format", "safetensors")


def _read_training(whole: Whole, job: Part) -> None:
    optimizer, rounds, resources = (job.part(key) for key in ("inner_optimizer", "rounds", "resources"))
    spellings = [key for key in ("learning-rate", "learning_rate") if key in optimizer]
    if len(spellings) == 2:
        raise optimizer.fault("learning_rate", "is also given as learning-rate: leave out one")
    for key in spellings:
        optimizer.carry(key, "training.learning_rate")
    if "schedule" in optimizer:
        _carry_schedule(optimizer, "schedule")
    optimizer.carry("warmup_steps", "training.warmup_steps")
    for key in job.part("outer_optimizer"):
        job.part("outer_optimizer").leave(key, _NOT_YET)
    workers = resources.whole_number("num_workers", 1, least=1, most=1 << 16)
    if "num_workers" in resources:
        whole.put("parallelism", {"dp_replicate": workers, "dp_shard": 1})
    for key in resources:
        if key != "num_workers":
            resources.leave(key, _MARKET)
    most = rounds.whole_number("max_batch_size", least=1 if "max_batch_size" in rounds else 0)
    if most:
        whole.put("training.batch_size", most * workers)
        rounds.stands_for("max_batch_size", "training.batch_size")
    keys = ("update_rounds", "avg_samples_between_updates")
    samples = [rounds.whole_number(key, least=1) for key in keys if key in rounds]
    if most and len(samples) == 2:
        whole.put("training.steps", max(1, samples[0] * samples[1] // (most * workers)))
        rounds.stands_for("update_rounds", "training.steps")
    for key in keys:
        rounds.leave(key, _ROUNDS)


HYPHA = Importer(_is_one, _read, "a Hypha job: of its RFC, or of its scheduler")
