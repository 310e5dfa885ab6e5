"""Buffers that a model writes: each stage that has one would write its own, and one of them alone is right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from ..recording import Recording


@dataclass(frozen=True)
class WrittenBuffer:
    """``first_read``, ``last_read`` and ``writes`` are of operators, counted; of a write, inside which modules it is.

    ``unit`` is the one in which it is written last, once the units are known.
    """

    name: str
    first_read: int
    last_read: int
    writes: tuple[tuple[int, tuple[str, ...]], ...]
    is_computed: bool
    unit: int = 0

    @property
    def last_write(self) -> int:
        return self.writes[-1][0]

    def hinders(self, index: int, around: Collection[str]) -> str:
        """Why there is no cut before the operator ``index``, in the modules ``around``; empty where there may be one.

        A stage ends where it is cut: what is written behind that is not written in it, and not read by its next pass.
        Modules before the cut do not run in the stage behind it, but for those around.
        """
        if self.first_read < index <= self.last_write:
            return f"the buffer {self.name} is read before it and written behind it"
        gone = (write for write, inside in self.writes if write < index and not set(inside) <= set(around))
        if index <= self.last_read and not self.is_computed and any(True for _ in gone):  # else it is seen to be needed
            return f"the buffer {self.name} is written before it and read behind it"
        return ""


def find_written_buffers(recording: Recording) -> list[WrittenBuffer]:
    """Those in whose place there is something else when the pass has ended."""
    recorder, found = recording.recorder, []
    reads, writes, made = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list), dict[int, int]()
    for index, op in enumerate(recorder.ops):
        for number in op.reads if op.makes else ():
            reads[number].append(index)
        for number in op.writes:
            writes[number].append(index)
        for number in op.makes:
            made.setdefault(number, index)
    for name, (before, after) in recording.buffers.items():
        written = writes[after] or ([made[after]] if after in made else [])
        if written:
            read = sorted([*reads[before], *reads[after]]) or written
            inside = tuple((index, recorder.ops[index].inside) for index in written)
            found.append(WrittenBuffer(name, read[0], read[-1], inside, recorder.is_computed[after]))
    return found
