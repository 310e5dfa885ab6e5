"""What tests/testbed promises to the tests that use it; the first test also shows how to use it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest

from .fixtures import MakeTestbed
from .inventory import Host, Link, parse_link
from .testbed import Testbed, TestbedError, unavailable

FOLDER = Path(__file__).parent
LIMIT_S = 20.0


def connect(host: Host, *, timeout_s: float = LIMIT_S) -> paramiko.SSHClient:
    client = paramiko.SSHClient()
    client.load_host_keys(host.known_hosts_file)
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    try:
        client.connect(
            host.ip,
            host.port,
            host.user,
            key_filename=host.identity_file,
            look_for_keys=False,
            allow_agent=False,
            timeout=timeout_s,
            banner_timeout=timeout_s,
            auth_timeout=timeout_s,
        )
    except BaseException:
        client.close()  # otherwise its socket and its thread remain
        raise
    return client


def ask(client: paramiko.SSHClient, command: str) -> str:
    """Run a command over SSH; return its output."""
    _, stdout, _ = client.exec_command(command, timeout=LIMIT_S)
    return stdout.read().decode()


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def has_ended(client: paramiko.SSHClient) -> bool:
    transport = client.get_transport()
    return transport is None or not transport.is_active()


@contextlib.contextmanager
def start(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program for the block."""
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def run_python(testbed: Testbed, name: str, code: str) -> str:
    return testbed.output(name, sys.executable, "-c", code)


def is_running(testbed: Testbed, name: str, *argv: str) -> bool:
    return list(argv) in testbed.processes(name).values()


# Properties of a host


def test_hosts_are_separate_machines(testbed: Testbed) -> None:
    h0, h1 = testbed.hosts
    with connect(h0) as a, connect(h1) as b:
        assert ask(a, "hostname; pwd").split() == [h0.hostname, testbed.inventory.user_home]
        assert ask(b, "hostname").strip() == h1.hostname != socket.gethostname()
        ask(a, "echo mine | tee ~/f > /tmp/f; (sleep 77 >/dev/null 2>&1 &)")
        assert ask(a, "cat ~/f /tmp/f") == "mine\nmine\n"
        assert ask(b, "ls ~/f /tmp/f 2>/dev/null") == ""
        assert wait_until(lambda: is_running(testbed, "h0", "sleep", "77"))
        assert not is_running(testbed, "h1", "sleep", "77")
        assert h1.ip in ask(a, "getent hosts h1")


def test_host_runs_the_python_of_the_tests(testbed: Testbed) -> None:
    code = "import importlib.util, sys; print(sys.prefix, importlib.util.find_spec('torch').name, sep='\\n')"
    assert run_python(testbed, "h0", code).splitlines() == [sys.prefix, "torch"]


def test_folder_is_shared_on_request(make_testbed: MakeTestbed) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as shared, tempfile.TemporaryDirectory(dir="/tmp") as unshared:
        Path(shared, "f").write_text("seen")
        other = make_testbed(1, share=[shared])
        assert other.output("h0", "cat", f"{shared}/f") == "seen"
        assert Path(unshared).name not in other.output("h0", "ls", "/tmp")
        with pytest.raises(TestbedError, match=r"cannot share .*/nowhere: it is not a folder"):
            other.up(1, share=[f"{shared}/nowhere"])


def test_home_is_seen_from_outside(testbed: Testbed) -> None:
    testbed.output("h0", "echo inside > ~/g")
    assert (testbed.path_home("h0") / "g").read_text() == "inside\n"
    assert not (testbed.path_home("h1") / "g").exists()


def test_only_the_known_host_key_is_accepted(testbed: Testbed, tmp_path: Path) -> None:
    h0, h1 = testbed.hosts
    known = Path(h0.known_hosts_file).read_text()
    assert known == testbed.known_hosts("h0") + testbed.known_hosts("h1")
    swapped = tmp_path / "known_hosts"
    swapped.write_text(testbed.known_hosts("h1").replace(h1.ip, h0.ip))
    with pytest.raises(paramiko.BadHostKeyException):
        connect(replace(h0, known_hosts_file=str(swapped)))
    swapped.write_text(testbed.known_hosts("h1"))
    with pytest.raises(paramiko.SSHException, match="not found in known_hosts"):
        connect(replace(h0, known_hosts_file=str(swapped)))


