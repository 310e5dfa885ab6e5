"""The folders of agents on one machine: those of dead agents are removed, those of live agents stay."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from detrain_nb.agents import (
    connect,
    live_agent,
    remove_dead_agent,
    remove_dead_agents,
    running_sessions,
    runtime_folder,
    start_agent,
)
from detrain_nb.errors import LaunchError, SessionError
from detrain_nb.transport.local import LocalTransport

_LIMIT_S = 30.0

Start = Callable[[str], tuple[subprocess.Popen[bytes], socket.socket]]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's sessions."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("DETRAIN_NB_RUNTIME_DIR", str(folder))
    return folder


@pytest.fixture
def start(base: Path) -> Iterator[Start]:
    """A function that starts the agent of a session; all agents are stopped after the test."""
    started: list[tuple[subprocess.Popen[bytes], socket.socket]] = []

    def start(name: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
        started.append(start_agent(base / name))
        return started[-1]

    yield start
    for agent, sock in started:
        sock.close()
        agent.terminate()
        agent.wait(_LIMIT_S)


def _kill(agent: subprocess.Popen[bytes]) -> None:
    agent.kill()
    agent.wait(_LIMIT_S)


def _leave_dead(folder: Path, **more: str) -> Path:
    """Create a folder as a killed agent leaves it."""
    folder.mkdir(mode=0o700)
    for name in ("agent.lock", "agent.pid", "agent.log", "launcher.log", "holder", "spool.000000", "spool.000041"):
        (folder / name).write_text("4194304" if name == "agent.pid" else "x")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "agent.sock"))
    (folder / "torchelastic" / "none_x" / "attempt_0").mkdir(parents=True)
    (folder / "torchelastic" / "none_x" / "attempt_0" / "error.json").write_text("x")
    for name, text in more.items():
        (folder / name).write_text(text)
    return folder


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---- what is removed


def test_agent_for_which_there_is_no_process_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refuse)
    (tmp_path / "run").mkdir(mode=0o700)
    with pytest.raises(LaunchError, match=r"cannot start a process for the agent: Resource temporarily unavailable"):
        start_agent(tmp_path / "run" / "mine")
    assert not list((tmp_path / "run").iterdir())


def test_killed_agent_leaves_nothing_once_another_starts(base: Path, start: Start) -> None:
    killed, _ = start("killed")
    (base / "killed" / "spool.000007").write_bytes(b"x" * 1000)  # output that it kept for a notebook
    _kill(killed)
    assert "spool.000007" in _names(base / "killed")
    start("other")
    assert _names(base) == {"other"}


def test_killed_agent_is_followed_by_one_of_the_same_name_in_a_fresh_folder(base: Path, start: Start) -> None:
    killed, _ = start("same")
    (base / "same" / "spool.000007").write_bytes(b"x" * 1000)
    _kill(killed)
    agent, _ = start("same")
    assert live_agent(base / "same") == agent.pid
    assert "spool.000007" not in _names(base / "same")


def test_agent_that_was_killed_while_it_ended_leaves_nothing(base: Path, start: Start) -> None:
    _leave_dead(base / ".ended-17-0123abcd")
    start("other")
    assert _names(base) == {"other"}


def test_attach_to_a_session_whose_agent_was_killed_says_that_it_has_ended_and_removes_its_folder(
    base: Path, start: Start
) -> None:
    killed, _ = start("killed")
    _kill(killed)
    for _ in range(2):
        words = "no session 'killed' is running on this machine; running sessions: none"
        with pytest.raises(SessionError, match=words):
            LocalTransport().connect_agent("killed")
        assert not _names(base)


def test_end_of_a_session_that_was_attached_to_leaves_nothing_of_its_killed_agent(base: Path, start: Start) -> None:
    agent, _ = start("killed")
    transport = LocalTransport()
    transport.connect_agent("killed").close()
    _kill(agent)
    transport.wait_for_end(limit_s=_LIMIT_S)
    assert not _names(base)


# ---- what stays


def test_live_agent_keeps_its_folder(base: Path, start: Start) -> None:
    agent, _ = start("alive")
    before = _names(base / "alive")
    start("other")
    remove_dead_agents(base)
    assert _names(base / "alive") >= before
    assert running_sessions()["alive"] == agent.pid


def test_agent_that_is_ending_keeps_its_folder(base: Path, start: Start) -> None:
    agent, _ = start("alive")
    ending = (base / "alive").rename(base / ".ended-17")
    remove_dead_agents(base)
    assert "agent.sock" in _names(ending)
    ending.rename(base / "alive")
    agent.terminate()
    agent.wait(_LIMIT_S)
    assert not _names(base)


def test_stopped_agent_is_alive(base: Path, start: Start) -> None:
    agent, _ = start("alive")
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        remove_dead_agents(base)
        assert live_agent(base / "alive") == agent.pid
    finally:
        os.kill(agent.pid, signal.SIGCONT)


def test_what_no_agent_writes_stays(base: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "spool.000000").write_text("mine")
    folder = _leave_dead(base / "dead", notes="mine")
    (folder / "spool.000001").symlink_to(outside / "spool.000000")
    (folder / "spool.000002").mkdir()
    (folder / "torchelastic" / "link").symlink_to(outside)
    linked = _leave_dead(base / "linked")
    (linked / "torchelastic").rename(tmp_path / "logs")
    (linked / "torchelastic").symlink_to(tmp_path / "logs")
    remove_dead_agents(base)
    assert _names(folder) == {"notes", "spool.000001", "spool.000002"}
    assert (outside / "spool.000000").read_text() == "mine"
    assert _names(linked) == {"torchelastic"} and _names(tmp_path / "logs") == {"none_x"}


def test_folder_that_no_agent_has_made_stays(base: Path) -> None:
    (base / "empty").mkdir(mode=0o700)  # like the folder of an agent that is starting
    other = base / "other"
    other.mkdir(mode=0o700)
    for name in ("lock", "holder", "launcher.log", "spool.000000"):
        (other / name).write_text("mine")
    hidden = _leave_dead(base / ".hidden")
    open_to_others = _leave_dead(base / "open")
    open_to_others.chmod(0o755)
    before = [_names(folder) for folder in (base, other, hidden, open_to_others)]
    remove_dead_agents(base)
    assert [_names(folder) for folder in (base, other, hidden, open_to_others)] == before


def test_link_to_a_dead_folder_is_not_followed(base: Path, tmp_path: Path) -> None:
    folder = _leave_dead(tmp_path / "elsewhere")
    (base / "link").symlink_to(folder)
    linked = _leave_dead(base / "linked")
    (linked / "agent.lock").rename(tmp_path / "a lock")
    (linked / "agent.lock").symlink_to(tmp_path / "a lock")
    before = _names(folder), _names(linked)
    remove_dead_agents(base)
    assert (_names(folder), _names(linked)) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_folder_of_another_user_stays(base: Path) -> None:
    folder = _leave_dead(base / "theirs")
    os.chown(folder, 12345, 12345)
    mine = _leave_dead(base / "mine")
    os.chown(mine / "spool.000000", 12345, 12345)
    before = _names(folder)
    remove_dead_agents(base)
    assert _names(folder) == before
    assert _names(mine) == {"spool.000000"}


# ---- races


_STARTS = """
import sys
from pathlib import Path
from detrain_nb import agents

