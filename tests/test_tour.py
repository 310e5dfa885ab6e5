"""docs/tour.md and docs/two_hosts.md show the real output of their cells.

`python -m tests.checks.tour` and `python -m tests.checks.two_hosts` rewrite the output.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .checks.tour import TOUR, read_cells, run_cells, write_shown
from .checks.two_hosts import TWO_HOSTS, run_page
from .testbed.fixtures import MakeTestbed


def test_output_is_put_behind_its_cell() -> None:
    page = "a\n\n```python\n1\n```\n\n```text\n0\n```\n\n```python\n2\n```\nb\n"
    assert list(read_cells(page)) == [("1\n", "0\n"), ("2\n", "")]
    written = write_shown(page, ["", "2\n"])
    assert written == "a\n\n```python\n1\n```\n\n```python\n2\n```\n\n```text\n2\n```\nb\n"
    assert list(read_cells(written)) == [("1\n", ""), ("2\n", "2\n")]


@pytest.mark.slow
def test_every_cell_of_the_tour_prints_what_the_page_shows(tmp_path: Path) -> None:
    cells = list(read_cells(TOUR.read_text(encoding="utf-8")))
    assert len(cells) > 10
    shown = run_cells([code for code, _ in cells], tmp_path)
    assert list(zip([code for code, _ in cells], shown, strict=True)) == cells


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_every_cell_on_two_hosts_prints_what_the_page_shows(
    make_testbed: MakeTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", os.environ["HOME"])  # restored after the test
    text = TWO_HOSTS.read_text(encoding="utf-8")
    cells = list(read_cells(text))
    shown = run_page(text, make_testbed, tmp_path)
    assert list(zip([code for code, _ in cells], shown, strict=True)) == cells
