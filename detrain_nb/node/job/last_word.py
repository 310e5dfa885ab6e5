"""Reports to the other nodes of a job why this one failed, when torchrun cannot, as it was killed or never started.

The runner starts it as a separate program: the report goes through torch's store, and the runner does not import torch.
"""

from __future__ import annotations

import sys

from .watch import say_end


def main() -> None:
    """Report a reason; the arguments are the store's address and port, then the reason."""
    from .watch_store import WatchStore  # torch

    address, port, reason = sys.argv[1:]
    say_end(WatchStore(address, int(port)), reason)


if __name__ == "__main__":
    main()
