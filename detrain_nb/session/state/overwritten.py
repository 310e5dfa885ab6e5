"""Notices about the variables that every rank begins with, when a cell has overwritten them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...errors import WireError, format_ranks

_SET_BACK = {
    "rank": 'import os; rank = int(os.environ["RANK"])',
    "local_rank": 'import os; local_rank = int(os.environ["LOCAL_RANK"])',
    "world_size": 'import os; world_size = int(os.environ["WORLD_SIZE"])',
    "device": 'device = get_ipython().user_ns_hidden["device"]',
    "dist": "import torch.distributed as dist",
    "torch": "import torch",
}

OF_ONE_RANK = {"rank", "local_rank", "device"}  # each rank has its own value


def check_overwritten(names: Iterable[str]) -> None:
    """Check that each name is a variable that ranks begin with, and listed once. Raises: WireError."""
    left = set(_SET_BACK)
    for name in names:
        if name not in left:
            raise WireError("a rank reports an overwritten variable that it did not begin with, or reports it twice")
        left.remove(name)


def describe_overwritten(names: Mapping[int, Iterable[str]], *, by: str = "this cell") -> str:
    """Return a line for each overwritten variable, with its ranks; ``names`` by rank. Empty when there are none."""
    by_name = {name: [rank for rank, overwritten in names.items() if name in overwritten] for name in _SET_BACK}
    return "\n".join(
        f"{by} has overwritten {name} on {format_ranks(ranks)}, which the session had set: later cells may depend "
        f"on it; {_SET_BACK[name]}  restores it"
        for name, ranks in by_name.items()
        if ranks
    )
