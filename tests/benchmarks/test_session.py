"""The benchmark runs, from the first row to the last; what it measures here means nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "session.py"
ROWS = [
    *("noop", "noop_per_rank", "print", "print_p95", "flood", "flood_end", "flood_lost", "flood_wire"),
    *("pull", "push", "push_all", "start_few", "start_many", "first_cell"),
]


@pytest.mark.slow
def test_a_quick_run_has_every_row_with_its_floor(tmp_path: Path) -> None:
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
    result = json.loads(path.read_text())
    rows = {row["key"]: row for row in result["rows"]}
    assert list(rows) == ROWS
    assert all(row["title"] in run.stdout for row in rows.values())
    assert all(row["detrain_nb"] is not None for row in rows.values())
    assert all(row["floor"] is not None for row in rows.values() if row["floor_is"])
    assert rows["flood_lost"]["detrain_nb"] == 0
    assert {"cores", "versions"} <= set(result["machine"])
    assert len(result["load_average"]["before"]) == 3
    assert set(result["absent"]) == set(rows["noop"]["peers"])
    assert not list(scratch.iterdir()), "the run left files behind"
