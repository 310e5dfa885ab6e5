"""How a session speaks to its ranks: it sends, asks and waits for answers, brings values, makes their process group."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .. import values
from ..errors import LaunchError, NodeLost, SessionError, TransportError, format_ranks
from ..wire import (
    PIECE_BYTES,
    EndSession,
    GenerationReady,
    Locate,
    Message,
    NewGeneration,
    Piece,
    Position,
    Pull,
    Push,
)
from .inbox import Inbox
from .node_link import NodeLink
from .requests import Request

GROUP_LIMIT_S = 60.0
VALUE_LIMIT_S = 600.0
LOCATE_LIMIT_S = 1.0


class RankLink:
    """The ranks of one session, behind the link to their node. What they say is in ``inbox``."""

    def __init__(self, session: str, sock: socket.socket) -> None:
        self.inbox = Inbox(session)
        self._session = session
        self._generation = 0
        self._link = NodeLink(sock, on_message=self.inbox.take, on_gap=self.inbox.notice, on_closed=self.inbox.close)

    def send(self, message: Message) -> None:
        """Raises: NodeLost, or whatever ended the session before."""
        try:
            self._link.send(message)
        except TransportError as exc:
            raise self.inbox.failure or NodeLost(f"the agent of session {self._session!r} is gone: {exc}") from exc

    def end(self, *, limit_s: float) -> None:
        """Ask the agent to end everything, and wait until it has hung up."""
        with contextlib.suppress(TransportError):
            self._link.send(EndSession())
        self._link.wait_for_end(limit_s=limit_s)
        self._link.close()

    def require_idle(self, chosen: Iterable[int]) -> None:
        """Raises: SessionError when one of the ranks is lost, or busy with a cell; NodeLost when all are gone."""
        if self.inbox.failure:
            raise self.inbox.failure
        lost = [rank for rank in chosen if rank in self.inbox.lost]
        if lost:
            raise SessionError(f"{format_ranks(lost)} of session {self._session!r} ended: %distributed restart")
        busy = [rank for rank in self.inbox.busy if rank in set(chosen)]
        if busy:
            raise SessionError(
                f"{self.where(busy)} still in cell {self.inbox.busy[busy[0]].cell}: "
                "wait for it, or start all ranks anew with %distributed restart"
            )

    # ---- values

    def pull(self, names: list[str], ranks: tuple[int, ...]) -> dict[int, dict[str, Any]]:
        """Bring variables here. Raises: SessionError with what the ranks refused."""
        with self._request(ranks, names) as request:
            self.send(Pull(list(ranks), request.number, names))
            request.wait(VALUE_LIMIT_S, what=f"pull of {', '.join(names)}")
            return {rank: {name: request.value(rank, name) for name in names} for rank in ranks}

    def push(self, variables: Mapping[str, Any], ranks: tuple[int, ...]) -> None:
        """Set variables there. Raises: ValueNotSupported; nothing is set then."""
        packed = [(name, *values.pack(value, name=name)) for name, value in variables.items()]
        for name, description, buffers in packed:
            with self._request(ranks) as request:
                self.send(Push(list(ranks), request.number, name, description))
                for index, buffer in enumerate(buffers):
                    for start in range(0, len(buffer), PIECE_BYTES):
                        body = bytes(buffer[start : start + PIECE_BYTES])
                        self.send(Piece(list(ranks), request.number, name, index, body))
                request.wait(VALUE_LIMIT_S, what=f"push of {name}")

    # ---- process groups

    def mend_group(self, world_size: int) -> None:
        """Make the default group anew when a cell has destroyed it; needs every rank idle."""
        is_whole = all(self.inbox.has_group.get(rank) for rank in range(world_size))
        if not is_whole and not self.inbox.lost and not self.inbox.busy:
            self.make_group(world_size)

    def make_group(self, world_size: int) -> None:
        """Let all ranks make the default group of the next generation. Raises: LaunchError with their reason."""
        self._generation += 1
        everyone = list(range(world_size))
        ready = self.inbox.generation_ready = self.inbox.requests.new(everyone)
        self.send(NewGeneration(everyone, self._generation))
        try:
            ready.wait(GROUP_LIMIT_S, what="making the process group")
        finally:
            self.inbox.requests.end(ready)
        failed = {
            rank: answer.error
            for rank, answer in ready.answers.items()
            if isinstance(answer, GenerationReady) and answer.error
        }
        if failed:
            raise LaunchError(f"{format_ranks(failed)} could not make the process group: {next(iter(failed.values()))}")

    # ---- questions

    def locate(self, ranks: Iterable[int], *, limit_s: float = LOCATE_LIMIT_S) -> dict[int, Position]:
        """Where ranks are; one that does not answer in time is not in the answer."""
        asked = [rank for rank in ranks if rank not in self.inbox.lost]
        with self._request(asked) as request:
            if asked:
                with contextlib.suppress(NodeLost):
                    self.send(Locate(asked, request.number))
                    request.wait_quietly(limit_s)
            return {rank: answer for rank, answer in request.answers.items() if isinstance(answer, Position)}

    def where(self, ranks: Iterable[int]) -> str:
        """Ranks and the line each is at, those at one line together: ``ranks 0, 2 (line 7), rank 1 (line 3)``."""
        positions = self.locate(ranks)
        places: dict[str, list[int]] = {}
        for rank in ranks:
            line = positions[rank].line if rank in positions else 0
            places.setdefault(f" (line {line})" if line else "", []).append(rank)
        return ", ".join(format_ranks(group) + place for place, group in places.items())

    def ask(self, rank: int, ask: Callable[[int, int], Message], *, limit_s: float) -> Message | None:
        """Send ``ask(rank, number of the request)`` to one rank; None when it does not answer in time."""
        with self._request([rank]) as request:
            with contextlib.suppress(NodeLost):
                self.send(ask(rank, request.number))
                request.wait_quietly(limit_s)
            return request.answers.get(rank)

    @contextlib.contextmanager
    def _request(self, ranks: Iterable[int], names: Iterable[str] = ()) -> Iterator[Request]:
        request = self.inbox.requests.new(ranks, names)
        try:
            yield request
        finally:
            self.inbox.requests.end(request)
