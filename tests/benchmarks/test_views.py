"""The benchmark of live views runs from the first row to the last; its figures here mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from .quick import rows_of, run_quickly

ROWS = ["agent_run", "kernel_run", "agent_idle", "kernel_idle", "rank_asleep", "steps"]
ROWS += ["steps_least", "steps_median", "steps_most", "steps_cpu", "boards", "note_step"]
ROWS += ["button", "button_p95", "tiles", "tiles_worst", "settled", "list", "list_first"]


@pytest.mark.thorough
@pytest.mark.needs_debian("chromium")
@pytest.mark.timeout(240)
def test_a_quick_run_has_every_row_with_its_floor(tmp_path: Path) -> None:
    rows = rows_of(run_quickly("views", tmp_path, limit_s=220))
    assert list(rows) == ROWS
    assert all(row["detrain_nb"] is not None for row in rows.values())
    assert all(row["floor"] is not None for row in rows.values() if row["floor_is"])
