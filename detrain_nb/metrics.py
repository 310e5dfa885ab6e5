"""Numbers of a training, logged by its ranks and read back: JSON lines, one file for each rank."""

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
STEPS_VARIABLE = "DETRAIN_NB_STEPS"  # where the ranks of a node say which step they have reached
STEP_RECORD = struct.Struct("<QQqQ")  # process, its calls, the last step, when: a place for each rank of the node
_USUAL_FOLDER = "metrics"
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
MOST_LINE_BYTES = 1 << 18  # a longer one is passed over
_MOST_VALUES = 1000  # of one line
_OWN_NAMES = {"step", "time", "rank"}
NO_VALUES = _OWN_NAMES | {"run", "total_steps"}  # what of a line says where a value belongs
_APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK"))


def log_metrics(step: int, values: dict[str, Any] | None = None, *, folder: str | None = None, **more: Any) -> None:
    """Add a line to this rank's file: ``step``, the time, and numbers (or short texts) by name.

    ``folder`` is by default what ``DETRAIN_NB_METRICS`` names, else ``metrics`` where the rank runs. A tensor of one
    element counts as its number; ``total_steps`` says once how many steps there will be. A line is written at once and
    as a whole: who reads meanwhile sees no half of it.
    Raises: SpecError for what is no number, for too long texts, or no file; OSError, also where the file is a link: in
    a folder of a group others could have put it there.
    """
    given = {**(values or {}), **more}
    if taken := _OWN_NAMES & given.keys():
        raise SpecError(f"{min(taken)} is in every line already: give the value another name")
    if len(given) > _MOST_VALUES:
        raise SpecError(f"{len(given)} values for step {step}: a line has {_MOST_VALUES} at most")
    rank = int(os.environ.get("RANK", "0"))
    line: dict[str, Any] = {"step": _whole(step), "time": round(time.time(), 3), "rank": rank}
    line |= {name: _plain(name, value) for name, value in given.items()}
    if line.get("total_steps") is not None:
        line["total_steps"] = _whole(line["total_steps"], "total_steps")
    try:
        written = json.dumps(line).encode() + b"\n"
    except (TypeError, ValueError) as exc:
        raise SpecError(f"step {line['step']} cannot be written: {exc}") from exc
    if len(written) >= MOST_LINE_BYTES:
        raise SpecError(f"step {line['step']} has {len(written):,} bytes: a line has {MOST_LINE_BYTES:,} at most")
    file = Path(folder or os.environ.get(FOLDER_VARIABLE) or _USUAL_FOLDER) / f"rank-{rank}.jsonl"
    try:
        descriptor = os.open(file, _APPEND, 0o666)
    except FileNotFoundError:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, _APPEND, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise SpecError(f"{file} is no file: remove it, or log to another folder")
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # as a full disk leaves it
        os.write(descriptor, b"\n" * is_torn + written)
    finally:
        os.close(descriptor)
    note_step(line["step"])


def note_step(step: int) -> None:
    """Let who watches this rank know that it has reached ``step``; costs some microseconds, and nothing elsewhere."""
    if not (path := os.environ.get(STEPS_VARIABLE)):
        return
    with contextlib.suppress(OSError, ValueError, OverflowError, struct.error):  # without such a place nobody watches
        place = STEP_RECORD.size * int(os.environ.get("LOCAL_RANK", ""))
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            pid, calls, *_ = STEP_RECORD.unpack(os.pread(descriptor, STEP_RECORD.size, place))
            calls = calls + 1 if pid == os.getpid() else 1
            os.pwrite(descriptor, STEP_RECORD.pack(os.getpid(), calls, step, time.monotonic_ns()), place)
        finally:
            os.close(descriptor)


def read_metrics(folder: str | None = None, *, rank: int | None = None, run: str | None = None) -> list[dict[str, Any]]:
    """Return what was logged in ``folder`` (as ``log_metrics`` has it), of all ranks or of one, by step and rank.

    ``run``: of all that were logged there only this one, or, with "last", the one that began last; a Trainer's lines
    have the time at which it began to fit. A line that is not whole, as a full disk leaves it, is passed over.
    """
    place = Path(folder or os.environ.get(FOLDER_VARIABLE) or _USUAL_FOLDER)
    files = sorted(place.glob("rank-*.jsonl")) if rank is None else [place / f"rank-{rank}.jsonl"]
    lines = [line for file in files if file.is_file() for line in _lines_of(file)]
    if run is not None:
        wanted = max((str(line.get("run", "")) for line in lines), default="") if run == "last" else run
        lines = [line for line in lines if line.get("run", "") == wanted]
    return sorted(lines, key=lambda line: (line["step"], line["rank"]))


def _texts_of(file: Path) -> Iterator[str]:
    """The lines that are not too long; none of what is no file: a device has no end."""
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
    """What ``log_metrics`` has written as one line; None where it is not whole, or something else."""
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
    """JSON has no NaN and no infinity: they are texts there."""
    if isinstance(value, (str, bool)) or value is None:
        return value
    try:
        number = value.item() if hasattr(value, "item") else value
        if isinstance(number, int):
            return number
        return float(number) if math.isfinite(number) else str(float(number))
    except (TypeError, ValueError, RuntimeError) as exc:
        raise SpecError(f"{name}={value!r:.80} is no number: log numbers, or tensors of one element") from exc


def _number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value
