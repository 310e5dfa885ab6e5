"""The checks for a GPU machine, run on the CPU: a check that fails, hangs or dies is recorded and stops no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .quick import check_nothing_is_left

_SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


def run_checks(tmp_path: Path, *options: str, limit_s: float) -> tuple[int, str, dict[str, Any]]:
    """Return the exit status of the script, its table and its report."""
    results, scratch = tmp_path / "results", tmp_path / "scratch"
    scratch.mkdir()
    ended = subprocess.run(
        [sys.executable, str(_SCRIPT), "--results", str(results), *options],
        env={**os.environ, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    (path,) = results.iterdir()
    assert path.name.startswith("gpu-"), ended.stderr
    check_nothing_is_left(scratch)
    report: dict[str, Any] = json.loads(path.read_text())
    assert all(check["name"] in ended.stdout and check["outcome"] in ended.stdout for check in report["checks"])
    return ended.returncode, ended.stdout, report


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in report["checks"]}


def test_check_that_fails_hangs_or_dies_is_recorded_and_stops_no_other(tmp_path: Path) -> None:
    names = ["rehearsal-fails", "rehearsal-hangs", "rehearsal-dies", "rehearsal-needs", "broken", "fork"]
    options = ["--device", "cpu", "--rehearse", "--only", *names]
    status, table, report = run_checks(tmp_path, *options, limit_s=100)
    found = by_name(report)
    assert list(found) == [*names[:4], "fork", "broken"] and status == 1
    assert found["rehearsal-fails"]["outcome"] == found["rehearsal-hangs"]["outcome"] == "failed"
    assert found["rehearsal-fails"]["reason"] == "ValueError: as it was asked to"
    assert "Traceback" in found["rehearsal-fails"]["error"]
    assert "did not end within 3 s" in found["rehearsal-hangs"]["reason"]
    assert "in run" in found["rehearsal-hangs"]["error"], "where it hung"
    assert found["rehearsal-dies"]["outcome"] == "failed" and "-9" in found["rehearsal-dies"]["reason"]
    assert all(found[name]["measured"] == {"begun": True} for name in names[:3]), "what was measured until then"
    assert found["rehearsal-needs"]["reason"] == "no_such_module is missing"
    assert found["fork"]["outcome"] == "passed" and found["fork"]["measured"]["gpu_files"]["worker"] == []
    assert found["broken"]["outcome"] == "not possible here" and "no GPU" in found["broken"]["reason"]
    assert "1 passed, 3 failed, 2 not possible here" in table
    assert {"cores", "versions", "gpu"} <= set(report["machine"])


def test_without_a_gpu_nothing_is_possible_and_the_status_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    status, _, report = run_checks(tmp_path, limit_s=60)
    assert status == 2
    assert {check["outcome"] for check in report["checks"]} == {"not possible here"}
    assert all("no GPU: torch" in check["reason"] for check in report["checks"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_check_of_two_ranks_passes_on_the_cpu(tmp_path: Path) -> None:
    names = ["collectives", "hung", "long-kernel", "killed", "out-of-memory", "layout pp=2", "layout tp=2", "memory"]
    status, _, report = run_checks(tmp_path, "--device", "cpu", "--only", *names, limit_s=590)
    found = by_name(report)
    assert status == 0, [check for check in report["checks"] if check["outcome"] == "failed"]
    on_gpus = {"out-of-memory", "memory pp=2", "memory tp=2", "memory dp_shard=2"}
    assert {name for name, check in found.items() if check["outcome"] != "passed"} == on_gpus
    assert 0.9 < found["memory dp_shard=1"]["measured"]["peak_by_said_of_rank_0"] < 1.1
    assert 0 < found["layout tp=2"]["measured"]["apart"]["gradient"] < 2e-4
