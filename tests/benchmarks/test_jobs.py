"""The benchmark of jobs runs from the first row to the last; its figures here mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ..testbed.machine import find_base
from ..testbed.testbed import unavailable
from .quick import rows_of, run_quickly

ROWS = ["submit", "first", "batch", "follow_lost", "follow_behind", "list"]


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_quick_run_has_every_row_with_its_floor_and_leaves_nothing(
    tmp_path: Path, needs_debian: Callable[..., None]
) -> None:
    needs_debian("openssh-server", "iproute2", "slurmctld", "slurmd", "slurm-client", "munge")
    if reason := unavailable():
        pytest.skip(reason)
    before = set(find_base().glob("*"))
    report = run_quickly("jobs", tmp_path, limit_s=280)
    rows = rows_of(report)
    assert list(rows) == ROWS
    assert all(row["detrain_nb"] is not None for row in rows.values())
    assert all(row["floor"] is not None for row in rows.values() if row["floor_is"])
    assert rows["follow_lost"]["detrain_nb"] == 0
    assert not report["absent"]
    assert set(find_base().glob("*")) <= before, "the run left hosts behind"
