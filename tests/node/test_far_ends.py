"""The owner of a local connection's far end: a group is used only if that process belongs to this user."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from detrain_nb.errors import ForeignConnection, SessionError
from detrain_nb.node.groups import far_ends
from detrain_nb.node.groups.connections import Connections
from detrain_nb.node.groups.far_ends import require_own

_UID = 12345
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

_CONNECT = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
sock = socket.socket(socket.AF_INET6 if ":" in sys.argv[2] else socket.AF_INET)
if sys.argv[4]:
    sock.bind((sys.argv[4], 0))
sock.connect((sys.argv[2], int(sys.argv[3])))
sock.sendall(b"x")
if sys.argv[5] == "leave":
    os._exit(0)
print("connected", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def _connected(
    host: str = "127.0.0.1", *, uid: int = 0, source: str = "", then: str = "stay"
) -> Iterator[socket.socket]:
    """Yield our end of a connection that a process of user ``uid`` has opened."""
    is_mapped = host.startswith("::ffff:")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server(("::" if is_mapped else host, 0), family=family, dualstack_ipv6=is_mapped) as server:
        server.settimeout(20)
        port = str(server.getsockname()[1])
        arguments = [sys.executable, "-c", _CONNECT, str(uid), host.removeprefix("::ffff:"), port, source, then]
        other = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            accepted, _ = server.accept()
            with accepted:
                assert accepted.recv(1) == b"x"
                if then == "leave":
                    other.wait(20)
                yield accepted
        finally:
            other.kill()
            other.communicate()


def _look(*connections: socket.socket) -> None:
    require_own(lambda: [connection.fileno() for connection in connections])


@needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_process_of_another_user_is_found_out(host: str) -> None:
    with _connected(host) as own:
        _look(own)
        with _connected(host, uid=_UID) as foreign, pytest.raises(ForeignConnection, match=f"uid {_UID} is connected"):
            _look(own, foreign)


@needs_root
def test_another_address_of_this_machine_hides_nobody() -> None:
    addresses = {address[4][0] for address in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    source = next((address for address in addresses if not address.startswith("127.0.0.1")), "127.0.0.2")
    with _connected(uid=_UID, source=source) as foreign, pytest.raises(ForeignConnection):
        _look(foreign)


@needs_root
def test_who_has_left_what_it_said_is_not_taken_for_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports uid 0 for a connection that no process holds."""
    monkeypatch.setattr(far_ends, "_LIMIT_S", 0.1)
    with _connected(uid=_UID, then="leave") as left, pytest.raises(SessionError, match="has no owner"):
        _look(left)


_AS_NOBODY = ["unshare", "--user", "--map-user=65534", "--map-group=65534"]
_SERVE = """
import socket
from detrain_nb.errors import ForeignConnection
from detrain_nb.node.groups.far_ends import require_own
server = socket.create_server(("127.0.0.1", 0))
own = socket.create_connection(server.getsockname())
accepted, _ = server.accept()
own.sendall(b"x")
accepted.recv(1, socket.MSG_PEEK)
require_own(lambda: [server.fileno(), own.fileno(), accepted.fileno()])
print(server.getsockname()[1], flush=True)
came, _ = server.accept()
came.recv(1, socket.MSG_PEEK)
try:
    require_own(lambda: [own.fileno(), accepted.fileno(), came.fileno()])
except ForeignConnection as exc:
    print("found out", exc)
"""


@needs_root
def test_who_has_no_number_in_a_user_namespace_is_not_taken_for_the_user_who_has_theirs() -> None:
    """In a container of the user 65534 (nobody), the kernel reports 65534 for every user outside it, too."""
    if subprocess.run([*_AS_NOBODY, "true"], capture_output=True, timeout=20).returncode:
        pytest.skip("this system makes no user namespaces")
    here = subprocess.Popen([*_AS_NOBODY, sys.executable, "-c", _SERVE], stdout=subprocess.PIPE, text=True)
    with here:
        assert here.stdout
        port = here.stdout.readline().strip()
        arguments = [sys.executable, "-c", _CONNECT, str(_UID), "127.0.0.1", port, "", "stay"]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE) as other:
            assert here.stdout.read().startswith("found out a process of uid 65534")
            other.kill()
    assert here.returncode == 0


@contextlib.contextmanager
def _another_user() -> Iterator[None]:
    """Make sockets that are created in the block belong to another user."""
    os.seteuid(_UID)
    try:
        yield
    finally:
        os.seteuid(0)


