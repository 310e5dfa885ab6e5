"""The benchmark of hosts over SSH runs from the first row to the last; its figures here mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ..testbed.machine import find_base
from ..testbed.testbed import unavailable
from .quick import rows_of, run_quickly

ROWS = ["noop", "noop_far", "start", "flood", "flood_lines", "flood_lost", "flood_memory", "pull"]
ROWS += ["far_connection", "far_connection_lost", "far_stop", "far_kill", "far_kill_next", "far_kept", "far_node"]


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_a_quick_run_has_every_row_with_its_floor_and_leaves_nothing(
    tmp_path: Path, needs_debian: Callable[..., None]
) -> None:
    needs_debian("openssh-server", "iproute2")
    if reason := unavailable(has_link=True):
        pytest.skip(reason)
    before = set(find_base().glob("*"))
    report = run_quickly("ssh", tmp_path, limit_s=200)
    rows = rows_of(report)
    assert list(rows) == ROWS
    assert all(row["detrain_nb"] is not None for row in rows.values())
    assert all(row["floor"] is not None for row in rows.values() if row["floor_is"])
    assert rows["flood_lost"]["detrain_nb"] == rows["far_connection_lost"]["detrain_nb"] == 0
    assert rows["far_kept"]["detrain_nb"] == 1
    assert not report["absent"]
    assert set(find_base().glob("*")) <= before, "the run left hosts behind"
