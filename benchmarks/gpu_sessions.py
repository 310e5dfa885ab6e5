"""Checks of a session on GPUs: what a stop, a death and a CUDA error keep and free, and how fast a session is."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from floors import time_torchrun
from gpu_check import CheckFailed, Notes, NotPossible, Place, require

from detrain_nb import Session
from detrain_nb.errors import CellTimeout, DetrainError, RankError, RankLost

_CELL_LIMIT_S = 60.0
_HUNG_AFTER_S = 2.0
_KERNEL_S = 9.0  # longer than a stop waits for a computing rank
_HELD_BYTES = 2 << 30
_SLACK_BYTES = 256 << 20  # the size of a context varies by this much between processes
_FREED_LIMIT_S = 10.0
_NOOP_CELLS = 200
_STARTS = 3

# Each cell starts with this, since a fresh rank lacks it. Ranks that share a GPU are a session on the CPU.
_HERE = {
    "cuda": "here = torch.device('cuda', local_rank % torch.cuda.device_count()); finish = torch.cuda.synchronize\n",
    "cpu": "here = torch.device('cpu'); finish = lambda: None\n",
}

# A rank under plain torchrun: floors.RANK on the GPU.
_RANK_ON_GPU = """
import os, sys, time
import torch
import torch.distributed as dist

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
dist.all_reduce(torch.ones(1, device=device))
torch.cuda.synchronize()
with open(f"{sys.argv[1]}/{dist.get_rank()}", "w") as file:
    file.write(repr(time.time()))
