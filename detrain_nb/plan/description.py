"""A plan as plain JSON: layers, stages, timelines, memory of ranks; written next to the model, read without torch.

It has a version, and its content is checked before use, as it may come from a rank, a message or a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ..errors import SpecError
from ..text import printable, show
from .costs import StageCosts
from .fields import build
from .memory import MeshMemory, RankBytes
from .passes import StepTimeline, Work
from .soundness import require_sound_costs, require_sound_memory, require_sound_timelines

VERSION = 1
_MARK = "detrain_nb_plan"  # the key of the version, which identifies a plan
_MOST_CHARS, _MOST_VALUES, _MOST_LEVELS, _MOST_NOTES = 300, 100_000, 8, 20
_HOW = "pass the result of par.describe_plan, or to_dict() of a partition, a timeline or a dry run"


@dataclass(frozen=True)
class PlanDescription:
    """The known facts about a split model: any of costs, timelines and memory, and notes about missing parts.

    The first of ``timelines`` is the planned one; the others are for comparison.
    """

    name: str = ""
    costs: StageCosts | None = None
    timelines: tuple[StepTimeline, ...] = ()
    memory: MeshMemory | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON, which can be pulled from a rank or written to a file. Raises: SpecError."""
        self._require_sound()
        timelines = [{"schedule": each.schedule, "ranks": list(map(_columns, each.ranks))} for each in self.timelines]
        made: dict[str, Any] = {_MARK: VERSION, "name": self.name}
        made["costs"] = None if self.costs is None else _plain(asdict(self.costs))
        made["timelines"] = timelines
        made["memory"] = None if self.memory is None else _memory(self.memory)
        made["notes"] = list(self.notes)
        return made

    @classmethod
    def from_dict(cls, data: object) -> PlanDescription:
        """Read the result of ``to_dict``, which may be untrusted. Raises: SpecError with the field."""
        if not isinstance(data, Mapping) or _MARK not in data:
            raise SpecError(f"this is not a plan ({_MARK} is missing): {_HOW}")
        read = _cleaned(data)
        if (version := read[_MARK]) != VERSION:
            raise SpecError(
                f"the plan has version {show(version)}, but this detrain_nb reads version {VERSION}: "
                "use the same release of detrain_nb on both sides"
            )
        form = build(_Form, read, where="plan")
        made = cls(form.name, form.costs, tuple(map(_timeline, form.timelines)), form.memory, form.notes)
        made._require_sound()
        return made

    def _require_sound(self) -> None:
        if self.costs is None and self.memory is None and not self.timelines:
            raise SpecError(f"the plan has no costs, timelines or memory: {_HOW}")
        if len(self.notes) > _MOST_NOTES:
            raise SpecError(f"the plan has {len(self.notes)} notes, the limit is {_MOST_NOTES}")
        if self.costs is not None:
            require_sound_costs(self.costs)
        if self.memory is not None:
            require_sound_memory(self.memory)
        require_sound_timelines(self.timelines)

    def joined(self, other: PlanDescription) -> PlanDescription:
        """Merge two descriptions. Raises: SpecError when both have costs, or both have memory."""
        for part in ("costs", "memory"):
            if getattr(self, part) is not None and getattr(other, part) is not None:
                raise SpecError(f"both plans have {part}: pass one of them, or show each separately")
        return replace(
            self,
            name=self.name or other.name,
            costs=self.costs or other.costs,
            timelines=(*self.timelines, *other.timelines),
            memory=self.memory or other.memory,
            notes=(*self.notes, *other.notes),
        )


@dataclass(frozen=True)
class _Lane:
    """The passes of a rank by column, which is more compact than an object per pass."""

    kinds: tuple[str, ...]
    stages: tuple[int, ...]
    microbatches: tuple[int, ...]
    begin_s: tuple[float, ...]
    end_s: tuple[float, ...]


@dataclass(frozen=True)
class _Timeline:
    schedule: str
    ranks: tuple[_Lane, ...]


@dataclass(frozen=True)
class _Form:
    name: str = ""
    costs: StageCosts | None = None
    timelines: tuple[_Timeline, ...] = ()
    memory: MeshMemory | None = None
    notes: tuple[str, ...] = ()


def _plain(value: Any) -> Any:
    """Return the value as JSON reads it back: tuples become lists."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _columns(works: Iterable[Work]) -> dict[str, Any]:
    rows = list(works)
    return {
        "kinds": [work.kind for work in rows],
        "stages": [work.stage for work in rows],
        "microbatches": [work.microbatch for work in rows],
        "begin_s": [work.begin_s for work in rows],
        "end_s": [work.end_s for work in rows],
    }


def _memory(found: MeshMemory) -> dict[str, Any]:
    """Return memory as JSON; of a row only the fields of its base class, as a dry run adds some."""
    names = [each.name for each in fields(RankBytes)]
    rows = [{name: _plain(getattr(row, name)) for name in names} for row in found.rows]
    return {"mesh": dict(found.mesh), "schedule": found.schedule, "rows": rows}


def _timeline(form: _Timeline) -> StepTimeline:
    return StepTimeline(form.schedule, tuple(map(_works, range(len(form.ranks)), form.ranks)))


def _works(rank: int, lane: _Lane) -> tuple[Work, ...]:
    columns = (lane.kinds, lane.stages, lane.microbatches, lane.begin_s, lane.end_s)
    if len(set(map(len, columns))) > 1:
        raise SpecError(f"plan.timelines: the columns of rank {rank} differ in length: give each pass in every column")
    return tuple(Work(*row) for row in zip(*columns))


def _cleaned(data: object) -> Any:
    """Return a copy whose texts are safe to show. Raises: SpecError when it is larger than any plan."""
    num_values = 0

    def clean(value: object, level: int) -> Any:
        nonlocal num_values
        num_values += 1
        if num_values > _MOST_VALUES or level > _MOST_LEVELS:
            raise SpecError(f"the plan has more than {_MOST_VALUES} values or {_MOST_LEVELS} levels: {_HOW}")
        if isinstance(value, str):
            if len(value) > _MOST_CHARS:
                raise SpecError(f"the plan has a text of {len(value)} characters, the limit is {_MOST_CHARS}")
            return printable(value)
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise SpecError("the plan has a number of more than 64 bits")
        if isinstance(value, Mapping):
            if not all(isinstance(name, str) for name in value):
                raise SpecError(f"the plan has a key that is not a string: {_HOW}")
            return {clean(name, level + 1): clean(each, level + 1) for name, each in value.items()}
        return [clean(each, level + 1) for each in value] if isinstance(value, (list, tuple)) else value

    return clean(data, 0)
