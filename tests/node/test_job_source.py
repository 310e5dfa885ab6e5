"""The source of a job on a node: files by digest, and commits from a git host on loopback that requires a token."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from detrain_nb.copying.json_lines import Failed, FilesError, Talk
from detrain_nb.node.job.blobs import Blobs, remove_unused
from detrain_nb.node.job.git_program import GitLimits
from detrain_nb.node.job.service import serve
from detrain_nb.node.job.sources import lay_out

from ..session.soon import assert_soon
from .git_host import GitHost, commit, git, git_host
from .source_talk import Sender, source_talk

TOKEN = "tok-3n-s3cret"
MONTHS_S = 60 * 86400


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def ship(talk: Talk, given: Mapping[str, bytes], *, executable: str = "", **changed: Any) -> tuple[str, list[int]]:
    """Send files as the notebook does; ``changed`` replaces fields of the list.

    Returns the id of the source, and the indices of the files that the node requested.
    """
    listed = [[name, len(data), hashlib.sha256(data).hexdigest(), name == executable] for name, data in given.items()]
    text = json.dumps({"format": 1, "files": listed, **changed}).encode()
    talk.say("source", of="files", size=len(text))
    talk.send(text)
    wanted = talk.hear("need")["indices"]
    for index in wanted:
        talk.send(list(given.values())[index])
    talk.flush()
    return talk.hear("ready")["source"], wanted


def ask_git(talk: Talk, url: str, ref: str = "main", **fields: str) -> dict[str, Any]:
    talk.say("source", of="git", url=url, ref=ref, **fields)
    return talk.hear("ready")


def ask_git_once(cache: Path, url: str, **fields: str) -> dict[str, Any]:
    with source_talk(cache) as talk:
        return ask_git(talk, url, **fields)


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- files by their digest


def test_files_come_once_and_are_laid_out_as_they_were(cache: Path, tmp_path: Path) -> None:
    files = {
        "train.py": b"print(1)\n",
        "a/b c/größe $(x).txt": b"\0" * 300_000,
        "empty": b"",
        "again.py": b"print(1)\n",
    }
    with source_talk(cache) as talk:
        source, wanted = ship(talk, files, executable="train.py")
        assert wanted == [0, 1, 2]  # files with equal contents are requested once
        assert ship(talk, files, executable="train.py") == (source, [])
        changed, wanted = ship(talk, {**files, "train.py": b"print(2)\n"})
        assert wanted == [0] and changed != source
    lay_out(source, tmp_path / "job/source", cache=cache)
    assert read_all(tmp_path / "job/source") == files
    modes = {name: os.access(tmp_path / "job/source" / name, os.X_OK) for name in files}
    assert [name for name, is_executable in modes.items() if is_executable] == ["train.py"]
    (tmp_path / "job/source/train.py").write_text("changed by a rank")
    lay_out(source, tmp_path / "other", cache=cache)
    assert (tmp_path / "other/train.py").read_bytes() == files["train.py"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given=st.dictionaries(st.text("ab/.é\n", min_size=1, max_size=6), st.binary(max_size=4), max_size=5))
def test_whatever_the_names_nothing_is_outside(cache: Path, tmp_path: Path, given: dict[str, bytes]) -> None:
    """All files are laid out as sent, or none: if two names collide, or if a name leads out of the folder."""
    target = tmp_path / "job" / "source"
    shutil.rmtree(target.parent, ignore_errors=True)
    parts = [tuple(name.split("/")) for name in given]
    leads_elsewhere = any(part in ("", ".", "..") or "\n" in part for name in parts for part in name)
    collide = any(one != other and other[: len(one)] == one for one in parts for other in parts)
    with source_talk(cache) as talk:
        if leads_elsewhere or collide:
            with pytest.raises(Failed):
                ship(talk, given)
            return
        source, _ = ship(talk, given)
    lay_out(source, target, cache=cache)
    assert read_all(target.parent) == {f"source/{name}": data for name, data in given.items()}


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a//b", "", ".", "a\nb", "a\0b", "x/" * 200 + "x", 7])
def test_name_that_leads_elsewhere_is_refused(cache: Path, name: object) -> None:
    with source_talk(cache) as talk, pytest.raises(Failed):
        ship(talk, {}, files=[[name, 0, hashlib.sha256(b"").hexdigest(), False]])
    assert not list(cache.rglob("listed/*"))


@pytest.mark.parametrize(
    "changed",
    [
        {"format": 2},
        {"files": 3},
        {"files": [["a", 1]]},
        {"files": [["a", -1, "0" * 64, False]]},
        {"files": [["a", 1, "../../x", False]]},
        {"files": [["a", 1 << 61, "0" * 64, False]]},
        {"files": [["a", 0, "0" * 64, False], ["a", 0, "1" * 64, False]]},
        {"files": [["a", 0, "0" * 64, False], ["a/b", 0, "1" * 64, False]]},
    ],
)
def test_list_that_is_none_is_refused(cache: Path, changed: dict[str, Any]) -> None:
    with source_talk(cache) as talk, pytest.raises(Failed):
        ship(talk, {"x": b"1"}, **changed)
        talk.hear("ready")
    assert not list(cache.rglob("listed/*"))


def test_file_that_is_another_than_was_said_is_refused(cache: Path) -> None:
    with source_talk(cache) as talk, pytest.raises(Failed, match="does not match its announced size or digest"):
        ship(talk, {"x": b"real"}, files=[["x", 4, "0" * 64, False]])
    assert not [path for path in (cache / "blobs").rglob("*") if path.is_file()]


def test_list_without_end_is_refused_before_it_is_read(cache: Path) -> None:
    with source_talk(cache) as talk:
        talk.say("source", of="files", size=1 << 40)
        with pytest.raises(Failed, match="more than"):
            talk.hear("need")


def test_file_that_a_disk_has_changed_is_not_run_and_comes_anew(cache: Path, tmp_path: Path) -> None:
    with source_talk(cache) as talk:
        source, _ = ship(talk, {"x.py": b"one"})
        path = Blobs(cache / "blobs").path(hashlib.sha256(b"one").hexdigest())
        path.write_bytes(b"two")
        with pytest.raises(FilesError, match="has changed since it was received"):
            lay_out(source, tmp_path / "source", cache=cache)
        assert not (tmp_path / "source/x.py").exists()
        assert ship(talk, {"x.py": b"one"}) == (source, [0])
    lay_out(source, tmp_path / "source", cache=cache)
    (cache / "listed" / source).write_text("{}")
    with pytest.raises(FilesError, match="has changed"):
        lay_out(source, tmp_path / "third", cache=cache)


@pytest.mark.parametrize("source", ["0" * 64, "../x", "", None, 3])
def test_source_that_is_not_here_is_said(cache: Path, tmp_path: Path, source: object) -> None:
    with pytest.raises(FilesError):
        lay_out(source, tmp_path / "source", cache=cache)


def test_what_nobody_used_for_a_month_goes(cache: Path) -> None:
    with source_talk(cache) as talk:
        ship(talk, {"old": b"old", "new": b"new"})
    old = Blobs(cache / "blobs").path(hashlib.sha256(b"old").hexdigest())
    broken_off = old.parent / ".part-1"
    broken_off.touch()
    for path in (old, broken_off, cache / ".cleaned"):
        os.utime(path, (time.time() - MONTHS_S,) * 2)
    assert remove_unused(cache) == 2 and not old.exists()
    assert Blobs(cache / "blobs").has(hashlib.sha256(b"new").hexdigest(), 3)
    os.utime(cache / ".cleaned", (time.time() - MONTHS_S,) * 2)
    with source_talk(cache) as talk:
        assert ship(talk, {"old": b"old", "new": b"new"})[1] == [0]


def test_bytes_of_a_file_are_never_taken_for_an_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a node cannot store the start of a file, the rest still arrives and must not be read as orders."""
    ran = tmp_path / "ran"
    order = json.dumps({"type": "exec", "command": f"touch {ran}", "timeout_s": 5.0}).encode()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "detrain_nb/sources").mkdir(mode=0o700, parents=True)
    (tmp_path / "detrain_nb/sources/blobs").write_text("in the way")
    ours, theirs = socket.socketpair()
    ours.settimeout(20)

    def serve_jobs() -> None:
        with theirs, theirs.makefile("rb") as reader, theirs.makefile("wb") as writer:
            serve(Talk(reader, writer), fd=theirs.fileno())

    thread = threading.Thread(target=serve_jobs)
    thread.start()
    with ours, ours.makefile("rb") as reader:
        with pytest.raises(Failed, match="cannot be written to"):
            ship(Talk(reader, Sender(ours)), {"x": order + b"\n"})
        thread.join(20)
        assert not thread.is_alive()  # the service has closed the connection
    assert not ran.exists()


