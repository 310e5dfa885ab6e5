"""The cgroups that limit a process, of either version of Linux's cgroups; none on other systems.

This file is also part of the text of node/ssh/probe.py: it must run on Python 3.7.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from .proc_files import read, read_number

_UNLIMITED_BYTES = 1 << 60  # cgroup v1 shows the largest page count as "no limit"
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Cgroup:
    """A folder of the memory or the CPU controller."""

    folder: str
    version: int

    def kills(self) -> int | None:
        """Count the processes killed for lack of memory: in this group; in version 2 also in all groups below it."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        return read_number(f"{self.folder}/{name}", "oom_kill ")

    def hits(self) -> int | None:
        """Count how often the limit was hit: in version 1 by any allocation, in version 2 by one that then failed."""
        if self.version == 1:
            return read_number(f"{self.folder}/memory.failcnt")
        local = read_number(f"{self.folder}/memory.events.local", "oom ")
        return read_number(f"{self.folder}/memory.events", "oom ") if local is None else local

    def has_been_full(self) -> bool:
        """Check (version 1) whether memory plus swap reached their limit; newer kernels do not count such hits."""
        peak = read_number(f"{self.folder}/memory.memsw.max_usage_in_bytes")
        limit = read_number(f"{self.folder}/memory.memsw.limit_in_bytes")
        return peak is not None and limit is not None and peak >= 0.99 * limit

    def limit_bytes(self) -> int | None:
        name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        limit = read_number(f"{self.folder}/{name}")
        return None if limit is None or limit >= _UNLIMITED_BYTES else limit

    def free_bytes(self) -> int | None:
        """Return the bytes left below the limit, counting reclaimable file cache as free; None without a limit."""
        limit = self.limit_bytes()
        used = read_number(f"{self.folder}/{'memory.usage_in_bytes' if self.version == 1 else 'memory.current'}")
        if limit is None or used is None:
            return None
        name = "total_inactive_file " if self.version == 1 else "inactive_file "
        return max(0, limit - used + (read_number(f"{self.folder}/memory.stat", name) or 0))

    def limit_cpus(self) -> float | None:
        """Return how many processors the group may use at once; None without a limit."""
        if self.version == 1:
            words = [(read(f"{self.folder}/cpu.cfs_{name}_us") or "").strip() for name in ("quota", "period")]
        else:
            words = (read(f"{self.folder}/cpu.max") or "").split()
        has_limit = len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1])
        return int(words[0]) / int(words[1]) if has_limit else None


@dataclass(frozen=True)
class Mount:
    """A mount of a controller: its folder, and the group that this folder shows."""

    folder: str
    group: str
    version: int

    def folder_of(self, group: str) -> str | None:
        """Return the folder of ``group``; None if it is outside this mount, as in a container."""
        top = self.group.rstrip("/")
        below = group.rstrip("/")
        if below != top and not below.startswith(f"{top}/"):
            return None
        below = below[len(top) :]
        folder = self.folder + below
        return folder if ".." not in below.split("/") and os.path.isdir(folder) else None


def read_mounts(root: str, controller: str = "memory") -> list[Mount]:
    mounts = []
    for line in (read(f"{root}/proc/self/mountinfo") or "").split("\n"):
        left, _, right = line.partition(" - ")
        where, what = left.split(" "), right.split(" ")
        is_v1 = what[0] == "cgroup" and controller in what[-1].split(",")
        if len(where) > 4 and (is_v1 or what[0] == "cgroup2"):
            group, folder = (_ESCAPED.sub(lambda match: chr(int(match[1], 8)), text) for text in where[3:5])
            mounts.append(Mount(root + folder.rstrip("/"), group, 1 if is_v1 else 2))
    return mounts


def find_groups(cgroups: str, mounts: list[Mount], controller: str = "memory") -> tuple[list[Cgroup], bool]:
    """Return a process's group and its parents up to the mount, and whether the group is a guess (the mount's own)."""
    paths = {}
    for line in cgroups.split("\n"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(","):
            paths[1] = path
        elif line.startswith("0::"):
            paths[2] = path
    version = min(paths, default=0)  # version 1 if it has the controller; every process also has a path in version 2
    mounts = [mount for mount in mounts if mount.version == version]
    for mount in mounts:
        folder = mount.folder_of(paths[version])
        if folder is not None:
            depth = folder[len(mount.folder) :].count("/")
            return [Cgroup(folder.rsplit("/", above)[0], version) for above in range(depth + 1)], False
    return [Cgroup(mount.folder, version) for mount in mounts[:1]], True
