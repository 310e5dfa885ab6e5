"""Buffers that a model writes: every stage that has one writes its own, but only one of the copies is right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from ..recording import Recording


@dataclass(frozen=True)
class WrittenBuffer:
    """A buffer that the forward writes.

    ``first_read``, ``last_read`` and ``writes`` are indices of operators; a write also gives the modules that it is
    inside. ``unit`` is the unit that writes the buffer last, once the units are known.
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
        """Return why the model cannot be cut before operator ``index`` in the modules ``around``, or "" if it can.

        A stage ends at its cut: it does not write what is written after it, so its next pass cannot read that. In the
        next stage, the modules before the cut do not run, except those around it.
        """
        if self.first_read < index <= self.last_write:
            return f"the buffer {self.name} is read before it and written after it"
        gone = (write for write, inside in self.writes if write < index and not set(inside) <= set(around))
        if index <= self.last_read and not self.is_computed and any(True for _ in gone):  # else known to be needed
            return f"the buffer {self.name} is written before it and read after it"
        return ""


def find_written_buffers(recording: Recording) -> list[WrittenBuffer]:
    """Find the buffers whose tensor was replaced or written by the end of the pass."""
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
