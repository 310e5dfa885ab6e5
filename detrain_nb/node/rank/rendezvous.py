"""A rendezvous whose store listens on one address only.

torchrun's own handlers let the store listen on every interface, where anyone can read and overwrite its keys. This one
gives the store a socket that is already bound (by the agent, if an agent started this process) to a port chosen by the
system. torchrun finds it as rendezvous backend "detrain-bound", through the entry point group ``torchrun.handlers``.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous, create_rdzv_handler

from ...launch import RENDEZVOUS_BACKEND
from ..system.bound_store import connect, listen


class BoundRendezvous(StaticTCPRendezvous):
    """A static rendezvous whose node rank 0 listens on the endpoint's address only."""

    def get_backend(self) -> str:
        return RENDEZVOUS_BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        node_rank = int(self.rank)
        if not self._store:
            if node_rank == 0:
                self._store = listen(self.master_addr, self.master_port, timeout=self.timeout)
                self.master_port = self._store.port
            else:
                self._store = connect(self.master_addr, self.master_port, timeout=self.timeout)
        return RendezvousInfo(
            PrefixStore(self.run_id, self._store),
            node_rank,
            self.world_size,
            RendezvousStoreInfo(self.master_addr, self.master_port),
        )


def create_bound_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler for torchrun's registry."""
    static = create_rdzv_handler(params)
    assert isinstance(static, StaticTCPRendezvous)
    timeout_s = int(static.timeout.total_seconds())
    return BoundRendezvous(
        static.master_addr, static.master_port, int(static.rank), static.world_size, static.run_id, timeout_s
    )


def make_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that makes the handler: the entry point that torchrun calls."""
    return create_bound_handler
