"""This machine's records of sessions that it started: private to the user, and validated when they are read."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from detrain_nb.deploy.known import KnownSession, StartedWith, forget, known_sessions, remember, session_names
from detrain_nb.spec.node import Node

_NODES = (Node(host="gpu1", ranks=2), Node(host="gpu2.example.org", name="right", user="alice", ranks=2))
_STARTED = StartedWith(2, "cpu", "gloo", False, False, ("HF_TOKEN", "DEBUG"), 7, "exec", 30.5, 90.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty run directory."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("DETRAIN_NB_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_what_is_remembered_is_known(folder: Path) -> None:
    remember("train", _NODES, holder="a notebook", started=_STARTED)
    known = known_sessions()["train"]
    assert (known.holder, known.nodes, known.started) == ("a notebook", _NODES, _STARTED)
    assert session_names() == ["train"]
    forget("train")
    assert (known_sessions(), session_names(), list(folder.iterdir())) == ({}, [], [])


@pytest.mark.parametrize(
    ("linger_s", "words"),
    [
        (600.0, "10 minutes"), (60, "1 minute"), (90, "90 seconds"), (5400, "90 minutes"), (7200, "2 hours"),
        (86_400, "1 day"), (0, "0 seconds"), (0.5, "0.5 seconds"), (None, "some time"),
    ],
)  # fmt: skip
def test_session_says_when_it_ends_by_itself(linger_s: float | None, words: str) -> None:
    known = KnownSession("a notebook", 12, started=StartedWith(linger_s=linger_s))
    assert known.own_end == f"it ends {words} after its notebook leaves"
    assert KnownSession("a notebook", 12).own_end == "it ends some time after its notebook leaves", "unknown"


def test_only_this_user_can_read_it_and_nothing_lies_beside_it(folder: Path) -> None:
    remember("train", _NODES, holder="a notebook", started=_STARTED)
    [below] = folder.iterdir()
    [file] = below.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (below, file)] == [0o700, 0o600]


def test_it_is_on_the_disk_before_it_has_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a crash of the machine could leave an empty file under that name."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    remember("train", _NODES, holder="a notebook", started=_STARTED)
    assert synced == [(folder / ".remote" / "train.json").stat().st_ino]


def test_values_of_variables_are_not_written(folder: Path) -> None:
    remember("train", _NODES, holder="a notebook", started=_STARTED)
    [file] = (folder / ".remote").iterdir()
    assert json.loads(file.read_text())["started"]["env"] == ["HF_TOKEN", "DEBUG"]


def test_start_stays_known_when_only_the_nodes_are_noted_again(folder: Path) -> None:
    remember("train", _NODES, holder="a notebook", started=_STARTED)
    remember("train", _NODES[:1], holder="another notebook")
    known = known_sessions()["train"]
    assert (known.holder, known.nodes, known.started) == ("another notebook", _NODES[:1], _STARTED)


def test_session_of_which_only_the_nodes_were_noted_is_known(folder: Path) -> None:
    remember("train", _NODES, holder="a notebook")
    assert known_sessions()["train"].started is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ranks", 0), ("ranks", True), ("ranks", "2"), ("ranks", 10**9),
        ("device", "tpu"), ("device", ["cpu"]),
        ("backend", ""), ("backend", 3), ("backend", "gloo\x1b[2J"), ("backend", "x" * 1000),
        ("init", 1), ("sync", None),
        ("env", "HF_TOKEN"), ("env", ["A=B"]), ("env", [""]), ("env", [3]), ("env", ["A\nB"]), ("env", {"A": "B"}),
        ("seed", 1.5), ("seed", True), ("seed", 10**40), ("seed", None),
        ("start", "spawn"), ("start", {}),
        ("linger_s", -1), ("linger_s", "600"), ("linger_s", float("inf")), ("linger_s", float("nan")),
        ("group_timeout_s", -0.5), ("group_timeout_s", [600]),
    ],
)  # fmt: skip
def test_start_with_a_field_that_does_not_fit_is_not_believed(folder: Path, field: str, value: Any) -> None:
    remember("train", _NODES, holder="a notebook", started=_STARTED)
    file = folder / ".remote" / "train.json"
    said = json.loads(file.read_text())
    said["started"][field] = value
    file.write_text(json.dumps(said))
    known = known_sessions()["train"]
    assert (known.nodes, known.started) == (_NODES, None)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 100_000, '{"nodes": []}', '{"holder": "x", "nodes": [{"host": "-x"}]}', "\0"]
)
def test_file_that_makes_no_sense_is_as_good_as_not_there(folder: Path, text: str) -> None:
    remember("train", _NODES, holder="a notebook")
    (folder / ".remote" / "train.json").write_text(text)
    assert known_sessions() == {}


@pytest.mark.parametrize("started", [[], "x", 3, {"unheard of": 1}, {}])
def test_start_that_is_no_table_or_an_empty_one(folder: Path, started: Any) -> None:
    remember("train", _NODES, holder="a notebook")
    file = folder / ".remote" / "train.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "started": started}))
    assert known_sessions()["train"].started == (StartedWith() if isinstance(started, dict) else None)


def test_what_cannot_be_written_ends_nothing(folder: Path) -> None:
    remember("train", _NODES, holder="a notebook", started=StartedWith(seed=object()))  # type: ignore[arg-type]
    remember("here", (), holder="a notebook", started=_STARTED)  # the folder of the agent does not exist
    (folder / ".remote").rmdir()
    (folder / ".remote").touch()
    remember("train", _NODES, holder="a notebook", started=_STARTED)
    assert known_sessions() == {}


def test_start_of_a_session_here_lies_in_the_folder_of_its_agent(folder: Path) -> None:
    (folder / "here").mkdir(mode=0o700)
    remember("here", (), holder="a notebook", started=_STARTED)
    [file] = (folder / "here").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_text())["started"]["seed"] == 7
    assert not (folder / ".remote").exists()
