"""Cgroups for tests in which the kernel limits a resource of a process. Only that process is ever moved into one."""

from __future__ import annotations

import contextlib
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")  # cgroup v1 has a subfolder for each controller


class MemoryCgroup:
    """A memory cgroup, with or without a limit of its own."""

    def __init__(self, folder: Path, limit_bytes: int | None) -> None:
        self.folder = folder
        is_v1 = is_version_1("memory")
        if limit_bytes is not None:
            (folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit_bytes))
            with contextlib.suppress(OSError):  # a kernel without swap accounting
                (folder / ("memory.memsw.limit_in_bytes" if is_v1 else "memory.swap.max")).write_text(
                    str(limit_bytes if is_v1 else 0)
                )

    def add(self, pid: int) -> None:
        """Move a process into the cgroup; memory that it already uses stays charged to its old cgroup.

        If the machine itself runs out of memory, the kernel kills this process first.
        """
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        (self.folder / "cgroup.procs").write_text(str(pid))

    def processes(self) -> list[int]:
        return [int(pid) for pid in (self.folder / "cgroup.procs").read_text().split()]


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int | None = None, *, below: MemoryCgroup | None = None) -> Iterator[MemoryCgroup]:
    """Create a memory cgroup for the block, as ``cgroup`` does. Raises: OSError when it cannot be created."""
    with cgroup("memory", below=below.folder if below else None) as folder:
        yield MemoryCgroup(folder, limit_bytes)


@contextlib.contextmanager
def cgroup(controller: str, *, below: Path | None = None) -> Iterator[Path]:
    """Create a cgroup for the block. Processes still in it at the end move back to the cgroup of the tests.

    Raises: OSError when no cgroup can be created: without root, or in a container.
    """
    top, home = _find_hierarchy(controller)
    if below is not None and not is_version_1(controller):
        (below / "cgroup.subtree_control").write_text(f"+{controller}")
    folder = (below or top) / f"detrain-nb-test-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield folder
    finally:
        _remove(folder, home)


def is_version_1(controller: str) -> bool:
    return (_ROOT / controller / "cgroup.procs").exists()


def _remove(folder: Path, home: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (home / "cgroup.procs").write_text(pid)
        try:
            return folder.rmdir()
        except OSError:  # a killed process has not left the cgroup yet
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def can_make_cgroups() -> bool:
    """Return whether a process can be moved into a new cgroup."""
    try:
        with memory_cgroup(64 << 20) as group, subprocess.Popen(["sleep", "10"]) as process:
            try:
                group.add(process.pid)
                return process.pid in group.processes()
            finally:
                process.kill()
    except OSError:
        return False


def _find_hierarchy(controller: str) -> tuple[Path, Path]:
    """Return the folder in which to create cgroups, and the folder of this process's cgroup.

    Raises: FileNotFoundError when cgroup v2 does not delegate the controller.
    """
    if is_version_1(controller):
        top, name = _ROOT / controller, controller
    elif controller in (_ROOT / "cgroup.subtree_control").read_text().split():
        top, name = _ROOT, ""
    else:
        raise FileNotFoundError(f"{_ROOT} does not hand the {controller} controller down")
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    home = next((top / path.lstrip("/") for _, names, path in lines if name in names.split(",")), top)
    return top, home if home.is_dir() else top
