"""The benchmark of faults runs to its last row, and the ranks survive; its figures here mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from .quick import rows_of, run_quickly

STOPS = ["stop_loop", "stop_sleep", "stop_hung", "stop_hung_ddp", "stop_busy", "stop_recv"]
ROWS = [
    *(key for stop in STOPS for key in (stop, f"{stop}_survived")),
    *("kill", "kill_next", "kill_survived", "attach", "attach_lost", "attach_survived", "hang"),
]


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_quick_run_has_every_row_and_the_ranks_survive(tmp_path: Path) -> None:
    report = run_quickly("faults", tmp_path, "--no-peers", limit_s=280)
    rows = rows_of(report)
    assert list(rows) == ROWS
    assert {key: row["detrain_nb"] for key, row in rows.items() if key.endswith("_survived")} == {
        key: 1 for key in ROWS if key.endswith("_survived")
    }
    timed = [row["detrain_nb"] for key, row in rows.items() if not key.endswith(("_survived", "_lost"))]
    assert all(isinstance(figure, float) for figure in timed), "what is there never came"
    assert rows["attach_lost"]["detrain_nb"] == 0
    assert set(report["absent"]) == set(rows["kill"]["peers"])
