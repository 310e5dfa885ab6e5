"""The rendezvous of a job on fixed nodes: torchrun's --rdzv-backend detrain-job.

The store listens on one address of node 0, on a socket that was bound before torchrun started; the ranks use the same
store, as with torchrun's own rendezvous. Once all nodes have joined, they watch each other (watch.py).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ...launch import JOB_BACKEND, JOB_NODES_VARIABLE
from ...text import printable
from ..system.bound_store import connect, listen
from .watch import Watch, end_ranks, write_reason
from .watch_store import WatchStore

_GONE_GRACE_S = 1.0  # before torch is killed while it waits
_MOST_NAME = 100  # characters


class FixedRendezvous(RendezvousHandler):
    """Rendezvous in which node rank 0 serves the store, and all nodes wait for each other."""

    def __init__(self, params: RendezvousParameters) -> None:
        self.node_rank = params.get_as_int("rank", 0) or 0
        self._run_id, self._num_nodes = params.run_id, params.max_nodes
        self._timeout_s = float(params.get_as_int("timeout") or 120)
        self._silence_s = float(params.get_as_int("silence") or 60)
        self._address, self._port = parse_rendezvous_endpoint(params.endpoint, default_port=0)
        self._store: TCPStore | None = None
        self._watch: Watch | None = None

    def get_backend(self) -> str:
        return JOB_BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._store = open_store(self._address, self._port, self.node_rank, self._timeout_s)
            self._port = self._store.port
            self._watch = self._meet()
        return RendezvousInfo(
            PrefixStore(self._run_id, self._store),
            self.node_rank,
            self._num_nodes,
            RendezvousStoreInfo(self._address, self._port),
        )

    def _meet(self) -> Watch:
        watch = open_watch(
            self._address,
            self._port,
            node_rank=self.node_rank,
            num_nodes=self._num_nodes,
            silence_s=self._silence_s,
        )
        try:
            wrong = watch.wait_for_all(self._timeout_s)
        except ConnectionError:
            wrong = _holder_is_gone()
        if wrong:
            write_reason(wrong)
            watch.tell_end(wrong)
            raise RendezvousTimeoutError(wrong)
        watch.start()
        return watch

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        if self._watch is not None:
            tell_others(self._watch, self.node_rank, sys.exc_info()[1])
        return True


def tell_others(watch: Watch, node_rank: int, error: BaseException | None) -> None:
    """Report how this node's ranks have ended; torchrun shuts the rendezvous down while ``error`` is raised."""
    if error is None:
        watch.tell_done()
    elif isinstance(error, ChildFailedError):
        rank, failure = error.get_first_failure()
        how = (
            f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"exited with code {failure.exitcode}"
        )
        watch.tell_end(f"{watch.name(node_rank)} failed: rank {rank} {how}")
    else:
        watch.tell_end(f"{watch.name(node_rank)} failed: {type(error).__name__}: {error}")


def open_store(address: str, port: int, node_rank: int, timeout_s: float) -> TCPStore:
    """Open the store of the job: node 0 serves it, the others connect. Raises: RendezvousConnectionError."""
    timeout = timedelta(seconds=timeout_s)
    try:
        if node_rank == 0:
            return listen(address, port, timeout=timeout)
        with _ended_with_store(address, port, timeout_s):
            return connect(address, port, timeout=timeout)
    except ConnectionRefusedError as exc:
        write_reason(_holder_is_gone())
        raise RendezvousConnectionError(_holder_is_gone()) from exc
    except (DistError, OSError) as exc:
        reason = f"the store of the job at {address}:{port} on {_name(0)} was not reached within {timeout_s:g} s"
        write_reason(reason)
        raise RendezvousConnectionError(reason) from exc


@contextlib.contextmanager
def _ended_with_store(address: str, port: int, limit_s: float) -> Iterator[None]:
    """Stop this node if node 0 exits while the block waits for its store: torch would retry until its timeout.

    Node 0 bound its socket before any node was launched, so a refused connection means that node 0 has exited.
    Raises: ConnectionRefusedError, OSError.
    """
    is_open = threading.Event()

    def look(held: socket.socket) -> None:
        select.select([held], [], [])  # the store sends no data to an idle client: readable means closed
        if not is_open.is_set():
            end_ranks(_holder_is_gone(), grace_s=_GONE_GRACE_S)

    with socket.create_connection((address, port), timeout=limit_s) as held:
        looking = threading.Thread(target=look, args=(held,), name="store", daemon=True)
        looking.start()
        try:
            yield
        finally:
            is_open.set()
            with contextlib.suppress(OSError):  # it was closed already
                held.shutdown(socket.SHUT_RDWR)
            looking.join()


def _holder_is_gone() -> str:
    return f"{_name(0)}, which holds the store of the job, is down"


def open_watch(
    address: str, port: int, *, node_rank: int, num_nodes: int, silence_s: float, is_fixed: bool = True
) -> Watch:
    """Create the watch of this node, which also reports when torchrun is stopped by a signal."""
    watch = Watch(
        lambda: WatchStore(address, port),
        node_rank=node_rank,
        num_nodes=num_nodes,
        names=_read_names(),
        silence_s=silence_s,
        is_fixed=is_fixed,
        on_end=end_ranks,
    )
    if is_fixed:
        atexit.register(watch.tell_end, f"{watch.name(node_rank)} was stopped")
    else:
        atexit.register(watch.leave)
    return watch


def _read_names() -> list[str]:
    """Return the names of the nodes by node rank; empty if unknown."""
    try:
        names = json.loads(os.environ.get(JOB_NODES_VARIABLE, "[]"))
    except ValueError:
        return []
    return [printable(str(name))[:_MOST_NAME] for name in names] if isinstance(names, list) else []


def _name(node_rank: int) -> str:
    names = _read_names()
    return f"node {names[node_rank] if node_rank < len(names) else node_rank}"


def make_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that creates the handler; torchrun calls this entry point."""
    return FixedRendezvous
