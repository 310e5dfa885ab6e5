"""Metrics of a training run, logged by its ranks and read back: JSON lines, one file per rank."""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import SpecError

__all__ = ["FOLDER_VARIABLE", "MOST_LINE_BYTES", "NO_VALUES", "log_metrics", "read_metrics", "read_metrics_line"]

FOLDER_VARIABLE = "DETRAIN_NB_METRICS"
STEPS_VARIABLE = "DETRAIN_NB_STEPS"  # the file in which the ranks of a node record the step they have reached
STEP_RECORD = struct.Struct("<QQqQ")  # pid, its number of calls, the last step, its time: one record per local rank
_USUAL_FOLDER = "metrics"
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
MOST_LINE_BYTES = 1 << 18  # longer lines are skipped
_MOST_VALUES = 1000  # per line
_OWN_NAMES = {"step", "time", "rank"}
NO_VALUES = _OWN_NAMES | {"run", "total_steps"}  # keys of a line that are not metrics
_APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK"))


def log_metrics(step: int, values: dict[str, Any] | None = None, *, folder: str | None = None, **more: Any) -> None:
    """Append a line to this rank's file: ``step``, the time, and numbers (or short strings) by name.

    The file is ``rank-R.jsonl``, with R from the variable ``RANK``, else 0; ranks do not wait for each other. Values
    are given in ``values`` or as keywords. ``folder`` defaults to the one in ``DETRAIN_NB_METRICS``, else ``metrics``
    in the current folder. A tensor of one element is logged as its number; ``total_steps``, given once, is the planned
    number of steps. A line is written at once and whole: a concurrent reader never sees half a line.
    Raises: SpecError for a reserved name, a value that is not a number or a string, too many values, a line that is
    too long, or a path that is not a regular file; OSError, also when the file is a link, which another member of the
    folder's group could have put there.
    """
    given = {**(values or {}), **more}
    if taken := _OWN_NAMES & given.keys():
        raise SpecError(f"the name {min(taken)} is reserved, every line has one: give the value another name")
    if len(given) > _MOST_VALUES:
        raise SpecError(f"step {step} has {len(given)} values: a line can hold at most {_MOST_VALUES}")
    rank = int(os.environ.get("RANK", "0"))
    line: dict[str, Any] = {"step": _whole(step), "time": round(time.time(), 3), "rank": rank}
    line |= {name: _plain(name, value) for name, value in given.items()}
    if line.get("total_steps") is not None:
        line["total_steps"] = _whole(line["total_steps"], "total_steps")
    try:
        written = json.dumps(line).encode() + b"\n"
    except (TypeError, ValueError) as exc:
        raise SpecError(f"cannot write step {line['step']}: {exc}") from exc
    if len(written) >= MOST_LINE_BYTES:
        raise SpecError(f"step {line['step']} takes {len(written):,} bytes: a line has room for {MOST_LINE_BYTES:,}")
    file = Path(folder or os.environ.get(FOLDER_VARIABLE) or _USUAL_FOLDER) / f"rank-{rank}.jsonl"
    try:
        descriptor = os.open(file, _APPEND, 0o666)
    except FileNotFoundError:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, _APPEND, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise SpecError(f"{file} is not a regular file: remove it, or log to another folder")
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # by a full disk
        os.write(descriptor, b"\n" * is_torn + written)
    finally:
        os.close(descriptor)
    note_step(line["step"])


def note_step(step: int) -> None:
    """Record that this rank has reached ``step``, for live views; takes microseconds, and nothing outside a session."""
    if not (path := os.environ.get(STEPS_VARIABLE)):
        return
    with contextlib.suppress(OSError, ValueError, OverflowError, struct.error):  # no record file, no view
        place = STEP_RECORD.size * int(os.environ.get("LOCAL_RANK", ""))
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            pid, calls, *_ = STEP_RECORD.unpack(os.pread(descriptor, STEP_RECORD.size, place))
            calls = calls + 1 if pid == os.getpid() else 1
            os.pwrite(descriptor, STEP_RECORD.pack(os.getpid(), calls, step, time.monotonic_ns()), place)
        finally:
            os.close(descriptor)


def read_metrics(folder: str | None = None, *, rank: int | None = None, run: str | None = None) -> list[dict[str, Any]]:
    """Return the lines logged in ``folder`` (default as in ``log_metrics``), of all ranks or one, by step and rank.

    ``run`` selects one of several runs logged there, "last" the one that began last; a Trainer labels its lines with
    the time at which ``fit`` began. Incomplete lines, which a full disk leaves behind, and too long ones are skipped.

    Each line is a dict with ``step``, ``time`` (seconds since the epoch), ``rank`` and the values. The list is empty
    when there are none.
    """
    place = Path(folder or os.environ.get(FOLDER_VARIABLE) or _USUAL_FOLDER)
    files = sorted(place.glob("rank-*.jsonl")) if rank is None else [place / f"rank-{rank}.jsonl"]
    lines = [line for file in files if file.is_file() for line in _lines_of(file)]
    if run is not None:
        wanted = max((str(line.get("run", "")) for line in lines), default="") if run == "last" else run
        lines = [line for line in lines if line.get("run", "") == wanted]
    return sorted(lines, key=lambda line: (line["step"], line["rank"]))


def _texts_of(file: Path) -> Iterator[str]:
    """Yield the lines that are not too long; none if it is not a regular file, as a device never ends."""
    with contextlib.suppress(FileNotFoundError), open(os.open(file, _READ), "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            return
        is_begin = True
        while text := opened.readline(MOST_LINE_BYTES):
            is_end = text.endswith(b"\n")
            if is_begin and (is_end or len(text) < MOST_LINE_BYTES):
                yield text.decode("utf-8", errors="replace")
            is_begin = is_end


def _lines_of(file: Path) -> Iterator[dict[str, Any]]:
    for text in _texts_of(file):
        if line := read_metrics_line(text):
            yield line


def read_metrics_line(text: str) -> dict[str, Any] | None:
    """Parse one line that ``log_metrics`` wrote; None when it is incomplete or something else."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(line, dict) and all(_is_number(line.get(name)) for name in ("step", "rank")):
        return {name: _number(value) for name, value in line.items() if not isinstance(value, (list, dict))}
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int) and abs(value) < 1 << 63


def _whole(step: Any, name: str = "step") -> int:
    try:
        if (number := int(step)) == step and _is_number(number):
            return number
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise SpecError(f"{name} {step!r:.80}: give a whole number of 64 bits")


def _plain(name: str, value: Any) -> Any:
    """Convert a value for JSON, which has no NaN and no infinity: they become strings."""
    if isinstance(value, (str, bool)) or value is None:
        return value
    try:
        number = value.item() if hasattr(value, "item") else value
        if isinstance(number, int):
            return number
        return float(number) if math.isfinite(number) else str(float(number))
    except (TypeError, ValueError, RuntimeError) as exc:
        raise SpecError(f"{name}={value!r:.80} is not a number: log numbers, or tensors of one element") from exc


def _number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value
