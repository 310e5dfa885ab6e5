"""Copies to nodes and back, over real SSH and on this machine: lying nodes, full disks, and copies that end early."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from detrain_nb.copying import json_lines, receiver, sender
from detrain_nb.copying.json_lines import LINE_BYTES, Failed, FilesError, Talk
from detrain_nb.copying.letter_case import ignores_case
from detrain_nb.copying.receiver import TreeWriter
from detrain_nb.copying.sender import MOST_ENTRIES, list_tree, open_listed
from detrain_nb.deploy import code, files
from detrain_nb.deploy.files import Copied, Patience, Stop, get, on_every, put
from detrain_nb.deploy.ssh_node import SshNode
from detrain_nb.deploy.sync import check
from detrain_nb.errors import DetrainError, SpecError, TransportError, WireError
from detrain_nb.spec.node import Node
from detrain_nb.transport.local import LocalTransport

from ..testbed.fixtures import MakeTestbed
from ..testbed.nodes import ssh_nodes
from ..testbed.testbed import Link, Testbed

ODD_NAMES = ["plain.txt", "with space.txt", "Grüße 世界.txt", "-rf", "a'b\"c$(d);e", "...", ".hidden"]
LARGE_BYTES = 50 << 20
_LIMIT_S = 30.0


def make_tree(folder: Path, *, large_bytes: int = 0) -> Path:
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "empty").mkdir()
    for name in ODD_NAMES:
        (folder / name).write_text(f"in {name}")
        (folder / "deep" / "er" / name).write_bytes(os.urandom(1000))
    (folder / "nothing").write_bytes(b"")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    if large_bytes:
        (folder / "large.bin").write_bytes(os.urandom(large_bytes))
        (folder / "large.bin").chmod(0o755)
    return folder


def describe(folder: Path) -> dict[str, bytes | None]:
    """Return the entries of a folder: a file's bytes after ``x`` (executable) or ``-``, and None for a folder."""
    found: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            found[name] = b"something else"
        else:
            mark = b"x" if path.stat().st_mode & 0o100 else b"-"
            found[name] = None if path.is_dir() else mark + path.read_bytes()
    return found


def wait_until_gone(*folders: Path, name: str = ".detrain_nb-*") -> None:
    """Wait until the staging folders are gone: the node's program removes them once it sees that the copy has ended."""
    deadline = time.monotonic() + _LIMIT_S
    while True:
        with contextlib.suppress(FileNotFoundError):  # a folder is removed during the search
            if not (left := [path for folder in folders for path in folder.rglob(name)]):
                return
            assert time.monotonic() < deadline, left
        time.sleep(0.02)


@pytest.fixture
def home(testbed: Testbed, tmp_path: Path) -> Path:
    """Return this test's work folder on the first host, as a path of the real file system."""
    folder = testbed.path_home("h0") / tmp_path.name
    folder.mkdir()
    return folder


@pytest.fixture
def node(testbed: Testbed, home: Path) -> Iterator[SshNode]:
    (node,) = ssh_nodes(testbed, 1)
    node._work_folder = f"{Path.home()}/{home.name}"
    yield node
    wait_until_gone(home)


def serve_sftp_by(testbed: Testbed, program: str) -> None:
    """Make ``program`` the SFTP server of the first host."""
    config = testbed.folder / "h0" / "sshd_config"
    config.write_text(config.read_text().replace("Subsystem sftp internal-sftp", f"Subsystem sftp {program}"))
    testbed.stop_sshd("h0")
    testbed.start_sshd("h0")


