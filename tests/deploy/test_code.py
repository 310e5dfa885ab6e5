"""The code archive for nodes: it is reproducible and complete, and it runs where nothing else is installed."""

from __future__ import annotations

import ast
import hashlib
import io
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from detrain_nb.deploy import code
from detrain_nb.deploy.code import ON_NODE, CodeArchive, ipython_code, own_code, pack_files

ROOT = Path(__file__).resolve().parents[2]
PRESENT = sys.version_info[:2]


def _unpack(archive: CodeArchive | None, folder: Path) -> list[str]:
    assert archive is not None
    with zipfile.ZipFile(io.BytesIO(archive.data)) as packed:
        packed.extractall(folder)
        return packed.namelist()


def _run_alone(folder: Path, script: str) -> str:
    """Run ``script`` with the standard library and ``folder``, and nothing else that is installed."""
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{script}"],
        cwd=folder,
        env={"HOME": str(folder), "PATH": "/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rooms_on_a_node_are_those_of_the_design() -> None:
    line = re.search(r"^    on a node: +(.+)$", (ROOT / "docs/design.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert line
    assert tuple(line[1].split(", ")) == ON_NODE


def test_own_code_is_the_sources_of_these_rooms(tmp_path: Path) -> None:
    names = [name for name in _unpack(own_code(), tmp_path) if ".dist-info/" not in name]
    assert {"detrain_nb/__init__.py", "detrain_nb/wire/frames.py", "detrain_nb/node/agent/agent.py"} <= set(names)
    assert {Path(name).parts[1].removesuffix(".py") for name in names} <= {"__init__", *ON_NODE}
    for name in names:
        source = (tmp_path / name).read_bytes()
        assert source == (ROOT / name).read_bytes()
        ast.parse(source, feature_version=(3, 10))


def test_own_code_says_where_torchrun_finds_its_rendezvous_as_an_installation_does(tmp_path: Path) -> None:
    _unpack(own_code(), tmp_path)
    script = """
from importlib.metadata import entry_points, version
print(version("detrain_nb"))
for entry in entry_points(group="torchrun.handlers"):
    print(entry.name, entry.value)
"""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    handlers = [f"{name} {value}" for name, value in project["entry-points"]["torchrun.handlers"].items()]
    assert _run_alone(tmp_path, script).splitlines() == [project["version"], *handlers]


def test_own_code_imports_without_anything_else(tmp_path: Path) -> None:
    names = [name for name in _unpack(own_code(), tmp_path) if ".dist-info/" not in name]
    rooms = [name[: -len(".py")].replace("/", ".") for name in names if name.count("/") == 1]
    rooms.remove("detrain_nb.storage")  # it needs fsspec, which is installed with torch
    modules = [*rooms, "detrain_nb.node.agent.agent", "detrain_nb.node.rank.worker", "detrain_nb.node.system.gpus"]
    script = f"from importlib import import_module\nfor name in {modules}: print(import_module(name).__file__)"
    for line in _run_alone(tmp_path, script).splitlines():
        assert Path(line).is_relative_to(tmp_path)


def test_archive_is_made_once_and_is_the_same_each_time() -> None:
    archive = own_code()
    assert own_code() is archive
    assert code.own_code.__wrapped__() == archive
    assert archive.digest == hashlib.sha256(archive.data).hexdigest()[:32]
    assert ipython_code(PRESENT) is ipython_code(PRESENT)
    assert code.ipython_code.__wrapped__(PRESENT) == ipython_code(PRESENT)


def test_pack_depends_on_names_contents_and_modes_only() -> None:
    files = {"b/ü.py": b"1", "a.sh": b"2"}
    packed = pack_files(files, executable={"a.sh"})
    assert packed == pack_files(dict(reversed(files.items())), executable=["a.sh"])
    assert packed != pack_files(files)
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        assert [(info.filename, info.external_attr >> 16 & 0o777) for info in archive.infolist()] == [
            ("a.sh", 0o755),
            ("b/ü.py", 0o644),
        ]


CELL = """
import importlib.metadata
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
assert shell.run_cell("1+1").result == 2
assert shell.run_cell("await __import__('asyncio').sleep(0)").success
assert not shell.run_cell("1/0").success
assert shell.run_cell("!echo from a shell").success
assert shell.run_line_magic("timeit", "-n1 -r1 -q -o 1") is not None
shell.user_ns["word"] = "text"
shell.complete("word.up")
from IPython.core.completer import provisionalcompleter
with provisionalcompleter():
    completions = list(shell.Completer.completions("import os; os.path.joi", 22))
print([(each.text, each.type) for each in completions])
import jedi
print([each.name for each in jedi.Interpreter("word.upp", [shell.user_ns]).complete()])
print([each.name for each in jedi.Script("import json; json.dum").complete()])
print(importlib.metadata.version("ipython"))
print([entry.name for entry in importlib.metadata.entry_points(group="pygments.lexers")])
strangers = [name for name, module in sys.modules.items() if "site-packages" in str(getattr(module, "__file__", ""))]
assert not strangers and "psutil" not in sys.modules, strangers
"""


@pytest.mark.slow
def test_ipython_runs_cells_and_completes_where_nothing_is_installed(tmp_path: Path) -> None:
    names = _unpack(ipython_code(PRESENT), tmp_path)
    output = _run_alone(tmp_path, CELL)
    assert "from a shell" in output
    assert "[('join', 'function')]" in output
    assert "\n['upper']\n['dump', 'dumps']\n" in output
    assert "'ipython3'" in output  # an entry point of ipython-pygments-lexers
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name or name.endswith((".so", ".pyc"))]
    assert not [name for name in names if name.startswith("psutil")]
    assert [name for name in names if re.fullmatch(r"ipython-[0-9.]+\.dist-info/METADATA", name)]
    assert [name for name in names if re.fullmatch(r"jedi/third_party/typeshed/stdlib/.*\.pyi", name)]
    assert not [name for name in names if name.endswith(("/RECORD", "/direct_url.json"))]


def test_python_that_ipython_does_not_support_gets_none() -> None:
    assert ipython_code((3, 8)) is None


def test_what_only_an_older_python_requires_goes_to_that_one() -> None:
    names = {}
    for version in [(3, 11), (3, 13)]:
        archive = ipython_code(version)
        assert archive is not None
        with zipfile.ZipFile(io.BytesIO(archive.data)) as packed:
            names[version] = set(packed.namelist())
    assert "typing_extensions.py" in names[3, 11]
    assert "typing_extensions.py" not in names[3, 13]
    for found in names.values():
        assert {"IPython/__init__.py", "traitlets/__init__.py", "pexpect/__init__.py"} <= found


def test_requirement_that_is_missing_here_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_jedi(name: str) -> code.Distribution:
        if name == "jedi":
            raise code.PackageNotFoundError(name)
        return found(name)

    found = code.distribution
    monkeypatch.setattr(code, "distribution", without_jedi)
    assert code.ipython_code.__wrapped__(PRESENT) is None
