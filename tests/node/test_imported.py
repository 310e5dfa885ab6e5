"""Changes since the imports: in every imported file, and in every place where another import would look."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Imports modules; then, for every line on its standard input, prints what has changed since.
_WATCH = """
import os, sys
import json, library, link, package
from detrain_nb.node.system.imported import ImportedFiles
files = ImportedFiles()
os.chdir("/")  # as a warm process does
print(flush=True)
for _ in sys.stdin:
    print(files.find_changed(), flush=True)
"""
_ROOT = Path(__file__).parents[2]


class _Watcher:
    def __init__(self, folder: Path, *, python: str = sys.executable, before: str = "", **env: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [python, "-c", before + _WATCH],
            env={**os.environ, "PYTHONPATH": f"{folder}:{_ROOT}", "PYTHONDONTWRITEBYTECODE": "1", **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def find_changed(self) -> str:
        """Return the changed path, relative to the folder."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        found = self._read()
        return os.path.relpath(found, self.folder) if found.startswith("/") else found

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
    """Return an entry of ``sys.path`` that holds the imported modules."""
    folder = tmp_path / "site"
    (folder / "package").mkdir(parents=True)
    (folder / "package/__init__.py").write_text("")
    (folder / "some-1.0.dist-info").mkdir()
    (folder / "json").mkdir()
    (folder / "link.py").symlink_to(folder.parent / "linked.py")
    (folder.parent / "linked.py").touch()
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
    assert watcher.find_changed() == "library.py"


@pytest.mark.parametrize(
    "path",
    [
        "another.py",
        "another.cpython-311-x86_64-linux-gnu.so",
        "package/more.py",
        "some-1.0.dist-info/entry_points.txt",
        "json/__init__.py",  # without this file, json comes from the standard library
    ],
)
def test_what_may_change_an_import_is_named(path: str, watcher: _Watcher) -> None:
    (watcher.folder / path).write_text("# two\n")
    assert watcher.find_changed() == path


@pytest.mark.parametrize("name", ["other-2.0.dist-info/METADATA", "more/__init__.py"])
def test_folder_that_may_change_an_import_is_named(name: str, watcher: _Watcher) -> None:
    folder = (watcher.folder / name).parent
    folder.mkdir()
    (watcher.folder / name).touch()
    assert watcher.find_changed() == folder.name


def test_link_that_may_be_a_package_is_named(watcher: _Watcher) -> None:
    (watcher.folder / "more").symlink_to("/nowhere")
    assert watcher.find_changed() == "more"


def test_what_no_import_could_take_is_no_change(watcher: _Watcher) -> None:
    """Notebooks, checkpoints and logs are often written to a project folder that is in PYTHONPATH."""
    for name in (
        "notebook.ipynb",
        "step-3.pt",
        "model.pth",
        "train.log",
        "LICENSE",
        "package/table.csv",
        ".#library.py",
    ):
        (watcher.folder / name).touch()
    for name in ("__pycache__", "checkpoint-300", "step_300", ".ipynb_checkpoints", "package/__pycache__"):
        (watcher.folder / name).mkdir()
    assert watcher.find_changed() == ""
    (watcher.folder / "later.py").touch()
    assert watcher.find_changed() == "later.py"


def test_file_that_has_gone_is_named(watcher: _Watcher) -> None:
    (watcher.folder / "library.py").unlink()
    assert watcher.find_changed() == "library.py"


def test_what_is_read_or_written_elsewhere_is_no_change(watcher: _Watcher, tmp_path: Path) -> None:
    (watcher.folder / "library.py").read_text()
    (tmp_path / "elsewhere.py").write_text("")
    assert watcher.find_changed() == ""


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("library.py", "library.py"),
        ("another.py", "another.py"),
        ("link.py", "link.py"),
        ("more/__init__.py", "more"),
        ("other-2.0.dist-info/METADATA", "other-2.0.dist-info"),
    ],
)
def test_change_while_the_imports_run_is_named(path: str, named: str, folder: Path) -> None:
    """``package`` writes to the path on import, after ``library`` was imported: that content was never imported."""
    _write_at_import(folder, path)
    with _watching(folder) as watcher:
        assert watcher.find_changed() == named