# ---- git


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GitHost]:
    """Yield a git host that requires a token."""
    with git_host(tmp_path_factory.mktemp("host"), token=TOKEN) as running:
        yield running


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Return a repository with two commits; its .gitattributes name a filter, which must not run."""
    work = tmp_path / "work"
    commit(work, {"train.py": "print(1)\n", "sub/main.py": "print('sub')\n", "größe.txt": "ü"})
    git("tag", "v1", at=work)
    (work / "train.py").chmod(0o755)
    commit(work, {"train.py": "print(2)\n", ".gitattributes": "*.bin filter=lfs\n", "x.bin": "version lfs\n"})
    return work


def test_commit_comes_with_a_token_that_stands_nowhere(host: GitHost, work: Path, cache: Path, tmp_path: Path) -> None:
    url = host.publish(work, "one.git")
    seen: list[str] = []
    is_done = threading.Event()

    def is_fetch_seen() -> bool:
        return any("fetch" in line and url in line for line in list(seen))

    def watch() -> None:
        """Collect the command lines of all processes in the meantime."""
        while not is_done.is_set():
            for process in Path("/proc").iterdir():
                try:
                    seen.append((process / "cmdline").read_text(errors="replace") if process.name.isdigit() else "")
                except OSError:
                    pass

    watcher = threading.Thread(target=watch)
    watcher.start()
    host.before_asked["/one.git/info/refs"] = lambda: assert_soon(is_fetch_seen)
    try:
        with source_talk(cache) as talk:
            said = ask_git(talk, url, token=TOKEN)
    finally:
        is_done.set()
        watcher.join()
    assert said["commit"] == git("rev-parse", "HEAD", at=work)
    assert is_fetch_seen() and not any(TOKEN in line for line in seen)
    lay_out(said["source"], tmp_path / "source", cache=cache)
    assert (tmp_path / "source/train.py").read_text() == "print(2)\n" and os.access(
        tmp_path / "source/train.py", os.X_OK
    )
    assert read_all(tmp_path / "source")["größe.txt"] == "ü".encode()
    assert not (tmp_path / "source/.git").exists()
    for folder in (cache, tmp_path / "source"):
        for name, data in read_all(folder).items():
            assert TOKEN.encode() not in data, name


def test_ref_is_a_branch_a_tag_or_a_commit_also_in_part(host: GitHost, work: Path, cache: Path, tmp_path: Path) -> None:
    url = host.publish(work, "refs.git")
    first, last = git("rev-parse", "v1", at=work), git("rev-parse", "main", at=work)
    with source_talk(cache) as talk:
        refs = {"main": last, "": last, "v1": first, "refs/heads/main": last, first: first, first[:10]: first}
        found = {ref: ask_git(talk, url, ref, token=TOKEN) for ref in refs}
        assert {ref: said["commit"] for ref, said in found.items()} == refs
        assert len({said["source"] for said in found.values()}) == 2
        asked = len(host.asked)
        assert ask_git(talk, url, first, token=TOKEN)["commit"] == first
        assert len(host.asked) == asked  # the commit is already in the cache
        commit(work, {"new.py": "3"})
        host.publish(work, "refs.git")
        newest = git("rev-parse", "main", at=work)
        assert ask_git(talk, url, token=TOKEN)["commit"] == newest  # the branch has a newer commit
        assert ask_git(talk, url, last.upper(), token=TOKEN)["commit"] == last
    lay_out(found["v1"]["source"], tmp_path / "v1", cache=cache)
    assert (tmp_path / "v1/train.py").read_text() == "print(1)\n"


def test_folder_of_a_repository_is_laid_out_alone(host: GitHost, work: Path, cache: Path, tmp_path: Path) -> None:
    url = host.publish(work, "folder.git")
    with source_talk(cache) as talk:
        source = ask_git(talk, url, folder="sub", token=TOKEN)["source"]
    lay_out(source, tmp_path / "source", cache=cache)
    assert read_all(tmp_path / "source") == {"main.py": b"print('sub')\n"}
    with source_talk(cache) as talk, pytest.raises(Failed, match="has no folder 'gone'"):
        ask_git(talk, url, folder="gone", token=TOKEN)
    with source_talk(cache) as talk, pytest.raises(Failed, match="leads out"):
        ask_git(talk, url, folder="../x", token=TOKEN)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"ref": "no-such"}, "there is no branch, tag or commit 'no-such'"),
        ({"ref": "origin/main"}, "'origin/main': leave out origin/, and check that it was pushed"),
        ({"ref": "0" * 40}, "there is no branch, tag or commit"),
        ({"ref": "abcdef0"}, "there is no branch, tag or commit 'abcdef0'"),
        ({"token": ""}, "is private, or does not exist: name the environment variable"),
        ({"token": "wrong"}, "does not accept the token"),
        ({"token": "two\nlines"}, "contains a space or control character"),
        ({"ref": "--upload-pack=x"}, "is not a branch"),
        ({"url": "ext::sh -c 'touch /tmp/x'"}, "git url"),
        ({"url": "--config=x"}, "begins with -"),
        ({"url": "http://h.example/x"}, "a token is only sent over https"),
    ],
)
def test_what_cannot_be_fetched_is_said(
    host: GitHost, work: Path, cache: Path, fields: dict[str, str], said: str
) -> None:
    url = host.url("wrong.git") if (host.root / "wrong.git").exists() else host.publish(work, "wrong.git")
    with source_talk(cache) as talk, pytest.raises(Failed, match=said) as caught:
        ask_git(talk, **{"url": url, "ref": "main", "token": TOKEN, **fields})
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    "url, said",
    [
        ("http://127.0.0.1:1/x", "Connection refused"),
        ("http://no-such-host.invalid/x", "not known"),
        ("ssh://git@127.0.0.1:1/x", "Connection refused"),
        ("git@no-such-host.invalid:x", "Could not resolve hostname"),
    ],
)
def test_host_that_is_not_reached_is_no_failure_but_said(cache: Path, url: str, said: str) -> None:
    with source_talk(cache) as talk:
        talk.say("source", of="git", url=url, ref="main")
        text = talk.hear("unreached")["text"]
        assert url in text and "cannot be reached" in text and said in text
        talk.say("source", of="git", url=url, ref="--x")
        with pytest.raises(Failed, match="is not a branch"):
            talk.hear("ready", "unreached")


def test_host_that_does_not_answer_at_all_is_not_waited_for_as_long_as_git_would(cache: Path) -> None:
    with contextlib.ExitStack() as held, socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        for _ in range(3):  # with a full backlog, further connections are not even refused
            waiting = held.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        with source_talk(cache) as talk:
            talk.say("source", of="git", url=f"http://127.0.0.1:{server.getsockname()[1]}/x", ref="main")
            assert "cannot be reached: timed out" in talk.hear("unreached")["text"]


def test_proxy_of_the_node_is_what_is_asked(
    host: GitHost, work: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = host.publish(work, "proxied.git").replace("127.0.0.1", "no-such-host.invalid")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with source_talk(cache) as talk:
        talk.say("source", of="git", url=url, ref="main")
        assert "Failed to connect to 127.0.0.1 port 1" in talk.hear("unreached")["text"]


def test_git_that_is_not_installed_reaches_nothing(
    host: GitHost, work: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = host.publish(work, "none.git")
    monkeypatch.setenv("PATH", str(tmp_path))
    with source_talk(cache) as talk:
        talk.say("source", of="git", url=url, ref="main", token=TOKEN)
        assert talk.hear("unreached")["text"] == "git is not installed"


def test_repository_without_a_commit_is_said(host: GitHost, cache: Path) -> None:
    subprocess.run(["git", "init", "-q", "--bare", host.root / "empty.git"], check=True)
    with source_talk(cache) as talk, pytest.raises(Failed, match="its default branch has no commit: push one"):
        ask_git(talk, host.url("empty.git"), ref="", token=TOKEN)


def test_no_hook_and_no_filter_runs(host: GitHost, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the hooks and filters of the user's git configuration nor hooks put into a mirror run."""
    ran = tmp_path / "ran"
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("post-checkout", "reference-transaction", "post-index-change", "pre-auto-gc"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {ran}\n")
        (hooks / name).chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(
        f"[core]\n hooksPath = {hooks}\n fsmonitor = {hooks}/post-checkout\n"
        f'[filter "lfs"]\n smudge = touch {ran}\n required = true\n'
    )
    monkeypatch.setenv("HOME", str(home))
    cache = tmp_path / "cache"
    url = host.publish(work, "hooks.git")
    with source_talk(cache) as talk:
        source = ask_git(talk, url, token=TOKEN)["source"]
    assert not list(cache.glob("git/*/hooks"))
    (mirror,) = cache.glob("git/*/HEAD")
    (mirror.parent / "hooks").symlink_to(hooks)
    lay_out(source, tmp_path / "source", cache=cache)
    assert (tmp_path / "source/x.bin").read_text() == "version lfs\n" and not ran.exists()


def test_files_that_git_lfs_has_the_contents_of_are_named(
    host: GitHost, work: Path, cache: Path, tmp_path: Path
) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
    files = {f"sub/{number}.bin": pointer for number in range(5)}
    commit(work, {**files, "lib/a.bin": pointer, "sub/text.bin": "text", "sub/long.bin": pointer + " " * 2000})
    (work / "sub/link.bin").symlink_to("0.bin")
    commit(work, {})
    url = host.publish(work, "lfs.git")

    def find(name: str, **fields: str) -> list[str]:
        with source_talk(cache) as talk:
            source = ask_git(talk, url, token=TOKEN, **fields)["source"]
        return lay_out(source, tmp_path / name, cache=cache)

    assert find("folder", folder="lib") == ["a.bin"], "what tells of it stands above"
    found = find("all")
    assert len(found) == 4 and set(found) <= {"lib/a.bin", *files}
    assert find("earlier", ref="v1") == []
    commit(work, {".gitattributes": "*.txt text\n"})
    host.publish(work, "lfs.git")
    assert find("none") == []


def test_token_does_not_go_where_the_host_sends_us(work: Path, cache: Path, tmp_path: Path) -> None:
    with git_host(tmp_path / "old", token=TOKEN) as old, git_host(tmp_path / "new", token=TOKEN) as new:
        new.publish(work, "x.git")
        old.leads_to = new.url("").rstrip("/")
        with source_talk(cache) as talk, pytest.raises(Failed, match="does not accept the token"):
            ask_git(talk, old.url("x.git"), token=TOKEN)
        assert new.asked and not any(TOKEN in who for _, who in new.asked)
        new.token = ""
        assert ask_git_once(cache, old.url("x.git"))["commit"] == git("rev-parse", "HEAD", at=work)
        inner = tmp_path / "inner"
        commit(inner, {"x": "y"})
        with git_host(tmp_path / "third") as third:
            old.leads_to, third_asked = "", third.asked
            old.token = ""
            third.publish(inner, "inner.git")
            add_submodule(work, "../moved.git", inner)
            url = old.publish(work, "outer.git")

            def send_on() -> None:
                old.leads_to = third.url("").rstrip("/")

            with source_talk(cache) as talk, pytest.raises(Failed):
                old.before_asked["/moved.git/info/refs"] = send_on
                ask_git(talk, url)
            assert not third_asked


def test_key_is_one_argument_of_ssh(work: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ssh of this test runs the remote command on this machine."""
    folder, noted = tmp_path / "bin", tmp_path / "noted"
    folder.mkdir()
    (folder / "ssh").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{noted}\nfor last; do :; done\nexec sh -c "$last"\n')
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    key = "~/the $(touch ran) 'key'"
    commit_there = git("rev-parse", "HEAD", at=work)
    for url in (f"git@host.example:{work}/.git", f"ssh://git@host.example:2222{work}/.git"):
        assert ask_git_once(cache, url, ssh_key=key)["commit"] == commit_there
        words = noted.read_text().splitlines()
        assert words[words.index("-i") + 1] == os.path.expanduser(key)
        assert {"BatchMode=yes", "StrictHostKeyChecking=yes", "git@host.example"} < set(words)


@pytest.mark.parametrize("way", ["path", "file://"])
def test_repository_on_a_disk_of_the_node(work: Path, cache: Path, way: str) -> None:
    where = f"{way if way == 'file://' else ''}{work}"
    assert ask_git_once(cache, where)["commit"] == git("rev-parse", "HEAD", at=work)
    with pytest.raises(Failed, match="is not a repository that can be read here"):
        ask_git_once(cache, f"{where}-gone")


def test_mirror_of_a_git_that_was_killed_is_used_again(host: GitHost, work: Path, cache: Path) -> None:
    url = host.publish(work, "killed.git")
    first = ask_git_once(cache, url, token=TOKEN)["commit"]
    (mirror,) = (path.parent for path in cache.glob("git/*/HEAD"))
    for left in ("shallow.lock", "packed-refs.lock", "objects/pack/tmp_pack_x"):
        (mirror / left).write_text("left")
    assert commit(work, {"new.py": "1"}) != first
    host.publish(work, "killed.git")
    assert ask_git_once(cache, url, token=TOKEN)["commit"] == git("rev-parse", "HEAD", at=work)
    assert not (mirror / "objects/pack/tmp_pack_x").exists()


def add_submodule(work: Path, url: str, inner: Path, *, at: str = "lib/inner") -> None:
    git("submodule", "--quiet", "add", "--", str(inner), at, at=work)
    git("config", "-f", ".gitmodules", f"submodule.{at}.url", url, at=work)
    commit(work, {})


def test_submodule_of_the_same_host_comes_with_it(host: GitHost, work: Path, cache: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    commit(inner, {"inner.py": "print('inner')\n"})
    host.publish(inner, "inner.git")
    add_submodule(work, "../inner.git", inner)
    commit(inner, {"inner.py": "newer than what is meant"})
    host.publish(inner, "inner.git")
    url = host.publish(work, "outer.git")
    with source_talk(cache) as talk:
        source = ask_git(talk, url, token=TOKEN)["source"]
    lay_out(source, tmp_path / "source", cache=cache)
    assert (tmp_path / "source/lib/inner/inner.py").read_text() == "print('inner')\n"
    with source_talk(cache) as talk:
        source = ask_git(talk, url, folder="sub", token=TOKEN)["source"]  # the submodule is outside that folder
    lay_out(source, tmp_path / "sub", cache=cache)
    assert read_all(tmp_path / "sub") == {"main.py": b"print('sub')\n"}


def test_submodule_of_another_owner_does_not_get_the_token(
    host: GitHost, work: Path, cache: Path, tmp_path: Path
) -> None:
    inner = tmp_path / "inner"
    commit(inner, {"secret.txt": "another private repository"})
    for owner in ("victim", "evil"):
        (host.root / owner).mkdir()
    host.publish(inner, "victim/private.git")
    add_submodule(work, "../../victim/private.git", inner)
    url = host.publish(work, "evil/x.git")
    said = "the token is only used for submodules of 'evil', .*: git .*victim/private.git is private"
    with source_talk(cache) as talk, pytest.raises(Failed, match=said):
        ask_git(talk, url, token=TOKEN)
    assert not [who for path, who in host.asked if "victim" in path and TOKEN in who]
    host.publish(inner, "evil/inner.git")
    git("config", "-f", ".gitmodules", "submodule.lib/inner.url", "../inner.git", at=work)
    last = commit(work, {})
    host.publish(work, "evil/x.git")
    assert ask_git_once(cache, url, token=TOKEN)["commit"] == last


@pytest.mark.parametrize("elsewhere", ["other host", "path", "ext", "option"])
def test_submodule_of_another_host_is_refused(
    host: GitHost, work: Path, cache: Path, tmp_path: Path, elsewhere: str
) -> None:
    inner = tmp_path / "inner"
    commit(inner, {"inner.py": "x"})
    ran = tmp_path / "ran"
    with git_host(tmp_path / "other") as other:
        urls = {
            "other host": other.publish(inner, "inner.git"),
            "path": str(inner),
            "option": f"--upload-pack=touch {ran}",
        }
        add_submodule(work, urls.get(elsewhere, f"ext::sh -c touch% {ran}"), inner)
        url = host.publish(work, f"bad-{elsewhere[:3]}.git")
        with (
            source_talk(cache) as talk,
            pytest.raises(Failed, match=r"submodule 'lib/inner': (a submodule is at|git url)"),
        ):
            ask_git(talk, url, token=TOKEN)
        assert not other.asked and not ran.exists()


def write_tree(work: Path, *entries: tuple[str, str, str]) -> str:
    """Write a tree that git itself would not write, with repeated names for example; return its object id."""
    data = b"".join(f"{mode} {name}\0".encode() + bytes.fromhex(number) for mode, name, number in entries)
    (work.parent / "tree").write_bytes(data)
    return git("hash-object", "-w", "-t", "tree", "--literally", str(work.parent / "tree"), at=work)


def test_link_above_a_submodule_leads_nowhere(host: GitHost, work: Path, cache: Path, tmp_path: Path) -> None:
    """The tree has ``x`` twice, as a link and as a folder: files of the folder would land in the link's target."""
    outside, inner = tmp_path / "outside", tmp_path / "inner"
    outside.mkdir()
    commit_of_inner = commit(inner, {"inner.py": "x"})
    host.publish(inner, "inner.git")
    commit(work, {".gitmodules": '[submodule "x"]\n path = x/inner\n url = ../inner.git\n', "link": str(outside)})
    modules, link = (git("rev-parse", f"HEAD:{name}", at=work) for name in (".gitmodules", "link"))
    folder = write_tree(work, ("160000", "inner", commit_of_inner))
    tree = write_tree(work, ("100644", ".gitmodules", modules), ("40000", "x", folder), ("120000", "x", link))
    git("reset", "--quiet", "--soft", git("commit-tree", tree, "-m", "x", at=work), at=work)
    url = host.publish(work, "linked.git")
    with source_talk(cache) as talk:
        source = ask_git(talk, url, token=TOKEN)["source"]
    with pytest.raises(FilesError, match="'x' is not a folder"):
        lay_out(source, tmp_path / "source", cache=cache)
    assert not list(outside.iterdir())


def test_repository_that_is_too_large_is_refused(host: GitHost, work: Path, cache: Path) -> None:
    (work / "zeros").write_bytes(b"\0" * 5_000_000)
    commit(work, {})
    url = host.publish(work, "large.git")
    for limits, said in {
        GitLimits(laid_out_bytes=1_000_000): "the repository has .* the limits are .* and 1000000",
        GitLimits(files=3): "the repository has .* the limits are 3 and",
        GitLimits(output_bytes=10): "printed more than 10 bytes",
        GitLimits(fetched_bytes=100): "sends more than 100 bytes, including submodules",
    }.items():
        with source_talk(cache, limits=limits) as talk, pytest.raises(Failed, match=said):
            ask_git(talk, url, token=TOKEN)
        cache = cache.with_name(f"{cache.name}-")


def test_folders_count_as_files_do(host: GitHost, work: Path, cache: Path) -> None:
    commit(work, {"a/b/c/d/e/f/x.py": "1"})
    with source_talk(cache, limits=GitLimits(files=9)) as talk, pytest.raises(Failed, match="has 13 files and folders"):
        ask_git(talk, host.publish(work, "folders.git"), token=TOKEN)


def test_branches_of_a_repository_take_one_file(work: Path, cache: Path) -> None:
    last = git("rev-parse", "HEAD", at=work)
    refs = "".join(f"{last} refs/heads/b{number:05}\n" for number in range(3000))
    (work / ".git/packed-refs").write_text(f"# pack-refs with: peeled fully-peeled sorted \n{refs}")
    limits = GitLimits(fetched_bytes=1_000_000)
    with source_talk(cache, limits=limits) as talk, pytest.raises(Failed, match="sends more than 1000000 bytes"):
        ask_git(talk, str(work), last[:9])
    with source_talk(cache) as talk:
        for ref in (last[:10], last[:11]):  # hosts do not serve commits by abbreviated ids
            assert ask_git(talk, str(work), ref)["commit"] == last
    assert sum(path.is_file() for path in cache.rglob("*")) < 30


def test_submodules_come_out_of_one_limit(host: GitHost, work: Path, cache: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    for number in range(3):
        commit(inner, {"inner.bin": os.urandom(400_000)})
        host.publish(inner, f"inner{number}.git")
        add_submodule(work, f"../inner{number}.git", inner, at=f"lib/{number}")
        shutil.rmtree(inner)
    url = host.publish(work, "limit.git")
    limits = GitLimits(fetched_bytes=1_000_000)
    with (
        source_talk(cache, limits=limits) as talk,
        pytest.raises(Failed, match=r"inner2.* sends more than 1000000"),
    ):
        ask_git(talk, url, token=TOKEN)
    assert ask_git_once(cache, url, token=TOKEN)["commit"]


def test_attributes_of_a_repository_change_no_file(work: Path, cache: Path, tmp_path: Path) -> None:
    files = {"big": "a\n" * 1000, "train.py": "$Id$\n", "sub/inner": "b\n"}
    commit(work, files)
    attributes = "* text eol=crlf working-tree-encoding=UTF-32\n*.py ident\n"
    commit(work, {})
    for name in (".gitattributes", "sub/.gitattributes"):  # added as raw objects, or git would convert the files here
        number = git("hash-object", "-w", "--stdin", "--no-filters", at=work, given=attributes)
        git("update-index", "--add", "--cacheinfo", f"100644,{number},{name}", at=work)
    git("commit", "--quiet", "--message", "x", at=work)
    source = ask_git_once(cache, str(work))["source"]
    lay_out(source, tmp_path / "source", cache=cache)
    found = read_all(tmp_path / "source")
    assert found[".gitattributes"] == attributes.encode()
    assert {name: found[name] for name in files} == {name: text.encode() for name, text in files.items()}


def write_bomb(repository: Path, size: int) -> None:
    """Write a commit with a file of ``size`` bytes, stored as a small delta against a file of 64 KiB."""
    base, copies = bytes(1 << 16), size >> 16
    size = copies << 16
    data = hashlib.sha1(b"blob %d\0" % size)
    for _ in range(copies):
        data.update(base)
    objects = {1: b"", 2: b"100644 big\0" + data.digest(), 3: base}
    names = {
        kind: hashlib.sha1(b"%s %d\0" % (kind_name, len(objects[kind])) + objects[kind])
        for kind, kind_name in ((2, b"tree"), (3, b"blob"))
    }
    objects[1] = b"tree %s\nauthor t <t@t> 1 +0000\ncommitter t <t@t> 1 +0000\n\nx\n" % names[2].hexdigest().encode()
    delta = b"".join(map(to_digits, (len(base), size))) + b"\x80" * copies
    pack = b"PACK" + struct.pack(">II", 2, 4)
    for kind, content in objects.items():
        pack += pack_head(kind, len(content)) + zlib.compress(content)
    pack += pack_head(7, len(delta)) + names[3].digest() + zlib.compress(delta)
    git("init", "--quiet", "--bare", str(repository), at=repository.parent)
    (repository / "objects/pack/bomb.pack").write_bytes(pack + hashlib.sha1(pack).digest())
    git("index-pack", "objects/pack/bomb.pack", at=repository)
    commit = hashlib.sha1(b"commit %d\0" % len(objects[1]) + objects[1]).hexdigest()
    (repository / "refs/heads/main").write_text(f"{commit}\n")


def to_digits(number: int) -> bytes:
    """Encode a number with seven bits in each byte, as in a git delta."""
    more = number >> 7
    return bytes([number & 0x7F | (0x80 if more else 0)]) + (to_digits(more) if more else b"")


def pack_head(kind: int, size: int) -> bytes:
    more = size >> 4
    return bytes([kind << 4 | size & 15 | (0x80 if more else 0)]) + (to_digits(more) if more else b"")


def test_object_that_is_far_larger_than_what_comes_takes_no_memory_without_end(cache: Path, tmp_path: Path) -> None:
    write_bomb(tmp_path / "bomb.git", 256_000_000)
    limits = GitLimits(memory_bytes=200_000_000)
    with source_talk(cache, limits=limits) as talk, pytest.raises(Failed, match="git ran out of memory: "):
        ask_git(talk, str(tmp_path / "bomb.git"))
    assert not list(cache.glob("git/*/objects/pack/*.pack"))


def test_host_that_never_answers_is_not_waited_for(cache: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.git"
        limits = GitLimits(fetch_s=1.0)
        with source_talk(cache, limits=limits) as talk, pytest.raises(Failed, match="did not finish within 1 s"):
            ask_git(talk, url)
    assert_soon(lambda: not subprocess.run(["pgrep", "-f", url], capture_output=True).stdout)