folder, moment = Path(sys.argv[1]), sys.argv[2]

def hook(event, args):
    global moment
    if event == moment and (event != "open" or str(args[0]).endswith("agent.lock")) and folder.exists():
        moment = ""
        print("met", flush=True)
        agents.remove_dead_agents(folder.parent)
        if event == "open":
            folder.rmdir()

sys.addaudithook(hook)
agent, sock = agents.start_agent(folder)
try:
    assert agents.live_agent(folder) == agent.pid
    assert {"agent.lock", "agent.pid", "agent.sock"} <= {path.name for path in folder.iterdir()}
finally:
    agent.terminate()
    agent.wait(30)
assert not list(folder.parent.iterdir())
"""


@pytest.mark.parametrize("moment", ["open", "fcntl.flock", "subprocess.Popen"])
def test_folder_of_an_agent_that_is_starting_is_not_taken_from_it(base: Path, moment: str) -> None:
    """Others look for dead agents at every step: before the lock exists, before it is held, before the agent runs."""
    ran = subprocess.run(
        [sys.executable, "-c", _STARTS, str(base / "new"), moment],
        capture_output=True, text=True, timeout=_LIMIT_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "met\n"


def test_many_who_start_and_clean_at_once_make_one_agent(base: Path) -> None:
    _leave_dead(base / "new")
    code = """
