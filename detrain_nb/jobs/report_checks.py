"""Checks of all that a node reports on jobs: types, lengths, counts, names. A node may send anything."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..copying.json_lines import Untrue, as_size, check_name, clean
from ..node.job.git_source import MOST_POINTERS
from ..node.job.terms import FILES_OF_A_LINE, LIVE, LOOK_TIMES, MOST_CHECKPOINTS, OUTPUT_NAME, OVER

__all__ = [
    "STATUS_BYTES",
    "NodeFile",
    "NodeReport",
    "NodeResources",
    "add_different",
    "check_log_name",
    "clean_line",
    "find_part",
    "read_checkpoints",
    "read_facts",
    "read_files",
    "read_made",
    "read_number",
    "read_pointers",
    "read_port",
    "read_report",
    "read_reports",
    "read_times",
]

STATUS_BYTES = 1 << 22
_MOST_JOBS = 10_000
_MOST_RANKS = 1 << 16
_MOST_LINES = 100
_MOST_GPUS = 1024
_MOST_CPUS = 1 << 20
_MOST_METRICS = 32
_MOST_WORD_CHARS = 80
_MOST_FILES = 100_000
_MOST_CHARS = 4096
_MOST_TIME = 32_503_680_000.0  # the year 3000, after which Windows has no date
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TERMINAL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")  # escapes


@dataclass(frozen=True)
class NodeReport:
    """Report of a node on its part of a job; ``id`` and ``node_rank`` identify the part, as in `JobStatus`."""

    id: str
    node_rank: int
    state: str
    name: str = ""
    exit_code: int | None = None
    reason: str = ""
    failed_rank: int | None = None
    last_lines: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    restarts: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    metrics: Mapping[str, int | float | str] | None = None  # those logged last

    @property
    def is_over(self) -> bool:
        return self.state in OVER


@dataclass(frozen=True)
class NodeResources:
    """Resources of a node for jobs; ``torch`` is its version, empty if it is not installed.

    ``free_bytes``: free on the disk for jobs. ``memory_bytes``: free memory, 0 if unknown.
    """

    gpus: int
    cpus: int
    memory_bytes: int
    free_bytes: int
    torch: str


@dataclass(frozen=True)
class NodeFile:
    """An artifact of a node."""

    name: str
    size: int
    digest: str


def read_reports(said: Mapping[str, Any]) -> list[NodeReport]:
    """Read the answer to "status". Raises: Untrue."""
    jobs = said.get("jobs")
    if not isinstance(jobs, list) or len(jobs) > _MOST_JOBS:
        raise Untrue("a list of jobs was expected")
    return [read_report(job) for job in jobs]


def read_report(said: object) -> NodeReport:
    """Read the report on a node's part of one job. Raises: Untrue."""
    if not isinstance(said, dict):
        raise Untrue("the report on a job is not a mapping")
    state = said.get("state")
    if state not in (*LIVE, *OVER):
        raise Untrue(f"{clean(state)[:40]!r} is not a state of a job")
    failed = said.get("failed_rank")
    exit_code = said.get("exit_code")
    return NodeReport(
        id=_text(said.get("id"), most=200),
        node_rank=read_number(said.get("node_rank"), most=_MOST_RANKS),
        state=state,
        name=_text(said.get("name", ""), most=200),
        exit_code=None if exit_code is None else read_number(exit_code, least=-255, most=255),
        reason=_text(said.get("reason") or ""),
        failed_rank=None if failed is None else read_number(failed, most=_MOST_RANKS),
        last_lines=tuple(clean_line(_raw_text(line)) for line in _list(said.get("last_lines"), most=_MOST_LINES)),
        ranks=tuple(_rank(each) for each in _list(said.get("ranks"), most=_MOST_RANKS)),
        restarts=read_number(said.get("restarts", 0)),
        started_at=_time(said.get("started_at")),
        ended_at=_time(said.get("ended_at")),
        metrics=_metrics(said.get("metrics")),
    )


def find_part(reports: Sequence[NodeReport], job: str, node_rank: int) -> NodeReport | None:
    """Return the report on one part of a job; None if there is none."""
    return next((each for each in reports if (each.id, each.node_rank) == (job, node_rank)), None)


def read_files(said: Mapping[str, Any]) -> list[NodeFile]:
    """Read the answer to "artifacts"; each name must stay below the folder. Raises: Untrue."""
    files: list[NodeFile] = []
    for entry in _list(said.get("files"), most=_MOST_FILES):
        if not isinstance(entry, list) or len(entry) != 3:
            raise Untrue("a file with its size and digest was expected")
        name, size, digest = entry
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise Untrue(f"{clean(digest)[:80]!r} is not a SHA-256")
        files.append(NodeFile(check_name(name), as_size(size), digest))
    add_different({}, files)
    return files