dist.destroy_process_group()
"""


class Ranks:
    """The ranks of a session, and the code that starts each of their cells."""

    def __init__(self, session: Session, place: Place) -> None:
        self.session = session
        self._place = place

    def run(self, code: str, **options: Any) -> dict[int, Any]:
        """Return the values of a cell, by rank."""
        options.setdefault("timeout_s", _CELL_LIMIT_S)
        return self.session.run_cell(_HERE[self._place.kind] + code, **options).values

    @property
    def world_size(self) -> int:
        return len(self.session.ranks)


@contextmanager
def start_ranks(place: Place, count: int) -> Iterator[Ranks]:
    """Start ranks with a GPU each if there are enough, otherwise ranks that share one; or ranks on the CPU."""
    device = "cuda" if place.is_gpu and place.gpus >= count else "cpu"
    with Session.start(count, device=device, folder=str(place.folder)) as session:
        yield Ranks(session, place)


def expect(kinds: type[BaseException] | tuple[type[BaseException], ...], act: Callable[[], object]) -> BaseException:
    """Return the exception that ``act`` raises. Raises: CheckFailed if it raises none."""
    try:
        found = act()
    except kinds as exc:
        return exc
    raise CheckFailed(f"nothing was raised, and {found} came back")


def told(error: BaseException) -> str:
    """Return all text that a notebook shows of an error."""
    return "\n".join(error._render_traceback_()) if isinstance(error, DetrainError) else str(error)


# ---- no CUDA before the fork


def check_fork(place: Place, notes: Notes) -> None:
    """Agent, launcher and workers have opened no GPU; a rank has, and so has its replacement after its death."""
    use = "torch.ones(2, device=here).sum().item(), torch.cuda._is_in_bad_fork(), __import__('os').getpid()"
    with start_ranks(place, 1) as ranks:
        total, is_bad_fork, interpreter = ranks.run(use)[0]
        require(total == 2.0 and not is_bad_fork, f"the rank counts {total} and its fork is bad: {is_bad_fork}")
        notes.add(gpu_files=(found := _gpu_files_by_role(interpreter)))
        require(not found["launcher"] and not found["worker"], f"they have opened the GPU: {found}")
        # NVML, with which an agent counts GPUs, may keep the control device open; only CUDA opens this one
        require(not any("uvm" in path for path in found["agent"]), f"the agent has a CUDA context: {found}")
        if place.is_gpu and not found["interpreter"]:
            notes.add(gpu_files_are_seen=False)
        kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
        expect(RankLost, lambda: ranks.run(kill))
        began = time.monotonic()
        total, is_bad_fork, fresh = ranks.run(use)[0]
        notes.add(fresh_rank_seconds=round(time.monotonic() - began, 3))
        require(fresh != interpreter and total == 2.0 and not is_bad_fork, f"the fresh rank counts {total}")
        if place.is_gpu and not found["interpreter"]:
            raise NotPossible("/proc shows no GPU file of a rank that uses one: nothing can be said of the others")


def _gpu_files_by_role(interpreter: int) -> dict[str, list[str]]:
    found, pid = {}, interpreter
    for role in ("interpreter", "worker", "launcher", "agent"):
        found[role] = _gpu_files(pid)
        pid = _parent(pid)
    return found


def _gpu_files(pid: int) -> list[str]:
    paths = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            paths.add(os.readlink(entry))
    return sorted(path for path in paths if path.startswith(("/dev/nvidia", "/dev/dxg")))


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])


# ---- collectives

_COLLECTIVES = """
expected = sum(range(1, world_size + 1))
found = {}
t = torch.full((1 << 20,), float(rank + 1), device=here); dist.all_reduce(t)
found["all_reduce"] = t[-1].item() == expected
t = torch.full((4,), float(rank), device=here); dist.broadcast(t, 0)
found["broadcast"] = t[0].item() == 0.0
parts = [torch.empty(1, device=here) for _ in range(world_size)]
dist.all_gather(parts, torch.full((1,), float(rank), device=here))
found["all_gather"] = [part.item() for part in parts] == list(range(world_size))
mine = torch.empty(2, device=here); dist.reduce_scatter_tensor(mine, torch.ones(2 * world_size, device=here))
found["reduce_scatter"] = mine.tolist() == [world_size] * 2
c = torch.full((4,), float(rank + 1)); dist.all_reduce(c)
found["all_reduce of CPU tensors"] = c[0].item() == expected
objects = [None] * world_size; dist.all_gather_object(objects, rank)
found["all_gather_object"] = objects == list(range(world_size))
dist.barrier()
group = dist.new_group(list(range(world_size)))
t = torch.full((1,), float(rank + 1), device=here); dist.all_reduce(t, group=group)
found["all_reduce in a group of its own"] = t.item() == expected
if world_size > 1:
    t, other = torch.full((1,), float(rank), device=here), torch.empty(1, device=here)
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, t, after), dist.P2POp(dist.irecv, other, before)]):
        work.wait()
    found["send and receive"] = other.item() == before
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).to(here))
model(torch.full((2, 4), float(rank), device=here)).sum().backward()
t = model.module.weight.grad.clone(); dist.all_reduce(t)
found["gradients of DDP"] = torch.allclose(t / world_size, model.module.weight.grad)
finish()
str(dist.get_backend_config()), found
"""


def check_collectives(place: Place, notes: Notes) -> None:
    """In one group, collectives use NCCL for CUDA tensors and gloo for CPU tensors."""
    count = max(place.gpus, 1) if place.is_gpu else 2
    with start_ranks(place, count) as ranks:
        answers = ranks.run(_COLLECTIVES)
        notes.add(world_size=count, backends=answers[0][0], found=answers[0][1])
        if place.is_gpu and count == 1:
            notes.add(remark="one GPU: a world of one rank, nothing went from one to another")
        wrong = {rank: name for rank, (_, found) in answers.items() for name, is_right in found.items() if not is_right}
        require(not wrong, f"wrong numbers, by rank: {wrong}")
        wanted = {"cuda:nccl", "cpu:gloo"} if place.is_gpu else {"cpu:gloo"}
        require(wanted <= set(answers[0][0].split(",")), f"the backends are {answers[0][0]}")


# ---- stop


def check_hung(place: Place, notes: Notes) -> None:
    """A rank waits in a collective that the other rank never joins: it is freed, with and without DDP."""
    notes.add(ranks=place.how_many_ranks_have(2))
    with start_ranks(place, 2) as ranks:
        for name, wrapper in (("", "None"), ("_with_ddp", "torch.nn.parallel.DistributedDataParallel(net)")):
            ranks.run(
                "net = torch.nn.Linear(4, 4).to(here)\n"
                f"alive, kept, t = {wrapper}, rank, torch.ones(1, device=here)\ndist.all_reduce(t); finish()\n"
                "for _ in range(9): dist.all_reduce(torch.ones(1))"  # gloo numbers its collectives apart from NCCL
            )
            began = time.monotonic()
            hang = "if rank == 0:\n    dist.all_reduce(t); finish()"
            error = expect(CellTimeout, lambda hang=hang: ranks.run(hang, timeout_s=_HUNG_AFTER_S))  # type: ignore[misc]
            notes.add(
                **{f"stop_seconds{name}": round(time.monotonic() - began - _HUNG_AFTER_S, 3), f"said{name}": str(error)}
            )
            require("freed" in str(error), f"nobody was freed: {error}")
            again = "t = torch.ones(1, device=here); dist.all_reduce(t); kept, t.item()"
            found = ranks.run(again)
            notes.add(**{f"next_cell_seconds{name}": round(time.monotonic() - began - _HUNG_AFTER_S, 3)})
            require(found == {0: (0, 2.0), 1: (1, 2.0)}, f"the next cell gave {found}")


_MEASURE_LONG = {
    "cuda": """
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
torch.cuda._sleep(1_000_000); finish()
begin.record(); torch.cuda._sleep(100_000_000); end.record(); finish()
count = int(100_000_000 * {seconds} * 1000 / begin.elapsed_time(end))
""",
    "cpu": """
