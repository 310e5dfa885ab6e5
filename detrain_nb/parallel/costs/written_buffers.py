"""Buffers that a model writes: each stage that has one would write its own, and one of them alone is right."""

from __future__ import annotations

from dataclasses import dataclass

from ..recording import Recording

__all__ = ["WrittenBuffer", "find_written_buffers"]


@dataclass(frozen=True)
class WrittenBuffer:
    """``first_read`` and ``last_write`` are of operators, counted; ``is_computed``: from what the model computed.

    ``unit`` is the one in which it is written last, once the units are known.
    """

    name: str
    first_read: int
    last_write: int
    is_computed: bool
    unit: int = 0

    def hinders(self, index: int) -> bool:
        """Whether a cut before the operator ``index`` would have it read in one stage and written in another."""
        return self.is_computed and self.first_read < index <= self.last_write


def find_written_buffers(recording: Recording) -> list[WrittenBuffer]:
    """Those in whose place there is something else when the pass has ended."""
    recorder, found = recording.recorder, []
    first_read, last_write = dict[int, int](), dict[int, int]()
    for index, op in enumerate(recorder.ops):
        for number in op.reads if op.makes else ():
            first_read.setdefault(number, index)
        last_write.update(dict.fromkeys(op.writes, index))
        for number in op.makes:
            last_write.setdefault(number, index)
    for name, (before, after) in recording.buffers.items():
        write = last_write.get(after)
        if write is not None:
            is_computed = recorder.is_computed[after]
            found.append(WrittenBuffer(name, first_read.get(before, write), write, is_computed))
    return found