def read_made(said: Mapping[str, Any]) -> list[tuple[str, int, float]]:
    """Read names of artifacts, their sizes, and when each was last written. Raises: Untrue."""
    found: list[tuple[str, int, float]] = []
    for entry in _list(said.get("files"), most=FILES_OF_A_LINE):
        if not isinstance(entry, list) or len(entry) != 3:
            raise Untrue("a file with its size and time was expected")
        found.append((check_name(entry[0]), as_size(entry[1]), _time(entry[2]) or 0.0))
    return found


def read_checkpoints(said: object) -> list[tuple[int, float]]:
    """Read the steps of checkpoints, and when each was saved. Raises: Untrue."""
    return _numbers_with_times(said, most=MOST_CHECKPOINTS)


def read_times(said: object) -> list[tuple[int, float]]:
    """Read offsets in a log, and when the text from each on was printed. Raises: Untrue."""
    return _numbers_with_times(said, most=LOOK_TIMES)


def _numbers_with_times(said: object, *, most: int) -> list[tuple[int, float]]:
    found: list[tuple[int, float]] = []
    for entry in _list(said, most=most):
        if not isinstance(entry, list) or len(entry) != 2:
            raise Untrue("a number and a time were expected")
        found.append((read_number(entry[0]), _time(entry[1]) or 0.0))
    return found


def add_different(files: dict[str, NodeFile], more: Sequence[NodeFile]) -> None:
    """Add ``more`` to all files that a node has listed so far, by name.

    Raises: Untrue when there are too many, or two have the same name.
    """
    number = len(files) + len(more)
    if number > _MOST_FILES:
        raise Untrue(f"it listed more than {_MOST_FILES:,} files: narrow the pattern")
    files.update((file.name, file) for file in more)
    if len(files) < number:
        raise Untrue("a name appears twice among the files")


def read_facts(said: Mapping[str, Any]) -> NodeResources:
    """Read the resources of a node. Raises: Untrue."""
    return NodeResources(
        gpus=read_number(said.get("gpus"), most=_MOST_GPUS),
        cpus=read_number(said.get("cpus"), most=_MOST_CPUS),
        memory_bytes=read_number(said.get("memory_bytes")),
        free_bytes=read_number(said.get("free_bytes")),
        torch=_text(said.get("torch"), most=100),
    )


def read_pointers(said: object) -> list[str]:
    """Read names of files, to be shown in a message. Raises: Untrue."""
    return [_text(each, most=4096) for each in _list(said, most=MOST_POINTERS)]


def read_port(said: object) -> int:
    """Read a port, or 0. Raises: Untrue."""
    return read_number(said, least=0, most=65535)


def read_number(said: object, *, least: int = 0, most: int = 1 << 62) -> int:
    """Read a whole number in a range. Raises: Untrue."""
    if type(said) is not int or not least <= said <= most:  # a bool is an int
        raise Untrue(f"{clean(said)[:40]!r}: a whole number from {least} to {most} was expected")
    return said


def check_log_name(said: object) -> str:
    """Read the name of a file that can be followed. Raises: Untrue."""
    if not isinstance(said, str) or not OUTPUT_NAME.fullmatch(said):
        raise Untrue(f"{clean(said)[:80]!r} is not a log of a job")
    return said


def clean_line(line: str) -> str:
    """Clean a line that a rank printed for a terminal or a page: keep tabs, drop colours and cursor movements."""
    line = _TERMINAL.sub("", line.rstrip("\r").rpartition("\r")[2])
    return "".join(char if char.isprintable() or char == "\t" else "?" for char in line)


def _metrics(said: object) -> dict[str, int | float | str] | None:
    """Read numbers and short texts by name; leave out more than a list shows."""
    if said is None:
        return None
    if not isinstance(said, dict):
        raise Untrue("metrics by name were expected")
    named = [(clean(name)[:_MOST_WORD_CHARS], value) for name, value in said.items()][:_MOST_METRICS]
    numbers = {name: value for name, value in named if type(value) in (int, float) and abs(value) < 1e300}
    texts = {name: clean(value)[:_MOST_WORD_CHARS] for name, value in named if isinstance(value, str)}
    return {**numbers, **texts}


def _rank(said: object) -> int:
    return read_number(said.get("rank") if isinstance(said, dict) else said, most=_MOST_RANKS)


def _list(said: object, *, most: int) -> Sequence[Any]:
    if said is None:
        return ()
    if not isinstance(said, list) or len(said) > most:
        raise Untrue(f"a list of at most {most} was expected")
    return said


def _raw_text(said: object) -> str:
    if not isinstance(said, str):
        raise Untrue("a text was expected")
    return said[:_MOST_CHARS]


def _text(said: object, *, most: int = _MOST_CHARS) -> str:
    return clean(_raw_text(said))[:most]


def _time(said: object) -> float | None:
    if said is None:
        return None
    if isinstance(said, bool) or not isinstance(said, (int, float)) or not 0 <= said < _MOST_TIME:
        raise Untrue(f"{clean(said)[:40]!r} is not a time")
    return float(said)
