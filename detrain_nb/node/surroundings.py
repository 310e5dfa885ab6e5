"""What a process inherits or has imported: two that agree here behave the same, as far as the system can tell."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from ..launch import GPUS_VARIABLE, RANK_CONFIG_VARIABLE, STORE_FD_VARIABLE, WARM_FD_VARIABLE

_MOST_NAMES = 3
_UMASK = re.compile(r"^Umask:\s*([0-7]+)$", re.MULTILINE)
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
        return {**read_surroundings(), "python": sys.executable, "umask": umask[1] if umask else ""}
    return {}


def without_session_variables(env: dict[str, str]) -> dict[str, str]:
    """The part of an environment that must be the same for two starts to share what was imported."""
    return {name: value for name, value in env.items() if name not in PER_SESSION_VARIABLES}


def find_difference(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The names that two of these do not agree on, a few of them; empty when there are none."""
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


class ImportedFiles:
    """Every file that this process has imported or mapped, and every folder where an import looks, as they are now.

    What a module reads besides, at its import, is not known.
    The folder in which ``python -m`` was started is taken out of ``sys.path``: it is a session's, and goes with that.
    """

    def __init__(self) -> None:
        sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
        modules = list(sys.modules.values())
        files = {str(module.__file__) for module in modules if getattr(module, "__file__", None)}
        packages = {path for module in modules for path in _folders_of(module)}
        files.update(str(path) for folder in sys.path for path in Path(folder).glob("*.pth"))
        self._stamps = {path: _stamp(path) for path in sorted({*files, *packages, *sys.path, *_mapped_files()} - {""})}

    def find_changed(self) -> str:
        """A path that is not as it was: another import could bring something else. Empty when there is none."""
        return next((path for path, stamp in self._stamps.items() if _stamp(path) != stamp), "")


def _folders_of(module: object) -> list[str]:
    """Of a package, one without an ``__init__.py`` too; torch has things in ``sys.modules`` that have any attribute."""
    path = getattr(module, "__dict__", {}).get("__path__", ())
    with contextlib.suppress(TypeError):
        return [] if isinstance(path, str) else [str(folder) for folder in path]
    return []


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
