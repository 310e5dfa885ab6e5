"""Detection of kills by the kernel's out-of-memory killer, from Linux's counters; on other systems, unknown."""

from __future__ import annotations

from pathlib import Path
from signal import SIGKILL

from ...text import format_size
from ..system.cgroups import Cgroup, find_groups, read_mounts
from ..system.proc_files import read, read_number


class OomWatch:
    """Counts of out-of-memory kills around a process, compared before and after its end.

    The count of the process's cgroup decides. If none can be read, the machine's count is used; in a container that
    includes other people's processes, so the reason then says "probably".
    """

    def __init__(self, pid: int, *, root: Path = Path("/")) -> None:
        self._root = str(root).rstrip("/")
        self._pid = pid
        self._mounts = read_mounts(self._root)
        self._cgroups: str | None = None
        self._groups: list[Cgroup] = []
        self._is_guess = False
        self._counts: list[tuple[int | None, int | None]] = []
        self._kills_of_machine = self._count_of_machine()
        self.refresh()

    def refresh(self) -> None:
        """Start counting again, in the process's current cgroups: earlier kills there hit other processes."""
        statm = read(f"{self._root}/proc/{self._pid}/statm")
        cgroups = read(f"{self._root}/proc/{self._pid}/cgroup")
        if statm is not None and statm.startswith("0 "):  # it has exited: cgroup v1 now shows it in the root group
            return
        if cgroups is not None and cgroups != self._cgroups:
            self._cgroups = cgroups
            self._groups, self._is_guess = find_groups(cgroups, self._mounts)
        self._counts = [(group.kills(), group.hits()) for group in self._groups]
        if self._is_guess or all(kills is None for kills, _ in self._counts):
            self._kills_of_machine = self._count_of_machine()

    def reason(self, *, signal: int) -> str:
        """Return why ``signal`` killed the process, if it was for lack of memory; else ""."""
        verdict = self._verdict() if signal == SIGKILL else ""
        return f"{verdict}: {self._cause(verdict)}" if verdict else ""

    def _verdict(self) -> str:
        is_removed = False
        for group, (before, _) in zip(self._groups, self._counts):
            if before is None:
                continue
            now = group.kills()
            if now is None:  # removed with its last process: the parent group may have counted the kill
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
                return f"the limit of its cgroup is {format_size(limit, smallest='MB')}"
        ended = "it" if verdict == "out of memory" else "a process on this machine"
        return f"the kernel killed {ended} to free memory"

    def _count_of_machine(self) -> int | None:
        return read_number(f"{self._root}/proc/vmstat", "oom_kill ")
