"""One life of the kernel in the soak: it starts the session or attaches to it, commits faults, and is killed.

Started by test_soak.py with a ``Task``. Prints a line of JSON for every fault, and for all that the next life has to
know; an error goes to stderr with where the ranks are. A fault is chosen by the seed and its number alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import detrain_nb
from detrain_nb import Session
from detrain_nb.errors import CellTimeout, RankLost
from detrain_nb.session.state.cell_observer import CellObserver

from ..node.cgroups import memory_cgroup
from .training import COLLECTIVE, press_stop

RANKS = 3
QUIET_EVERY = 20
_FAULT_LIMIT_S = 50.0  # from one fault to the next; a rank that does not end a cell is given up after 30 s
_OUR_FOLDER = str(Path(detrain_nb.__file__).parent)
_IMPORTS = "import os, time\nfrom torch import nn\nfrom torch.utils.data import DataLoader, Dataset\n"
_WAITS = ("pass", "time.sleep(60)", "while True: time.sleep(0.01)", "while True: pass")

# What never ends by itself. {odd} is one of the ranks, {wait} what it does while the others wait for it.
HANGS = {
    "all_reduce": "if rank == {odd}:\n    {{wait}}\nelse: dist.all_reduce(torch.ones(1))",
    "recv against recv": "dist.recv(torch.ones(1), src=(rank + 1) % world_size)",
    "new_group on one rank": "if rank == {odd}: dist.new_group([0, 1, 2])\nelse:\n    {{wait}}",
    "loop": "while True: pass",
    "sleep": "time.sleep(60)",
    "DDP": (
        "ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))\n"
        "if rank == {odd}:\n    {{wait}}\nelse: ddp(torch.ones(2, 4)).sum().backward()"
    ),
    "DataLoader": (
        "class Slow(Dataset):\n"
        "    def __len__(self): return 10_000\n"
        "    def __getitem__(self, index): time.sleep(0.02); return index\n"
        "if rank == {odd}: dist.barrier()\n"
        "for batch in DataLoader(Slow(), num_workers=2): pass"
    ),
    "each rank its own": (
        "if rank == 0: dist.recv(torch.ones(1), src=1)\n"
        "elif rank == 1: dist.all_reduce(torch.ones(1))\nelse:\n    {{wait}}"
    ),
    "many collectives": "while True: dist.all_reduce(torch.ones(1000))",
}

# What takes its memory when it is used for the first time: after it, none may grow.
_ONCE = """
counter = 0
ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
ddp(torch.ones(2, 4)).sum().backward()
for batch in DataLoader(list(range(8)), num_workers=2): pass
dist.new_group([0, 1, 2])
"""


@dataclasses.dataclass(frozen=True)
class Killed:
    """How the life before this one ended, in the middle of a cell that prints numbered lines."""

    number: int  # of this fault
    cell: int
    lines: int
    victims: list[int]
    hangs: bool
    shown: dict[str, int] = dataclasses.field(default_factory=dict)  # rank -> the last line that it had shown


@dataclasses.dataclass(frozen=True)
class Task:
    """What one life is to do. Faults ``first`` to ``last - 1`` are its own; the last life does not get killed after."""

    name: str
    seed: str
    first: int
    last: int
    is_final: bool
    can_run_out_of_memory: bool
    counters: dict[str, int] = dataclasses.field(default_factory=dict)  # empty: start the session
    killed: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a fault was, which ranks it cost, and what the cell raised."""

    kind: str
    victims: Iterable[int] = ()
    raised: BaseException | None = None


def keeper_of(seed: str) -> int:
    """The rank that no fault kills: its counter counts all of them, and what it leaks adds up."""
    return random.Random(seed).randrange(RANKS)


def main(argument: str) -> None:
    """Live as the task says."""
    task = Task(**json.loads(argument))
    faulthandler.dump_traceback_later(_FAULT_LIMIT_S, exit=True)
    if task.counters:
        session = Session.attach(task.name)
    else:
        session = Session.start(ranks=RANKS, device="cpu", name=task.name, linger_s=60)
    life = Life(task, session)
    try:
        life.run()
    except BaseException:
        with contextlib.suppress(Exception):
            print(session.ranks.where(), session.status(), sep="\n", file=sys.stderr)
        raise


def say(**what: object) -> None:
    """One line, at once: what was said before a SIGKILL arrives."""
    os.write(1, json.dumps(what).encode() + b"\n")


