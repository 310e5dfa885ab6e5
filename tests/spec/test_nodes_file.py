"""Nodes files, and the nodes of a command line: written nodes can be read again, and every error names its place."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrain_nb.errors import SpecError
from detrain_nb.spec import Node, parse_nodes, read_nodes, write_nodes


def _write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


TOML = """
[defaults]
user = "alice"   # a comment
setup = "module load cuda"

[[nodes]]
host = "gpu1"

[[nodes]]
name = "second"
host = "10.0.0.2"
port = 2222
user = "bob"
devices = [0, 1]
"""
JSON = """{"defaults": {"user": "alice", "setup": ["module load cuda"]}, "nodes": [
    {"host": "gpu1"},
    {"name": "second", "host": "10.0.0.2", "port": 2222, "user": "bob", "devices": [0, 1]}]}"""


YAML = """
defaults: {user: alice, setup: module load cuda}
nodes:
  - host: gpu1
  - {name: second, host: 10.0.0.2, port: 2222, user: bob, devices: [0, 1]}
"""


@pytest.mark.parametrize(
    "name, text",
    [("nodes.toml", TOML), ("nodes.JSON", JSON), ("n.toml", "\ufeff" + TOML), ("n.yaml", YAML), ("n.yml", YAML)],
)
def test_defaults_apply_to_nodes_that_do_not_say_otherwise(name: str, text: str, tmp_path: Path) -> None:
    assert read_nodes(_write(tmp_path / name, text)) == (
        Node(host="gpu1", user="alice", setup="module load cuda"),
        Node(name="second", host="10.0.0.2", port=2222, user="bob", devices=[0, 1], setup="module load cuda"),
    )


def test_json_may_be_a_list(tmp_path: Path) -> None:
    path = _write(tmp_path / "nodes.json", '[{"host": "gpu1"}, {"host": "gpu2"}]')
    assert [node.name for node in read_nodes(str(path))] == ["gpu1", "gpu2"]


def test_host_may_be_a_default(tmp_path: Path) -> None:
    path = _write(tmp_path / "n.toml", 'defaults.host = "box"\nnodes = [{name="a", port=1}, {name="b", port=2}]')
    assert [(node.host, node.port) for node in read_nodes(path)] == [("box", 1), ("box", 2)]


FAULTS = {
    "a field": (
        "n.toml",
        '[[nodes]]\nhost = "a"\n[[nodes]]\nhost = "b"\nport = 70000\n',
        ["node 2 (b): port 70000: give a number from 1 to 65535"],
    ),
    "fields of several nodes": (
        "n.json",
        '[{"host": "-x"}, {"name": "b"}]',
        ["node 1 (-x): host '-x': give a host name", "node 2 (b): host is missing: give "],
    ),
    "a default": ("n.toml", '[defaults]\nport = 0\n[[nodes]]\nhost = "a"', ["defaults: port 0: give "]),
    "an unknown field": (
        "n.toml",
        '[[nodes]]\nhost = "a"\nusername = "b"',
        ["node 1 (a): username is not a field: did you mean 'user'?"],
    ),
    "twins": (
        "n.json",
        '[{"host": "a"}, {"host": "b"}, {"host": "a", "port": 22}]',
        [
            "nodes 1 and 3 have the same name 'a': give each its own name; list a machine once, with "
            "ranks = N for several ranks"
        ],
    ),
    "an unknown table": ("n.toml", '[[node]]\nhost = "a"', ["'node' is unknown: give nodes and", "nodes: give a list"]),
    "nodes as one table": ("n.toml", '[nodes]\nhost = "a"', ["nodes: give a list with at least one node"]),
    "no nodes": ("n.json", "[]", ["nodes: give a list with at least one node"]),
    "defaults as a list": ("n.json", '{"defaults": [], "nodes": [{"host": "a"}]}', ["defaults: give a table"]),
    "a number": ("n.json", "3", ["give a list of nodes"]),
    "TOML's syntax": ("n.toml", "[[nodes]]\nhost gpu1\n", ["line 2, column 6: expected '='"]),
    "TOML's end": ("n.toml", "[[nodes", ["at the end: "]),
    "JSON's syntax": ("n.json", '[\n{"host" "gpu1"}]', ["line 2, column 9: expecting ':'"]),
    "JSON's end": ("n.json", "", ["line 1, column 1: "]),
    "a name twice in JSON": ("n.json", '[{"host": "a", "host": "b"}]', ["line 1: duplicate key 'host'"]),
    "a name twice in YAML": ("n.yml", "nodes:\n  - host: a\n    host: b", ["line 3, column 5: duplicate key 'host'"]),
    "a name twice in TOML": ("n.toml", '[[nodes]]\nhost = "a"\nhost = "b"', [""]),
    "not UTF-8": ("n.toml", b'[[nodes]]\nhost = "\xe4"', ["line 2: is not UTF-8: save the file as UTF-8"]),
    "depth": ("n.json", "[" * 100_000, [""]),
    "depth of TOML": ("n.toml", "nodes = " + "[" * 100_000, [""]),
    "a long number": ("n.json", f'[{{"host": "a", "port": {"1" * 5000}}}]', ["a number has too many digits"]),
    "a long number in hexadecimal": (
        "n.toml",
        f'[[nodes]]\nhost = "a"\nport = 0x{"f" * 5000}',
        ["nodes[0].port: a number of more than 64 bits"],
    ),
    "a long key": (
        "n.toml",
        '[[nodes]]\nhost = "a"\n' + "a." * 20_000 + "b = 1",
        ["line 3: a key has more than 20 dots"],
    ),
    "a long key in quotes": ("n.toml", "x = {" + '\'.\' .\t"\\"." . ' * 10_000 + "b=1}", ["line 1: a key has more"]),
    "a long key of a table": ("n.toml", "[[" + "a." * 20_000 + "b ]]", ["line 1: a key has more than 20 dots"]),
    "no number": ("n.json", '[{"host": "a", "latency_ms": NaN}]', ["[0].latency_ms: nan is not a finite number"]),
    "a date": (
        "n.toml",
        "[[nodes]]\nhost = 2020-01-01",
        ["nodes[0].host: 2020-01-01 is a date or a time, which is not allowed: quote it to make it a string"],
    ),
    "the suffix": ("nodes.ini", "nodes:", ["the name must end in one of .json, .toml, .yaml"]),
    "no suffix": ("nodes", "", ["the name must end in one of .json, .toml, .yaml"]),
}


@pytest.mark.parametrize("case", FAULTS)
def test_fault_is_shown_with_its_file_and_place(case: str, tmp_path: Path) -> None:
    name, text, starts = FAULTS[case]
    path = _write(tmp_path / name, text)
    with pytest.raises(SpecError) as caught:
        read_nodes(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(starts), lines
    for line, start in zip(lines, starts):
        assert line.startswith(f"{path}, {start}" if case == "a default" else f"{path}: {start}")


def test_dots_in_texts_and_comments_are_no_long_key(tmp_path: Path) -> None:
    dots = "1." * 40 + "arpa"
    lines = [
        "[[nodes]]",
        f'host = "{dots}" # {dots}',
        f"""setup = ["\\"{dots}", '{dots}', '''\n{dots}''''', '']""",
        f'''name = 'a' # "\nworkdir = """~{dots}\\\n  {dots}\\""""''',
    ]
    (node,) = read_nodes(_write(tmp_path / "n.toml", "\n".join(lines)))
    assert (node.host, node.workdir, len(node.setup)) == (dots, f'~{dots}{dots}"', 3)
    tables = [f"{{host = 'a{number}', latency_ms = 0.5}}" for number in range(100)]
    assert len(read_nodes(_write(tmp_path / "n.toml", f"nodes = [{', '.join(tables)}]"))) == 100


