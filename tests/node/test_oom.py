"""Ranks that the kernel killed for lack of memory, told apart from ranks that were killed otherwise."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from detrain_nb.node.rank.oom import OomWatch

from .cgroups import can_make_cgroups, memory_cgroup

PID = 4711
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
V1_CPU = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"
V2 = "28 23 0:25 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V2_UNIFIED = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
MEMORY = "sys/fs/cgroup/memory"
GROUPS = "sys/fs/cgroup"

LIMIT_REACHED = "out of memory: the limit of its cgroup is 1.0 GB"
MACHINE_IS_FULL = "out of memory: the kernel killed it to free memory"
PROBABLY = "probably out of memory: the kernel killed a process on this machine to free memory"


Files = Mapping[str, "str | Files | None"]  # a file's text, a folder, or None if it was removed


@dataclass(frozen=True)
class Layout:
    """The cgroup files of a process, and those that have changed or disappeared when it has exited."""

    mounts: list[str]
    cgroups: list[str]  # /proc/<pid>/cgroup
    before: Files
    after: Files = field(default_factory=dict)
    reason: str = LIMIT_REACHED


def v1(*, kills: int = 3, failcnt: int = 7, limit: int = 1 << 63) -> Files:
    """Return the files of a cgroup of v1."""
    return {
        "memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n",
        "memory.failcnt": f"{failcnt}\n",
        "memory.limit_in_bytes": f"{limit}\n",
    }


def v2(*, kills: int = 3, oom: int = 7, local_oom: int | None = 2, limit: int | str = "max") -> Files:
    """Return the files of a cgroup of v2; without ``local_oom``, as on kernels before 5.2."""
    files = {
        "memory.events": f"low 0\nhigh 0\nmax 90\noom {oom}\noom_kill {kills}\noom_group_kill 0\n",
        "memory.max": f"{limit}\n",
    }
    local = {} if local_oom is None else {"memory.events.local": f"low 0\noom {local_oom}\noom_kill 0\n"}
    return files | local


def _write(root: Path, files: Files) -> None:
    for name, content in files.items():
        path = root / name
        if content is None:
            shutil.rmtree(path)
        elif isinstance(content, str):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        else:
            _write(path, content)


def _show(root: Path, layout: Layout) -> None:
    own = "23 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw"
    _write(root, {"proc/self/mountinfo": "\n".join([own, *layout.mounts, ""])})
    _write(root, {f"proc/{PID}/cgroup": "\n".join([*layout.cgroups, ""]), "proc/vmstat": vmstat(5)})
    _write(root, layout.before)


def vmstat(kills: int) -> str:
    return f"nr_free_pages 12\ndrop_slab 0\noom_kill {kills}\nnuma_hit 5\n"


SLICE, SCOPE = f"{GROUPS}/user.slice", f"{GROUPS}/user.slice/job.scope"
IN_SCOPE = ["0::/user.slice/job.scope"]
STEP, TASK = f"{MEMORY}/slurm/step_0", f"{MEMORY}/slurm/step_0/task_0"
IN_TASK = ["9:name=systemd:/", "4:memory:/slurm/step_0/task_0", "1:cpu:/", "0::/"]
OTHERS = {"proc/vmstat": vmstat(6)}  # the kernel has killed one more process on the machine

LAYOUTS = {
    "v2, its own limit": Layout(
        [V2],
        IN_SCOPE,
        {SLICE: v2(), SCOPE: v2(limit=10**9)},
        {SLICE: v2(kills=4, oom=8), SCOPE: v2(kills=4, oom=8, local_oom=3, limit=10**9)},
    ),
    "v2, the limit of the group above": Layout(
        [V2],
        IN_SCOPE,
        {SLICE: v2(limit=10**9), SCOPE: v2(limit=5 * 10**9)},
        {SLICE: v2(kills=4, oom=8, local_oom=3, limit=10**9), SCOPE: v2(kills=4, limit=5 * 10**9)},
    ),
    "v2 without memory.events.local": Layout(
        [V2],
        IN_SCOPE,
        {SLICE: v2(local_oom=None, limit=3 * 10**9), SCOPE: v2(local_oom=None, limit=10**9)},
        {
            SLICE: v2(kills=4, oom=8, local_oom=None, limit=3 * 10**9),
            SCOPE: v2(kills=4, oom=8, local_oom=None, limit=10**9),
        },
    ),
    "v2, the machine is full": Layout(
        [V2], IN_SCOPE, {SCOPE: v2(limit=10**9)}, {SCOPE: v2(kills=4, limit=10**9), **OTHERS}, MACHINE_IS_FULL
    ),
    "v2, a process of the group beside it was ended": Layout(
        [V2], IN_SCOPE, {SLICE: v2(), SCOPE: v2()}, {SLICE: v2(kills=4), **OTHERS}, ""
    ),
    "v2, the group above has the controller": Layout(
        [V2],
        IN_SCOPE,
        {SLICE: v2(limit=10**9), f"{SCOPE}/cgroup.procs": ""},
        {SLICE: v2(kills=4, local_oom=3, limit=10**9)},
    ),
    "v2, removed with its last process": Layout(
        [V2], IN_SCOPE, {SLICE: v2(), SCOPE: v2()}, {SLICE: v2(kills=4), SCOPE: None}, PROBABLY
    ),
    "v2, removed, and nobody was ended": Layout(
        [V2], IN_SCOPE, {SLICE: v2(), SCOPE: v2()}, {SCOPE: None, **OTHERS}, ""
    ),
    "v2, the topmost group of a container": Layout(
        [V2], ["0::/"], {GROUPS: v2(limit=10**9)}, {GROUPS: v2(kills=4, local_oom=3, limit=10**9)}
    ),
    "v2, a group that the container does not show": Layout(
        [V2], ["0::/docker/abc"], {GROUPS: v2(limit=10**9)}, {GROUPS: v2(kills=4, local_oom=3, limit=10**9)}
    ),
    "v2, not shown, and nobody was ended": Layout([V2], ["0::/docker/abc"], {GROUPS: v2()}, OTHERS, ""),
    "v2, a group beside the container's": Layout(
        [V2], ["0::/../other"], {GROUPS: v2(), "sys/fs/other": v2()}, {"sys/fs/other": v2(kills=4)}, ""
    ),
    "v2, part of it is mounted": Layout(
        [V2.replace(" / ", " /user.slice ")],
        IN_SCOPE,
        {f"{GROUPS}/job.scope": v2(limit=10**9)},
        {f"{GROUPS}/job.scope": v2(kills=4, local_oom=3, limit=10**9)},
    ),
    "v2, a mount point with a space": Layout(
        [V2.replace("/sys/fs/cgroup", r"/my\040groups")],
        ["0::/a:b"],
        {"my groups/a:b": v2(limit=10**9)},
        {"my groups/a:b": v2(kills=4, local_oom=3, limit=10**9)},
    ),
    "v2, the topmost group of the machine": Layout([V2], ["0::/"], {f"{GROUPS}/cgroup.procs": ""}, OTHERS, PROBABLY),
    "v1, its own limit": Layout(
        [V1_CPU, V1, V2_UNIFIED],
        IN_TASK,
        {MEMORY: v1(), STEP: v1(), TASK: v1(limit=10**9), f"{GROUPS}/cpu/slurm/step_0/task_0/cpu.shares": "1024\n"},
        {TASK: v1(kills=4, failcnt=8, limit=10**9)},
    ),
    "v1, the limit of the group above": Layout(
        [V2_UNIFIED, V1],
        IN_TASK,
        {STEP: v1(limit=10**9), TASK: v1(limit=5 * 10**9)},
        {STEP: v1(failcnt=8, limit=10**9), TASK: v1(kills=4, limit=5 * 10**9)},
    ),
    "v1, the limit of memory and swap together": Layout(
        [V1],
        IN_TASK,
        {TASK: v1(limit=10**9), f"{TASK}/memory.memsw.limit_in_bytes": "1000000000\n"},
        {TASK: v1(kills=4, limit=10**9), f"{TASK}/memory.memsw.max_usage_in_bytes": "999997440\n"},
    ),
    "v1, the machine is full": Layout([V1], IN_TASK, {TASK: v1()}, {TASK: v1(kills=4, failcnt=8)}, MACHINE_IS_FULL),
    "v1, a process of the group above was ended": Layout(
        [V1], IN_TASK, {STEP: v1(), TASK: v1()}, {STEP: v1(kills=4), **OTHERS}, ""
    ),
    "v1, removed with its last process": Layout(
        [V1], IN_TASK, {STEP: v1(), TASK: v1()}, {TASK: None, **OTHERS}, PROBABLY
    ),
    "v1, the group of a container": Layout(
        [V1.replace(" / ", " /docker/abc ")],
        ["4:cpu,memory:/docker/abc"],
        {MEMORY: v1(limit=10**9)},
        {MEMORY: v1(kills=4, failcnt=8, limit=10**9)},
    ),
    "v1, a group that the container does not show": Layout(
        [V1], IN_TASK, {MEMORY: v1(limit=10**9)}, {MEMORY: v1(kills=4, failcnt=8, limit=10**9)}
    ),
    "v1, not shown, and somebody was ended": Layout([V1], IN_TASK, {MEMORY: v1()}, OTHERS, PROBABLY),
    "v1 is not mounted": Layout([V1_CPU], IN_TASK, {}, OTHERS, PROBABLY),
    "v1 before Linux 4.13": Layout(
        [V1], IN_TASK, {f"{TASK}/memory.oom_control": "under_oom 0\n", "proc/vmstat": "drop_slab 0\n"}, {}, ""
    ),
    "no cgroups": Layout([], [], {}, OTHERS, PROBABLY),
    "no cgroups, and no count of the machine": Layout([], [], {"proc/vmstat": "drop_slab 0\n"}, {}, ""),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_kernel_counts_the_kill_where_the_layout_says(layout: Layout, tmp_path: Path) -> None:
    _show(tmp_path, layout)
    watch = OomWatch(PID, root=tmp_path)
    assert watch.reason(signal=signal.SIGKILL) == "", "no count went up"
    _write(tmp_path, layout.after)
    assert watch.reason(signal=signal.SIGKILL) == layout.reason
    assert watch.reason(signal=signal.SIGABRT) == "", "std::bad_alloc is not the kernel's doing"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_what_was_counted_before_a_refresh_is_no_reason(layout: Layout, tmp_path: Path) -> None:
    _show(tmp_path, layout)
    watch = OomWatch(PID, root=tmp_path)
    # A group that holds a process cannot be removed.
    _write(tmp_path, {name: text for name, text in layout.after.items() if text is not None})
    watch.refresh()
    assert watch.reason(signal=signal.SIGKILL) == ""


NUL = "28 23 0:25 / /sys/\0 rw - cgroup2 cgroup2 rw\n"  # a mount path that no file can have


@pytest.mark.parametrize("garbage", ["", "\0", "oom_kill", "oom_kill -1", "9" * 5000, ":\n::\n - \n", NUL])
@pytest.mark.parametrize("layout", [LAYOUTS["v1, its own limit"], LAYOUTS["v2, its own limit"]], ids=["v1", "v2"])
def test_files_that_say_nothing_are_no_error(layout: Layout, garbage: str, tmp_path: Path) -> None:
    _show(tmp_path, layout)
    for file in [path for path in tmp_path.rglob("*") if path.is_file()]:
        text = file.read_text()
        file.write_text(garbage)
        watch = OomWatch(PID, root=tmp_path)
        file.write_text(text)
        watch.reason(signal=signal.SIGKILL)
        watch = OomWatch(PID, root=tmp_path)
        file.write_text(garbage)
        watch.refresh()
        watch.reason(signal=signal.SIGKILL)
        file.unlink()
        file.mkdir()  # not even root can read a folder as a file
        watch.refresh()
        assert watch.reason(signal=signal.SIGKILL) == ""
        assert OomWatch(PID, root=tmp_path).reason(signal=signal.SIGKILL) == ""
        file.rmdir()
        file.write_text(text)


def test_process_that_was_moved_is_followed(tmp_path: Path) -> None:
    _show(tmp_path, LAYOUTS["v2, its own limit"])
    watch = OomWatch(PID, root=tmp_path)
    moved = f"{GROUPS}/moved"
    _write(tmp_path, {f"proc/{PID}/cgroup": "0::/moved\n", moved: v2(limit=64 << 20)})
    watch.refresh()
    _write(tmp_path, {moved: v2(kills=4, oom=8, local_oom=3, limit=64 << 20)})
    assert watch.reason(signal=signal.SIGKILL) == "out of memory: the limit of its cgroup is 67 MB"


@pytest.mark.parametrize("layout", [LAYOUTS["v1, its own limit"], LAYOUTS["v2, its own limit"]], ids=["v1", "v2"])
def test_refresh_after_the_end_forgets_nothing(layout: Layout, tmp_path: Path) -> None:
    _show(tmp_path, layout)
    _write(tmp_path, {f"proc/{PID}/statm": "9000 4000 1000 2 0 3000 0\n"})
    watch = OomWatch(PID, root=tmp_path)
    _write(tmp_path, layout.after)
    _write(tmp_path, {f"proc/{PID}/statm": "0 0 0 0 0 0 0\n", f"proc/{PID}/cgroup": "4:memory:/\n0::/\n"})
    watch.refresh()
    assert watch.reason(signal=signal.SIGKILL) == LIMIT_REACHED


def test_machine_without_proc_knows_nothing(tmp_path: Path) -> None:
    watch = OomWatch(PID, root=tmp_path)
    watch.refresh()
    assert watch.reason(signal=signal.SIGKILL) == ""


def test_process_killed_where_the_tests_run_was_not_out_of_memory() -> None:
    with _hungry() as process:
        watch = OomWatch(process.pid)
        process.kill()
        assert process.wait(timeout=30) == -signal.SIGKILL
        watch.refresh()
        assert watch.reason(signal=signal.SIGKILL) == ""


@contextmanager
def _hungry() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that allocates 256 MB once a line arrives: above every limit here, harmless to the machine."""
    code = "import sys; sys.stdin.readline(); kept = [b'x' * (1 << 20) for _ in range(256)]; print(len(kept))"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def _feed(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert process.wait(timeout=60) == -signal.SIGKILL, "the kernel did not end it"


# Without root or in a container, these tests are not collected: a skip would fail .ci/run, and no package grants the
# right to create cgroups. The layouts above cover the module there.
if can_make_cgroups():

    def test_kernel_ends_a_process_at_the_limit_of_its_cgroup() -> None:
        with memory_cgroup(64 << 20) as group, _hungry() as process:
            watch = OomWatch(process.pid)
            group.add(process.pid)
            watch.refresh()
            _feed(process)
            assert watch.reason(signal=signal.SIGKILL) == "out of memory: the limit of its cgroup is 67 MB"

    def test_kernel_ends_a_process_at_the_limit_of_the_cgroup_above() -> None:
        with memory_cgroup(64 << 20) as outer, memory_cgroup(below=outer) as inner, _hungry() as process:
            inner.add(process.pid)
            watch = OomWatch(process.pid)
            _feed(process)
            assert watch.reason(signal=signal.SIGKILL) == "out of memory: the limit of its cgroup is 67 MB"

    def test_kill_from_outside_in_a_limited_cgroup_was_not_out_of_memory() -> None:
        with memory_cgroup(64 << 20) as group, _hungry() as process:
            group.add(process.pid)
            watch = OomWatch(process.pid)
            process.kill()
            process.wait(timeout=30)
            assert watch.reason(signal=signal.SIGKILL) == ""

    def test_kill_from_outside_after_the_kernel_ended_another_was_not_out_of_memory() -> None:
        with memory_cgroup(64 << 20) as group, _hungry() as process, _hungry() as another:
            group.add(process.pid)
            watch = OomWatch(process.pid)
            group.add(another.pid)
            _feed(another)
            watch.refresh()
            process.kill()
            process.wait(timeout=30)
            assert watch.reason(signal=signal.SIGKILL) == ""

    def test_process_that_the_kernel_ended_is_refreshed_before_it_is_reaped() -> None:
        with memory_cgroup(64 << 20) as group, _hungry() as process:
            group.add(process.pid)
            watch = OomWatch(process.pid)
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            watch.refresh()
            assert watch.reason(signal=-process.wait(timeout=30)) == "out of memory: the limit of its cgroup is 67 MB"
