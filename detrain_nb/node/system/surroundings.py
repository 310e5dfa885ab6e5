"""What a process inherits: two that agree here behave the same, as far as the system can tell."""

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

# What differs between two starts and is read by nothing that a warm process imports: by the worker and its interpreter.
PER_SESSION_VARIABLES = frozenset(
    {
        RANK_CONFIG_VARIABLE,
        STORE_FD_VARIABLE,
        WARM_FD_VARIABLE,
        GPUS_VARIABLE,
        STEPS_VARIABLE,
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
    return name_some(names)


class ImportedEnvironment:
    """What imports have changed in the environment of this process, a ``sitecustomize`` too, which runs before us."""

    def __init__(self) -> None:
        before = _read_first_environment()
        names = {*before, *os.environ}
        self._changes = [(name, before.get(name), os.environ.get(name)) for name in names]

    def applied_to(self, env: Mapping[str, str]) -> dict[str, str]:
        """The environment after the same imports. A variable that was another one before them is left as it is."""
        made = {name: value for name, value in env.items() if name}  # the system has some that Python cannot set
        for name, before, after in self._changes:
            if made.get(name) != before:
                continue
            if after is None:
                made.pop(name, None)
            else:
                made[name] = after
        return made


def _read_first_environment() -> dict[str, str]:
    """That with which this process was started; what is there now where the system does not say."""
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
