"""torch's store, listening on one address only.

torchrun's own handlers let it listen on every interface, where anyone can read and overwrite its keys.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore

from ...launch import STORE_FD_VARIABLE


def listen(address: str, port: int, *, timeout: timedelta, is_handed: bool = True) -> TCPStore:
    """Serve a store on the bound socket that this process has inherited, else at ``address``; port 0 picks a free one.

    ``is_handed``: whether to use an inherited socket. Raises: OSError when the address cannot be bound.
    """
    handed = os.environ.pop(STORE_FD_VARIABLE, "") if is_handed else ""
    if handed:
        listener = socket.socket(fileno=int(handed))
    else:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=128)
    return TCPStore(
        host_name=address,
        port=listener.getsockname()[1],
        world_size=None,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect(address: str, port: int, *, timeout: timedelta) -> TCPStore:
    """Connect to a store, waiting for it to start."""
    return TCPStore(address, port, None, is_master=False, timeout=timeout)
