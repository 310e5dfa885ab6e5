"""The variables that every rank begins with: what is said of those that a cell has overwritten."""

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

OF_ONE_RANK = {"rank", "local_rank", "device"}  # another rank's are others


def check_overwritten(names: Iterable[str]) -> None:
    """Raises: WireError for what no rank begins with, or a name that comes twice."""
    left = set(_SET_BACK)
    for name in names:
        if name not in left:
            raise WireError("a rank names what it has not begun with, or names it twice")
        left.remove(name)


def describe_overwritten(names: Mapping[int, Iterable[str]], *, by: str = "this cell") -> str:
    """A line for each variable, with the ranks that have overwritten it; ``names`` by rank. Empty where none has."""
    by_name = {name: [rank for rank, overwritten in names.items() if name in overwritten] for name in _SET_BACK}
    return "\n".join(
        f"{by} has overwritten {name} on {format_ranks(ranks)}, which the session had set: later cells may count "
        f"on it; {_SET_BACK[name]}  sets it back"
        for name, ranks in by_name.items()
        if ranks
    )