def test_processes_are_those_of_the_host(testbed: Testbed) -> None:
    with start(*testbed.enter("h0"), "sleep", "79") as sleep:
        assert wait_until(lambda: is_running(testbed, "h0", "sleep", "79"))
        assert not is_running(testbed, "h1", "sleep", "79")
        processes = testbed.processes("h0")
        assert processes[1][-3:] == [str(FOLDER / "hostproc.py"), "init", str(testbed.folder / "h0")]
        inside = next(pid for pid, argv in processes.items() if argv == ["sleep", "79"])
        testbed.output("h0", f"kill {inside}")
        sleep.wait(LIMIT_S)
    assert not is_running(testbed, "h0", "sleep", "79")


def test_listening_sockets_are_those_of_the_host(testbed: Testbed) -> None:
    h0, h1 = testbed.hosts
    code = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); t = socket.socket(socket.AF_INET6);"
        "t.bind(('::1', 0)); t.listen(); print(s.getsockname()[1], t.getsockname()[1], flush=True); input()"
    )
    with start(*testbed.enter("h0"), sys.executable, "-c", code) as server:
        assert server.stdout
        v4, v6 = map(int, server.stdout.readline().split())
        ours = [("127.0.0.1", v4), (h0.ip, 22), ("::1", v6)]
        assert wait_until(lambda: testbed.listening("h0") == ours), "what an earlier test has left there ends first"
        assert wait_until(lambda: testbed.listening("h1") == [(h1.ip, 22)])
        server.communicate("\n", LIMIT_S)
    assert testbed.listening("h0") == [(h0.ip, 22)]


def test_own_name_resolves_as_asked(testbed: Testbed, make_testbed: MakeTestbed) -> None:
    look_up = "import socket\ntry: print(socket.gethostbyname(socket.gethostname()))\nexcept OSError: print('nothing')"
    h0, h1 = testbed.hosts
    assert run_python(testbed, "h0", look_up).strip() == h0.ip
    testbed.set_own_name("h0", "nothing")
    assert run_python(testbed, "h0", look_up).strip() == "nothing"
    assert run_python(testbed, "h1", look_up).strip() == h1.ip
    assert h0.ip in testbed.output("h1", "getent", "hosts", h0.hostname)  # other hosts still resolve it
    testbed.repair()
    assert run_python(testbed, "h0", look_up).strip() == h0.ip
    other = make_testbed(1, own_name="127.0.1.1")
    assert run_python(other, "h0", look_up).strip() == "127.0.1.1"


def test_sshd_takes_options(make_testbed: MakeTestbed) -> None:
    other = make_testbed(1, sshd_options=["Banner none", "MaxSessions 0"])
    with connect(other.hosts[0]) as client, pytest.raises(paramiko.ChannelException):
        ask(client, "true")


# Faults


def test_cut_is_silent_and_heals(testbed: Testbed) -> None:
    h0, h1 = testbed.hosts
    probe = "import socket\ntry: socket.create_connection(('h1', 22), 0.5)\nexcept OSError as exc: print(repr(exc))"
    testbed.cut("h0", "h1")
    connect(h0).close()  # the notebook still reaches both
    connect(h1).close()
    assert run_python(testbed, "h0", probe) == "TimeoutError('timed out')\n"
    testbed.heal("h0", "h1")
    assert run_python(testbed, "h0", probe) == ""
    testbed.cut("h0")
    with pytest.raises(TimeoutError):
        connect(h0, timeout_s=0.5)
    assert run_python(testbed, "h0", probe) == "TimeoutError('timed out')\n"
    connect(h1).close()


def test_stop_sshd_with_and_without_sessions(testbed: Testbed) -> None:
    h0 = testbed.hosts[0]
    with connect(h0) as client:
        testbed.stop_sshd("h0")
        assert ask(client, "echo still") == "still\n"
        with pytest.raises(paramiko.ssh_exception.NoValidConnectionsError):
            connect(h0)
        testbed.start_sshd("h0")
        testbed.stop_sshd("h0", sessions=True)
        assert wait_until(lambda: has_ended(client))
        assert testbed.listening("h0") == []


def test_killed_sessions_leave_the_server_and_the_other_host(testbed: Testbed) -> None:
    h0, h1 = testbed.hosts
    with connect(h0) as a, connect(h0) as b, connect(h1) as c:
        ask(a, "setsid sleep 80 >/dev/null 2>&1 &")
        testbed.kill_sessions("h0")
        assert wait_until(lambda: has_ended(a) and has_ended(b))
        assert ask(c, "echo still") == "still\n"
    with connect(h0) as again:
        assert ask(again, "echo again") == "again\n"
    assert is_running(testbed, "h0", "sleep", "80")  # the processes that they started keep running
    testbed.output("h0", "pkill", "-x", "sleep")


