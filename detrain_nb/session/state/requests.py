"""Requests to ranks and their answers: pull, push, where, completion."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from ... import values
from ...errors import CellTimeout, DetrainError, SessionError, WireError, format_ranks
from ...node.system.memory_room import require_room
from ...wire import Message, Piece, RequestFailed, Value
from ..output.safe_output import quote

_TIMES_PARSED = 50  # memory of a parsed description relative to its JSON; measured: 46
_NO_ROOM = "pull fewer values at once or a part of them, or torch.save them to a file there and %distributed get it"


class Request:
    """One request to some ranks. Each rank ends its answer with any message but ``Value`` and ``Piece``."""

    def __init__(
        self, number: int, ranks: Iterable[int], names: Iterable[str] = (), *, limit_bytes: int = values.MAX_BYTES
    ) -> None:
        """Create a request; ``names`` are the values to be sent, ``limit_bytes`` is the size limit of one value."""
        self.number: Final = number
        self._limit_bytes = limit_bytes
        self._left_as = ""
        self._names = set(names)  # of the requested values
        self._answers: dict[int, Message] = {}
        self.answers: Final = MappingProxyType(self._answers)  # received so far, by rank
        self._waiting_for = set(ranks)
        self._arriving: dict[tuple[int, str], _Arriving] = {}
        self._failure: DetrainError | None = None
        self._done = threading.Event()  # all have answered, or never will
        self._failed_or_done = threading.Event()

    @property
    def left_as(self) -> str:
        """What ranks are still doing for this request although nothing waits for it; else empty."""
        return self._left_as

    def leave_as(self, what: str) -> None:
        """Stop waiting while ranks continue with the request; ``what`` names what they do."""
        self._left_as = what

    def take(self, message: Any) -> None:
        """Take an answer or a part of one. Raises: WireError when it does not fit the request."""
        rank = message.ranks[0] if isinstance(message, Piece) else message.rank
        if rank not in self._waiting_for:
            return
        if isinstance(message, Value):
            if message.name not in self._names or (rank, message.name) in self._arriving:
                raise WireError(f"rank {rank} sent a value that was not requested")
            self._take_announcement(rank, message)
        elif isinstance(message, Piece):
            self._take_piece(rank, message)
        else:
            self.take_from(rank, message)

    def take_from(self, rank: int, message: Message) -> None:
        """Take the message that ends a rank's answer."""
        self._answers[rank] = message
        self._forget(rank)

    @property
    def is_open(self) -> bool:
        """Some ranks have not answered yet."""
        return bool(self._waiting_for)

    def waits_for(self, rank: int) -> bool:
        """Return whether ``rank`` has not answered yet."""
        return rank in self._waiting_for

    @property
    def wants_values(self) -> bool:
        """The request is for values of variables."""
        return bool(self._names)

    @property
    def has_failed(self) -> bool:
        """An answer will never arrive."""
        return self._failure is not None

    def fail(self, error: DetrainError, *, rank: int | None = None) -> None:
        """Fail the request: ``rank``, or with None every rank, will not answer; earlier answers are kept."""
        if rank in self._waiting_for or rank is None and self.is_open:
            self._failure = self._failure or error
            self._failed_or_done.set()
            for gone in [*self._waiting_for] if rank is None else [rank]:
                self._forget(gone)

    def _forget(self, rank: int) -> None:
        self._waiting_for.discard(rank)
        if not self._waiting_for:
            self._done.set()
            self._failed_or_done.set()

    def wait(self, limit_s: float | None, *, what: str) -> None:
        """Wait for all answers, or until one can no longer arrive.

        Raises: CellTimeout, NodeLost, RankLost, or SessionError with what the ranks refused.
        """
        if not self._failed_or_done.wait(limit_s):
            raise CellTimeout(f"{what}: {format_ranks(self._waiting_for)} did not answer within {limit_s:g} s")
        if self._failure:
            raise self._failure
        refused: dict[str, list[int]] = {}
        for rank, answer in self._answers.items():
            if isinstance(answer, RequestFailed):
                refused.setdefault(answer.error, []).append(rank)
        if refused:
            raise SessionError("\n".join(f"{format_ranks(ranks)}: {quote(error)}" for error, ranks in refused.items()))

    def wait_quietly(self, limit_s: float) -> bool:
        """Wait for all answers that can still arrive; returns False when some have not after ``limit_s``."""
        return self._done.wait(limit_s)

    def value(self, rank: int, name: str) -> object:
        """Return a value that has arrived. Raises: WireError when it has not, or not completely."""
        arrived = self._arriving.get((rank, name))
        if arrived is None:
            raise WireError(f"rank {rank} did not send {name}")
        if not arrived.is_complete:
            raise WireError(f"rank {rank} sent only a part of {name}")
        sizes = arrived.announced.buffer_sizes
        return values.unpack(arrived.description, [arrived.buffers[index] for index in range(len(sizes))])

    def _take_announcement(self, rank: int, message: Value) -> None:
        """Take the announcement of a value; fail the request if it does not fit in memory with those still arriving.

        Raises: WireError when the announcement is invalid.
        """
        to_come_bytes = sum(arriving.to_come_bytes for arriving in self._arriving.values())
        ask = partial(require_room, what=f"{message.name} of {format_ranks([rank])}", advice=_NO_ROOM)
        try:
            ask(to_come_bytes + _TIMES_PARSED * min(len(message.body), values.MAX_DESCRIPTION_BYTES))
            announced = values.read_announcement(message.description, limit_bytes=self._limit_bytes)
            ask(to_come_bytes + announced.memory_bytes)
        except SessionError as exc:
            self.fail(exc, rank=rank)
            return
        self._arriving[rank, message.name] = _Arriving(message.description, announced)

    def _take_piece(self, rank: int, message: Piece) -> None:
        arriving = self._arriving.get((rank, message.name))
        if arriving is None or not 0 <= message.buffer < len(arriving.announced.buffer_sizes):
            raise WireError(f"rank {rank} sent a piece of a value that it had not announced")
        buffer = arriving.buffers.setdefault(message.buffer, bytearray())
        if len(buffer) + len(message.body) > arriving.announced.buffer_sizes[message.buffer]:
            raise WireError(f"rank {rank} sent more bytes of {message.name} than it announced")
        buffer += message.body  # allocate for bytes received, not for bytes announced