def _write_at_import(folder: Path, path: str) -> None:
    (folder / "package/__init__.py").write_text(
        f"import os\nos.makedirs(os.path.dirname({str(folder / path)!r}), exist_ok=True)\n"
        f"with open({str(folder / path)!r}, 'a') as file:\n    file.write('# 2')"
    )


@pytest.mark.parametrize("path", ["step-3.pt", "train.log", "runs/events"])
def test_what_is_written_beside_while_the_imports_run_is_no_change(path: str, folder: Path) -> None:
    _write_at_import(folder, path)
    with _watching(folder) as watcher:
        assert (folder / path).exists()
        assert watcher.find_changed() == ""


def test_file_whose_date_is_to_come_is_no_change(folder: Path) -> None:
    """Files from an archive, or from a machine whose clock is ahead, can have dates in the future."""
    tomorrow = time.time() + 86_400
    for path in (folder / "library.py", folder):
        os.utime(path, (tomorrow, tomorrow))
    # The kernel sets ctime in steps of about 10 ms: this pause puts it before the start of the process.
    time.sleep(0.05)
    with _watching(folder) as watcher:
        assert watcher.find_changed() == ""


def test_library_that_is_replaced_while_it_is_mapped_is_named(folder: Path, tmp_path: Path) -> None:
    extensions = Path(sysconfig.get_config_var("DESTSHARED"))
    library, new = tmp_path / "mapped.so", tmp_path / "new.so"
    for path in (library, new):
        shutil.copy(next(extensions.glob("_json*.so")), path)
    before = f"import ctypes, os\nctypes.CDLL({str(library)!r})\nos.replace({str(new)!r}, {str(library)!r})\n"
    with _watching(folder, before=before) as watcher:
        assert watcher.find_changed() == "../mapped.so"


def test_archive_whose_folder_is_imported_from_is_named(folder: Path, tmp_path: Path) -> None:
    def write(names: list[str]) -> None:
        with zipfile.ZipFile(tmp_path / "new.zip", "w") as archive:
            for name in names:
                archive.writestr(f"lib/{name}.py", "")
        (tmp_path / "new.zip").replace(tmp_path / "packed.zip")

    write(["packed"])
    path = f"{tmp_path}/packed.zip/lib"
    with _watching(folder, before=f"import sys; sys.path.append({path!r}); import packed") as watcher:
        assert watcher.find_changed() == ""
        write(["packed", "more"])
        assert watcher.find_changed().startswith("../packed.zip/lib")


def test_relative_path_that_an_import_adds_is_no_change(folder: Path) -> None:
    """A relative path starts at the session's folder, but the warm process changes to another one."""
    before = "import os, sys; sys.path.append('.'); sys.path.append('package')\n"
    with _watching(folder, before=before) as watcher:
        assert watcher.find_changed() == ""