def test_reboot_kills_everything_and_keeps_the_disk(testbed: Testbed) -> None:
    testbed.output("h1", "echo kept > ~/kept; sleep 78 >/dev/null 2>&1 &")
    before = testbed.pid("h1")
    testbed.reboot("h1")
    assert testbed.output("h1", "cat ~/kept") == "kept\n"
    assert not is_running(testbed, "h1", "sleep", "78")
    assert testbed.pid("h1") != before
    connect(testbed.hosts[1]).close()


def test_repair_makes_hosts_whole_again(testbed: Testbed) -> None:
    h0, h1 = testbed.hosts
    testbed.cut("h1")
    testbed.stop_sshd("h1")
    pid = testbed.pid("h0")
    assert pid
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: testbed.pid("h0") is None)
    with pytest.raises(TestbedError, match="host h0 is down"):
        testbed.output("h0", "true")
    testbed.repair()
    connect(h0).close()
    connect(h1).close()
    assert run_python(testbed, "h0", "import socket; socket.create_connection(('h1', 22), 5)") == ""


def measure_round_trip(ip: str) -> float:
    start = time.monotonic()
    socket.create_connection((ip, 22), LIMIT_S).close()
    return time.monotonic() - start


def test_link_delay_and_disk_beside_another_testbed(testbed: Testbed, make_testbed: MakeTestbed) -> None:
    other = make_testbed(1, link=parse_link(delay="40ms"), disk="8m")
    ip = other.hosts[0].ip
    assert ip.rpartition(".")[0] != testbed.inventory.notebook_ip.rpartition(".")[0]
    assert measure_round_trip(ip) >= 0.08  # lower bounds only: a busy machine stalls
    other.shape("h0", Link(delay_s=0.15))
    assert measure_round_trip(ip) >= 0.3
    assert "No space left" in other.output("h0", "head -c 9m /dev/zero 2>&1 >~/big; true")
    with pytest.raises(TestbedError, match="in memory"):
        other.path_home("h0")
    other.reboot("h0")
    other.output("h0", "test ! -e ~/big")
    assert measure_round_trip(ip) >= 0.08


def test_loss(make_testbed: MakeTestbed) -> None:
    other = make_testbed(1, link=Link(loss=1.0))
    with pytest.raises(TimeoutError):
        socket.create_connection((other.hosts[0].ip, 22), 0.5)


def test_rate(make_testbed: MakeTestbed) -> None:
    other = make_testbed(1, link=Link(rate_bits_per_s=4e6))
    with connect(other.hosts[0]) as client:
        start = time.monotonic()
        assert len(ask(client, "head -c 200000 /dev/zero")) == 200_000
        assert time.monotonic() - start >= 0.3  # 0.4 s, less what was already in transit


def test_shape_needs_a_link(testbed: Testbed) -> None:
    with pytest.raises(TestbedError, match="h0 has no relay: give `up` a link option"):
        testbed.shape("h0", Link(delay_s=1.0))


# Taking it down


def is_gone(testbed: Testbed) -> bool:
    """Return whether nothing is left of a testbed: no folder, device, mount or process."""
    devices = [name for name in os.listdir("/sys/class/net") if name.startswith(f"{testbed.prefix}-")]
    processes = subprocess.run(["ps", "axo", "args"], capture_output=True, text=True, timeout=LIMIT_S).stdout
    is_mounted = str(testbed.folder) in Path("/proc/mounts").read_text()
    is_running = str(testbed.folder) in processes or f"-p {testbed.prefix} keep" in processes
    return not (testbed.folder.exists() or devices or is_mounted or is_running)