class Life:
    """The session in the hands of one kernel."""

    def __init__(self, task: Task, session: Session) -> None:
        self.session = session
        self.dice = random.Random()
        self.mortals = [rank for rank in range(RANKS) if rank != keeper_of(task.seed)]
        self._task = task
        self._counters = {int(rank): count for rank, count in task.counters.items()}
        self._began = time.monotonic()
        self._is_press_late = True

    def run(self) -> None:
        """Commit the faults of this life, then end it."""
        signal.signal(signal.SIGINT, self._on_press)
        task = self._task
        if task.killed is not None:
            killed = Killed(**task.killed)
            self._begin(killed.number)
            lines = self._take_up(killed)
            self._check(killed.number, Outcome("kernel killed", killed.victims), lines=lines)
        else:
            self.session.run_cell(_IMPORTS + _ONCE)
            self._counters = dict.fromkeys(range(RANKS), 0)
        kinds = [kind for kind in FAULTS if kind is not run_out_of_memory or task.can_run_out_of_memory]
        for number in range(task.first, task.last):
            self._begin(number)
            fault = self.dice.choice(kinds)
            say(begun=number, kind=fault.__name__)
            self._check(number, fault(self))
        if task.is_final:
            self.session.stop()
        else:
            self._begin(task.last)
            self._be_killed(task.last)

    def _begin(self, number: int) -> None:
        self.dice = random.Random(f"{self._task.seed}/{number}")
        self._began = time.monotonic()
        faulthandler.dump_traceback_later(_FAULT_LIMIT_S, exit=True)

    # ---- what has to hold after every fault

    def _check(self, number: int, outcome: Outcome, **more: object) -> None:
        """The survivors have their counters, all ranks work together, and every counter goes up by one."""
        session, victims = self.session, set(outcome.victims)
        expected = {rank: None if rank in victims else count for rank, count in self._counters.items()}
        seen = self._run_first_cell("globals().get('counter')", victims)
        kept = session.pull("counter", ranks=[rank for rank in expected if rank not in victims])
        say(
            fault=number,
            kind=outcome.kind,
            victims=sorted(victims),
            seen=seen,
            expected=expected,
            raised=f"{type(outcome.raised).__name__}: {outcome.raised}"[:300] if outcome.raised else "",
            seconds=round(time.monotonic() - self._began, 2),
            **more,
        )
        assert seen == expected, f"counters {seen}, expected {expected}"
        assert kept == {rank: count for rank, count in expected.items() if count is not None}, kept
        assert session.run_cell(COLLECTIVE).values == dict.fromkeys(range(RANKS), float(RANKS))
        session.run_cell("counter = globals().get('counter', 0) + 1")
        self._counters = {rank: (count or 0) + 1 for rank, count in expected.items()}
        say(counters=self._counters)
        if number % QUIET_EVERY == 0:
            session.run_cell("import gc\nddp = batch = None\ngc.collect()", values=False)
            say(quiet=number, pids=self.pids())
            sys.stdin.readline()

    def _run_first_cell(self, code: str, victims: Iterable[int]) -> dict[int, Any]:
        """A death that was still under way may be this cell's error, once for each victim."""
        not_told = set(victims)
        while True:
            try:
                return self.session.run_cell(code).values
            except RankLost as lost:
                assert set(lost.ranks) <= not_told, f"{lost} but only {not_told} were killed"
                not_told -= set(lost.ranks)

    # ---- with what faults are committed

    def pids(self) -> dict[int, int]:
        return {rank.rank: rank.pid for rank in self.session.status().ranks}

    def choose_victims(self) -> list[int]:
        return sorted(self.dice.sample(self.mortals, self.dice.choice([1, 1, 2])))

    def choose_hang(self) -> tuple[str, str]:
        """The name and the code of something that never ends."""
        name = self.dice.choice(list(HANGS))
        odd, wait = self.dice.randrange(RANKS), self.dice.choice(_WAITS)
        return name, _IMPORTS + "print('in')\n" + HANGS[name].format(odd=odd).format(wait=wait)

    def wait_until_fresh(self, before: dict[int, int], ranks: Iterable[int]) -> None:
        deadline = time.monotonic() + 20
        while True:
            rows = [row for row in self.session.status().ranks if row.rank in ranks]
            if all(row.pid != before[row.rank] and row.state == "idle" for row in rows):
                return
            assert time.monotonic() < deadline, rows
            time.sleep(0.01)

    def lose(self, code: str, victims: list[int], *, observer: Watching | None = None) -> RankLost:
        """Run a cell that ends with the loss of victims."""
        try:
            self.session.run_cell(_IMPORTS + code, observer=observer)
        except RankLost as lost:
            assert set(lost.ranks) <= set(victims), f"{lost} but {victims} were killed"
            if observer:
                observer.join()
            return lost
        raise AssertionError("a cell whose ranks die ended well")

    def press(self, act: Callable[[], object], *delays: float) -> BaseException:
        """Act, press stop so many seconds from now, and return what ``act`` raised; no press is left then.

        A press that comes when the session has done with it is not seen by anybody.
        """

        def press_all() -> None:
            began = time.monotonic()
            for delay in delays:
                time.sleep(max(0.0, began + delay - time.monotonic()))
                press_stop()

        thread = threading.Thread(target=press_all)  # one: a press may come in start(), and ends the start of others
        raised: BaseException | None = None
        self._is_press_late = False
        try:
            try:
                thread.start()
                act()
            finally:
                self._is_press_late = True
        except (KeyboardInterrupt, CellTimeout, RankLost) as exc:
            raised = exc
        self._is_press_late = True  # the press may have come right before that was said above
        thread.join()
        time.sleep(0.01)  # a signal that was sent has arrived
        assert raised is not None, "what never ends has ended"
        return raised

    def _on_press(self, number: int, frame: FrameType | None) -> None:
        if not self._is_press_late or _is_in_session(frame):
            raise KeyboardInterrupt

    # ---- the end of a life, and the next one

    def _be_killed(self, number: int) -> None:
        """Run a cell that prints numbered lines, and be killed in it or soon after."""
        dice = self.dice
        lines = dice.randint(100, 400)
        ending = dice.choice(["ends", "ends", "dies", "hangs"])
        victims = [dice.choice(self.mortals)] if ending == "dies" else []
        code = (
            f"{_IMPORTS}for i in range({lines}):\n"
            f"    print(f'line {{i}} of {number} ' + '.' * 1000)\n"
            f"    if i % 20 == rank: time.sleep({dice.uniform(0, 0.04)})\n"
        )
        if victims:  # with nobody attached, or somebody just attaching
            code += f"if rank == {victims[0]}:\n"
            code += f"    while os.path.exists('/proc/{os.getpid()}'): time.sleep(0.01)\n"
            code += f"    time.sleep({dice.uniform(0, 0.3)}); os._exit(5)"
        elif ending == "hangs":
            code += f"if rank != {dice.randrange(RANKS)}: dist.all_reduce(torch.ones(1))"
        delay = dice.uniform(0, 0.6)
        killed = Killed(number, self.session.log.next_cell(), lines, victims, ending == "hangs")
        say(begun=number, kind="kernel killed")
        say(killing=dataclasses.asdict(killed))
        kernel = os.getpid()
        killer = Watching([lambda: os.kill(kernel, signal.SIGKILL)], [delay], shows_lines=True)
        self.session.run_cell(code, observer=killer)
        while True:
            signal.pause()

    def _take_up(self, killed: Killed) -> dict[int, list[int]]:
        """What the life before has not shown is here: no line is missing, none comes twice; numbers of the lines."""
        session = self.session
        deadline = time.monotonic() + 30
        if killed.hangs:
            while not all(self._has_last_line(killed, rank) for rank in range(RANKS)):
                assert time.monotonic() < deadline, "the last lines have not come"
                time.sleep(0.01)
            session.stop_cells()
        while killed.cell in session.log.running_cells:
            assert time.monotonic() < deadline, f"cell {killed.cell} runs on ranks {session.log.running_cells}"
            time.sleep(0.01)
        found = {}
        for rank in range(RANKS):
            numbers = self._lines(killed, rank)
            shown = killed.shown.get(str(rank), -1)
            first = numbers[0] if numbers else killed.lines
            assert numbers == list(range(first, killed.lines)), f"rank {rank}: lines {numbers}"
            assert first <= shown + 1, f"rank {rank}: shown up to line {shown}, then from line {first} on"
            found[rank] = [shown, first]
        return found

    def _has_last_line(self, killed: Killed, rank: int) -> bool:
        last = killed.lines - 1
        return killed.shown.get(str(rank)) == last or self._lines(killed, rank)[-1:] == [last]

    def _lines(self, killed: Killed, rank: int) -> list[int]:
        """The numbers of the lines that the log has; every one of them is whole."""
        lines = self.session.log.text(killed.cell, rank).splitlines(keepends=True)
        numbers = [int(line.split()[1]) for line in lines]
        if numbers and not lines[-1].endswith("\n"):
            numbers.pop()
        for i, line in zip(numbers, lines):
            assert line == f"line {i} of {killed.number} {'.' * 1000}\n", f"rank {rank}: {line[:80]!r}"
        return numbers


