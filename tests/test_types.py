"""The parts of torch that mypy skips (pyproject.toml) hide no types of ours: the number of Any expressions is equal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from .test_layout import list_modules, names_in

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = ROOT / "pyproject.toml"


def test_what_mypy_skips_is_named_nowhere() -> None:
    skipped = tuple(f"{name}." for name in _list_skipped())
    assert skipped, "nothing is skipped: these tests can go"
    named = [
        f"{module.path}:{line}: {name} is Any for mypy: take its package out of the list with 'skip' in pyproject.toml"
        for module in list_modules(ROOT)
        for line, name in names_in(module, (ROOT / module.path).read_text(encoding="utf-8"))
        if f"{name}.".startswith(skipped)
    ]
    assert named == []


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_what_mypy_skips_takes_no_type_from_any_expression(tmp_path: Path) -> None:
    run = _lay_out(tmp_path)
    pyproject = PYPROJECT.read_text(encoding="utf-8")
    whole = pyproject.replace('follow_imports = "skip"', "")
    assert whole != pyproject
    assert run(pyproject) == run(whole)


def _list_skipped() -> list[str]:
    overrides = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["tool"]["mypy"]["overrides"]
    return [
        name.removesuffix(".*") for each in overrides if each.get("follow_imports") == "skip" for name in each["module"]
    ]


def _lay_out(folder: Path) -> Callable[[str], dict[str, tuple[int, int]]]:
    """Copy the package as in a wheel; returns a function that runs mypy: module -> (expressions that are Any, all)."""
    build = ["build", "--build-base", str(folder / "base"), "build_py", "--build-lib", str(folder / "lib")]
    lay_out = "import setuptools; setuptools.setup()"
    subprocess.run([sys.executable, "-c", lay_out, "--quiet", *build], cwd=ROOT, check=True, timeout=100)

    def run_mypy(pyproject: str) -> dict[str, tuple[int, int]]:
        config = folder / "pyproject.toml"
        config.write_text(pyproject, encoding="utf-8")
        mypy = [sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", os.devnull]
        done = subprocess.run(
            [*mypy, "--any-exprs-report", folder / "report", "--package", "detrain_nb"],
            cwd=folder,
            env={**os.environ, "MYPYPATH": str(folder / "lib")},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (folder / "report" / "any-exprs.txt").read_text(encoding="utf-8")
        found = {m[1]: (int(m[2]), int(m[3])) for m in re.finditer(r"^ *(\S+) +(\d+) +(\d+) ", lines, re.MULTILINE)}
        assert len(found) > 100
        return found

    return run_mypy
