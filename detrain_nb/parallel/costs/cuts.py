"""Where a recorded pass can be cut in two, and which modules can be left out of the other half."""

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
    """``index`` is of the operator that comes next, ``module`` is entered there, and gets the tensor ``number``."""

    index: int
    module: str
    number: int


@dataclass(frozen=True)
class Cuts:
    """``hindrances``: why other modules that run are no cuts, by name; ``why_no_more``: of a block, or of all."""

    cuts: list[Cut]
    hindrances: dict[str, str]
    why_no_more: str


def find_cuts(recording: Recording, written: Sequence[WrittenBuffer], carried: Sequence[CarriedAttribute] = ()) -> Cuts:
    """Where one tensor is all that is left of what was computed so far, in the order of the pass.

    Of modules that are entered at the same place the outermost counts. One that runs twice is no cut, nor one in the
    middle of a checkpoint, that begins again with what it was given. Nor may a module around it have looked at a value
    before: its code runs again where the model goes on, and there is nothing to look at; nor have a hook on its
    backward pass, which would run in each stage. Nor may one stage write a buffer, as ``written`` says, that another
    one reads, nor what the model keeps for its next call, as ``carried`` says. One whose argument is used again after
    it was left (``x + block(x)``) is a cut only where it is no part of a block: a block stays whole.
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
            return "it is a part of a compiled module"
        if number is None:
            return "no float tensor comes into it"
        if entries.calls[name] > 1:
            return f"it runs {entries.calls[name]} times"
        around = dict.fromkeys((*modules_around(name), *entries.inside[name]))
        if hooked := [outer for outer in around if outer in with_backward_hooks]:
            return f"{hooked[0] or 'the model'} has a hook on its backward pass, and would be in two stages"
        if why := next(filter(None, (buffer.hinders(index, around) for buffer in written)), ""):
            return why
        if why := next(filter(None, (each.hinders(place_of[name], around) for each in carried)), ""):
            return why
        if others := live - {number}:
            told = f"beside what comes into it {_name(others, makers, recorder.looks)} still needed behind it"
            return told + _told_of_gathered(others, recording.gathered)
        if number not in live:
            return _NOT_COMPUTED
        if name in entries.checkpointed_with:
            return "it is in the middle of a checkpoint"
        if name in entries.reentrant:
            return "no gradient is noted where it runs: use_reentrant=False lets a checkpoint be cut"
        if not looked.isdisjoint(around):
            return "the code around it has looked at a value before"
        if last[number] >= entries.left[name] and name in in_blocks:
            return "it is a part of a block that goes around it, and blocks stay whole"
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
_NOT_COMPUTED = "what comes into it was not computed by the model"  # as into the first


def _why_no_more(hindrances: Mapping[str, str], blocks: Collection[str], *, is_whole: bool) -> str:
    """Of the first block of which there is something to say; where there is no cut, of the last module otherwise."""
    names = [*blocks, *([*hindrances][::-1] if is_whole else ())]
    told = [(name, hindrances.get(name, "")) for name in names if name]
    told = [(name, why) for name, why in told if why and not why.endswith(_AT_THE_SAME_PLACE)]
    if not told:
        return "it calls no module, at which a stage could begin" if is_whole else ""
    name, why = min(told, key=lambda each: each[1] == _NOT_COMPUTED)
    return f"not at {name}: {why}"


def _told_of_gathered(numbers: set[int], gathered: Mapping[int, str]) -> str:
    """Where the model keeps them, and what to do."""
    name = next((gathered[number] for number in sorted(numbers) if number in gathered), "")
    return name and (
        f", kept in {name}, and one tensor alone goes to the next stage: let each module put what it adds into what it "
        "returns"
    )


def _name(numbers: set[int], makers: Mapping[int, str], looks: Sequence[TensorLook]) -> str:
    """What tensors are, by the modules whose code made them; with the verb."""
    named = [f"{looks[number]} of {makers.get(number) or 'its own code'}" for number in sorted(numbers)[:2]]
    more = [f"{len(numbers) - 2} more"] if len(numbers) > 2 else []
    return f"{' and '.join([', '.join(named), *more])} {'is' if len(numbers) == 1 else 'are'}"


def find_replaceable(recording: Recording) -> frozenset[str]:
    """The modules that zeros can stand for, where what they computed does not matter.

    All tensors that such a module returns depend on parameters, or on random numbers; what it made that does not, a
    mask, is read by nobody else.
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
    """The last operator that reads each tensor; what the model returns is read behind the last."""
    last: dict[int, int] = {}
    for index, op in enumerate(recorder.ops):
        last.update(dict.fromkeys(op.reads, index))
    last.update({recorder.number(leaf): len(recorder.ops) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)})
    return last


def _live_before_each(recorder: Recorder, last: Mapping[int, int]) -> Iterator[set[int]]:
    """Before each operator, what was computed so far and is still read."""
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
