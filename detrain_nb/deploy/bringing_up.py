"""Agents of a session on all its nodes: started, or connected to, in parallel; when one fails, all are given up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from ..errors import DetrainError, LaunchError, SessionError, SpecError
from ..transport import Transport
from .ending import end_unused
from .files import label
from .kept import begin_on_kept
from .node_facts import check_same_torch
from .start_steps import OnStep, StartStep, ignore_step
from .ways import settle_addresses

__all__ = ["End", "attach_to_agents", "bring_up_agents", "give_up_agents", "leave_agents"]

_ARRIVAL_LIMIT_S = 3.0
_LOOK_GAP_S = 0.1
_MOST_HOSTS = 8  # named in one error


@dataclass(frozen=True)
class End:
    """Our end of the byte stream to the agent of a node.

    ``absent``: why the agent is absent, in which case the stream is closed; else empty. ``why_cold``: why the agent
    kept from the last session could not be reused, if there was one. ``is_apart``: not all nodes reach each other.
    """

    transport: Transport
    sock: socket.socket
    absent: str = ""
    why_cold: str = ""
    is_apart: bool = False


def bring_up_agents(
    transports: Sequence[Transport],
    session: str,
    *,
    on_step: OnStep = ignore_step,
    meanwhile: Callable[[], None] | None = None,
    may_be_apart: bool = False,
) -> list[End]:
    """Start the agent of ``session``, a valid name, on all nodes in parallel; return the byte streams to the agents.

    ``on_step`` is called in the threads of the nodes, ``meanwhile`` repeatedly in the calling thread; an exception
    from ``meanwhile`` cancels the start. With ``may_be_apart``, nodes need not reach each other.
    Raises: LaunchError with a line for every node that failed, SessionError when a session of that name is running.
    No agent is left running after an error.
    """

    def start(transport: Transport) -> End:
        on_step(StartStep(transport.name, "connect", "running"))
        try:
            end = _start_agent(transport, session)
        except DetrainError as exc:
            on_step(StartStep(transport.name, "connect", "failed", error=str(exc)))
            raise
        on_step(StartStep(transport.name, "connect", "done"))
        return end

    ends = _on_all(transports, start, give_up=end_unused, meanwhile=meanwhile)
    try:
        reached = [end.transport for end in ends]
        check_same_torch({label(transport): transport.torch for transport in reached})
        is_apart = not settle_addresses(reached, may_be_apart=may_be_apart)
    except BaseException:
        give_up_agents(ends)
        raise
    return [replace(end, is_apart=True) for end in ends] if is_apart else ends


def _start_agent(transport: Transport, session: str) -> End:
    """Begin on the agent kept from the last session if it is as good as a fresh one; else start a fresh one."""
    begun = begin_on_kept(transport, session)
    if isinstance(begun, str):
        return End(transport, transport.start_agent(session), why_cold=begun)
    return End(*begun)


def give_up_agents(ends: Sequence[End]) -> None:
    """End agents that were started and have no session yet."""
    _Arrivals(end_unused, ends).give_up()


def leave_agents(ends: Sequence[End]) -> None:
    """Close the connections to agents, which keep running for the next notebook."""
    _Arrivals(socket.socket.close, ends).give_up()


def attach_to_agents(transports: Sequence[Transport], session: str, *, without: Collection[str] = ()) -> list[End]:
    """Connect to the running agents of ``session``; return the byte streams to them.

    The first agent must be running. Any other agent that no longer runs is marked as absent, as are the nodes of
    ``without``. Raises the same errors as ``bring_up_agents``, and SpecError for a wrong name in ``without``.
    """
    others = [transport.name for transport in transports[1:]]
    if unknown := [name for name in without if name not in others]:
        raise SpecError(
            f"cannot attach without {unknown[0]!r}: the nodes that can be left out are: "
            f"{', '.join(others[:_MOST_HOSTS]) or 'none, as this session has one node'}"
        )

    def connect(transport: Transport) -> End:
        if transport.name in without:
            return End(transport, _ended_socket(), absent="it was left out")
        return End(transport, transport.connect_agent(session))

    return _on_all(transports, connect, give_up=socket.socket.close, attached_to=session)


def _on_all(
    transports: Sequence[Transport],
    act: Callable[[Transport], End],
    *,
    give_up: Callable[[socket.socket], None],
    attached_to: str = "",
    meanwhile: Callable[[], None] | None = None,
) -> list[End]:
    """Call ``act`` for all nodes in parallel and return every node's end; if one fails, give up the others.

    With ``attached_to``, the name of a session, agents other than the first may have exited.
    """
    if len(transports) == 1 and not transports[0].name:
        return [act(transports[0])]
    arrivals = _Arrivals(give_up)

    def arrive(transport: Transport) -> End:
        arrivals.add(end := act(transport))
        return end

    pool = ThreadPoolExecutor(len(transports), thread_name_prefix="detrain_nb connect")
    work: dict[Future[End], Transport] = {}
    try:
        for transport in transports:
            work[pool.submit(arrive, transport)] = transport
        for transport in transports:
            transport.ask_meanwhile(work)
        while wait(work, _LOOK_GAP_S if meanwhile else None).not_done:
            if meanwhile:
                meanwhile()
        pool.shutdown()
        return _ends_of(work, attached_to=attached_to)
    except BaseException:  # an interrupt too: no agent is left running, and one that arrives later is given up then
        pool.shutdown(wait=False, cancel_futures=True)
        try:
            wait(work, _ARRIVAL_LIMIT_S)
        finally:
            arrivals.give_up()
        raise


class _Arrivals:
    """Byte streams opened so far; after ``give_up``, streams that arrive later are given up at once."""

    def __init__(self, give_up: Callable[[socket.socket], None], there: Sequence[End] = ()) -> None:
        self._give_up = give_up
        self._there = list(there)
        self._is_given_up = False
        self._changing = threading.Lock()

    def add(self, end: End) -> None:
        with self._changing:
            self._there.append(end)
            is_late = self._is_given_up
        if is_late:
            self.give_up()

    def give_up(self) -> None:
        """Give up all streams, even if an interrupt arrives meanwhile."""
        interrupt: KeyboardInterrupt | None = None
        while end := self._take():
            try:
                try:
                    self._give_up(end.sock)
                finally:
                    end.transport.leave()
            except KeyboardInterrupt as exc:
                interrupt = exc
        if interrupt:
            raise interrupt

    def _take(self) -> End | None:
        with self._changing:
            self._is_given_up = True
            return self._there.pop() if self._there else None


def _ends_of(work: Mapping[Future[End], Transport], *, attached_to: str) -> list[End]:
    """Return the results. Raises: one error with the failures of all nodes; bugs of our own are raised unchanged."""
    others = list(work)[1:] if attached_to else []
    absent = {future for future in others if isinstance(future.exception(), SessionError)}
    failures: list[tuple[Transport, DetrainError]] = []
    for future, transport in work.items():
        error = future.exception()
        if isinstance(error, DetrainError) and future not in absent:
            failures.append((transport, error))
    if failures:
        if not attached_to:
            _refuse_twins(list(work.values()))
            _refuse_namesakes(list(work.values()), dict(failures))
        kinds = {type(exc) for _, exc in failures}
        words = "\n".join(f"{transport.name}: {exc}" for transport, exc in failures)
        if not {transport for transport, _ in failures} - {work[future] for future in others}:
            names = ",".join(transport.name for transport, _ in failures)
            words += f"\nto continue without their ranks: %distributed attach {attached_to} --without {names}"
        raise (kinds.pop() if len(kinds) == 1 else LaunchError)(words)
    return [
        End(transport, _ended_socket(), absent=str(future.exception())) if future in absent else future.result()
        for future, transport in work.items()
    ]


def _refuse_twins(transports: Sequence[Transport]) -> None:
    """Raise SpecError when two nodes are the same machine: the second one found the agent of the first."""
    seen: dict[object, str] = {}
    for transport in transports:
        if (account := transport.account) in seen:
            raise SpecError(f"{seen[account]} and {transport.name} are the same machine: name it once, with ranks = N")
        if account is not None:
            seen[account] = transport.name


def _refuse_namesakes(transports: Sequence[Transport], failures: Mapping[Transport, DetrainError]) -> None:
    """Raise SpecError when a node found, in a shared home, the agent that was just started on another node."""
    accounts = {each.name: each.account for each in transports if each not in failures}
    names = {account[:2]: name for name, account in accounts.items() if isinstance(account, tuple)}
    for transport, error in failures.items():
        account = transport.account
        if isinstance(error, SessionError) and isinstance(account, tuple) and account[:2] in names:
            raise SpecError(
                f"{names[account[:2]]} and {transport.name} share a home directory and the host name {account[0]}: "
                "rename one host, or set a separate XDG_CACHE_HOME in its setup lines"
            )


def _ended_socket() -> socket.socket:
    ours, theirs = socket.socketpair()
    theirs.close()
    return ours
