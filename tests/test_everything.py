"""What `make test-all` runs, remembers and shows, with a small repository of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .checks import everything
from .checks.everything import Verdict, draw_table, list_rooms, run_rooms
from .checks.small import lay_out_tests

ROOT = Path(__file__).resolve().parent.parent
PYTEST = [sys.executable, "-m", "pytest", "-p", "pytest_timeout"]
MODULES = {
    "test_layout.py": "def test_top(): pass\n",
    "node/test_agent.py": """
import pytest
def test_quick(): pass
@pytest.mark.slow
def test_slow(): pass
@pytest.mark.thorough
def test_thorough(): pass
def test_skipped(): pytest.skip("needs a GPU")
""",
    "spec/test_node.py": """
from pathlib import Path
def test_good(): pass
def test_bad():
    with open("build/runs", "a") as file: file.write("x")
    assert Path("build/mended").exists()
""",
}

Run = Callable[..., dict[str, Verdict]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tests = lay_out_tests(tmp_path)
    (tmp_path / ".gitignore").write_text("build/\n__pycache__/\n.hypothesis/\n.pytest_cache/\n")
    for name, source in MODULES.items():
        (tests / name).parent.mkdir(exist_ok=True)
        (tests / name).write_text(source)
    _git(tmp_path, "init", "--quiet")
    _commit(tmp_path)
    return tmp_path


@pytest.fixture
def run(root: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # most of the time of such a run
    monkeypatch.delenv("DETRAIN_NB_CI", raising=False)

    def run_all(*names: str, options: tuple[str, ...] = (), **how: object) -> dict[str, Verdict]:
        verdicts = run_rooms(root, names, [*PYTEST, *options], **how)  # type: ignore[arg-type]
        return {verdict.room: verdict for verdict in verdicts}

    return run_all


def _git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True, timeout=60)


def _commit(root: Path) -> None:
    _git(root, "add", ".")
    _git(root, "commit", "--quiet", "--allow-empty", "--message", "state")


def _numbers(verdict: Verdict) -> tuple[str, int, int, int]:
    return verdict.outcome, verdict.passed, verdict.failed, verdict.skipped


def test_rooms_are_the_folders_and_what_stands_beside_them() -> None:
    rooms = list_rooms(ROOT)
    found = [
        path
        for places in rooms.values()
        for place in places
        for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("test_*.py"))
    ]
    assert sorted(found) == sorted((ROOT / "tests").rglob("test_*.py"))
    assert {"top", "session", "testbed"} <= set(rooms)
    assert "checks" not in rooms


def test_every_test_of_every_room_is_run_once(run: Run, root: Path) -> None:
    verdicts = run()
    assert {name: _numbers(verdict) for name, verdict in verdicts.items()} == {
        "top": ("passed", 1, 0, 0),
        "node": ("passed", 3, 0, 1),
        "spec": ("FAILED", 1, 1, 0),
    }
    assert (root / "build/runs").read_text() == "x"  # a failure is not rerun
    assert "test_bad" in (root / "build/test-all/spec.log").read_text()
    table = draw_table(list(verdicts.values())).splitlines()
    assert [line.split() for line in table] == [
        ["room", "seconds", "passed", "failed", "skipped"],
        ["top", f"{verdicts['top'].seconds:.0f}", "1", "0", "0", "passed"],
        ["node", f"{verdicts['node'].seconds:.0f}", "3", "0", "1", "passed"],
        ["spec", f"{verdicts['spec'].seconds:.0f}", "1", "1", "0", "FAILED"],
        ["all", f"{sum(verdict.seconds for verdict in verdicts.values()):.0f}", "5", "1", "1", "FAILED"],
    ]


def test_second_call_runs_what_has_not_passed(run: Run, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run()
    (root / "build/mended").touch()  # git ignores this folder: the key of the tree is unchanged
    capsys.readouterr()
    second = run()
    said = capsys.readouterr().out
    assert [name for name in second if f"{name}: passed before" in said] == ["top", "node"]
    assert (second["top"], second["node"]) == (first["top"], first["node"])
    assert _numbers(second["spec"]) == ("passed", 2, 0, 0)
    run("top", is_fresh=True)
    assert "passed before" not in capsys.readouterr().out


@pytest.mark.parametrize("change", ["commit", "known file", "new file", "options"])
def test_pass_is_forgotten_when_anything_changed(
    change: str, run: Run, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("top")
    run("top")
    assert "top: passed before" in capsys.readouterr().out
    if change == "commit":
        _commit(root)
    elif change == "known file":
        (root / ".gitignore").write_text("build/\n__pycache__/\n.hypothesis/\n.pytest_cache/\n*.log\n")
    elif change == "new file":
        (root / "new.py").touch()
    run("top", options=("-k", "top") if change == "options" else ())
    assert "top: passed after" in capsys.readouterr().out


def test_room_that_passed_while_files_changed_is_run_again(
    run: Run, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "tests/test_layout.py").write_text(
        "import os, pathlib\ndef test_top(): pathlib.Path(f'made{os.getpid()}').touch()\n"
    )
    verdicts = run("top")
    assert verdicts["top"].is_passed
    assert "files changed while they ran: top" in draw_table(list(verdicts.values()))
    run("top")
    assert "passed before" not in capsys.readouterr().out


def test_deadline_names_the_rooms_that_were_not_reached(run: Run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "MIN_ROOM_S", 1.0)
    waits = "import time\ndef test_first(): pass\ndef test_waits(): time.sleep(100)\n"
    (root / "tests/node/test_agent.py").write_text(waits)
    verdicts = run("node", "spec", limit_s=everything.GRACE_S + 8)
    assert _numbers(verdicts["node"]) == ("at the deadline", 1, 0, 0)
    assert verdicts["node"].seconds < 30  # the room's time excludes the grace period
    assert verdicts["spec"] == Verdict("spec", "not reached")
    table = draw_table(list(verdicts.values()))
    assert "at the deadline: node: `make test-all` goes on with them" in table
    assert "not reached: spec: `make test-all` goes on with them" in table
    assert "FAILED" in table.splitlines()[3]


def test_pytest_that_crashes_has_not_passed(run: Run, root: Path) -> None:
    (root / "tests/test_layout.py").write_text("import os\ndef test_top(): os._exit(0)\n")
    assert run("top")["top"].outcome == "FAILED"


def test_unknown_room_is_an_error(run: Run) -> None:
    with pytest.raises(ValueError, match="nodes: no room of tests/, which has top node spec"):
        run("nodes")