@pytest.mark.usefixtures("site_packages")
def test_other_python_behind_the_same_name_is_named(folder: Path, tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    with _watching(folder, python=str(python)) as watcher:
        assert watcher.find_changed() == ""
        copy = shutil.copy(python.resolve(), tmp_path / "python")
        (tmp_path / "link").symlink_to(copy)
        (tmp_path / "link").replace(python)
        assert watcher.find_changed() == "../venv/bin/python"


def test_what_an_import_compiles_is_no_change(folder: Path) -> None:
    with _watching(folder, PYTHONDONTWRITEBYTECODE="") as watcher:
        assert (folder / "__pycache__").exists()
        assert (folder / "package/__pycache__").exists()
        assert watcher.find_changed() == ""


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    """Return the site-packages of a virtual environment whose Python is ``venv/bin/python``."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=60)
    (folder,) = tmp_path.glob("venv/lib/python*/site-packages")
    (folder / "paths.pth").write_text("# one\n../later\n")
    return folder


def test_pth_file_of_site_packages_and_the_folders_it_names_are_compared(
    folder: Path, site_packages: Path, tmp_path: Path
) -> None:
    with _watching(folder, python=str(tmp_path / "venv/bin/python")) as watcher:
        assert watcher.find_changed() == ""
        (site_packages.parent / "later").mkdir()
        assert watcher.find_changed() == os.path.relpath(site_packages.parent / "later", folder)
        (site_packages.parent / "later").rmdir()
        assert watcher.find_changed() == ""
        (site_packages / "paths.pth").write_text("# two\n")
        assert watcher.find_changed() == os.path.relpath(site_packages / "paths.pth", folder)


@pytest.mark.parametrize("name", ["more.pth", "more.py"])
def test_new_file_of_site_packages_is_named(name: str, folder: Path, site_packages: Path, tmp_path: Path) -> None:
    with _watching(folder, python=str(tmp_path / "venv/bin/python")) as watcher:
        (site_packages / name).touch()
        assert watcher.find_changed() == os.path.relpath(site_packages / name, folder)


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
        assert watcher.find_changed() == "../libraries/libstdc++.so.6"


@pytest.mark.usefixtures("site_packages")
def test_settings_of_a_virtual_environment_are_compared(folder: Path, tmp_path: Path) -> None:
    with (
        _watching(folder, python=str(tmp_path / "venv/bin/python")) as watcher,
        open(tmp_path / "venv/pyvenv.cfg", "a") as file,
    ):
        assert watcher.find_changed() == ""
        print("include-system-site-packages = true", file=file, flush=True)
        assert watcher.find_changed() == "../venv/pyvenv.cfg"


def test_data_that_is_mapped_is_no_import(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "table").write_bytes(b"0" * 4096)
    before = f"import mmap\nfile = open({str(tmp_path / 'table')!r}, 'r+b')\nheld = mmap.mmap(file.fileno(), 0)\n"
    with _watching(folder, before=before) as watcher:
        os.utime(tmp_path / "table")
        assert watcher.find_changed() == ""


def test_link_that_leads_nowhere_hides_no_name_beside_it(folder: Path) -> None:
    (folder / "data").symlink_to("data")
    with _watching(folder) as watcher:
        assert watcher.find_changed() == ""
        (folder / "later.py").touch()
        assert watcher.find_changed() == "later.py"


_ODD = """
import importlib.util, pathlib, sys, types
class Lazy(types.ModuleType):
    def __getattr__(self, name):
        raise ImportError(name)
class Endless:
    def __iter__(self):
        while True:
            yield "/x"
class Orphan:
    def __iter__(self):
        raise KeyError("its parent")
for name, path in {"endless": Endless(), "orphan": Orphan(), "number": 7, "numbers": [7]}.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = path
spec = importlib.util.find_spec("this")  # it prints when it is imported
loader = importlib.util.LazyLoader(spec.loader)
sys.modules["this"] = importlib.util.module_from_spec(spec)
loader.exec_module(sys.modules["this"])
sys.modules |= {"lazy": Lazy("lazy"), "nothing": None, "text": "", 7: types.ModuleType("seven")}
sys.path += [pathlib.Path("/x"), b"/x", None, 7, "/\\udcff"]
"""


def test_odd_modules_and_paths_are_no_change_and_no_lazy_module_is_imported(folder: Path) -> None:
    with _watching(folder, before=_ODD) as watcher:
        assert watcher.find_changed() == ""
        (folder / "library.py").write_text("VERSION = 'two'\n")
        assert watcher.find_changed() == "library.py"


def test_look_that_fails_is_told_when_the_imports_would_be_used_again(folder: Path) -> None:
    with _watching(folder, before="import site; site.getusersitepackages = 7\n") as watcher:
        assert watcher.find_changed() == "the set of imported modules (TypeError: 'int' object is not callable)"
