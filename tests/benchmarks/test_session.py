"""The benchmark of a session runs from the first row to the last; its figures here mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from .quick import rows_of, run_quickly

ROWS = [
    *("noop", "noop_per_rank", "print", "print_p95", "flood", "flood_end", "flood_lost", "flood_wire"),
    *("pull", "push", "push_all", "start_few", "start_many", "restart_few", "restart_many", "first_cell"),
]


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_quick_run_has_every_row_with_its_floor(tmp_path: Path) -> None:
    report = run_quickly("session", tmp_path, "--no-peers", limit_s=280)
    rows = rows_of(report)
    assert list(rows) == ROWS
    assert all(row["detrain_nb"] is not None for row in rows.values())
    assert all(row["floor"] is not None for row in rows.values() if row["floor_is"])
    assert rows["flood_lost"]["detrain_nb"] == 0
    assert set(report["absent"]) == set(rows["noop"]["peers"])
