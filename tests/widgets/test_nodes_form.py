"""The form of nodes, driven as its pages do: its requests, its updates, and what pages must not make it do."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from detrain_nb.widgets import nodes_view
from detrain_nb.widgets.node_start import StartTable

from detrain_nb.deploy.start_steps import StartStep
from detrain_nb.errors import SpecError
from detrain_nb.pipelines.draft_form import MOST_NODES
from detrain_nb.pipelines.form_fields import NODE_FIELDS
from detrain_nb.spec import Node
from detrain_nb.spec.nodes_file import read_nodes, write_nodes

from ..testbed.testbed import Testbed
from .page import LIMIT_S, WithPage

RIGHT = {
    "name": "left",
    "host": "gpu1.example.org",
    "port": " 2222 ",
    "user": "alice",
    "identity_file": "~/.ssh/id_ed25519",
    "proxy_jump": "gate, bob@gate2:2200",
    "address": "10.0.0.2",
    "devices": "0, 1",
    "ranks": "2",
    "python": "/opt/venv/bin/python",
    "workdir": "~/work",
    "setup": "module load cuda\n\texport A=1",
    "env": "HF_TOKEN, WANDB_API_KEY",
    "bandwidth_mbit_s": "940.5",
    "latency_ms": "0.25",
    "memory_gb": "80",
    "relative_speed": "1.0",
}
WRONG = {
    "name": "all",
    "host": "two words",
    "port": "70000",
    "user": "-oProxyCommand=x",
    "identity_file": "-i",
    "proxy_jump": "gate:0",
    "address": "0.0.0.0",
    "devices": "0, 0",
    "ranks": "two",
    "python": "-c",
    "workdir": "relative",
    "setup": "echo \x1b[2J",
    "env": "A=1",
    "bandwidth_mbit_s": "0",
    "latency_ms": "-1",
    "memory_gb": "much",
    "relative_speed": "1e999",
}


class _Collecting(WithPage, nodes_view.NodesView):
    """A form of nodes with an open page."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.open_page()

    def waits_for(self, part: str, holds: Callable[[Any], Any]) -> Any:
        """Wait until ``holds`` is true of a part of the state; returns the part."""
        deadline = time.monotonic() + LIMIT_S
        while not holds(value := self.state()[part]):
            assert time.monotonic() < deadline, value
            time.sleep(0.02)
        return value

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The nodes as sent to pages: key, words, and the text and the error of each field."""
        told = self.state()["form"]
        return [
            {
                **told["nodes"][key],
                "key": key,
                "typed": typed,
                **{name: _of_node(told[name], key) for name in ("errors", "warnings")},
            }
            for key, typed in zip(told["rows"], told["draft"].get("nodes", []))
        ]

    def adds(self, **typed: str) -> str:
        key: str = self.asks("change_nodes", do="add", key="")
        self.types(key, **typed)
        return key

    def types(self, key: str, *, page: str = "p", revision: int | None = None, **typed: str) -> list[int | None]:
        """Return the answer for each field: the revision that includes it, or None for a conflict."""
        seen = self._form.revision if revision is None else revision
        paths = {f"nodes[{key}].{field}": text for field, text in typed.items()}
        return [
            self.asks("edit", page, path=path, typed=text, revision=seen, editor=page) for path, text in paths.items()
        ]


def _of_node(found: dict[str, str], key: str) -> dict[str, str]:
    at = f"nodes[{key}]"
    return {path.removeprefix(at).removeprefix("."): said for path, said in found.items() if path.startswith(at)}


@pytest.fixture
def make_view() -> Iterator[Callable[..., _Collecting]]:
    views: list[_Collecting] = []

    def make(*args: Any, **kwargs: Any) -> _Collecting:
        views.append(_Collecting(*args, **kwargs))
        return views[-1]

    yield make
    for view in views:
        view.close()
        view.wait_until_idle()
        if view.session is not None:
            view.session.stop(cold=True)


@pytest.fixture
def view(make_view: Callable[..., _Collecting]) -> _Collecting:
    return make_view()


def test_right_values_in_every_field_are_the_node_that_a_file_keeps(view: _Collecting, tmp_path: Path) -> None:
    assert RIGHT.keys() == WRONG.keys() == NODE_FIELDS.keys() == Node.model_fields.keys()
    view.adds(**RIGHT)
    [node] = view.nodes
    assert node == Node(
        name="left",
        host="gpu1.example.org",
        port=2222,
        user="alice",
        identity_file="~/.ssh/id_ed25519",
        proxy_jump="gate,bob@gate2:2200",
        address="10.0.0.2",
        devices=[0, 1],
        ranks=2,
        python="/opt/venv/bin/python",
        workdir="~/work",
        setup=["module load cuda", "\texport A=1"],
        env=["HF_TOKEN", "WANDB_API_KEY"],
        bandwidth_mbit_s=940.5,
        latency_ms=0.25,
        memory_gb=80.0,
        relative_speed=1.0,
    )
    view.nodes = [node]
    assert view.nodes == [node]
    assert "nodes.toml has 1 node" in view.asks("save", path=str(tmp_path / "nodes.toml"), over="")["said"]
    assert read_nodes(tmp_path / "nodes.toml") == (node,)
    shown = view.rows[0]
    assert (shown["label"], shown["where"], shown["offers"]) == (
        "left",
        "alice@gpu1.example.org:2222",
        "2 GPUs, 2 ranks",
    )


@pytest.mark.parametrize("field", WRONG)
def test_wrong_value_is_told_at_its_field_and_stays_as_it_was_typed(view: _Collecting, field: str) -> None:
    row = view.adds(host="gpu1")
    view.types(row, **{field: WRONG[field]})
    [shown] = view.rows
    assert shown["typed"][field] == WRONG[field]
    assert list(shown["errors"]) == [field]
    assert "give" in shown["errors"][field] or ":" in shown["errors"][field]
    with pytest.raises(SpecError, match=NODE_FIELDS[field].title):
        view.nodes  # noqa: B018
    with pytest.raises(RuntimeError, match=NODE_FIELDS[field].title):
        view.asks("start")
    with pytest.raises(RuntimeError, match="correct the fields"):
        view.asks("test", keys=[row])
    view.types(row, **{field: RIGHT[field]})
    assert view.rows[0]["errors"] == {}


def test_what_several_fields_have_to_do_with_each_other_is_told_of_the_node(view: _Collecting) -> None:
    view.adds(host="gpu1", devices="0", ranks="2")
    assert view.rows[0]["errors"] == {"": "ranks 2 but devices has 1 GPU, one for each rank: leave out ranks"}


def test_twins_are_told_with_what_to_do(view: _Collecting) -> None:
    for _ in range(2):
        view.adds(host="gpu1")
    [[where, twins]] = view.state()["form"]["faults"]
    assert where == "nodes" and twins.startswith("nodes 1 and 2 have the same name 'gpu1': give each its own name")
    with pytest.raises(SpecError, match="same name"):
        view.nodes  # noqa: B018
    view.asks("change_nodes", do="remove", key=view.rows[1]["key"])
    view.asks("change_nodes", do="add_here", key="")
    view.asks("change_nodes", do="add_here", key="")
    assert "both this machine" in view.state()["form"]["faults"][0][1]


@pytest.mark.parametrize(
    "text",
    ["<img src=x onerror=alert(1)>", "a\x1b]0;owned\x07b", "\u202egnp.exe", "x\r\ny", "\x00", "\ud800", "'\"`$(id)"],
)
def test_hostile_text_stays_text(view: _Collecting, text: str) -> None:
    view.adds(host=text, name=text)
    [shown] = view.rows
    assert shown["typed"]["host"] == text.replace("\ud800", "\ufffd\ufffd\ufffd")
    told = [shown["label"], shown["where"], *shown["errors"].values(), repr(view), *view.settled().bundle().values()]
    for line in told:
        assert not any(char in line for char in "\x1b\x07\x00\r\u202e")
    assert "<img" not in view.settled().html
    assert set(shown["errors"]) == {"host", "name"}


def test_line_with_hidden_characters_is_named_and_still_a_node(view: _Collecting) -> None:
    row = view.adds(host="gpu1", setup="pip install\u200b torch")
    said = "has characters that are invisible, or change the direction of text: U+200B"
    assert view.rows[0]["warnings"] == {"setup": said} and len(view.nodes) == 1
    view.types(row, setup="pip install torch")
    assert view.rows[0]["warnings"] == {}


def test_what_a_page_may_send_is_bounded(view: _Collecting) -> None:
    row = view.adds()
    right = {"path": f"nodes[{row}].host", "typed": "x", "revision": 0, "editor": "p"}
    for wrong in (
        {**right, "typed": "x" * 200_001},
        {**right, "typed": ["x"]},
        {**right, "revision": -1},
        {**right, "revision": True},
        {name: right[name] for name in ("path", "typed", "revision")},
    ):
        with pytest.raises(RuntimeError, match="edit"):
            view.asks("edit", **wrong)
    for path in (f"nodes[{row}].model_config", f"nodes[{row}]", "nodes", "nodes[n0].host"):
        with pytest.raises(RuntimeError, match=r"is not a field|no such node"):
            view.asks("edit", **{**right, "path": path})
    assert view.rows[0]["typed"] == {}
    with pytest.raises(RuntimeError, match="test: keys"):
        view.asks("test", keys=[row] * (MOST_NODES + 1))
    view._form.add_nodes(Node(host=f"n{number}") for number in range(MOST_NODES - 1))
    for do in ("add", "copy"):
        with pytest.raises(RuntimeError, match=f"at most {MOST_NODES} nodes"):
            view.asks("change_nodes", do=do, key=row)
    view.asks("change_nodes", do="remove", key=row)
    with pytest.raises(SpecError, match="at most"):
        view._form.add_nodes([Node(host="x"), Node(host="y")])
    assert len(view.nodes) == MOST_NODES - 1  # all or none are added
    with pytest.raises(SpecError, match="or the path of a nodes file"):
        view.nodes = [3]
    with pytest.raises(SpecError, match=f"at most {MOST_NODES}"):
        view.nodes = [Node(host=f"n{number}") for number in range(MOST_NODES + 1)]


def test_rows_are_added_copied_moved_removed_and_brought_back(view: _Collecting) -> None:
    first = view.adds(host="gpu1", user="alice", name="one")
    second = view.adds(host="gpu2")
    copy = view.asks("change_nodes", do="copy", key=first)
    assert [row["key"] for row in view.rows] == [first, copy, second]
    assert view.rows[1]["typed"] == {"host": "gpu1", "user": "alice"}
    for key, do in [(second, "up"), (first, "up"), (copy, "down")]:  # the first and the last one do not move
        view.asks("change_nodes", do=do, key=key)
    assert [row["key"] for row in view.rows] == [first, second, copy]
    view.asks("change_nodes", do="remove", key=second)
    assert view.state()["form"]["undo"] == "gpu2 was removed."
    with pytest.raises(RuntimeError, match="was removed"):
        view.asks("change_nodes", do="remove", key=second)
    assert view.types(second, host="gpu22", revision=0) == [None], "typed in a page that has not heard of it"
    assert view.asks("change_nodes", do="undo", key="") == second
    assert [row["key"] for row in view.rows] == [first, second, copy]
    view.asks("resolve", path=f"nodes[{second}].host", keep="mine", editor="p")
    assert view.rows[1]["typed"]["host"] == "gpu22"
    for key in (first, second, copy):
        view.asks("change_nodes", do="remove", key=key)
    view._form.restore_node(second)  # a page may restore it by resolving a conflict
    assert [view.asks("change_nodes", do="undo", key="") for _ in range(2)] == [copy, first]
    assert {row["key"] for row in view.rows} == {first, second, copy}
    for key in view._form.add_nodes([Node(host=f"n{number}") for number in range(30)]):
        view.asks("change_nodes", do="remove", key=key)
    brought = [view.asks("change_nodes", do="undo", key="") for _ in range(20)]
    assert len(set(brought)) == 20 and len(view.rows) == 23, "no more are kept"
    with pytest.raises(RuntimeError, match="nothing to undo"):
        view.asks("change_nodes", do="undo", key="")


def test_what_two_pages_type_into_a_field_is_shown_and_nothing_is_lost(view: _Collecting) -> None:
    row = view.adds()
    view.hears("hello", "q")
    seen = view._form.revision
    assert view.types(row, host="mine", revision=seen) == [seen + 1]
    for late in ("yours", "yours2"):  # this page has not seen the other edit, and repeats its own
        assert view.types(row, page="q", revision=seen, host=late) == [None]
    [conflict] = view.state()["form"]["conflicts"]
    assert conflict == {"path": f"nodes[{row}].host", "theirs": "mine", "mine": "yours2", "editor": "q"}
    assert view.rows[0]["typed"] == {"host": "mine"}
    assert view.types(row, page="q", revision=seen, user="bob") != [None], "another field is no conflict"
    view.asks("resolve", path=conflict["path"], keep="mine", editor="q")
    assert view.rows[0]["typed"] == {"host": "yours2", "user": "bob"} and not view.state()["form"]["conflicts"]
    view.types(row, host="ours")
    assert view.rows[0]["typed"]["host"] == "ours"


def test_nodes_are_set_from_a_cell_and_that_can_be_undone(
    make_view: Callable[..., _Collecting], tmp_path: Path
) -> None:
    view = make_view([Node(host="gpu1")])
    assert view.nodes == [Node(host="gpu1")]
    view.nodes = [Node(host="gpu2"), Node(host="gpu3")]
    assert [node.host for node in view.nodes] == ["gpu2", "gpu3"]
    view.asks("change_nodes", do="undo", key="")
    assert view.nodes == [Node(host="gpu1")]
    write_nodes(tmp_path / "nodes.yaml", [Node(host="gpu4", setup=["a", "b"])])
    view.nodes = tmp_path / "nodes.yaml"
    assert view.nodes == [Node(host="gpu4", setup=["a", "b"])]
    assert view.state()["form"]["file"] == str(tmp_path / "nodes.yaml")


def test_file_is_opened_added_and_a_broken_one_changes_nothing(view: _Collecting, tmp_path: Path) -> None:
    path = str(tmp_path / "nodes.toml")
    write_nodes(path, [Node(host="gpu1", user="alice"), Node(host="gpu2")])
    view.adds(host="mine")
    assert view.asks("open_nodes", path=path, is_added=True) == {"nodes": 2, "left_out": [], "more": 0}
    assert [node.host for node in view.nodes] == ["mine", "gpu1", "gpu2"]
    assert view.asks("open_nodes", path=path, is_added=False)["nodes"] == 2
    assert [node.host for node in view.nodes] == ["gpu1", "gpu2"]
    assert "replaced by those of" in view.state()["form"]["undo"]
    assert not view.state()["form"]["is_changed"]
    view.types(view.rows[0]["key"], user="bob")
    assert view.state()["form"]["is_changed"]
    (tmp_path / "broken.toml").write_text("[[nodes]]\nport = 1\n")
    for wrong, said in {
        str(tmp_path / "broken.toml"): "host is missing",
        str(tmp_path / "none.toml"): "none.toml",
        str(tmp_path): "cannot be read",
        " ": "give a file name",
    }.items():
        with pytest.raises(RuntimeError, match=said):
            view.asks("open_nodes", path=wrong, is_added=False)
    assert [row["typed"]["host"] for row in view.rows] == ["gpu1", "gpu2"]
    view.asks("change_nodes", do="undo", key="")
    assert [node.host for node in view.nodes] == ["mine", "gpu1", "gpu2"]


def test_files_of_other_tools_are_opened_and_not_written_over(view: _Collecting, tmp_path: Path) -> None:
    (hosts := tmp_path / "hostfile").write_text("gpu1 rack=7\ngpu2\n")
    view.adds(host="mine")
    added = view.asks("open_nodes", path=str(hosts), is_added=True)
    assert added == {"nodes": 2, "left_out": ["rack (line 1): a spec has no field for it"], "more": 0}
    assert [node.host for node in view.nodes] == ["mine", "gpu1", "gpu2"]
    way = {"host": "provider.example.org", "port": 2222, "externalPort": 31022}
    (lease := tmp_path / "lease.json").write_text(json.dumps({"forwarded_ports": {"node-0": [way]}}))
    view.asks("open_nodes", path=str(lease), is_added=False)
    assert view.nodes == [Node(name="node-0", host="provider.example.org", port=31022, user="trainer")]
    assert view.state()["form"]["file"] == "", "what is saved is no lease"
    assert "already exists" in view.asks("save", path=str(lease), over="")["ask"]
    view.asks("save", path=str(tmp_path / "nodes.toml"), over="")
    assert read_nodes(tmp_path / "nodes.toml") == tuple(view.nodes)
    (tmp_path / "job.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nsteps = 3\n')
    with pytest.raises(RuntimeError, match=r"\(torchtitan\) contains no nodes"):
        view.asks("open_nodes", path=str(tmp_path / "job.toml"), is_added=True)
    (tmp_path / "notes.txt").write_text("hello to all\n")
    with pytest.raises(RuntimeError, match=r"^notes\.txt is neither a nodes file \(\.json.*\) nor a lease, hostfile"):
        view.asks("open_nodes", path=str(tmp_path / "notes.txt"), is_added=True)


def test_no_file_is_written_over_that_was_not_read_as_it_is(view: _Collecting, tmp_path: Path) -> None:
    path, other = tmp_path / "nodes.toml", tmp_path / "notes.toml"
    view.adds(host="gpu1")
    view.asks("save", path=str(path), over="")
    view.types(view.rows[0]["key"], user="alice")
    assert "said" in view.asks("save", path=str(path), over="")  # unchanged since we saved it
    path.write_text("# theirs\n" + path.read_text())
    asked = view.asks("save", path=str(path), over="")
    assert "has changed since it was read" in asked["ask"]
    path.write_text("# theirs again\n" + path.read_text())
    again = view.asks("save", path=str(path), over=asked["over"])
    assert "ask" in again and "theirs again" in path.read_text()
    said = view.asks("save", path=str(path), over=again["over"])["said"]
    assert said.endswith("nodes.toml.before")
    assert "theirs again" in Path(f"{path}.before").read_text()
    assert read_nodes(path) == (Node(host="gpu1", user="alice"),)
    path.write_text("# theirs, the third\n" + path.read_text())
    third = view.asks("save", path=str(path), over="")
    assert view.asks("save", path=str(path), over=third["over"])["said"].endswith("nodes.toml.before-2")
    assert "theirs again" in Path(f"{path}.before").read_text(), "what was kept first is there as well"
    assert "the third" in Path(f"{path}.before-2").read_text()
    other.write_text("title = 'no nodes'\n")
    asked = view.asks("save", path=str(other), over="")
    assert "already exists" in asked["ask"] and "no nodes" in other.read_text()
    view.asks("save", path=str(other), over=asked["over"])
    assert read_nodes(other) == read_nodes(path)


def test_what_is_wrong_is_not_saved(view: _Collecting, tmp_path: Path) -> None:
    view.adds(host="gpu1", port="x")
    with pytest.raises(RuntimeError, match="gpu1, Port: 'x': give a number"):
        view.asks("save", path=str(tmp_path / "nodes.toml"), over="")
    view.types(view.rows[0]["key"], port="")
    with pytest.raises(RuntimeError, match="must end in one of"):
        view.asks("save", path=str(tmp_path / "nodes.txt"), over="")
    with pytest.raises(RuntimeError):
        view.asks("save", path=str(tmp_path / "no folder" / "nodes.toml"), over="")
    assert list(tmp_path.iterdir()) == []


def test_hosts_of_the_ssh_config_are_listed_and_taken_by_name(
    view: _Collecting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    config = tmp_path / ".ssh" / "config"
    config.write_text(
        "Host gpu1\n  HostName gpu1.example.org\n  User alice\n"
        "Host gpu2\n  Port 2222\n  User bob\n  ProxyJump gate\n"
        "Host odd\n  ProxyCommand nc %h\nHost *.example.org <b>x</b>\n  User all\n"
        f"Match exec 'touch {tmp_path}/was-run'\n  User of-command\n"
    )
    view.adds(host="gpu1")
    listed = view.asks("list_hosts")
    hosts = {host.pop("name"): host for host in listed["hosts"]}
    assert hosts["gpu1"] == {"where": "alice@gpu1.example.org", "jump": "", "fault": "", "is_there": True}
    assert hosts["gpu2"] == {"where": "bob@gpu2:2222", "jump": "gate", "fault": "", "is_there": False}
    assert "ProxyCommand" in hosts["odd"]["fault"]
    assert listed["more"] == 0 and view.state()["num_hosts"] == 3
    assert not (tmp_path / "was-run").exists(), "to list hosts runs no command"
    [row] = view.asks("import_hosts", names=["gpu2"])
    assert view.rows[1]["key"] == row
    assert view.nodes[1] == Node(host="gpu2")
    with pytest.raises(RuntimeError, match="is no longer in"):
        view.asks("import_hosts", names=["gpu9"])
    config.chmod(0o666)
    with pytest.raises(RuntimeError, match="others can write"):
        view.asks("list_hosts")


def test_start_that_fails_is_told_at_its_node_and_nothing_is_left(view: _Collecting) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        row = view.adds()
        view.types(row, host="127.0.0.1", port=str(port), name="away", python=sys.executable)
        view.asks("start")
        start = view.waits_for("start", lambda start: start["is"] not in ("none", "running"))
    assert start["is"] == "failed"
    assert list(start["errors"]) == [str(row)]
    assert "127.0.0.1" in start["errors"][str(row)]
    assert [cell["is"] for cell in start["table"][0]["cells"]] == ["failed", "idle", "idle", "idle"]
    assert view.session is None
    view.types(row, port="")  # the form is as before


def test_table_of_a_start_says_who_waits_for_whom_and_what_has_stopped() -> None:
    table = StartTable(["a", "b", "c", "d", "e", "f"])
    assert {cell["is"] for row in table.told() for cell in row["cells"]} == {"idle"}
    table.take(StartStep("nobody", "connect", "done"))
    table.take(StartStep("a", "ranks", "done", 4, 4))
    table.take(StartStep("b", "ranks", "running", 1, 4))
    first, second = table.told()[:2]
    assert [cell["is"] for cell in first["cells"]] == ["done", "done", "done", "wait"]
    assert first["cells"][3]["text"] == "for b, c, d and 2 more"
    assert second["cells"][2] == {"is": "running", "text": "1 of 4", "share": 0.25}
    table.take(StartStep("b", "ranks", "failed", error="no\x1b[2J room\u202e"))
    assert "\x1b" not in table.errors["b"] and "\u202e" not in table.errors["b"]
    table.take(StartStep("c", "connect", "running"))
    table.stop()
    assert [row["cells"][0]["is"] for row in table.told()] == ["done", "done", "stopped", "idle", "idle", "idle"]
    assert table.told()[0]["cells"][3]["is"] == "idle"


def on_start_told(view: _Collecting, monkeypatch: pytest.MonkeyPatch, hear: Callable[[dict[str, Any]], object]) -> None:
    """Call ``hear`` with each update about a start; pages receive only the last one of a turn."""
    publish = view.publish

    def publish_and_tell(part: str, value: Any) -> None:
        publish(part, value)
        if part == "start":
            hear(value)

    monkeypatch.setattr(view, "publish", publish_and_tell)


@pytest.mark.slow
def test_session_is_started_told_phase_by_phase_and_settles_to_a_line(
    view: _Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    on_start_told(view, monkeypatch, told.append)
    with pytest.raises(RuntimeError, match="add a node first"):
        view.asks("start")
    view.asks("change_nodes", do="add_here", key="")
    view.asks("start")
    with pytest.raises(RuntimeError, match="the start is still running"):
        view.asks("test", keys=[view.rows[0]["key"]])
    start = view.waits_for("start", lambda start: start["is"] not in ("none", "running"))
    assert start["is"] == "done", start
    assert view.session is not None
    assert view.session.run_cell("rank + world_size").values == {0: 2, 1: 3}
    assert view.settled().text.startswith(f"Session {view.session.name}: 2 ranks on 1 node, ready after ")
    tables = [part["table"][0]["cells"] for part in told if part["is"] == "running"]
    seen = [[cell["is"] for cell in cells] for cells in tables]
    view.wait_until_idle()
    parts = [message["parts"]["start"] for message in view.all_sent if "start" in message.get("parts", {})]
    assert parts[-1]["is"] == "done"  # pages were informed before the view closed
    assert any(states[2] == "running" or states[3] != "idle" for states in seen), seen


@pytest.mark.slow
def test_start_is_cancelled_while_ranks_come_up(view: _Collecting, monkeypatch: pytest.MonkeyPatch) -> None:
    def cancel(start: dict[str, Any]) -> None:
        if start.get("line", "").startswith("importing torch: 0 of 2"):
            view.hears("call", call="c", action="cancel", arguments={})

    on_start_told(view, monkeypatch, cancel)
    view.asks("change_nodes", do="add_here", key="")
    view.asks("start")
    assert view.waits_for("start", lambda start: start["is"] not in ("none", "running"))["is"] == "cancelled"
    assert view.session is None


@pytest.mark.slow
def test_passphrase_goes_to_the_key_and_nowhere_else(
    testbed: Testbed,
    make_view: Callable[..., _Collecting],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    secret = "hush-7391-hush"
    key = tmp_path / "locked"
    shutil.copy(testbed.hosts[0].identity_file, key)
    change = ["ssh-keygen", "-q", "-p", "-N", secret, "-f", str(key)]
    subprocess.run(change, check=True, capture_output=True, timeout=20)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(f"Include {testbed.inventory.ssh_config}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    caplog.set_level(0)
    view = make_view([Node(host="h0", identity_file=str(key), python=sys.executable, devices="cpu")])
    row = view.rows[0]["key"]

    def question() -> Any:
        return view.waits_for("question", lambda asked: asked)

    def result() -> Any:
        view.wait_until_idle()
        return view.waits_for("tests", lambda tests: tests[str(row)]["is"] != "running")[str(row)]

    view.asks("test", keys=[row])
    assert question()["key"] == str(key)
    with pytest.raises(RuntimeError, match="no longer needed") as told:
        view.asks("answer", number=question()["number"] + 1, passphrase=secret)
    with pytest.raises(RuntimeError, match="passphrase must be a string") as too_long:
        view.asks("answer", number=question()["number"], passphrase=secret * 1000)
    assert secret not in f"{told.value}{too_long.value}"
    view.asks("cancel")
    assert result()["is"] == "cancelled"
    assert view.state()["question"] is None

    view.asks("test", keys=[row])
    view.asks("answer", number=question()["number"], passphrase="")
    failed = result()["bad"][0]
    assert failed["check"] == "ssh" and "needs a passphrase" in failed["text"]
    assert "1 failed" in view.settled().text

    view.asks("test", keys=[row])
    view.asks("answer", number=question()["number"], passphrase=secret)
    test = result()
    assert test["is"] == "done" and test["bad"] == [], test
    assert {"ssh", "python"} <= {each["check"] for each in test["good"]}
    assert not test["is_old"]
    view.types(row, ranks="1")
    assert result()["is_old"]

    everything = [view.all_sent, view.get_state(), view.state(), repr(view), view.settled().bundle(), vars(view)]
    out, err = capfd.readouterr()
    assert secret not in f"{everything}{caplog.text}{out}{err}"
    assert os.environ.get("SSH_AUTH_SOCK") is None
