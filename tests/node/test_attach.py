"""The attach program, started as on a node: its report on an agent that it cannot query."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

_ATTACH = """
import fcntl, os, pathlib, sys
from detrain_nb.locks import take_lock
from detrain_nb.node.ssh import attach
lock = pathlib.Path(sys.argv[1], ".lock")
hold = os.open(lock, os.O_RDWR | os.O_CREAT)
fcntl.flock(hold, fcntl.LOCK_SH)
order = {"session": "mine", "action": "attach", "work_folder": sys.argv[1] + "/work", "silence_s": 20}
attach.main(order, cache=sys.argv[1], code=[sys.argv[1] + "/code"], hold=hold)
sys.exit("others still have to leave alone what is there" if take_lock(lock) is None else 0)
"""
_LIMIT_S = 30


def _attach(cache: Path) -> dict[str, str]:
    command = [sys.executable, "-c", _ATTACH, str(cache)]
    said = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True, timeout=_LIMIT_S)
    answer: dict[str, str] = json.loads(said.stdout)
    return answer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the session."""
    folder = tmp_path / "run" / platform.node() / "mine"
    folder.mkdir(parents=True)
    for path in (folder, folder.parent, folder.parent.parent):
        path.chmod(0o700)
    return folder


def test_agent_that_is_gone_is_said_to_be(folder: Path, tmp_path: Path) -> None:
    assert _attach(tmp_path)["kind"] == "SessionError"
    (folder / "agent.lock").touch()
    assert _attach(tmp_path)["kind"] == "SessionError"
    assert not folder.exists()


def test_error_of_the_disk_does_not_say_that_the_agent_is_gone(folder: Path, tmp_path: Path) -> None:
    os.symlink("agent.lock", folder / "agent.lock")  # opening this loop fails with ELOOP, not ENOENT
    said = _attach(tmp_path)
    assert said["kind"] == "LaunchError", said
    assert "agent.lock" in said["text"]
    assert folder.exists()
