"""Paths and URLs: real files, memory, and SFTP over real SSH; forbidden URLs, and copies that are interrupted."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from detrain_nb import storage
from detrain_nb.errors import DetrainError, SpecError, TransportError
from detrain_nb.storage import Location, locate, needed_library
from detrain_nb.transport.ssh import SshConnection, SshTarget

from .testbed.testbed import Testbed

LARGE_BYTES = 9 << 20  # large enough for several progress reports of fsspec


class GivenUp(DetrainError):
    """Error that interrupts a copy from outside: one of ours, so that it is passed on unchanged."""


def give_up_in_the_middle(done: int, size: int) -> None:
    if 0 < done < size:
        raise GivenUp


@pytest.fixture(autouse=True)
def memory() -> Iterator[MemoryFileSystem]:
    """The empty file system of ``memory://``."""
    files = MemoryFileSystem()
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@pytest.fixture(params=["a path", "file://", "memory://", "files= memory", "files= async"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """A folder that does not exist yet and has an odd name."""
    match request.param:
        case "a path":
            return locate(tmp_path / "the [f]older")
        case "file://":
            return locate(f"file://{tmp_path}/the [f]older")
        case "memory://":
            return locate("memory://the [f]older")
        case "files= memory":
            return locate("the [f]older", files=MemoryFileSystem())
        case _:
            return locate("/the [f]older", files=AsyncFileSystemWrapper(MemoryFileSystem(), asynchronous=False))


def left_in(folder: Location) -> list[str]:
    """Return all names in ``folder``, including incomplete files."""
    found = folder.files.ls(folder.path, detail=False) if folder.exists() else []
    return sorted(name.rpartition("/")[2] for name in found)


# ---- what a path or a URL refers to


def test_path_is_one_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", f"{tmp_path}/home")
    for where, found in {
        "/abs/a::b": "/abs/a::b",
        "rel/a": f"{tmp_path}/rel/a",
        "./a::b": f"{tmp_path}/a::b",
        ".": str(tmp_path),
        "~": f"{tmp_path}/home",
        "~/sftp://x": f"{tmp_path}/home/sftp:/x",
        "file:///abs/x": "/abs/x",
        "FILE:///abs/x": "/abs/x",
    }.items():
        location = locate(where)
        assert (location.path, location.name) == (found, found)
        assert type(location.files) is LocalFileSystem
    for path in (Path("sftp://host/x"), Path("memory::x"), Path("rel")):
        assert locate(path).path == f"{tmp_path}/{path}"


def test_url_leads_to_its_file_system() -> None:
    location = locate("MEMORY://bucket/x")
    assert type(location.files) is MemoryFileSystem
    assert (location.path, repr(location)) == ("/bucket/x", "Location(name='MEMORY://bucket/x')")


@pytest.mark.parametrize(
    "url, module, said",
    [
        ("s3://b/x", "s3fs", "Install s3fs to access S3"),
        ("gs://b/x", "gcsfs", "install gcsfs"),
        ("https://h/x", "fsspec.implementations.http", '"aiohttp" to be installed'),
    ],
)
def test_missing_library_is_named(url: str, module: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(_registry, url.partition(":")[0], raising=False)
    with pytest.raises(SpecError, match=f"^{url}: .*{said}"):
        locate(url)
    assert needed_library(url) == module.replace("fsspec.implementations.http", "aiohttp")
    assert needed_library("/a/path") == needed_library("file:///x") == ""


@pytest.mark.parametrize(
    "where, said",
    [
        ("s4://bucket/x", r"^s4://bucket/x: unknown protocol: use one of .*\bs3\b"),
        ("htps://h/x", r"unknown protocol: use one of .*\bhttps\b"),
        ("qqqqqqqqq://x", r"unknown protocol: use one of abfs, .*, s3a$"),
        ("gpu1:/data", r"^gpu1:/data: unknown protocol"),
        ("%73ftp://h/x", r"unknown protocol"),
        ("sf\ntp://h/x", r"^sf\\ntp://h/x: unknown protocol"),
        ("s3:/bucket", r"^s3:/bucket: write s3://\.\.\.$"),
        ("file://host/x", r"write file:///\.\.\.$"),
        ("", "the path is empty"),
    ],
)
def test_what_is_no_url_of_ours_is_refused(where: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        locate(where)


# ---- SSH only over a connection that has checked the host key


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A listening socket to which no test may connect."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock
        sock.settimeout(0)
        with pytest.raises(BlockingIOError):
            sock.accept()


@pytest.mark.parametrize(
    "url",
    [
        "sftp://{host}/x",
        "ssh://{host}/x",
        "SFTP://{host}/x",
        " Ssh://{host}/x",
        "sftp:/x",
        "ssh+asyncssh://{host}/x",
        "simplecache::sftp://{host}/x",
        "SimpleCache::SFTP://{host}/x",
        "filecache::ssh://{host}/x",
        "blockcache::sftp://{host}/x",
        "dir::sftp://{host}/x",
        "zip://x::sftp://{host}/x",
        "zip://x::simplecache::sftp://{host}/x",
        "memory://x::sftp://{host}/x",
        "file::sftp://{host}/x",
        "generic://sftp://{host}/x",
        "reference::sftp://{host}/x",
    ],
)
def test_no_url_reaches_a_host_over_ssh(url: str, listener: socket.socket) -> None:
    with pytest.raises(SpecError):
        locate(url.format(host=f"127.0.0.1:{listener.getsockname()[1]}"))


def test_refusal_says_what_to_do() -> None:
    with pytest.raises(SpecError, match=r"^ssh://h/x: ssh:// would accept any host key: .*open_sftp_filesystem"):
        locate("ssh://h/x")
    with pytest.raises(SpecError, match=r"^simplecache::sftp://h/x: a chain of URLs is refused: .*files="):
        locate("simplecache::sftp://h/x")


@pytest.mark.parametrize("protocol", sorted(set(fsspec.available_protocols()) - storage._TAKEN))
def test_what_fsspec_has_and_nobody_allowed_is_refused(protocol: str) -> None:
    with pytest.raises(SpecError, match=r"pass a file system of fsspec"):
        locate(f"{protocol}://host/x")


def test_ssh_of_another_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """sshfs registers a file system under these names that does not check host keys either."""
    for name in ("ssh", "mine"):
        monkeypatch.setitem(_registry, name, MemoryFileSystem)
        with pytest.raises(SpecError):
            locate(f"{name}://host/x")


def test_file_system_that_is_handed_over_gets_no_url_of_another_host(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"^sftp://\*\*\*@other/x: with files= give a path"):
        locate("sftp://me:pass@other/x", files=LocalFileSystem())


@pytest.fixture
def ssh_home(testbed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a valid key, whose known_hosts has a different key for the host, as if the host had changed."""
    host = testbed.host("h0")
    folder = tmp_path / "home/.ssh"
    folder.mkdir(parents=True, mode=0o700)
    kind, _, name = Path(host.identity_file).with_suffix(".pub").read_text().partition(" ")[0].rpartition("-")
    assert kind == "ssh"
    shutil.copy(host.identity_file, folder / f"id_{name}")
    known = testbed.known_hosts("h0").split()
    other = testbed.known_hosts("h1").split()
    (folder / "known_hosts").write_text(f"{known[0]} {other[1]} {other[2]}\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return folder


def test_host_whose_key_has_changed_is_reached_by_no_url(testbed: Testbed, ssh_home: Path, tmp_path: Path) -> None:
    host = testbed.host("h0")
    (testbed.path_home("h0") / "weights").write_bytes(b"of the host")
    (tmp_path / "config").write_text(
        f"Host h0\n HostName {host.ip}\n Port {host.port}\n User {host.user}\n IdentityFile {host.identity_file}\n"
        f" UserKnownHostsFile {ssh_home}/known_hosts\n"
    )
    with pytest.raises(TransportError, match="has changed"):
        SshConnection.open(SshTarget("h0"), config_path=tmp_path / "config")
    there = f"{host.user}@{host.ip}:{host.port}{testbed.inventory.user_home}/weights"
    for url in (f"sftp://{there}", f"simplecache::ssh://{there}"):
        with pytest.raises(SpecError):
            locate(url).read(limit_bytes=100)


def test_files_go_over_a_connection_that_has_checked_the_key(testbed: Testbed, tmp_path: Path) -> None:
    config = Path(testbed.inventory.ssh_config)
    home = testbed.path_home("h0") / tmp_path.name
    (tmp_path / "large").write_bytes(os.urandom(LARGE_BYTES))
    told: list[tuple[int, int]] = []
    with (
        SshConnection.open(SshTarget("h0"), config_path=config) as connection,
        contextlib.closing(connection.open_sftp_filesystem()) as files,
    ):
        folder = locate(f"{testbed.inventory.user_home}/{tmp_path.name}/deep", files=files)
        assert not folder.exists()
        for data in (b"first", b"second"):
            (folder / "small").write(data)
            assert (folder / "small").read(limit_bytes=6) == data
        (folder / "large").put(tmp_path / "large", on_progress=lambda *done: told.append(done))
        (folder / "large").get(tmp_path / "back", on_progress=lambda *done: told.append(done))
        assert (tmp_path / "back").read_bytes() == (home / "deep/large").read_bytes()
        assert told[-1] == (LARGE_BYTES, LARGE_BYTES)
        assert folder.names() == ["large", "small"]
        with pytest.raises(DetrainError, match="cannot be written: it is a folder"):
            folder.write(b"")
        with pytest.raises(GivenUp):
            (folder / "large").put(tmp_path / "large", on_progress=give_up_in_the_middle)
        files.ftp.close()
        with pytest.raises(DetrainError):
            folder.exists()
    assert sorted(os.listdir(home / "deep")) == ["large", "small"]
    assert os.listdir(home) == ["deep"]
    assert (home / "deep/large").read_bytes() == (tmp_path / "large").read_bytes()


# ---- complete or not at all


def test_files_come_back_as_they_were(folder: Location, tmp_path: Path) -> None:
    assert not folder.exists()
    data = os.urandom(LARGE_BYTES)
    (tmp_path / "source").write_bytes(data)
    sent: list[tuple[int, int]] = []
    got: list[tuple[int, int]] = []
    for name in ("put", "again"):
        (folder / name).write(b"before")
        (folder / name).put(tmp_path / "source", on_progress=lambda *done: sent.append(done))
        (folder / name).get(tmp_path / "new" / name, on_progress=lambda *done: got.append(done))
        assert (tmp_path / "new" / name).read_bytes() == data
    for told in (sent, got):
        assert told[-1] == (LARGE_BYTES, LARGE_BYTES)
        assert any(0 < done < LARGE_BYTES for done, _ in told)
    assert (folder / "put").read(limit_bytes=LARGE_BYTES) == data
    (folder / "put").get(tmp_path / "quiet")
    (folder / "empty").write(b"")
    assert (folder / "empty").read(limit_bytes=0) == b""
    assert folder.names() == left_in(folder) == ["again", "empty", "put"]
    assert folder.exists()
    assert (folder / "put").exists()
    assert not (folder / "other").exists()
    assert not (folder / "put" / "other").exists()
    assert sorted(os.listdir(tmp_path / "new")) == ["again", "put"]


def test_copy_that_ends_early_leaves_what_was_there(folder: Location, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(os.urandom(LARGE_BYTES))
    (tmp_path / "target").mkdir()
    (tmp_path / "target/file").write_bytes(b"here before")
    (folder / "file").write(b"there before")
    (folder / "large").put(tmp_path / "source")
    for name in ("file", "fresh"):
        with pytest.raises(GivenUp):
            (folder / name).put(tmp_path / "source", on_progress=give_up_in_the_middle)
        with pytest.raises(GivenUp):
            (folder / "large").get(tmp_path / "target" / name, on_progress=give_up_in_the_middle)
    assert left_in(folder) == ["file", "large"]
    assert (folder / "file").read(limit_bytes=100) == b"there before"
    assert os.listdir(tmp_path / "target") == ["file"]
    assert (tmp_path / "target/file").read_bytes() == b"here before"


@pytest.mark.parametrize("folder", ["a path", "memory://"], indirect=True)
def test_interrupt_leaves_nothing(folder: Location, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"data")
    (folder / "other").write(b"")

    def interrupt(done: int, size: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        (folder / "file").put(tmp_path / "source", on_progress=interrupt)
    assert left_in(folder) == ["other"]


def test_first_error_is_told_where_nothing_can_be_taken_away(tmp_path: Path) -> None:
    class Stuck(MemoryFileSystem):
        cachable = False

        def rm_file(self, path: str) -> None:
            raise OSError("gone")

    (tmp_path / "source").write_bytes(bytes(LARGE_BYTES))
    with pytest.raises(GivenUp):
        locate("/x", files=Stuck()).put(tmp_path / "source", on_progress=give_up_in_the_middle)


def test_write_that_the_disk_does_not_take_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(DetrainError, match=r"file cannot be written: File too large$"):
            locate(tmp_path / "file").write(bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"before"


def test_data_is_on_the_disk_before_it_takes_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, name=name, real=real, **more: (done.append(name), real(*args, **more))
        )
    locate(tmp_path / "file").write(b"data")
    assert done == ["fsync", "replace"]


def test_folder_is_not_taken_for_a_file(folder: Location, tmp_path: Path) -> None:
    (folder / "sub" / "file").write(b"data")
    (tmp_path / "source").write_bytes(b"data")
    with pytest.raises(DetrainError, match=r"cannot be written: (it is a folder|Is a directory)"):
        (folder / "sub").write(b"data")
    with pytest.raises(DetrainError, match=r"cannot be written: (it is a folder|Is a directory)"):
        (folder / "sub").put(tmp_path / "source")
    with pytest.raises(DetrainError, match="cannot be read: it is a folder"):
        (folder / "sub").get(tmp_path / "here")
    with pytest.raises(DetrainError, match="cannot be listed: it is a file"):
        (folder / "sub" / "file").names()
    for source in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(SpecError, match=f"^{source} is not a file"):
            (folder / "file").put(source)
    assert left_in(folder / "sub") == ["file"]
    assert folder.names() == left_in(folder) == ["sub"]
    assert set(os.listdir(tmp_path)) <= {"source", "the [f]older"}


@pytest.mark.parametrize("done", ["write", "put", "whole_file"])
def test_folder_that_others_can_write_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: str
) -> None:
    """If a group can write, another user may replace the folder, or the file in progress, by a link."""
    shared, mine = tmp_path / "shared", tmp_path / "mine"
    shared.mkdir()
    mine.mkdir()
    (mine / "file").write_text("mine")
    (tmp_path / "source").write_bytes(b"data")
    made_new = os.open

    def make(path: Any, flags: int, *options: Any, **more: Any) -> int:
        if flags & os.O_CREAT and str(path).endswith(storage._PART):  # the name is visible, the file does not exist yet
            os.rename(shared, tmp_path / "away")
            shared.symlink_to(mine)
            (mine / os.path.basename(path)).symlink_to(mine / "file")
        return made_new(path, flags, *options, **more)

    monkeypatch.setattr(os, "open", make)
    if done == "write":
        locate(shared / "file").write(b"data")
    elif done == "put":
        locate(shared / "file").put(tmp_path / "source")
    else:
        with storage.whole_file(shared / "file") as file:
            file.write(b"data")
    assert (mine / "file").read_text() == "mine"
    assert (tmp_path / "away" / "file").read_bytes() == b"data"


@pytest.mark.parametrize("kind", ["a device", "what the process writes to"])
def test_nothing_takes_the_place_of_a_device(kind: str, tmp_path: Path) -> None:
    """As root, `-o /dev/null` would replace the device of the whole machine."""
    path = tmp_path / "out"
    if kind == "a device":
        path.symlink_to("/dev/null")
    else:
        (tmp_path / "file").touch()
        opened = os.open(tmp_path / "file", os.O_WRONLY)
        path.symlink_to(f"/proc/self/fd/{opened}")
    before = os.lstat(path).st_ino, os.listdir(tmp_path)
    with pytest.raises(DetrainError, match="out cannot be written: it is not a regular file"):
        locate(path).write(b"data")
    assert (os.lstat(path).st_ino, os.listdir(tmp_path)) == before
    if kind == "what the process writes to":
        os.close(opened)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755, 0o666])
def test_file_that_replaces_another_has_its_mode_from_the_first_byte_on(tmp_path: Path, mode: int) -> None:
    """A process that opens the file early could read everything that is written later."""
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(mode)
    made, modes = os.open, []

    def make(name: Any, flags: int, *options: Any, **more: Any) -> int:
        opened = made(name, flags, *options, **more)
        if flags & os.O_CREAT:
            modes.append(os.fstat(opened).st_mode & 0o777)
        return opened

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", make)
        locate(path).write(b"new")
        storage.replace_file(tmp_path / "first", "new", mode=mode)
    assert modes[0] & ~mode == modes[1] & ~mode == 0
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == mode
    assert (tmp_path / "first").stat().st_mode & 0o777 == mode & 0o644


def test_file_under_way_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.secrets, "token_hex", lambda size: "0")  # the name was guessed
    (tmp_path / "mine").write_text("mine")
    (tmp_path / f".0{storage._PART}").symlink_to(tmp_path / "mine")
    with pytest.raises(DetrainError, match="File exists"):
        locate(tmp_path / "file").write(b"data")
    assert (tmp_path / "mine").read_text() == "mine"


def test_link_in_the_place_of_the_folder_is_refused_on_request(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(DetrainError, match="cannot be written"):
        locate(tmp_path / "link" / "file").write(b"data", may_be_link=False)
    assert not os.listdir(tmp_path / "mine")
    locate(tmp_path / "link" / "file").write(b"data")
    assert (tmp_path / "mine" / "file").read_bytes() == b"data"


def test_what_is_not_whole_is_not_listed(folder: Location) -> None:
    (folder / "whole").write(b"")
    folder.files.pipe_file(f"{folder.path}/.0123{storage._PART}", b"killed while")
    assert folder.names() == ["whole"]


class Store(MemoryFileSystem):
    """Like an object store: an object is complete or missing, folders do not exist, and listings are cached."""

    protocol = "s3"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept: dict[str, Any] = {}
        self.written: list[str] = []

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self.written.append(path)
        super().pipe_file(path, value)

    def info(self, path: str, **options: Any) -> Any:
        return self.kept.setdefault(path, None) or self._keep(path)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        if path not in self.kept:
            self.kept[path] = super().ls(path, detail=detail)
        return self.kept[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.kept.clear()

    def _keep(self, path: str) -> Any:
        self.kept[path] = super().info(path)
        return self.kept[path]


def test_object_store_gets_the_object_itself() -> None:
    store = Store()
    (locate("bucket", files=store) / "object").write(b"data")
    assert store.written == ["/bucket/object"]
    assert list(store.store) == ["/bucket/object"]


def test_what_others_have_written_meanwhile_is_seen() -> None:
    mine, theirs = Store(), Store()
    folder = locate("bucket", files=mine)
    (locate("bucket", files=theirs) / "first").write(b"")
    assert folder.names() == ["first"]
    (locate("bucket", files=theirs) / "second").write(b"")
    assert folder.names() == ["first", "second"]


# ---- failures


def test_reading_has_a_limit(folder: Location) -> None:
    (folder / "file").write(b"x" * 1000)
    assert len((folder / "file").read(limit_bytes=1000)) == 1000
    with pytest.raises(DetrainError, match=r"file is larger than 999 bytes$"):
        (folder / "file").read(limit_bytes=999)


class Endless(io.RawIOBase):
    """A file that returns as much as is requested, and raises if that is too much."""

    given = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.given += len(buffer)
        assert self.given < 6_000_000, "too much was read"
        return len(buffer)


def test_file_without_an_end_is_read_no_further() -> None:
    class Device(MemoryFileSystem):
        cachable = False

        def open(self, path: str, *args: Any, **options: Any) -> Any:
            return Endless()

    with pytest.raises(DetrainError, match="larger than 5000000 bytes"):
        locate("/x", files=Device()).read(limit_bytes=5_000_000)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", "a\0b"])
def test_name_that_leads_elsewhere_is_refused(name: str, folder: Location) -> None:
    with pytest.raises(SpecError, match="is not the name of a file in"):
        folder / name


def test_names_in_messages_have_no_control_characters(tmp_path: Path) -> None:
    with pytest.raises(DetrainError) as caught:
        (locate(tmp_path) / "a\x1b[2J\u202eb\n").read(limit_bytes=1)
    assert str(caught.value) == f"{tmp_path}/a\\x1b[2J\\u202eb\\n cannot be read: it does not exist"


def test_store_that_does_not_answer_is_an_error_and_no_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(MemoryFileSystem):
        cachable = False

        def info(self, path: str, **options: Any) -> Any:
            raise TimeoutError("no\x1b answer\nat all")

    with pytest.raises(DetrainError, match=r"^/x cannot be looked for: no\\x1b answer\\nat all$") as caught:
        locate("/x", files=Dead()).exists()
    assert isinstance(caught.value.__cause__, TimeoutError)


def test_server_that_refuses_is_not_told_as_a_file_that_is_not_there() -> None:
    class Refused(Exception):  # like an error of aiohttp
        def __init__(self, status: int) -> None:
            super().__init__(f"{status}, of https://host/x")
            self.status = status

    class Web(MemoryFileSystem):
        cachable = False

        def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            raise FileNotFoundError(path) from causes.pop(0)  # as fsspec does for each of the causes

    causes = [OSError(111, "Connect call failed"), Refused(403), Refused(404)]
    for reason in ("Connect call failed", "403, of https://host/x", "it does not exist"):
        with pytest.raises(DetrainError, match=f"^/x cannot be read: {reason}$"):
            locate("/x", files=Web()).read(limit_bytes=1)


def test_what_is_not_there_is_said(folder: Location, tmp_path: Path) -> None:
    nothing = folder / "nothing"
    for ask, done in {
        (lambda: nothing.read(limit_bytes=1)): "read",
        nothing.names: "listed",
        (lambda: nothing.get(tmp_path / "x")): "read",
    }.items():
        with pytest.raises(DetrainError) as caught:
            ask()
        assert str(caught.value) == f"{nothing.name} cannot be {done}: it does not exist"
    assert not (tmp_path / "x").exists()


SECRETS = [
    "memory://me:hunter2@host/x",
    "memory://me:hun/ter2@host/x",
    "memory://me:hun@ter2@host/x",
    "memory://me:hunt?er2@host/x",
    "memory://hunter2@host/x",
    "memory://host:80/x?sig=hunter2",
    "memory://host/x?mail=a@b&sig=hunter2",
    "memory://me:pass@host/x?mail=a@b&sig=hunter2",
]


@pytest.mark.parametrize("url", SECRETS)
def test_no_message_and_no_repr_has_a_secret(url: str, tmp_path: Path) -> None:
    location = locate(url)
    said = [repr(location), repr(location / "below"), str(location)]
    for act in (
        lambda: location.read(limit_bytes=1),
        (location / "below").names,
        lambda: location.get(tmp_path / "x"),
        lambda: location / "..",
    ):
        with pytest.raises(DetrainError) as caught:
            act()
        said += traceback.format_exception(caught.value)
    assert_hidden(said)


@pytest.mark.parametrize("url", SECRETS)
@pytest.mark.parametrize(
    "begins",
    [
        "sftp",
        "simplecache::sftp",
        "zip://x::ssh",
        "zip://a/b::ssh",
        "generic://sftp",
        "generic://a/sftp",
        "s4",
        "s3:x",
        "s3",
    ],
)
def test_no_refusal_has_a_secret(url: str, begins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)
    for written in (url.replace("memory", begins), url.replace("memory", begins).replace("://", ":/")):
        with pytest.raises(DetrainError) as caught:
            locate(written)
        assert_hidden(traceback.format_exception(caught.value))


def test_host_as_scp_names_it_is_refused_without_its_password() -> None:
    where = "me:hunter2@host:/x"
    with pytest.raises(SpecError) as caught:
        locate(where)
    assert_hidden(traceback.format_exception(caught.value))


def assert_hidden(said: list[str]) -> None:
    lines = [line for text in said for line in text.splitlines()]
    assert not [line for line in lines if "hun" in line or "er2" in line]
    assert any("***" in line for line in lines)


@pytest.mark.parametrize(
    "url, name",
    [
        ("memory://bucket/a@b:c@d", "memory://bucket/a@b:c@d"),
        ("memory://host:80/a@b", "memory://host:80/a@b"),
        ("memory://u:p@host:80/a", "memory://***@host:80/a"),
        ("memory://host/a?b=c", "memory://host/a?***"),
    ],
)
def test_name_keeps_what_is_no_secret(url: str, name: str) -> None:
    assert locate(url).name == name