def no_checks_of_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the check for free space from our code on nodes."""
    with zipfile.ZipFile(io.BytesIO(code.own_code().data)) as archive:
        sources = {name: archive.read(name) for name in archive.namelist()}
    before, name = b"if size > free:", "detrain_nb/copying/receiver.py"
    assert before in sources[name]
    sources[name] = sources[name].replace(before, b"if False:")
    careless = code.CodeArchive.of(sources)
    monkeypatch.setattr(code, "own_code", lambda: careless)


# ---- there and back


@pytest.mark.parametrize("where", ["SSH", "this machine"])
def test_tree_goes_there_and_back_as_it_is(where: str, testbed: Testbed, tmp_path: Path) -> None:
    node = ssh_nodes(testbed, 1)[0] if where == "SSH" else LocalTransport()
    target = f"/var/tmp/{tmp_path.name}-{os.getpid()}"
    source = make_tree(tmp_path / "tree", large_bytes=LARGE_BYTES)
    told: list[tuple[int, int, int]] = []
    try:
        sent = put(node, [source, source / "run.sh"], target, lambda *now: told.append(now))
        size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
        count = 2 * len(ODD_NAMES) + 3
        assert sent == Copied(count + 1, size + len("#!/bin/sh\n"))
        assert told[0] == (0, 0, sent.size_bytes) and told[-1] == (sent.files, sent.size_bytes, sent.size_bytes)
        assert told == sorted(told) and len(told) > 50
        assert get(node, f"{target}/tree", tmp_path / "back") == Copied(count, size)
        assert get(node, [f"{target}/run.sh", f"{target}/tree/empty"], tmp_path / "back").files == 1
    finally:
        testbed.exec("h0", f"rm -r {target}")
    assert describe(tmp_path / "back" / "tree") == describe(source)
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["empty", "run.sh", "tree"]


def test_locale_of_a_host_is_nothing_to_names_of_files(testbed: Testbed, home: Path, tmp_path: Path) -> None:
    locale = "export LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"
    (node,) = ssh_nodes(testbed, 1, setup=[locale], workdir=f"~/{home.name}/Grüße 世界")
    source = make_tree(tmp_path / "ünï日")
    with contextlib.closing(node.start_agent("test")):
        for _ in range(2):  # over the agent's connection, then over a new one
            put(node, source)
            get(node, source.name, tmp_path / "back")
            node.leave()
    assert describe(tmp_path / "back" / source.name) == describe(home / "Grüße 世界" / source.name) == describe(source)


@pytest.mark.parametrize("where", ["SSH", "this machine"])
def test_what_only_its_owner_could_read_stays_so(where: str, testbed: Testbed, tmp_path: Path) -> None:
    node = ssh_nodes(testbed, 1)[0] if where == "SSH" else LocalTransport()
    target = f"/var/tmp/{tmp_path.name}-{os.getpid()}"
    source = tmp_path / "tree"
    (source / "inner").mkdir(parents=True)
    modes = {"inner": 0o700, "inner/secret": 0o600, "inner/open": 0o644, "run": 0o700, "large": 0o600}
    for name, mode in modes.items():
        if name != "inner":
            (source / name).write_bytes(b"x" * (LARGE_BYTES if name == "large" else 1))
        (source / name).chmod(mode)
    try:
        put(node, source, target)
        get(node, f"{target}/tree", tmp_path / "back")
    finally:
        testbed.exec("h0", f"rm -r {target}")
    modes["inner/open"] = 0o600  # others could not reach it in the private folder
    assert {name: (tmp_path / "back" / "tree" / name).stat().st_mode & 0o777 for name in modes} == modes


@pytest.mark.parametrize(
    ("options", "sftp", "connections"),
    [
        ([], "/bin/false", 1),
        pytest.param(["MaxSessions 1"], "internal-sftp", 3, marks=pytest.mark.slow),
        pytest.param(["MaxSessions 1"], "/bin/false", 3, marks=pytest.mark.slow),
        (["MaxSessions 2"], "internal-sftp", None),  # the previous copy's channel may still be open
    ],
)
def test_files_go_where_there_is_no_sftp_or_no_further_channel(
    options: list[str], sftp: str, connections: int | None, make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    testbed = make_testbed(1, sshd_options=options)
    serve_sftp_by(testbed, sftp)
    (node,) = ssh_nodes(testbed, 1)
    source = make_tree(tmp_path / "tree", large_bytes=3 << 20)
    with contextlib.closing(node.start_agent("test")):  # the agent has the first channel
        put(node, source)
        get(node, "tree", tmp_path / "back")
        node.leave()
    assert describe(tmp_path / "back" / "tree") == describe(source)
    log = (testbed.folder / "h0" / "sshd.log").read_text()
    assert connections is None or log.count("Accepted publickey") == connections


def test_relative_paths_are_of_the_work_folder_or_the_home(node: SshNode, home: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    put(node, tmp_path / "a.txt", f"~/{home.name}/some/where")
    put(node, str(tmp_path / "a.txt"), "else/where")
    put(node, tmp_path / "a.txt")
    assert sorted(name for name in describe(home) if name.endswith(".txt")) == [
        "a.txt",
        "else/where/a.txt",
        "some/where/a.txt",
    ]
    get(node, f"~/{home.name}/some/where", tmp_path / "b")
    get(node, ".", tmp_path / "c")
    assert describe(tmp_path / "b") == {"where": None, "where/a.txt": b"-a"}
    assert describe(tmp_path / "c" / node.name) == describe(home)
    node._work_folder = ""  # as if the node was not reached
    get(node, [f"{home.name}/a.txt", f"{home.name}/else/."], tmp_path / "d")
    assert describe(tmp_path / "d") == {"a.txt": b"-a", "else": None, "else/where": None, "else/where/a.txt": b"-a"}


def test_file_on_this_machine_is_not_copied_onto_itself(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("a")
    before = file.stat()
    assert put(LocalTransport(), file, folder=str(tmp_path)).files == 0
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_copy_on_this_machine_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_tree(tmp_path / "tree", large_bytes=3 << 20)
    for module, name in ((subprocess, "Popen"), (os, "fork"), (os, "posix_spawn")):
        monkeypatch.setattr(module, name, lambda *_, name=name, **__: pytest.fail(f"{name} was called"))
    put(LocalTransport(), source, str(tmp_path / "there"))
    get(LocalTransport(), str(tmp_path / "there" / "tree"), tmp_path / "back")
    assert check([LocalTransport()], str(tmp_path / "there")).is_same
    assert describe(tmp_path / "back" / "tree") == describe(tmp_path / "there" / "tree") == describe(source)


@pytest.mark.parametrize("act", [put, get])
def test_interrupt_of_a_copy_on_this_machine_leaves_nothing_half_written(
    act: Callable[..., Copied], tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(b"x" * LARGE_BYTES)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "large").write_text("as before")
    for folder in ("old", "new"):
        with pytest.raises(KeyboardInterrupt):
            act(LocalTransport(), str(tmp_path / "large"), str(tmp_path / folder), stop_at(0.5, press_stop))
        assert "detrain_nb copy" not in {thread.name for thread in threading.enumerate()}
    (tmp_path / "large").unlink()
    assert describe(tmp_path) == {"old": None, "old/large": b"-as before"}


def test_folder_is_not_copied_into_itself(node: SshNode, home: Path, tmp_path: Path) -> None:
    there = make_tree(tmp_path / "s")
    before = describe(there)
    for target in (None, str(there), str(there / "deep" / "new")):
        with pytest.raises(SpecError, match="would be copied into itself"):
            put(LocalTransport(), there, target, folder=str(there))
    (home / "s").mkdir()
    (home / "s" / "file").write_text("file")
    with pytest.raises(SpecError, match="would be copied into itself"):  # the host is this machine
        put(node, home / "s", str(home / "s" / "new"))
    wait_until_gone(home)
    wait_until_gone(home, name="new")
    assert describe(home / "s") == {"file": b"-file"}
    assert describe(there) == before


def test_same_names_stay_in_a_copy_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    for name in (".env", "id_rsa", "train.py"):
        (tmp_path / "s" / name).write_text(name)
    copied = put(LocalTransport(), tmp_path / "s", "copies", folder=str(tmp_path))
    assert (copied.files, copied.num_kept) == (1, 2)
    assert list(describe(tmp_path / "copies")) == ["s", "s/train.py"]
    assert put(LocalTransport(), tmp_path / "s" / ".env", folder=str(tmp_path / "s")) == Copied(0, 0, num_there=1)


@pytest.mark.parametrize("path", ["~", "/", "", "~/.."])
def test_home_as_a_whole_is_refused_before_it_is_listed(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "alice"))
    (tmp_path / "home" / "alice").mkdir(parents=True)
    with pytest.raises(SpecError, match="is a home directory or contains one" if path else "'' is not a valid path"):
        put(LocalTransport(), path, "copies", folder=str(tmp_path))
    assert list(describe(tmp_path)) == ["home", "home/alice"]


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_what_is_no_path_is_refused(path: str, tmp_path: Path) -> None:
    node, here = LocalTransport(), str(tmp_path)
    acts = [lambda: put(node, path, here), lambda: get(node, [path], here, work_folder=here)]
    if path:
        acts += [lambda: put(node, here, path), lambda: get(node, here, path)]
    for act in acts:
        with pytest.raises(SpecError, match="is not a valid path: name files or folders"):
            act()


@pytest.mark.parametrize("act", [put, get])
def test_file_with_contents_and_no_size_is_told(act: Callable[..., Copied], tmp_path: Path) -> None:
    with pytest.raises(DetrainError, match="/status has contents but size 0, as the system generates it"):
        act(LocalTransport(), f"/proc/{os.getpid()}/status", str(tmp_path))
    assert describe(tmp_path) == {}


def test_links_and_devices_are_neither_followed_nor_written(node: SshNode, home: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    tree = tmp_path / "tree"
    for base in (tree, home / "there"):
        base.mkdir()
        (base / "file").write_text("x")
        (base / "to-file").symlink_to(secret)
        (base / "to-folder").symlink_to("/etc")
        os.mkfifo(base / "pipe")
    sent = put(node, tree, "put")
    assert (sent.files, sent.num_skipped, len(sent.skipped)) == (1, 3, 3)
    assert describe(home / "put") == {"tree": None, "tree/file": b"-x"}
    got = get(node, "there", tmp_path / "back")
    assert (got.files, got.num_skipped) == (1, 3) and any(path.endswith("there/pipe") for path in got.skipped)
    assert describe(tmp_path / "back") == {"there": None, "there/file": b"-x"}
    with pytest.raises(SpecError, match="pipe is neither a file nor a folder"):
        put(node, tree / "pipe")


def test_keys_in_a_folder_go_only_when_they_are_named(node: SshNode, home: Path, tmp_path: Path) -> None:
    for name in ("a.py", ".env", "sub/x.pem", ".ssh/config", ".ssh/id_rsa"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text("x")
    kept = ("tree/.env", "tree/.ssh/config", "tree/.ssh/id_rsa", "tree/sub/x.pem")
    assert put(node, tmp_path / "tree") == Copied(1, 1, num_kept=4, kept=kept)
    assert sorted(describe(home)) == ["tree", "tree/a.py", "tree/sub"]
    assert put(node, [tmp_path / "tree" / ".env", tmp_path / "tree" / ".ssh"]) == Copied(3, 3)
    for place in ("huggingface/token", "huggingface/hub"):
        (tmp_path / ".cache" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ".cache" / place).write_text("x")
    assert put(node, tmp_path / ".cache" / "huggingface") == Copied(1, 1, num_kept=1, kept=("huggingface/token",))
    assert put(LocalTransport(), tmp_path / "tree", str(tmp_path / "copy")).kept == kept


def test_what_stands_there_is_replaced_and_keeps_being_whole(node: SshNode, home: Path, tmp_path: Path) -> None:
    (home / "file").write_text("old")
    (home / "file").chmod(0o600)
    (tmp_path / "file").write_text("new")
    with open(home / "file") as reading:
        put(node, tmp_path / "file")
        assert reading.read() == "old"
    assert (home / "file").read_text() == "new"


def test_file_that_grows_is_sent_as_long_as_it_was(tmp_path: Path) -> None:
    source = tmp_path / "log"
    source.write_bytes(b"x" * 2_000_000)

    def grow(*_: int) -> None:
        with open(source, "ab") as log:
            log.write(b"more")

    assert put(LocalTransport(), source, str(tmp_path / "there"), grow).size_bytes == 2_000_000
    assert (tmp_path / "there/log").read_bytes() == b"x" * 2_000_000


def test_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "log"
    source.write_bytes(b"x" * 2_000_000)
    with pytest.raises(DetrainError, match=r"this machine: .*/log shrank while it was copied"):
        put(LocalTransport(), source, str(tmp_path / "there"), lambda *_: os.truncate(source, 1000))
    assert not (tmp_path / "there").exists()


def test_paths_that_cannot_be_are_told(node: SshNode, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for folder in (tmp_path, tmp_path / "a"):
        (folder / "x").write_text("x")
    with pytest.raises(SpecError, match="nowhere: No such file"):
        put(node, tmp_path / "nowhere")
    with pytest.raises(SpecError, match="would get the same name at the target"):
        put(node, [tmp_path / "x", tmp_path / "a" / "x"])
    with pytest.raises(SpecError, match="no path"):
        get(node, [])
    with pytest.raises(DetrainError, match=r"h0: /.*/nowhere: No such file") as caught:
        get(node, "nowhere", tmp_path / "back")
    assert str(caught.value).startswith(f"{node.name}: ")
    assert not (tmp_path / "back").exists()
    with pytest.raises(DetrainError, match=r"h0: /proc/version cannot be written|h0: /proc"):
        put(node, tmp_path / "x", "/proc/version")


# ---- links in the way


def test_nothing_is_written_through_a_link_here(node: SshNode, home: Path, tmp_path: Path) -> None:
    make_tree(home / "asked")
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "asked").symlink_to(outside)
    with pytest.raises(DetrainError, match=r"this machine: .*/back/asked is a link, and nothing is written through it"):
        get(node, "asked", tmp_path / "back")
    (tmp_path / "back" / "asked").unlink()
    (tmp_path / "back" / "asked").mkdir()
    (tmp_path / "back" / "asked" / "run.sh").symlink_to(outside / "planted")  # the link is replaced, not followed
    get(node, "asked", tmp_path / "back")
    assert list(outside.iterdir()) == []
    assert describe(tmp_path / "back" / "asked") == describe(home / "asked")


def test_case_of_a_file_system_is_found_out(tmp_path: Path) -> None:
    (made := tmp_path / "Made").touch()
    assert not ignores_case(str(made))
    (tmp_path / "mADE").touch()  # as on a case-insensitive file system, where this name exists
    assert ignores_case(str(made))


@pytest.mark.parametrize("first, second", [("Model.pt", "model.pt"), ("Out/m.pt", "out/n.pt")])
def test_files_that_differ_in_case_alone_do_not_become_one(
    first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ignores_case`` is patched, as Linux has no case-insensitive file system that every machine could mount."""
    for name in (first, second):
        (tmp_path / "there" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "there" / name).write_text(name)
    get(LocalTransport(), tmp_path / "there", tmp_path / "here")
    assert describe(tmp_path / "here" / "there") == describe(tmp_path / "there")
    monkeypatch.setattr(receiver, "ignores_case", lambda made: True)
    with pytest.raises(DetrainError, match=r"^this machine: .* would be one file in .*, as its file system ignores"):
        get(LocalTransport(), tmp_path / "there", tmp_path / "mac")
    files = [path for path in (tmp_path / "mac").rglob("*") if path.is_file()]
    assert len(files) <= 1 and all(
        path.read_text() == str(path.relative_to(tmp_path / "mac" / "there")) for path in files
    )


