"""Says to the other nodes of a job why this one has failed, where torchrun could not: it was killed, or never began.

The runner starts it: what it is said through is torch's store, and the runner has no torch.
"""

from __future__ import annotations

import sys

from .watch import say_end


def main() -> None:
    """Say what the last argument is, in the store whose address and port are before it."""
    from .watch_store import WatchStore  # torch

    address, port, reason = sys.argv[1:]
    say_end(WatchStore(address, int(port)), reason)


if __name__ == "__main__":
    main()
