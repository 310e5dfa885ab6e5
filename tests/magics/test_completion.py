"""Tab on the line of a magic: options, and values where the candidates are known; without a kernel or connection."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from detrain_nb.magics.candidates import Candidates
from detrain_nb.magics.completion import route_to_ranks

import detrain_nb.formats
import detrain_nb.spec  # noqa: F401
from detrain_nb.deploy.known import remember
from detrain_nb.jobs.record import Record
from detrain_nb.plan import NodePlan, Plan
from detrain_nb.plan.targets import TARGETS
from detrain_nb.spec.node import Node

_CONFIG = """
Include more/*.conf
Host gpu1 gpu2 gpu-* !gpu9 10.0.0.?   # the lab
  HostName gpu1.example.org
Host "quoted" alias
Match host gpu1 exec "touch /tmp/never"
Host *
  User alice
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with an SSH config and, in it, a notebook's folder, which is the current folder."""
    for name in ("run", "home/.ssh/more", "home/work/conf", "home/work/.hidden"):
        (tmp_path / name).mkdir(parents=True, mode=0o700)
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    monkeypatch.setenv("DETRAIN_NB_RUNTIME_DIR", str(tmp_path / "run"))
    (home / ".ssh/config").write_text(_CONFIG)
    (home / ".ssh/more/lab.conf").write_text("Host included\nPort 2222\n")
    for name in ("nodes.toml", "gpus.json", "my nodes.toml", "train.py", "conf/two.toml"):
        (home / "work" / name).touch()
    monkeypatch.chdir(home / "work")
    monkeypatch.setattr("detrain_nb.magics.candidates._LIMIT_S", 10.0)  # the machine may be busy
    return home


class _Tab:
    """The completions of the magics, in front of a kernel that has none itself."""

    def __init__(self) -> None:
        self.asked_notebook = 0
        self.session: Any = None
        kernel = SimpleNamespace(do_complete=self._complete, do_inspect=None)
        notebook = SimpleNamespace(kernel=kernel, user_ns={"name": 1, "_hidden": 2}, user_ns_hidden={})
        route_to_ranks(notebook, lambda: self.session)
        self._kernel = kernel

    def _complete(self, code: str, cursor_pos: int) -> dict[str, Any]:
        self.asked_notebook += 1
        return {"matches": [], "cursor_start": cursor_pos, "cursor_end": cursor_pos}

    def __call__(self, code: str, *, after: str = "") -> list[str]:
        """The completions of the last word of ``code``; ``after`` is the text after the cursor."""
        reply = self._kernel.do_complete(code + after, len(code))
        assert reply["cursor_end"] == len(code)
        begun = code[reply["cursor_start"] :]
        assert all(match.startswith(begun) for match in reply["matches"])
        found: list[str] = reply["matches"]
        return found


@pytest.fixture
def tab(home: Path) -> _Tab:
    return _Tab()


@pytest.fixture
def tab_with_nodes(tab: _Tab) -> _Tab:
    """The notebook has a session on the nodes ``left`` and ``right``."""
    plan = Plan((NodePlan((0, 1), "cpu", "left"), NodePlan((2, 3), "cpu", "right")), "gloo")
    cells = [SimpleNamespace(cell=cell) for cell in (3, 7, 12)]
    tab.session = SimpleNamespace(ranks=SimpleNamespace(plan=plan), log=SimpleNamespace(cells=cells))
    return tab


_HOSTS = ["alias", "gpu1", "gpu2", "included", "quoted"]


@pytest.mark.parametrize("command", ["start", "attach", "doctor", "attach name", "start -n 2 --no-init"])
@pytest.mark.parametrize("between", [" ", "="])
def test_hosts_and_nodes_files_stand_for_nodes(tab: _Tab, command: str, between: str) -> None:
    found = tab(f"%distributed {command} --nodes{between}")
    start = "--nodes=" if between == "=" else ""
    files = ["conf/", "gpus.json", "my\\ nodes.toml", "nodes.toml"]
    assert found == sorted(start + name for name in [*_HOSTS, "localhost", *files])


def test_nodes_files_stand_for_the_file_of_the_form(tab: _Tab) -> None:
    assert tab("%distributed nodes ") == ["conf/", "gpus.json", "my\\ nodes.toml", "nodes.toml", "--help"]
    assert "nodes" in tab("%distributed n")


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("gp", ["gpu1", "gpu2", "gpus.json"]),
        ("alice@gp", ["alice@gpu1", "alice@gpu2"]),
        ("alice@", [f"alice@{host}" for host in _HOSTS]),
        ("gpu1,", sorted(f"gpu1,{host}" for host in [*_HOSTS, "localhost"] if host != "gpu1")),
        ("localhost,gpu", ["localhost,gpu1", "localhost,gpu2"]),
        ("lo", ["localhost"]),
        ("bob@gpu1,alice@g", ["bob@gpu1,alice@gpu2"]),
        ("gpu1,n", []),
        ("gpu-", []),
        ("gpu1:22", []),
        ("conf/t", ["conf/two.toml"]),
        ("./n", ["./nodes.toml"]),
        ("~/work/n", ["~/work/nodes.toml"]),
        ("my\\ n", ["my\\ nodes.toml"]),
        (".h", [".hidden/"]),
        ("nowhere/x", []),
    ],
)
def test_word_that_was_begun(tab: _Tab, word: str, found: list[str]) -> None:
    assert tab(f"%distributed start --nodes {word}", after=" -n 2") == found


@pytest.mark.parametrize(
    "line",
    [
        "%%distributed -r ", "%%distributed --ranks ", "%%rank ", "%distributed restart -r ",
        "%distributed interrupt --kill ", "%distributed log --rank ", "%distributed replay --cells 1 -r ",
        "%pull x -r ", "%push x,y --ranks ", "%broadcast model -r ", "%distributed put train.py --nodes ",
    ],
)  # fmt: skip
def test_nodes_of_the_session_stand_for_ranks(tab_with_nodes: _Tab, line: str) -> None:
    assert [name for name in tab_with_nodes(line) if not name.startswith("-")] == ["left", "right"]
    assert tab_with_nodes(f"{line}0,le") == ["0,left"]
    assert tab_with_nodes(f"{line}left,") == ["left,right"]


def test_cells_of_the_session_stand_for_their_numbers(tab_with_nodes: _Tab) -> None:
    assert tab_with_nodes("%distributed log --cell ") == ["12", "3", "7"]
    assert tab_with_nodes("%distributed log --cell=1") == ["--cell=12"]
    assert tab_with_nodes("%distributed replay --cells 3,") == ["3,12", "3,7"]


def test_without_a_session_no_node_stands_for_ranks(tab: _Tab) -> None:
    assert tab("%%distributed -r ") == []


def test_sessions_stand_for_names_those_on_nodes_too(tab: _Tab) -> None:
    remember("train", [Node(host="gpu1")], holder="a notebook")
    remember("tune", [Node(host="gpu2")], holder="a notebook")
    options = ["--help", "--nodes", "--steal", "--without"]
    assert tab("%distributed attach ") == ["train", "tune", *options]
    assert tab("%distributed attach tu") == tab("%distributed stop tu") == ["tune"]
    assert tab("%distributed attach --steal t") == ["train", "tune"]
    assert tab("%distributed attach train ") == options
    assert tab("%distributed start --name t") == []


def test_nodes_but_the_first_can_be_left_out(tab: _Tab) -> None:
    remember("train", [Node(host=name) for name in ("gpu1", "gpu2", "gpu3")], holder="a notebook")
    assert tab("%distributed attach train --without ") == ["gpu2", "gpu3"]
    assert tab("%distributed attach --without gpu2,") == ["gpu2,gpu3"]


def test_settings_and_what_they_are_chosen_from(tab: _Tab) -> None:
    assert "board=" in tab("%distributed config ") and tab("%distributed config bo") == ["board="]
    assert tab("%distributed config board=") == ["board=auto", "board=off"]
    assert tab("%distributed config warm=") == tab("%distributed config nosuch=") == []
    assert tab("%distributed boa") == ["board"]


def test_choices_commands_files_and_options(tab: _Tab) -> None:
    assert tab("%distributed start --device ") == ["auto", "cpu", "cuda"]
    assert tab("%distributed start --device=c") == ["--device=cpu", "--device=cuda"]
    assert tab("%%distributed --merge s") == ["same"]
    assert tab("%distributed st") == ["start", "status", "stop"]
    assert tab("%distributed nosuch x") == []
    assert tab("%distributed put train.py co") == ["conf/"]
    assert tab("%distributed data ") == ["check", "--help"]
    assert tab("%distributed start -n ") == []
    assert tab("%distributed start --no-i", after="\n1") == ["--no-init"]
    assert tab.asked_notebook == 0


def test_jobs_specs_and_folders_stand_for_their_names(tab: _Tab, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    for number in (1, 2):
        Record().add(f"train-{number}", name="train", nodes="[]", spec="{}", state="running")
    nodes = '[{"host": "gpu1"}, {"host": "10.0.0.7", "name": "other"}]'
    Record().add("far-1", name="far", nodes=nodes, spec="{}", state="running")
    assert tab("%job logs far -f --node ") == ["gpu1", "other"]
    assert tab("%job logs far --node=g") == ["--node=gpu1"]
    assert tab("%job logs --node ") == tab("%job logs train --node ") == []
    assert "--tail" in tab("%job logs far --")
    assert tab("%job l") == ["list", "logs"]
    assert tab("%job stop ") == ["far", "far-1", "train", "train-1", "train-2", "--grace", "--help"]
    assert tab("%job logs -f train-") == tab("%job fetch train-") == ["train-1", "train-2"]
    assert tab("%job fetch train *.pt --to ") == ["conf/"]
    specs = ["conf/", "gpus.json", "my\\ nodes.toml", "nodes.toml"]
    assert [name for name in tab("%job submit ") if name[:2] != "--"] == specs
    assert tab("%%torchrun --spec ") == specs
    assert "gpu1" in tab("%%torchrun --nodes ")
    assert tab("%%torchrun --fol", after="\n1") == ["--follow"]
    assert tab("%pipeline pl") == ["plan"]
    assert [name for name in tab("%pipeline export ") if name[:2] != "--"] == sorted(TARGETS)
    assert tab("%pipeline export akash a.toml --pr") == ["--price"] and tab("%pipeline export slurm --pr") == []
    assert tab("%pipeline export --pr") == ["--price", "--project"] and tab("%job logs slurm --no") == ["--node"]
    assert tab("%pipeline export akash a.toml --denom ") == ["uact", "uakt"]
    assert tab("%pipeline export --start=s") == ["--start=session"]
    spec = "name = 'a'\nsource.script_text = 'print()'\nnodes = [{host = 'gpu7'}, {host = 'login'}]\n"
    (home / "work" / "my nodes.toml").write_text(spec)
    assert tab("%pipeline export accelerate my\\ nodes.toml --node ") == ["gpu7", "login"]
    assert tab("%job logs far accelerate --node=g") == ["--node=gpu1"]
    assert tab("%pipeline import --from ss") == ["ssh_config"]
    assert "gpus.json" in tab("%pipeline import ")
    assert tab("%job submit a.toml --trai") == ["--training."]
    assert tab("%job submit --training.lo") == ["--training.log_every", "--training.loss"]
    assert tab("%job submit --checkpoint.k") == ["--checkpoint.keep"]
    assert tab("%job submit --source.g") == ["--source.git."]
    assert "--source.git.ref" in tab("%%torchrun --source.git.")
    assert tab("%job submit --nodes.") == tab("%job submit --no.such") == tab("%job stop --trai") == []
    assert tab.asked_notebook == 0


def test_names_of_the_notebook_can_be_pushed(tab: _Tab) -> None:
    assert tab("%push na") == ["name"]
    assert tab("%push ") == ["name", "--help", "--ranks"]
    assert tab("%pull na") == [], "there is no session"


@pytest.mark.parametrize("line", ["%time x", "x = gp", "%distributed"])
def test_names_of_the_notebook_are_its_own_business(tab: _Tab, line: str) -> None:
    assert tab(line) == []
    assert tab.asked_notebook == 1


@pytest.mark.parametrize("config", ["Include config", 'Host "gpu1', "Match", "\0", "Host gpu1\nInclude ["])
def test_config_that_cannot_be_read_leaves_the_files(tab: _Tab, home: Path, config: str) -> None:
    (home / ".ssh/config").write_text(config)
    assert "nodes.toml" in tab("%distributed start --nodes ")


def test_file_that_keeps_us_waiting_is_not_waited_for(tab: _Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, asked = threading.Event(), []

    def read_slowly(path: Path) -> list[str]:
        """Block, as a network file system does whose server is lost."""
        asked.append(path)
        assert is_over.wait(60)
        return []

    monkeypatch.setattr("detrain_nb.magics.candidates.list_hosts", read_slowly)
    monkeypatch.setattr("detrain_nb.magics.candidates._LIMIT_S", 0.05)
    try:
        for _ in range(3):
            assert tab("%distributed start --nodes ") == []
        assert len(asked) == 1, "it is not asked again while it has not answered"
    finally:
        is_over.set()
        for thread in threading.enumerate():
            if thread.name == "detrain_nb completion":
                thread.join(10)


def test_nothing_is_connected_to(tab: _Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError(f"a connection to {args}")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert "gpu1" in tab("%distributed start --nodes ")
    assert tab("%distributed attach ") != []


def test_thousands_of_hosts_are_read_in_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detrain_nb.magics.candidates._LIMIT_S", 0.05)
    text = "".join(f"Host gpu{number}\n  HostName 10.0.0.1\n  User alice\n" for number in range(2000))
    (home / ".ssh/config").write_text(text)
    candidates = Candidates(lambda: None, None)
    deadline = time.monotonic() + 20  # a busy machine may need several tries
    while not (found := candidates.of("NODES", "gpu19")):
        assert time.monotonic() < deadline
    assert len(found) == 111


class _Asked:
    """The ranks of a session; it records which ranks each query is for."""

    def __init__(self) -> None:
        self.were: list[object] = []

    def complete(self, code: str, position: int, *, ranks: object = None) -> None:
        self.were.append(ranks)

    def inspect(self, name: str, detail: int, *, ranks: object = None) -> str:
        self.were.append(ranks)
        return "help"


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("%%distributed", [None]),
        ("%%distributed -r 1 --quiet", ["1"]),
        ("%%rank gpu2", ["gpu2"]),
        ("%%rank --what", []),
    ],
)
def test_text_of_a_cell_goes_to_the_ranks_it_is_meant_for(line: str, ranks: list[object]) -> None:
    tab = _Tab()
    tab.session = SimpleNamespace(ranks=_Asked())
    assert tab(f"{line}\nvalue.sh") == []
    tab._kernel.do_inspect(f"{line}\nvalue", len(line) + 3)
    assert tab.session.ranks.were == ranks * 2
