"""What two starts must have in common: every change of a file that was imported, or of what a process inherits."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from detrain_nb.node.surroundings import find_difference, read_starter

# Imports, then says for every line that it reads what has changed since.
_WATCH = """
import sys
import library, package
from detrain_nb.node.surroundings import ImportedFiles
files = ImportedFiles()
print(flush=True)
for _ in sys.stdin:
    print(files.find_changed(), flush=True)
"""
_ROOT = Path(__file__).parents[2]
_CHANGES = {
    "affinity": "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
    "limits": "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)), resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))",
    "oom_score_adj": "open('/proc/self/oom_score_adj', 'w').write('1000')",
    "priority": "os.nice(1)",
    "python": "setattr(sys, 'executable', 'another')",
    "rights": "ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)",  # PR_SET_NO_NEW_PRIVS: only one of those that are compared
    "umask": "os.umask(0o123)",
}


class _Watcher:
    def __init__(self, folder: Path, *, python: str = sys.executable, **env: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [python, "-c", _WATCH],
            env={**os.environ, "PYTHONPATH": f"{folder}:{_ROOT}", "PYTHONDONTWRITEBYTECODE": "1", **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def find_changed(self) -> str:
        """The path, within the folder."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        found = self._read()
        return os.path.relpath(found, self.folder) if found else ""

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.endswith("\n")
        return line[:-1]


