"""The benchmark of models over ranks runs to its last row, and losses agree; its figures here mean nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from .quick import rows_of, run_quickly

LAYOUTS = ["pipeline", "tensor", "shards"]
ROWS = [
    *(key for layout in LAYOUTS for key in (layout, f"{layout}_apart")),
    *("mlp_32_4", "mlp_32_4_same", "mlp_32_4_torch", "efficiency", "efficiency_bound"),
    *("gpt", "gpt_cuts", "resnet", "resnet_cuts", "profile", "profile_memory", "profile_parameters", "partition"),
    *("trainer", "trainer_plain", "trainer_blind", "save", "save_done", "digests_save", "digests_load"),
]
OF_A_PEER = ("mlp_32_4", "mlp_32_4_same")


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_quick_run_has_every_row_and_losses_agree(tmp_path: Path) -> None:
    report = run_quickly("parallel", tmp_path, limit_s=280)
    rows = rows_of(report)
    assert list(rows) == ROWS
    assert all(math.isfinite(row["detrain_nb"]) for row in rows.values())
    held = [row for key, row in rows.items() if row["floor_is"] and not (key in OF_A_PEER and report["absent"])]
    assert all(math.isfinite(row["floor"]) and row["floor"] > 0 for row in held)
    assert all(rows[f"{layout}_apart"]["detrain_nb"] < 1e-4 for layout in LAYOUTS)
    assert rows["gpt_cuts"]["detrain_nb"] == rows["gpt_cuts"]["floor"] > 1
    assert rows["resnet_cuts"]["detrain_nb"] == rows["resnet_cuts"]["floor"] > 1
    assert set(report["absent"].values()) <= {"not installed"}
