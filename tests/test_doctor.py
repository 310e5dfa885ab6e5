"""Hosts in realistic states: real sshd, real Pythons, links that are cut or slow. One bad host hides no other."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from detrain_nb import Session
from detrain_nb.doctor import Cell, Report, examine, fix
from detrain_nb.errors import LaunchError, SpecError
from detrain_nb.node.ssh.logout import look_at_logout
from detrain_nb.spec.node import Node
from detrain_nb.spec.nodes_file import read_nodes, write_nodes

from .testbed.fixtures import MakeTestbed
from .testbed.nodes import away_from, ssh_nodes
from .testbed.testbed import Link, Testbed

pytestmark = pytest.mark.slow  # hosts that do not answer take their time

MAGIC = "\ndetrain-nb probe 1\n"
GB = 10**9


def _nodes(testbed: Testbed, **fields: Any) -> list[Node]:
    return [Node(host=host.name, **{"python": sys.executable, **fields}) for host in testbed.hosts]


def _examine(testbed: Testbed, nodes: list[Node] | None = None, **options: Any) -> Report:
    options.setdefault("config_path", Path(testbed.inventory.ssh_config))
    return examine(nodes or _nodes(testbed), **options)


def _states(report: Report, host: str) -> dict[str, str]:
    """Return the checks of a host that are bad or have a warning."""
    cells = {row.check: row.cells[report.hosts.index(host)] for row in report.rows}
    return {check: cell.state for check, cell in cells.items() if cell.state in ("bad", "warning")}


@pytest.fixture
def home(testbed: Testbed) -> Iterator[Path]:
    """The home of h0 in the real file system; files that a test leaves there are removed."""
    home = testbed.path_home("h0")
    before = set(home.iterdir())
    yield home
    for path in set(home.iterdir()) - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture
def make_python(home: Path, testbed: Testbed) -> Callable[[str], str]:
    """Return a function that creates a ``python`` on h0 from a shell script and returns its path there."""

    def make(script: str) -> str:
        path = home / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return f"{testbed.inventory.user_home}/python"

    return make


# ---- healthy hosts


@pytest.fixture(scope="module")
def report_of_two(testbed_of_two: Testbed) -> Report:
    return _examine(testbed_of_two)


def test_two_good_hosts_have_no_problems(report_of_two: Report) -> None:
    assert [str(problem) for problem in report_of_two.problems if not problem.is_warning] == []
    assert report_of_two.is_ok
    assert report_of_two.hosts == ("h0", "h1")
    for host, other in (("h0", "h1"), ("h1", "h0")):
        assert report_of_two.cell("reaches", host).text == other
        assert report_of_two.cell("host key", host).text.startswith("SHA256:")
        assert sys.executable in report_of_two.cell("python", host).text
        assert "free of" in report_of_two.cell("home", host).text
    assert {(link.source, link.target, link.error) for link in report_of_two.links} == {
        ("h0", "h1", ""),
        ("h1", "h0", ""),
    }


def test_versions_are_those_that_an_import_would_say(report_of_two: Report) -> None:
    import IPython
    import torch

    assert report_of_two.cell("torch", "h0").text == str(torch.__version__)
    assert report_of_two.cell("IPython", "h1").text == IPython.__version__


def test_clocks_of_one_machine_agree(report_of_two: Report) -> None:
    for host in report_of_two.hosts:
        offset_ms, uncertainty_ms = (
            float(part.removesuffix(" ms")) for part in report_of_two.cell("clock", host).text.split(" ± ")
        )
        assert abs(offset_ms) <= uncertainty_ms + 0.2
        assert uncertainty_ms < 1000


def test_report_is_a_table_with_hosts_as_columns(report_of_two: Report) -> None:
    lines = repr(report_of_two).splitlines()
    assert lines[0].startswith("2 hosts, 0 problems")
    assert lines[1].split() == ["h0", "h1"]
    assert {row.check for row in report_of_two.rows} >= {
        "ssh",
        "host key",
        "python",
        "torch",
        "GPUs",
        "clock",
        "reaches",
    }
    assert max(map(len, lines)) <= 120
    html = report_of_two._repr_html_()
    assert html.startswith("<div>2 hosts") and html.count("<table>") == 1
    assert html.count("<tr>") == len(report_of_two.rows) + 1


def test_examination_leaves_nothing_on_a_host(testbed: Testbed) -> None:
    def look(host: str) -> tuple[list[str], list[tuple[str, int]], set[int]]:
        files = sorted(str(path) for path in testbed.path_home(host).rglob("*"))
        return files, testbed.listening(host), set(testbed.processes(host))

    def look_at_both() -> list[tuple[list[str], list[tuple[str, int]], set[int]]]:
        return [look(host) for host in ("h0", "h1")]

    before = look_at_both()
    time.sleep(0.5)
    while before != (before := look_at_both()):  # first wait for the leftovers of earlier tests to end
        time.sleep(0.5)
    _examine(testbed)
    deadline = time.monotonic() + 60
    while (after := look_at_both()) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert after == before


def test_progress_is_told_in_the_calling_thread(testbed: Testbed) -> None:
    told: list[tuple[str, int]] = []
    _examine(testbed, on_progress=lambda line: told.append((line, threading.get_ident())))
    assert [line for line, _ in told] == [
        "examining 2 hosts",
        "2 of 2 hosts answered: comparing clocks and testing connections",
    ]
    assert {thread for _, thread in told} == {threading.get_ident()}


def test_host_alone_has_nobody_to_reach(testbed: Testbed) -> None:
    report = _examine(testbed, _nodes(testbed)[:1])
    assert report.is_ok
    assert report.cell("reaches", "h0") == Cell("no other host")
    (measured,) = report.measured_nodes()
    assert measured.memory_gb is not None and measured.memory_gb >= 0.1
    assert (measured.model_copy(update={"memory_gb": None}),) == report.nodes


def test_machine_that_is_named_twice_is_a_problem(testbed: Testbed) -> None:
    (node, _) = _nodes(testbed)
    report = _examine(testbed, [node, node.model_copy(update={"name": "again"})])
    assert report.cell("address", node.name).state == "good"
    twin = report.cell("address", "again")
    assert (
        twin.state == "bad" and twin.text.endswith(f", same as {node.name}") and "list the machine once" in twin.advice
    )


def test_this_machine_is_examined_beside_hosts(testbed: Testbed) -> None:
    h0 = _nodes(testbed)[0]
    here = Node(host="localhost")
    report = _examine(testbed, [here, h0])
    assert report.cell("ssh", "localhost").text == "this machine"
    assert sys.executable in report.cell("python", "localhost").text
    assert report.cell("torch", "localhost") == report.cell("torch", h0.name)
    assert report.cell("address", "localhost").text.startswith(f"{testbed.inventory.notebook_ip} (")
    assert report.cell("reaches", "localhost").text == h0.name
    assert report.cell("reaches", h0.name).text == "localhost"
    assert report.measured_nodes()[0].host == "localhost"
    with away_from(testbed, "h0") as address:
        report = _examine(testbed, [here.model_copy(update={"address": address}), h0])
    cell = report.cell("reaches", h0.name)
    assert cell.state == "bad" and cell.advice == "list a host first that all nodes reach, and leave localhost out"


@pytest.mark.parametrize(
    ("files", "kills", "lingers"),
    [
        ({}, False, False),
        ({"etc/systemd/logind.conf": "[Login]\n#KillUserProcesses=no\n"}, False, False),
        ({"usr/lib/systemd/logind.conf": "[Login]\n#KillUserProcesses=yes\n"}, True, False),
        (
            {"etc/systemd/logind.conf": "[Login]\nKillUserProcesses = yes\n", "var/lib/systemd/linger/al": ""},
            True,
            True,
        ),
        ({"etc/systemd/logind.conf": "KillUserProcesses=yes\nKillExcludeUsers=root al\n"}, False, False),
        ({"etc/systemd/logind.conf": "KillUserProcesses=yes\nKillOnlyUsers=bo\n"}, False, False),
        (
            {
                "etc/systemd/logind.conf": "#KillUserProcesses=no\n",
                "usr/lib/systemd/logind.conf.d/a.conf": "KillUserProcesses=no\n#KillUserProcesses=no\n",
                "etc/systemd/logind.conf.d/a.conf": "KillUserProcesses=yes\n",
            },
            True,
            False,
        ),
        (
            {
                "etc/systemd/logind.conf.d/a.conf": "KillUserProcesses=yes\n",
                "run/systemd/logind.conf.d/b.conf": "KillUserProcesses=no\n",
            },
            False,
            False,
        ),
    ],
)
def test_logout_is_read_as_logind_reads_it(files: dict[str, str], kills: bool, lingers: bool, tmp_path: Path) -> None:
    for name, text in {**files, "run/systemd/seats/seat0": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert look_at_logout(str(tmp_path), "al") == {"kills": kills, "lingers": lingers, "user": "al"}


def test_without_logind_nothing_ends_at_a_logout(tmp_path: Path) -> None:
    (tmp_path / "etc/systemd").mkdir(parents=True)
    (tmp_path / "etc/systemd/logind.conf").write_text("KillUserProcesses=yes\n")
    assert look_at_logout(str(tmp_path), "al") == {"kills": False, "lingers": False, "user": "al"}


def test_host_whose_logout_ends_jobs_is_said_with_the_command(examine_liar: Callable[..., Report]) -> None:
    report = examine_liar(_facts(logout={"kills": True, "lingers": False, "user": "al; rm"}))
    assert report.cell("logout", "h0").state == "warning"
    assert report.cell("logout", "h0").command.endswith("'loginctl enable-linger USER'")
    report = examine_liar(_facts(logout={"kills": True, "lingers": True, "user": "al"}))
    assert report.cell("logout", "h0").state == "good"


def test_only_hosts_can_be_examined() -> None:
    with pytest.raises(SpecError, match="only hosts reached over SSH"):
        examine(None)
    with pytest.raises(SpecError, match="the same name 'a'"):
        examine([Node(host="a"), Node(host="b", name="a")])


# ---- SSH


def _config(testbed: Testbed, folder: Path, known_hosts: str) -> Path:
    known = folder / "known_hosts"
    known.write_text(known_hosts)
    text = Path(testbed.inventory.ssh_config).read_text()
    path = folder / "ssh_config"
    path.write_text(text.replace(testbed.hosts[0].known_hosts_file, str(known)))
    return path


def test_unknown_host_key_is_said_with_the_command_that_adds_it(testbed: Testbed, tmp_path: Path) -> None:
    config = _config(testbed, tmp_path, testbed.known_hosts("h1"))
    report = _examine(testbed, config_path=config)
    assert _states(report, "h0") == {"host key": "bad"}
    assert _states(report, "h1").get("host key") is None
    [problem] = [problem for problem in report.problems if problem.host == "h0"]
    assert "is not known: ssh-ed25519 SHA256:" in problem.what
    assert "compare this fingerprint" in problem.advice
    assert problem.command.startswith(f"echo '{testbed.known_hosts('h0').strip()}' >> ")
    subprocess.run(["sh", "-c", problem.command], check=True, capture_output=True, timeout=20)
    assert _examine(testbed, config_path=config).is_ok


def test_changed_host_key_is_said_with_the_command_that_forgets_it(testbed: Testbed, tmp_path: Path) -> None:
    wrong = testbed.known_hosts("h1").replace(testbed.hosts[1].ip, testbed.hosts[0].ip)
    report = _examine(testbed, config_path=_config(testbed, tmp_path, testbed.known_hosts("h1") + wrong))
    [problem] = [problem for problem in report.problems if not problem.is_warning]
    assert (problem.host, problem.check) == ("h0", "host key")
    assert "has changed" in problem.what
    assert "someone may be intercepting the connection" in problem.what + problem.advice
    assert problem.command.startswith(f"ssh-keygen -R {testbed.hosts[0].ip}")
    assert report.cell("host key", "h1").state == "good"


def test_stopped_sshd_is_one_cell(testbed: Testbed) -> None:
    testbed.stop_sshd("h0", sessions=True)
    report = _examine(testbed)
    assert _states(report, "h0") == {"ssh": "bad"}
    assert "connection refused" in report.cell("ssh", "h0").text
    assert "check that sshd runs" in report.cell("ssh", "h0").text
    assert "bad" not in _states(report, "h1").values()
    assert report.cell("torch", "h1").state == "good"


def test_host_that_does_not_answer_is_one_cell(testbed: Testbed) -> None:
    testbed.cut("h0", "notebook")
    report = _examine(testbed)
    assert _states(report, "h0") == {"ssh": "bad"}
    assert "no answer" in report.cell("ssh", "h0").text
    assert report.cell("torch", "h1").state == "good"


def test_key_that_is_refused_is_one_cell(testbed: Testbed, tmp_path: Path) -> None:
    key = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=20)
    nodes = _nodes(testbed)
    report = _examine(testbed, [nodes[0].model_copy(update={"identity_file": str(key)}), nodes[1]])
    assert _states(report, "h0") == {"ssh": "bad"}
    assert "none of these keys lets user" in report.cell("ssh", "h0").text
    assert report.cell("torch", "h1").state == "good"


def test_passphrase_is_asked_in_the_calling_thread(testbed: Testbed, tmp_path: Path) -> None:
    key = tmp_path / "locked"
    shutil.copy(testbed.hosts[0].identity_file, key)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", key], check=True, capture_output=True, timeout=20)
    asked: list[int] = []

    def ask(path: str) -> str:
        asked.append(threading.get_ident())
        return "secret"

    report = _examine(testbed, _nodes(testbed, identity_file=str(key)), ask_passphrase=ask)
    assert report.is_ok
    assert asked == [threading.get_ident()]


def test_examination_can_be_stopped(testbed: Testbed) -> None:
    testbed.cut("h0", "notebook")
    stop = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    stop.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        _examine(testbed)
    assert time.monotonic() - began < 6
    stop.join()


# ---- Python and torch


def _with_python(testbed: Testbed, python: str) -> list[Node]:
    first, *others = _nodes(testbed)
    return [first.model_copy(update={"python": python}), *others]


def test_missing_python_is_one_cell(testbed: Testbed) -> None:
    report = _examine(testbed, _with_python(testbed, "nopython"))
    assert _states(report, "h0") == {"python": "bad"}
    assert "nopython: not found" in report.cell("python", "h0").text
    assert "set python of this node" in report.cell("python", "h0").text
    assert report.cell("ssh", "h0").state == "good"
    assert report.cell("torch", "h1").state == "good"


def test_python_without_torch_is_told_what_the_others_have(testbed: Testbed, make_python: Callable[[str], str]) -> None:
    import torch

    python = make_python(f'exec {sys.executable} -I -S "$@"')
    report = _examine(testbed, _with_python(testbed, python))
    assert {check for check, state in _states(report, "h0").items() if state == "bad"} == {"torch"}
    [problem] = [problem for problem in report.problems if not problem.is_warning]
    assert "missing" in problem.what
    remote = shlex.split(problem.command)
    assert remote[:2] == ["ssh", "h0"]
    assert shlex.split(remote[2])[:5] == [python, "-m", "pip", "install", f"torch=={torch.__version__}"]
    assert "the notebook's is copied automatically" in report.cell("IPython", "h0").text
    assert report.cell("reaches", "h0").state == "good"


@pytest.mark.parametrize(("version", "state"), [("1.13.1+cu117", "bad"), ("patch", "warning")])
def test_other_torch_is_said_with_both_versions(
    version: str, state: str, testbed: Testbed, home: Path, make_python: Callable[[str], str]
) -> None:
    import torch

    here = str(torch.__version__)
    version = version if version != "patch" else ".".join([*here.split(".")[:2], "99"])
    (home / "other/torch").mkdir(parents=True)
    (home / "other/torch/__init__.py").write_text("raise RuntimeError('it was imported')")
    (home / "other/torch/version.py").write_text(
        f"from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = '11.7'\n"
    )
    python = make_python(f'PYTHONPATH=$HOME/other exec {sys.executable} "$@"')
    nodes = _with_python(testbed, python)
    report = _examine(testbed, nodes[::-1])  # on a tie, the first host counts as correct
    assert report.cell("torch", "h0").state == state
    assert report.cell("torch", "h0").text == f"{version}, but h1 has {here}"
    assert f"torch=={here}" in report.cell("torch", "h0").command
    assert report.cell("torch", "h1").state == "good"
    assert report.cell("CUDA", "h0").text == "11.7"


def test_most_hosts_decide_which_torch_is_right(make_testbed: MakeTestbed) -> None:
    testbed = make_testbed(3)
    home = testbed.path_home("h0")
    (home / "torch").mkdir()
    (home / "torch/version.py").write_text("__version__ = '1.0.0'\n")
    (home / "torch/__init__.py").touch()
    (home / "python").write_text(f'#!/bin/sh\nPYTHONPATH=$HOME exec {sys.executable} "$@"\n')
    (home / "python").chmod(0o755)
    report = _examine(testbed, _with_python(testbed, f"{testbed.inventory.user_home}/python"))
    assert [(problem.host, problem.check) for problem in report.problems if not problem.is_warning] == [("h0", "torch")]


def test_setup_lines_that_fail_are_one_cell(testbed: Testbed) -> None:
    first, second = _nodes(testbed)
    report = _examine(testbed, [first.model_copy(update={"setup": ("echo no such module; false",)}), second])
    assert _states(report, "h0") == {"python": "bad"}
    assert "the setup lines failed: no such module" in report.cell("python", "h0").text
    assert report.cell("torch", "h1").state == "good"


# ---- the output of a host is not trusted


def _facts(**fields: Any) -> dict[str, Any]:
    """Return the facts of a healthy host, with some fields replaced."""
    disk = {"path": "/x", "total": 500 * GB, "free": 400 * GB}
    return {
        "type": "look",
        "python": "/usr/bin/python3",
        "python_version": [3, 12, 1],
        "system": "Linux 6.1 x86_64",
        "host": "far",
        "descriptors": 1024,
        "reached_at": "",
        "torch": {"version": "2.9.1", "cuda": "12.8", "nccl": "2.27.5"},
        "ipython": {"version": "9.0"},
        "gpus": {"gpus": [], "driver": "", "cuda": "", "visible": ""},
        "home": disk,
        "tmp": disk,
        "shm": disk,
        "folder": {"path": "/h/.cache/detrain_nb", "state": "private", "other": "/tmp/o", "other_state": "absent"},
        "memory": {"total": 64 * GB, "available": 60 * GB, "limit": None},
        "processors": {"count": 16, "usable": 16, "limit": None},
        "addresses": {"addresses": [["lo", "127.0.0.1"]]},
        "logout": {"kills": False, "lingers": False, "user": "alice"},
        **fields,
    }


@pytest.fixture
def examine_liar(testbed: Testbed, home: Path, make_python: Callable[[str], str]) -> Callable[..., Report]:
    """Return a function that examines both hosts; h0 prints the given output and then waits."""

    def examine_it(*lines: object, raw: bytes = b"", **options: Any) -> Report:
        ends = [{"type": "failed", "text": "it has no more to say"}] * 3  # otherwise the doctor would wait for more
        said = raw or MAGIC.encode() + b"".join(json.dumps(line).encode() + b"\n" for line in (*lines, *ends))
        (home / "said").write_bytes(said)
        nodes = _with_python(testbed, make_python("cat $HOME/said; exec cat >/dev/null"))
        if options:
            nodes[0] = nodes[0].model_copy(update=options)
        return _examine(testbed, nodes)

    return examine_it


def test_hostile_texts_are_escaped_and_lose_control_characters(examine_liar: Callable[..., Report]) -> None:
    evil = "<script>alert(1)</script>\x1b[2J\u202e\n- h1, torch: forged"
    gpu = {"name": evil, "total": 80 * GB, "used": GB, "users": [{"pid": 1, "user": evil, "command": evil, "used": GB}]}
    report = examine_liar(
        _facts(
            host=evil,
            python=evil,
            torch={"version": evil, "cuda": evil, "nccl": evil},
            ipython={"version": evil},
            gpus={"gpus": [gpu], "driver": evil, "cuda": evil, "visible": evil},
            home={"error": evil},
            folder={"path": f"/x'; {evil}", "state": "loose", "other": evil, "other_state": evil},
        ),
        {"type": "failed", "text": evil},
    )
    text, html = repr(report), report._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    for shown in (text, html):
        assert all(char.isprintable() or char == "\n" for char in shown)
    assert not any(line.startswith("- h1") for line in text.splitlines())
    [problem] = [problem for problem in report.problems if problem.check == "cache folder"]
    remote = shlex.split(problem.command)
    assert remote[:2] == ["ssh", "h0"]
    assert len(shlex.split(remote[2])) == 3
    assert shlex.split(remote[2])[:2] == ["chmod", "700"]
    assert report.cell("torch", "h1").state == "good"


UNREADABLE = {
    "a list for a text": {"host": ["far"]},
    "a text for a number": {"memory": {"total": "1", "available": 1, "limit": None}},
    "a bool for a number": {"memory": {"total": True, "available": 1, "limit": None}},
    "not a number": {"memory": {"total": float("nan"), "available": 1, "limit": None}},
    "infinity": {"shm": {"path": "/", "total": float("inf"), "free": 1}},
    "a negative number": {"shm": {"path": "/", "total": -1, "free": 1}},
    "too many GPUs": {"gpus": {"gpus": [{}] * 1000, "driver": "", "cuda": "", "visible": ""}},
    "no address": {"addresses": {"addresses": [["eth0", "example.org"]]}},
    "an address that is no pair": {"addresses": {"addresses": [1]}},
    "a version of two numbers": {"python_version": [3, 12]},
    "a part that is none": {"home": None},
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_facts_that_do_not_fit_are_one_cell(case: str, examine_liar: Callable[..., Report]) -> None:
    report = examine_liar(_facts(**UNREADABLE[case]))
    assert _states(report, "h0") == {"python": "bad"}
    assert "the host's answer is invalid" in report.cell("python", "h0").text
    assert report.cell("torch", "h1").state == "good"


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (MAGIC.encode() + b"x" * (2 << 20), "a line of more than 1048576 bytes"),
        (b"y\n" * (1 << 20), "printed more than 65536 bytes before our program"),
        (MAGIC.encode() + b"{" * 5000 + b"\n", "invalid message from our program on the node"),
        (MAGIC.encode() + b"[" * 200_000 + b"\n", "invalid message from our program on the node"),
        (MAGIC.encode() + b'{"type": "clock", "time": 1}\n', "sent 'clock' instead of 'look'"),
    ],
    ids=["line", "prologue", "braces", "depth", "type"],
)
def test_what_is_no_answer_is_one_cell(raw: bytes, complaint: str, examine_liar: Callable[..., Report]) -> None:
    report = examine_liar(raw=raw)
    assert _states(report, "h0") == {"python": "bad"}
    assert complaint in report.cell("python", "h0").text
    assert report.cell("torch", "h1").state == "good"


def test_old_python_is_said_with_its_version(examine_liar: Callable[..., Report]) -> None:
    report = examine_liar(_facts(python_version=[3, 8, 18]))
    assert "3.8.18 (/usr/bin/python3) is too old" in report.cell("python", "h0").text
    assert "3.10 or newer" in report.cell("python", "h0").advice


def test_gpus_their_memory_and_who_uses_them_are_said(examine_liar: Callable[..., Report]) -> None:
    free = {"name": "NVIDIA H200", "total": 150 * GB, "used": GB // 10, "users": []}
    user = {"pid": 77, "user": "bob", "command": "python", "used": 20 * GB}
    taken = {**free, "used": 21 * GB, "users": [user]}
    gpus = {"gpus": [free, taken], "driver": "525.60", "cuda": "11.8", "visible": ""}
    report = examine_liar(_facts(gpus=gpus), devices=(0, 2))
    assert report.cell("GPUs", "h0").text == "2 GPUs, but devices lists 2"
    assert report.cell("GPU use", "h0") == Cell(
        "GPU 1: 21.0 GB by bob: python (pid 77, 20.0 GB)", "warning", "choose other devices, or ask the users"
    )
    assert report.cell("CUDA", "h0").state == "bad"
    assert "12.8 (driver 525.60, up to CUDA 11.8): the driver is too old" in report.cell("CUDA", "h0").text
    assert report.measured_nodes()[0].memory_gb == 150 * GB / 1e9, "of a GPU"


def test_little_room_and_small_shares_are_warnings(examine_liar: Callable[..., Report]) -> None:
    report = examine_liar(
        _facts(
            home={"path": "/h", "total": 500 * GB, "free": 10**8},
            tmp={"error": "Input/output error"},
            shm={"path": "/dev/shm", "total": 64 << 20, "free": 64 << 20},
            memory={"total": 64 * GB, "available": 60 * GB, "limit": 10**8},
            processors={"count": 16, "usable": 16, "limit": 0.5},
            descriptors=32,
        )
    )
    states = _states(report, "h0")
    checks = ("home", "/tmp", "/dev/shm", "memory", "processors", "open files")
    assert {states[check] for check in checks} == {"warning"}
    assert "unknown: Input/output error" in report.cell("/tmp", "h0").text
    assert "--shm-size" in report.cell("/dev/shm", "h0").advice
    assert "its cgroup allows 0.5" in report.cell("processors", "h0").text
    assert report.measured_nodes()[0].memory_gb == 0.1, "what its cgroup allows"


@pytest.mark.parametrize("mount", ["-o ro", "-o size=4k"], ids=["it cannot be written", "it is full"])
def test_shared_memory_that_ranks_cannot_use_is_a_problem(mount: str, testbed: Testbed) -> None:
    testbed.output("h0", f"mount -t tmpfs {mount} none /dev/shm")
    try:
        testbed.exec("h0", "head -c 9000 /dev/zero >/dev/shm/x")
        report = _examine(testbed)
        with pytest.raises(LaunchError, match=r"the ranks did not start: .*/dev/shm cannot be used \(.*mode=1777"):
            Session.start(1, nodes=ssh_nodes(testbed, 1), device="cpu", sync=False)
    finally:
        testbed.output("h0", "umount /dev/shm")
    assert [(problem.host, problem.check) for problem in report.problems if not problem.is_warning] == [
        ("h0", "/dev/shm")
    ]


def test_few_open_files_are_a_warning(testbed: Testbed) -> None:
    nodes = [node.model_copy(update={"setup": ("ulimit -Sn 32",)}) for node in _nodes(testbed)[:1]]
    cell = _examine(testbed, nodes).cell("open files", "h0")
    assert (cell.text, cell.state) == ("32 per process", "warning") and "ulimit -n 1024" in cell.advice


# ---- links between the hosts


def test_cut_link_is_a_problem_in_both_directions(testbed: Testbed) -> None:
    testbed.cut("h0", "h1")
    report = _examine(testbed)
    assert not report.is_ok
    found = {(problem.host, problem.what) for problem in report.problems if problem.check == "reaches"}
    assert found == {("h0", "not h1: no answer in time"), ("h1", "not h0: no answer in time")}
    assert all("firewall" in problem.advice for problem in report.problems if problem.check == "reaches")
    assert report.cell("torch", "h0").state == report.cell("torch", "h1").state == "good"
    assert {(node.bandwidth_mbit_s, node.latency_ms) for node in report.measured_nodes()} == {(None, None)}


def test_address_that_a_host_does_not_have_is_said_with_those_it_has(testbed: Testbed) -> None:
    first, second = _nodes(testbed)
    report = _examine(testbed, [first.model_copy(update={"address": "10.9.8.7"}), second])
    assert report.cell("address", "h0").state == "bad"
    assert testbed.hosts[0].ip in report.cell("address", "h0").text
    assert report.cell("reaches", "h0").state == "good"


def test_address_that_others_cannot_reach_is_found(testbed: Testbed) -> None:
    first, second = _nodes(testbed)
    report = _examine(testbed, [first.model_copy(update={"address": "127.0.0.1"}), second])
    assert report.cell("reaches", "h1").state == "bad"
    assert report.cell("reaches", "h0").state == "good"


def test_bandwidth_and_latency_of_a_shaped_link_can_be_saved(make_testbed: MakeTestbed, tmp_path: Path) -> None:
    # The relay keeps up with this rate on a busy machine, too.
    testbed = make_testbed(2, link=Link(delay_s=0.01, rate_bits_per_s=20e6))
    report = _examine(testbed, bandwidth=True)
    assert report.is_ok
    assert len(report.links) == 2
    for link in report.links:
        assert link.bandwidth_mbit_s is not None
        assert 10 < link.bandwidth_mbit_s < 22
        assert link.round_trip_ms is not None
        assert link.round_trip_ms >= 40
    assert "Mbit/s" in report.cell("bandwidth", "h0").text
    assert "Mbit/s" in report.cell("bandwidth from here", "h1").text
    path = tmp_path / "nodes.toml"
    write_nodes(path, report.measured_nodes())
    for node in read_nodes(path):
        assert node.bandwidth_mbit_s is not None
        assert node.latency_ms is not None
        assert 10 < node.bandwidth_mbit_s < 22
        assert node.latency_ms >= 20
    assert [node.name for node in report.measured_nodes()] == ["h0", "h1"]


@pytest.mark.thorough
def test_link_that_is_cut_while_it_is_measured_is_a_warning(testbed: Testbed) -> None:
    def cut(line: str) -> None:
        if line.startswith("measuring bandwidth between"):
            testbed.cut("h0", "h1")

    report = _examine(testbed, bandwidth=True, on_progress=cut)
    assert report.cell("bandwidth", "h0").state == "warning"
    assert "to h1: no answer in time" in report.cell("bandwidth", "h0").text
    assert "bit/s" in report.cell("bandwidth from here", "h1").text


def test_eight_hosts_are_examined_at_once(make_testbed: MakeTestbed) -> None:
    testbed = make_testbed(8)
    testbed.stop_sshd("h5")
    testbed.cut("h2", "h3")
    report = _examine(testbed)
    bad = {(problem.host, problem.check) for problem in report.problems if not problem.is_warning}
    assert bad == {("h5", "ssh"), ("h2", "reaches"), ("h3", "reaches")}
    assert report.cell("reaches", "h2").text == "not h3: no answer in time"
    assert report.cell("reaches", "h0").text == "all 6 others"
    nodes = {node.name: node for node in report.measured_nodes()}
    assert nodes["h5"].latency_ms is None
    assert nodes["h2"].latency_ms is not None


# ---- fixing


def test_fix_closes_our_folder_and_makes_it_where_it_is_missing(testbed: Testbed) -> None:
    loose = testbed.path_home("h0") / ".cache/detrain_nb"
    shutil.rmtree(testbed.path_home("h1") / ".cache", ignore_errors=True)
    shutil.rmtree(loose, ignore_errors=True)
    loose.mkdir(parents=True)
    loose.chmod(0o755)
    try:
        report = _examine(testbed, _with_python(testbed, sys.executable))
        assert _states(report, "h0")["cache folder"] == "warning"
        assert "chmod 700" in report.cell("cache folder", "h0").command
        fixed = fix(report)
        assert stat.S_IMODE(loose.stat().st_mode) == 0o700
        made = testbed.path_home("h1") / ".cache/detrain_nb"
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
        assert [line.split(":")[0] for line in fixed.done] == ["h0", "h1"]
        assert not any(problem.check == "cache folder" for problem in fixed.left)
        assert "fixed on h0: chmod 700" in repr(fixed)
        assert not _states(_examine(testbed), "h0").get("cache folder")
    finally:
        for host in ("h0", "h1"):
            shutil.rmtree(testbed.path_home(host) / ".cache", ignore_errors=True)


def test_fix_leaves_what_is_not_ours_to_the_user(testbed: Testbed, home: Path) -> None:
    (home / ".cache").mkdir(exist_ok=True)
    (home / ".cache/detrain_nb").write_text("a file")
    first, _ = _nodes(testbed)
    report = _examine(testbed, [first, first.model_copy(update={"name": "again", "python": "nopython"})])
    assert "is not a directory" in report.cell("cache folder", "h0").text
    fixed = fix(report)
    assert fixed.done == ()
    assert {problem.check for problem in fixed.left} == {"cache folder", "python"}
    assert (home / ".cache/detrain_nb").read_text() == "a file"
    assert "left for you:\n- h0, cache folder:" in repr(fixed)
