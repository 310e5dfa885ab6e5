"""torchrun as a library: its own parser reads the command line, its engine does rendezvous, ranks and environment,
but the workers start by fork from this process, which has imported torch and IPython once for all of them.

Nothing here may start a thread or touch CUDA before the fork.
"""

from __future__ import annotations

import gc
import sys

from .preload import preload


def main(argv: list[str]) -> None:
    """Run the ranks of this node until all workers have returned."""
    gc.disable()  # imports make no garbage: the collector would look at all they have made again and again
    preload()
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, get_args_parser

    from ..launch import RENDEZVOUS_BACKEND
    from . import worker
    from .rendezvous import create_bound_handler

    rendezvous_handler_registry.register(RENDEZVOUS_BACKEND, create_bound_handler)
    config, _, _ = config_from_args(get_args_parser().parse_args(argv))
    gc.enable()
    gc.freeze()  # the collector of a forked process leaves these pages shared
    try:
        elastic_launch(config, worker.main)()
    except ChildFailedError as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    main(sys.argv[1:])
