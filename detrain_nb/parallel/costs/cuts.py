"""Places where a recorded pass can be cut in two, and modules that the other half can leave out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..blocks import names_of_blocks, parts_of_blocks
from ..compiled import parts_of_compiled
from ..operator_graph import Recorder, TensorLook
from ..recording import Recording, modules_around
from .carried_attributes import CarriedAttribute
from .written_buffers import WrittenBuffer


@dataclass(frozen=True)
class Cut:
    """Place where ``module`` is entered with tensor ``number``, before the operator ``index``."""

    index: int
    module: str
    number: int


@dataclass(frozen=True)
class Cuts:
    """Cuts of a pass.

    ``hindrances``: by name, why the other modules that run are not cuts; ``why_no_more``: the reason for one block, or
    for the whole model.
    """

    cuts: list[Cut]
    hindrances: dict[str, str]
    why_no_more: str


def find_cuts(recording: Recording, written: Sequence[WrittenBuffer], carried: Sequence[CarriedAttribute] = ()) -> Cuts:
    """Find the places, in the order of the pass, where one tensor is all that is needed of the computation so far.

    - Of modules entered at the same place, the outermost one counts.
    - A module that runs twice is not a cut.
    - Neither is one inside a checkpoint, which restarts from its own input.
    - No module around it may have read a value before: its code runs again in the next stage, without that value.
    - No module around it may have a hook on its backward pass, which would run in each stage.
    - No stage may write a buffer (``written``), or a value kept for the next call (``carried``), that another one
      reads.
    - A module whose argument is used again after it has returned (``x + block(x)``) is a cut only if it is not part of
      a block: blocks stay whole.
    """
    recorder, entries = recording.recorder, recording.entries
    last = _last_reads(recorder, recording.outputs)
    entered: dict[int, list[tuple[str, int | None]]] = {}
    for index, name, number in entries.entered:
        entered.setdefault(index, []).append((name, number))
    place_of = {name: place for place, (_, name, _) in enumerate(entries.entered)}
    in_blocks = parts_of_blocks(entries.model)
    in_compiled = parts_of_compiled(entries.model)
    with_backward_hooks = {
        name for name, part in entries.model.named_modules() if part._backward_hooks or part._backward_pre_hooks
    }
    makers = {number: op.inside[-1] for op in reversed(recorder.ops) for number in op.makes if op.inside}
    looked: set[str] = set()
    cuts: list[Cut] = []
    hindrances: dict[str, str] = {}

    def why_not(index: int, name: str, number: int | None, live: set[int]) -> str:
        if name in in_compiled:
            return "it is part of a compiled module"
        if number is None:
            return "it gets no float tensor"
        if entries.calls[name] > 1:
            return f"it runs {entries.calls[name]} times"
        around = dict.fromkeys((*modules_around(name), *entries.inside[name]))
        if hooked := [outer for outer in around if outer in with_backward_hooks]:
            return f"{hooked[0] or 'the model'} has a hook on its backward pass and would be in two stages"
        if why := next(filter(None, (buffer.hinders(index, around) for buffer in written)), ""):
            return why
        if why := next(filter(None, (each.hinders(place_of[name], around) for each in carried)), ""):
            return why
        if others := live - {number}:
            told = f"besides its input, {_name(others, makers, recorder.looks)} still needed after it"
            return told + _told_of_gathered(others, recording.gathered)
        if number not in live:
            return _NOT_COMPUTED
        if name in entries.checkpointed_with:
            return "it is inside a checkpoint"
        if name in entries.reentrant:
            return (
                "it runs in a reentrant checkpoint, which records no gradients: use_reentrant=False allows a cut there"
            )
        if not looked.isdisjoint(around):
            return "the code around it has read a tensor's value before"
        if last[number] >= entries.left[name] and name in in_blocks:
            return "it is part of a block with a connection around it, and blocks stay whole"
        return ""

    for index, live in enumerate(_live_before_each(recorder, last)):
        if index and (before := recorder.ops[index - 1]).is_look:
            looked.update(before.inside[-1:] or [""])
        found = ""
        for name, number in entered.get(index, ()):
            reason = f"{found} {_AT_THE_SAME_PLACE}" if found else why_not(index, name, number, live)
            if reason:
                hindrances.setdefault(name, reason)
                continue
            assert number is not None
            cuts.append(Cut(index, name, number))
            found = name
    return Cuts(cuts, hindrances, _why_no_more(hindrances, names_of_blocks(entries.model), is_whole=not cuts))


_AT_THE_SAME_PLACE = "begins at the same place"
_NOT_COMPUTED = "its input was not computed by the model"  # as for the first module


def _why_no_more(hindrances: Mapping[str, str], blocks: Collection[str], *, is_whole: bool) -> str:
    """Return the reason of the first block that has one; in a model without cuts, else of the last module."""
    names = [*blocks, *([*hindrances][::-1] if is_whole else ())]
    told = [(name, hindrances.get(name, "")) for name in names if name]
    told = [(name, why) for name, why in told if why and not why.endswith(_AT_THE_SAME_PLACE)]
    if not told:
        return "the model calls no module at which a stage could begin" if is_whole else ""
    name, why = min(told, key=lambda each: each[1] == _NOT_COMPUTED)
    return f"not at {name}: {why}"


def _told_of_gathered(numbers: set[int], gathered: Mapping[int, str]) -> str:
    """Return where the model keeps the tensors, and what to do about it."""
    name = next((gathered[number] for number in sorted(numbers) if number in gathered), "")
    return name and (
        f", kept in {name}, but only one tensor is sent to the next stage: have each module add its part to what it "
        "returns"
    )


def _name(numbers: set[int], makers: Mapping[int, str], looks: Sequence[TensorLook]) -> str:
    """Name tensors by the modules whose code made them, with the verb."""
    named = [f"{looks[number]} of {makers.get(number) or 'its own code'}" for number in sorted(numbers)[:2]]
    more = [f"{len(numbers) - 2} more"] if len(numbers) > 2 else []
    return f"{' and '.join([', '.join(named), *more])} {'is' if len(numbers) == 1 else 'are'}"


def find_replaceable(recording: Recording) -> frozenset[str]:
    """Find the modules that can be replaced by zeros if their results do not matter.

    Every tensor that such a module returns depends on parameters or on random numbers, and nothing outside it reads
    what it made independently of these, such as a mask.
    """
    recorder, entries = recording.recorder, recording.entries
    last = _last_reads(recorder, recording.outputs)
    computing = {
        name
        for name, numbers in entries.given.items()
        if numbers and all(recorder.is_computed[number] for number in numbers)
    }
    for op in recorder.ops:
        kept = [last.get(number, -1) for number in op.makes if not recorder.is_computed[number]]
        if kept:
            computing.difference_update(name for name in op.inside if entries.left.get(name, 0) <= max(kept))
    return frozenset(computing)


def _last_reads(recorder: Recorder, outputs: Any) -> dict[int, int]:
    """Return the last operator that reads each tensor; the model's outputs are read after the last operator."""
    last: dict[int, int] = {}
    for index, op in enumerate(recorder.ops):
        last.update(dict.fromkeys(op.reads, index))
    last.update({recorder.number(leaf): len(recorder.ops) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)})
    return last


def _live_before_each(recorder: Recorder, last: Mapping[int, int]) -> Iterator[set[int]]:
    """Yield, before each operator, the tensors computed so far that are still read."""
    ends: dict[int, list[int]] = {}
    live: set[int] = set()
    met: set[int] = set()
    for index, op in enumerate(recorder.ops):
        live.difference_update(ends.get(index, ()))
        yield live
        for number in op.makes:
            if number not in met and recorder.is_computed[number] and last.get(number, -1) > index:
                live.add(number)
                ends.setdefault(last[number] + 1, []).append(number)
            met.add(number)