_UNITS = ["a.", ".", '."', ".'", ".a ", '."."', ".a.'", '.\\"', ".a\n", ".'\"", ". ", '"""\\', "'''a", "''' "]


@pytest.mark.parametrize("unit", _UNITS)
def test_file_is_looked_at_in_time_by_its_length(unit: str, tmp_path: Path) -> None:
    path = _write(tmp_path / "n.toml", (unit * 1_000_000)[:1_000_000])
    began = time.thread_time()
    with pytest.raises(SpecError):
        read_nodes(path)
    assert time.thread_time() - began < 10  # a quadratic parser would take hours


def test_file_that_is_missing_a_folder_or_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"/gone\.toml cannot be read: it does not exist"):
        read_nodes(tmp_path / "gone.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(SpecError, match=r"folder\.toml cannot be read: Is a directory"):
        read_nodes(tmp_path / "folder.toml")
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(SpecError, match=r"pipe\.toml cannot be read: it is not a regular file"):
        read_nodes(tmp_path / "pipe.toml")
    with pytest.raises(SpecError, match=r"large\.toml: larger than 1 MB"):
        read_nodes(_write(tmp_path / "large.toml", b"#" * 1_000_001))
    with pytest.raises(SpecError, match=r"x00\.toml cannot be read"):
        read_nodes("\0.toml")


def test_very_many_faults_are_counted(tmp_path: Path) -> None:
    path = _write(tmp_path / "n.json", "[" + ", ".join(['{"host": "-"}'] * 100) + "]")
    with pytest.raises(SpecError) as caught:
        read_nodes(path)
    assert len(str(caught.value).splitlines()) == 21
    assert str(caught.value).endswith("\nand 80 more")


COMMAND_LINES = {
    "gpu1": [("gpu1", None, "gpu1", None)],
    " alice@gpu1, gpu2:2222 ": [("gpu1", "alice", "gpu1", None), ("gpu2", None, "gpu2", 2222)],
    "[::1]:22": [("ip6---1", None, "::1", 22)],
    "box:2222,box:2223": [("box-2222", None, "box", 2222), ("box-2223", None, "box", 2223)],
    "box,box:2222": [("box", None, "box", None), ("box-2222", None, "box", 2222)],
}


@pytest.mark.parametrize("text", COMMAND_LINES)
def test_command_line_gives_nodes(text: str) -> None:
    assert [(node.name, node.user, node.host, node.port) for node in parse_nodes(text)] == COMMAND_LINES[text]


@pytest.mark.parametrize(
    "text, message",
    [
        ("gpu1,gpu1", "nodes 1 and 2 have the same name 'gpu1': leave out one"),
        ("alice@gpu1,bob@gpu1", "nodes 1 and 2 have the same name 'gpu1': leave out one"),
        ("gpu1:22,gpu1:22", "nodes 1 and 2 have the same name 'gpu1-22': leave out one"),
        ("gpu1:22,gpu1:23,gpu1-22", "nodes 1 and 3 have the same name 'gpu1-22'"),
        ("gpu1,,gpu2", "'' is not a host"),
        ("gpu1:99999", "port 99999: give a number from 1 to 65535"),
        ("10", "name '10': give .*; in a nodes file you can name it"),
    ],
)
def test_command_line_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=f"^nodes '{text}': .*{message}"):
        parse_nodes(text)


