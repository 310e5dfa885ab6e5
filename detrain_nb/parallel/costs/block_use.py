"""Uses of a model's blocks by code outside them, which sharding block by block has to know."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from ..blocks import names_of_blocks, pattern_of
from ..operator_graph import Op
from ..recording import Recording, modules_around


@dataclass(frozen=True)
class BlockUse:
    """Uses of the blocks by code outside them.

    ``read_outside``: first names of block parameters that are read while their block is not running.
    ``written_outside``: blocks whose outputs are written in place by code outside them. ``writing``: blocks that write
    into their argument although it has a gradient. ``chosen``: blocks that may run for one batch and not for another,
    such as experts directly in the model. ``idle``: the chosen blocks that did not run, with the
    operator that precedes the first place where they might have run. ``is_seen``: False if no pass could be examined.
    """

    read_outside: frozenset[str] = frozenset()
    written_outside: frozenset[str] = frozenset()
    writing: frozenset[str] = frozenset()
    chosen: frozenset[str] = frozenset()
    idle: Mapping[str, int] = field(default_factory=dict)
    is_seen: bool = True


def find_block_use(recording: Recording) -> BlockUse:
    recorder, entries = recording.recorder, recording.entries
    blocks = dict.fromkeys(names_of_blocks(entries.model))
    block_of = {
        number: next((outer for outer in modules_around(name) if outer in blocks), "")
        for number, name in recorder.names.items()
    }
    giver_of = {number: name for name in blocks for number in entries.given.get(name, ())}
    read, written = set[str](), set[str]()
    for op in recorder.ops:
        if op.makes:  # else it only queries a device
            outside = (number for number in op.reads if (block := block_of.get(number)) and block not in op.inside)
            read.update(recorder.names[number] for number in outside)
        given = (giver_of[number] for number in op.writes if number in giver_of)
        written.update(block for block in given if block not in op.inside)
    chosen, idle = _find_chosen(recording, blocks)
    writing = frozenset(_writing_into_arguments(recording, blocks))
    return BlockUse(frozenset(read), frozenset(written), writing, frozenset(chosen), idle)


def _writing_into_arguments(recording: Recording, blocks: Collection[str]) -> Iterator[str]:
    """Yield blocks that write into an argument computed from parameters; model inputs have no gradient."""
    recorder = recording.recorder
    made: dict[int, int] = {}
    for index, op in enumerate(recorder.ops):
        for each in op.makes:
            made.setdefault(each, index)
    writes = [(index, op) for index, op in enumerate(recorder.ops) if op.writes]
    for index, name, number in recording.entries.entered:
        if name in blocks and number is not None and recorder.is_computed[number] and made.get(number, index) < index:
            inside = (op.writes for at, op in writes if at >= index and name in op.inside)
            if recorder.kept[number].requires_grad and any(number in written for written in inside):
                yield name


def block_use_unseen(model: nn.Module, stopped_by: BaseException | None) -> BlockUse:
    """Return the use of a model without values, whose pass stops at code that asks for a value.

    If that code is outside the blocks, it may choose between any of them.
    """
    inside, blocks = getattr(stopped_by, "inside", ()), frozenset(names_of_blocks(model))
    return BlockUse(chosen=blocks if inside and blocks.isdisjoint(inside) else frozenset(), is_seen=False)


# ---- blocks that run or not


def _find_chosen(recording: Recording, blocks: Collection[str]) -> tuple[set[str], dict[str, int]]:
    """Find the blocks that the surrounding code may replace by others for another batch, as far as one pass shows.

    A block is chosen if the number of its rows depends on values, or if the code outside all blocks has asked for a
    value before. Values computed from parameters count always; values computed from the batch count only if the code
    asks for them between blocks of one row, or if a block of that row does not run: a mask that is read once,
    before all blocks, serves another purpose.
    """
    traits = _Traits(recording)
    calls: dict[str, list[int]] = {block: [] for block in blocks}
    chosen: set[str] = set()
    for index, name, number in recording.entries.entered:
        if name in calls:
            calls[name].append(index)
            if number in traits.uncounted:
                chosen.add(name)
    asked: dict[str, list[tuple[int, Op]]] = {}
    for index, op in enumerate(recording.recorder.ops):
        if op.asks and not any(name in calls for name in op.inside):
            for scope in traits.who_may_know(op):
                asked.setdefault(scope, []).append((index, op))
    idle: dict[str, int] = {}
    for scope, questions in asked.items():
        rows: dict[str, dict[str, list[int]]] = {}
        for block in blocks:
            if not scope or block.startswith(f"{scope}."):
                rows.setdefault(pattern_of(block), {})[block] = calls[block]
        for row in rows.values():
            found = {*traits.chosen_by(questions, row)}
            chosen |= found
            last = questions[0][0]
            for block, each in row.items():  # a block that does not run takes the place of the one before it
                last = max([last, *each])
                if block in found and not each:
                    idle[block] = last
    return chosen, idle


class _Traits:
    """Origins of the tensors of a pass, by number."""

    def __init__(self, recording: Recording) -> None:
        recorder, self._entries = recording.recorder, recording.entries
        self.of_parameters = set(recorder.names)
        self.of_batch = set[int]()  # or of a buffer: both existed before the pass
        self.uncounted = set[int]()  # their length depends on values
        made = set[int]()
        for op in recorder.ops:
            self.of_batch.update(number for number in op.reads if number not in made and number not in recorder.names)
            made.update(op.makes)
            for kind in (self.of_parameters, self.of_batch):
                if not kind.isdisjoint(op.reads):
                    kind.update(op.makes)
            if op.asks or not self.uncounted.isdisjoint(op.reads[:1] if op.is_into else op.reads):
                self.uncounted.update(number for number in op.makes if number not in op.writes)

    def who_may_know(self, op: Op) -> Iterator[str]:
        """Yield the modules whose code may learn an operator's answer; tensors that one returns must be read again."""
        for name in reversed(op.inside):
            yield name
            if name not in self._entries.giving_others and self.uncounted.isdisjoint(self._entries.given[name]):
                return

    def chosen_by(self, questions: Sequence[tuple[int, Op]], calls: Mapping[str, Sequence[int]]) -> Iterator[str]:
        """Yield the blocks of a row, by their ``calls``, that the code which has the answers may choose from."""
        times = sorted(index for each in calls.values() for index in each)
        of_parameters = [index for index, op in questions if not self.of_parameters.isdisjoint(op.asks)]
        of_batch = [index for index, op in questions if not self.of_batch.isdisjoint(op.asks)]
        since = of_parameters
        if not all(calls.values()):
            since = [index for index, _ in questions]
        elif any(times[0] <= index < times[-1] for index in of_batch):
            since = of_parameters + of_batch
        for block, each in calls.items():
            if since and (not each or each[-1] > min(since)):
                yield block