class Watching(CellObserver):
    """Observes a cell; when all of ``ranks`` have printed something, does each of ``acts`` after its delay."""

    def __init__(
        self,
        acts: Iterable[Callable[[], object]] = (),
        delays: Iterable[float] = (),
        *,
        ranks: Iterable[int] = (),
        shows_lines: bool = False,
    ) -> None:
        self._waits_for = set(ranks)
        self._timers = [threading.Timer(delay, act) for act, delay in zip(acts, delays)]
        self._shows_lines = shows_lines
        self._has_begun = False
        self._lines: dict[int, int] = {}

    def output(self, rank: int, stream: str, text: str) -> None:
        self._waits_for.discard(rank)
        if self._shows_lines and stream == "stdout" and "\n" in text:
            self._lines[rank] = self._lines.get(rank, -1) + text.count("\n")
            say(shown=[rank, self._lines[rank]])
        if not self._waits_for and not self._has_begun:
            self._has_begun = True
            for timer in self._timers:
                timer.start()

    def join(self) -> None:
        """Wait until all was done."""
        for timer in self._timers:
            timer.join()


def _is_in_session(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OUR_FOLDER):
            return True
        frame = frame.f_back
    return False


# ---- faults


def kill_in_a_cell(life: Life) -> Outcome:
    """SIGKILL in a collective, a loop, a stream of collectives."""
    name, code = life.choose_hang()
    victims, pids = life.choose_victims(), life.pids()
    acts = [lambda pid=pids[rank]: os.kill(pid, signal.SIGKILL) for rank in victims]
    first = life.dice.uniform(0, 0.2)
    delays = [first, first + life.dice.choice([0, 0.005, 0.05, 0.3])]
    lost = life.lose(code, victims, observer=Watching(acts, delays, ranks=victims))
    return Outcome(f"SIGKILL in {name}", victims, lost)