def test_command_line_up_and_down_is_idempotent_and_leaves_nothing(make_testbed: MakeTestbed) -> None:
    other = make_testbed(1)  # goes down when the command line brings up one with its name

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(FOLDER / "testbed.py"), "-p", other.prefix, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert json.loads(call("up", "1", "--ttl", "600").stdout)["hosts"][0]["name"] == "h0"
    assert len(json.loads(call("up", "2", "--ttl", "600", "--delay", "1ms").stdout)["hosts"]) == 2
    assert call("exec", "h1", "sh", "-c", "exit 3").returncode == 3
    assert call("listening", "h1").stdout == f"{other.hosts[1].ip} 22\n"
    assert "init" in call("processes", "h1").stdout
    for command in ("cut", "heal", "stop-sshd", "start-sshd", "kill-sessions", "reboot"):
        assert call(command, "h0").returncode == 0
    assert call("shape", "h0", "--delay", "5ms").returncode == 0
    assert call("cut", "h7").stderr == "testbed: no host 'h7' among h0, h1\n"
    assert call("cut", "h0", "moon").stderr == "testbed: no peer 'moon' among h0, h1, notebook\n"
    assert call("up", "2", "--delay", "1min").stderr.startswith("testbed: link option '1min': want a number and one of")

    pid = other.pid("h0")
    assert pid
    os.kill(pid, signal.SIGKILL)  # a dead host must not prevent `down`
    for _ in range(2):
        assert call("down").returncode == 0
        assert is_gone(other)
    assert call("list").stderr == f"testbed: testbed {other.prefix!r} is not up\n"


def test_ttl_takes_everything_down(make_testbed: MakeTestbed) -> None:
    other = make_testbed(1, link=Link(), ttl_s=5)
    assert wait_until(lambda: is_gone(other))


def test_killed_owner_takes_everything_along(make_testbed: MakeTestbed) -> None:
    with start("sleep", "81") as owner:
        other = make_testbed(1, owner_pid=owner.pid)
    assert wait_until(lambda: is_gone(other))


def test_failed_up_leaves_nothing(make_testbed: MakeTestbed) -> None:
    other = make_testbed(1)
    with pytest.raises(TestbedError, match="Bad configuration option: NoSuchOption"):
        other.up(1, sshd_options=["NoSuchOption yes"])
    assert is_gone(other)


# Without root


@pytest.fixture
def loopback(needs_debian: Callable[..., None]) -> Iterator[Testbed]:
    needs_debian("openssh-server")
    testbed = Testbed(f"l{os.getpid()}")
    try:
        yield testbed
    finally:
        testbed.down()


def test_loopback_mode_has_ssh_servers_with_homes(loopback: Testbed) -> None:
    mark = uuid.uuid4().hex
    h0, h1 = loopback.up(2, mode="loopback", ttl_s=60).hosts
    with connect(h0) as client:
        assert ask(client, "echo $HOME").strip() == str(loopback.path_home("h0"))
        ask(client, f"setsid sh -c 'sleep 82; : {mark}' >/dev/null 2>&1 &")
        loopback.kill_sessions("h0")
        assert wait_until(lambda: has_ended(client))
    connect(h0).close()
    loopback.stop_sshd("h0")
    with pytest.raises(OSError):
        socket.create_connection((h0.ip, h0.port), 1)
    connect(h1).close()
    loopback.repair()
    connect(h0).close()
    with pytest.raises(TestbedError, match="loopback"):
        loopback.cut("h0")
    loopback.down()
    assert is_gone(loopback)
    assert mark not in subprocess.run(["ps", "axo", "args"], capture_output=True, text=True, timeout=LIMIT_S).stdout
    with pytest.raises(OSError):
        socket.create_connection((h1.ip, h1.port), 1)


def test_reason_is_clear_without_root(needs_debian: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    needs_debian("openssh-server", "iproute2")
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with pytest.raises(TestbedError, match="not root, so no network namespaces"):
        Testbed("nr").up(1)


def test_reason_is_clear_without_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    reason = unavailable("loopback")
    assert reason
    assert reason.startswith("testbed: no sshd and no ssh-keygen here: run 'apt-get install openssh-server")


@pytest.mark.parametrize("prefix", ["", "Tb", "a b", "../x", "toolongprefix"])
def test_bad_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(TestbedError, match="names devices"):
        Testbed(prefix)


def test_link_options_are_read_with_their_units() -> None:
    assert parse_link() is None
    assert parse_link("20ms", "1.5mbit", "1%") == Link(delay_s=0.02, rate_bits_per_s=1.5e6, loss=0.01)
    assert parse_link(rate="9kbit") == Link(rate_bits_per_s=9000.0)
    for bad in ("20", "ms", "1.2.3ms", "20 ms", "-1ms"):
        with pytest.raises(ValueError, match="want a number and one of ms, us, s"):
            parse_link(delay=bad)
