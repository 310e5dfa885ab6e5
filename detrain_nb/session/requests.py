"""Questions to ranks and their answers: pull, push, where, completion."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import Any

from .. import values
from ..errors import CellTimeout, DetrainError, SessionError, WireError, format_ranks
from ..wire import Message, Piece, RequestFailed, Value


class Request:
    """One question to some ranks. Each of them ends its answer with any message but ``Value`` and ``Piece``."""

    def __init__(self, number: int, ranks: Iterable[int], names: Iterable[str] = ()) -> None:
        self.number = number
        self._names = set(names)  # of the values that were asked for
        self.answers: dict[int, Message] = {}
        self._waiting_for = set(ranks)
        self._arriving: dict[tuple[int, str], tuple[Any, list[bytearray], list[int]]] = {}
        self._failure: DetrainError | None = None
        self._done = threading.Event()

    def take(self, message: Any) -> None:
        """An answer, or a part of one."""
        rank = message.ranks[0] if isinstance(message, Piece) else message.rank
        if rank not in self._waiting_for:
            return
        if isinstance(message, Value):
            if message.name not in self._names or (rank, message.name) in self._arriving:
                raise WireError(f"rank {rank} sent a value that nobody asked for")
            buffers = [bytearray(size) for size in values.buffer_sizes(message.description)]
            self._arriving[rank, message.name] = (message.description, buffers, [0] * len(buffers))
        elif isinstance(message, Piece):
            self._take_piece(rank, message)
        else:
            self.take_from(rank, message)

    def take_from(self, rank: int, message: Message) -> None:
        """The end of a rank's answer."""
        self.answers[rank] = message
        self._waiting_for.discard(rank)
        if not self._waiting_for:
            self._done.set()

    @property
    def is_open(self) -> bool:
        """Somebody has not answered yet."""
        return bool(self._waiting_for)

    def fail(self, error: DetrainError) -> None:
        """Nobody will answer any more."""
        self._failure = error
        self._done.set()

    def wait(self, limit_s: float | None, *, what: str) -> None:
        """Wait for all answers. Raises: CellTimeout, NodeLost, or SessionError with what the ranks refused."""
        if not self._done.wait(limit_s):
            raise CellTimeout(f"{what}: {format_ranks(self._waiting_for)} did not answer within {limit_s:g} s")
        if self._failure:
            raise self._failure
        refused: dict[str, list[int]] = {}
        for rank, answer in self.answers.items():
            if isinstance(answer, RequestFailed):
                refused.setdefault(answer.error, []).append(rank)
        if refused:
            raise SessionError("; ".join(f"{format_ranks(ranks)}: {error}" for error, ranks in refused.items()))

    def wait_quietly(self, limit_s: float) -> None:
        """Wait for all answers, and be content with those that came."""
        self._done.wait(limit_s)

    def value(self, rank: int, name: str) -> object:
        """The value that arrived."""
        description, buffers, filled = self._arriving[rank, name]
        if any(have != len(buffer) for have, buffer in zip(filled, buffers)):
            raise WireError(f"rank {rank} sent {name} incomplete")
        return values.unpack(description, buffers)

    def _take_piece(self, rank: int, message: Piece) -> None:
        _, buffers, filled = self._arriving.get((rank, message.name), (None, [], []))
        if not 0 <= message.buffer < len(buffers):
            raise WireError(f"rank {rank} sent a piece of nothing")
        start = filled[message.buffer]
        end = start + len(message.body)
        if end > len(buffers[message.buffer]):
            raise WireError(f"rank {rank} sent more of {message.name} than it announced")
        buffers[message.buffer][start:end] = message.body
        filled[message.buffer] = end


class Requests:
    """The questions that are under way."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, Request] = {}

    def new(self, ranks: Iterable[int], names: Iterable[str] = ()) -> Request:
        request = Request(next(self._numbers), ranks, names)
        self._open[request.number] = request
        return request

    def end(self, request: Request) -> None:
        self._open.pop(request.number, None)

    def take(self, message: Any) -> None:
        """Hand an answer to its question; one that came too late is dropped."""
        request = self._open.get(message.request)
        if request:
            request.take(message)

    def fail_all(self, error: DetrainError) -> None:
        for request in list(self._open.values()):
            request.fail(error)
