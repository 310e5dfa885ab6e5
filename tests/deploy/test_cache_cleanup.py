"""Cleanup of the cache folder on a node: code and work folders unused for a month are removed, all else stays."""

from __future__ import annotations

import compileall
import contextlib
import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from detrain_nb.agents import live_agent, start_agent
from detrain_nb.copying.sync_manifest import note_path
from detrain_nb.deploy.code import own_code
from detrain_nb.deploy.sync import FolderSync
from detrain_nb.errors import SessionError
from detrain_nb.node.ssh import bootstrap, cache_cleanup
from detrain_nb.node.ssh.cache_cleanup import clean_up
from detrain_nb.wire import Attach, EndSession, to_frame

from ..testbed.nodes import ssh_nodes
from ..testbed.testbed import Testbed
from .test_sync import FolderNode, write

_LIMIT_S = 30.0
_LONG_AGO = time.time() - 31 * 86400
OLD_CODE, NEW_CODE = "0" * 32, "f" * 32


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return the cache folder of a node, last cleaned long ago, with an old and a recent version of our code."""
    folder = tmp_path / "cache"
    for code in (OLD_CODE, NEW_CODE):
        (folder / code / "detrain_nb").mkdir(parents=True, mode=0o700)
        (folder / code / "detrain_nb" / "errors.py").write_text("")
    age(folder / OLD_CODE)
    (folder / ".lock").touch(mode=0o600)
    age(folder / ".lock")
    (folder / "work").mkdir()
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The notebook's folder."""
    folder = tmp_path / "notebook"
    folder.mkdir()
    write(folder, train_py="import model", pkg__model_py="", notes="")
    return folder


def age(*paths: Path) -> None:
    """Set the dates of ``paths`` to more than a month ago."""
    for path in paths:
        os.utime(path, (_LONG_AGO, _LONG_AGO), follow_symlinks=False)


def bring(cache: Path, root: Path, name: str = "mine", *, work: Path | None = None) -> Path:
    """Copy the notebook's folder to a work folder and date it to more than a month ago; return the work folder."""
    folder = work or cache / "work" / name
    node = FolderNode(cache.parent, work=folder)
    assert node.cache == str(cache)
    FolderSync(root).bring([node])
    age(folder, *(cache / "sync").iterdir())
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@contextlib.contextmanager
def agent(folder: Path, *uses: Path) -> Iterator[None]:
    """Run an agent that uses the paths ``uses``."""
    folder.parent.parent.mkdir(mode=0o700, exist_ok=True)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    process, sock = start_agent(folder, uses=[str(path) for path in uses])
    try:
        yield
    finally:
        sock.close()
        process.terminate()
        process.wait(_LIMIT_S)


# ---- what is removed


def test_code_that_nobody_used_for_a_month_goes(cache: Path) -> None:
    clean_up(cache)
    assert names(cache) == {NEW_CODE, ".lock", "work"}


def test_once_a_day_is_enough(cache: Path) -> None:
    os.utime(cache / ".lock")
    clean_up(cache)
    assert OLD_CODE in names(cache)
    age(cache / ".lock")
    clean_up(cache)
    assert OLD_CODE not in names(cache)
    assert time.time() - (cache / ".lock").stat().st_mtime < 3600


def test_work_folder_with_what_came_from_the_notebook_goes_with_its_note(cache: Path, root: Path) -> None:
    folder = bring(cache, root)
    compileall.compile_dir(folder / "pkg", quiet=1)
    assert (folder / "pkg" / "__pycache__").is_dir()
    (folder / "empty" / "too").mkdir(parents=True)
    age(folder)
    clean_up(cache)
    assert not names(cache / "work") and not names(cache / "sync")
    bring(cache, root)
    assert (folder / "pkg" / "model.py").exists()


def test_what_was_broken_off_goes(cache: Path) -> None:
    for name in (".upload-x", ".incoming-y"):
        (cache / name).write_text("half")
    for name in (".unpacking-z", f".old-{OLD_CODE}-00000000"):
        (cache / name / "detrain_nb").mkdir(parents=True)
    clean_up(cache)
    assert names(cache) == {NEW_CODE, ".lock", "work"}


