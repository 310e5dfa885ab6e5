"""The soak test: random faults on one session, including killed kernels; nothing is lost and nothing grows.

The run of 50 faults has a fixed seed; the run of 200 faults draws a new one each time. ``SOAK_SEED`` repeats a run, and
``SOAK_FAULTS`` sets the number of faults. soak_life.py defines what happens in one life of the kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from detrain_nb.errors import DetrainError
from detrain_nb.session.session import end_session

from ..node.cgroups import can_make_cgroups
from .soak_life import Killed, Task, keeper_of
from .soon import assert_soon, each_below

_OTHER_COUNT = os.environ.get("SOAK_FAULTS")
_WARM_UP = 40  # number of faults after which no measure may grow
_LINE_LIMIT_S = 60.0
_ROOT = Path(__file__).parents[2]
_START = "import sys; sys.path.append(sys.argv[1]); from tests.session.soak_life import main; main(sys.argv[2])"

# How much each measure may grow between the warm-up and the end. A stop between the fork of a
# DataLoader's worker and the line that records it leaves the worker, with three descriptors, until its rank exits.
_SLACK = {
    "processes": 2,
    "descriptors": 8,
    "threads": 3,
    "memory_bytes": 6 << 20,
}
_SPOOL_BYTES = 2 * (8 << 20)  # the segment being written, and the one before it until its end is acknowledged


@pytest.mark.parametrize(
    ("faults", "seed"),
    [pytest.param(50, "7", marks=pytest.mark.slow), pytest.param(200, "", marks=pytest.mark.thorough)],
)
@pytest.mark.timeout(900)
def test_nothing_is_lost_and_nothing_grows(
    faults: int, seed: str, tmp_path: Path, runtime_folder: Path, processes: Callable[[], set[psutil.Process]]
) -> None:
    seed = os.environ.get("SOAK_SEED") or seed or str(random.SystemRandom().randrange(10**6))
    faults = int(_OTHER_COUNT or faults)
    print(f"SOAK_SEED={seed} SOAK_FAULTS={faults}, rank {keeper_of(seed)} outlives all")
    soak = _Soak(f"soak-{os.getpid()}", faults, seed, tmp_path, runtime_folder, processes)
    try:
        soak.run()
    finally:
        with contextlib.suppress(DetrainError):
            end_session(soak.name)
        for process in processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    assert soak.counters[keeper_of(seed)] == faults
    _assert_nothing_grows(soak.samples)


class _Soak:
    """Starts one life of the kernel after another, and measures the session in between."""

    def __init__(
        self,
        name: str,
        faults: int,
        seed: str,
        folder: Path,
        runtime_folder: Path,
        processes: Callable[[], set[psutil.Process]],
    ) -> None:
        self.name = name
        self.counters: dict[int, int] = {}
        self.samples: dict[int, dict[str, float]] = {}  # measures by the number of faults so far
        self._all_faults = faults
        self._seed = seed
        self._folder = folder
        self._runtime_folder = runtime_folder
        self._processes = processes
        self._killed: Killed | None = None
        self._faults = 0

    def run(self) -> None:
        """Cause all faults, then end the session."""
        dice = random.Random(self._seed)
        can_run_out_of_memory = can_make_cgroups()
        first = 1
        while first <= self._all_faults:
            last = min(first + dice.randint(4, 15), self._all_faults + 1)
            task = Task(
                name=self.name,
                seed=self._seed,
                first=first,
                last=last,
                is_final=last > self._all_faults,
                can_run_out_of_memory=can_run_out_of_memory,
                counters={str(rank): count for rank, count in self.counters.items()},
                killed=dataclasses.asdict(self._killed) if self._killed else None,
            )
            self._live(task)
            first = last + 1
        if self._killed:  # killed by the last fault: one more life checks the result
            counters = {str(rank): count for rank, count in self.counters.items()}
            killed = dataclasses.asdict(self._killed)
            self._live(Task(self.name, self._seed, first, first, True, can_run_out_of_memory, counters, killed))
        assert self._faults == self._all_faults
        assert_soon(lambda: not self._processes())

    def _live(self, task: Task) -> None:
        self._killed = None
        with _started_life(task, self._folder) as life:
            for told in life.lines():
                self._hear(life, told)
            exit_code = life.process.wait(_LINE_LIMIT_S)
            wanted = 0 if task.is_final else -9
            assert exit_code == wanted, life.describe(f"exit code {exit_code} where {wanted} was to be")

    def _hear(self, life: _Life, told: dict[str, Any]) -> None:
        """Handle one message from a life of the kernel."""
        if "fault" in told:
            self._faults += 1
            print(told)
            assert told["fault"] == self._faults, life.describe("a fault was left out")
            assert told["seen"] == told["expected"], life.describe("counters are wrong")
        elif "counters" in told:
            self.counters = {int(rank): count for rank, count in told["counters"].items()}
        elif "killing" in told:
            self._killed = Killed(**told["killing"])
        elif "shown" in told:
            assert self._killed is not None
            rank, line = told["shown"]
            self._killed.shown[str(rank)] = line
        elif "quiet" in told:
            pids = {int(rank): pid for rank, pid in told["pids"].items()}
            try:
                self.samples[told["quiet"]] = self._measure(pids, life.process.pid)
            except (OSError, psutil.NoSuchProcess) as exc:
                pytest.fail(life.describe(f"{exc!r}: the session ends though nobody ended it\n{self._what_is_left()}"))
            life.go_on()

    def _measure(self, pids: dict[int, int], kernel: int) -> dict[str, float]:
        """Measure what the session uses; a key names the measure and the process."""
        interpreters = {rank: psutil.Process(pid) for rank, pid in pids.items()}
        workers = {rank: _parent(process) for rank, process in interpreters.items()}
        launcher = _parent(workers[0])
        warm = _parent(launcher)
        roles = {"agent": _parent(warm), "warm process": warm, "launcher": launcher}
        roles |= {f"worker {rank}": process for rank, process in workers.items()}
        roles |= {f"interpreter {rank}": process for rank, process in interpreters.items()}
        found: dict[str, float] = {
            "processes of the session": len([p for p in self._processes() if p.pid != kernel]),
            "spool_bytes": sum(each_below(self._runtime_folder / self.name, lambda path: path.lstat().st_size)),
            "logs of the notebook": len(list(self._runtime_folder.glob(".log-*"))),
        }
        for role, process in roles.items():
            found[f"descriptors of {role}"] = len(os.listdir(f"/proc/{process.pid}/fd"))
            found[f"threads of {role}"] = process.num_threads()
            found[f"memory_bytes of {role}"] = _own_memory_bytes(process.pid)
        return found

    def _what_is_left(self) -> str:
        """Files and processes of the session, and the log of its agent, which is removed soon."""
        found = [str(path) for path in sorted(self._runtime_folder.rglob("*"))]
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(f"{process} of {process.ppid()}: {process.cmdline()}")
        for log in self._runtime_folder.rglob("agent.log"):
            with contextlib.suppress(OSError):
                found.append(f"{log}:\n{log.read_text()}")
        return "\n".join(found)


class _Life:
    """One life of the kernel, seen from the test's process."""

    def __init__(self, process: subprocess.Popen[str], task: Task, errors: Path) -> None:
        self.process = process
        self._task = task
        self._errors = errors
        self._heard: list[str] = []
        self._queue: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield its messages until it exits. Fail when none arrives for too long."""
        while True:
            try:
                line = self._queue.get(timeout=_LINE_LIMIT_S)
            except queue.Empty:
                pytest.fail(self.describe(f"nothing for {_LINE_LIMIT_S:g} s"))
            if not line:
                return
            if '"shown"' not in line:
                self._heard.append(line)
            yield json.loads(line)

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def describe(self, what: str) -> str:
        said = "".join(self._heard[-8:])
        return f"{what}\nSOAK_SEED={self._task.seed}, {self._task}\nit said:\n{said}\n{self._errors.read_text()}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line)
        self._queue.put("")


@contextlib.contextmanager
def _started_life(task: Task, folder: Path) -> Iterator[_Life]:
    errors = folder / f"life-{task.first}.txt"
    command = [sys.executable, "-c", _START, str(_ROOT), json.dumps(dataclasses.asdict(task))]
    with (
        open(errors, "w", encoding="utf-8") as file,
        subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
        ) as process,
    ):
        life = _Life(process, task, errors)
        try:
            yield life
        finally:
            life.close()


def _parent(process: psutil.Process) -> psutil.Process:
    parent = process.parent()
    assert parent is not None
    return parent


def _own_memory_bytes(pid: int) -> int:
    """Anonymous memory of a process, including what it shares with the process that it was forked from."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no RssAnon of {pid}")