def test_link_in_the_place_of_a_folder_that_was_made_is_not_written_through(tmp_path: Path) -> None:
    """In a folder that a group can write, others can plant such a link at any moment of a copy."""
    outside = tmp_path / "outside"
    (outside / "inner").mkdir(parents=True)
    with TreeWriter(str(tmp_path / "base")) as writer:
        writer.add_file("tree/inner/1", 1, 0o644, [b"1"])
        (tmp_path / "base" / "tree").rename(tmp_path / "base" / "aside")
        (tmp_path / "base" / "tree").symlink_to(outside)
        with pytest.raises(FilesError, match="base/tree cannot be written: "):
            writer.add_file("tree/inner/2", 1, 0o644, [b"2"])
        with pytest.raises(FilesError, match="base/tree cannot be written: "):
            writer.add_folder("tree/other", 0o755)
    assert sorted(path.name for path in outside.rglob("*")) == ["inner"]
    assert not list((tmp_path / "base").glob(".detrain_nb*"))


class Replaced:
    """A staging folder that others have moved away and replaced, as they can where a group can write."""

    def __init__(self, writer: TreeWriter, planted: Path, names: Iterable[str]) -> None:
        self.real = Path(f"{writer.staging}-moved")
        Path(writer.staging).rename(self.real)
        Path(writer.staging).mkdir()
        for name in names:
            (Path(writer.staging) / name).symlink_to(planted)


