"""The state of the ranks' process groups: the present generation, the ranks that have one, what was made with it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from ...wire import GenerationEnded, GenerationReady
from .requests import Request, Requests

_ATTEMPTS = 3  # bounded: a node may keep reporting restarted ranks


class GroupState:
    """The process groups of one session; ``lock`` is held while messages of ranks are handled."""

    def __init__(self, requests: Requests, lock: threading.RLock) -> None:
        self._requests = requests
        self._lock = lock
        self._is_wanted = True
        self._timeout_s = 0.0
        self._is_checked = False
        self._number = 0
        self._ended = 0
        self._begun_by: dict[int, int] = {}  # the incarnations of the ranks that know the present generation
        self._begun_checked = False
        self._has_group: dict[int, bool] = {}
        self._stale: tuple[str, ...] = ()
        self._ready = self._being_ended = Request(0, ())
        self._given_up: dict[int, int] = {}  # the incarnations of ranks that could make no group
        self._times_given_up = 0  # since all ranks had a group

    @property
    def is_wanted(self) -> bool:
        """A default process group is made before the first cell, and after every loss."""
        return self._is_wanted

    @property
    def timeout_s(self) -> float:
        """The timeout of collectives; 0: torch's default."""
        return self._timeout_s

    @property
    def is_checked(self) -> bool:
        """In later generations ranks compare collectives before they begin them."""
        return self._is_checked

    @property
    def number(self) -> int:
        """The number of the latest generation."""
        return self._number

    @property
    def is_ended(self) -> bool:
        """The ranks were told to end the latest generation."""
        return self._number <= self._ended

    @property
    def stale(self) -> tuple[str, ...]:
        """The variables that were made with the generation that ended last."""
        return self._stale

    def want(self, is_wanted: bool, *, timeout_s: float) -> None:
        with self._lock:
            self._is_wanted, self._timeout_s = is_wanted, timeout_s

    def check(self, is_checked: bool) -> None:
        with self._lock:
            self._is_checked = is_checked

    def has_group(self, rank: int) -> bool:
        return self._has_group.get(rank, False)

    def all_have(self, ranks: Iterable[int]) -> bool:
        return all(self.has_group(rank) for rank in ranks)

    @property
    def any_has(self) -> bool:
        return any(list(self._has_group.values()))

    def is_current(self, incarnations: Mapping[int, int]) -> bool:
        """Return whether the latest generation is not ended, all ranks know it, and it is checked as configured."""
        is_as_wanted = self._begun_checked == self._is_checked or self.any_has
        return not self.is_ended and self._begun_by == incarnations and is_as_wanted

    def go_on_from(self, number: int) -> None:
        """Continue from generation ``number``, which an earlier notebook began."""
        with self._lock:
            self._number = number

    def go_on_with(self, incarnations: Mapping[int, int]) -> None:
        """Set which ranks know the generation that an earlier notebook began."""
        with self._lock:
            self._begun_by = dict(incarnations)

    def begin(self, incarnations: Mapping[int, int]) -> int:
        """Begin the next generation, which these ranks are told of; returns its number."""
        with self._lock:
            self._number += 1
            self._begun_by, self._begun_checked = dict(incarnations), self._is_checked
            return self._number

    def expect_ready(self, ranks: Iterable[int]) -> Request:
        """Return the request that ranks answer when they have made the group of the present generation."""
        with self._lock:
            self._ready = self._requests.new(ranks)
            return self._ready

    def expect_end(self, ranks: Iterable[int]) -> Request:
        """Return the request that ranks answer when they have ended the present generation; none has a group now."""
        with self._lock:
            self._being_ended = self._requests.new(ranks)
            self._has_group.clear()
            return self._being_ended

    def note_end(self) -> None:
        """Note that the ranks were told to end the latest generation."""
        with self._lock:
            self._ended = self._number

    def note_stale(self, names: Iterable[str]) -> None:
        with self._lock:
            self._stale = tuple(sorted(names))

    def give_up(self, incarnations: Mapping[int, int]) -> None:
        """Note that these ranks could not make a group."""
        with self._lock:
            self._given_up = dict(incarnations)
            self._times_given_up += 1

    def is_given_up(self, incarnations: Mapping[int, int]) -> bool:
        """Return whether the same ranks could not make a group, or that ranks have failed ``_ATTEMPTS`` times."""
        return self._given_up == incarnations or self._times_given_up >= _ATTEMPTS

    def note_made(self) -> None:
        """Note that all ranks have a group."""
        with self._lock:
            self._times_given_up = 0

    # ---- messages of ranks; the lock is held

    def note(self, rank: int, *, has_group: bool) -> None:
        self._has_group[rank] = has_group

    def take_ready(self, message: GenerationReady) -> None:
        if message.number == self._number:  # not a generation that was given up
            self._has_group[message.rank] = not message.error
            self._ready.take(message)

    def take_end(self, message: GenerationEnded) -> None:
        if message.number == self._number:
            self._has_group[message.rank] = False
            self._being_ended.take(message)

    def keep_ranks(self, ranks: Iterable[int]) -> None:
        """Forget all ranks but these."""
        self._has_group = {rank: has for rank in ranks if (has := self._has_group.get(rank)) is not None}

    def forget_ranks(self) -> None:
        """Forget all ranks, which are about to be renumbered."""
        self._has_group, self._begun_by, self._given_up, self._stale = {}, {}, {}, ()
