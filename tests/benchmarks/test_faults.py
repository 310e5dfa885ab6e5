"""The benchmark of faults runs to its last row, and the ranks survive; what it measures here means nothing."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "faults.py"
STOPS = ["stop_loop", "stop_sleep", "stop_hung", "stop_hung_ddp", "stop_busy", "stop_recv"]
ROWS = [
    *(key for stop in STOPS for key in (stop, f"{stop}_survived")),
    *("kill", "kill_next", "kill_survived", "attach", "attach_lost", "attach_survived", "hang"),
]


@pytest.mark.slow
def test_a_quick_run_has_every_row_and_the_ranks_survive(tmp_path: Path) -> None:
    results, scratch = tmp_path / "results", tmp_path / "scratch"
    scratch.mkdir()
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--no-peers", "--results", str(results)],
        env={**os.environ, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (path,) = results.iterdir()
    assert path.name.startswith("faults-")
    result = json.loads(path.read_text())
    rows = {row["key"]: row for row in result["rows"]}
    assert list(rows) == ROWS
    assert all(row["title"] in run.stdout for row in rows.values())
    assert {key: row["detrain_nb"] for key, row in rows.items() if key.endswith("_survived")} == {
        key: 1 for key in ROWS if key.endswith("_survived")
    }
    timed = [row["detrain_nb"] for key, row in rows.items() if not key.endswith(("_survived", "_lost"))]
    assert all(isinstance(figure, float) for figure in timed), "what is there never came"
    assert rows["attach_lost"]["detrain_nb"] == 0
    assert {"cores", "versions"} <= set(result["machine"])
    assert len(result["load_average"]["before"]) == 3
    assert set(result["absent"]) == set(rows["kill"]["peers"])
    assert not list(scratch.iterdir()), "the run left files behind"
    assert not _processes_with(scratch), "the run left processes behind"


def _processes_with(scratch: Path) -> list[psutil.Process]:
    """Those whose folder for temporary files is in ``scratch``: all that the run started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if Path(process.environ().get("TMPDIR", "/")).is_relative_to(scratch):
                found.append(process)
    return found