def kill_while_idle(life: Life) -> Outcome:
    """SIGKILL between two cells; the next one may come before the news."""
    victims, pids = life.choose_victims(), life.pids()
    for rank in victims:
        os.kill(pids[rank], signal.SIGKILL)
    if life.dice.random() < 0.5:
        life.wait_until_fresh(pids, victims)
    return Outcome("SIGKILL while idle", victims)


def exit_in_a_cell(life: Life) -> Outcome:
    victims = life.choose_victims()
    delays = [life.dice.uniform(0, 0.1) for _ in range(RANKS)]
    code = f"if rank in {victims}:\n    try: time.sleep({delays}[rank])\n    finally: os._exit(rank + 1)\n"
    lost = life.lose(f"{code}dist.all_reduce(torch.ones(1))", victims)
    return Outcome("os._exit", victims, lost)


def crash(life: Life) -> Outcome:
    victim = life.dice.choice(life.mortals)
    code = f"if rank == {victim}:\n    import ctypes; ctypes.string_at(0)\ndist.barrier()"
    lost = life.lose(code, [victim])
    assert "SIGSEGV" in str(lost), lost
    return Outcome("segmentation fault", [victim], lost)


def run_out_of_memory(life: Life) -> Outcome:
    victim = life.dice.choice(life.mortals)
    with memory_cgroup(200 << 20) as group:
        group.add(life.pids()[victim])
        life.session.status()
        code = f"if rank == {victim}: hog = [torch.ones(10_000_000) for _ in range(50)]\ndist.barrier()"
        lost = life.lose(code, [victim])
    assert "out of memory" in str(lost), lost
    return Outcome("out of memory", [victim], lost)