def test_work_folder_that_was_removed_in_part_goes_another_time(cache: Path, root: Path) -> None:
    folder = bring(cache, root)
    aside = cache_cleanup._put_work_aside(cache, folder)
    (aside / "train.py").unlink()  # as if the program was killed here
    age(aside)
    clean_up(cache)
    assert not names(cache / "work") and not names(cache / "sync")


def test_note_of_a_folder_that_is_gone_goes(cache: Path, root: Path, tmp_path: Path) -> None:
    folder = bring(cache, root, work=tmp_path / "users")
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    (cache / "sync" / "tmpdraft").write_text("{")
    (cache / "sync" / f"{OLD_CODE}.json.lock").write_text("")
    age(*(cache / "sync").iterdir())
    clean_up(cache)
    assert not names(cache / "sync")


def test_dead_agents_of_a_machine_that_is_gone_go(cache: Path) -> None:
    dead = cache / "run" / "gone" / "mine"
    dead.mkdir(parents=True, mode=0o700)
    fresh = cache / "run" / "other" / "mine"
    fresh.mkdir(parents=True, mode=0o700)
    for folder in (dead, fresh):
        (folder / "agent.lock").write_text("")
        (folder / "spool.000000").write_text("x")
    age(*dead.iterdir(), dead, dead.parent, fresh)
    clean_up(cache)
    age(cache / ".lock", *(path for path in (cache / "run" / "gone",) if path.exists()))
    clean_up(cache)
    assert names(cache / "run") == {"other"}
    assert names(fresh) == {"agent.lock", "spool.000000"}


# ---- what stays


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "result.pt").write_text("mine"),
        lambda folder: (folder / "pkg" / "result.pt").write_text("mine"),
        lambda folder: (folder / "train.py").write_text("changed"),
        lambda folder: (folder / "link").symlink_to(folder.parent),
        lambda folder: (folder / "pkg" / "link").symlink_to("model.py"),
        lambda folder: ((folder / "__pycache__").mkdir(), (folder / "__pycache__" / "own.c.pyc").write_text("mine")),
    ],
    ids=["file", "file below", "changed", "link to a folder", "link to a file", "compiled of another"],
)
def test_work_folder_with_anything_else_stays_whole(cache: Path, root: Path, change: Callable[[Path], object]) -> None:
    folder = bring(cache, root)
    change(folder)
    age(folder)
    before = sorted(folder.rglob("*"))
    clean_up(cache)
    assert sorted(folder.rglob("*")) == before and len(before) >= 4
    assert note_path(cache, folder).exists()
    assert OLD_CODE not in names(cache)


def test_work_folder_with_what_was_there_before_stays(cache: Path, root: Path) -> None:
    folder = cache / "work" / "mine"
    folder.mkdir()
    (folder / "train.py").write_text("import model")  # equal contents, but not from a notebook
    bring(cache, root)
    clean_up(cache)
    assert (folder / "train.py").exists() and (folder / "pkg" / "model.py").exists()


def test_work_folder_without_a_note_stays_if_there_is_anything_in_it(cache: Path) -> None:
    for name in ("unsynced", "empty"):
        (cache / "work" / name).mkdir()
    (cache / "work" / "unsynced" / "model.pt").write_text("mine")
    age(*(cache / "work").iterdir())
    clean_up(cache)
    assert names(cache / "work") == {"unsynced"}


def test_what_was_used_lately_stays(cache: Path, root: Path) -> None:
    by_note, by_folder = bring(cache, root, "by note"), bring(cache, root, "by folder")
    os.utime(note_path(cache, by_note))
    cache_cleanup.touch(cache, [str(by_folder), str(cache / OLD_CODE)])
    clean_up(cache)
    assert names(cache / "work") == {"by note", "by folder"}
    assert OLD_CODE in names(cache)


