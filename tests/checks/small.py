"""A folder of tests with our conftest.py and nothing else, for tests of what runs tests."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def lay_out_tests(folder: Path) -> Path:
    """Put pyproject.toml and a tests/ without tests into ``folder``; returns that tests/."""
    tests = folder / "tests"
    for part in ("checks", "testbed"):
        shutil.copytree(ROOT / "tests" / part, tests / part, ignore=shutil.ignore_patterns("test_*", "__pycache__"))
    shutil.copy(ROOT / "tests" / "conftest.py", tests)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return tests
