"""Save what training needs to go on, and go on from it, in this layout of ranks or in another.

torch.distributed.checkpoint plans who writes and reads what (tensor_store.py is the storage that it is given);
catalog.py has the folders, state.py the names. Nothing that is read is unpickled or run: tensors are safetensors files,
all else is JSON. Who can write at the URL decides the numbers that are loaded, and nothing else.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ..errors import DetrainError, SpecError
from ..parallel import ParallelModel
from ..storage import Location, locate
from . import saving
from .catalog import NOTE, Checkpoint, Checkpoints, list_checkpoints, step_folder
from .plain import from_json, to_json
from .randomness import random_state, seed_all, set_random_state
from .ranks import Ranks
from .saving import Saving
from .state import ModelState, OptimizerState
from .tensor_index import TensorIndex
from .tensor_store import JsonSavePlanner, StepWriter, read_tensors

__all__ = ["Loaded", "checkpoints", "load", "save"]

_MODEL, _OPTIMIZER, _RANDOM = "model/", "optimizer/", "random/"
_DRAWS = "tensor_parallel"  # among a rank's random numbers
_SHOWN = 4  # names in a message
_SHOWN_CHARS = 100  # of a value in a message


@dataclass(frozen=True)
class Loaded:
    """What was loaded. ``data_position`` and ``extra`` are as they were given to `save`; ``name`` is where it was.

    ``notes`` says what is not as it was: newer checkpoints that are broken, random numbers that were seeded anew;
    rank 0 warns of them too.
    """

    step: int
    data_position: Any
    extra: Any
    name: str
    saved_at: float
    notes: tuple[str, ...] = field(default=())


def checkpoints(url: str, *, files: Any = None) -> Checkpoints:
    """List the checkpoints at ``url``, in the order in which they were saved; the list is shown as a table.

    ``files``: a file system of fsspec that ``url`` is a path on, as `storage.locate` has it. Raises: DetrainError.
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
    """Save a checkpoint in a folder of its own under ``url``; it is there whole, or not at all, whenever we are killed.

    ``model``: a module, sharded or wrapped as torch does it, or what has ``modules`` with the names of the whole model,
    as PipelineStages. ``optimizer``: one over its parameters. ``scheduler``: of the learning rate, or anything with a
    state_dict of plain values. ``data_position``, ``extra``: plain values (numbers, text, lists, dicts, small tensors),
    the same on every rank. The random number generators of each rank are saved too. ``keep``: this many, those saved
    last, stay; None: all. A tensor that is no DTensor is taken to be the same on all ranks that have its name.

    ``is_async``: return when all is copied to the CPU's memory, which is kept for the next save as long as the model
    lives; the rest is done beside training, and its error is raised by ``result()`` of what is returned, or by the next
    call. Only one job may save at a URL at a time: what its
    saves have left half done goes with the next.

    Collective: all ranks. Raises: SpecError, DetrainError.
    """
    ranks = saving.begin()
    if isinstance(model, ParallelModel):
        model.share_statistics()
    prepared: list[Any] = []

    def prepare() -> dict[str, Any]:
        if type(step) is not int or step < 0:
            raise SpecError(f"step {step!r} is no number of steps: give an int, 0 or more")
        if keep is not None and (type(keep) is not int or keep < 1):
            raise SpecError(f"keep={keep!r}: at least 1 checkpoint stays, or all (None)")
        note = {
            "step": step,
            "data_position": to_json(data_position, "data_position"),
            "extra": to_json(extra, "extra"),
            "optimizer": None if optimizer is None else type(optimizer).__name__,
            "scheduler": None if scheduler is None else to_json(scheduler.state_dict(), "scheduler"),
            "torch": str(torch.__version__),
        }
        place, state = locate(url, files=files), _whole_state(model, optimizer, ranks)
        prepared[:] = place, note, _staged(state) if is_async else state
        told = {key: note[key] for key in ("step", "data_position", "extra")}
        return {"url": place.name, "keep": keep, "is_async": is_async, **told}

    _require_same(ranks.gather(prepare))
    place, note, state = prepared
    writer = StepWriter(place, step, keep, note)
    return saving.start(step, place.name, functools.partial(_write, writer, state, ranks, step), is_async=is_async)


def _require_same(told: list[dict[str, Any]]) -> None:
    """Raises: SpecError for what is not given alike on all ranks."""
    for rank, other in enumerate(told):
        for what, value in other.items():
            if value != told[0][what]:
                first, here = str(told[0][what])[:_SHOWN_CHARS], str(value)[:_SHOWN_CHARS]
                raise SpecError(f"{what} is {first} on rank 0 and {here} on rank {rank}: give the same on all ranks")


