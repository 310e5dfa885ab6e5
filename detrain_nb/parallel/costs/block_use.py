"""How code outside of a model's blocks meddles with them: what sharding block by block has to know."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..blocks import names_of_blocks
from ..recording import Recording, modules_around

__all__ = ["BlockUse", "find_block_use"]


@dataclass(frozen=True)
class BlockUse:
    """``read_outside``: parameters of blocks that are read while their block does not run, by first name.

    ``written_outside``: blocks whose outputs are written into, in place, by code outside of them.
    """

    read_outside: frozenset[str] = frozenset()
    written_outside: frozenset[str] = frozenset()


def find_block_use(recording: Recording) -> BlockUse:
    recorder, entries = recording.recorder, recording.entries
    blocks = frozenset(names_of_blocks(entries.model))
    block_of = {number: _block_around(name, blocks) for number, name in recorder.names.items()}
    giver_of = {number: name for name in blocks for number in entries.given.get(name, ())}
    read, written = set[str](), set[str]()
    for op in recorder.ops:
        if op.makes:  # else it asks for a device
            outside = (number for number in op.reads if (block := block_of.get(number)) and block not in op.inside)
            read.update(recorder.names[number] for number in outside)
        given = (giver_of[number] for number in op.writes if number in giver_of)
        written.update(block for block in given if block not in op.inside)
    return BlockUse(frozenset(read), frozenset(written))


def _block_around(name: str, blocks: Collection[str]) -> str:
    return next((outer for outer in modules_around(name) if outer in blocks), "")