def test_folder_in_the_place_of_the_staging_folder_is_not_used(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    secret.chmod(0o600)
    with TreeWriter(str(tmp_path / "base")) as writer:
        replaced = Replaced(writer, secret, ["1.part", "2.part", "archive"])
        writer.add_file("run.sh", 1, 0o755, [b"x"])
        writer.add_file("own", 1, 0o600, [b"x"])
        with writer.open_staged("archive") as file:
            file.write(b"overwritten")
    assert (secret.read_text(), secret.stat().st_mode & 0o777) == ("key", 0o600)
    assert describe(tmp_path / "base").items() >= {"run.sh": b"xx", "own": b"-x"}.items()
    assert not list(replaced.real.iterdir())


def test_folder_of_somebody_else_is_not_taken_for_the_staging_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other folder replaces ours between its creation and its opening."""
    mkdir = os.mkdir

    def make(path: str, *args: Any, **options: Any) -> None:
        mkdir(path, *args, **options)
        if str(path).startswith(".detrain_nb-"):
            (tmp_path / path / "of another").write_text("x")

    monkeypatch.setattr(os, "mkdir", make)
    with (
        pytest.raises(FilesError, match="another process has replaced our staging folder"),
        TreeWriter(str(tmp_path)),
    ):
        pass
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["of another"]


def test_other_folder_of_the_user_is_not_taken_for_the_staging_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group can enter the other folder, and could read the copied files there."""
    out = tmp_path / "out"
    out.mkdir()
    out.chmod(0o775)
    mkdir = os.mkdir

    def make(path: str, *args: Any, **options: Any) -> None:
        mkdir(path, *args, **options)
        if str(path).startswith(".detrain_nb-"):
            (tmp_path / path).rename(tmp_path / "made")
            out.rename(tmp_path / path)

    monkeypatch.setattr(os, "mkdir", make)
    with (
        pytest.raises(FilesError, match="another process has replaced our staging folder"),
        TreeWriter(str(tmp_path)),
    ):
        pass
    [there] = tmp_path.glob(".detrain_nb-*")
    assert there.stat().st_mode & 0o777 == 0o775 and not list(there.iterdir())


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_what_a_killed_copy_has_left_goes_with_the_next_one(mode: int, tmp_path: Path) -> None:
    """Where others can write, it stays, because others may have put it there."""
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(mode)
    die = "import os, sys; from detrain_nb.copying.receiver import TreeWriter\n"
    die += "with TreeWriter(sys.argv[1]) as writer: writer.open_staged('1.part'); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", die, str(there)], timeout=60)
    (left,) = there.iterdir()
    (there / "own").mkdir()
    (there / "own" / "1.part").write_text("mine")
    alike = left.name[:-1] + ("1" if left.name[-1] == "0" else "0")
    for name, other in ((alike, "note"), (".detrain_nb-", "1.part")):
        (there / name).mkdir(mode=0o700)  # differs from a staging folder of ours
        (there / name / other).write_text("mine")
    before = set(there.iterdir())
    with TreeWriter(str(there)) as at_work, at_work.open_staged("1.part"):
        with TreeWriter(str(there)) as writer:
            writer.add_file("new", 1, 0o644, [b"x"])
        assert Path(at_work.staging, "1.part").exists()
    assert before - set(there.iterdir()) == ({left} if mode == 0o755 else set())


def test_file_of_a_folder_that_only_its_owner_could_enter_stays_private(tmp_path: Path) -> None:
    """Others may have created the destination folder before, and the files are copied into it."""
    (tmp_path / "keys" / "inner").mkdir(parents=True)
    for name in ("keys/inner/a.txt", "keys/b.txt"):
        (tmp_path / name).write_text("key")
    (tmp_path / "keys").chmod(0o700)
    (tmp_path / "base" / "keys").mkdir(parents=True)
    (tmp_path / "base" / "keys").chmod(0o777)
    get(LocalTransport(), str(tmp_path / "keys"), tmp_path / "base")
    put(LocalTransport(), tmp_path / "keys", str(tmp_path / "new"))
    for base in ("base", "new"):
        for name in ("keys/inner/a.txt", "keys/b.txt"):
            assert (tmp_path / base / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("umask", [0o000, 0o022])
@pytest.mark.parametrize("act", [put, get])
def test_group_and_others_may_do_no_more_with_a_copy(act: Callable[..., Copied], umask: int, tmp_path: Path) -> None:
    modes = {"d": 0o750, "d/script": 0o740, "d/x": 0o640, "d/y": 0o660, "d/open": 0o644, "e": 0o755, "e/z": 0o444}
    for name, mode in modes.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if name in ("d", "e") else path.write_text("x")
        path.chmod(mode)
    before = os.umask(umask)
    try:
        act(LocalTransport(), str(tmp_path / "tree"), str(tmp_path / "copy"))
    finally:
        os.umask(before)
    modes |= {"d/open": 0o640, "e/z": 0o644}  # others could not enter d; the owner can always write
    found = {name: (tmp_path / "copy" / "tree" / name).stat().st_mode & 0o777 for name in modes}
    assert found == {name: mode & ~umask for name, mode in modes.items()}


def test_what_only_its_owner_may_read_is_so_from_its_first_byte(tmp_path: Path) -> None:
    modes = []

    def pieces() -> Iterator[bytes]:
        [part] = Path(writer.staging).iterdir()
        modes.append(part.stat().st_mode & 0o777)
        yield b"key"

    with TreeWriter(str(tmp_path)) as writer:
        writer.add_file("key", 3, 0o600, pieces())
        writer.add_file("key.sh", 3, 0o700, pieces())
    assert modes == [0o600, 0o600]
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("key", "key.sh")] == [0o600, 0o700]


@pytest.mark.parametrize("shared", [False, True])
def test_large_files_go_where_a_group_can_write(node: SshNode, home: Path, tmp_path: Path, shared: bool) -> None:
    for place in (tmp_path / "here", home / "there"):
        place.mkdir()
        (place / "large").write_bytes(b"x" * (2 << 20))
        place.chmod(0o777 if shared else 0o755)
    put(node, tmp_path / "here" / "large", "there/put")
    get(node, "there/large", tmp_path / "here" / "get")
    assert (home / "there" / "put" / "large").stat().st_size == (tmp_path / "here" / "get" / "large").stat().st_size


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_file_of_another_user_is_not_guarded_in_a_folder_like_tmp(tmp_path: Path) -> None:
    """The file's owner can replace it by another file or by a link."""
    tmp_path.chmod(0o1777)
    for name in ("own", "theirs"):
        (tmp_path / name).write_text("x")
    os.chown(tmp_path / "theirs", 12345, 12345)
    assert sender.is_guarded(str(tmp_path / "own")) and sender.is_guarded(str(tmp_path / "not there yet"))
    assert not sender.is_guarded(str(tmp_path / "theirs"))


