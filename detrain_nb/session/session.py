"""A session: ranks that keep their state from one cell to the next, driven from this process.

with Session.start(ranks=2) as session:
    result = session.run_cell("x = torch.ones(4) * rank; dist.all_reduce(x); x")
    result.values[0]        # tensor([1., 1., 1., 1.])
    session.pull("x")       # {0: tensor(...), 1: tensor(...)}
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..deploy import bring_up_agent
from ..errors import (
    CellInterrupted,
    CellTimeout,
    RankError,
    RankLost,
    SessionError,
    SpecError,
    ValueNotSupported,
    format_ranks,
)
from ..launch import RankConfig, launch_node, threads_per_rank
from ..plan import Plan, parse_ranks, plan_one_node
from ..transport.local import LocalTransport
from ..wire import (
    Attach,
    Attached,
    CellDone,
    Complete,
    Completions,
    Inspect,
    Inspection,
    Interrupt,
    Launch,
    Message,
    RunCell,
)
from .cells import CellObserver, CellRun
from .inbox import describe_end
from .log import OutputLog
from .rank_link import RankLink
from .results import CellResult, RankResult, TextOnly
from .status import RankStatus, SessionStatus

__all__ = ["Session"]

Ranks = str | int | Iterable[int] | None

START_LIMIT_S = 120.0
STOP_LIMIT_S = 4.0  # how long a stop waits for ranks before it gives the prompt back
LOST_LIMIT_S = 2.0  # how long a cell goes on after one of its ranks was lost
END_LIMIT_S = 8.0


class Session:
    """Ranks on this machine that run cells. Made by ``Session.start``; ends with ``stop``, or with this process."""

    def __init__(self, name: str, transport: LocalTransport) -> None:
        self.name = name
        self.plan = Plan((), "cpu", "gloo")
        self._transport = transport
        self._last_cell = 0
        self._wants_group = True
        self._is_stopped = False
        self._stopping = threading.Lock()
        self._ranks = RankLink(name, bring_up_agent(transport, name))
        self._inbox = self._ranks.inbox

    @classmethod
    def start(
        cls,
        ranks: int | None = None,
        *,
        device: str = "auto",
        backend: str | None = None,
        name: str | None = None,
        init: bool = True,
        env: Mapping[str, str] | None = None,
        start: str = "fork",
        seed: int = 0,
        folder: str | None = None,
    ) -> Session:
        """Start ``ranks`` ranks on this machine; by default one a GPU, else two on the CPU.

        ``init`` makes the default process group (``backend``, by default gloo, with NCCL for CUDA tensors). The ranks
        start in ``folder`` (the current one), with ``env`` added to the environment. ``start`` is "fork" (torch is
        imported once) or "exec" (the plain torchrun command). Rank r is seeded with ``seed + r``.

        Raises: SpecError for numbers that do not fit, LaunchError when the ranks do not come up, SessionError when a
        session of that name runs already. Nothing is left behind then.
        """
        folder = os.path.abspath(folder or os.getcwd())
        _check_start(ranks=ranks, start=start, env=env or {}, folder=folder)
        session = cls(name or f"python-{os.getpid()}-{uuid.uuid4().hex[:6]}", LocalTransport())
        try:
            attached = session._attach()
            session._wants_group = init
            session.plan = plan_one_node(ranks=ranks, device=device, backend=backend, gpus=attached.gpus)
            session._launch(cpus=attached.cpus, env=env or {}, start=start, seed=seed, folder=folder)
            if init:
                session._ranks.make_group(session.world_size)
        except BaseException:
            session.stop()
            raise
        atexit.register(session.stop)
        return session

    @property
    def log(self) -> OutputLog:
        """Everything the ranks printed, cell by cell."""
        return self._inbox.log

    @property
    def notices(self) -> list[str]:
        """What the user should know and no cell has said: output that was lost, a full disk."""
        return self._inbox.notices

    @property
    def world_size(self) -> int:
        return self.plan.world_size

    def next_cell(self, *, at_least: int = 1) -> int:
        """The number that the next cell will have; no two cells of a session have the same."""
        return max(self._last_cell + 1, at_least)

    @property
    def is_alive(self) -> bool:
        """The session's agent and launcher run; single ranks may be lost."""
        return not self._is_stopped and self._inbox.failure is None

    def run_cell(
        self,
        code: str,
        *,
        ranks: Ranks = None,
        timeout_s: float | None = None,
        observer: CellObserver | None = None,
        values: bool = True,
        number: int | None = None,
        first_line: int = 1,
    ) -> CellResult:
        """Run ``code`` on ``ranks`` (all) and wait until every one of them has ended it.

        ``values`` brings the values of the last expression here, where they can travel. Output is kept in the result
        and in ``log``, and goes to ``observer`` while the cell runs. In errors the cell has ``number`` (or the next one
        that is free), and its lines count from ``first_line``.

        Raises: RankError with every rank's error, CellInterrupted after KeyboardInterrupt, CellTimeout after
        ``timeout_s``, RankLost when a rank's process ended, SessionError when a chosen rank is busy or lost.
        """
        if not code.strip():
            raise SpecError("the cell is empty: write the code to run below its first line")
        chosen = self._choose_idle(ranks)
        if self._wants_group:
            self._ranks.mend_group(self.world_size)
        self._last_cell = self.next_cell(at_least=number or 1)
        run = CellRun(self._last_cell, chosen, observer, self._hosts())
        self._inbox.add_run(run)
        self._run_to_its_end(run, RunCell(list(chosen), run.cell, code, first_line), timeout_s)
        self._raise_for(run)
        return self._result(run, values=values)

    def show_again(self, cell: int, observer: CellObserver, *, ranks: Ranks = None) -> CellRun:
        """Give ``observer`` all that the log has of a cell; values and errors are in what is returned."""
        run = CellRun(cell, parse_ranks(ranks, world_size=self.world_size), observer, self._hosts())
        for message in self.log.read(cell):
            if message.rank in run.ranks:
                run.take(message)
        return run

    def pull(self, names: str | Iterable[str], *, ranks: Ranks = None) -> dict[int, Any]:
        """Bring variables of the ranks here: ``{rank: value}`` for one name, ``{rank: {name: value}}`` for a list.

        Tensors arrive detached, on the CPU. Raises: SessionError when a rank has no such variable, or a value there
        cannot travel.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        chosen = self._choose_idle(ranks)
        found = self._ranks.pull(wanted, chosen)
        return {rank: found[rank][names] for rank in chosen} if isinstance(names, str) else found

    def push(self, variables: Mapping[str, Any], *, ranks: Ranks = None) -> None:
        """Set variables on the ranks. Raises: ValueNotSupported when a value cannot travel; nothing is set then."""
        self._ranks.push(variables, self._choose_idle(ranks))

    def status(self, *, limit_s: float = 2.0) -> SessionStatus:
        """Where every rank is: its state, the line of the cell it is at, its memory."""
        positions = self._ranks.locate(range(self.world_size), limit_s=limit_s)
        rows = []
        for rank in range(self.world_size):
            up, position = self._inbox.up[rank], positions.get(rank)
            rows.append(
                RankStatus(
                    rank,
                    up.host,
                    up.pid,
                    up.device,
                    position.state if position else ("lost" if rank in self._inbox.lost else "no answer"),
                    position.cell if position else 0,
                    position.line if position and position.state == "running" else 0,
                    position.rss_bytes if position else 0,
                    self._inbox.last_seconds.get(rank),
                )
            )
        return SessionStatus(self.name, tuple(rows))

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt on every rank that runs a cell. Does not wait."""
        for run in set(self._inbox.busy.values()):
            self._ranks.send(Interrupt(list(run.running), run.cell))

    def complete(self, code: str, position: int, *, limit_s: float = 1.0) -> Completions | None:
        """Completions by the first idle rank; None when there is none, or it does not answer in time."""
        answer = self._ask_idle(lambda rank, number: Complete([rank], number, code, position), limit_s)
        return answer if isinstance(answer, Completions) else None

    def inspect(self, name: str, detail: int = 0, *, limit_s: float = 1.0) -> str | None:
        """The help text of a name, by the first idle rank."""
        answer = self._ask_idle(lambda rank, number: Inspect([rank], number, name, detail), limit_s)
        return answer.text or None if isinstance(answer, Inspection) else None

    def stop(self) -> None:
        """End the ranks and everything they started. Does nothing the second time."""
        with self._stopping:
            if self._is_stopped:
                return
            self._is_stopped = True
            atexit.unregister(self.stop)
            self._ranks.end(limit_s=END_LIMIT_S)
            self._transport.wait_for_end(limit_s=END_LIMIT_S)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self.is_alive else "ended"
        return f"<Session {self.name!r}: {self.world_size} ranks on {self.plan.device}, {state}>"

    def _ask_idle(self, ask: Callable[[int, int], Message], limit_s: float) -> Message | None:
        idle = set(range(self.world_size)) - set(self._inbox.busy) - set(self._inbox.lost)
        if not idle or not self.is_alive:
            return None
        return self._ranks.ask(min(idle), ask, limit_s=limit_s)

    # ---- start

    def _attach(self) -> Attached:
        self._ranks.send(Attach(self.name, f"pid {os.getpid()}"))
        self._inbox.attached.wait(START_LIMIT_S, what="attach")
        answer = self._inbox.attached.answers[0]
        assert isinstance(answer, Attached)
        return answer

    def _launch(self, *, cpus: int, env: Mapping[str, str], start: str, seed: int, folder: str) -> None:
        ranks = list(self.plan.nodes[0].ranks)
        wanted_threads = env.get("OMP_NUM_THREADS", "")
        threads = int(wanted_threads) if wanted_threads.isdigit() else threads_per_rank(len(ranks), cpus=cpus)
        config = RankConfig(
            agent_socket="agent.sock",
            folder=folder,
            device=self.plan.device,
            backend=self.plan.backend,
            seed=seed,
            threads=threads,
        )
        launch = launch_node(
            self.plan,
            config,
            node_rank=0,
            python=self._transport.python,
            store_address=self._transport.store_address,
            start=start,
            extra_env=env,
        )
        self._inbox.ranks_up = self._inbox.requests.new(ranks)
        self._ranks.send(Launch(launch.argv, launch.env, ranks))
        self._inbox.ranks_up.wait(START_LIMIT_S, what="start")

    # ---- cells

    def _hosts(self) -> dict[int, str]:
        return {rank: up.host for rank, up in self._inbox.up.items()}

    def _choose_idle(self, ranks: Ranks) -> tuple[int, ...]:
        """The ranks that were chosen. Raises: SpecError, or SessionError when one of them cannot be spoken to now."""
        if self._is_stopped:
            raise SessionError(f"session {self.name!r} has ended: start another one")
        chosen = parse_ranks(ranks, world_size=self.world_size)
        self._ranks.require_idle(chosen)
        return chosen

    def _run_to_its_end(self, run: CellRun, message: RunCell, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        lost_deadline = None
        try:
            self._ranks.send(message)
            while not run.done.wait(_next_look(deadline)):
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    stopped = self._stop_cell(run)
                    raise CellTimeout(f"the cell did not end within {timeout_s:g} s: {stopped}{_failures(run)}")
                if run.lost and lost_deadline is None:
                    lost_deadline = now + LOST_LIMIT_S
                if lost_deadline is not None and now >= lost_deadline:
                    raise RankLost(f"{self._describe_losses(run)}\n{self._stop_cell(run)}")
                self._tell_who_is_waited_for(run)
        except KeyboardInterrupt:
            note = self._stop_cell(run)
            raise CellInterrupted(run.errors(), world_size=len(run.ranks), note=note) from None
        if run.running and self._inbox.failure:
            raise self._inbox.failure

    def _stop_cell(self, run: CellRun) -> str:
        """Interrupt what still runs, give it a few seconds, and say in words how that went."""
        try:
            if run.running:
                self._ranks.send(Interrupt(list(run.running), run.cell))
                run.done.wait(STOP_LIMIT_S)
        except KeyboardInterrupt:
            pass  # pressed again: the prompt comes back at once
        if not run.running:
            return "all ranks stopped and kept their variables"
        return (
            f"{self._ranks.where(run.running)} did not stop within {STOP_LIMIT_S:g} s, "
            "blocked in C code or in a collective: wait for it, or start all ranks anew with %distributed restart"
        )

    def _tell_who_is_waited_for(self, run: CellRun) -> None:
        """When some ranks have ended the cell: which have not, and where they are."""
        observer = run.observer
        if observer is None or not run.running:
            return
        is_waiting = bool(run.outcomes)
        observer.waiting(f"waiting for {self._ranks.where(run.running)}{_failures(run)}" if is_waiting else "")

    def _raise_for(self, run: CellRun) -> None:
        if run.lost:
            raise RankLost(self._describe_losses(run))
        errors = run.errors()
        if errors:
            is_stopped = all(error.interrupted for error in errors.values())
            raise (CellInterrupted if is_stopped else RankError)(errors, world_size=len(run.ranks))

    def _result(self, run: CellRun, *, values: bool) -> CellResult:
        bundles = run.bundles()
        found = self._pull_values(run, bundles) if values and bundles else {}
        results = {}
        for rank, outcome in run.outcomes.items():
            assert isinstance(outcome, CellDone)
            bundle = bundles.get(rank, {})
            value = found.get(rank, TextOnly(bundle["text/plain"]) if bundle else None)
            host = self._inbox.up[rank].host
            results[rank] = RankResult(rank, host, outcome.seconds, None, bundle, value, self.log, run.cell)
        return CellResult(run.cell, results)

    def _pull_values(self, run: CellRun, bundles: Iterable[int]) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for rank in bundles:
            with contextlib.suppress(SessionError, ValueNotSupported):  # its text stands for what cannot travel
                found.update(self.pull("_", ranks=rank))
        return found

    def _describe_losses(self, run: CellRun) -> str:
        return "\n".join(describe_end(end, host=self._inbox.up[rank].host) for rank, end in run.lost.items())


def _failures(run: CellRun) -> str:
    """What has failed while others still run: often the reason why they wait."""
    failed: dict[str, list[int]] = {}
    for rank, error in run.errors().items():
        if not error.interrupted:
            failed.setdefault(error.summary.splitlines()[0], []).append(rank)
    return "".join(f"; {format_ranks(ranks)} failed with {summary}" for summary, ranks in failed.items())


def _next_look(deadline: float | None) -> float:
    """Seconds until the next look at who is waited for."""
    return 1.0 if deadline is None else max(0.0, min(1.0, deadline - time.monotonic()))


def _check_start(*, ranks: int | None, start: str, env: Mapping[str, str], folder: str) -> None:
    if ranks is not None and ranks < 1:
        raise SpecError(f"{ranks} ranks: a session needs at least 1")
    if start not in ("fork", "exec"):
        raise SpecError(f"start {start!r} is neither fork nor exec")
    if not os.path.isdir(folder):
        raise SpecError(f"folder {folder} is not there: the ranks start in it")
    for key, value in env.items():
        if not key or "=" in key or "\0" in key + value:
            raise SpecError(f"{key!r} is no name of an environment variable")
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and torch_distributed.is_available() and torch_distributed.is_initialized():
        raise SessionError(
            "torch.distributed is initialised in this process itself: call torch.distributed.destroy_process_group() "
            "first, the ranks are processes of their own"
        )
