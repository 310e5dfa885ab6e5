"""Whether another import would bring what this process has imported: its files, and the places where imports look."""

from __future__ import annotations

import contextlib
import os
import re
import site
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_CACHE_NAME = "__pycache__"
_LOADER_FILES = ("/etc/ld.so.cache", "/etc/ld.so.preload")
_LOADED = re.compile(r"\.(py|pyc|so|so\..+|pth|egg-link|dist-info|egg-info)$")

_Stamp = tuple[int, int, int, int]


class ImportedFiles:
    """Every file that this process has imported or mapped, and every place where an import looks, as they are now.

    One that has changed since this process began counts as changed: what was imported may be what was there before.
    Of a folder only those names count that an import, or the system's loader, could take.
    What a module reads besides, at its import, is not known.

    The folder in which ``python -m`` was started is taken out of ``sys.path``: it is a session's, and goes with that.
    Relative paths begin there too, and are left out.
    """

    def __init__(self) -> None:
        sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
        began_at = _began_at()
        paths = {*_imported_files(), *_mapped_files(), *_places_of_imports(), *_places_of_the_loader()}
        self._stamps = {path: _stamp(path) for path in sorted(paths) if os.path.isabs(path)}
        self._names = {path: _names_in(path) for path in self._stamps if os.path.isdir(path)}
        self._changed = next(self._find_younger(began_at), "")

    def find_changed(self) -> str:
        """A path that is not as it was: another import could bring something else. Empty when there is none."""
        return self._changed or next(self._find_changed(), "")

    def _find_changed(self) -> Iterator[str]:
        for path, stamp in self._stamps.items():
            if _stamp(path) == stamp:
                continue
            if path in self._names and os.path.isdir(path):
                yield from (os.path.join(path, name) for name in sorted(self._names[path] ^ _names_in(path)))
            else:
                yield path

    def _find_younger(self, moment: float) -> Iterator[str]:
        """What may have changed after the moment. A folder changes with what it holds: only a package may be new."""
        for path, stamp in self._stamps.items():
            if stamp is None or not _is_younger(path, moment):
                continue
            if path not in self._names:
                yield path
            for name in sorted(self._names.get(path, ())):
                entry = os.path.join(path, name)
                is_new = entry not in self._stamps and _is_younger(entry, moment)
                if is_new and (_LOADED.search(name) or os.path.exists(os.path.join(entry, "__init__.py"))):
                    yield entry


def _imported_files() -> Iterator[str]:
    yield sys.executable  # a link perhaps, to the file that is mapped
    for module in list(sys.modules.values()):
        if path := getattr(module, "__file__", None):
            yield str(path)


def _mapped_files() -> Iterator[str]:
    """Python itself and the shared libraries: torch is mostly these. One that is "deleted" may have been replaced."""
    for line in Path("/proc/self/maps").read_text("utf-8", errors="replace").splitlines():
        yield line[line.find("/") :].removesuffix(" (deleted)") if "/" in line else ""


def _places_of_imports() -> Iterator[str]:
    """Where Python looks for modules, and at its start for more such folders, be they there or not."""
    yield os.path.join(sys.prefix, "pyvenv.cfg")
    yield site.getusersitepackages()
    imported = {name.partition(".")[0] for name in list(sys.modules)}
    for module in list(sys.modules.values()):
        yield from _folders_of(module)
    for folder in sys.path:
        yield folder
        for name in _names_in(folder):
            path = os.path.join(folder, name)
            if name in imported:  # no package yet, perhaps, and one when it has an __init__.py
                yield path
            elif name.endswith((".dist-info", ".egg-info")):
                yield os.path.join(path, "entry_points.txt")
            elif name.endswith(".pth"):
                yield path
                yield from (os.path.join(folder, line) for line in _read_pth(path))


def _folders_of(module: object) -> list[str]:
    """Of a package, one without an ``__init__.py`` too; torch has things in ``sys.modules`` that have any attribute."""
    path = getattr(module, "__dict__", {}).get("__path__", ())
    with contextlib.suppress(TypeError):
        return [] if isinstance(path, str) else [str(folder) for folder in path]
    return []


def _read_pth(path: str) -> list[str]:
    """The folders that it names."""
    try:
        lines = Path(path).read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [
        line.strip()
        for line in lines
        if line.strip() and "\0" not in line and not line.startswith(("#", "import ", "import\t"))
    ]


def _places_of_the_loader() -> Iterator[str]:
    """Where the system looks for shared libraries before the usual folders."""
    yield from _LOADER_FILES
    for name in ("LD_LIBRARY_PATH", "LD_PRELOAD"):
        yield from re.split(r"[:; ]", os.environ.get(name, ""))


def _began_at() -> float:
    """When this process began, at the latest: a file of that time or later may have changed while it imported."""
    stat = Path("/proc/self/stat").read_text("utf-8", errors="replace")
    ticks = int(stat.rpartition(")")[2].split()[19]) + 1  # rounded up: Python has read nothing yet
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def _is_younger(path: str, moment: float) -> bool:
    """By the time that the system sets at every change: one that was modified "tomorrow" is not younger for that."""
    with contextlib.suppress(OSError, ValueError):
        return max(os.lstat(path).st_ctime, os.stat(path).st_ctime) >= moment
    return False


def _names_in(folder: str) -> frozenset[str]:
    """Those that an import or the loader could take; none where the folder cannot be listed."""
    with contextlib.suppress(OSError, ValueError), os.scandir(folder) as entries:
        return frozenset(
            entry.name
            for entry in entries
            if _LOADED.search(entry.name)
            or (entry.name.isidentifier() and entry.name != _CACHE_NAME and entry.is_dir())
        )
    return frozenset()


def _stamp(path: str) -> _Stamp | None:
    """What changes with a file's content; of a path in an archive, with the archive's. None where nothing is."""
    try:
        state = os.stat(path)
    except NotADirectoryError:
        return _stamp(os.path.dirname(path))
    except (OSError, ValueError):
        return None
    return state.st_ino, state.st_mtime_ns, state.st_ctime_ns, state.st_size
