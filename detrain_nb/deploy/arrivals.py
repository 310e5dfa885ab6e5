"""Byte streams to the agents of all nodes, made at once: all come to be, or none stays."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from ..errors import DetrainError, LaunchError, SessionError, SpecError
from ..transport import Transport

__all__ = ["End", "ended_socket", "let_go", "on_all"]

_ARRIVAL_LIMIT_S = 3.0


@dataclass(frozen=True)
class End:
    """A byte stream to the agent of a node; one that has ended where the agent is ``absent``, which says why.

    ``why_cold``: why what was kept from the last session could not be used, where something was.
    """

    transport: Transport
    sock: socket.socket
    absent: str = ""
    why_cold: str = ""


def on_all(
    transports: Sequence[Transport],
    act: Callable[[Transport], End],
    *,
    give_up: Callable[[socket.socket], None],
    attached_to: str = "",
) -> list[End]:
    """Every node's end, or none: where one fails, the others are given up.

    The agents of a session that is ``attached_to`` can have ended, but for the first.
    """
    if len(transports) == 1 and not transports[0].name:
        return [act(transports[0])]
    arrivals = Arrivals(give_up)

    def arrive(transport: Transport) -> End:
        end = act(transport)
        arrivals.add(end.transport, end.sock)
        return end

    pool = ThreadPoolExecutor(len(transports), thread_name_prefix="detrain_nb connect")
    work: dict[Future[End], Transport] = {}
    try:
        for transport in transports:
            work[pool.submit(arrive, transport)] = transport
        for transport in transports:
            transport.ask_meanwhile(work)
        wait(work)
        pool.shutdown()
        return _ends_of(work, attached_to=attached_to)
    except BaseException:  # an interrupt too, after which nothing is left; who takes too long is given up on arrival
        pool.shutdown(wait=False, cancel_futures=True)
        try:
            wait(work, _ARRIVAL_LIMIT_S)
        finally:
            arrivals.give_up()
        raise


def let_go(ends: Sequence[End], give_up: Callable[[socket.socket], None]) -> None:
    """Give up all of them; an interrupt meanwhile spares none."""
    arrivals = Arrivals(give_up)
    for end in ends:
        arrivals.add(end.transport, end.sock)
    arrivals.give_up()


class Arrivals:
    """The byte streams that have come to be. Once they are given up, others are as soon as they come."""

    def __init__(self, give_up: Callable[[socket.socket], None]) -> None:
        self._give_up = give_up
        self._there: list[tuple[Transport, socket.socket]] = []
        self._is_given_up = False
        self._changing = threading.Lock()

    def add(self, transport: Transport, sock: socket.socket) -> None:
        with self._changing:
            self._there.append((transport, sock))
            is_late = self._is_given_up
        if is_late:
            self.give_up()

    def give_up(self) -> None:
        """An interrupt meanwhile spares none of them."""
        interrupt: KeyboardInterrupt | None = None
        while (next_one := self._take()) is not None:
            transport, sock = next_one
            try:
                try:
                    self._give_up(sock)
                finally:
                    transport.leave()
            except KeyboardInterrupt as exc:
                interrupt = exc
        if interrupt:
            raise interrupt

    def _take(self) -> tuple[Transport, socket.socket] | None:
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
        kinds = {type(exc) for _, exc in failures}
        words = "\n".join(f"{transport.name}: {exc}" for transport, exc in failures)
        if not {transport for transport, _ in failures} - {work[future] for future in others}:
            names = ",".join(transport.name for transport, _ in failures)
            words += f"\nto go on without their ranks: %distributed attach {attached_to} --without {names}"
        raise (kinds.pop() if len(kinds) == 1 else LaunchError)(words)
    return [
        End(transport, ended_socket(), absent=str(future.exception())) if future in absent else future.result()
        for future, transport in work.items()
    ]


def _refuse_twins(transports: Sequence[Transport]) -> None:
    """Raises: SpecError where two nodes have turned out to be one: the second found the agent of the first there."""
    seen: dict[object, str] = {}
    for transport in transports:
        account = transport.account
        if account is None:
            continue
        if account in seen:
            raise SpecError(
                f"{seen[account]} and {transport.name} are one machine: name it once, with ranks = N for several ranks"
            )
        seen[account] = transport.name


def ended_socket() -> socket.socket:
    ours, theirs = socket.socketpair()
    theirs.close()
    return ours
