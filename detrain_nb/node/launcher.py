"""torchrun as a library: its own parser reads the command line, its engine does rendezvous, ranks and environment,
but the workers start by fork from this process, which has imported torch and IPython once for all of them.

Nothing here may start a thread or touch CUDA before the fork.
"""

from __future__ import annotations

import gc
import sys

OLDEST_TORCH = (2, 9, 1)


def main(argv: list[str]) -> None:
    """Run the ranks of this node until all workers have returned."""
    warm_up()
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, get_args_parser

    from ..launch import RENDEZVOUS_BACKEND
    from . import worker
    from .rendezvous import create_bound_handler

    rendezvous_handler_registry.register(RENDEZVOUS_BACKEND, create_bound_handler)
    config, _, _ = config_from_args(get_args_parser().parse_args(argv))
    gc.freeze()  # the collector of a forked process leaves these pages shared
    try:
        elastic_launch(config, worker.main)()
    except ChildFailedError as exc:
        sys.exit(str(exc))


def warm_up() -> None:
    """Import what every interpreter needs; leave with one clear line when torch is missing or too old."""
    try:
        import torch
    except ImportError as exc:
        sys.exit(f"torch is missing in {sys.executable} ({exc}): install it there with pip install torch")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:3] if part.isdigit())
    if version < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        sys.exit(f"torch {torch.__version__} in {sys.executable} is too old: torch>={oldest} is needed")
    try:
        import torch.distributed.run

        from . import interpreter  # noqa: F401  imports IPython and what a rank uses
    except ImportError as exc:
        sys.exit(f"{sys.executable} cannot run a rank ({exc}): install detrain_nb there with pip")


if __name__ == "__main__":
    main(sys.argv[1:])
