"""The agent's control of its warm process: each order gets one answer, never that of another process."""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from detrain_nb.launch import LAUNCHER_MODULE
from detrain_nb.node.agent.launching import Launching
from detrain_nb.wire import LauncherEnded

# Answers every order with the next line of a file, and exits after an answer with "stale".
_WARM_PROCESS = """
import os, pathlib, socket, sys
channel = socket.socket(fileno=int(os.environ["DETRAIN_NB_WARM_FD"]))
answers = pathlib.Path(sys.argv[1])
while socket.recv_fds(channel, 1, 4)[0]:
    answer, _, later = answers.read_text().partition("\\n")
    answers.write_text(later)
    channel.send(answer.encode())
    if "stale" in answer:
        sys.exit(3)
"""
_STARTED, _STALE, _FAILED = '{"started": 1}', '{"stale": "/library"}', '{"failed": "no process"}'


@pytest.fixture
def launching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launching]:
    monkeypatch.chdir(tmp_path)
    launching = Launching(0o022)
    yield launching
    launching._end_process()
    launching.channel.close()
    launching._its_end.close()


def _start(launching: Launching) -> LauncherEnded | None:
    argv = [sys.executable, "-c", _WARM_PROCESS, os.path.abspath("answers"), LAUNCHER_MODULE]
    return launching.start(argv, {}, None)


def _process(launching: Launching) -> subprocess.Popen[bytes]:
    assert launching._process is not None
    return launching._process


def _take_answer(launching: Launching) -> LauncherEnded | None:
    assert select.select([launching.channel], [], [], 20)[0], "no answer"
    return launching.take_answer()


def _start_and_be_refused(launching: Launching) -> subprocess.Popen[bytes]:
    """Return a warm process that took one order, refused the next, and exited before the agent read the refusal."""
    Path("answers").write_text("\n".join([_STARTED, _STALE, _STARTED, ""]))
    assert _start(launching) is None
    assert _take_answer(launching) is None
    process = _process(launching)
    assert _start(launching) is None
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process


def test_process_that_refuses_and_ends_leaves_its_order_to_the_next(launching: Launching) -> None:
    """The agent notices the exit before it reads the answer."""
    before = _start_and_be_refused(launching)
    assert launching.take_end() is None
    assert _process(launching) != before
    assert launching.is_warm
    assert launching.take_why_cold() == "/library changed"
    assert _take_answer(launching) is None
    assert launching.is_launched
    assert launching.answer_by is None, "the order is taken"


def test_answer_of_a_process_that_is_being_ended_is_not_that_of_the_next(
    launching: Launching, monkeypatch: pytest.MonkeyPatch
) -> None:
    _start_and_be_refused(launching)
    wait = subprocess.Popen.wait

    def wait_and_hear(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        launching._its_end.send(_FAILED.encode())  # the last message of the process
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_and_hear)
    assert _take_answer(launching) is None
    monkeypatch.undo()
    assert _take_answer(launching) is None
    assert launching.is_launched


def test_process_that_could_not_be_given_its_order_does_not_wait_for_another(
    launching: Launching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm process takes its first order without a check for changed files: that is safe only at once."""
    started: list[Any] = []
    start = subprocess.Popen.__init__

    def note(process: Any, *args: Any, **options: Any) -> None:
        start(process, *args, **options)
        started.append(process)

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(subprocess.Popen, "__init__", note)
    monkeypatch.setattr(socket, "send_fds", refuse)
    ended = _start(launching)
    assert ended is not None
    assert ended.exit_code == 127
    assert "Too many open files" in ended.log_tail
    assert not launching.is_warm
    assert not launching.is_launched
    assert [process.returncode for process in started] == [-9]


def test_python_that_was_built_for_an_older_libc_is_enough(
    launching: Launching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    Path("answers").write_text(_STARTED)
    assert _start(launching) is None
    assert _take_answer(launching) is None
    assert launching.is_launched