def _slack_of(what: str) -> int:
    return _SLACK.get(what.split(" of ")[0], 0)


def _at_first(what: str, before: dict[str, float]) -> float:
    """The value after the warm-up; for memory the largest of all ranks, as a rank just replaced has loaded less."""
    memory = "memory_bytes of interpreter "
    if not what.startswith(memory):
        return before[what]
    return max(value for other, value in before.items() if other.startswith(memory))


def _assert_nothing_grows(samples: dict[int, dict[str, float]]) -> None:
    print(_table(samples))
    warm = [number for number in samples if number >= _WARM_UP]
    if len(warm) < 2:
        return
    before, after = samples[warm[0]], samples[warm[-1]]
    grown = {}
    for what, value in after.items():
        limit = _SPOOL_BYTES if what == "spool_bytes" else _at_first(what, before) + _slack_of(what)
        if value > limit:
            grown[what] = f"{before[what]:,} after {warm[0]} faults, {value:,} after {warm[-1]}, {limit:,} allowed"
    assert not grown, grown


def _table(samples: dict[int, dict[str, float]]) -> str:
    """One row for each measure, one column for each sample."""
    rows = [f"{'after faults':32}" + "".join(f"{number:>9}" for number in samples)]
    for what in next(iter(samples.values()), {}):
        is_bytes = "bytes" in what
        cells = (f"{found[what] / 1e6:.2f}" if is_bytes else f"{found[what]:.0f}" for found in samples.values())
        rows.append(f"{what.replace('_bytes', ' MB'):32}" + "".join(f"{cell:>9}" for cell in cells))
    return "\n".join(rows)