@dataclass
class _Arriving:
    """The part of a value that has arrived, by buffer."""

    description: Any
    announced: values.Announced
    buffers: dict[int, bytearray] = field(default_factory=dict)

    @property
    def to_come_bytes(self) -> int:
        """The memory that the rest of the value may take."""
        return self.announced.memory_bytes - sum(map(len, self.buffers.values()))

    @property
    def is_complete(self) -> bool:
        sizes = self.announced.buffer_sizes
        return all(len(self.buffers.get(index, b"")) == size for index, size in enumerate(sizes))


class Requests:
    """The requests in progress."""

    def __init__(self) -> None:
        # start at random: answers to requests of an earlier notebook, with other numbers, may still arrive
        self._numbers = itertools.count(secrets.randbelow(1 << 48) + 1)
        self._open: dict[int, Request] = {}
        self._left: dict[int, Request] = {}

    def new(self, ranks: Iterable[int], names: Iterable[str] = (), *, limit_bytes: int = values.MAX_BYTES) -> Request:
        request = Request(next(self._numbers), ranks, names, limit_bytes=limit_bytes)
        self._open[request.number] = request
        return request

    def end(self, request: Request) -> None:
        self._open.pop(request.number, None)
        if request.left_as and request.is_open:
            self._left[request.number] = request

    def left(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return those of ``ranks`` that still work on an abandoned request, and what they do."""
        wanted, left = set(ranks), list(self._left.values())
        return {rank: request.left_as for request in left for rank in wanted if request.waits_for(rank)}

    def are_open(self, number: int) -> bool:
        """Return whether request ``number`` awaits answers, or that ranks still work on it."""
        return number in self._open or number in self._left

    def take(self, message: Any) -> None:
        """Hand an answer to its request; drop it if it arrived too late."""
        request = self._open.get(message.request) or self._left.get(message.request)
        if request:
            request.take(message)
            self._forget_answered()

    def _forget_answered(self) -> None:
        for request in list(self._left.values()):
            if not request.is_open:
                self._left.pop(request.number, None)

    def fail_values(self, error: DetrainError, *, rank: int) -> None:
        """Fail the requests for values of ``rank``, which will not arrive; other answers still will."""
        for request in list(self._open.values()):
            if request.wants_values:
                request.fail(error, rank=rank)

    def fail_all(self, error: DetrainError, *, rank: int | None = None) -> None:
        """Fail all requests: no more answers will arrive from ``rank``, or with None from any rank."""
        for request in [*self._open.values(), *self._left.values()]:
            request.fail(error, rank=rank)
        self._forget_answered()
