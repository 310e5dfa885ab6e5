"""What a process inherits or has imported: two that agree here behave the same, as far as the system can tell."""

from __future__ import annotations

import contextlib
import os
import re
import site
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..launch import GPUS_VARIABLE, RANK_CONFIG_VARIABLE, STORE_FD_VARIABLE, WARM_FD_VARIABLE

_MOST_NAMES = 3
_UMASK = re.compile(r"^Umask:\s*([0-7]+)$", re.MULTILINE)
_CACHE_NAME = "__pycache__"
_LOADER_FILES = ("/etc/ld.so.cache", "/etc/ld.so.preload")
_RIGHTS = re.compile(r"^(Uid|Gid|Groups|Cap\w+|NoNewPrivs|Seccomp):[ \t]*(.*)$", re.MULTILINE)

# What differs between two starts and is read by nothing that a warm process imports: by the worker and its interpreter.
PER_SESSION_VARIABLES = frozenset(
    {
        RANK_CONFIG_VARIABLE,
        STORE_FD_VARIABLE,
        WARM_FD_VARIABLE,
        GPUS_VARIABLE,
        "CUDA_VISIBLE_DEVICES",  # CUDA is initialised in the interpreter, never before
        "PYTEST_CURRENT_TEST",  # pytest sets it anew for every test
    }
)


def read_surroundings(pid: int | None = None) -> dict[str, str]:
    """What a process of this node would hand down to one that it starts: its rights, cgroup, limits, CPUs, priority.

    ``pid``: of another process than this one. Raises: OSError when there is no such process.
    """
    folder = f"/proc/{pid or 'self'}"
    found = {name: _read(f"{folder}/{name}") for name in ("cgroup", "limits", "oom_score_adj")}
    found["affinity"] = ",".join(map(str, sorted(os.sched_getaffinity(pid or 0))))
    found["priority"] = f"{os.sched_getscheduler(pid or 0)} {os.getpriority(os.PRIO_PROCESS, pid or 0)}"
    found["rights"] = str(_RIGHTS.findall(_read(f"{folder}/status")))
    return found


def read_starter() -> dict[str, str]:
    """What an agent would get from this process, if this process started it now; empty where that cannot be read."""
    with contextlib.suppress(OSError, AttributeError):
        umask = _UMASK.search(_read("/proc/self/status"))
        return {**read_surroundings(), "python": os.path.normpath(sys.executable), "umask": umask[1] if umask else ""}
    return {}


def without_session_variables(env: dict[str, str]) -> dict[str, str]:
    """The part of an environment that must be the same for two starts to share what was imported."""
    return {name: value for name, value in env.items() if name not in PER_SESSION_VARIABLES}


def find_difference(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The names that two of these do not agree on, a few of them; empty when there are none."""
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


class ImportedEnvironment:
    """What imports have changed in the environment of this process, a ``sitecustomize`` too, which runs before us."""

    def __init__(self) -> None:
        before = _read_first_environment()
        names = {*before, *os.environ}
        self._changes = [(name, before.get(name), os.environ.get(name)) for name in names]

    def applied_to(self, env: Mapping[str, str]) -> dict[str, str]:
        """The environment after the same imports. A variable that was another one before them is left as it is."""
        made = dict(env)
        for name, before, after in self._changes:
            if made.get(name) != before:
                continue
            if after is None:
                made.pop(name, None)
            else:
                made[name] = after
        return made


class ImportedFiles:
    """Every file that this process has imported or mapped, and every place where an import looks, as they are now.

    One that has changed since this process began counts as changed: what was imported may be what was there before.
    What a module reads besides, at its import, is not known.
    The folder in which ``python -m`` was started is taken out of ``sys.path``: it is a session's, and goes with that.
    """

    def __init__(self) -> None:
        sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
        modules = list(sys.modules.values())
        files = {str(module.__file__) for module in modules if getattr(module, "__file__", None)}
        packages = {path for module in modules for path in _folders_of(module)}
        paths = {*files, *packages, *sys.path, *_mapped_files(), *_places_of_site(), *_places_of_the_loader()} - {""}
        self._stamps = {path: _stamp(path) for path in sorted(paths)}
        began_at = _began_at()
        self._changed = next((path for path in self._stamps if self._has_changed_since(began_at, path)), "")

    def find_changed(self) -> str:
        """A path that is not as it was: another import could bring something else. Empty when there is none."""
        return self._changed or next((path for path, stamp in self._stamps.items() if _stamp(path) != stamp), "")

    def _has_changed_since(self, began_at: float, path: str) -> bool:
        """An import itself makes a folder for what it compiles; folders that are listed are looked at by themselves."""
        if not _is_younger(path, began_at):
            return False
        if not os.path.isdir(path):
            return True
        try:
            names = [name for name in os.listdir(path) if name != _CACHE_NAME]
        except OSError:
            return True
        made = [entry for name in names if _is_younger(entry := os.path.join(path, name), began_at)]
        return any(entry not in self._stamps or not os.path.isdir(entry) for entry in made)


def _folders_of(module: object) -> list[str]:
    """Of a package, one without an ``__init__.py`` too; torch has things in ``sys.modules`` that have any attribute."""
    path = getattr(module, "__dict__", {}).get("__path__", ())
    with contextlib.suppress(TypeError):
        return [] if isinstance(path, str) else [str(folder) for folder in path]
    return []


def _places_of_site() -> Iterator[str]:
    """Where Python looks at its start for more folders, be they there or not."""
    yield os.path.join(sys.prefix, "pyvenv.cfg")
    yield site.getusersitepackages()
    for folder in sys.path:
        for path in Path(folder).glob("*.pth"):
            yield str(path)
            with contextlib.suppress(OSError):
                lines = path.read_text("utf-8", errors="replace").splitlines()
                yield from (
                    os.path.join(folder, line.strip())
                    for line in lines
                    if line.strip() and "\0" not in line and not line.startswith(("#", "import ", "import\t"))
                )


def _places_of_the_loader() -> Iterator[str]:
    """Where the system looks for shared libraries before the usual folders."""
    yield from _LOADER_FILES
    for name in ("LD_LIBRARY_PATH", "LD_PRELOAD"):
        yield from (path for path in re.split(r"[:; ]", os.environ.get(name, "")) if path.startswith("/"))


def _began_at() -> float:
    """When this process began, at the latest: a file of that time or later may have changed while it imported."""
    ticks = int(_read("/proc/self/stat").rpartition(")")[2].split()[19]) + 1  # rounded up: Python has read nothing yet
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def _is_younger(path: str, moment: float) -> bool:
    with contextlib.suppress(OSError, ValueError):
        state = os.lstat(path)
        return max(state.st_mtime, state.st_ctime) >= moment
    return False


def _read_first_environment() -> dict[str, str]:
    """That with which this process was started; what is there now where the system does not say."""
    try:
        with open("/proc/self/environ", "rb") as file:
            lines = file.read().split(b"\0")
    except OSError:
        return dict(os.environ)
    pairs = (line.partition(b"=") for line in lines if b"=" in line)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _stamp(path: str) -> tuple[int, ...] | None:
    """What changes with a file's content; of a folder, with the names in it."""
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return None
    return state.st_ino, state.st_mtime_ns, state.st_ctime_ns, state.st_size


def _mapped_files() -> set[str]:
    """Python itself and the shared libraries: torch is mostly these."""
    return {path for line in _read("/proc/self/maps").splitlines() if (path := line[line.find("/") :]).startswith("/")}


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
