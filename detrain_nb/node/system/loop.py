"""A loop in which one thread waits for many sources, flushing links when possible and calling readers in turn."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...wire import Link, LinkClosed

_LONGEST_WAIT_S = 3600.0  # safely within the range of every system

Source = Link | int  # a link, or a descriptor that is only read


@dataclass
class _Watched:
    on_readable: Callable[[], object]
    is_paused: bool = False
    events: int = 0


class Loop:
    """A set of sources, each with a function to call when it can be read."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._watched: dict[Source, _Watched] = {}
        self._links: list[Link] = []

    def add(self, source: Source, on_readable: Callable[[], object]) -> None:
        """Watch ``source``, or replace its reader; ``on_readable`` also handles the end of the source."""
        if source in self._watched:
            self._watched[source].on_readable = on_readable
            return
        self._watched[source] = _Watched(on_readable)
        if isinstance(source, Link):
            self._links.append(source)
        self._register(source)

    def remove(self, source: Source) -> None:
        """Stop watching ``source``; does nothing if it is not watched."""
        watched = self._watched.pop(source, None)
        if watched and watched.events:
            self._selector.unregister(source)
        if isinstance(source, Link) and watched:
            self._links.remove(source)

    def pause(self, source: Source, is_paused: bool) -> None:
        """Pause or resume reading from ``source``; bytes waiting to be sent to it are still sent."""
        watched = self._watched.get(source)
        if watched and watched.is_paused != is_paused:
            watched.is_paused = is_paused
            self._register(source)

    def once(self, *moments: float | None) -> None:
        """Wait for events, at most until the first of ``moments`` (of time.monotonic()), and handle them all."""
        first = min((at for at in moments if at is not None), default=None)
        timeout_s = None if first is None else min(_LONGEST_WAIT_S, max(0.0, first - time.monotonic()))
        for link in self._links:
            if bool(link.waiting_bytes) != bool(self._watched[link].events & selectors.EVENT_WRITE):
                self._register(link)
        for key, events in self._selector.select(timeout_s):
            source: Source = key.data
            if events & selectors.EVENT_WRITE and isinstance(source, Link) and source in self._watched:
                try:
                    source.flush()
                except LinkClosed:
                    events |= selectors.EVENT_READ  # its reader fails too, and handles the end
            watched = self._watched.get(source)
            if events & selectors.EVENT_READ and watched:
                watched.on_readable()

    def close(self) -> None:
        """Stop watching all sources."""
        self._selector.close()
        self._watched.clear()
        self._links.clear()

    def _register(self, source: Source) -> None:
        watched = self._watched[source]
        wanted = 0 if watched.is_paused else selectors.EVENT_READ
        if isinstance(source, Link) and source.waiting_bytes:
            wanted |= selectors.EVENT_WRITE
        if wanted == watched.events:
            return
        if not wanted:
            self._selector.unregister(source)
        elif watched.events:
            self._selector.modify(source, wanted, source)
        else:
            self._selector.register(source, wanted, source)
        watched.events = wanted
