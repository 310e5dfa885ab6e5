"""Sessions on hosts over real SSH and their failures: what the notebook shows, and what remains on the hosts."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from detrain_nb import Session
from detrain_nb.deploy import bringing_up
from detrain_nb.errors import (
    CellInterrupted,
    CellTimeout,
    DetrainError,
    LaunchError,
    NodeLost,
    RankError,
    RankLost,
    SessionError,
    SpecError,
)
from detrain_nb.session.link.node_link import NodeLink

from ..testbed.fixtures import MakeTestbed
from ..testbed.nodes import processes_of_sessions, ssh_nodes
from ..testbed.testbed import Link, Testbed
from .inside import state_of
from .training import Watcher, press_stop

_TOGETHER = "t = torch.ones(1); dist.all_reduce(t)"
_COUNT = "import time\nfor i in range({count}):\n    print(i)\n    time.sleep({gap_s})\nrank"


@pytest.fixture
def session(testbed: Testbed) -> Iterator[Session]:
    """One rank on each of two hosts."""
    with Session.start(1, sync=False, nodes=ssh_nodes(testbed), device="cpu") as started:
        yield started
    assert not _ours(testbed, "h0"), "a process was left on h0"
    assert not _ours(testbed, "h1"), "a process was left on h1"


@contextlib.contextmanager
def _later(after_s: float, *acts: Callable[[], object], gap_s: float = 0.0) -> Iterator[None]:
    """Run ``acts`` in a thread, the first after ``after_s``, the others ``gap_s`` apart; wait for all at the end."""

    def run() -> None:
        for index, act in enumerate(acts):
            time.sleep(gap_s if index else after_s)
            act()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(60)


def _ours(testbed: Testbed, host: str) -> list[list[str]]:
    """Wait up to a minute for the processes of sessions on a host to exit; returns those that are left."""
    deadline = time.monotonic() + 60
    while True:
        found = list(processes_of_sessions(testbed, host).values())
        if not found or time.monotonic() >= deadline:
            return found
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.05, 0.6, 1.2])
def test_interrupt_of_a_start_leaves_nothing(testbed: Testbed, after_s: float) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        _later(after_s, lambda: os.kill(os.getpid(), signal.SIGINT)),
        Session.start(2, sync=False, nodes=ssh_nodes(testbed), device="cpu", name="interrupted"),
    ):
        time.sleep(20)
    for host in testbed.hosts:
        assert not _ours(testbed, host.name)
        assert testbed.output(host.name, "ls -d ~/.cache/detrain_nb/run/*/interrupted 2>/dev/null || true") == ""
    with Session.start(1, sync=False, nodes=ssh_nodes(testbed), device="cpu", name="interrupted") as session:
        assert session.run_cell("rank").values == {0: 0, 1: 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    ["the second is asked", "it has just been asked", "both are there", "they are checked", "the second is linked"],
)
def test_interrupt_of_a_start_leaves_nothing_wherever_it_comes(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    place, name = {
        "the second is asked": (ThreadPoolExecutor, "submit"),
        "it has just been asked": (ThreadPoolExecutor, "submit"),
        "both are there": (ThreadPoolExecutor, "shutdown"),
        "they are checked": (bringing_up, "settle_addresses"),
        "the second is linked": (NodeLink, "__init__"),
    }[where]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        is_after = "has just" in where
        _interrupt_at(place, name, patched, times=2 if "second" in where or is_after else 1, is_after=is_after)
        Session.start(2, sync=False, nodes=ssh_nodes(testbed), device="cpu", name="interrupted")
    time.sleep(3)  # anything already requested would have started by then
    for host in testbed.hosts:
        assert not _ours(testbed, host.name)


def _interrupt_at(place: Any, name: str, patched: pytest.MonkeyPatch, *, times: int, is_after: bool) -> None:
    """Interrupt the main thread at its ``times``-th call of ``name``, or right after that call if ``is_after``."""
    original, calls = getattr(place, name), itertools.count(1)

    def interrupted(*args: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and next(calls) == times:
            patched.undo()
            if is_after:
                original(*args, **options)
            raise KeyboardInterrupt
        return original(*args, **options)

    patched.setattr(place, name, interrupted)


def _kill(testbed: Testbed, host: str, part: str) -> None:
    """Send SIGKILL to every process of a host with ``part`` in its command line."""
    for pid, argv in testbed.processes(host).items():
        if part in " ".join(argv):
            testbed.exec(host, "kill", "-9", str(pid))


def _numbers(session: Session, cell: int, rank: int) -> list[int]:
    return [int(line) for line in session.log.text(cell, rank).split()]


def _assert_counted(session: Session, cell: int, count: int) -> None:
    for rank in range(len(session.ranks)):
        assert _numbers(session, cell, rank) == list(range(count)), f"rank {rank}"


# ---- connections


def test_killed_ssh_sessions_are_made_again(session: Session, testbed: Testbed) -> None:
    with _later(0.5, lambda: testbed.kill_sessions("h1"), lambda: testbed.kill_sessions("h0"), gap_s=0.5):
        result = session.run_cell(_COUNT.format(count=300, gap_s=0.01))
    assert result.values == {0: 0, 1: 1}
    _assert_counted(session, result.cell, 300)


def test_killed_attach_program_is_started_again(session: Session, testbed: Testbed) -> None:
    with _later(0.5, lambda: _kill(testbed, "h1", "/dev/fd/3")):
        result = session.run_cell(_COUNT.format(count=300, gap_s=0.01))
    _assert_counted(session, result.cell, 300)


@pytest.mark.slow
def test_sshd_may_be_away_for_a_while(session: Session, testbed: Testbed) -> None:
    away = [lambda: testbed.stop_sshd("h1", sessions=True), lambda: testbed.start_sshd("h1")]
    with _later(0.5, *away, gap_s=2.0):
        result = session.run_cell(_COUNT.format(count=300, gap_s=0.015) + "\nt = torch.ones(1); dist.all_reduce(t)")
    _assert_counted(session, result.cell, 300)


@pytest.mark.thorough
def test_silent_cut_of_thirty_seconds_is_said_and_not_noticed_by_the_cell(session: Session, testbed: Testbed) -> None:
    eyes = Watcher()
    cut = [lambda: testbed.cut("h1", "notebook"), lambda: testbed.heal("h1")]
    with _later(1.0, *cut, gap_s=30.0):
        result = session.run_cell(_COUNT.format(count=2500, gap_s=0.01), observer=eyes, timeout_s=100)
    _assert_counted(session, result.cell, 2500)
    assert any("no connection to h1 for" in text and "trying again: rank 1 continues" in text for text in eyes.waited)


@pytest.mark.slow
def test_output_that_a_cut_holds_up_is_said_to_be_missing_and_comes(session: Session, testbed: Testbed) -> None:
    eyes = Watcher()
    away = [lambda: testbed.stop_sshd("h1", sessions=True), lambda: testbed.start_sshd("h1")]
    with _later(0.3, *away, gap_s=3.0):
        session.run_cell("import time\ntime.sleep(5)", observer=eyes)
    assert any("no connection to h1 for" in text and "trying again: rank 1 continues" in text for text in eyes.waited)


# ---- nodes


def test_lost_agent_takes_its_ranks_and_no_others(session: Session, testbed: Testbed) -> None:
    session.run_cell("import time\nkept = rank")
    with _later(0.5, lambda: _kill(testbed, "h1", "detrain_nb.node.agent.agent")), pytest.raises(RankLost) as caught:
        session.run_cell("if rank == 0:\n    dist.recv(torch.ones(1), 1)\nelse:\n    time.sleep(600)")
    assert "node h1 is lost" in str(caught.value)
    assert not _ours(testbed, "h1"), "ranks outlived their agent"
    assert session.run_cell("kept", ranks="h0").values == {0: 0}


@pytest.mark.slow
def test_rebooted_node_is_lost_and_the_others_keep_their_variables(session: Session, testbed: Testbed) -> None:
    session.run_cell("import time\nkept = rank")
    with _later(0.5, lambda: testbed.reboot("h1")), pytest.raises((RankLost, RankError)) as caught:
        session.run_cell("dist.barrier()\ntime.sleep(1 if rank else 0)\ndist.recv(torch.ones(1), 1 - rank)")
    deadline = time.monotonic() + 30
    while 1 not in state_of(session).lost_nodes and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(SessionError, match="node h1 is lost"):
        session.run_cell("rank")
    assert caught.value is not None
    assert "no session" in state_of(session).lost_nodes[1]
    assert session.run_cell("kept", ranks="h0").values == {0: 0}


@pytest.mark.slow
def test_reboot_of_the_first_node_ends_the_session(testbed: Testbed) -> None:
    session = Session.start(1, sync=False, nodes=ssh_nodes(testbed), device="cpu")
    try:
        with _later(0.5, lambda: testbed.reboot("h0")), pytest.raises((NodeLost, RankError)):
            session.run_cell("import time\nif rank:\n    dist.recv(torch.ones(1), 0)\ntime.sleep(600)")
        deadline = time.monotonic() + 30
        while session.is_alive and time.monotonic() < deadline:
            time.sleep(0.05)
        assert isinstance(session.failure, NodeLost)
        assert "h0: " in str(session.failure)
    finally:
        session.stop()
    assert not _ours(testbed, "h1")


@pytest.mark.slow
def test_cut_between_nodes_ends_in_an_error_that_names_both(testbed: Testbed) -> None:
    with Session.start(1, sync=False, nodes=ssh_nodes(testbed), device="cpu", group_timeout_s=4) as session:
        session.run_cell("kept = rank\ndist.barrier()")
        testbed.cut("h0", "h1")
        with pytest.raises(RankError) as caught:
            session.run_cell("t = torch.ones(1000)\ndist.all_reduce(t)", timeout_s=60)
        assert "ranks 0-1 on h0 and h1 received nothing from each other for 4 s" in caught.value.note
        testbed.heal("h0")
        session.run_cell("kept", ranks=0)
        assert session.run_cell("dist.barrier()\nkept").values == {0: 0, 1: 1}


def test_stop_frees_ranks_of_several_hosts(session: Session) -> None:
    session.run_cell("kept = rank")
    code = "print('begun')\nif rank == 0:\n    dist.all_reduce(torch.ones(1))\nelse:\n    import time; time.sleep(600)"
    with pytest.raises(RankError) as caught:
        session.run_cell(code, observer=Watcher(press_at="begun", ranks=2, after_s=(0.5,)))
    assert "rank 0 waited in all_reduce #" in caught.value.note
    assert session.run_cell("dist.barrier()\nkept").values == {0: 0, 1: 1}


# ---- notebooks


@pytest.mark.slow
def test_another_process_goes_on_with_the_session(testbed: Testbed) -> None:
    first = Session.start(1, sync=False, nodes=ssh_nodes(testbed), device="cpu", name="mine", holder="one")
    first.run_cell("kept = rank")
    with pytest.raises(SessionError, match="held by one"):
        Session.attach("mine", nodes=ssh_nodes(testbed), holder="two")
    second = Session.attach("mine", nodes=ssh_nodes(testbed), holder="two", steal=True)
    with pytest.raises(SessionError, match="taken over by two"):
        first.run_cell("kept")
    assert second.run_cell("dist.barrier()\nkept").values == {0: 0, 1: 1}
    first.detach()
    second.stop()


@pytest.mark.slow
def test_two_sessions_on_the_same_hosts_do_not_disturb_each_other(testbed: Testbed) -> None:
    with (
        Session.start(1, sync=False, nodes=ssh_nodes(testbed), device="cpu", name="one") as one,
        Session.start(1, sync=False, nodes=ssh_nodes(testbed), device="cpu", name="two") as two,
    ):
        for session in (one, two):
            session.run_cell(f"who = {session.name!r}")
        code = "t = torch.ones(1); dist.all_reduce(t); who, t.item()"
        assert one.run_cell(code).values == {0: ("one", 2.0), 1: ("one", 2.0)}
        assert two.run_cell(code).values == {0: ("two", 2.0), 1: ("two", 2.0)}


# ---- unusual and faulty hosts


@pytest.mark.slow
@pytest.mark.parametrize("own_name", ["nothing", "127.0.1.1"])
def test_own_name_of_a_host_does_not_matter(testbed: Testbed, own_name: str) -> None:
    for host in testbed.hosts:
        testbed.set_own_name(host.name, own_name)
    try:
        with Session.start(1, sync=False, nodes=ssh_nodes(testbed), device="cpu") as session:
            assert session.run_cell("t = torch.ones(1); dist.all_reduce(t); t.item()").values == {0: 2.0, 1: 2.0}
    finally:
        for host in testbed.hosts:
            testbed.set_own_name(host.name, "address")


@pytest.mark.parametrize(
    ("python", "complaint"),
    [
        ("python9", r"h1: python9: .*not found .*\(exit 127\): set python of this node"),
        ("/etc/passwd", r"h1: /etc/passwd: .*[Pp]ermission denied.*\(exit 126\): set python of this node"),
        ("/bin/false", r"h1: /bin/false did not start our program \(exit 1\): no output; check that"),
    ],
)
def test_python_that_is_none_is_said_and_nothing_is_left(testbed: Testbed, python: str, complaint: str) -> None:
    nodes = [*ssh_nodes(testbed, 1), *ssh_nodes(testbed, python=python)[1:]]
    with pytest.raises(DetrainError, match=complaint):
        Session.start(1, sync=False, nodes=nodes, device="cpu")
    assert not _ours(testbed, "h0")
    assert not _ours(testbed, "h1")


def test_setup_lines_run_before_python_and_their_failure_is_told(testbed: Testbed) -> None:
    setup = ("export FROM_SETUP='a b'", "echo noise", "echo more noise >&2")
    with Session.start(1, sync=False, nodes=ssh_nodes(testbed, 1, setup=setup), device="cpu") as session:
        assert session.run_cell("import os; os.environ['FROM_SETUP']").values == {0: "a b"}
    with pytest.raises(LaunchError, match=r"the setup lines failed: .*nosuchcommand: .*not found"):
        Session.start(1, sync=False, nodes=ssh_nodes(testbed, 1, setup=("nosuchcommand x",)), device="cpu")
    with pytest.raises(LaunchError, match=r"the setup lines failed: .*nosuchcommand: .*not found"):
        lines = ("set -e", "nosuchcommand x", "echo further")
        Session.start(1, sync=False, nodes=ssh_nodes(testbed, 1, setup=lines), device="cpu")


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"setup": ("if [ x",)}, r"did not start our program after the setup lines, .*\(exit 2\): bash: line"),
        ({"workdir": "/proc/sys/mine"}, r"the workdir /proc/sys/mine cannot be used: .*No such file"),
    ],
    ids=["setup", "workdir"],
)
def test_what_is_wrong_on_the_node_is_named(testbed: Testbed, fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DetrainError, match=f"(?s){complaint}"):
        Session.start(1, sync=False, nodes=ssh_nodes(testbed, 1, **fields), device="cpu")


def test_hosts_with_one_name_that_share_a_home_are_told(make_testbed: MakeTestbed) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        testbed = make_testbed(2, share=[shared])
        testbed.output("h0", "hostname twin")
        testbed.output("h1", "hostname twin")
        nodes = ssh_nodes(testbed, setup=(f"export XDG_CACHE_HOME={shared}",))
        with pytest.raises(SpecError, match=r"share a home directory and the host name twin: rename one host"):
            Session.start(1, sync=False, nodes=nodes, device="cpu")


def test_machine_that_is_named_twice_is_told(testbed: Testbed) -> None:
    nodes = [*ssh_nodes(testbed, 1, name="a"), *ssh_nodes(testbed, 1, name="b")]
    with pytest.raises(SpecError, match=r"^(a and b|b and a) are the same machine: name it once, with ranks = N"):
        Session.start(1, sync=False, nodes=nodes, device="cpu")
    assert not _ours(testbed, "h0")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("read -r line", "[Ss]yntax error"),
        ("exec 0</dev/null", "no output"),
        ("exec nologin", "This account is currently not available"),
        ("export PYTHONHOME=/nonex", "Fatal Python error: "),
    ],
)
def test_login_file_that_keeps_our_program_from_starting_is_pointed_at(
    line: str, complaint: str, testbed: Testbed
) -> None:
    profile = testbed.path_home("h0") / ".bashrc"
    profile.write_text(f"{line}\n")
    (node,) = ssh_nodes(testbed, 1)
    try:
        advice = "check that the login .*nologin"
        with pytest.raises(DetrainError, match=rf"did not start our program .*{complaint}.*; {advice}"):
            node.start_agent("test")
    finally:
        profile.unlink()


def test_what_shows_our_program_instead_of_running_it_is_cut_short(testbed: Testbed) -> None:
    python = testbed.path_home("h0") / "no-python"
    python.write_text("#!/bin/sh\nexec cat /dev/fd/3\n")
    python.chmod(0o755)
    (node,) = ssh_nodes(testbed, 1, python="~/no-python")
    with pytest.raises(DetrainError, match=r"did not start our program .* is a Python interpreter$") as caught:
        node.start_agent("test")
    assert len(str(caught.value)) < 1000


@pytest.mark.slow
def test_shell_that_prints_does_not_disturb(testbed: Testbed) -> None:
    profile = testbed.path_home("h0") / ".bashrc"
    profile.write_text("echo welcome; printf 'no newline'; echo oops >&2\n")
    try:
        with Session.start(1, sync=False, nodes=ssh_nodes(testbed, 1), device="cpu") as session:
            assert session.run_cell("1 + 1").values == {0: 2}
    finally:
        profile.unlink()


def _assert_code_came(testbed: Testbed) -> None:
    with Session.start(1, sync=False, nodes=ssh_nodes(testbed, 1), device="cpu") as session:
        found = session.run_cell("import detrain_nb; detrain_nb.__file__").values[0]
    assert "/.cache/detrain_nb/" in found


@pytest.mark.slow
def test_code_travels_where_sshd_allows_one_channel(make_testbed: MakeTestbed) -> None:
    _assert_code_came(make_testbed(1, sshd_options=["MaxSessions 1"]))


def test_code_travels_where_there_is_no_sftp(make_testbed: MakeTestbed) -> None:
    testbed = make_testbed(1)
    config = testbed.folder / "h0" / "sshd_config"
    config.write_text(
        "".join(line for line in config.read_text().splitlines(keepends=True) if not line.startswith("Subsystem"))
    )
    testbed.stop_sshd("h0")
    testbed.start_sshd("h0")
    _assert_code_came(testbed)


@pytest.mark.slow
def test_home_that_cannot_be_written_is_no_hindrance(make_testbed: MakeTestbed) -> None:
    testbed = make_testbed(1)
    testbed.output("h0", "mount -o remount,bind,ro ~")
    with Session.start(1, sync=False, nodes=ssh_nodes(testbed, 1), device="cpu") as session:
        assert session.run_cell("import os; os.getcwd()").values[0].startswith("/tmp/detrain_nb-")


@pytest.mark.slow
def test_full_disk_of_a_node_loses_output_and_no_rank(make_testbed: MakeTestbed) -> None:
    testbed = make_testbed(1, disk="16m")
    with Session.start(1, sync=False, nodes=ssh_nodes(testbed, 1), device="cpu") as session:
        session.run_cell("open('/root/fill', 'wb').write(bytes(1 << 20))\nkept = rank")
        with contextlib.suppress(RankError):
            session.run_cell("f = open('/root/fill2', 'wb')\nwhile True: f.write(bytes(1 << 16)); f.flush()")
        result = session.run_cell("for i in range(2000): print('x' * 100)\nkept")
        assert result.values == {0: 0}
        assert session.log.text(result.cell, 0).count("\n") == 2000


@pytest.mark.thorough
def test_slow_link_is_only_slow(make_testbed: MakeTestbed) -> None:
    testbed = make_testbed(2, link=Link(delay_s=0.02))
    with Session.start(1, sync=False, nodes=ssh_nodes(testbed), device="cpu") as session:
        testbed.shape("h1", Link(delay_s=0.15))
        result = session.run_cell("dist.barrier()\nprint(rank)\nrank")
        assert result.values == {0: 0, 1: 1}
        session.push({"x": list(range(1000))})
        assert session.pull("x", ranks=1)[1][-1] == 999


@pytest.mark.timeout(180)
def test_stop_in_the_middle_of_a_large_message_loses_nothing(make_testbed: MakeTestbed) -> None:
    """gloo forgets which rank waits for the rest of a message, so the stop waits for the end of the message."""
    testbed = make_testbed(2, link=Link(rate_bits_per_s=200e6))
    with Session.start(1, sync=False, nodes=ssh_nodes(testbed), device="cpu") as session:
        session.run_cell("big, kept = torch.ones(15_000_000), rank")  # 60 MB: 2.4 s
        for code in ("dist.send(big, 1) if rank == 0 else dist.recv(big, 0)", "dist.broadcast(big, 0)"):
            with pytest.raises(CellTimeout, match="did not end within"):
                session.run_cell(code, timeout_s=0.8)
            assert session.run_cell(f"{_TOGETHER}; kept").values == {0: 0, 1: 1}
        press = threading.Timer(0.8, press_stop)
        press.start()
        with pytest.raises(CellInterrupted, match="broadcast of big was interrupted"):
            session.broadcast("big")
        assert session.run_cell(f"{_TOGETHER}; kept").values == {0: 0, 1: 1}


@pytest.mark.slow
def test_bastion_is_gone_through(testbed: Testbed, tmp_path: Path) -> None:
    h0, h1 = testbed.hosts
    testbed.cut("h1", "notebook")
    with Session.start(1, sync=False, nodes=ssh_nodes(testbed, 2, proxy_jump=None)[:1], device="cpu") as session:
        assert session.run_cell("rank").values == {0: 0}
    behind = ssh_nodes(testbed)[1]
    behind = type(behind)(behind.node.model_copy(update={"proxy_jump": h0.name}), config_path=behind.config_path)
    with Session.start(1, sync=False, nodes=[behind], device="cpu") as session:
        assert session.run_cell("import socket; socket.gethostname()").values == {0: h1.hostname}


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_sixteen_hosts_are_one_session(make_testbed: MakeTestbed) -> None:
    testbed = make_testbed(16)
    nodes = ssh_nodes(testbed, 16)
    with Session.start(1, sync=False, nodes=nodes, device="cpu", init=False) as session:
        assert session.run_cell("rank").values == {rank: rank for rank in range(16)}
        assert [rank.host for rank in session.status().ranks] == [f"h{index}" for index in range(16)]