def test_only_what_is_ours_is_touched(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "users"
    folder.mkdir()
    age(folder)
    cache_cleanup.touch(cache, [str(folder)])
    assert folder.stat().st_mtime == pytest.approx(_LONG_AGO, abs=1)


def test_what_a_live_session_uses_stays_however_old(cache: Path, root: Path) -> None:
    folder, other = bring(cache, root, "mine"), bring(cache, root, "other")
    for host in ("here", "another"):
        with agent(cache / "run" / host / "mine", cache / OLD_CODE, folder):
            age(cache / ".lock")
            clean_up(cache)
            assert OLD_CODE in names(cache)
            assert (folder / "train.py").exists() and note_path(cache, folder).exists()
            assert not other.exists()
    age(cache / ".lock")
    clean_up(cache)
    assert OLD_CODE not in names(cache) and not folder.exists()


def test_where_a_live_session_does_not_say_what_it_uses_everything_stays(cache: Path) -> None:
    with agent(cache / "run" / "here" / "mine"):
        (cache / "run" / "here" / "mine" / "uses.json").unlink()
        clean_up(cache)
        assert OLD_CODE in names(cache)


def test_folder_and_notes_of_the_user_stay(cache: Path, root: Path, tmp_path: Path) -> None:
    folder = bring(cache, root, work=tmp_path / "users")
    away = bring(cache, root, work=tmp_path / "disk" / "users")
    (tmp_path / "disk").rename(tmp_path / "not mounted")
    clean_up(cache)
    assert (folder / "train.py").exists() and note_path(cache, folder).exists() and note_path(cache, away).exists()


def test_links_and_strange_names_stay(cache: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "detrain_nb").mkdir(parents=True)
    for link in (cache / ("1" * 32), cache / "work" / "link", cache / ".old-link"):
        link.symlink_to(elsewhere)
        age(link)
    for name in ("mine", "A" * 32, "0" * 31):
        (cache / name).mkdir()
        age(cache / name)
    before = names(cache) - {OLD_CODE}
    clean_up(cache)
    assert names(cache) == before
    assert names(cache / "work") == {"link"}
    assert names(elsewhere) == {"detrain_nb"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_what_belongs_to_another_user_stays(cache: Path) -> None:
    (cache / "work" / "theirs").mkdir()
    age(cache / "work" / "theirs")
    for folder in (cache / OLD_CODE, cache / "work" / "theirs"):
        os.chown(folder, 12345, 12345)
    clean_up(cache)
    assert OLD_CODE in names(cache) and names(cache / "work") == {"theirs"}


# ---- concurrent programs


@contextlib.contextmanager
def beginning(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the bootstrap program of a node, which then waits for a request."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(home)}
    command = [sys.executable, bootstrap.__file__]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdin and program.stdout
        try:
            yield program
        finally:
            program.stdin.close()
            program.wait(_LIMIT_S)


def hear_facts(program: subprocess.Popen[bytes]) -> dict[str, object]:
    assert program.stdout
    for _ in range(3):
        line = program.stdout.readline()
    facts: dict[str, object] = json.loads(line)
    return facts


@pytest.fixture
def found(cache: Path) -> Path:
    """Return the cache folder, moved to where a program on the node looks for it."""
    cache.parent.chmod(0o700)
    moved = cache.rename(cache.parent / "detrain_nb")
    moved.chmod(0o700)
    return moved


def test_what_a_notebook_was_told_of_stays_until_its_agent_uses_it(found: Path) -> None:
    with beginning(found.parent) as program:
        assert OLD_CODE in hear_facts(program)["have"]  # type: ignore[operator]
        clean_up(found)
        assert OLD_CODE in names(found)
    clean_up(found)
    assert OLD_CODE not in names(found)


def test_notebook_that_comes_while_names_change_waits_for_it(found: Path) -> None:
    told: list[dict[str, object]] = []
    with beginning(found.parent) as program:
        hearing = threading.Thread(target=lambda: told.append(hear_facts(program)))
        with cache_cleanup._alone(found) as is_alone:
            assert is_alone
            hearing.start()
            hearing.join(1.0)
            assert not told
        hearing.join(_LIMIT_S)
    assert NEW_CODE in told[0]["have"]  # type: ignore[operator]


def test_two_who_clean_at_once_do_not_meet(cache: Path) -> None:
    with cache_cleanup._alone(cache):
        clean_up(cache)
        assert OLD_CODE in names(cache)


def test_file_that_comes_at_the_last_moment_stays_in_its_place(
    cache: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bring(cache, root)

    def look_slowly(cache: Path, folder: Path) -> bool:
        may_go = real(cache, folder)
        (folder / "result.pt").write_text("mine")
        age(folder)
        return may_go

    real = cache_cleanup._may_go
    monkeypatch.setattr(cache_cleanup, "_may_go", look_slowly)
    clean_up(cache)
    assert names(folder) == {"result.pt"} and (folder / "result.pt").read_text() == "mine"


def test_lock_that_was_removed_locks_nothing(tmp_path: Path) -> None:
    """The first program removes a note and its lock after a second one has opened the lock file."""
    code = """
import fcntl, os, sys
from pathlib import Path
from detrain_nb.locks import take_lock
from detrain_nb.node.ssh.cache_cleanup import _remove_note

met = False
def hook(event, args):
    global met
    if event == "fcntl.flock" and not met:
        met = True
        _remove_note(Path(sys.argv[1]))

sys.addaudithook(hook)
lock = Path(sys.argv[1] + ".lock")
assert take_lock(lock, is_new=True) is None and met
assert take_lock(lock, is_new=True) is not None
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "note.json")], check=True, timeout=_LIMIT_S)


def test_note_that_is_being_written_stays(cache: Path, root: Path) -> None:
    bring(cache, root)
    [lock] = (cache / "sync").glob("*.lock")
    with open(lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        cache_cleanup._remove_note(lock.with_suffix(""))
    assert len(names(cache / "sync")) == 2


def test_locks_are_their_users_alone(cache: Path, root: Path) -> None:
    (cache / "sync").mkdir(mode=0o700)
    note = note_path(cache, cache / "work" / "mine")
    Path(f"{note}.lock").touch(mode=0o644)  # as an earlier version made it
    bring(cache, root)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (cache / "sync").iterdir()} == {0o600}


# ---- over SSH


def _end(sock: socket.socket, session: str) -> None:
    sock.settimeout(_LIMIT_S)
    sock.sendall(b"".join(to_frame(message).to_bytes() for message in (Attach(session, "test"), EndSession())))
    with contextlib.suppress(OSError):
        while sock.recv(1 << 16):
            pass
    sock.close()


def _eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_host_is_rid_of_what_a_killed_agent_left_and_of_what_is_old(testbed: Testbed) -> None:
    cache = testbed.path_home("h0") / ".cache" / "detrain_nb"
    (node,) = ssh_nodes(testbed, 1)
    node.start_agent("killed").close()
    [folders] = (cache / "run").iterdir()  # the run folder of this host
    pid = live_agent_there(folders / "killed")
    testbed.exec("h0", "kill", "-9", str(pid))
    (folders / "killed" / "spool.000009").write_text("x")
    with pytest.raises(SessionError, match="no session 'killed' is running there: its agent has exited, or the "):
        node.connect_agent("killed")
    assert not (folders / "killed").exists()

    current = cache / own_code().digest  # other tests may have left code of their own
    work = cache / "work" / "killed"
    (cache / OLD_CODE).mkdir()
    age(cache / OLD_CODE, current, work, cache / ".lock")
    with contextlib.closing(node.start_agent("other")) as sock:
        _eventually(lambda: not (cache / OLD_CODE).exists() and not work.exists())
        assert current.exists() and (cache / "work" / "other").exists()
        used = json.loads((folders / "other" / "uses.json").read_text())
        assert [os.path.basename(path) for path in used] == [current.name, "other"]
        assert time.time() - current.stat().st_mtime < 3600
        _end(sock, "other")
    node.leave()


def live_agent_there(folder: Path) -> int:
    """Return the agent's pid in the host's pid namespace."""
    assert live_agent(folder)
    return int((folder / "agent.pid").read_text())