def _whole_state(model: Any, optimizer: torch.optim.Optimizer | None, ranks: Ranks) -> dict[str, Any]:
    model_state = ModelState(model)
    state = {_MODEL + name: value for name, value in model_state.in_saved_order().items()}
    if optimizer is not None:
        values = OptimizerState(optimizer, model_state).values()
        state |= {_OPTIMIZER + key: value for key, value in values.items()}
    numbers = {**random_state(), _DRAWS: model_state.draws}
    state |= {f"{_RANDOM}{ranks.rank}/{key}": value for key, value in numbers.items()}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            to_json(value, key)  # now, and not in the background
    return state


def _staged(state: dict[str, Any]) -> dict[str, Any]:
    """A copy in the CPU's memory, until the next save; what shares memory still does."""
    try:
        return _stager().stage(state)  # type: ignore[return-value]  # no future without async
    except AssertionError:  # a storage has another size than at the last save
        _stager.cache_clear()
        return _stager().stage(state)  # type: ignore[return-value]


@functools.cache
def _stager() -> DefaultStager:
    """It keeps its copies as long as the tensors live: new memory costs several times what copying into it does."""
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )


def _write(writer: StepWriter, state: dict[str, Any], ranks: Ranks, step: int) -> None:
    planner = JsonSavePlanner()
    if ranks.group is None:  # what dcp.save does; it would warn that there is one process
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
        raise DetrainError(f"the checkpoint of step {step} was not saved: rank {rank}: {kind}{cause}") from exc
    except RuntimeError as exc:  # a rank that is gone
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
    """Load the checkpoint that was saved last, or that of ``step``, into what is given, whatever its layout.

    A broken one is passed over, with a warning, for the one before it; with ``step`` it is an error. What was saved and
    is not asked for (an optimizer, say) is left alone. Where as many ranks load as have saved, each has its random
    numbers go on; else all are seeded alike, and a note says so.

    Before anything is changed the names and shapes of the whole model are compared. Nothing that is read is unpickled
    or run: who can write there decides the numbers, and nothing else. Collective: all ranks. Raises: SpecError for what
    is not there or is another model's, DetrainError for what cannot be read.
    """
    ranks = saving.begin()
    chosen, notes, index = ranks.first(lambda: _choose(locate(url, files=files), step))
    folder = step_folder(locate(url, files=files), chosen.step)
    model_state, optimizer_state = _check_parts(ranks, chosen, index, model, optimizer, scheduler)

    def read() -> dict[str, Any]:
        random_values = _read_random(folder, index, ranks) if is_random_state_wanted else {}
        tensors: dict[str, Any] = {_MODEL + name: tensor for name, tensor in model_state.tensors.items()}
        if optimizer_state is not None:
            tensors |= optimizer_state.targets(index, _OPTIMIZER)
        with torch.no_grad():
            read_tensors(folder, index, tensors)
            model_state.put_in_order()
            every = {**index.values, **tensors}
            model_state.take({name: every[_MODEL + name] for name in model_state.values})
            if optimizer_state is not None:
                optimizer_state.take(index, tensors, _OPTIMIZER)
        if scheduler is not None:
            scheduler.load_state_dict(from_json(chosen.note["scheduler"]))
        return random_values

    random_values: dict[str, Any] = {}
    ranks.gather(lambda: random_values.update(read()))
    if is_random_state_wanted:
        notes = (*notes, *_go_on_randomly(random_values, chosen, ranks, model_state))
    for note in notes if ranks.rank == 0 else ():
        warnings.warn(note, stacklevel=2)
    plain = {key: from_json(chosen.note[key]) for key in ("data_position", "extra")}
    return Loaded(step=chosen.step, name=folder.name, saved_at=chosen.saved_at, notes=notes, **plain)


def _choose(place: Location, step: int | None) -> tuple[Checkpoint, tuple[str, ...], TensorIndex]:
    """The one to load, what was passed over for it, and its index. Raises: SpecError, DetrainError."""
    if not place.exists():
        raise SpecError(f"{place.name} is not there: give the URL that was saved to")
    found = list_checkpoints(place)
    complete = ", ".join(str(each.step) for each in found if each.is_complete) or "none"
    if step is not None:
        found = Checkpoints(each for each in found if each.step == step)
        if not found:
            raise SpecError(f"{place.name} has no checkpoint of step {step}: there are {complete}")
    passed: list[tuple[int, str]] = []
    for each in sorted(found, key=lambda each: (each.serial < 0, each.serial, each.step), reverse=True):
        try:
            if each.wrong:
                raise DetrainError(each.wrong)
            index = TensorIndex.read(step_folder(place, each.step), each.note["index"], each.note["files"])
            _check_note(each.note)
        except DetrainError as exc:
            if step is not None:
                raise DetrainError(f"{each.name} is broken: {exc}; complete are {complete}") from exc
            passed.append((each.step, f"{each.name} is passed over: {exc}"))
        else:
            return each, tuple(text for passed_step, text in passed if passed_step > each.step), index
    reasons = "".join(f"; {text}" for _, text in passed)
    raise SpecError(f"{place.name} has no checkpoint that can be loaded{reasons}")


