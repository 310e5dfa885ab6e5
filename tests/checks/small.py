"""A folder of tests that contains only our conftest.py, for tests of the code that runs tests."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def lay_out_tests(folder: Path) -> Path:
    """Put pyproject.toml and a tests/ without tests into ``folder``; returns that tests/."""
    tests = folder / "tests"
    shutil.copytree(ROOT / "tests/checks", tests / "checks", ignore=shutil.ignore_patterns("__pycache__"))
    (tests / "testbed").mkdir()
    # These tests start no sessions, and importing these modules takes a second.
    for of_sessions in ("testbed/fixtures.py", "checks/starts.py", "checks/shared_ranks.py"):
        (tests / of_sessions).write_text("")
    for name in ("conftest.py", "../pyproject.toml"):
        shutil.copy(ROOT / "tests" / name, tests / name)
    return tests
