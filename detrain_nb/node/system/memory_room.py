"""Whether this process has room for what is announced, before memory is taken for it."""

from __future__ import annotations

from pathlib import Path

from ...errors import SessionError
from .cgroups import find_groups, read_mounts
from .proc_files import read, read_number

_LITTLE_BYTES = 64 << 20  # is always tried


def require_room(size_bytes: int, *, what: str, advice: str, root: Path = Path("/")) -> None:
    """Raises: SessionError where so much memory is not free. Elsewhere than on Linux it is tried."""
    free_bytes = None if size_bytes <= _LITTLE_BYTES else free_memory_bytes(root=root)
    if free_bytes is not None and size_bytes > free_bytes:
        raise SessionError(
            f"{what} takes {size_bytes / 1e9:.1f} GB of memory, {free_bytes / 1e9:.1f} GB are free here: {advice}"
        )


def free_memory_bytes(*, root: Path = Path("/")) -> int | None:
    """What is free on this machine, and within the cgroups of this process; None where that is not known."""
    top = str(root).rstrip("/")
    of_machine = read_number(f"{top}/proc/meminfo", r"MemAvailable:\s+")
    groups, _ = find_groups(read(f"{top}/proc/self/cgroup") or "", read_mounts(top))
    known = [free for free in (group.free_bytes() for group in groups) if free is not None]
    if of_machine is not None:
        known.append(of_machine << 10)
    return min(known, default=None)
