"""Keys of a job's store for the watch of its nodes; does not import torchrun, which is slow to import."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistError, PrefixStore, Store

from ..system.bound_store import connect

_OPERATION_LIMIT_S = 60.0
_Answer = TypeVar("_Answer")


class WatchStore:
    """A `SharedStore` over a separate connection."""

    def __init__(self, address: str, port: int) -> None:
        try:
            # fail at once where nobody listens: torch would keep retrying
            socket.create_connection((address, port), timeout=_OPERATION_LIMIT_S).close()
            client: Store = connect(address, port, timeout=timedelta(seconds=_OPERATION_LIMIT_S))
        except (OSError, DistError) as exc:
            raise ConnectionError(f"the store of the job at {address}:{port} is down: {exc}") from exc
        self._store = PrefixStore("detrain_nb.watch", client)

    def set(self, key: str, value: str) -> None:
        self._call(lambda: self._store.set(key, value))

    def set_first(self, key: str, value: str) -> None:
        self._call(lambda: self._store.compare_set(key, "", value))

    def get(self, key: str) -> bytes | None:
        return self._call(lambda: self._store.get(key) if self._store.check([key]) else None)

    @staticmethod
    def _call(operation: Callable[[], _Answer]) -> _Answer:
        try:
            return operation()
        except DistError as exc:
            raise ConnectionError(str(exc)) from exc