def test_command_line_may_be_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "my nodes.toml", '[[nodes]]\nhost = "gpu1"')
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for text in [str(path), "my nodes.toml", "~/my nodes.toml", " ./my nodes.toml "]:
        assert parse_nodes(text) == (Node(host="gpu1"),)
    with pytest.raises(SpecError, match=r"/gone\.json cannot be read: it does not exist"):
        parse_nodes("gone.json")
    with pytest.raises(SpecError, match=r"must end in one of \.json.*: import folder/nodes -o nodes\.toml$"):
        parse_nodes("folder/nodes")


def test_file_named_like_a_host_is_no_nodes_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "gpu1", "")
    monkeypatch.chdir(tmp_path)
    assert parse_nodes("gpu1") == (Node(host="gpu1"),)


def test_written_toml_is_short_and_readable(tmp_path: Path) -> None:
    path = tmp_path / "nodes.toml"
    write_nodes(path, [Node(host="gpu1"), Node(host="gpu2", name="b", devices=[0, 1], setup='x "y"\nz', latency_ms=1)])
    assert path.read_text() == (
        '[[nodes]]\nhost = "gpu1"\n\n'
        '[[nodes]]\nname = "b"\nhost = "gpu2"\ndevices = [0, 1]\nsetup = ["x \\"y\\"", "z"]\nlatency_ms = 1.0\n'
    )
    assert os.listdir(tmp_path) == ["nodes.toml"]


HOSTS = st.from_regex(r"[a-z_][A-Za-z0-9._-]{0,20}", fullmatch=True) | st.ip_addresses().map(str)
NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9._-]{0,62}", fullmatch=True).filter(lambda name: name.lower() != "all")
TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=20)
PATHS = TEXT.map(lambda text: f"/{text}")
LINES = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"], include_characters="\t"), max_size=20)
DEVICES = st.sampled_from(["auto", "cpu"]) | st.lists(st.integers(0, 2**40), min_size=1, unique=True).map(tuple)
VARIABLES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,10}", fullmatch=True)
FLOATS = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    fields: dict[str, Any] = {
        "name": draw(NAMES),
        "host": draw(HOSTS),
        "port": draw(st.none() | st.integers(1, 65535)),
        "user": draw(st.none() | st.from_regex(r"[A-Za-z0-9._@+]{1,9}", fullmatch=True)),
        "identity_file": draw(st.none() | PATHS),
        "proxy_jump": draw(st.none() | st.sampled_from(["a@[::1]:22", "j,k:1"])),
        "address": draw(st.none() | HOSTS.filter(lambda host: host.strip("0123456789.:"))),
        "devices": draw(DEVICES),
        "python": draw(PATHS),
        "workdir": draw(st.none() | PATHS),
        "setup": draw(st.lists(LINES, max_size=4)),
        "env": draw(st.lists(VARIABLES, max_size=4, unique=True)),
        "bandwidth_mbit_s": draw(st.none() | FLOATS),
        "latency_ms": draw(st.none() | FLOATS),
    }
    if not isinstance(fields["devices"], tuple):
        fields["ranks"] = draw(st.none() | st.integers(1, 2**40))
    return Node(**fields)