import hashlib, time
began = time.thread_time(); hashlib.pbkdf2_hmac("sha256", b"", b"", 500_000)  # whatever else the machine does
count = int(500_000 * {seconds} / (time.thread_time() - began))
""",
}
_RUN_LONG = {"cuda": "torch.cuda._sleep(count); finish()", "cpu": 'hashlib.pbkdf2_hmac("sha256", b"", b"", count)'}


def check_long_kernel(place: Place, notes: Notes) -> None:
    """A stop returns the prompt while a kernel is running; the rank keeps its variables, and continues afterwards.

    A loop of short kernels is stopped at once.
    """
    with start_ranks(place, 1) as ranks:
        ranks.run("kept = torch.ones(3, device=here)" + _MEASURE_LONG[place.kind].format(seconds=_KERNEL_S))
        began = time.monotonic()
        error = expect(CellTimeout, lambda: ranks.run(_RUN_LONG[place.kind], timeout_s=1.0))
        notes.add(prompt_seconds=round(time.monotonic() - began - 1.0, 3), said=str(error))
        require("stops when it returns to Python" in str(error), f"what was said: {error}")
        found = ranks.run("kept.sum().item()")
        notes.add(next_cell_seconds=round(time.monotonic() - began, 3))
        require(found == {0: 3.0}, f"the next cell gave {found}")
        began = time.monotonic()
        error = expect(CellTimeout, lambda: ranks.run("while True:\n    kept.add_(0)", timeout_s=1.0))
        notes.add(loop_seconds=round(time.monotonic() - began - 1.0, 3), said_of_loop=str(error))
        require("all ranks stopped" in str(error), f"what was said of the loop: {error}")
        found = ranks.run("kept.sum().item()")
        require(found == {0: 3.0}, f"after the loop the next cell gave {found}")


# ---- death, CUDA errors


def check_killed(place: Place, notes: Notes) -> None:
    """The last rank is killed in a collective: the others keep their variables, and its memory is freed."""
    count = max(2, min(place.gpus, 4)) if place.is_gpu else 2
    held = _HELD_BYTES if place.is_gpu else 1 << 20
    last = count - 1
    notes.add(ranks=place.how_many_ranks_have(count), world_size=count)
    free = "torch.cuda.mem_get_info(here)[0]" if place.is_gpu else "0"
    with start_ranks(place, count) as ranks:
        before = ranks.run(f"t = torch.ones(1, device=here); dist.all_reduce(t); finish(); dist.barrier(); {free}")[
            last
        ]
        ranks.run(f"held = torch.full(({held // 4},), float(rank), device=here); finish()")
        kill = "import os, signal\nif rank == world_size - 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        began = time.monotonic()
        error = expect(RankLost, lambda: ranks.run(f"{kill}dist.all_reduce(t); finish()"))
        notes.add(lost_seconds=round(time.monotonic() - began, 3), said=told(error))
        require(getattr(error, "ranks", ()) == (last,), f"lost were {getattr(error, 'ranks', ())}")
        found = ranks.run(
            "t = torch.ones(1, device=here); dist.all_reduce(t); finish()\n"
            "t.item(), (held[0].item(), held.numel()) if 'held' in globals() else None"
        )
        notes.add(next_cell_seconds=round(time.monotonic() - began, 3))
        expected = {rank: (float(count), (float(rank), held // 4)) for rank in range(last)}
        require(found == {**expected, last: (float(count), None)}, f"the next cell gave {found}")
        if place.is_gpu:
            others = 0 if place.gpus >= count else last * held
            _require_freed(lambda: ranks.run(free, ranks=last)[last], before - others, notes)


def _require_freed(ask: Callable[[], int], wanted: int, notes: Notes) -> None:
    """Wait for the driver, which frees memory with some delay."""
    began = time.monotonic()
    while (now := ask()) < wanted - _SLACK_BYTES and time.monotonic() - began < _FREED_LIMIT_S:
        time.sleep(0.1)
    notes.add(free_bytes_before=wanted, free_bytes_after=now, freed_seconds=round(time.monotonic() - began, 3))
    require(now >= wanted - _SLACK_BYTES, f"{wanted - now:,} bytes of the GPU are not free again")


def check_broken(place: Place, notes: Notes) -> None:
    """A failing device-side assert is named, the rank is replaced, and the new one can use the GPU."""
    place.require_gpus()
    code = "x = torch.zeros(4, device=here)\nx[torch.tensor([9], device=here)].sum().item()"
    with start_ranks(place, 1) as ranks:
        began = time.monotonic()
        error = expect((RankError, RankLost), lambda: ranks.run(code))
        notes.add(error_seconds=round(time.monotonic() - began, 3), kind=type(error).__name__, said=told(error))
        found = ranks.run("torch.ones(2, device=here).sum().item(), 'x' in globals()")
        notes.add(next_cell_seconds=round(time.monotonic() - began, 3))
        require("device-side assert" in told(error), f"the error is not named: {told(error)}")
        # NCCL's watchdog may have caught the error first and killed the process: the rank is then reported as fresh
        is_told = "it is replaced" in told(error) or "rank 0 was restarted" in told(error)
        require(is_told, f"it is not said that the rank is replaced: {told(error)}")
        require(found == {0: (2.0, False)}, f"the next cell gave {found}")


_FILL = """
def fill():
    held = torch.empty(torch.cuda.mem_get_info(here)[0] // 2, dtype=torch.uint8, device=here)
    held.fill_(1)
    return torch.empty(torch.cuda.mem_get_info(here)[0] * 2, dtype=torch.uint8, device=here)
fill()
"""


def check_out_of_memory(place: Place, notes: Notes) -> None:
    """The error names the largest variable, and the memory of the failed cell is freed."""
    place.require_gpus()
    free = "finish(); torch.cuda.mem_get_info(here)[0]"
    with start_ranks(place, 1) as ranks:
        before = ranks.run(f"big = torch.ones(1 << 28, device=here)\n{free}")[0]
        began = time.monotonic()
        error = expect(RankError, lambda: ranks.run(_FILL))
        notes.add(error_seconds=round(time.monotonic() - began, 3), said=told(error))
        require("OutOfMemoryError" in told(error), f"the error is not named: {told(error)}")
        require("the largest variables on rank 0: big 1.1 GB" in told(error), f"no variable is named: {told(error)}")
        _require_freed(lambda: ranks.run(free)[0], before, notes)
        require(ranks.run("big[0].item()") == {0: 1.0}, "the variable is gone")


# ---- speed


def check_times(place: Place, notes: Notes) -> None:
    """Measure start, first collective and a no-op cell; torchrun's start alternates with ours."""
    count = max(place.gpus, 1) if place.is_gpu else 2
    program = {"program": _RANK_ON_GPU} if place.is_gpu else {}
    code = "t = torch.ones(1, device=here); dist.all_reduce(t); finish()"
    starts, firsts, seconds, torchruns = [], [], [], []
    for turn in range(_STARTS + 1):
        began = time.perf_counter()
        with start_ranks(place, count) as ranks:
            started = time.perf_counter()
            ranks.run(code)
            ended = time.perf_counter()
            ranks.run(code)
            again = time.perf_counter() - ended
            noops = _time_noops(ranks) if turn == _STARTS else []
        try:
            torchrun = time_torchrun(count, **program)
        except (RuntimeError, subprocess.TimeoutExpired) as exc:  # our own times are reported anyway
            notes.add(torchrun_failed=str(exc))
            torchrun = math.inf
        if turn:  # the first ones read torch from disk
            starts.append(ended - began)
            firsts.append(ended - started)
            seconds.append(again)
            torchruns += [torchrun] if torchrun < math.inf else []
        notes.add(
            world_size=count,
            start_until_first_collective_seconds=_rounded(starts),
            torchrun_until_first_collective_seconds=_rounded(torchruns),
            first_cell_with_a_collective_seconds=_rounded(firsts),
            second_cell_with_a_collective_seconds=_rounded(seconds),
        )
    notes.add(noop_cell_median_ms=round(1000 * statistics.median(noops), 3), noop_cells=len(noops))


def _time_noops(ranks: Ranks) -> list[float]:
    times = []
    for _ in range(_NOOP_CELLS):
        began = time.perf_counter()
        ranks.session.run_cell("pass")
        times.append(time.perf_counter() - began)
    return times


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in values]
