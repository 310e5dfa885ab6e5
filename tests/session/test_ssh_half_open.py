"""Half-open connections: the other side gets no notice, so each side has to detect the loss by itself."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import detrain_nb
from detrain_nb import Session
from detrain_nb.errors import SessionError
from detrain_nb.session.state.cell_observer import CellObserver
from detrain_nb.session.state.limits import Limits

from ..testbed.nodes import ssh_nodes
from ..testbed.testbed import Testbed
from .inside import link_of

_NOTICED_S = 40.0  # usually 20; a busy machine stalls


class Eyes(CellObserver):
    """Calls ``act`` with each line about the ranks that the cell waits for."""

    def __init__(self, act: Callable[[str], object]) -> None:
        self._act = act

    def waiting(self, text: str) -> None:
        self._act(text)


def _eventually(holds: Callable[[], bool], *, limit_s: float = _NOTICED_S, gap_s: float = 0.1) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(gap_s)


# ---- the notebook loses the node


@pytest.mark.slow
def test_cut_of_a_link_on_which_nothing_is_said_is_noticed_and_the_next_cell_waits_for_it(
    testbed: Testbed,
) -> None:
    limits = Limits(alive_gap_s=1.0)
    with Session.start(1, sync=False, nodes=ssh_nodes(testbed), device="cpu", limits=limits) as session:
        session.run_cell("kept = rank")
        testbed.cut("h1", "notebook")
        began = time.monotonic()
        _eventually(lambda: bool(link_of(session).broken_s(now=began)))  # a query to the ranks would send something
        assert [node.fault[:17] for node in session.status().nodes] == ["", "no connection for"]
        said: list[str] = []

        def act(text: str) -> None:
            said.append(text)
            if len(said) > 1:
                testbed.heal("h1", "notebook")

        code = "import time\nfor i in range(100):\n    print(i)\n    time.sleep(0.01)\nkept"
        result = session.run_cell(code, observer=Eyes(act), timeout_s=100)
        assert result.values == {0: 0, 1: 1}
        assert "no connection to h1 for" in said[0]
        assert [node.fault for node in session.status().nodes] == ["", ""]
        for rank in (0, 1):
            assert [int(line) for line in session.log.text(result.cell, rank).split()] == list(range(100))


@pytest.mark.thorough
def test_cut_behind_a_host_that_is_gone_through_is_noticed(testbed: Testbed) -> None:
    """The connection to the bastion works, and its sshd takes 15 minutes to notice that the one to h1 is cut."""
    h0 = testbed.hosts[0]
    behind = ssh_nodes(testbed)[1]
    behind = type(behind)(behind.node.model_copy(update={"proxy_jump": h0.name}), config_path=behind.config_path)
    with Session.start(
        1, sync=False, nodes=[behind], device="cpu", init=False, limits=Limits(alive_gap_s=1.0)
    ) as session:
        session.run_cell("kept = rank")
        testbed.cut("h1", "h0")
        began = time.monotonic()
        _eventually(lambda: bool(link_of(session).broken_s(now=began)))
        testbed.heal("h1", "h0")
        assert session.run_cell("kept", timeout_s=60).values == {0: 0}


# ---- the node loses the notebook

_NOTEBOOK = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from detrain_nb import Session
from detrain_nb.deploy.ssh_node import SshNode
from detrain_nb.spec.node import Node
node = SshNode(Node(host="h1", python=sys.executable), config_path=Path({config!r}))
session = Session.start(1, sync=False, nodes=[node], device="cpu", name="left", holder="gone")
session.run_cell("kept = 'by the one that is gone'")
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def _notebook_on(testbed: Testbed, host: str) -> Iterator[None]:
    """Run a notebook on another machine, with a rank on h1; it is killed when the block ends, if not before."""
    package = Path(detrain_nb.__file__).parent
    ours = testbed.path_home(host) / "ours"  # the host has a /tmp of its own
    shutil.copytree(package, ours / package.name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    root = f"{testbed.inventory.user_home}/ours"
    code = _NOTEBOOK.format(root=root, config=testbed.inventory.ssh_config)
    env = {"HOME": testbed.inventory.user_home, "PATH": "/usr/bin:/bin", "DETRAIN_NB_RUNTIME_DIR": "/tmp/of-notebook"}
    command = [*testbed.enter(host), sys.executable, "-c", code]
    with subprocess.Popen(command, env=env, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        watch = threading.Timer(60, process.kill)
        watch.start()
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            watch.cancel()
            _kill_notebook(testbed, host)
            shutil.rmtree(ours)


def _kill_notebook(testbed: Testbed, host: str) -> None:
    for pid, argv in testbed.processes(host).items():
        if 'name="left"' in " ".join(argv) and argv[0] == sys.executable:
            testbed.exec(host, "kill", "-9", str(pid))


def _attach_programs(testbed: Testbed, host: str) -> set[int]:
    return {pid for pid, argv in testbed.processes(host).items() if "/dev/fd/3" in argv}


@pytest.mark.thorough
def test_notebook_that_vanished_lets_another_one_have_its_session_and_one_that_is_silent_keeps_it(
    testbed: Testbed,
) -> None:
    h1 = ssh_nodes(testbed)[1:]
    with Session.start(1, sync=False, nodes=h1, device="cpu", name="silent", init=False) as silent:
        its_program = _attach_programs(testbed, "h1")
        with _notebook_on(testbed, "h0"):
            testbed.cut("h0", "h1")  # for good: h1 does not even learn that the process exits
            _kill_notebook(testbed, "h0")
            refusals: list[str] = []

            def attach() -> Session | None:
                try:
                    return Session.attach("left", nodes=ssh_nodes(testbed)[1:], holder="another")
                except SessionError as exc:
                    refusals.append(str(exc))
                    return None

            found: list[Session] = []
            _eventually(lambda: bool(found.extend(filter(None, [attach()])) or found), gap_s=1.0)
            with found[0] as session:
                assert session.run_cell("kept").values == {0: "by the one that is gone"}
        assert refusals, "it was not held"
        assert all("session 'left' is held by gone: %distributed attach --steal" in text for text in refusals)
        assert its_program <= _attach_programs(testbed, "h1"), "a notebook that was there has been given up"
        assert silent.run_cell("rank").values == {0: 0}


_STOPPED_NOTEBOOK = """
import json, sys
from pathlib import Path
from detrain_nb import Session
from detrain_nb.deploy import bootstrapped_node, ssh_node
from detrain_nb.session.state.limits import Limits
from detrain_nb.spec.node import Node
bootstrapped_node.SILENCE_LIMIT_S = 1.5
config = Path(sys.argv[1])
nodes = [ssh_node.SshNode(Node(host=host, python=sys.executable), config_path=config) for host in ("h0", "h1")]
with Session.start(1, sync=False, nodes=nodes, device="cpu", name="stopped", limits=Limits(alive_gap_s=0.3)) as session:
    session.run_cell("kept = rank")
    print("ready", flush=True)
    result = session.run_cell("import time\\nfor i in range(60):\\n    print(i)\\n    time.sleep(0.05)\\nkept")
    print(json.dumps([result.values, [session.log.text(result.cell, rank) for rank in (0, 1)]]))
"""


@pytest.mark.thorough
def test_notebook_that_stood_still_goes_on_where_it_was(testbed: Testbed) -> None:
    """As when a laptop sleeps: the nodes have closed its connections, and the ranks have kept running."""
    command = [sys.executable, "-c", _STOPPED_NOTEBOOK, testbed.inventory.ssh_config]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        watch = threading.Timer(60, process.kill)
        watch.start()
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.5)
            process.send_signal(signal.SIGSTOP)
            _eventually(lambda: not any(_attach_programs(testbed, host) for host in ("h0", "h1")))
            time.sleep(1.0)  # the output of the ranks is kept meanwhile
            process.send_signal(signal.SIGCONT)
            values, texts = json.loads(process.stdout.readline())
            assert process.wait(30) == 0
        finally:
            watch.cancel()
            process.kill()
    assert values == {"0": 0, "1": 1}
    assert [[int(line) for line in text.split()] for text in texts] == [list(range(60))] * 2
