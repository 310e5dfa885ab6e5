"""The tests that `make test-near` selects, in a small tree with the imports of docs/design.md, and in a repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .checks.near import BESIDE_ROOMS_OF_THE_PACKAGE, BESIDE_THE_ROOMS, list_changed, list_importers, list_near
from .test_layout import Rules, read_rules

ROOT = Path(__file__).resolve().parent.parent
CODE = ["__init__", "errors", "plan", "agents", "launch", "locks", "values", "storage", "metrics", "__main__"]
ROOMS = ["wire", "spec", "transport", "node", "deploy", "session", "doctor", "parallel", "training", "cli"]
NO_FOLDER = ["doctor", "wire"]  # their tests are modules, not folders
TREE = [
    *(f"detrain_nb/{name}.py" for name in CODE),
    *(f"detrain_nb/{name}/__init__.py" for name in ROOMS),
    "magics/__init__.py",
    *(f"tests/{name}/test_a.py" for name in [*ROOMS, "magics", "notebooks", "testbed"] if name not in NO_FOLDER),
    "tests/session/test_b.py",
    "tests/session/conftest.py",
    *(f"tests/test_{name}.py" for name in ["ci", "doctor", "environment", "layout", "plan", "setup", "skips", "wire"]),
]


@pytest.fixture(scope="module")
def rules() -> Rules:
    return read_rules((ROOT / "docs/design.md").read_text(encoding="utf-8"))


CASES = {
    "a room, then those above it": (
        ["detrain_nb/deploy/code.py"],
        ["deploy/test_a", "session/test_a", "session/test_b", "test_doctor", "test_layout"],
    ),
    "one arrow, not two": (["detrain_nb/node/agent/agent.py"], ["node/test_a", "deploy/test_a", "test_layout"]),
    "over a room that is not built": (
        ["detrain_nb/training/trainer.py"],
        ["training/test_a", "magics/test_a", "cli/test_a", "test_layout"],
    ),
    "a folder elsewhere": (["magics/render.py"], ["magics/test_a", "test_layout"]),
    "a module": (["detrain_nb/values.py"], ["node/test_a", "training/test_a", "test_layout"]),
    "a room whose tests are a module": (
        ["detrain_nb/wire/frames.py"],
        ["test_wire", "transport/test_a", "test_layout"],
    ),
    "a changed test first": (
        ["detrain_nb/session/running/core.py", "tests/session/test_b.py", "tests/test_plan.py"],
        ["session/test_b", "test_plan", "session/test_a", "magics/test_a", "cli/test_a", "test_layout"],
    ),
    "a test that is gone": (["tests/session/test_gone.py"], ["test_layout"]),
    "what tests share": (["tests/session/conftest.py"], ["session/test_a", "session/test_b", "test_layout"]),
    "hosts for tests": (["tests/testbed/machine.py"], ["testbed/test_a", "test_layout"]),
    "a notebook": (["notebooks/01_quickstart.ipynb"], ["notebooks/test_a"]),
    "the porch": (["detrain_nb/__init__.py"], ["test_environment", "magics/test_a", "cli/test_a", "test_layout"]),
    "the command": (["detrain_nb/__main__.py"], ["cli/test_a", "test_layout"]),
    "the Makefile": (["Makefile"], ["test_ci", "test_setup"]),
    "what no test looks at": (["README.md", "docs/style.md", "detrain_nb/py.typed"], []),
}


@pytest.mark.parametrize("case", CASES)
def test_tests_near_a_change(case: str, rules: Rules) -> None:
    changed, near = CASES[case]
    assert list_near(changed, TREE, rules) == [f"tests/{name}.py" for name in near]


def test_rooms_one_arrow_above_lead_to_every_room_that_may_import(rules: Rules) -> None:
    present = set(rules.may_import)
    for room in present:
        reached, new = {room}, {room}
        while new:
            new = {over for each in new for over in list_importers(each, rules, present)} - reached
            reached |= new
        assert reached == {other for other, below in rules.may_import.items() if room in below}


def test_places_that_are_named_are_there() -> None:
    named = {**BESIDE_THE_ROOMS, **BESIDE_ROOMS_OF_THE_PACKAGE}
    places = [*BESIDE_THE_ROOMS, *(place for tests in named.values() for place in tests)]
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_change_is_what_differs_from_a_commit_with_new_and_removed_files(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, timeout=60)

    git("init", "--quiet")
    for name in ("kept", "removed", "ä b", "staged", "committed"):
        (tmp_path / name).write_text("1")
    (tmp_path / ".gitignore").write_text("ignored\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    assert list_changed(tmp_path, "HEAD") == []
    (tmp_path / "committed").write_text("2")
    git("commit", "--quiet", "--all", "--message", "second")
    for name in ("ä b", "staged", "new", "ignored"):
        (tmp_path / name).write_text("2")
    git("add", "staged")
    (tmp_path / "removed").unlink()
    assert list_changed(tmp_path, "HEAD") == ["new", "removed", "staged", "ä b"]
    assert list_changed(tmp_path, "HEAD~1") == ["committed", "new", "removed", "staged", "ä b"]
    with pytest.raises(ValueError, match="git knows no change since nowhere"):
        list_changed(tmp_path, "nowhere")
