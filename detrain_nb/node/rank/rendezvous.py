"""A rendezvous whose store listens on one address only.

torchrun's own handlers let the store listen on every interface, where anyone may read and overwrite its keys. This one
hands the store a socket that is already bound, by the agent where one started us; the system picks the port. torchrun
finds it as the rendezvous backend "detrain-bound", through the entry point group ``torchrun.handlers``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous, create_rdzv_handler

from ...launch import RENDEZVOUS_BACKEND, STORE_FD_VARIABLE


class BoundRendezvous(StaticTCPRendezvous):
    """Static rendezvous; node rank 0 listens on the endpoint's address."""

    def get_backend(self) -> str:
        return RENDEZVOUS_BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        node_rank = int(self.rank)
        if not self._store:
            self._store = self._listen() if node_rank == 0 else self._connect()
        return RendezvousInfo(
            PrefixStore(self.run_id, self._store),
            node_rank,
            self.world_size,
            RendezvousStoreInfo(self.master_addr, self.master_port),
        )

    def _listen(self) -> TCPStore:
        handed = os.environ.pop(STORE_FD_VARIABLE, "")
        if handed:
            listener = socket.socket(fileno=int(handed))
        else:
            listener = socket.create_server((self.master_addr, self.master_port), backlog=128)
        self.master_port = listener.getsockname()[1]
        return TCPStore(
            host_name=self.master_addr,
            port=self.master_port,
            world_size=None,
            is_master=True,
            timeout=self.timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def _connect(self) -> TCPStore:
        return TCPStore(self.master_addr, self.master_port, self.world_size, is_master=False, timeout=self.timeout)


def create_bound_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler that torchrun's registry asks for."""
    static = create_rdzv_handler(params)
    assert isinstance(static, StaticTCPRendezvous)
    timeout_s = int(static.timeout.total_seconds())
    return BoundRendezvous(
        static.master_addr, static.master_port, int(static.rank), static.world_size, static.run_id, timeout_s
    )


def make_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point: torchrun calls it to get the creator."""
    return create_bound_handler
