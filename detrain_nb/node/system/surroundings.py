"""The settings that a process inherits: processes that agree in them behave the same, as far as the system shows."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping

from ...launch import GPUS_VARIABLE, RANK_CONFIG_VARIABLE, STORE_FD_VARIABLE, WARM_FD_VARIABLE
from ...metrics import STEPS_VARIABLE
from ...text import name_some

_UMASK = re.compile(r"^Umask:\s*([0-7]+)$", re.MULTILINE)
_RIGHTS = re.compile(r"^(Uid|Gid|Groups|Cap\w+|NoNewPrivs|Seccomp):[ \t]*(.*)$", re.MULTILINE)

# Variables that differ between two starts and are read by the worker and its interpreter only, not by imported modules.
PER_SESSION_VARIABLES = frozenset(
    {
        RANK_CONFIG_VARIABLE,
        STORE_FD_VARIABLE,
        WARM_FD_VARIABLE,
        GPUS_VARIABLE,
        STEPS_VARIABLE,
        "CUDA_VISIBLE_DEVICES",  # CUDA is initialised in the interpreter, never earlier
        "PYTEST_CURRENT_TEST",  # pytest sets it for every test
    }
)


def read_surroundings(pid: int | None = None) -> dict[str, str]:
    """Read what a process hands down to its children: rights, cgroup, limits, CPUs, priority.

    ``pid``: the process; by default this one. Raises: OSError when there is no such process.
    """
    folder = f"/proc/{pid or 'self'}"
    found = {name: _read(f"{folder}/{name}") for name in ("cgroup", "limits", "oom_score_adj")}
    found["affinity"] = ",".join(map(str, sorted(os.sched_getaffinity(pid or 0))))
    found["priority"] = f"{os.sched_getscheduler(pid or 0)} {os.getpriority(os.PRIO_PROCESS, pid or 0)}"
    found["rights"] = str(_RIGHTS.findall(_read(f"{folder}/status")))
    return found


def read_starter() -> dict[str, str]:
    """Read what an agent would inherit if this process started it now; empty if it cannot be read."""
    with contextlib.suppress(OSError, AttributeError):
        umask = _UMASK.search(_read("/proc/self/status"))
        return {**read_surroundings(), "python": os.path.normpath(sys.executable), "umask": umask[1] if umask else ""}
    return {}


def without_session_variables(env: dict[str, str]) -> dict[str, str]:
    """Return the part of an environment that must be equal for two starts to share imported modules."""
    return {name: value for name, value in env.items() if name not in PER_SESSION_VARIABLES}


def find_difference(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Name some of the settings that differ between two readings; empty if none do."""
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    return name_some(names)


class ImportedEnvironment:
    """The changes that imports, including ``sitecustomize``, have made to the environment of this process."""

    def __init__(self) -> None:
        before = _read_first_environment()
        names = {*before, *os.environ}
        self._changes = [(name, before.get(name), os.environ.get(name)) for name in names]

    def applied_to(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return ``env`` as the same imports would change it; variables with other initial values are left alone."""
        made = {name: value for name, value in env.items() if name}  # Python cannot set a variable without a name
        for name, before, after in self._changes:
            if made.get(name) != before:
                continue
            if after is None:
                made.pop(name, None)
            else:
                made[name] = after
        return made


def _read_first_environment() -> dict[str, str]:
    """Read the environment with which this process was started; the present one if the system does not show it."""
    try:
        with open("/proc/self/environ", "rb") as file:
            lines = file.read().split(b"\0")
    except OSError:
        return dict(os.environ)
    pairs = (line.partition(b"=") for line in lines if b"=" in line)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
