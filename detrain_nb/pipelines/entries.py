"""Pipelines as lines of a list: file, mesh, nodes and last job at a glance."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import DetrainError, count_ranks
from ..jobs.job_status import OVER, Sign, describe_age, describe_state, sign_and_word
from ..jobs.record import JobSummary
from ..plan import Plan
from ..spec import Parallelism, PipelineSpec
from ..text import HERE, ShownAsText, count_of, describe_seconds, name_some, printable, table_lines
from .spec_file import SpecFile

__all__ = ["Entries", "Entry", "LastJob", "describe_job", "make_entry"]

_MOST_NODES = 2  # listed by name
_MOST_METRICS_CHARS = 1 << 16


@dataclass(frozen=True)
class LastJob:
    """The newest job of a pipeline as last known, without a query. All but ``id`` and times are display texts."""

    id: str
    sign: Sign
    word: str
    detail: str
    submitted_at: float
    is_over: bool
    count: int  # jobs with its name and file


@dataclass(frozen=True)
class Entry:
    """A pipeline in the list. ``errors`` are the faults of its file; ``is_spec``: it can be run as it is.

    ``file`` is its path for display, ``job`` its newest job, None if it was never run. ``is_document``: the file could
    be parsed, even if it is not a valid spec.
    ``axes`` are the mesh axes whose size is not 1, ``nodes`` is a display text. ``is_beside``: it is in the folder.
    """

    name: str
    path: Path
    file: str
    description: str
    axes: tuple[tuple[str, int], ...]
    nodes: str
    errors: tuple[str, ...]
    is_document: bool
    is_spec: bool
    is_beside: bool
    job: LastJob | None = None

    @property
    def mesh(self) -> str:
        """``pp 2, tp 2``; empty where all axes are 1."""
        return ", ".join(f"{axis} {size}" for axis, size in self.axes)

    @property
    def fault(self) -> str:
        """What prevents a run, in a few words."""
        if self.is_spec or not self.errors:
            return ""
        count = len(self.errors)
        return f"{count_of(count, 'field')} to correct" if self.is_document else self.errors[0]

    @property
    def searched(self) -> str:
        """The text that a search looks in: name, file, nodes, mesh and status, case-folded."""
        job = f"{self.job.word} {self.job.detail} {self.job.id}" if self.job else "never run"
        return f"{self.name} {self.file} {self.description} {self.mesh} {self.nodes} {job} {self.fault}".casefold()

    def matches(self, search: str) -> bool:
        """Return whether every word of ``search`` occurs in `searched`."""
        return all(word in self.searched for word in search.casefold().split())


class Entries(ShownAsText, Sequence[Entry]):
    """Pipelines, as a sequence of `Entry` and shown as a table. ``more`` is the number of files that were not read.

    ``notices`` are messages for the user about the list.
    """

    def __init__(self, entries: Sequence[Entry], *, folder: str, more: int = 0, notices: Sequence[str] = ()) -> None:
        self._entries, self.folder, self.more, self.notices = tuple(entries), folder, more, tuple(notices)

    def __getitem__(self, place: Any) -> Any:
        return self._entries[place]

    def __len__(self) -> int:
        return len(self._entries)

    def __str__(self) -> str:
        more = [f"and {self.more} more files in {self.folder}"] if self.more else []
        if not self._entries:
            return "\n".join([f"no pipelines in {self.folder}", *more, *self.notices])
        rows = [
            (
                each.name,
                each.file,
                each.mesh or "-",
                each.nodes,
                " ".join([each.job.word, each.job.detail] if each.job else ["never run", each.fault]).strip(),
            )
            for each in self._entries
        ]
        return "\n".join([*table_lines([("name", "file", "mesh", "nodes", "last job"), *rows]), *more, *self.notices])

    def __repr__(self) -> str:
        return str(self)


def make_entry(found: SpecFile, *, file: str, is_beside: bool) -> Entry:
    """Describe a file; one with faults as far as it can be read."""
    data, plan = found.data or {}, _plan_of(found.spec)
    description = data.get("description")
    return Entry(
        name=found.name,
        path=found.path,
        file=file,
        description=printable(description[:200], " ") if isinstance(description, str) else "",
        axes=_axes(found.spec, data, plan),
        nodes=_nodes(found.spec, data, plan) if found.data is not None else "",
        errors=found.errors,
        is_document=found.data is not None,
        is_spec=found.spec is not None,
        is_beside=is_beside,
    )


def describe_job(job: JobSummary, *, count: int, spec: PipelineSpec | None, now: float | None = None) -> LastJob:
    """Describe the last known state of a job."""
    now = time.time() if now is None else now
    sign, word = sign_and_word(job.state, job.exit_code)[0], describe_state(job.state, job.exit_code)
    is_over = job.state in OVER
    when = _describe_time(job.submitted_at, now=now)
    if is_over:
        took = None if job.started_at is None or job.ended_at is None else job.ended_at - job.started_at
        detail = f"{when}, in {describe_seconds(took)}" if took is not None else when
    else:
        detail = f"as of {describe_age(job.updated_at, now=now)}"
        share = _share(job.metrics, spec)
        word = f"{word} {share}" if share and sign == "run" else word
    return LastJob(job.id, sign, word, detail, job.submitted_at, is_over, count)


def _share(metrics: str, spec: PipelineSpec | None) -> str:
    """Return ``37 %`` of the steps of the spec, by the last metrics, which a node sent."""
    steps = spec.training.steps if spec else None
    if not steps or not metrics or len(metrics) > _MOST_METRICS_CHARS:
        return ""
    try:
        said = json.loads(metrics)
    except (ValueError, RecursionError):
        return ""
    step = said.get("step") if isinstance(said, dict) else None
    if type(step) is not int or not 0 <= step <= steps:
        return ""
    return f"{100 * step // steps} %"


def _describe_time(at: float, *, now: float) -> str:
    """Return ``today 11:20``, ``yesterday 17:44``, ``2026-03-01 08:10``."""
    then, today = datetime.fromtimestamp(at), datetime.fromtimestamp(now)
    days = (today.date() - then.date()).days
    day = {0: "today", 1: "yesterday"}.get(days, f"{then:%Y-%m-%d}")
    return f"{day} {then:%H:%M}"


def _plan_of(spec: PipelineSpec | None) -> Plan | None:
    """Return the plan; None if the spec does not fit its nodes, or their number of GPUs is unknown here."""
    try:
        return spec.plan() if spec else None
    except DetrainError:
        return None


def _axes(spec: PipelineSpec | None, data: Mapping[str, Any], plan: Plan | None) -> tuple[tuple[str, int], ...]:
    """Return the axes of the plan, else the given ones; without -1, which only a plan can resolve."""
    if plan is not None and plan.mesh is not None:
        return tuple((axis, size) for axis, size in plan.mesh.axes.items() if size != 1)
    given = data.get("parallelism", {})
    try:
        mesh = spec.parallelism if spec else Parallelism(**given) if isinstance(given, dict) else Parallelism()
    except (DetrainError, TypeError):  # TypeError: a name that is not a text
        return ()
    return tuple((axis, size) for axis, size in mesh.axes.items() if size not in (1, -1))


def _nodes(spec: PipelineSpec | None, data: Mapping[str, Any], plan: Plan | None) -> str:
    """Return ``gpu1, gpu2 · 8 ranks``; for more nodes their number."""
    if spec is None:
        given = data.get("nodes")
        return count_of(len(given), "node") if isinstance(given, list) and given else HERE
    names = [HERE if node.is_this_machine else node.name for node in spec.nodes] or [HERE]
    told = name_some(names) if len(names) <= _MOST_NODES else f"{len(names)} nodes"
    return told if plan is None else f"{told} · {count_ranks(plan.world_size)}"
