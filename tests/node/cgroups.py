"""Cgroups for tests in which the kernel keeps a process short of something. Only that process is ever in one."""

from __future__ import annotations

import contextlib
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")  # version 1 has a folder there for each controller


class MemoryCgroup:
    """A cgroup with a limit of its own, or without."""

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
        """Move a process here, as the one to end should the machine itself run short. What it has counts elsewhere."""
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        (self.folder / "cgroup.procs").write_text(str(pid))

    def processes(self) -> list[int]:
        return [int(pid) for pid in (self.folder / "cgroup.procs").read_text().split()]


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int | None = None, *, below: MemoryCgroup | None = None) -> Iterator[MemoryCgroup]:
    """Make one for the block, as ``cgroup`` does. Raises: OSError where none can be made."""
    with cgroup("memory", below=below.folder if below else None) as folder:
        yield MemoryCgroup(folder, limit_bytes)


@contextlib.contextmanager
def cgroup(controller: str, *, below: Path | None = None) -> Iterator[Path]:
    """Make a cgroup for the block. Who is still in it at the end goes back to where the tests are.

    Raises: OSError where none can be made: not root, or a container.
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
        except OSError:  # one that was ended is still leaving
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def can_make_cgroups() -> bool:
    """Try it: a process goes into a cgroup and out again."""
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
    """The folder to make cgroups in, and that of this process; raises FileNotFoundError where there is none."""
    if is_version_1(controller):
        top, name = _ROOT / controller, controller
    elif controller in (_ROOT / "cgroup.subtree_control").read_text().split():
        top, name = _ROOT, ""
    else:
        raise FileNotFoundError(f"{_ROOT} does not hand the {controller} controller down")
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    home = next((top / path.lstrip("/") for _, names, path in lines if name in names.split(",")), top)
    return top, home if home.is_dir() else top
