"""Whether the kernel's out-of-memory killer ended a process, from what Linux counts for it. Elsewhere: not known."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL

_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes the largest page count there is
_ESCAPED = re.compile(r"\\([0-7]{3})")


class OomWatch:
    """Counts of out-of-memory kills around a process, to compare before and after.

    The count of the cgroup that holds the process decides. Where none can be read, that of the machine does, which in a
    container counts other people's processes too: the reason then says "probably".
    """

    def __init__(self, pid: int, *, root: Path = Path("/")) -> None:
        self._root = str(root).rstrip("/")
        self._pid = pid
        self._mounts = _read_mounts(self._root)
        self._cgroups: str | None = None
        self._groups: list[_Group] = []
        self._is_guess = False
        self._counts: list[tuple[int | None, int | None]] = []
        self._kills_of_machine = self._count_of_machine()
        self.refresh()

    def refresh(self) -> None:
        """Count from now on, in the cgroups it is in now: what was ended there before was another process."""
        statm = _read(f"{self._root}/proc/{self._pid}/statm")
        cgroups = _read(f"{self._root}/proc/{self._pid}/cgroup")
        if statm is not None and statm.startswith("0 "):  # it has ended: cgroup v1 shows it in the root group
            return
        if cgroups is not None and cgroups != self._cgroups:
            self._cgroups = cgroups
            self._groups, self._is_guess = _find_groups(cgroups, self._mounts)
        self._counts = [(group.kills(), group.hits()) for group in self._groups]
        if self._is_guess or all(kills is None for kills, _ in self._counts):
            self._kills_of_machine = self._count_of_machine()

    def reason(self, *, signal: int) -> str:
        """Say why ``signal`` ended the process, when that was for want of memory; else ""."""
        verdict = self._verdict() if signal == SIGKILL else ""
        return f"{verdict}: {self._cause(verdict)}" if verdict else ""

    def _verdict(self) -> str:
        is_removed = False
        for group, (before, _) in zip(self._groups, self._counts):
            if before is None:
                continue
            now = group.kills()
            if now is None:  # removed with its last process: the group above may have counted it
                is_removed = True
            elif now > before:
                return "probably out of memory" if is_removed else "out of memory"
            elif group.version == 2 or not (is_removed or self._is_guess):
                return ""
            else:
                break
        before, now = self._kills_of_machine, self._count_of_machine()
        return "probably out of memory" if before is not None and now is not None and now > before else ""

    def _cause(self, verdict: str) -> str:
        for group, (_, before) in zip(self._groups, self._counts):
            now, limit = group.hits(), group.limit_bytes()
            is_hit = before is not None and now is not None and now > before
            if limit is not None and (is_hit or group.has_been_full()):
                return f"the limit of its cgroup is {_size(limit)}"
        ended = "it" if verdict == "out of memory" else "a process of this machine"
        return f"the kernel ended {ended} to free memory"

    def _count_of_machine(self) -> int | None:
        return _read_number(f"{self._root}/proc/vmstat", "oom_kill ")


@dataclass(frozen=True)
class _Group:
    """A folder of the memory controller."""

    folder: str
    version: int

    def kills(self) -> int | None:
        """How many processes were ended: in version 1 of this group alone, in version 2 of all below it too."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        return _read_number(f"{self.folder}/{name}", "oom_kill ")

    def hits(self) -> int | None:
        """How often its limit was in the way: in version 1 of any allocation, in version 2 of one that then failed."""
        if self.version == 1:
            return _read_number(f"{self.folder}/memory.failcnt")
        local = _read_number(f"{self.folder}/memory.events.local", "oom ")
        return _read_number(f"{self.folder}/memory.events", "oom ") if local is None else local

    def has_been_full(self) -> bool:
        """Version 1: whether memory and swap together were at their limit, hits of which newer kernels do not count."""
        peak = _read_number(f"{self.folder}/memory.memsw.max_usage_in_bytes")
        limit = _read_number(f"{self.folder}/memory.memsw.limit_in_bytes")
        return peak is not None and limit is not None and peak >= 0.99 * limit

    def limit_bytes(self) -> int | None:
        name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        limit = _read_number(f"{self.folder}/{name}")
        return None if limit is None or limit >= _UNLIMITED_BYTES else limit


@dataclass(frozen=True)
class _Mount:
    """Where the folders of a memory controller are seen, and which of its groups the topmost one is."""

    folder: str
    group: str
    version: int

    def folder_of(self, group: str) -> str | None:
        """The folder of ``group``; None where it lies outside of this mount, as in a container."""
        top = self.group.rstrip("/")
        below = group.rstrip("/")
        if below != top and not below.startswith(f"{top}/"):
            return None
        below = below[len(top) :]
        folder = self.folder + below
        return folder if ".." not in below.split("/") and os.path.isdir(folder) else None


def _read_mounts(root: str) -> list[_Mount]:
    mounts = []
    for line in (_read(f"{root}/proc/self/mountinfo") or "").split("\n"):
        left, _, right = line.partition(" - ")
        where, what = left.split(" "), right.split(" ")
        is_v1 = what[0] == "cgroup" and "memory" in what[-1].split(",")
        if len(where) > 4 and (is_v1 or what[0] == "cgroup2"):
            group, folder = (_ESCAPED.sub(lambda match: chr(int(match[1], 8)), text) for text in where[3:5])
            mounts.append(_Mount(root + folder.rstrip("/"), group, 1 if is_v1 else 2))
    return mounts


def _find_groups(cgroups: str, mounts: list[_Mount]) -> tuple[list[_Group], bool]:
    """The group of a process and those above it, up to the mount; whether its group is a guess: the mount's own."""
    paths = {}
    for line in cgroups.split("\n"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            paths[1] = path
        elif line.startswith("0::"):
            paths[2] = path
    version = min(paths, default=0)  # the controller is in one hierarchy; a process has a path in version 2 anyway
    mounts = [mount for mount in mounts if mount.version == version]
    for mount in mounts:
        folder = mount.folder_of(paths[version])
        if folder is not None:
            depth = folder[len(mount.folder) :].count("/")
            return [_Group(folder.rsplit("/", above)[0], version) for above in range(depth + 1)], False
    return [_Group(mount.folder, version) for mount in mounts[:1]], True


def _read(path: str) -> str | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return os.fsdecode(file.read())
    except (OSError, ValueError):  # ValueError: a path with a NUL in it
        return None


def _read_number(path: str, name: str = "") -> int | None:
    """The number behind ``name`` at the start of a line; None where there is none."""
    match = re.search(rf"^{name}(\d{{1,20}})", _read(path) or "", re.MULTILINE)
    return int(match[1]) if match else None


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:,.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:,.0f} MB"
