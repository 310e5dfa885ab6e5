"""Detection of changes in the files that this process has imported, and in the places where imports look."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import site
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_LOADER_FILES = ("/etc/ld.so.cache", "/etc/ld.so.preload")
_MOST_FOLDERS = 1000  # of one package
_MOST_PTH_BYTES = 1 << 16
_LOADED = re.compile(r"^[^.].*\.(py|pyc|so|so\..+|egg-link|dist-info|egg-info)$")

_Stamp = tuple[int, int, int, int]


class ImportedFiles:
    """The present state of every file that this process has imported or mapped, and of every place imports look in.

    A file that has changed since this process started counts as changed: the import may have read its earlier content.
    In a folder, only names that an import or the system's loader could use are compared.
    Other files that a module reads during its import are not known.

    Relative paths are left out: the warm process does not run in a folder of the user's.
    """

    def __init__(self) -> None:
        self._stamps: dict[str, _Stamp | None] = {}
        self._names: dict[str, frozenset[str]] = {}
        try:
            self._changed = self._look()
        except Exception as exc:  # noqa: BLE001  sys.modules may hold anything: it must not prevent a session's start
            self._changed = f"the set of imported modules ({type(exc).__name__}: {exc})"

    def find_changed(self) -> str:
        """Return a path that has changed, so that a new import could give another result; empty if there is none."""
        return self._changed or next(self._find_changed(), "")

    def _look(self) -> str:
        """Record the present state; returns a path that has already changed, else empty."""
        began_at = _began_at()
        paths = {*_imported_files(), *_mapped_files(), *_places_of_imports(), *_places_of_the_loader()}
        self._stamps = {path: _stamp(path) for path in sorted(paths) if os.path.isabs(path)}
        self._names = {path: _names_in(path) for path in self._stamps if os.path.isdir(path)}
        return next(self._find_younger(began_at), "")

    def _find_changed(self) -> Iterator[str]:
        for path, stamp in self._stamps.items():
            if _stamp(path) == stamp:
                continue
            if path in self._names and os.path.isdir(path):
                yield from (os.path.join(path, name) for name in sorted(self._names[path] ^ _names_in(path)))
            else:
                yield path

    def _find_younger(self, moment: float) -> Iterator[str]:
        """Yield paths that may have changed since ``moment``; in a folder, only new names count."""
        for path, stamp in self._stamps.items():
            if stamp is None or not (_is_younger(os.lstat, path, moment) or _is_younger(os.stat, path, moment)):
                continue
            if path not in self._names:
                yield path
            for name in sorted(self._names.get(path, ())):
                entry = os.path.join(path, name)
                if entry not in self._stamps and _is_younger(os.lstat, entry, moment):
                    yield entry


def _imported_files() -> Iterator[str]:
    yield sys.executable  # may be a link to the mapped file
    for module in list(sys.modules.values()):
        if isinstance(path := _own(module, "__file__"), str):
            yield path


def _mapped_files() -> Iterator[str]:
    """Yield Python itself and the shared libraries, of which torch mostly consists; "deleted" ones may be replaced."""
    for line in Path("/proc/self/maps").read_text("utf-8", errors="replace").splitlines():
        _, rights, *_ = line.split(" ", 2)
        if "x" in rights and "/" in line:
            yield line[line.find("/") :].removesuffix(" (deleted)")


def _places_of_imports() -> Iterator[str]:
    """Yield the places where Python looks for modules, and at its start for more folders, whether they exist or not."""
    yield os.path.join(sys.prefix, "pyvenv.cfg")
    yield site.getusersitepackages()
    for module in list(sys.modules.values()):
        yield from _folders_of(module)
    imported = {name.partition(".")[0] for name in list(sys.modules) if isinstance(name, str)}
    for folder in sys.path:
        if isinstance(folder, str):
            yield folder
            with contextlib.suppress(OSError, ValueError):
                names = set(os.listdir(folder))
                yield from (os.path.join(folder, name) for name in names & imported)  # may become a package
                infos = (name for name in names if name.endswith((".dist-info", ".egg-info")))
                yield from (os.path.join(folder, name, "entry_points.txt") for name in infos)
    for folder in _site_folders():
        yield from _places_of_pth(folder)


def _site_folders() -> set[str]:
    """Return the folders in which Python reads ``.pth`` files; elsewhere such a file is a checkpoint."""
    return {*site.getsitepackages(), site.getusersitepackages()}


def _places_of_pth(folder: str) -> Iterator[str]:
    """Yield the folder's ``.pth`` files, and the folders they name."""
    for path in Path(folder).glob("*.pth"):
        yield str(path)
        with contextlib.suppress(OSError):
            if not path.is_file():
                continue
            with open(path, encoding="utf-8", errors="replace") as file:
                lines = file.read(_MOST_PTH_BYTES).splitlines()
            yield from (
                os.path.join(folder, line.strip())
                for line in lines
                if line.strip() and "\0" not in line and not line.startswith(("#", "import ", "import\t"))
            )


def _folders_of(module: object) -> list[str]:
    """Return the folders of a package, including a namespace package; empty for other modules."""
    path = _own(module, "__path__")
    if isinstance(path, Iterable) and not isinstance(path, (str, Iterator)):
        with contextlib.suppress(Exception):  # a namespace package whose parent is missing
            return [folder for folder in itertools.islice(path, _MOST_FOLDERS) if isinstance(folder, str)]
    return []


def _own(module: object, name: str) -> object:
    """Read a module's own attribute without ``getattr``: lazy modules would import, and some objects have any name."""
    try:
        return object.__getattribute__(module, "__dict__").get(name)
    except Exception:  # noqa: BLE001
        return None


def _places_of_the_loader() -> Iterator[str]:
    """Yield the places where the system looks for shared libraries before the usual folders."""
    yield from _LOADER_FILES
    for name in ("LD_LIBRARY_PATH", "LD_PRELOAD"):
        yield from re.split(r"[:; ]", os.environ.get(name, ""))


def _began_at() -> float:
    """Return the latest time at which this process can have started; later files may have changed during imports."""
    stat = Path("/proc/self/stat").read_text("utf-8", errors="replace")
    ticks = int(stat.rpartition(")")[2].split()[19]) + 1  # rounded up: Python had read no file by then
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def _is_younger(look: Callable[[str], os.stat_result], path: str, moment: float) -> bool:
    """Compare by ctime, which the system sets at every change; an mtime may be in the future."""
    with contextlib.suppress(OSError, ValueError):
        return look(path).st_ctime >= moment
    return False


def _names_in(folder: str) -> frozenset[str]:
    """Return the names that an import or the loader could use; empty if the folder cannot be listed."""
    with contextlib.suppress(OSError, ValueError), os.scandir(folder) as entries:
        return frozenset(
            entry.name
            for entry in entries
            if _LOADED.search(entry.name)
            or _is_package(entry)
            or (entry.name.endswith(".pth") and folder in _site_folders())
        )
    return frozenset()


def _is_package(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry may be a package; links count unseen, as their file system may not respond."""
    if not entry.name.isidentifier():
        return False
    return entry.is_symlink() or (
        entry.is_dir(follow_symlinks=False) and os.path.exists(os.path.join(entry.path, "__init__.py"))
    )


def _stamp(path: str) -> _Stamp | None:
    """Return what changes with a file's content (for a path in an archive, the archive's); None if there is no file."""
    try:
        state = os.stat(path)
    except NotADirectoryError:
        return _stamp(os.path.dirname(path))
    except (OSError, ValueError):
        return None
    return state.st_ino, state.st_mtime_ns, state.st_ctime_ns, state.st_size
