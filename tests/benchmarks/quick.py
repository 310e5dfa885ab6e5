"""Run a benchmark quickly to its end, and check what every benchmark must show, whatever it measures."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

_FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def run_quickly(name: str, tmp_path: Path, *options: str, limit_s: float) -> dict[str, Any]:
    """Return the report of ``benchmarks/{name}.py --quick``; its rows are complete, and the run left nothing behind."""
    results, scratch = tmp_path / "results", tmp_path / "scratch"
    scratch.mkdir()
    with subprocess.Popen(
        [sys.executable, str(_FOLDER / f"{name}.py"), "--quick", *options, "--results", str(results)],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        try:
            table, errors = run.communicate(timeout=limit_s)
        finally:
            run.terminate()  # if it is still running, it stops what it has started
    assert run.returncode == 0, errors
    (path,) = results.iterdir()
    assert path.name.startswith("" if name == "session" else f"{name}-")
    report: dict[str, Any] = json.loads(path.read_text())
    assert all(row["title"] in table for row in report["rows"])
    assert {"cores", "versions"} <= set(report["machine"])
    assert len(report["load_average"]["before"]) == 3
    check_nothing_is_left(scratch)
    return report


def check_nothing_is_left(scratch: Path) -> None:
    """Check that a finished run left no files or processes; a killed process takes a moment to exit."""
    _, left = psutil.wait_procs(processes_with(scratch), timeout=30)
    assert not left, "the run left processes behind"
    assert not list(scratch.iterdir()), "the run left files behind"


def rows_of(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["key"]: row for row in report["rows"]}


def processes_with(scratch: Path) -> list[psutil.Process]:
    """Return the processes whose folder for temporary files is in ``scratch``: all that the run has started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if Path(process.environ().get("TMPDIR", "/")).is_relative_to(scratch):
                found.append(process)
    return found
