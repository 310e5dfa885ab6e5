"""Whether another import would bring what this process has imported: its files, and the places where imports look."""

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
    """Every file that this process has imported or mapped, and every place where an import looks, as they are now.

    One that has changed since this process began counts as changed: what was imported may be what was there before.
    Of a folder only those names count that an import, or the system's loader, could take.
    What a module reads besides, at its import, is not known.

    Relative paths are left out: they begin in no folder of the user's.
    """

    def __init__(self) -> None:
        self._stamps: dict[str, _Stamp | None] = {}
        self._names: dict[str, frozenset[str]] = {}
        try:
            self._changed = self._look()
        except Exception as exc:  # noqa: BLE001  modules may be anything: none of them keeps a session from starting
            self._changed = f"what is imported ({type(exc).__name__}: {exc})"

    def find_changed(self) -> str:
        """A path that is not as it was: another import could bring something else. Empty when there is none."""
        return self._changed or next(self._find_changed(), "")

    def _look(self) -> str:
        """Note what is there; returns what has changed already."""
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
        """What may have changed after the moment. A folder changes with what it holds: only a new name counts."""
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
    yield sys.executable  # a link perhaps, to the file that is mapped
    for module in list(sys.modules.values()):
        if isinstance(path := _own(module, "__file__"), str):
            yield path


def _mapped_files() -> Iterator[str]:
    """Python itself and the shared libraries: torch is mostly these. One that is "deleted" may have been replaced."""
    for line in Path("/proc/self/maps").read_text("utf-8", errors="replace").splitlines():
        _, rights, *_ = line.split(" ", 2)
        if "x" in rights and "/" in line:
            yield line[line.find("/") :].removesuffix(" (deleted)")


def _places_of_imports() -> Iterator[str]:
    """Where Python looks for modules, and at its start for more such folders, be they there or not."""
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
                yield from (os.path.join(folder, name) for name in names & imported)  # a package one day, perhaps
                infos = (name for name in names if name.endswith((".dist-info", ".egg-info")))
                yield from (os.path.join(folder, name, "entry_points.txt") for name in infos)
    for folder in _site_folders():
        yield from _places_of_pth(folder)


def _site_folders() -> set[str]:
    """Those in which Python reads a ``.pth`` file. Elsewhere it is a checkpoint."""
    return {*site.getsitepackages(), site.getusersitepackages()}


def _places_of_pth(folder: str) -> Iterator[str]:
    """The folder's ``.pth`` files, and the folders they name."""
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
    """Of a package, one without an ``__init__.py`` too."""
    path = _own(module, "__path__")
    if isinstance(path, Iterable) and not isinstance(path, (str, Iterator)):
        with contextlib.suppress(Exception):  # one whose parent is gone
            return [folder for folder in itertools.islice(path, _MOST_FOLDERS) if isinstance(folder, str)]
    return []


def _own(module: object, name: str) -> object:
    """An attribute, without an import for its sake: there are lazy modules, and things that have any attribute."""
    try:
        return object.__getattribute__(module, "__dict__").get(name)
    except Exception:  # noqa: BLE001
        return None


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


def _is_younger(look: Callable[[str], os.stat_result], path: str, moment: float) -> bool:
    """By the time that the system sets at every change: one that was modified "tomorrow" is not younger for that."""
    with contextlib.suppress(OSError, ValueError):
        return look(path).st_ctime >= moment
    return False


def _names_in(folder: str) -> frozenset[str]:
    """Those that an import or the loader could take; none where the folder cannot be listed."""
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
    """A link may be to one: what is behind it is not looked at, a file system perhaps that does not answer."""
    if not entry.name.isidentifier():
        return False
    return entry.is_symlink() or (
        entry.is_dir(follow_symlinks=False) and os.path.exists(os.path.join(entry.path, "__init__.py"))
    )


def _stamp(path: str) -> _Stamp | None:
    """What changes with a file's content; of a path in an archive, with the archive's. None where nothing is."""
    try:
        state = os.stat(path)
    except NotADirectoryError:
        return _stamp(os.path.dirname(path))
    except (OSError, ValueError):
        return None
    return state.st_ino, state.st_mtime_ns, state.st_ctime_ns, state.st_size
