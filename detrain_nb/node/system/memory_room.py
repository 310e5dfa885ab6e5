"""A check that this process has enough free memory, made before memory is allocated for announced data."""

from __future__ import annotations

from pathlib import Path

from ...errors import SessionError
from .cgroups import find_groups, read_mounts
from .proc_files import read, read_number

_LITTLE_BYTES = 64 << 20  # always allowed


def require_room(size_bytes: int, *, what: str, advice: str, root: Path = Path("/")) -> None:
    """Check that ``size_bytes`` of memory are free; does nothing on systems other than Linux.

    Raises: SessionError when they are not; ``what`` and ``advice`` go into its text.
    """
    free_bytes = None if size_bytes <= _LITTLE_BYTES else free_memory_bytes(root=root)
    if free_bytes is not None and size_bytes > free_bytes:
        raise SessionError(
            f"{what} takes {size_bytes / 1e9:.1f} GB of memory, {free_bytes / 1e9:.1f} GB are free here: {advice}"
        )


def free_memory_bytes(*, root: Path = Path("/")) -> int | None:
    """Return the bytes that are free on this machine and within this process's cgroups; None if unknown."""
    top = str(root).rstrip("/")
    of_machine = read_number(f"{top}/proc/meminfo", r"MemAvailable:\s+")
    groups, _ = find_groups(read(f"{top}/proc/self/cgroup") or "", read_mounts(top))
    known = [free for free in (group.free_bytes() for group in groups) if free is not None]
    if of_machine is not None:
        known.append(of_machine << 10)
    return min(known, default=None)
