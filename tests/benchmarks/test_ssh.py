"""The benchmark of hosts over SSH runs, from the first row to the last; what it measures here means nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..testbed.machine import find_base
from ..testbed.testbed import unavailable

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "ssh.py"
ROWS = ["noop", "noop_far", "start", "flood", "flood_lines", "flood_lost", "flood_memory", "pull"]
ROWS += ["far_connection", "far_connection_lost", "far_stop", "far_kill", "far_kill_next", "far_kept", "far_node"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_quick_run_has_every_row_with_its_floor_and_leaves_nothing(
    tmp_path: Path, needs_debian: Callable[..., None]
) -> None:
    needs_debian("openssh-server", "iproute2")
    if reason := unavailable(has_link=True):
        pytest.skip(reason)
    results, scratch = tmp_path / "results", tmp_path / "scratch"
    scratch.mkdir()
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), "--quick", "--results", str(results)],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        try:
            table, errors = run.communicate(timeout=200)
        finally:
            run.terminate()  # where it still runs: it takes its hosts down
    assert run.returncode == 0, errors
    (path,) = results.iterdir()
    assert path.name.startswith("ssh-")
    result = json.loads(path.read_text())
    rows = {row["key"]: row for row in result["rows"]}
    assert list(rows) == ROWS
    assert all(row["title"] in table for row in rows.values())
    assert all(row["detrain_nb"] is not None for row in rows.values())
    assert all(row["floor"] is not None for row in rows.values() if row["floor_is"])
    assert rows["flood_lost"]["detrain_nb"] == rows["far_connection_lost"]["detrain_nb"] == 0
    assert rows["far_kept"]["detrain_nb"] == 1
    assert len(result["load_average"]["before"]) == 3
    assert not result["absent"]
    assert not list(scratch.iterdir()), "the run left files behind"
    assert not list(find_base().glob(f"[a-z]{run.pid}")), "the run left hosts behind"
