"""The rendezvous of a job whose nodes may join and leave: torchrun's --rdzv-backend detrain-elastic.

torch's own dynamic rendezvous keeps its state in a store and unpickles what it finds there: anyone who can reach the
store could run code on every node. Here each state is sealed with the job's key (seal.py) and only unpickled if the
seal is valid. Node 0 holds the store; every round of ranks gets its own store, bound to one address of the node with
rank 0. Node 0 also starts a new round when a node of the round is silent, as the other ranks would wait for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, Store, TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ...launch import ELASTIC_BACKEND, JOB_KEY_VARIABLE, NOT_SHARED_VARIABLE
from ..system.bound_store import listen
from .rendezvous import open_store, open_watch, tell_others
from .seal import MOST_BYTES, Seal, SealBroken
from .watch import write_reason

_BEAT_S = 5
_LAST_CALL_S = 10
_RANKS_STORE_KEY = "detrain_nb.ranks_store"


class SealedBackend(RendezvousBackend):
    """torch's own backend over ``store``, with every state sealed."""

    def __init__(self, store: Store, run_id: str, key: bytes) -> None:
        self._backend = C10dRendezvousBackend(store, run_id)
        self._seal = Seal(key, f"state of {run_id}")

    @property
    def name(self) -> str:
        return ELASTIC_BACKEND

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._backend.get_state()
        if found is None:
            self._refuse_none()
            return None
        return self._open(found[0]), found[1]

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        if len(state) > MOST_BYTES // 2:
            raise RendezvousStateError(f"the rendezvous state has {len(state)} bytes; the limit is {MOST_BYTES // 2}")
        found = self._backend.set_state(self._seal.close(state), token)
        if found is None:
            self._refuse_none()
            return None
        return self._open(found[0]), found[1], found[2]

    def _open(self, sealed: bytes) -> bytes:
        try:
            return self._seal.open(sealed)
        except SealBroken as exc:
            raise _refused(str(exc)) from exc

    def _refuse_none(self) -> None:
        if self._seal.has_read:
            raise _refused("it was removed from the store")


class RanksMeeting:
    """Address of the store for the ranks of one round, exchanged through ``store`` and sealed for this round.

    An address of an earlier round is rejected, as other users may listen there by now.
    """

    def __init__(self, store: Store, key: bytes, run_id: str, number: int) -> None:
        self._store, self._seal = store, Seal(key, f"store of round {number} of {run_id}")

    def tell(self, address: str, port: int) -> None:
        """Publish the address and port."""
        self._store.set(_RANKS_STORE_KEY, self._seal.close(f"{port} {address}".encode()).hex())

    def find(self) -> tuple[str, int]:
        """Wait for the address and port. Raises: RendezvousStateError for an invalid seal or text."""
        try:
            port, address = self._seal.open(bytes.fromhex(self._store.get(_RANKS_STORE_KEY).decode())).decode().split()
            return address, int(port)
        except ValueError as exc:  # including SealBroken
            raise _refused(str(exc)) from exc


def _refused(why: str) -> RendezvousStateError:
    reason = f"the rendezvous state is invalid: {why}"
    write_reason(reason)
    return RendezvousStateError(reason)


