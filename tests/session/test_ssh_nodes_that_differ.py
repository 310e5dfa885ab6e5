"""Hosts over SSH whose Python differs from the notebook's: without IPython, too old, or with a different torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from detrain_nb import Session
from detrain_nb.errors import LaunchError, RankError

from ..testbed.nodes import processes_of_sessions, ssh_nodes
from ..testbed.testbed import Testbed

_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def make_python(testbed_of_two: Testbed) -> Callable[..., str]:
    """Return a function that makes a Python for the hosts with torch and its requirements only.

    ``torch``: the version in torch's metadata. ``python``: the version in ``sys.version_info``.
    """

    def make(name: str, *, torch: str = "", python: tuple[int, int, int] | None = None) -> str:
        folder = testbed_of_two.folder / name  # hosts see it at the same path
        command = [sys.executable, "-m", "venv", "--without-pip", "--symlinks", folder]
        subprocess.run(command, check=True, timeout=_LIMIT_S)
        [packages] = folder.glob("lib/python*/site-packages")
        for path in _files_of("torch"):
            (packages / path.name).symlink_to(path)
        if torch:
            [known] = packages.glob("torch-*.dist-info")
            known.unlink()
            (packages / f"torch-{torch}.dist-info").mkdir()
            metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n"
            (packages / f"torch-{torch}.dist-info/METADATA").write_text(metadata)
        if python:
            (packages / "sitecustomize.py").write_text(f"import sys\nsys.version_info = {(*python, 'final', 0)}\n")
        return str(folder / "bin/python")

    return make


@pytest.fixture(scope="module")
def bare_python(make_python: Callable[..., str]) -> str:
    """A Python without IPython, its requirements and detrain_nb."""
    path = make_python("bare")
    code = "import torch, importlib.util as u, json\nprint(json.dumps([bool(u.find_spec(n)) for n in %r]))"
    names = ["IPython", "traitlets", "prompt_toolkit", "detrain_nb"]
    options = {"env": {}, "cwd": "/", "capture_output": True, "text": True, "check": True, "timeout": _LIMIT_S}
    done = subprocess.run([path, "-c", code % names], **options)
    assert json.loads(done.stdout) == [False] * len(names), "these would not have to travel"
    return path


def _files_of(name: str) -> set[Path]:
    """The files and folders in site-packages of a distribution and of everything that it requires."""
    found: dict[str, Distribution] = {}
    wanted = [name]
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name not in found:
            found[name] = distribution(name)
            requirements = map(Requirement, found[name].requires or [])
            wanted += [each.name for each in requirements if not each.marker or each.marker.evaluate({"extra": ""})]
    paths = {Path(str(each.locate_file(file.parts[0]))) for each in found.values() for file in each.files or []}
    return {path for path in paths if path.exists() and path.name not in ("..", "__pycache__")}


@pytest.fixture
def nothing_starts(testbed: Testbed) -> Iterator[None]:
    """After the test the hosts run no new process of a session, and no session is left."""

    def ours() -> set[tuple[str, int]]:
        return {(host.name, pid) for host in testbed.hosts for pid in processes_of_sessions(testbed, host.name)}

    before = ours()
    yield
    deadline = time.monotonic() + _LIMIT_S
    while not ours() <= before:
        assert time.monotonic() < deadline, "what the test has started is still there"
        time.sleep(0.05)
    for host in testbed.hosts:
        assert testbed.output(host.name, "ls -d ~/.cache/detrain_nb/run/*/mine 2>/dev/null || true") == ""


def test_ranks_of_a_host_whose_locale_has_no_utf_8_keep_it(
    testbed_of_two: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "größe.txt").write_text("x")
    (tmp_path / "größe.py").write_text("value = 7")
    locale = "export LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"
    nodes = ssh_nodes(testbed_of_two, 1, setup=[locale], workdir=f"~/{tmp_path.name}/Grüße")
    with Session.start(1, nodes=nodes, device="cpu") as session:
        code = "import os, sys\n(os.getcwdb().decode(), sorted(os.listdir(b'.')), sys.getfilesystemencoding())"
        [(folder, names, encoding)] = session.run_cell(code).values.values()
    assert folder.endswith(f"/{tmp_path.name}/Grüße") and encoding == "ascii"
    assert names[-2:] == ["größe.py".encode(), "größe.txt".encode()]


# ---- without IPython


@pytest.fixture(scope="module", params=["fork", pytest.param("exec", marks=pytest.mark.slow)])
def session(request: pytest.FixtureRequest, testbed_of_two: Testbed, bare_python: str) -> Iterator[Session]:
    """Rank 0 where IPython is missing, rank 1 where it is installed."""
    nodes = [*ssh_nodes(testbed_of_two, 1, python=bare_python), *ssh_nodes(testbed_of_two)[1:]]
    with Session.start(1, sync=False, nodes=nodes, device="cpu", start=request.param) as started:
        yield started


def test_ipython_travels_to_where_it_is_missing(session: Session, bare_python: str) -> None:
    code = "import sys, IPython, traitlets, detrain_nb\n"
    code += "[sys.executable, *(module.__file__ for module in (IPython, traitlets, detrain_nb))]"
    there, installed = session.run_cell(code).values.values()
    assert there[0] == bare_python
    assert all("/.cache/detrain_nb/" in path for path in there[1:])
    assert "/.cache/" not in installed[1]


AS_ELSEWHERE = {
    "value": "torch.arange(3)",
    "rich value": "from IPython.display import display, Markdown as M\ndisplay(M('*a*'), display_id='d')\nM('b')",
    "shell": "!echo $HOME; echo error >&2; exit 3\n_exit_code",
    "captured": "found = !printf 'a\\nb'\nfound",
    "magic": "%who_ls str",
    "cell magic": "%%capture caught\nprint('seen')",
    "what it caught": "caught.stdout",
    "await": "import asyncio\nawait asyncio.sleep(0, 'awaited')",
    "help": "len?",
    "collective": "t = torch.ones(1); dist.all_reduce(t); t",
}


@pytest.mark.parametrize("code", AS_ELSEWHERE.values(), ids=AS_ELSEWHERE.keys())
def test_cell_shows_there_what_it_shows_elsewhere(session: Session, code: str) -> None:
    result = session.run_cell(code)
    here, there = result
    assert here.bundle == there.bundle
    assert session.log.text(result.cell, 0) == session.log.text(result.cell, 1)
    assert here.bundle or session.log.text(result.cell, 0) or code.startswith("%%capture")


def test_timeit_measures_there(session: Session) -> None:
    result = session.run_cell("%timeit -n 2 -r 2 sum(range(10))")
    for rank in (0, 1):
        assert re.search(r"per loop \(mean ± std. dev. of 2 runs, 2 loops each\)", session.log.text(result.cell, rank))


def test_error_there_has_the_lines_of_the_cell(session: Session) -> None:
    with pytest.raises(RankError) as caught:
        session.run_cell("def half(x):\n    return 1 / x\n\nhalf(0)")
    errors = caught.value.errors
    assert errors[0].summary == errors[1].summary == "ZeroDivisionError: division by zero"
    assert errors[0].traceback == errors[1].traceback
    assert "half(0)" in "\n".join(errors[0].traceback)


def test_completion_works_there(session: Session) -> None:
    code = "torch.arang"
    assert (found := session.ranks.complete(code, len(code)))
    assert "arange" in " ".join(found.matches)


# ---- too old


@pytest.mark.usefixtures("nothing_starts")
def test_python_that_is_too_old_for_the_notebook_s_ipython_is_told_what_to_install(
    testbed: Testbed, make_python: Callable[..., str]
) -> None:
    python = make_python("older", python=(3, 10, 14))
    nodes = [*ssh_nodes(testbed, 1), *ssh_nodes(testbed, python=python)[1:]]
    with pytest.raises(LaunchError) as caught:
        Session.start(1, sync=False, nodes=nodes, device="cpu", name="mine")
    missing = f"h1: IPython is missing in {python}, and the notebook's does not run on Python 3.10"
    assert str(caught.value) == f"{missing}: install it there: {python} -m pip install ipython"


# ---- torch


@pytest.mark.usefixtures("nothing_starts")
def test_nodes_with_different_versions_of_torch_are_told_and_nothing_is_started(
    testbed: Testbed, make_python: Callable[..., str]
) -> None:
    here = distribution("torch").version
    nodes = [*ssh_nodes(testbed, 1), *ssh_nodes(testbed, python=make_python("torch-0", torch="2.0.1+cu118"))[1:]]
    with pytest.raises(LaunchError) as caught:
        Session.start(1, sync=False, nodes=nodes, device="cpu", name="mine")
    found = f"h0 {here}, h1 2.0.1+cu118"
    assert str(caught.value) == f"the nodes have different versions of torch ({found}): install the same version on all"


@pytest.mark.usefixtures("nothing_starts")
def test_torch_that_is_too_old_on_all_nodes_is_told(testbed: Testbed, make_python: Callable[..., str]) -> None:
    python = make_python("torch-old", torch="2.0.1")
    [packages] = Path(python).parents[1].glob("lib/python*/site-packages")
    (packages / "torch").unlink()
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text("__version__ = '2.0.1+cu118'")
    with pytest.raises(LaunchError) as caught:
        Session.start(1, sync=False, nodes=ssh_nodes(testbed, python=python), device="cpu", name="mine")
    assert f"torch 2.0.1+cu118 in {python} is too old: torch>=2.9.1 is needed" in str(caught.value)


@pytest.mark.slow
def test_other_build_of_the_same_torch_works_together(testbed: Testbed, make_python: Callable[..., str]) -> None:
    major, minor, *_ = distribution("torch").version.split(".")
    other = make_python("torch-cuda", torch=f"{major}.{minor}.9+cu999")
    nodes = [*ssh_nodes(testbed, 1), *ssh_nodes(testbed, python=other)[1:]]
    with Session.start(1, sync=False, nodes=nodes, device="cpu") as session:
        assert session.run_cell("t = torch.ones(1); dist.all_reduce(t); t.item()").values == {0: 2.0, 1: 2.0}


@pytest.mark.usefixtures("nothing_starts")
def test_python_without_torch_is_told_what_to_install(testbed: Testbed, make_python: Callable[..., str]) -> None:
    python = make_python("torchless")
    for path in Path(python).parents[1].glob("lib/python*/site-packages/torch*"):
        path.unlink()
    with pytest.raises(LaunchError) as caught:
        Session.start(1, sync=False, nodes=ssh_nodes(testbed, 1, python=python), device="cpu", name="mine")
    install = f"install it there ({python} -m pip install torch)"
    assert str(caught.value) == (
        f'h0: torch is missing in {python}: {install}, or set python = "/path/to/python" in a nodes file'
    )