def test_another_file_in_the_place_of_one_that_was_listed_is_not_sent(tmp_path: Path) -> None:
    """Where only the user can write, a changed inode number is ignored: some network file systems change it."""
    shared = tmp_path / "shared"
    (shared / "data").mkdir(parents=True)
    (shared / "data" / "notes").write_text("notes")
    (tmp_path / "secret").write_text("secret")
    for mode in (0o755, 0o777):
        shared.chmod(mode)
        listed = (shared / "data" / "notes").stat()
        tree = list_tree([("shared", str(shared))])
        (tmp_path / "secret").write_text("other")  # same size and modification time
        os.utime(tmp_path / "secret", ns=(0, listed.st_mtime_ns))
        os.link(tmp_path / "secret", shared / "another")
        (shared / "another").rename(shared / "data" / "notes")
        if mode == 0o755:
            with open_listed(tree.files[0]) as file:
                assert file.read() == b"other"
            (shared / "data" / "notes").unlink()
            (shared / "data" / "notes").write_text("notes")
        else:
            with pytest.raises(FilesError, match="notes was replaced while it was copied: copy it again"):
                open_listed(tree.files[0])


@pytest.mark.parametrize("where", ["from here", "from there"])
def test_checkpoint_that_is_saved_anew_while_it_is_copied_is_told(where: str, tmp_path: Path) -> None:
    """This holds even where only the owner can write, because the start of the new file is not a valid copy."""
    folder = tmp_path / "ck"
    folder.mkdir(mode=0o755)
    (folder / "a").write_bytes(b"a" * 20_000_000)
    (folder / "b").write_bytes(b"b" * 3000)

    def save(*now: int) -> None:
        if now[1] and not (folder / "new").exists():
            (folder / "new").write_bytes(b"n" * 20_000)
            os.link(folder / "new", folder / "newer")
            (folder / "newer").replace(folder / "b")

    act: Any = put if where == "from here" else get
    with pytest.raises(DetrainError, match="ck/b was replaced while it was copied: copy it again"):
        act(LocalTransport(), str(folder), str(tmp_path / "copy"), save)
    assert not (tmp_path / "copy" / "ck" / "b").exists()


def test_folder_that_was_replaced_by_another_is_told(tmp_path: Path) -> None:
    shared, vault = tmp_path / "shared", tmp_path / "vault"
    for base in (shared / "data", vault):
        base.mkdir(parents=True)
        (base / f"of {base.name}").touch()
    shared.chmod(0o777)

    ticks = itertools.count()

    def replace() -> None:
        if next(ticks) == 1:  # "shared" was read, "data" is next
            (shared / "data").rename(shared / "aside")
            vault.rename(shared / "data")

    with pytest.raises(FilesError, match="shared/data was replaced while it was copied: copy it again"):
        list_tree([("it", str(shared))], tick=replace)


def test_path_that_a_node_names_is_looked_for_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path could be an attacker's network share, where the system would log in, or be mounted on access."""
    make_tree(tmp_path / "tree")
    looked_at: list[str] = []
    monkeypatch.setattr(os.path, "isdir", lambda path, isdir=os.path.isdir: looked_at.append(str(path)) or isdir(path))
    staging = "/net/attacker.example/.detrain_nb-0123456789abcdef"
    play = saying({"type": "ready", "staging": staging}, {"type": "failed", "text": "no more"})
    with pytest.raises(DetrainError, match="liar: no more"):
        put(FakeNode(play), tmp_path / "tree")
    assert looked_at and all(path.startswith(str(tmp_path)) for path in looked_at)