def _let_in(server: socket.socket, *, is_foreign: bool = True) -> tuple[socket.socket, socket.socket]:
    """Connect to ``server``, as another user if ``is_foreign``; return the accepted end and the connecting one."""
    with _another_user() if is_foreign else contextlib.nullcontext():
        other = socket.socket()
    other.connect(server.getsockname())
    return server.accept()[0], other


@needs_root
@pytest.mark.parametrize("said", [b"", b"x"])
def test_other_user_who_says_nothing_is_shut_out(said: bytes) -> None:
    """Bytes that the other user sends later are not read."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        own, foreign = _let_in(server, is_foreign=False), _let_in(server)
        with contextlib.ExitStack() as opened:
            for end in (*own, *foreign):
                opened.enter_context(end)
            foreign[1].sendall(said)
            _look(server, own[0], foreign[0])
            with contextlib.suppress(OSError):
                foreign[1].sendall(bytes(8))
            assert foreign[0].recv(64) == said
            assert foreign[0].recv(64) == b""
            own[1].sendall(b"late")
            assert own[0].recv(64) == b"late", "the own may say something whenever they like"


@needs_root
@pytest.mark.parametrize("has_ended", [False, True])
def test_other_user_who_stood_at_the_door_of_an_earlier_group_is_shut_out(has_ended: bool) -> None:
    """gloo keeps listening for an earlier group and accepts the other user while the next group is created.

    That holds after the earlier generation was stopped, too.
    """
    connections = Connections()
    with contextlib.ExitStack() as opened:
        with connections.recording():
            door = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            with _another_user():
                other = opened.enter_context(socket.socket())
            other.connect(door.getsockname())
            connections.let_nobody_in()
        if has_ended:
            connections.shut(0)
        with connections.recording():
            opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            taken = opened.enter_context(door.accept()[0])
            connections.require_own()
            assert taken.recv(64) == b""


@needs_root
def test_other_user_who_has_left_without_a_word_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_ends, "_LIMIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        (silent, other), (told, teller) = _let_in(server), _let_in(server)
        with silent, told:
            other.close()
            _look(server, silent)
            teller.sendall(bytes(8))
            teller.close()
            with pytest.raises(SessionError, match="has no owner"):
                _look(server, told)


@needs_root
def test_other_user_whose_connection_gloo_has_closed_meanwhile_ends_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent, other = _let_in(server)
        with silent, other, monkeypatch.context() as patched:

            def close(fd: int) -> int:
                raise OSError(errno.EBADF, "closed")

            patched.setattr(far_ends.os, "dup", close)
            _look(server, silent)


@needs_root
def test_other_user_whom_we_have_connected_to_is_found_out_without_a_word() -> None:
    """gloo relies on a connection once it has sent its own handshake, before the peer has sent a byte."""
    with _another_user():
        server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as ours:
        with _another_user():
            other, _ = server.accept()
        with other, socket.create_server(("127.0.0.1", 0)) as door, pytest.raises(ForeignConnection):
            _look(door, ours)


@needs_root
@pytest.mark.parametrize("number", [2, 8])
def test_other_user_who_says_something_is_found_out(number: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        foreign, other = _let_in(server)
        with foreign, other:
            other.sendall(bytes(number))
            with pytest.raises(ForeignConnection, match=f"uid {_UID} is connected"):
                _look(server, foreign)


@needs_root
def test_other_user_is_found_out_where_no_descriptor_is_left() -> None:
    """The other user may have used up the descriptors; a connection that cannot be checked is refused."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with _connected(uid=_UID) as foreign:
        resource.setrlimit(resource.RLIMIT_NOFILE, (foreign.fileno() + 1, before[1]))
        files: list[int] = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    files.append(os.dup(0))
            with pytest.raises(SessionError, match="cannot be checked"):
                _look(foreign)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for fd in files:
                os.close(fd)


def test_one_that_is_not_accepted_yet_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        accepted: list[socket.socket] = []
        timer = threading.Timer(0.2, lambda: accepted.append(server.accept()[0]))
        timer.start()
        _look(ours)
        timer.join()
        assert accepted, "nobody held the other end before"
        accepted[0].close()


def test_one_that_is_shut_meanwhile_is_not_looked_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        timer = threading.Timer(0.2, ours.shutdown, (socket.SHUT_RDWR,))
        timer.start()
        _look(ours)  # shut during the check, as when the generation ends
        timer.join()


def test_what_is_no_connection_is_not_looked_at() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        pair = socket.socketpair()
        _look(server, datagrams, *pair)
        for end in pair:
            end.close()