@contextlib.contextmanager
def _watching(folder: Path, **options: str) -> Iterator[_Watcher]:
    watcher = _Watcher(folder, **options)
    try:
        yield watcher
    finally:
        watcher.process.communicate(timeout=20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One of ``sys.path``, with what is imported."""
    folder = tmp_path / "site"
    (folder / "package").mkdir(parents=True)
    (folder / "package/__init__.py").write_text("")
    (folder / "paths.pth").write_text("# one\n../later\n")
    (folder / "library.py").write_text("VERSION = 1\n")
    return folder


@pytest.fixture
def watcher(folder: Path) -> Iterator[_Watcher]:
    """A process that has imported from the folder."""
    with _watching(folder) as watcher:
        yield watcher


def test_file_that_is_written_anew_is_named(watcher: _Watcher) -> None:
    assert watcher.find_changed() == ""
    (watcher.folder / "library.py").write_text("VERSION = 'two'\n")
    assert watcher.find_changed() == "library.py"


def test_file_with_another_date_is_named(watcher: _Watcher) -> None:
    library = watcher.folder / "library.py"
    os.utime(library, ns=(0, library.stat().st_mtime_ns + 1))
    assert watcher.find_changed() == "library.py"


def test_other_file_of_the_same_date_and_size_is_named(watcher: _Watcher) -> None:
    library, other = watcher.folder / "library.py", watcher.folder.parent / "other.py"
    other.write_text("VERSION = 3\n")
    for path, copied in ((other, library.stat()), (watcher.folder, watcher.folder.stat())):
        if path == watcher.folder:
            other.replace(library)
        os.utime(path, ns=(copied.st_atime_ns, copied.st_mtime_ns))
    assert watcher.find_changed() in (".", "library.py")


@pytest.mark.parametrize(
    ("path", "named"), [("another.py", "."), ("package/more.py", "package"), ("paths.pth", "paths.pth")]
)
def test_what_may_change_an_import_is_named(path: str, named: str, watcher: _Watcher) -> None:
    (watcher.folder / path).write_text("# two\n")
    assert watcher.find_changed() == named


def test_file_that_has_gone_is_named(watcher: _Watcher) -> None:
    (watcher.folder / "library.py").unlink()
    assert watcher.find_changed() in (".", "library.py")


def test_what_is_read_or_written_elsewhere_is_no_change(watcher: _Watcher, tmp_path: Path) -> None:
    (watcher.folder / "library.py").read_text()
    (tmp_path / "elsewhere.py").write_text("")
    assert watcher.find_changed() == ""


@pytest.mark.parametrize(("path", "named"), [("library.py", "library.py"), ("another.py", ".")])
def test_change_while_the_imports_run_is_named(path: str, named: str, folder: Path) -> None:
    """The library is imported before; what it is now was never imported."""
    (folder / "package/__init__.py").write_text(
        f"with open({str(folder / path)!r}, 'a') as file:\n    file.write('# 2')"
    )
    with _watching(folder) as watcher:
        assert watcher.find_changed() == named


def test_what_an_import_compiles_is_no_change(folder: Path) -> None:
    with _watching(folder, PYTHONDONTWRITEBYTECODE="") as watcher:
        assert (folder / "__pycache__").exists()
        assert (folder / "package/__pycache__").exists()
        assert watcher.find_changed() == ""


def test_folder_that_a_pth_file_names_is_named_when_it_is_there(watcher: _Watcher) -> None:
    (watcher.folder.parent / "later").mkdir()
    assert watcher.find_changed() == "../later"


def test_folder_of_the_user_is_named_when_it_is_there(folder: Path, tmp_path: Path) -> None:
    with _watching(folder, PYTHONUSERBASE=str(tmp_path / "user")) as watcher:
        version = f"python3.{sys.version_info[1]}"
        (tmp_path / "user/lib" / version / "site-packages").mkdir(parents=True)
        assert watcher.find_changed() == f"../user/lib/{version}/site-packages"


def test_shared_library_that_would_be_found_first_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "libraries").mkdir()
    with _watching(folder, LD_LIBRARY_PATH=f"{tmp_path}/libraries:") as watcher:
        assert watcher.find_changed() == ""
        (tmp_path / "libraries/libstdc++.so.6").touch()
        assert watcher.find_changed() == "../libraries"


def test_settings_of_a_virtual_environment_are_compared(folder: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=60)
    with (
        _watching(folder, python=str(tmp_path / "venv/bin/python")) as watcher,
        open(tmp_path / "venv/pyvenv.cfg", "a") as file,
    ):
        assert watcher.find_changed() == ""
        print("include-system-site-packages = true", file=file, flush=True)
        assert watcher.find_changed() == "../venv/pyvenv.cfg"


_SET = """
import os
os.environ |= {"SET": "1", "CHANGED": "2"}
del os.environ["GONE"]
from detrain_nb.node.surroundings import ImportedEnvironment
imported = ImportedEnvironment()
for env in ({"CHANGED": "1", "GONE": "1", "OTHER": "3"}, {"SET": "0", "CHANGED": "0", "GONE": "0"}):
    made = imported.applied_to(env)
    print({name: made[name] for name in ("SET", "CHANGED", "GONE", "OTHER") if name in made})
"""


def test_what_imports_change_in_the_environment_is_changed_in_another_but_where_that_is_not_as_it_was() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _SET],
        env={**os.environ, "CHANGED": "1", "GONE": "1"}, capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    assert ran.stdout.splitlines() == [
        "{'SET': '1', 'CHANGED': '2', 'OTHER': '3'}",
        "{'SET': '0', 'CHANGED': '0', 'GONE': '0'}",
    ]


@pytest.mark.parametrize("trait", _CHANGES)
def test_trait_that_changes_is_named_and_no_other(trait: str) -> None:
    if trait == "affinity" and len(os.sched_getaffinity(0)) == 1:
        return  # there is no other
    code = (
        "import ctypes, os, resource, sys\nfrom detrain_nb.node.surroundings import find_difference, read_starter\n"
        f"before = read_starter()\n{_CHANGES[trait]}\nprint(find_difference(before, read_starter()))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert found.stdout == f"{trait}\n"


def test_traits_that_are_compared() -> None:
    assert read_starter().keys() == {*_CHANGES, "cgroup"}
    assert all(read_starter().values())


def test_a_few_of_many_names_are_named() -> None:
    assert find_difference({"A": "1", "B": "2"}, {"A": "1", "B": "2"}) == ""
    assert find_difference({"A": "1", "B": "2"}, {"B": "3", "C": "4"}) == "A, B, C"
    assert find_difference({}, dict.fromkeys("EDCBA", "")) == "A, B, C and 2 more"