import sys
from pathlib import Path
from detrain_nb.agents import remove_dead_agents, start_agent
from detrain_nb.errors import SessionError

folder = Path(sys.argv[1])
sys.stdin.readline()
try:
    agent, sock = start_agent(folder)
except SessionError as exc:
    print(exc)
else:
    print("started", agent.pid, flush=True)
    for _ in range(200):
        remove_dead_agents(folder.parent)
sys.stdin.readline()
"""
    command = [sys.executable, "-c", code, str(base / "new")]
    starters = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        for starter in starters:
            assert starter.stdin
            starter.stdin.write("\n")
            starter.stdin.flush()
        said = [starter.stdout.readline() for starter in starters if starter.stdout]
        started = [int(words.split()[1]) for words in said if words.startswith("started")]
        assert len(started) == 1, said
        assert sum(f"is already running (agent pid {started[0]})" in words for words in said) == 3, said
        assert live_agent(base / "new") == started[0]
    finally:
        for starter in starters:
            starter.communicate("\n", timeout=_LIMIT_S)
        deadline = time.monotonic() + _LIMIT_S
        for pid in running_sessions().values():
            os.kill(pid, signal.SIGTERM)
        while _names(base) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not _names(base)


def test_folder_that_somebody_else_has_put_there_is_not_taken_at_the_end(base: Path, start: Start) -> None:
    agent, _ = start("gone")
    (base / "gone").rename(base / "elsewhere")
    theirs = base / "gone"
    theirs.mkdir(mode=0o700)
    (theirs / "agent.lock").write_text("")
    agent.terminate()
    agent.wait(_LIMIT_S)
    assert _names(theirs) == {"agent.lock"}


def test_lock_is_its_users_alone(base: Path, start: Start) -> None:
    start("mine")
    assert stat.S_IMODE((base / "mine" / "agent.lock").stat().st_mode) == 0o600


def test_starter_that_lives_on_does_not_hold_the_lock(base: Path, start: Start) -> None:
    agent, _ = start("killed")
    _kill(agent)
    remove_dead_agent(base / "killed")
    assert not _names(base)


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_folder_that_others_can_put_another_in_place_of_is_refused(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If others can write the parent, they could give the agent their own folder, with code in it."""
    monkeypatch.setattr("grp.getgrgid", lambda gid: (_ for _ in ()).throw(KeyError(gid)))  # no private group
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    (shared / "deeper").mkdir(mode=0o700)
    monkeypatch.setenv("DETRAIN_NB_RUNTIME_DIR", str(shared / "deeper" / "run"))
    with pytest.raises(
        LaunchError, match=f"can be replaced by other users, who can write to {shared} .mode {mode:04o}"
    ):
        runtime_folder()
    assert not (shared / "deeper" / "run").exists()
    shared.chmod(0o1777)
    assert runtime_folder() == shared / "deeper" / "run"


def test_next_folder_is_taken_where_one_is_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DETRAIN_NB_RUNTIME_DIR", raising=False)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "shared"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "shared"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "shared"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert runtime_folder().parent == tmp_path / "caches"
    assert stat.S_IMODE(runtime_folder().stat().st_mode) == 0o700


def test_session_is_found_while_the_folder_for_temporary_files_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python then chooses another folder for temporary files."""
    monkeypatch.delenv("DETRAIN_NB_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    there = runtime_folder()
    assert there.parent == tmp_path
    monkeypatch.setattr("tempfile.tempdir", "/var/tmp")
    assert runtime_folder() == there


def test_agent_of_another_user_is_not_talked_to(start: Start, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start("mine")
    ours = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: ours + 1)
    with pytest.raises(LaunchError, match="belongs to another user"):
        connect(base / "mine")
