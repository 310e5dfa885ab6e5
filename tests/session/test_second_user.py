"""Another user of the machine can connect to every port on its loopback, but reaches no process group.

The tests start real processes with another uid. One writes into the engine's store. One connects to gloo's port before
the awaited rank does. The ports decide which of two ranks listens, so the test makes groups until rank 0 does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from detrain_nb import Session
from detrain_nb.errors import DetrainError, LaunchError, RankError, RankLost

from .inside import state_of
from .training import COLLECTIVE

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

_UID = 12345
_BECOME = f"os.setgroups([]); os.setgid({_UID}); os.setuid({_UID})\n"
_DEADLINE_S = 30.0
_ATTEMPTS = 40  # in each, rank 0 is the one that listens with a chance of one half

# Overwrites all keys of the store in a loop until its input ends, then prints the keys that it has seen.
_WRITER = f"""
import os, select, sys
import torch.distributed as dist
{_BECOME}
store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), None, is_master=False)
seen = set()
print("connected", flush=True)
while not select.select([sys.stdin], [], [], 0.001)[0]:
    for key in store.list_keys():
        if key not in seen:
            seen.add(key)
            store.set(key, b"\\0" * 64)
print(*seen, sep="\\n")
"""

# Connects to each port that it reads, once as each peer that gloo counts there, and prints ``connected``.
_INTRUDER = f"""
import os, socket, struct, sys
{_BECOME}
for line in sys.stdin:
    connections = []
    for port in line.split():
        for number in range(4):
            connections.append(socket.socket())
            connections[-1].settimeout(10)
            connections[-1].connect(("127.0.0.1", int(port)))
            connections[-1].sendall(struct.pack("@n", number))
    print("connected", flush=True)
"""

# Connects to the ports that it reads, prints ``connected``, and repeats this until its input ends. Sends nothing.
_SCANNER = f"""
import os, select, socket, sys
{_BECOME}
ports, stays = sys.stdin.readline().split(), sys.argv[1] == "stays"
connections, told = [], ["connected"]
while not select.select([sys.stdin], [], [], 0.001)[0]:
    for port in ports:
        connection = socket.socket()
        connection.settimeout(0.1)
        try:
            connection.connect(("127.0.0.1", int(port)))
        except OSError:
            pass
        if not stays or len(connections) == 100:
            connection.close()
        else:
            connections.append(connection)
    if told:
        print(told.pop(), flush=True)
"""

# While the file "wait" exists, rank 1 joins each group only once the file "go" exists.
_LATE = """
import os, time
def come_late():
    deadline = time.monotonic() + 20
    while os.path.exists("wait") and not os.path.exists("go") and time.monotonic() < deadline:
        time.sleep(0.005)
generation = dist.init_process_group.__self__
make_group = generation._torch_init
if rank == 1:
    generation._torch_init = lambda *args, **options: (come_late(), make_group(*args, **options))[1]
