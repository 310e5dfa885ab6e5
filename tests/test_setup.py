"""What the Makefile does on other machines, shown with stand-ins for programs of the system."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from .session.soon import assert_soon

ROOT = Path(__file__).resolve().parent.parent
AKASH_LOCK = ROOT / "tests/formats/akash/package-lock.json"


@pytest.fixture
def make(tmp_path: Path):
    """Run make with only the given scripts and a few real programs on PATH; returns its status and its output."""
    for name in ["sh", "mkdir", "sed", "tr", "cat", "cp", "rm"]:
        (tmp_path / name).symlink_to(shutil.which(name) or name)

    def run_make(*arguments: str, **scripts: str) -> tuple[int, str]:
        for name, script in scripts.items():
            path = tmp_path / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        done = subprocess.run(
            [shutil.which("make") or "make", f"VENV={tmp_path}/venv", *arguments],
            cwd=ROOT,
            env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout

    return run_make


def test_python_that_is_missing_is_named(make) -> None:
    status, output = make("install", "PYTHON=python9")
    assert status != 0
    assert "python9 is not found: install Python 3.11 or newer, or name one" in output


def test_python_that_is_too_old_is_named_with_its_version(make) -> None:
    status, output = make("install", python3='[ "$1" = --version ] && echo Python 3.9.2; exit 1')
    assert status != 0
    assert "Python 3.9.2 is too old: install Python 3.11 or newer and name it" in output


WITHOUT_ENSUREPIP = 'case "$2" in *version_info\\ *) exit 0 ;; *ensurepip*) exit 1 ;; *) echo python3.11-venv ;; esac'


def test_python_without_ensurepip_names_the_package_that_brings_it(make, tmp_path: Path) -> None:
    status, output = make("install", python3=WITHOUT_ENSUREPIP, dpkg_query="exit 1")
    assert status != 0
    assert "without python3.11-venv (no apt-get here)" in output
    assert "python3 lacks ensurepip: on Debian and Ubuntu run 'apt-get install python3.11-venv' as root" in output
    assert not (tmp_path / "venv").exists()


APT_GET = 'echo "apt-get $*"'


def test_root_gets_the_missing_packages_after_one_update(make) -> None:
    installed = 'case "$3" in dataset-fashion-mnist) exit 1 ;; *) printf installed ;; esac'
    status, output = make("test-deps", dpkg_query=installed, apt_get=APT_GET, id="echo 0")
    assert (status, output.splitlines()[-5:-2]) == (
        0,
        [
            "installing Debian packages: dataset-fashion-mnist",
            "apt-get -qq update",
            "apt-get -qq install --yes --no-install-recommends dataset-fashion-mnist",
        ],
    )


@pytest.mark.parametrize(
    ("arguments", "user", "message"),
    [
        (
            ["SYSTEM_DEPS=no"],
            "0",
            "without dataset-fashion-mnist (SYSTEM_DEPS=no): the quickstart trains on the digits",
        ),
        ([], "1000", "without dataset-fashion-mnist ('apt-get install dataset-fashion-mnist' as root brings it): the"),
    ],
)
def test_packages_are_left_alone_without_leave(make, arguments: list[str], user: str, message: str) -> None:
    status, output = make("data", *arguments, dpkg_query="exit 1", apt_get=APT_GET, id=f"echo {user}")
    assert status == 0
    assert message in output
    assert "apt-get -qq" not in output


def test_package_that_cannot_be_installed_stops_nothing(make) -> None:
    status, output = make("data", dpkg_query="exit 1", apt_get="exit 100", id="echo 0")
    assert status == 0
    assert "could not install dataset-fashion-mnist: the quickstart trains on the digits of scikit-learn" in output


def test_nothing_is_said_when_all_is_there(make) -> None:
    assert make("data", "-s", dpkg_query="printf installed") == (0, "")


RUNS_ON = """#!/bin/sh
case "$*" in *checks.flaky*) exit ;; esac
echo $$ >"$PID_FILE.new" && mv "$PID_FILE.new" "$PID_FILE"
exec sleep 60
"""


def _mark_as_fetched(share: Path) -> None:
    """Create the files that npm would download for the tests, so that npm, which may take long, is not run."""
    axe = re.search("^AXE := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert axe
    files = {"axe-core/version": axe[1], "axe-core/axe.min.js": "", "akash/installed.json": AKASH_LOCK.read_text()}
    for name, text in files.items():
        (share / name).parent.mkdir(parents=True, exist_ok=True)
        (share / name).write_text(text)
    (share / "akash" / "node_modules").mkdir()


def test_npm_is_asked_for_what_is_missing_alone(make, tmp_path: Path) -> None:
    calls, share = tmp_path / "calls", tmp_path / "venv" / "share"
    _mark_as_fetched(share)

    def ask() -> list[str]:
        status, output = make("test-deps", dpkg_query="printf installed", npm=f'echo "$1" >>{calls}; exit 1')
        assert status == 0, output
        return calls.read_text().split() if calls.exists() else []

    assert ask() == []
    (share / "axe-core" / "axe.min.js").unlink()
    (share / "akash" / "node_modules").rmdir()
    assert ask() == ["pack", "ci"]


@pytest.mark.parametrize("target", ["test", "test-slow", "test-thorough", "test-all", "test-near"])
def test_make_that_is_ended_ends_the_tests_that_it_runs(target: str, tmp_path: Path) -> None:
    venv, pid_file = tmp_path / "venv", tmp_path / "pid"
    for name in ("venv", "torch", "test"):
        (venv / ".done").mkdir(parents=True, exist_ok=True)
        (venv / ".done" / name).touch()
    _mark_as_fetched(venv / "share")
    for name in ("python", "pytest"):
        (venv / "bin").mkdir(exist_ok=True)
        (venv / "bin" / name).write_text(RUNS_ON)
        (venv / "bin" / name).chmod(0o755)
    # The shell expands this pattern; without one make would run some commands itself.
    command = ["make", f"VENV={venv}", "SYSTEM_DEPS=no", "PYTEST_ARGS=tests/test_setup*", target]
    environment = {**os.environ, "PID_FILE": str(pid_file)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as make:
        try:
            assert_soon(pid_file.exists)
            running = psutil.Process(int(pid_file.read_text()))
        finally:
            make.terminate()
    try:
        assert_soon(lambda: not running.is_running())
    finally:
        if running.is_running():
            running.kill()


def test_ci_runs_every_part_and_fails_with_any(tmp_path: Path) -> None:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    shutil.copytree(ROOT / "tests/checks", tmp_path / "tests/checks")
    (tmp_path / "Makefile").write_text("lint docs test-slow:\n\t@echo $@ $$DETRAIN_NB_CI\ntest:\n\t@cat; exit 1\n")
    done = subprocess.run(
        [tmp_path / ".ci/run"],
        env={key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))},
        stdin=subprocess.PIPE,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "lint 1" in done.stdout
    assert "test-slow 1" in done.stdout
    assert "make lint: passed" in done.stdout
    assert "make test: FAILED" in done.stdout


def test_other_python_that_is_not_installed_is_named_and_left_out(make) -> None:
    """pyenv puts a shim on PATH for every version, even one that is not active."""
    shim = "echo 'pyenv: python3.12: command not found' >&2; exit 127"
    status, output = make("test-pythons", "SYSTEM_DEPS=no", date="echo 0", **{"python3.12": shim})
    assert status == 0, output
    for version in ("3.12", "3.13", "3.10"):
        assert f"Python {version}: skipped, no python{version} runs from PATH and pyenv has none\n" in output


def test_other_python_whose_tests_fail_makes_all_fail(make, tmp_path: Path) -> None:
    status, output = make("test-pythons", "SYSTEM_DEPS=no", date="echo 0", **{"python3.12": "echo python3.12; exit 0"})
    assert status != 0
    assert "Python 3.12: FAILED after 0 s, python3.12\n" in output
    assert "Python 3.13: skipped" in output
    assert not (tmp_path / "venv").exists()
