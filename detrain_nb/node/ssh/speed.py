"""The doctor's measurement of how fast the ranks of a node are, all at once: sent as text to the node's Python.

Only the standard library and the installed torch, and nothing newer than Python 3.7. It writes no files. The order is a
line of JSON on stdin, the answer one on stdout, after a magic line. All its processes exit within the time given by the
order, and when the notebook hangs up. See doctor/host_probe.py.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any

MAGIC = b"\ndetrain-nb speed 1\n"
ORDER_LIMIT_S = 60
ROUNDS = 4
ROUND_S = 0.25  # longer than the 0.1 s over which a cgroup's CPU quota applies
# A unit of work: the product of two square matrices, and passes over memory, in float32; 64 times as much on a GPU.
CPU_WORK = (1024, 1 << 22, 1)
GPU_WORK = (4096, 1 << 24, 16)


def main() -> None:
    """Read the order, have all ranks work at once, and report how fast each was."""
    signal.alarm(ORDER_LIMIT_S)
    sys.stdout.buffer.write(MAGIC)
    sys.stdout.buffer.flush()
    line = sys.stdin.buffer.readline()
    if not line:
        return
    order = json.loads(line.decode())
    limit_s = int(order["within_s"])
    signal.alarm(limit_s + 1)
    try:
        speeds = _time_ranks(order["gpus"], int(order["threads"]), limit_s)
        answer: dict[str, Any] = {"type": "speed", "gflop_s": speeds}
    except OSError as exc:
        answer = {"type": "failed", "text": str(exc)}
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _time_ranks(gpus: list[int | None], threads: int, limit_s: int) -> list[float]:
    """Start a rank for each of ``gpus``; none begins to work before all have imported torch."""
    deadline = time.monotonic() + limit_s
    begin, let_begin = os.pipe()
    ranks: list[_Rank] = []
    try:
        for gpu in gpus:
            ranks.append(_Rank(len(ranks), gpu, threads, limit_s, (begin, let_begin)))
        for rank in ranks:
            rank.hear("ready", deadline)
        os.close(let_begin)
        return [rank.hear("gflop_s", deadline) for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()


class _Rank:
    """A process that works like a rank, and sends lines of JSON."""

    def __init__(self, number: int, gpu: int | None, threads: int, limit_s: int, start: tuple[int, int]) -> None:
        ours, theirs = os.pipe()
        self._number = number
        self._said = ours
        self._arrived = b""
        self._pid = os.fork()
        if self._pid:
            os.close(theirs)
            return
        try:
            signal.alarm(limit_s + 1)
            os.close(start[1])  # else the pipe would stay open
            _work(gpu, threads, start[0], theirs)
        finally:
            os._exit(1)

    def hear(self, kind: str, deadline: float) -> float:
        """Read the value of the next line. Raises: OSError with the error of the rank."""
        while b"\n" not in self._arrived:
            ready = select.select([self._said, 0], [], [], max(0.0, deadline - time.monotonic()))[0]
            if 0 in ready:
                raise OSError("the notebook hung up")
            if not ready:
                raise OSError(f"rank {self._number} did not finish in time")
            data = os.read(self._said, 4096)
            if not data:
                raise OSError(f"rank {self._number} {_describe_end(self._wait())}")
            self._arrived += data
        line, _, self._arrived = self._arrived.partition(b"\n")
        said = json.loads(line.decode())
        if "error" in said:
            raise OSError(f"rank {self._number}: {said['error']}")
        return float(said[kind])

    def end(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._wait()

    def _wait(self) -> int:
        pid, self._pid = self._pid, 0
        return os.waitpid(pid, 0)[1]


def _describe_end(status: int) -> str:
    return f"was killed by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "exited"


def _work(gpu: int | None, threads: int, begin: int, answers: int) -> None:
    """Import torch, report that, wait for all others, and measure."""
    os.dup2(2, 1)  # prints must not mix with answers
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.dont_write_bytecode = True
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    try:
        measure = _prepare(gpu, threads)
        os.write(answers, b'{"ready": 1}\n')
        os.read(begin, 1)
        answer: dict[str, Any] = {"gflop_s": measure()}
    except Exception as exc:  # noqa: BLE001 - whatever it is, the answer reports it
        answer = {"error": " ".join(f"{type(exc).__name__}: {exc}".split())[:200]}
    os.write(answers, json.dumps(answer).encode() + b"\n")


def _prepare(gpu: int | None, threads: int) -> Any:
    """Return a function that measures 1e9 operations per second, the best of several rounds."""
    import torch

    torch.set_num_threads(threads)
    side, numbers, passes = CPU_WORK if gpu is None else GPU_WORK
    device = "cpu" if gpu is None else f"cuda:{gpu}"
    left, right, product = (torch.rand(side, side, device=device) for _ in range(3))
    memory, factor = (torch.ones(numbers, device=device) for _ in range(2))

    def work() -> None:
        torch.mm(left, right, out=product)
        for _ in range(passes):
            memory.mul_(factor)
        if gpu is not None:
            torch.cuda.synchronize(gpu)

    def measure() -> float:
        return max(_time_round(work) for _ in range(ROUNDS)) * 2 * side**3 / 1e9

    work()  # warm up: loading and allocating is not measured
    return measure


def _time_round(work: Any) -> float:
    """Return how often per second the work is done."""
    done, began = 0, time.monotonic()
    while not done or time.monotonic() - began < ROUND_S:
        work()
        done += 1
    return done / (time.monotonic() - began)


if __name__ == "__main__":
    main()