class ElasticRendezvous(RendezvousHandler):
    """torch's dynamic rendezvous over a sealed backend; its stores listen on one address only."""

    def __init__(self, params: RendezvousParameters, key: bytes) -> None:
        self._node_rank = params.get_as_int("rank", 0) or 0
        self._join_s = join_s = float(params.get_as_int("join_timeout") or 120)
        self._silence_s = silence_s = float(params.get_as_int("silence") or 60)
        address, port = parse_rendezvous_endpoint(params.endpoint, default_port=0)
        self._address = params.local_addr or address
        self._key, self._run_id = key, params.run_id
        self._store = open_store(address, port, self._node_rank, join_s)
        self._ranks_store: TCPStore | None = None
        self._num_nodes = 0  # of this round
        self._missed: set[str] = set()  # silent nodes without which a round has begun
        beat_s = max(1, min(_BEAT_S, round(silence_s / 3)))
        last_call_s = max(1, min(_LAST_CALL_S, round(join_s / 4)))  # a node that joins later starts a new round
        params.config.setdefault("last_call_timeout", last_call_s)
        self._terms = (
            f"waiting for {params.max_nodes} nodes; starts with fewer {last_call_s} s after {params.min_nodes} joined"
        )
        self._is_range = params.min_nodes < params.max_nodes
        params.config.setdefault("keep_alive_interval", beat_s)
        params.config.setdefault("keep_alive_max_attempt", max(2, round(silence_s / beat_s)))
        self._dynamic = create_handler(self._store, SealedBackend(self._store, params.run_id, key), params)
        self._watch = open_watch(
            address,
            self._store.port,
            node_rank=self._node_rank,
            num_nodes=params.max_nodes,
            silence_s=silence_s,
            is_fixed=False,
        )
        self._watch.start()

    def get_backend(self) -> str:
        return ELASTIC_BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._is_range:
            _tell(self._terms)
        # torch would bind its own store for the ranks to all addresses, and restarted ranks would find the keys of
        # their predecessors in it
        users = os.environ.get(NOT_SHARED_VARIABLE)
        os.environ[NOT_SHARED_VARIABLE] = "1"
        try:
            info: RendezvousInfo = self._dynamic.next_rendezvous()
        except RendezvousTimeoutError as exc:
            if self._num_nodes:  # they had met before, and the ranks of the others had finished since
                raise RendezvousTimeoutError(f"the others did not join a new round within {self._join_s:g} s") from exc
            raise
        finally:
            del os.environ[NOT_SHARED_VARIABLE]
            if users is not None:
                os.environ[NOT_SHARED_VARIABLE] = users
        self._num_nodes = info.world_size
        self._ranks_store = None
        meeting = RanksMeeting(info.store, self._key, self._run_id, self._dynamic._state_holder.state.round)
        try:
            if info.rank == 0:
                self._ranks_store = listen(self._address, 0, timeout=timedelta(minutes=5), is_handed=False)
                meeting.tell(self._address, self._ranks_store.port)
            where = RendezvousStoreInfo(*meeting.find())
        except DistError as exc:
            raise RendezvousConnectionError(f"lost the connection to the store of the job: {exc}") from exc
        return RendezvousInfo(info.store, info.rank, info.world_size, where)

    def is_closed(self) -> bool:
        return bool(self._dynamic.is_closed())

    def set_closed(self) -> None:
        self._dynamic.set_closed()

    def num_nodes_waiting(self) -> int:
        """Count the nodes that wait to join, or else those that are lost: torchrun starts a new round for either."""
        waiting = int(self._dynamic.num_nodes_waiting())
        silent = set(self._watch.silent())  # torch also drops nodes whose beats it missed while this node slept
        self._missed &= silent
        if waiting or len(self._dynamic._state_holder.state.participants) == self._num_nodes:
            return waiting
        lost, self._missed = silent - self._missed, silent
        for name in sorted(lost):
            _tell(f"{name} sent no heartbeat for {self._silence_s:g} s: the ranks restart without it")
        return len(lost)

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        error = sys.exc_info()[1]
        was_left_out = isinstance(error, RendezvousTimeoutError) and self._num_nodes > 0
        if error is not None and not was_left_out and not isinstance(error, ChildFailedError):
            return False  # the others may continue without this node
        is_closed = bool(self._dynamic.shutdown())  # first, as it makes nodes that wait to join exit
        tell_others(self._watch, self._node_rank, error)
        return is_closed


def _tell(said: str) -> None:
    print(f"detrain_nb: {said}", file=sys.stderr, flush=True)


def create_elastic_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler for torchrun's registry; the key is removed from the environment, which ranks inherit."""
    try:
        key = bytes.fromhex(os.environ.pop(JOB_KEY_VARIABLE, ""))
        return ElasticRendezvous(params, key)
    except ValueError as exc:
        raise RendezvousError(f"{JOB_KEY_VARIABLE} is not a valid key: {exc}") from exc


def make_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that creates the handler; torchrun calls this entry point."""
    return create_elastic_handler
