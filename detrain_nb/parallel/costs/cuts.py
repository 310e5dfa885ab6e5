"""Where a recorded pass can be cut in two, and which modules can be left out of the other half."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..blocks import parts_of_blocks
from ..recording import Entries, Recorder, Recording, modules_around

__all__ = ["Cut", "find_cuts", "find_replaceable"]


@dataclass(frozen=True)
class Cut:
    """``index`` is of the operator that comes next, ``module`` is entered there, and gets the tensor ``number``."""

    index: int
    module: str
    number: int


def find_cuts(recording: Recording) -> list[Cut]:
    """Where one tensor is all that is left of what was computed so far, in the order of the pass.

    Of modules that are entered at the same place the outermost counts. One that runs twice is no cut, nor one in the
    middle of a checkpoint, that begins again with what it was given. Nor may a module around it have looked at a value
    before: its code runs again where the model goes on, and there is nothing to look at. One whose argument is used
    again after it was left (``x + block(x)``) is a cut only where it is no part of a block: a block stays whole.
    """
    recorder, entries = recording.recorder, recording.entries
    last = _last_reads(recorder, recording.outputs)
    entered: dict[int, list[tuple[str, int]]] = {}
    for index, name, number in entries.entered:
        if number is not None:
            entered.setdefault(index, []).append((name, number))
    in_blocks = parts_of_blocks(entries.model)
    looked: set[str] = set()
    cuts: list[Cut] = []
    for index, live in enumerate(_live_before_each(recorder, last)):
        if index and (before := recorder.ops[index - 1]).is_look:
            looked.add(before.inside[-1])
        for name, number in entered.get(index, ()):
            is_held = last[number] >= entries.left[name]  # by whoever called it
            is_all = live == {number} and not (is_held and name in in_blocks)
            can_begin = entries.calls[name] == 1 and name not in entries.checkpointed_with
            if is_all and can_begin and looked.isdisjoint(modules_around(name)):
                cuts.append(Cut(index, name, number))
                break
    return cuts


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
            computing.difference_update(_left_before(op.inside, max(kept), entries))
    return frozenset(computing)


def _left_before(inside: tuple[str, ...], index: int, entries: Entries) -> list[str]:
    return [name for name in inside if entries.left.get(name, 0) <= index]


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