def _check_note(note: Mapping[str, Any]) -> None:
    """Raises: DetrainError for values that cannot be read: before anything is changed."""
    try:
        _ = note["optimizer"], [from_json(note[key]) for key in ("data_position", "extra", "scheduler")]
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as exc:
        raise DetrainError(f"{NOTE} cannot be read: {type(exc).__name__}: {str(exc)[:200]}") from exc


def _check_parts(
    ranks: Ranks,
    chosen: Checkpoint,
    index: TensorIndex,
    model: Any,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
) -> tuple[ModelState, OptimizerState | None]:
    """Raises: SpecError, on every rank, where what is there and what is given do not go together on any."""
    parts: list[Any] = []

    def check() -> tuple[list[str], set[str]]:
        model_state = ModelState(model)
        optimizer_state = None if optimizer is None else OptimizerState(optimizer, model_state)
        parts[:] = model_state, optimizer_state
        wrong = model_state.check(index, _MODEL)
        if optimizer_state is not None:
            saved = chosen.note["optimizer"]
            if saved != optimizer_state.kind:
                raise SpecError(
                    f"{chosen.name} has {_shown(saved or 'no optimizer')}, and a {optimizer_state.kind} was given"
                )
            wrong += optimizer_state.check(index, _OPTIMIZER)
        if scheduler is not None and chosen.note["scheduler"] is None:
            raise SpecError(f"{chosen.name} was saved without a scheduler, and one was given")
        if scheduler is not None and (strange := _attributes_beside(scheduler, from_json(chosen.note["scheduler"]))):
            raise SpecError(
                f"{chosen.name} has {strange[0]!r} of a scheduler, which the one that was given does not save"
            )
        return wrong, set(model_state.values)

    told = ranks.gather(check)
    wrong = list(dict.fromkeys(text for texts, _ in told for text in texts))
    here = set().union(*(names for _, names in told))
    saved = [fqn.removeprefix(_MODEL) for fqn in index.metadata.state_dict_metadata if fqn.startswith(_MODEL)]
    wrong += [f"{_shown(name)} is not in the model" for name in saved if name not in here]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise SpecError(f"{chosen.name} is of another model: {'; '.join(wrong[:_SHOWN])}{more}")
    return parts[0], parts[1]


def _attributes_beside(scheduler: Any, saved: Any) -> list[str]:
    """Attributes that its ``load_state_dict`` would set, and that are not of its state: torch's sets all it gets."""
    if not isinstance(saved, dict):
        return []
    own = scheduler.state_dict()
    found = [key for key in saved if key not in own and hasattr(scheduler, key)]
    for inner, state in zip(getattr(scheduler, "_schedulers", ()), saved.get("_schedulers", ())):
        found += _attributes_beside(inner, state)
    return found


def _shown(said: object) -> str:
    """What stands in a file of others, for a line of a message."""
    text = str(said)
    return text if text.isprintable() else ascii(text)


# ---- random numbers


def _read_random(folder: Location, index: TensorIndex, ranks: Ranks) -> dict[str, Any]:
    """This rank's, where there are those of each."""
    prefix = f"{_RANDOM}{ranks.rank}/"
    names = [fqn for fqn in index.metadata.state_dict_metadata if fqn.startswith(prefix)]
    tensors = {
        fqn: torch.empty(shape, dtype=index.dtype(fqn)) for fqn in names if (shape := index.shape(fqn)) is not None
    }
    read_tensors(folder, index, tensors)
    every = {**index.values, **tensors}
    return {fqn.removeprefix(prefix): every[fqn] for fqn in names}


def _go_on_randomly(
    values: dict[str, Any], chosen: Checkpoint, ranks: Ranks, model_state: ModelState
) -> tuple[str, ...]:
    saved = chosen.note["world_size"]
    wrong = ""
    if saved == ranks.size:
        try:
            set_random_state(values)
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, OverflowError) as exc:
            wrong = f"the state of its random numbers is none ({type(exc).__name__})"
    if not all(ranks.gather(lambda: not wrong)):
        wrong = wrong or "the state of another rank's random numbers is none"
    elif saved == ranks.size:
        model_state.draws = values.get(_DRAWS, [])
        return ()
    seed = 1_000_003 * chosen.serial + chosen.step
    seed_all(seed)
    model_state.draws = [seed] * len(model_state.modules)
    why = wrong or f"saved by {saved} ranks, loaded by {ranks.size}"
    return (f"{why}: random numbers were seeded anew with {seed}, alike on all",)
