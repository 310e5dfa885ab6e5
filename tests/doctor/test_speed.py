"""The speed test of ranks: it runs on real hosts, does not trust their reports, and ends its processes in time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from detrain_nb.cli.commands import main
from detrain_nb.deploy.remote_program import read_program, write_script
from detrain_nb.doctor import Cell, Report, examination, examine, host_probe
from detrain_nb.doctor.examination import Host
from detrain_nb.doctor.host_facts import Gpu, Gpus
from detrain_nb.doctor.host_probe import HostProbe, Speed
from detrain_nb.doctor.judgement import relative_speeds
from detrain_nb.errors import SpecError
from detrain_nb.node.ssh import speed as speed_program
from detrain_nb.spec.node import Node
from detrain_nb.spec.nodes_file import read_nodes, write_nodes

from ..testbed.procfs import read_argvs
from ..testbed.testbed import Testbed

pytestmark = pytest.mark.slow  # because each rank imports torch

LIMIT_S = 30.0


def _examine(testbed: Testbed, *nodes: Node) -> Report:
    return examine(nodes, speed=True, config_path=Path(testbed.inventory.ssh_config))


def _node(host: str, **fields: Any) -> Node:
    return Node(**{"host": host, "python": sys.executable, "devices": "cpu", **fields})


@pytest.fixture
def make_python(testbed: Testbed) -> Iterator[Callable[[str], str]]:
    """Yield a function that writes a shell script as the ``python`` of h0, and returns its path on h0."""
    home = testbed.path_home("h0")
    before = set(home.iterdir())

    def make(script: str) -> str:
        (home / "python").write_text(f"#!/bin/sh\n{script}\n")
        (home / "python").chmod(0o755)
        return f"{testbed.inventory.user_home}/python"

    yield make
    for path in set(home.iterdir()) - before:
        testbed.output("h0", f"rm -r {testbed.inventory.user_home}/{path.name}")


def test_speed_of_hosts_and_this_machine_is_measured_and_can_be_saved(testbed: Testbed, tmp_path: Path) -> None:
    told: list[str] = []
    nodes = (Node(host="localhost", devices="cpu"), _node("h0"), _node("h1", ranks=2))
    config = Path(testbed.inventory.ssh_config)
    report = examine(nodes, speed=True, on_progress=told.append, config_path=config)
    assert told[-1] == "measuring the speed of ranks on 3 hosts"
    path = tmp_path / "nodes.toml"
    write_nodes(path, report.measured_nodes())
    speeds = {node.name: node.relative_speed for node in read_nodes(path)}
    assert max(speed or 0 for speed in speeds.values()) == 1.0
    threads = len(os.sched_getaffinity(0))
    each = {
        **dict.fromkeys(("localhost", "h0"), f"1 rank with {threads} thread{'s' * (threads > 1)}"),
        "h1": f"2 ranks at once, each with {max(1, threads // 2)} thread{'s' * (threads > 3)}",
    }
    for name, speed in speeds.items():
        assert speed is not None and 0 < speed <= 1
        cell = report.cell("speed", name)
        found = re.fullmatch(rf"([\d.,]+) [GT]FLOP/s, {speed} of the fastest \({each[name]}\)", cell.text)
        assert found and float(found[1].replace(",", "")) > 0, cell.text
        assert cell.state == ("warning" if speed < 0.5 else "good")


def test_speed_is_measured_only_when_it_is_asked_for(testbed: Testbed) -> None:
    report = examine([_node("h0")], config_path=Path(testbed.inventory.ssh_config))
    assert "speed" not in [row.check for row in report.rows]
    assert report.measured_nodes()[0].relative_speed is None


def test_save_in_a_shell_measures_it_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nodes.toml"
    path.write_text('[[nodes]]\nhost = "localhost"\ndevices = "cpu"\n')
    assert main(["doctor", str(path), "--save"]) == 0
    assert "1.0 of the fastest" in " ".join(capfd.readouterr().out.split())
    (node,) = read_nodes(path)
    assert node.relative_speed == 1.0 and node.memory_gb


# ---- where it cannot be measured


def test_host_without_torch_is_not_measured_and_that_is_no_problem(
    testbed: Testbed, make_python: Callable[[str], str]
) -> None:
    python = make_python(f'exec {sys.executable} -I -S "$@"')
    report = _examine(testbed, _node("h0", python=python), _node("h1"))
    assert report.cell("speed", "h0") == Cell("not measured: torch is missing")
    assert "1.0 of the fastest" in report.cell("speed", "h1").text
    assert [node.relative_speed for node in report.measured_nodes()] == [None, 1.0]


@pytest.mark.parametrize(
    ("torch", "complaint"),
    [
        ("raise RuntimeError('no such\\n\\x1b[2Jlibrary')", "rank 0: RuntimeError: no such ?[2Jlibrary"),
        ("import os; os.kill(os.getpid(), 9)", "rank 0 was killed by signal 9"),
        ("import os; print('{}', flush=True); os._exit(0)", "rank 0 exited"),
    ],
)
def test_torch_that_fails_is_said_of_its_host_alone(
    torch: str, complaint: str, testbed: Testbed, make_python: Callable[[str], str]
) -> None:
    folder = testbed.path_home("h0") / "other/torch"
    python = make_python(f'PYTHONPATH=$HOME/other exec {sys.executable} "$@"')
    folder.mkdir(parents=True)
    (folder / "version.py").write_text("__version__ = '2.9.1'\n")
    (folder / "__init__.py").write_text(torch)
    report = _examine(testbed, _node("h0", python=python), _node("h1"))
    assert report.cell("speed", "h0") == Cell(f"not measured: {complaint}", "warning")
    assert report.cell("speed", "h1").state == "good"
    assert not list(folder.glob("__pycache__")), "something was written there"


def test_ranks_that_cannot_be_are_not_tried(testbed: Testbed) -> None:
    report = _examine(testbed, _node("h0", ranks=65), _node("h1", devices=(0,)))
    assert report.cell("speed", "h0").text == "not measured: 65 ranks are too many to measure at once, the limit is 64"
    assert report.cell("speed", "h1").text == "not measured: node h1 has no GPU 0: it has none"


def test_ranks_are_on_the_gpus_that_a_session_gives_them() -> None:
    gpu = Gpu("a", 80 * 10**9, 0, ())
    for visible, devices, ranks, expected in [
        ("", "auto", None, (0, 1, 2)),
        ("1,2", "auto", None, (0, 1)),
        ("", "auto", 2, (0, 1)),
        ("", [2, 0], None, (2, 0)),
        ("", "cpu", 4, None),
    ]:
        node = _node("a", devices=devices, ranks=ranks)
        plan = examination._plan_ranks(node, Gpus((gpu, gpu, gpu), "", "", visible))
        assert (plan.gpus, len(plan.ranks)) == (expected, len(expected or range(4)))
    with pytest.raises(SpecError, match="4 ranks but 3 GPUs on node a"):
        examination._plan_ranks(_node("a", devices="auto", ranks=4), Gpus((gpu, gpu, gpu), "", "", ""))


# ---- what a host says is not trusted


@pytest.fixture
def examine_liar(testbed: Testbed, make_python: Callable[[str], str]) -> Callable[..., Report]:
    """Return a function that examines h0 and other nodes; h0 sends a given text as the speed of its two ranks."""

    def examine_it(said: str, *others: Node) -> Report:
        (testbed.path_home("h0") / "said").write_text(speed_program.MAGIC.decode() + said)
        second = "if [ -e $HOME/asked ]; then cat $HOME/said; exec cat >/dev/null; fi; touch $HOME/asked"
        python = make_python(f'{second}; exec {sys.executable} "$@"')
        return _examine(testbed, _node("h0", python=python, ranks=2), *others)

    return examine_it


FORGED = {
    "not a number": "[1.0, NaN]",
    "infinity": "[1.0, 1e999]",
    "none": "[1.0, 0]",
    "less than none": "[1.0, -1]",
    "more than can be": "[1.0, 1000001]",
    "more than a float has": f"[1.0, {'9' * 500}]",
    "hardly any": "[1.0, 1e-7]",
    "too few": "[1.0]",
    "too many": "[1.0, 1.0, 1.0]",
    "no list": "1.0",
    "a text": '[1.0, "1"]',
    "a bool": "[1.0, true]",
}


@pytest.mark.parametrize("case", FORGED)
def test_speed_that_cannot_be_is_refused(case: str, examine_liar: Callable[..., Report]) -> None:
    report = examine_liar(f'{{"type": "speed", "gflop_s": {FORGED[case]}}}\n')
    cell = report.cell("speed", "h0")
    assert cell.state == "warning" and cell.text.startswith("not measured: the host's answer is invalid")
    assert report.measured_nodes()[0].relative_speed is None


def test_lie_of_a_host_slows_no_other(examine_liar: Callable[..., Report]) -> None:
    report = examine_liar('{"type": "speed", "gflop_s": [2e6, 2e6]}\n', _node("h1"))
    assert "1.0 of the fastest" in report.cell("speed", "h1").text
    assert [node.relative_speed for node in report.measured_nodes()] == [None, 1.0]


def test_slow_host_is_a_warning_that_says_what_to_do(examine_liar: Callable[..., Report]) -> None:
    report = examine_liar('{"type": "speed", "gflop_s": [1000, 0.0001]}\n', _node("h1"))
    cell = report.cell("speed", "h0")
    assert cell.state == "warning" and cell.text.startswith("0.0001 GFLOP/s, 0.001 of the fastest (2 ranks at once")
    assert cell.advice.startswith("every step waits for the slowest rank: ")
    assert [node.relative_speed for node in report.measured_nodes()] == [0.001, 1.0], "as its slowest rank is"


def test_host_that_does_not_answer_is_not_waited_for(
    examine_liar: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_probe, "_SPEED_LIMIT_S", 1)
    began = time.monotonic()
    report = examine_liar("{")
    assert time.monotonic() - began < LIMIT_S
    assert report.cell("speed", "h0").text.startswith("not measured: our program on the node does not answer")
    assert report.cell("torch", "h0").state == "good"


def test_fastest_has_1_and_others_their_share_of_it() -> None:
    hosts = []
    for name, speed in [("a", Speed(40.0, 1, 2)), ("b", Speed(30.0, 2, 1)), ("c", None), ("d", Speed(13.3333, 1, 2))]:
        node = _node(name)
        hosts.append(Host(node, HostProbe(node), speed=speed))
    assert relative_speeds(hosts) == {"a": 1.0, "b": 0.75, "d": 0.333}
    assert relative_speeds(hosts[2:3]) == {}


# ---- its processes end


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], subprocess.Popen[bytes]]]:
    """Yield a function that starts the program for two ranks whose ``import torch`` hangs, and reads the magic line."""
    (tmp_path / "torch").mkdir()
    hang = "import os, threading; open(f'{__path__[0]}/{os.getpid()}', 'w').close(); threading.Event().wait(90)"
    (tmp_path / "torch/__init__.py").write_text(hang)
    started: list[subprocess.Popen[bytes]] = []

    def start_it(within_s: int) -> subprocess.Popen[bytes]:
        program = subprocess.Popen(
            ["sh"],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        started.append(program)
        assert program.stdin and program.stdout
        program.stdin.write(write_script(_node("h"), read_program("speed")))
        assert program.stdout.read(len(speed_program.MAGIC)) == speed_program.MAGIC
        order = {"gpus": [None, None], "threads": 1, "within_s": within_s}
        program.stdin.write(json.dumps(order).encode() + b"\n")
        return program

    yield start_it
    for program in started:
        with program:
            program.kill()


def _wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _ranks(folder: Path) -> list[int]:
    return [int(path.name) for path in (folder / "torch").iterdir() if path.name.isdecimal()]


def _have_ended(pids: list[int]) -> bool:
    return set(pids).isdisjoint(read_argvs(Path("/proc")))


def test_ranks_that_are_not_done_in_time_are_ended(
    start: Callable[[int], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    program = start(4)
    assert program.stdout
    said = program.stdout.read()
    program.wait(LIMIT_S)
    assert json.loads(said) == {"type": "failed", "text": "rank 0 did not finish in time"}
    assert _have_ended(_ranks(tmp_path))


def test_ranks_end_when_the_notebook_hangs_up(start: Callable[[int], subprocess.Popen[bytes]], tmp_path: Path) -> None:
    program = start(600)
    _wait_for(lambda: len(_ranks(tmp_path)) == 2)
    assert program.stdin
    program.stdin.close()
    program.wait(LIMIT_S)
    assert _have_ended(_ranks(tmp_path))


def test_ranks_end_in_time_without_the_program_that_started_them(
    start: Callable[[int], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    program = start(6)
    _wait_for(lambda: len(_ranks(tmp_path)) == 2)
    program.send_signal(signal.SIGKILL)
    _wait_for(lambda: _have_ended(_ranks(tmp_path)))
