"""The check for free memory, on a machine whose /proc and cgroup files the test has written."""

from __future__ import annotations

from pathlib import Path

import pytest

from detrain_nb.errors import SessionError
from detrain_nb.node.system.memory_room import free_memory_bytes, require_room

_V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
_V2 = "28 23 0:25 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
_FREE = {"proc/meminfo": "MemTotal:  8000000 kB\nMemAvailable:    4000000 kB\n"}
_IN_V2 = {
    "proc/self/mountinfo": _V2,
    "proc/self/cgroup": "0::/job/step",
    "sys/fs/cgroup/job/memory.max": "3000000000",
    "sys/fs/cgroup/job/memory.current": "2500000000",
    "sys/fs/cgroup/job/memory.stat": "anon 7\ninactive_file 300000000\n",
    "sys/fs/cgroup/job/step/memory.max": "max",
    "sys/fs/cgroup/job/step/memory.current": "2500000000",
}
_IN_V1 = {
    "proc/self/mountinfo": _V1,
    "proc/self/cgroup": "4:memory:/job",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000000000",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1000000000",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1200000000",
    "sys/fs/cgroup/memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 100\n",
}


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "free_bytes"),
    [
        ({}, None),
        (_FREE, 4_096_000_000),
        (_FREE | _IN_V2, 800_000_000),
        (_IN_V2, 800_000_000),
        (_FREE | _IN_V1, 0),
        (_FREE | _IN_V2 | {"sys/fs/cgroup/job/memory.max": "max"}, 4_096_000_000),
    ],
    ids=["not known", "machine", "version 2", "cgroup alone", "version 1, over its limit", "no limit"],
)
def test_free_memory_is_the_least_of_the_machine_s_and_the_cgroups(
    tmp_path: Path, files: dict[str, str], free_bytes: int | None
) -> None:
    assert free_memory_bytes(root=_write(tmp_path, files)) == free_bytes


def test_what_does_not_fit_is_refused_with_numbers_and_advice(tmp_path: Path) -> None:
    root = _write(tmp_path, _FREE | _IN_V2)
    require_room(700_000_000, what="x", advice="pull a part of it", root=root)
    with pytest.raises(SessionError, match=r"^x takes 2\.0 GB of memory, 0\.8 GB are free here: pull a part of it$"):
        require_room(2_000_000_000, what="x", advice="pull a part of it", root=root)


def test_this_machine_has_room_for_a_little() -> None:
    assert free_memory_bytes() is None or free_memory_bytes() > 0  # type: ignore[operator]
    require_room(1 << 20, what="x", advice="")
