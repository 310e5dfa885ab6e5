"""Questions to ranks and their answers: pull, push, where, completion."""

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

_TIMES_PARSED = 50  # what a description takes as objects, measured: 46 times
_NO_ROOM = "pull fewer values at once, a part of them, or torch.save them to a file there and %distributed get it"


class Request:
    """One question to some ranks. Each of them ends its answer with any message but ``Value`` and ``Piece``."""

    def __init__(
        self, number: int, ranks: Iterable[int], names: Iterable[str] = (), *, limit_bytes: int = values.MAX_BYTES
    ) -> None:
        """``limit_bytes``: of one value."""
        self.number: Final = number
        self._limit_bytes = limit_bytes
        self._left_as = ""
        self._names = set(names)  # of the values that were asked for
        self._answers: dict[int, Message] = {}
        self.answers: Final = MappingProxyType(self._answers)  # those that have come, by rank
        self._waiting_for = set(ranks)
        self._arriving: dict[tuple[int, str], _Arriving] = {}
        self._failure: DetrainError | None = None
        self._done = threading.Event()  # all have answered, or never will
        self._failed_or_done = threading.Event()

    @property
    def left_as(self) -> str:
        """What it asks for, where ranks go on with it though nobody waits any more; else nothing."""
        return self._left_as

    def leave_as(self, what: str) -> None:
        """Ranks go on with it, and nobody waits any more."""
        self._left_as = what

    def take(self, message: Any) -> None:
        """An answer, or a part of one."""
        rank = message.ranks[0] if isinstance(message, Piece) else message.rank
        if rank not in self._waiting_for:
            return
        if isinstance(message, Value):
            if message.name not in self._names or (rank, message.name) in self._arriving:
                raise WireError(f"rank {rank} sent a value that nobody asked for")
            self._take_announcement(rank, message)
        elif isinstance(message, Piece):
            self._take_piece(rank, message)
        else:
            self.take_from(rank, message)

    def take_from(self, rank: int, message: Message) -> None:
        """The end of a rank's answer."""
        self._answers[rank] = message
        self._forget(rank)

    @property
    def is_open(self) -> bool:
        """Somebody has not answered yet."""
        return bool(self._waiting_for)

    def waits_for(self, rank: int) -> bool:
        """It has not answered yet."""
        return rank in self._waiting_for

    @property
    def wants_values(self) -> bool:
        """It is a question for variables."""
        return bool(self._names)

    @property
    def has_failed(self) -> bool:
        """An answer will never come."""
        return self._failure is not None

    def fail(self, error: DetrainError, *, rank: int | None = None) -> None:
        """``rank`` will not answer any more, or nobody will; what has been answered stays so."""
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
        """Wait for all answers, or until one cannot come.

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
        """Wait for all answers that can come, and be content with those that did; False when some have not."""
        return self._done.wait(limit_s)

    def value(self, rank: int, name: str) -> object:
        """The value that arrived. Raises: WireError when it has not, or not all of it."""
        arrived = self._arriving.get((rank, name))
        if arrived is None:
            raise WireError(f"rank {rank} sent no {name}")
        if not arrived.is_complete:
            raise WireError(f"rank {rank} sent {name} incomplete")
        sizes = arrived.announced.buffer_sizes
        return values.unpack(arrived.description, [arrived.buffers[index] for index in range(len(sizes))])

    def _take_announcement(self, rank: int, message: Value) -> None:
        """Raises: WireError. Where there is no room for the value with those that still arrive, the question fails."""
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
            raise WireError(f"rank {rank} sent a piece of nothing")
        buffer = arriving.buffers.setdefault(message.buffer, bytearray())
        if len(buffer) + len(message.body) > arriving.announced.buffer_sizes[message.buffer]:
            raise WireError(f"rank {rank} sent more of {message.name} than it announced")
        buffer += message.body  # memory for what comes, not for what is only announced


@dataclass
class _Arriving:
    """A value as far as it has come, by buffer."""

    description: Any
    announced: values.Announced
    buffers: dict[int, bytearray] = field(default_factory=dict)

    @property
    def to_come_bytes(self) -> int:
        """Of the memory that it may take."""
        return self.announced.memory_bytes - sum(map(len, self.buffers.values()))

    @property
    def is_complete(self) -> bool:
        sizes = self.announced.buffer_sizes
        return all(len(self.buffers.get(index, b"")) == size for index, size in enumerate(sizes))


class Requests:
    """The questions that are under way."""

    def __init__(self) -> None:
        # answers to what an earlier notebook asked may still come: ours have other numbers
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
        """Those of ``ranks`` that still do what nobody waits for any more, and what that is."""
        wanted, left = set(ranks), list(self._left.values())
        return {rank: request.left_as for request in left for rank in wanted if request.waits_for(rank)}

    def are_open(self, number: int) -> bool:
        """Somebody waits for the answers to that question, or for the ranks that still are at it."""
        return number in self._open or number in self._left

    def take(self, message: Any) -> None:
        """Hand an answer to its question; one that came too late is dropped."""
        request = self._open.get(message.request) or self._left.get(message.request)
        if request:
            request.take(message)
            self._forget_answered()

    def _forget_answered(self) -> None:
        for request in list(self._left.values()):
            if not request.is_open:
                self._left.pop(request.number, None)

    def fail_values(self, error: DetrainError, *, rank: int) -> None:
        """The values that ``rank`` was sending will not arrive; other answers still do."""
        for request in list(self._open.values()):
            if request.wants_values:
                request.fail(error, rank=rank)

    def fail_all(self, error: DetrainError, *, rank: int | None = None) -> None:
        """No answer will come any more: from ``rank``, or from anybody."""
        for request in [*self._open.values(), *self._left.values()]:
            request.fail(error, rank=rank)
        self._forget_answered()