def replace_while_idle(life: Life) -> Outcome:
    victims = life.choose_victims()
    life.session.ranks.replace(victims)
    if life.dice.random() < 0.7:
        life.session.ranks.wait_until_fresh(victims)
    return Outcome("replaced while idle", victims)


def replace_in_a_cell(life: Life) -> Outcome:
    name, code = life.choose_hang()
    victim = life.dice.choice(life.mortals)
    replace = Watching([lambda: life.session.ranks.replace(victim)], [life.dice.uniform(0, 0.2)], ranks=[victim])
    lost = life.lose(code, [victim], observer=replace)
    life.session.ranks.wait_until_fresh(victim)
    return Outcome(f"replaced in {name}", [victim], lost)


def stop_once(life: Life) -> Outcome:
    name, code = life.choose_hang()
    raised = life.press(lambda: life.session.run_cell(code), _delay(life.dice))
    assert isinstance(raised, KeyboardInterrupt), raised
    return Outcome(f"stop in {name}", (), raised)


def stop_twice(life: Life) -> Outcome:
    name, code = life.choose_hang()
    first = _delay(life.dice)
    raised = life.press(lambda: life.session.run_cell(code), first, first + _delay(life.dice))
    assert isinstance(raised, KeyboardInterrupt), raised
    return Outcome(f"stop twice in {name}", (), raised)


def stop_while_the_group_is_made(life: Life) -> Outcome:
    name, code = life.choose_hang()
    life.session.run_cell("dist.destroy_process_group()")
    raised = life.press(lambda: life.session.run_cell(code), life.dice.uniform(0, 0.1))
    assert isinstance(raised, KeyboardInterrupt), raised
    return Outcome(f"stop while the group is made for {name}", (), raised)


def time_out(life: Life) -> Outcome:
    name, code = life.choose_hang()
    try:
        life.session.run_cell(code, timeout_s=life.dice.uniform(0.02, 0.5))
    except CellTimeout as exc:
        return Outcome(f"timeout in {name}", (), exc)
    raise AssertionError("what never ends has ended")


def time_out_and_stop(life: Life) -> Outcome:
    """Both at about the same time."""
    name, code = life.choose_hang()
    limit_s = life.dice.uniform(0.05, 0.3)
    press_s = limit_s + life.dice.uniform(-0.02, 0.2)
    raised = life.press(lambda: life.session.run_cell(code, timeout_s=limit_s), press_s)
    assert isinstance(raised, (KeyboardInterrupt, CellTimeout)), raised
    return Outcome(f"timeout and stop in {name}", (), raised)


def kill_and_stop(life: Life) -> Outcome:
    """Both at about the same time."""
    name, code = life.choose_hang()
    victims, pids = life.choose_victims(), life.pids()
    kill_s = life.dice.uniform(0.05, 0.3)
    killers = [threading.Timer(kill_s, os.kill, (pids[rank], signal.SIGKILL)) for rank in victims]
    for killer in killers:
        killer.start()
    raised = life.press(lambda: life.session.run_cell(code), max(0.0, kill_s + life.dice.uniform(-0.2, 0.2)))
    for killer in killers:
        killer.join()
    return Outcome(f"SIGKILL and stop in {name}", victims, raised)


def raise_on_one_rank(life: Life) -> Outcome:
    odd = life.dice.randrange(RANKS)
    code = f"if rank == {odd}: raise ValueError('bad batch')\ndist.all_reduce(torch.ones(1))"
    try:
        life.session.run_cell(code, timeout_s=1.5)
    except CellTimeout as exc:
        assert f"rank {odd} failed with ValueError: bad batch" in str(exc), exc
        return Outcome("ValueError on one rank", (), exc)
    raise AssertionError("a cell that raised on one rank ended well")


def _delay(dice: random.Random) -> float:
    """Up to half a second; often at once, where the session is busiest."""
    return dice.choice([dice.uniform(0, 0.5), dice.uniform(0, 0.05)])


FAULTS: list[Callable[[Life], Outcome]] = [
    kill_in_a_cell,
    kill_in_a_cell,
    kill_while_idle,
    exit_in_a_cell,
    crash,
    run_out_of_memory,
    replace_while_idle,
    replace_in_a_cell,
    stop_once,
    stop_once,
    stop_once,
    stop_twice,
    stop_twice,
    stop_while_the_group_is_made,
    time_out,
    time_out_and_stop,
    kill_and_stop,
    raise_on_one_rank,
]