def test_nothing_is_written_through_a_link_there(node: SshNode, home: Path, tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    outside = home / "outside"
    outside.mkdir()
    (home / "tree").symlink_to(outside)
    with pytest.raises(DetrainError, match=r"h0: .*/tree is a link, and nothing is written through it"):
        put(node, tmp_path / "tree")
    assert list(outside.iterdir()) == []


def test_file_where_a_folder_should_be_stays_and_is_told(node: SshNode, home: Path, tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    (home / "tree").write_text("a file")
    with pytest.raises(DetrainError, match=r"h0: .*/tree exists and is not a folder"):
        put(node, tmp_path / "tree")
    (home / "tree").unlink()
    (home / "tree" / "run.sh" / "in").mkdir(parents=True)
    with pytest.raises(DetrainError, match=r"h0: .*/tree/run.sh cannot be written: Is a directory"):
        put(node, tmp_path / "tree")
    assert (home / "tree" / "run.sh" / "in").is_dir()


# ---- a node that lies


class FakeNode:
    """A node that runs ``play`` instead of our program."""

    is_this_machine = False
    shares_paths = False

    def __init__(self, play: Callable[[Talk], object]) -> None:
        self.name = "liar"
        self._play = play

    def work_folder(self, folder: str) -> str:
        return "/work"

    @contextlib.contextmanager
    def run_files(self) -> Iterator[socket.socket]:
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=self._run, args=(theirs,))
        thread.start()
        try:
            yield ours
        finally:
            ours.close()
            thread.join(10)
            assert not thread.is_alive()

    def _run(self, sock: socket.socket) -> None:
        with (
            contextlib.suppress(Failed, OSError),  # the notebook has closed the connection
            sock,
            sock.makefile("rb") as reader,
            sock.makefile("wb") as writer,
        ):
            talk = Talk(reader, writer)
            talk.hear("get", "put", "check", "sync")
            self._play(talk)
            talk.flush()


def saying(*lines: object) -> Callable[[Talk], object]:
    """Return a play that sends these lines: a dict as JSON, bytes unchanged."""

    def play(talk: Talk) -> None:
        for line in lines:
            talk.send(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")

    return play


def tree(files: object = 1, folders: object = 0, size: object = 1) -> dict[str, object]:
    return {"type": "tree", "files": files, "folders": folders, "size": size}


def file(name: object = "asked/x", size: object = 1, **more: object) -> dict[str, object]:
    return {"type": "file", "name": name, "size": size, **more}


def deep(levels: int) -> list[dict[str, Any]]:
    """Return the lines that announce nested folders; the first is the folder that was requested."""
    return [{"type": "folder", "name": "asked" + "/d" * level} for level in range(levels)]


def endless(first: object, line: object) -> Callable[[Talk], object]:
    def play(talk: Talk) -> None:
        saying(first)(talk)
        while True:
            saying(line)(talk)

    return play


END = {"type": "end", "skipped": [], "num_skipped": 0}
OFFER = {"type": "offer", "path": "/x", "size": 1}
LIES = {
    "out of the folder": [tree(), file("../evil"), b"x", END],
    "out of the folder, further down": [tree(), file("asked/../../evil"), b"x", END],
    "absolute": [tree(), file("/tmp/evil"), b"x", END],
    "double slash": [tree(), file("asked//evil"), b"x", END],
    "no name": [tree(), file(""), b"x", END],
    "a number as a name": [tree(), file(7), b"x", END],
    "too long a name": [tree(), file("asked/" + "x" * 5000), b"x", END],
    "a name with an end of line": [tree(), file("asked/a\nb"), b"x", END],
    "a name with an escape": [tree(), file("asked/\x1b[2Jx"), b"x", END],
    "a name with a null": [tree(), file("asked/a\0b"), b"x", END],
    "a name that is no text": [tree(), file("asked/\ud800"), b"x", END],
    "a name that turns text around": [tree(), file("asked/\u202egpj.exe"), b"x", END],
    "not asked for": [tree(), file("sitecustomize.py"), b"x", END],
    "a folder not asked for": [tree(0, 1), {"type": "folder", "name": ".ssh"}, END],
    "a folder that is out of it": [tree(0, 1), {"type": "folder", "name": "asked/../.."}, END],
    "a link": [tree(), {"type": "link", "name": "asked/x", "target": "/etc/passwd"}, END],
    "a device": [tree(), {"type": "device", "name": "asked/x", "major": 1, "minor": 3}, END],
    "a negative size": [tree(), file(size=-1), END],
    "a size that is no number": [tree(), file(size="1"), b"x", END],
    "a size that is true": [tree(), file(size=True), b"x", END],
    "larger than announced": [tree(size=1), file(size=2), b"xx", END],
    "larger together": [tree(2, size=3), file("asked/a", 2), b"xx", file("asked/b", 2), b"xx", END],
    "more files than announced": [tree(1, size=2), file("asked/a"), b"x", file("asked/b"), b"x", END],
    "more folders than announced": [tree(0, 0), {"type": "folder", "name": "asked"}, END],
    "too many": [tree(MOST_ENTRIES, 1), END],
    "a negative count": [tree(-1), END],
    "bytes where a line should be": [tree(), file(size=1), b"xyz\n", END],
    "no JSON": [b"hello\n"],
    "no object": [b"[1]\n"],
    "deep JSON": [b"[" * 100_000 + b"\n"],
    "another answer": [{"type": "done"}],
    "more than that it is still at it": [{"type": "wait", "x": []}, tree(), file(), b"x", END],
    "a long line": [tree(0, 0, 0), b'{"type": "end", "num_skipped": 0, "x": [' + b"[]," * (LINE_BYTES // 3) + b"0]}\n"],
    "an offer of too much": [tree(size=1), {**OFFER, "size": 2}, END],
    "an offer of no path": [tree(size=1), {**OFFER, "path": 7}, END],
    "an offer after an offer": [tree(size=1), OFFER, OFFER, END],
    "a file in a folder that has not come": [tree(), file("asked/a/b"), b"x", END],
    "a folder in one that has not come": [tree(0, 1), {"type": "folder", "name": "asked/a/b"}, END],
    "too deep a file": [tree(1, 101), *(DEEP := deep(101)), file(f"{DEEP[-1]['name']}/x"), b"x", END],
    "too deep a folder": [tree(0, 102), *deep(102), END],
}


def test_folders_that_come_are_no_more_than_were_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    mkdir = os.mkdir

    def count(path: str, *args: Any, **options: Any) -> None:
        made.append(path)
        mkdir(path, *args, **options)

    monkeypatch.setattr(os, "mkdir", count)
    folders = [{"type": "folder", "name": f"asked/{number}" + "/x" * 90} for number in range(100)]
    with pytest.raises(WireError, match=r"liar: 'asked/0/x/x.*' arrived before its folder"):
        get(FakeNode(saying(tree(0, 100, 0), *folders, END)), "asked", tmp_path / "back")
    assert len(made) <= 3 and not (tmp_path / "back").exists()
    honest = [{"type": "folder", "name": "asked/a"}, *deep(100)]
    get(FakeNode(saying(tree(1, 101, 1), *honest, file(f"{deep(99)[-1]['name']}/file"), b"x", END)), "asked", tmp_path)
    assert len(describe(tmp_path)) == 102


def test_names_of_folders_have_a_limit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "_MOST_NAME_CHARS", 1000)
    folders = [{"type": "folder", "name": f"asked/{number:0100}"} for number in range(20)]
    with pytest.raises(WireError, match="liar: the names of its folders have more than 1000 characters"):
        get(FakeNode(saying(tree(0, 20, 0), *folders, END)), "asked", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("lie", LIES)
def test_lie_of_a_node_is_told_and_writes_nothing(lie: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    with pytest.raises(WireError, match="liar: ") as caught:
        get(FakeNode(saying(*LIES[lie])), "asked", tmp_path / "here" / "back")
    assert str(caught.value).isprintable()
    assert not [
        path for path in (tmp_path / "here").rglob("*") if path.is_file() and path.read_bytes() not in (b"x", b"xx")
    ]
    assert not {"evil", "sitecustomize.py", ".ssh"} & {path.name for path in tmp_path.rglob("*")}
    wait_until_gone(tmp_path)


@pytest.mark.parametrize(
    "play",
    [
        endless(tree(10, 10, 10), {"type": "folder", "name": "asked"}),
        endless(tree(10, 10, 10), {"type": "gone"}),
        endless(tree(1000, 0, 0), file("asked/x", 0)),
        endless(tree(10, 10, 10), OFFER),
    ],
    ids=["folders", "files that are gone", "files", "offers"],
)
def test_names_without_end_have_one(play: Callable[[Talk], object], tmp_path: Path) -> None:
    with pytest.raises(WireError, match=r"liar: (more files arrived than were announced|received 'offer')"):
        get(FakeNode(play), "asked", tmp_path / "back")
    wait_until_gone(tmp_path)


def test_line_without_end_is_not_read_on(tmp_path: Path) -> None:
    def play(talk: Talk) -> None:
        talk.send(b"x" * (LINE_BYTES + 10))
        talk.hear("never")

    with pytest.raises(WireError, match="liar: received data that is not a valid message"):
        get(FakeNode(play), "asked", tmp_path / "back", patience=Patience(silence_s=30.0))


def test_more_than_there_is_room_for_is_not_begun(tmp_path: Path) -> None:
    with pytest.raises(DetrainError, match=r"this machine: .*/asked/x cannot be written: .* the disk is full"):
        get(FakeNode(endless(tree(size=1 << 60), file(size=1 << 60))), "asked", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_folder_that_was_given_the_name_of_what_is_not_whole_stays(tmp_path: Path) -> None:
    """In a folder that a group can write, others can rename a folder of theirs to the staging folder's name."""
    theirs = tmp_path / "results" / "inner"
    theirs.mkdir(parents=True)
    (theirs / "only copy").write_text("x")
    with TreeWriter(str(tmp_path)) as writer:
        (Path(writer.staging) / "1").write_text("not whole")
        os.rename(writer.staging, tmp_path / "moved")
        os.rename(tmp_path / "results", writer.staging)
    assert (Path(writer.staging) / "inner" / "only copy").read_text() == "x"
    assert list((tmp_path / "moved").iterdir()) == []


def test_writers_that_begin_at_once_make_the_same_folders(tmp_path: Path) -> None:
    """Copies from many nodes start at once; the test tries it 50 times because it is a race."""
    num_writers = 8
    failures: list[FilesError] = []

    def write(barrier: threading.Barrier, folder: Path, index: int) -> None:
        barrier.wait(60)
        try:
            with TreeWriter(str(folder / str(index))):
                pass
        except FilesError as exc:
            failures.append(exc)

    for attempt in range(50):
        barrier, folder = threading.Barrier(num_writers), tmp_path / str(attempt) / "a" / "b" / "c"
        threads = [threading.Thread(target=write, args=(barrier, folder, index)) for index in range(num_writers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(path.name for path in folder.iterdir()) == [str(index) for index in range(num_writers)]
    assert failures == []


def test_node_that_hangs_up_in_a_file_leaves_nothing(tmp_path: Path) -> None:
    play = saying(tree(2, size=100), file("asked/a", 50), b"y" * 50, file("asked/b", 50), b"x" * 20)
    with pytest.raises(DetrainError, match="liar: the other side hung up in the middle of a file"):
        get(FakeNode(play), "asked", tmp_path / "back")
    assert describe(tmp_path / "back") == {"asked": None, "asked/a": b"-" + b"y" * 50}


def test_what_a_node_says_of_its_failure_is_one_clean_line(tmp_path: Path) -> None:
    play = saying({"type": "failed", "text": "no \x1b[2J\nTraceback" + "x" * 10_000})
    with pytest.raises(DetrainError, match="liar: no ") as caught:
        get(FakeNode(play), "asked", tmp_path / "back")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 5000


def test_node_that_says_nothing_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    mute = FakeNode(lambda talk: talk.hear("never"))
    with pytest.raises(DetrainError, match="liar: the other side does not answer"):
        get(mute, "asked", tmp_path / "back", patience=Patience(silence_s=0.2))


def test_node_that_is_still_at_it_without_end_is_not_heard_on(tmp_path: Path) -> None:
    with pytest.raises(DetrainError, match="liar: the other side keeps reporting that it is busy"):
        get(FakeNode(endless({"type": "wait"}, b'{"type": "wait"}\n' * 1000)), "asked", tmp_path / "back")


@pytest.mark.parametrize(
    ("first", "piece"),
    [([], b'{"type": "wait"}\n'), ([], b" "), ([tree(size=1 << 20), file(size=1 << 20)], b"x")],
    ids=["always at it", "a line without end", "a file without end"],
)
def test_node_that_is_always_at_it_is_not_waited_for_for_ever(
    first: list[object], piece: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def play(there: Talk) -> None:
        saying(*first)(there)
        while True:
            there.send(piece)
            there.flush()
            time.sleep(0.01)

    monkeypatch.setattr(json_lines, "SLOWEST_BYTES_PER_S", 1 << 50)
    with pytest.raises(DetrainError, match="liar: the other side takes too long"):
        get(FakeNode(play), "asked", tmp_path / "back", patience=Patience(answer_s=0.2))
    assert not (tmp_path / "back").exists()


def test_node_that_has_got_something_else_is_not_believed(tmp_path: Path) -> None:
    def play(talk: Talk) -> None:
        talk.say("ready", staging="/")
        while talk.hear("tree", "file", "end")["type"] != "end":
            pass
        talk.say("done", files=7, size=0)

    (tmp_path / "x").touch()
    with pytest.raises(WireError, match="liar: the node reports 7 files, 0 bytes received; 1 files, 0 bytes were sent"):
        put(FakeNode(play), tmp_path / "x")


def test_node_that_gives_up_is_heard_before_all_is_sent(tmp_path: Path) -> None:
    got_bytes = 0

    def play(talk: Talk) -> None:
        nonlocal got_bytes
        saying({"type": "ready", "staging": "/"})(talk)
        talk.hear("tree")
        talk.hear("file")
        saying({"type": "failed", "text": "no room"})(talk)
        talk.flush()
        for data in talk.read(LARGE_BYTES):
            got_bytes += len(data)

    (tmp_path / "large").write_bytes(bytes(LARGE_BYTES))
    with pytest.raises(DetrainError, match="liar: no room"):
        put(FakeNode(play), tmp_path / "large")
    assert got_bytes < LARGE_BYTES // 2


# ---- full disks


@pytest.mark.parametrize("is_foreseen", [True, False])
def test_full_disk_of_a_node_is_told_and_what_did_not_fit_removed(
    is_foreseen: bool, make_testbed: MakeTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    testbed = make_testbed(1, disk="16m")
    if not is_foreseen:
        no_checks_of_room(monkeypatch)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a-small").write_text("small")
    (tmp_path / "tree" / "b-large").write_bytes(b"x" * (20 << 20))
    (node,) = ssh_nodes(testbed, 1)
    reason = "the disk is full" if is_foreseen else "No space left on device"
    with pytest.raises(DetrainError, match=rf"h0: /.*/tree/b-large cannot be written: .*{reason}") as caught:
        put(node, tmp_path / "tree", "~/data")
    assert str(caught.value).startswith(f"{node.name}: ") and "\n" not in str(caught.value)
    deadline = time.monotonic() + _LIMIT_S
    while ".detrain_nb-" in (listed := testbed.output("h0", "find data -type f; ls -a data")):
        assert time.monotonic() < deadline
    assert listed.split() == ["data/tree/a-small", ".", "..", "tree"]


def test_disk_that_takes_no_more_here_is_told_and_what_did_not_fit_removed(
    node: SshNode, home: Path, tmp_path: Path
) -> None:
    (home / "asked").mkdir()
    (home / "asked" / "small").write_text("x")
    (home / "asked" / "tall").write_bytes(b"x" * (3 << 20))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
    try:
        with pytest.raises(DetrainError, match=r"this machine: .*/back/asked/tall cannot be written: File too large"):
            get(node, "asked", tmp_path / "back")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert describe(tmp_path / "back") == {"asked": None, "asked/small": b"-x"}


# ---- copies that end early


def stop_at(fraction: float, act: Callable[[], object]) -> files.OnProgress:
    done: list[bool] = []

    def on_progress(_: int, size: int, total: int) -> None:
        if size > fraction * total and not done:
            done.append(True)
            act()

    return on_progress


def press_stop() -> None:
    raise KeyboardInterrupt


def test_interrupt_leaves_nothing_half_written_there(node: SshNode, home: Path, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "large").write_bytes(b"x" * LARGE_BYTES)
    (home / "put" / "tree").mkdir(parents=True, exist_ok=True)
    (home / "put" / "tree" / "large").write_text("as before")
    with pytest.raises(KeyboardInterrupt):
        put(node, tmp_path / "tree", "put", stop_at(0.5, press_stop))
    with pytest.raises(KeyboardInterrupt):
        put(node, tmp_path / "tree", "put-new", stop_at(0.5, press_stop))
    wait_until_gone(home)
    assert describe(home / "put") == {"tree": None, "tree/large": b"-as before"}
    deadline = time.monotonic() + _LIMIT_S
    while (home / "put-new").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_interrupt_leaves_nothing_half_written_here(node: SshNode, home: Path, tmp_path: Path) -> None:
    (home / "large").write_bytes(b"x" * LARGE_BYTES)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "large").write_text("as before")
    for folder in ("old", "new"):
        with pytest.raises(KeyboardInterrupt):
            get(node, "large", tmp_path / folder, stop_at(0.5, press_stop))
    assert describe(tmp_path) == {"old": None, "old/large": b"-as before"}


def test_connection_that_breaks_leaves_nothing_half_written(
    testbed: Testbed, node: SshNode, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(b"x" * LARGE_BYTES)
    with pytest.raises(DetrainError, match=r"h0: the connection broke|h0: the other side hung up"):
        put(node, tmp_path / "large", "broken", stop_at(0.5, lambda: testbed.kill_sessions("h0")))
    wait_until_gone(home)
    assert not (home / "broken" / "large").exists()


def test_connection_that_breaks_between_two_files_is_said_with_the_node(
    testbed: Testbed, node: SshNode, home: Path, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / "large" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "large" / name).write_bytes(b"x" * (3 << 20))
    lost: list[bool] = []

    def lose() -> None:
        testbed.kill_sessions("h0")
        testbed.heal("h0", "notebook")

    def cut(files: int, *_: int) -> None:
        if files == 1 and not lost:  # the next request gets no answer
            lost.append(True)
            testbed.cut("h0", "notebook")
            threading.Timer(0.5, lose).start()

    with pytest.raises(DetrainError, match=r"^h0: "):
        put(node, tmp_path / "large", "broken", cut)
    assert lost, "it did not break between two files"
    wait_until_gone(home)


def test_stop_in_a_notebook_ends_the_copies_to_all_nodes(make_testbed: MakeTestbed, tmp_path: Path) -> None:
    testbed = make_testbed(2, link=Link(rate_bits_per_s=40e6))
    nodes = ssh_nodes(testbed)
    (tmp_path / "large").write_bytes(os.urandom(LARGE_BYTES))
    begun = threading.Event()

    def press() -> None:
        begun.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=press)
    watcher.start()

    def copy(node: SshNode, stop: Stop, note: files.OnProgress) -> Copied:
        return put(node, tmp_path / "large", "put", note, stop=stop)

    with pytest.raises(KeyboardInterrupt):
        on_every(nodes, copy, lambda _, done, total: begun.set() if done else None)
    watcher.join()
    for host in ("h0", "h1"):
        wait_until_gone(testbed.path_home(host))
        assert not (testbed.path_home(host) / "put" / "large").exists()
    wait_for_no_threads()


def test_stop_does_not_wait_for_a_host_that_is_slow_to_answer(tmp_path: Path) -> None:
    """The connection does not exist yet, so a stop has nothing to shut."""
    (tmp_path / "file").write_text("x")
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as accepted:
        address, port = listener.getsockname()
        node = SshNode(Node(host=address, port=port, user="me"), config_path=tmp_path / "none")

        connections: list[socket.socket] = []

        def press() -> None:
            connections.append(accepted.enter_context(listener.accept()[0]))  # accept, and send nothing
            os.kill(os.getpid(), signal.SIGINT)

        watcher = threading.Thread(target=press)
        watcher.start()
        with pytest.raises(KeyboardInterrupt):
            on_every([node], lambda node, stop, note: put(node, tmp_path / "file", "put", note, stop=stop))
        watcher.join()
        connections[0].setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                assert connections[0].recv(4096), "it was waited for until it had given up"
    wait_for_no_threads()  # the closed connection and listener end the attempt


def wait_for_no_threads() -> None:
    deadline = time.monotonic() + _LIMIT_S
    while any(thread.name.startswith("detrain_nb files") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_fault_of_ours_is_not_hidden_by_what_a_node_says() -> None:
    def act(node: str, stop: Stop, note: files.OnProgress) -> None:
        raise ZeroDivisionError if node == "b" else TransportError(f"{node}: gone")

    with pytest.raises(ZeroDivisionError):
        on_every(["a", "b", "c"], act)


def test_node_that_fails_does_not_stop_the_others(testbed: Testbed, home: Path, tmp_path: Path) -> None:
    nodes = ssh_nodes(testbed)
    (tmp_path / "file").write_text("x")
    target = f"~/{home.name}"
    (testbed.path_home("h1") / home.name).write_text("a file")
    told: list[tuple[int, int, int]] = []

    def copy(node: SshNode, stop: Stop, note: files.OnProgress) -> Copied:
        return put(node, tmp_path / "file", target, note, stop=stop)

    with pytest.raises(DetrainError, match=rf"h1: /.*/{home.name} cannot be written to: Not a directory") as caught:
        on_every(nodes, copy, lambda *now: told.append(now))
    assert len(str(caught.value).splitlines()) == 1
    assert (home / "file").read_text() == "x"
    assert told[-1] == (1, 1, 1)


def test_share_that_is_done_does_not_become_less_when_another_node_begins() -> None:
    is_half_done = threading.Event()
    told: list[tuple[int, int, int]] = []

    def copy(node: str, stop: Stop, note: files.OnProgress) -> None:
        if node == "late":
            assert is_half_done.wait(30)
        else:
            note(0, 50, 100)
            time.sleep(4 * files._LOOK_GAP_S)
            is_half_done.set()
        note(0, 0 if node == "late" else 50, 100)
        time.sleep(4 * files._LOOK_GAP_S)
        note(1, 100, 100)

    on_every(["early", "late"], copy, lambda *now: told.append(now))
    shares = [done / total for _, done, total in told]
    assert shares == sorted(shares)
    assert told[-1] == (2, 200, 200)


def test_what_is_wrong_here_is_said_once_for_all_nodes(tmp_path: Path) -> None:
    nodes = [LocalTransport(), LocalTransport()]
    with pytest.raises(SpecError) as caught:
        on_every(nodes, lambda node, stop, note: put(node, tmp_path / "missing"))
    assert str(caught.value) == f"{tmp_path}/missing: No such file or directory"


def test_host_that_cannot_be_reached_is_named(make_testbed: MakeTestbed, tmp_path: Path) -> None:
    testbed = make_testbed(1)
    testbed.stop_sshd("h0")
    (tmp_path / "x").touch()
    with pytest.raises(TransportError, match=r"h0: .*"):
        put(ssh_nodes(testbed, 1)[0], tmp_path / "x")
