"""The process groups of a rank. All groups of one generation are made, and end, together.

The default group is made on the engine's own store, under a prefix with the generation's number, so that a new one
never meets what an old one left there. ``init_process_group`` in a cell replaces the default group instead of failing.
"""

from __future__ import annotations

import datetime
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from ..errors import SessionError

_GROUP_TIMEOUT = datetime.timedelta(minutes=30)
_STORE_TIMEOUT = datetime.timedelta(minutes=5)


class Generation:
    """The default process group of this rank, and the generation it belongs to."""

    def __init__(self, *, rank: int, world_size: int, backend: str, device: torch.device) -> None:
        self.number = 0
        self._rank = rank
        self._world_size = world_size
        self._backend = backend
        self._device = device
        self._store: dist.TCPStore | None = None
        self._groups_made = 0
        self._torch_init = dist.init_process_group

    @property
    def has_group(self) -> bool:
        return dist.is_initialized()

    def start(self, number: int) -> None:
        """End what there is and make the default group of generation ``number``.

        Collective: every rank starts the same number.
        """
        self.end()
        self.number = number
        self._groups_made = 0
        self._make_group(self._backend)

    def end(self) -> None:
        """Destroy the groups of this generation, where there are any."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def take_over_torch(self) -> None:
        """Let code written for torchrun run in a cell: init_process_group replaces the group, mp.spawn is refused."""
        modules: tuple[Any, ...] = (dist, dist.distributed_c10d)
        for module in modules:
            module.init_process_group = self._replace_group
        torch.multiprocessing.spawn = _refuse_spawn

    def _replace_group(self, backend: str | None = None, init_method: str | None = None, **options: Any) -> None:
        """Make the default group anew, as torch's ``init_process_group`` would be asked to.

        Collective. The session knows rank, world size and the store's address; what the call says of them is ignored
        with a note on rank 0.
        """
        given = {"init_method": init_method, **{name: options.pop(name, None) for name in _KNOWN_BY_THE_SESSION}}
        ignored = [name for name, value in given.items() if value not in (None, -1)]
        if ignored and self._rank == 0:
            names = ", ".join(ignored)
            warnings.warn(f"init_process_group: {names} ignored, the session has set them", stacklevel=2)
        self.end()
        self._make_group(backend or self._backend, **options)

    def _make_group(self, backend: str, **options: Any) -> None:
        if self._store is None:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self._store = dist.TCPStore(address, port, None, is_master=False, timeout=_STORE_TIMEOUT)
        self._groups_made += 1
        prefix = f"detrain_nb/generation{self.number}/group{self._groups_made}"
        if self._device.type == "cuda":
            options.setdefault("device_id", self._device)  # eager: no first collective hangs in setting up
        options.setdefault("timeout", _GROUP_TIMEOUT)
        self._torch_init(
            backend,
            store=dist.PrefixStore(prefix, self._store),
            rank=self._rank,
            world_size=self._world_size,
            **options,
        )


_KNOWN_BY_THE_SESSION = ("world_size", "rank", "store")


def _refuse_spawn(*args: object, **kwargs: object) -> None:
    raise SessionError(
        "mp.spawn starts processes of its own, but this cell runs on every rank already: call the function itself, "
        "with rank and world_size"
    )