@pytest.mark.parametrize("name", ["nodes.toml", "nodes.json", "nodes.yaml"])
@given(written=st.lists(nodes(), min_size=1, max_size=4, unique_by=lambda node: node.name))
def test_what_is_written_is_read_again(
    name: str, written: list[Node], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    write_nodes(path, written)
    assert read_nodes(path) == tuple(written)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_file_that_cannot_be_written_is_left_as_it_was(suffix: str, tmp_path: Path) -> None:
    path = _write(tmp_path / f"nodes{suffix}", "old")
    for wrong in ([], [Node(host="a"), Node(host="a", port=2)]):
        with pytest.raises(SpecError, match=f"nodes{suffix}: "):
            write_nodes(path, wrong)
    assert path.read_text() == "old"
    with pytest.raises(SpecError, match="cannot be written: No such file or directory"):
        write_nodes(tmp_path / "gone" / path.name, [Node(host="a")])
    with pytest.raises(SpecError, match="must end in"):
        write_nodes(tmp_path / "nodes.ini", [Node(host="a")])


def test_file_keeps_its_mode_and_a_link_its_target(tmp_path: Path) -> None:
    target = _write(tmp_path / "real.toml", "")
    target.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(target.name)
    write_nodes(link, [Node(host="gpu1")])
    assert link.is_symlink()
    assert read_nodes(target) == (Node(host="gpu1"),)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_what_stood_there_is_kept_beside_it_and_not_written_through_a_link(tmp_path: Path) -> None:
    """A repository may contain both the link and the text: the link could lead to a login script."""
    path = _write(tmp_path / "nodes.toml", "# mine\n[[nodes]]\nhost = 'gpu1'\n")
    path.chmod(0o600)
    login, before = _write(tmp_path / "login", "mine"), tmp_path / "nodes.toml.before"
    before.symlink_to(login)
    assert write_nodes(path, [Node(host="gpu2")], before=before)
    assert not write_nodes(path, [Node(host="gpu3")], before=before), "it has no comments to lose"
    assert login.read_text() == "mine"
    assert before.read_text().startswith("# mine") and not before.is_symlink()
    assert stat.S_IMODE(before.stat().st_mode) == stat.S_IMODE(path.stat().st_mode) == 0o600


def test_link_in_a_folder_of_others_is_replaced(tmp_path: Path) -> None:
    shared, login = tmp_path / "shared", _write(tmp_path / "login", "mine")
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "nodes.toml").symlink_to(login)
    write_nodes(shared / "nodes.toml", [Node(host="gpu1")])
    assert login.read_text() == "mine"
    assert read_nodes(shared / "nodes.toml") == (Node(host="gpu1"),)


def test_plain_import_of_the_package_brings_no_pydantic() -> None:
    code = "import sys, detrain_nb; sys.exit('pydantic' in sys.modules or 'detrain_nb.spec' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=100).returncode == 0


def test_defaults_of_hosts_do_not_hold_for_this_machine(tmp_path: Path) -> None:
    of_hosts = 'user = "alice"\nport = 22\nidentity_file = "~/k"\nproxy_jump = "gate"\nsetup = "module load cuda"\n'
    there = 'python = "/opt/bin/python"\nworkdir = "/scratch"\naddress = "10.0.0.1"\n'
    of_all = 'ranks = 2\ndevices = "cpu"\nenv = ["TOKEN"]\n'
    nodes = '[[nodes]]\nhost = "localhost"\n[[nodes]]\nhost = "gpu1"\n'
    here, gpu1 = read_nodes(_write(tmp_path / "n.toml", f"[defaults]\n{of_hosts}{there}{of_all}{nodes}"))
    assert here == Node(host="localhost", ranks=2, devices="cpu", env=["TOKEN"])
    assert here.is_this_machine
    assert (gpu1.user, gpu1.workdir, gpu1.is_this_machine) == ("alice", "/scratch", False)
