"""The agents of a session on all its nodes: brought up, or connected to, all at once; where one fails, none is held."""

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
_MOST_HOSTS = 8  # are named


@dataclass(frozen=True)
class End:
    """A byte stream to the agent of a node; one that has ended where the agent is ``absent``, which says why.

    ``why_cold``: why what was kept from the last session could not be used, where something was. ``is_apart``: not all
    nodes reach each other.
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
    """Start the agent of ``session``, a name that was checked, on every node at once; return the byte streams to them.

    ``on_step`` is told in the threads of the nodes. ``meanwhile`` is called in this one, again and again; what it
    raises ends all of it. Nodes that ``may_be_apart`` need not reach each other.
    Raises: LaunchError with a line for every node where it failed, SessionError where such a session runs. None is
    left running then.
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
    """On an agent that was kept from the last session there, if it is as good as a fresh one."""
    begun = begin_on_kept(transport, session)
    if isinstance(begun, str):
        return End(transport, transport.start_agent(session), why_cold=begun)
    return End(*begun)


def give_up_agents(ends: Sequence[End]) -> None:
    """End agents that have been brought up and have no session yet."""
    _Arrivals(end_unused, ends).give_up()


def leave_agents(ends: Sequence[End]) -> None:
    """Let go of agents that have been connected to; they stay for the next notebook."""
    _Arrivals(socket.socket.close, ends).give_up()


def attach_to_agents(transports: Sequence[Transport], session: str, *, without: Collection[str] = ()) -> list[End]:
    """Connect to the agents of ``session``, which run already; return the byte streams to them. Raises as above.

    The first has to be there; another one that is not any more is said to be absent, as are those that are left out.
    """
    others = [transport.name for transport in transports[1:]]
    if unknown := [name for name in without if name not in others]:
        raise SpecError(
            f"attach without {unknown[0]!r}: {unknown[0]!r} is not one of the nodes that can be left out: "
            f"{', '.join(others[:_MOST_HOSTS]) or 'none, this session has one node'}"
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
    """Every node's end, or none: where one fails, the others are given up.

    The agents of a session that is ``attached_to`` can have ended, but for the first.
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
    except BaseException:  # an interrupt too, after which nothing is left; who takes too long is given up on arrival
        pool.shutdown(wait=False, cancel_futures=True)
        try:
            wait(work, _ARRIVAL_LIMIT_S)
        finally:
            arrivals.give_up()
        raise


class _Arrivals:
    """The byte streams that have come to be. Once they are given up, others are as soon as they come."""

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
        """An interrupt meanwhile spares none of them."""
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
    """Raises: what it has failed with, of all nodes; our own faults as they are."""
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
            words += f"\nto go on without their ranks: %distributed attach {attached_to} --without {names}"
        raise (kinds.pop() if len(kinds) == 1 else LaunchError)(words)
    return [
        End(transport, _ended_socket(), absent=str(future.exception())) if future in absent else future.result()
        for future, transport in work.items()
    ]


def _refuse_twins(transports: Sequence[Transport]) -> None:
    """Raises: SpecError where two nodes have turned out to be one: the second found the agent of the first there."""
    seen: dict[object, str] = {}
    for transport in transports:
        if (account := transport.account) in seen:
            raise SpecError(
                f"{seen[account]} and {transport.name} are one machine: name it once, with ranks = N for several ranks"
            )
        if account is not None:
            seen[account] = transport.name


def _refuse_namesakes(transports: Sequence[Transport], failures: Mapping[Transport, DetrainError]) -> None:
    """Raises: SpecError where a node has found the agent that was started just now on another, in the home of both."""
    accounts = {each.name: each.account for each in transports if each not in failures}
    names = {account[:2]: name for name, account in accounts.items() if isinstance(account, tuple)}
    for transport, error in failures.items():
        account = transport.account
        if isinstance(error, SessionError) and isinstance(account, tuple) and account[:2] in names:
            raise SpecError(
                f"{names[account[:2]]} and {transport.name} share a home, and both have the host name {account[0]}: "
                "give one another name, or a place of its own for our files: XDG_CACHE_HOME in its setup lines"
            )


def _ended_socket() -> socket.socket:
    ours, theirs = socket.socketpair()
    theirs.close()
    return ours
