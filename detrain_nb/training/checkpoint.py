"""Save the state of a training and resume from it, in the same layout of ranks or in another.

torch.distributed.checkpoint plans which rank writes and reads what (tensor_store.py is its storage); catalog.py has the
folders, state.py the names. Nothing that is read is unpickled or executed: tensors are in safetensors files, everything
else is JSON. Whoever can write at the URL decides the numbers that are loaded, and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ..errors import DetrainError, SpecError
from ..parallel import ParallelModel
from ..parallel.arguments import is_whole
from ..parallel.interrupts import HeldInterrupts
from ..storage import Location, locate, shown
from . import saving
from .catalog import MOST_STEPS, NOTE, Checkpoint, Checkpoints, list_checkpoints, read_note, step_folder
from .digests import Damaged
from .plain import from_json, to_json
from .randomness import random_state, set_random_state, set_seed
from .ranks import Ranks
from .reading import DRAWS, MAY_BE_WHOLE, MODEL, OPTIMIZER, RANDOM, Reading
from .saving import Saving
from .state import ModelState, OptimizerState
from .tensor_index import TensorIndex
from .tensor_store import JsonSavePlanner, StepWriter

_SHOWN_CHARS = 100  # of a value in a message


@dataclass(frozen=True)
class Loaded:
    """The result of a load. ``step``, ``data_position`` and ``extra`` are what `save` was given.

    ``name`` is the checkpoint's folder, ``saved_at`` is in seconds of Unix time.
    ``notes`` names what was not restored as saved: newer checkpoints that were skipped as damaged, random number
    generators that were reseeded. Rank 0 also warns of them.
    """

    step: int
    data_position: Any
    extra: Any
    name: str
    saved_at: float
    notes: tuple[str, ...] = field(default=())


def checkpoints(url: str, *, files: Any = None) -> Checkpoints:
    """List the checkpoints at ``url``, in the order in which they were saved; the list prints as a table.

    ``files``: an fsspec file system on which ``url`` is a path, see `storage.locate`. Raises: DetrainError.
    """
    return list_checkpoints(locate(url, files=files))


# ---- save


def save(
    url: str,
    model: Any,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    *,
    step: int,
    data_position: Any = None,
    extra: Any = None,
    keep: int | None = 3,
    is_async: bool = False,
    files: Any = None,
) -> Saving:
    """Save a checkpoint in its own folder under ``url``: all of it or none, even when the process is killed.

    ``model``: a module, sharded or wrapped by torch, or an object with ``modules`` that have the names of the whole
    model, such as PipelineStages. ``optimizer``: one over its parameters. ``scheduler``: of the learning rate, or any
    object whose state_dict has plain values. ``data_position``, ``extra``: plain values (numbers, text, lists, dicts,
    small tensors), the same on every rank. The states of each rank's random number generators are saved too. ``keep``:
    how many checkpoints are kept, those saved last; None: all. A tensor that is not a DTensor is assumed to be the same
    on all ranks that have its name.

    ``is_async``: return when everything is copied to CPU memory, which is kept for the next save as long as the model
    lives. The rest runs in the background; its error is raised by ``result()`` of the returned Saving, or by the next
    call. Only one job at a time may save at a URL: a save removes what earlier ones left unfinished.

    Collective: all ranks. Raises: SpecError for arguments that are invalid or differ between ranks, DetrainError when
    the checkpoint cannot be written, or the save before has failed.
    """
    ranks = saving.begin()
    if isinstance(model, ParallelModel):
        model.share_statistics()
    prepared: list[Any] = []

    def prepare() -> dict[str, Any]:
        if not is_whole(step) or not 0 <= step < MOST_STEPS:
            raise SpecError(f"step={step!r}: give a whole number of steps, 0 or more")
        if keep is not None and (not is_whole(keep) or keep < 1):
            raise SpecError(f"keep={keep!r}: give a whole number, 1 or more, or None for all")
        note = {
            "step": int(step),
            "data_position": to_json(data_position, "data_position"),
            "extra": to_json(extra, "extra"),
            "optimizer": None if optimizer is None else type(optimizer).__name__,
            "scheduler_kind": None if scheduler is None else type(scheduler).__name__,
            "scheduler": None if scheduler is None else to_json(scheduler.state_dict(), "scheduler"),
            "torch": str(torch.__version__),
        }
        place, state = locate(url, files=files), _whole_state(model, optimizer, ranks)
        prepared[:] = place, note, _staged(state) if is_async else state
        told = {key: note[key] for key in ("step", "data_position", "extra")}
        return {"url": place.name, "keep": None if keep is None else int(keep), "is_async": is_async, **told}

    _require_same(ranks.gather(prepare))
    place, note, state = prepared
    step = note["step"]
    writer = StepWriter(place, step, keep, note)
    return saving.start(step, place.name, functools.partial(_write, writer, state, ranks, step), is_async=is_async)


def _require_same(told: list[dict[str, Any]]) -> None:
    """Check that all ranks were given the same. Raises: SpecError that names two values that differ."""
    for rank, other in enumerate(told):
        for what, value in other.items():
            if value != told[0][what]:
                first, here = str(told[0][what])[:_SHOWN_CHARS], str(value)[:_SHOWN_CHARS]
                raise SpecError(f"{what} is {first} on rank 0 and {here} on rank {rank}: give the same on all ranks")


def _whole_state(model: Any, optimizer: torch.optim.Optimizer | None, ranks: Ranks) -> dict[str, Any]:
    model_state = ModelState(model)
    state = {MODEL + name: value for name, value in model_state.in_saved_order().items()}
    if optimizer is not None:
        values = OptimizerState(optimizer, model_state).values()
        state |= {OPTIMIZER + key: value for key, value in values.items()}
    numbers = {**random_state(), DRAWS: model_state.draws}
    state |= {f"{RANDOM}{ranks.rank}/{key}": value for key, value in numbers.items()}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            to_json(value, key)  # now, and not in the background
    return state


def _staged(state: dict[str, Any]) -> dict[str, Any]:
    """Copy the state to CPU memory until the next save; tensors that share memory still do in the copy."""
    try:
        return _stager().stage(state)  # type: ignore[return-value]  # no future without async
    except (AssertionError, KeyError):  # a storage has changed its size since the last save; torch 2.11 copies once
        _stager.cache_clear()
        return _stager().stage(state)  # type: ignore[return-value]


@functools.cache
def _stager() -> DefaultStager:
    """Make the stager; it keeps its copies while the tensors live: allocating costs several times what copying does."""
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )


def _write(writer: StepWriter, state: dict[str, Any], ranks: Ranks, step: int) -> None:
    planner = JsonSavePlanner()
    if ranks.group is None:  # does what dcp.save does, which would warn that there is one process
        planner.set_up_planner(state, is_coordinator=True)
        plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
        writer.finish(metadata, [writer.write_data(plan, planner).wait()])
        return
    try:
        dcp.save(state, storage_writer=writer, planner=planner, process_group=ranks.group)
    except CheckpointException as exc:
        rank, (cause, _) = min(exc.failures.items())
        kind = "" if isinstance(cause, DetrainError) else f"{type(cause).__name__}: "
        of_torch = None if isinstance(cause, DetrainError) else exc  # our own text says it all
        raise DetrainError(f"the checkpoint of step {step} was not saved: rank {rank}: {kind}{cause}") from of_torch
    except RuntimeError as exc:  # a rank has died
        raise DetrainError(f"the checkpoint of step {step} was not saved: {exc}") from exc


# ---- load


def load(
    url: str,
    model: Any,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    *,
    step: int | None = None,
    is_random_state_wanted: bool = True,
    files: Any = None,
) -> Loaded:
    """Load the checkpoint that was saved last, or that of ``step``, into the given objects, whatever their layout.

    A checkpoint that is damaged for any rank is skipped, with a warning, for the one before it; with ``step`` it is an
    error. A store or disk that does not answer is an error too: the checkpoint may be intact. Saved parts that are not
    requested, such as an optimizer, are not read. When the number of ranks is the saved one, each rank's random numbers
    continue; otherwise all ranks are seeded alike, and a note reports it.

    Before anything is changed, the names and shapes of the whole model are compared, everything requested is read and
    compared with its digests, and the scheduler's state is compared with its present one. Then the model's part is read
    once more, into place: a load needs memory for a second optimizer state, but not for a second model. An interrupt
    during this is raised when everything is loaded; with several ranks, load again after an interrupt. Older
    checkpoints have no digests: their contents are not compared. Nothing that is read is unpickled or executed: whoever
    can write there decides the numbers, and nothing else.

    Collective: all ranks. Raises: SpecError when the checkpoint does not exist or does not match the model,
    DetrainError when it is damaged or cannot be read, or the save before has failed.
    """
    ranks = saving.begin()
    places: list[Location] = []

    def locate_it() -> dict[str, Any]:
        places[:] = [locate(url, files=files)]
        return {"url": places[0].name, "step": step, "is_random_state_wanted": bool(is_random_state_wanted)}

    _require_same(ranks.gather(locate_it))
    chosen, note, reading, passed = _find_whole(
        ranks, places[0], step, (model, optimizer, scheduler), is_random_state_wanted
    )
    notes = tuple(f"{name} was skipped: {why}" for name, why in passed.items())
    # Not with other ranks: an interrupt must be able to free a rank that waits for a dead one.
    with contextlib.nullcontext() if ranks.group is not None else HeldInterrupts():
        reading.take()
        if is_random_state_wanted:
            notes += _go_on_randomly(reading.random_values, note, ranks, reading.model_state)
    for each in notes if ranks.rank == 0 else ():
        warnings.warn(each, stacklevel=2)
    plain = {key: from_json(note[key]) for key in ("data_position", "extra")}
    return Loaded(step=chosen.step, name=chosen.name, saved_at=chosen.saved_at, notes=notes, **plain)


def _find_whole(
    ranks: Ranks, place: Location, step: int | None, parts: tuple[Any, Any, Any], is_random_state_wanted: bool
) -> tuple[Checkpoint, dict[str, Any], Reading, dict[str, str]]:
    """Return the first checkpoint that is intact for all ranks, its note, its Reading, and what was skipped for it.

    Collective: all ranks. Raises: SpecError, DetrainError.
    """
    passed: dict[str, str] = {}
    listed = functools.cache(functools.partial(list_checkpoints, place))  # once, not again for each damaged checkpoint
    while True:
        choose = functools.partial(_choose, place, listed, step, passed)
        chosen, note, index, passed = ranks.first(choose)
        try:
            reading = Reading(step_folder(place, chosen.step), chosen, note, index, ranks, *parts)
        except SpecError as exc:
            raise SpecError(f"{exc}{_reasons(passed)}") from exc
        wrong = reading.find_damage(is_random_state_wanted=is_random_state_wanted)
        if not wrong:
            return chosen, note, reading, passed
        passed = {**passed, chosen.name: wrong}


def _choose(
    place: Location, listed: Callable[[], Checkpoints], step: int | None, passed: Mapping[str, str]
) -> tuple[Checkpoint, dict[str, Any], TensorIndex, dict[str, str]]:
    """Return the checkpoint to load, its note, its index and, by name, why others are skipped.

    Those in ``passed`` are skipped already. Raises: SpecError, DetrainError.
    """
    if not place.exists():
        raise SpecError(f"{place.name} does not exist: give the URL that was saved to")
    there = listed()
    found = there if step is None else Checkpoints(each for each in there if each.step == step)
    wrong = dict(passed)
    for each in sorted(found, key=lambda each: (each.serial < 0, each.serial, each.step), reverse=True):
        if each.name in wrong:
            continue
        try:
            if each.is_unknown:
                raise DetrainError(each.wrong)
            if each.wrong:
                raise Damaged(each.wrong)
            folder = step_folder(place, each.step)
            note = read_note(folder)
            index = TensorIndex.read(folder, note["index"], note["files"], digest=note.get("index_crc32"))
            _check_note(note)
        except Damaged as exc:
            wrong[each.name] = str(exc)
        except DetrainError as exc:
            raise DetrainError(f"{exc}{MAY_BE_WHOLE}") from exc
        else:
            return each, note, index, wrong
    others = ", ".join(str(each.step) for each in there if each.is_complete and each.name not in wrong) or "none"
    if not there and NOTE in place.names():
        raise SpecError(f"{place.name} is the folder of one checkpoint: give its parent folder, with step=")
    if step is None:
        raise SpecError(f"{place.name} has no checkpoint that can be loaded{_reasons(wrong)}")
    if not found:
        raise SpecError(f"{place.name} has no checkpoint of step {step}; complete steps: {others}")
    raise DetrainError("".join(f"{name} is damaged: {why}; complete steps: {others}" for name, why in wrong.items()))


def _reasons(passed: Mapping[str, str]) -> str:
    return "".join(f"; {name} was skipped: {why}" for name, why in passed.items())


def _check_note(note: Mapping[str, Any]) -> None:
    """Check that a note's values can be read, before anything is changed. Raises: Damaged."""
    try:
        _ = note["optimizer"], [from_json(note[key]) for key in ("data_position", "extra", "scheduler")]
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as exc:
        raise Damaged(f"{NOTE} cannot be read: {type(exc).__name__}: {shown(str(exc))}") from exc


# ---- random numbers


def _go_on_randomly(
    values: Mapping[str, Any], note: Mapping[str, Any], ranks: Ranks, model_state: ModelState
) -> tuple[str, ...]:
    saved = note["world_size"]
    wrong, draws = "", []
    if saved == ranks.size:
        try:
            set_random_state(values)
            draws = [int(each) for each in values.get(DRAWS, [])]
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, OverflowError) as exc:
            wrong = f"its random number state is invalid ({type(exc).__name__})"
    if not all(ranks.gather(lambda: not wrong)):
        wrong = wrong or "another rank's random number state is invalid"
    elif saved == ranks.size:
        model_state.draws = draws
        return ()
    seed = 1_000_003 * note["serial"] + note["step"]
    set_seed(seed)
    model_state.draws = [seed] * len(model_state.modules)
    why = wrong or f"saved by {saved} ranks, loaded by {ranks.size}"
    return (f"{why}: random number generators were reseeded with {seed} on all ranks",)