"""


@contextlib.contextmanager
def _other_user(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)
        for stream in (process.stdin, process.stdout):
            if stream:
                stream.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def session(folder: Path) -> Iterator[Session]:
    with Session.start(ranks=2, device="cpu", folder=folder) as started:
        started.run_cell(_LATE)
        yield started


def _kill_rank_0(session: Session) -> None:
    session.run_cell("import os")
    with pytest.raises(RankLost):
        session.run_cell("if rank == 0: os.kill(os.getpid(), 9)")


def _free(session: Session) -> None:
    with pytest.raises(DetrainError, match="freed"):
        session.run_cell("if rank == 0: dist.barrier()", timeout_s=0.3)


def test_what_another_user_writes_into_the_store_reaches_no_group() -> None:
    with Session.start(ranks=2, device="cpu", init=False) as session:
        address, port = session.run_cell("import os\nos.environ['MASTER_ADDR'], os.environ['MASTER_PORT']").values[0]
        with _other_user(_WRITER, address, port) as writer:
            assert writer.stdin and writer.stdout
            assert writer.stdout.readline() == "connected\n"
            assert session.run_cell(f"dist.init_process_group()\n{COLLECTIVE}").values == {0: 2.0, 1: 2.0}
            session.run_cell("dist.new_group([0, 1])")
            _kill_rank_0(session)
            assert session.run_cell(f"dist.init_process_group()\n{COLLECTIVE}").values == {0: 2.0, 1: 2.0}
            _free(session)
            assert session.run_cell(f"dist.init_process_group()\n{COLLECTIVE}").values == {0: 2.0, 1: 2.0}
            seen, _ = writer.communicate("\n", timeout=_DEADLINE_S)
        assert "torchelastic" in seen, "it could read and write what the engine keeps there"
        assert "generation" not in seen and "default_pg" not in seen, seen


def _listening_ports(session: Session) -> set[int]:
    """The ports on which rank 0 listens; none while its process has exited and the next one is not up yet."""
    up = state_of(session).up.get(0)
    with contextlib.suppress(psutil.NoSuchProcess):
        connections = psutil.Process(up.pid).net_connections(kind="tcp") if up else []
        return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}
    return set()


def _let_intruder_in(session: Session, intruder: subprocess.Popen[str], go: Path, before: set[int]) -> None:
    """Once rank 0 listens for the peers of a new group, let the intruder connect first, then rank 1."""
    assert intruder.stdin and intruder.stdout
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        if ports := _listening_ports(session) - before:
            intruder.stdin.write(" ".join(map(str, ports)) + "\n")
            intruder.stdin.flush()
            intruder.stdout.readline()
            break
        time.sleep(0.005)
    go.touch()


@pytest.mark.parametrize(
    ("prepare", "code"),
    [
        pytest.param(lambda session: session.run_cell("1"), "dist.init_process_group()", id="first"),
        pytest.param(
            lambda session: session.run_cell("1"),
            "if rank == 1: come_late()\ndist.new_group([0, 1])",
            id="of a cell",
        ),
        pytest.param(_free, "1", id="after a freed stop"),
        pytest.param(_kill_rank_0, "1", id="after a death"),
    ],
)
def test_other_user_who_takes_the_place_of_a_rank_ends_the_group(
    session: Session, folder: Path, prepare: Callable[[Session], None], code: str
) -> None:
    go, waits = folder / "go", folder / "wait"
    with _other_user(_INTRUDER) as intruder:
        for _ in range(_ATTEMPTS):
            prepare(session)
            before = _listening_ports(session)
            waits.touch()
            entering = threading.Thread(target=_let_intruder_in, args=(session, intruder, go, before))
            entering.start()
            try:
                session.run_cell(code, timeout_s=_DEADLINE_S)
            except (LaunchError, RankError) as exc:
                told = str(exc)
                break
            finally:
                go.touch()
                entering.join()
                go.unlink()
                waits.unlink()
        else:
            pytest.fail("the intruder was never taken for a rank")
    assert f"uid {_UID} is connected to a process group" in told, told
    assert session.run_cell(COLLECTIVE).values == {0: 2.0, 1: 2.0}, "all is made anew"


@pytest.mark.parametrize("then", ["stays", "leaves"])
def test_other_user_who_connects_all_the_time_and_says_nothing_ends_no_group(
    session: Session, folder: Path, then: str
) -> None:
    go, waits = folder / "go", folder / "wait"
    before = _listening_ports(session)
    waits.touch()
    with _other_user(_SCANNER, then) as scanner:
        entering = threading.Thread(target=_let_intruder_in, args=(session, scanner, go, before))
        entering.start()
        try:
            session.run_cell("dist.init_process_group()", timeout_s=_DEADLINE_S)
        finally:
            go.touch()
            entering.join()
            go.unlink()
            waits.unlink()
        assert _listening_ports(session) - before, "there was something to connect to"
        assert session.run_cell(COLLECTIVE).values == {0: 2.0, 1: 2.0}


def test_nobody_can_connect_once_a_group_is_made(session: Session) -> None:
    """gloo listens while a group lives and accepts any connection; a rank without a free descriptor would die."""
    session.run_cell("group = dist.new_group([0, 1])")
    ports = _listening_ports(session)
    shut = 0
    for port in ports:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=0.2).close()
        except TimeoutError:
            shut += 1
        except ConnectionRefusedError:  # of an earlier cell's group, which no longer exists
            assert port not in _listening_ports(session)
        else:
            pytest.fail(f"port {port} takes whoever comes")
    assert shut >= 2
    assert session.run_cell("t = torch.ones(1)\ndist.all_reduce(t, group=group)\nt.item()").values == {0: 2.0, 1: 2.0}
