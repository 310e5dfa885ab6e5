"""torchrun as a library, whose workers are forked from this process instead of started as new programs.

torchrun's own parser reads the command line, and its engine handles rendezvous, ranks and environment. This process has
imported torch and IPython once for all workers. When an agent starts it, it stays as the warm process (warm.py) and is
forked for each session. Nothing here may start a thread or use CUDA before the fork.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import multiprocessing
import os
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...launch import WARM_FD_VARIABLE
from .preload import preload

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig


def main(argv: list[str]) -> None:
    """Run the ranks of this node until all workers have returned; with an agent's socket, once for each order."""
    channel = os.environ.pop(WARM_FD_VARIABLE, "")
    gc.disable()  # imports make no garbage, yet the collector would scan their objects again and again
    preload()
    _import_engine()
    gc.enable()
    if channel:
        from .warm import WarmProcess

        WarmProcess(socket.socket(fileno=int(channel)), run).serve()
    else:
        gc.freeze()  # so that the collector of a forked process leaves these pages shared
        run(argv)


def run(argv: list[str]) -> None:
    """Run the launcher of one session."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from . import worker

    _require_shared_memory()
    users_umask = os.umask(0o077)  # the engine makes its own folders in the session's folder
    try:
        elastic_launch(read_config(argv), worker.main)(users_umask)
    except ChildFailedError as exc:
        sys.exit(str(exc))


def _require_shared_memory() -> None:
    """Check /dev/shm, where the engine makes semaphores: its own error does not name the folder."""
    try:
        multiprocessing.get_context("fork").Lock()
    except OSError as exc:
        if exc.errno in (errno.EMFILE, errno.ENFILE):
            raise
        sys.exit(
            f"/dev/shm cannot be used ({exc.strerror}): ranks need a writable tmpfs with free space there; run "
            "mount -t tmpfs -o mode=1777 tmpfs /dev/shm, or docker run --shm-size=8g"
        )


def read_config(argv: list[str]) -> LaunchConfig:
    """Parse torchrun's command line with its own parser, without calling CUDA."""
    from torch.distributed.run import config_from_args, get_args_parser

    args = get_args_parser().parse_args(argv)
    with _no_gpu_to_be_seen():
        config, _, _ = config_from_args(args)
    return config


@contextlib.contextmanager
def _no_gpu_to_be_seen() -> Iterator[None]:
    """Hide GPUs from torch in this block: it would query CUDA to choose CPUs, and no forked rank could use a GPU."""
    import torch

    known = torch.cuda.is_available, torch.cuda.device_count
    torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 0
    try:
        yield
    finally:
        torch.cuda.is_available, torch.cuda.device_count = known


def _import_engine() -> None:
    """Import everything that ``run`` needs, and register our rendezvous with torchrun."""
    import torch.distributed.launcher.api  # noqa: F401
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    from ...launch import RENDEZVOUS_BACKEND
    from . import worker  # noqa: F401
    from .rendezvous import create_bound_handler

    rendezvous_handler_registry.register(RENDEZVOUS_BACKEND, create_bound_handler)


if __name__ == "__main__":
    main(sys.argv[1:])
