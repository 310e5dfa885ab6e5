"""Comparison of collectives across ranks before they start (``%distributed config check=on``).

Before each collective, a rank sends a checksum of its call to all others, over a separate gloo group. Torch's own
comparison (its detail mode) lets DistributedDataParallel crash the process on gloo, and compares neither the reduction
nor the root.
"""

from __future__ import annotations

import datetime
import functools
import inspect
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

_C10D: Any = dist.distributed_c10d
_COMPARED = (
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast",
    "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
)  # fmt: skip
_SIZES_MAY_DIFFER = ("all_to_all", "all_to_all_single", "reduce_scatter")
COMPARED = "/compare"  # suffix of a group's name, for its comparisons


class Checking:
    """The comparison of one rank's collectives; off at first."""

    def __init__(self, *, timeout: datetime.timedelta) -> None:
        self.is_on = False
        self._timeout = timeout
        self._of_torch = {name: getattr(dist, name) for name in _COMPARED}
        self._beside: dict[Any, Any] = {}  # by group: the gloo group that compares
        self._last: dict[Any, dict[str, Any]] = {}  # by group: its last comparison
        self.begun = 0  # comparisons that were started, in all groups

    def switch(self, is_on: bool) -> None:
        """Turn comparing on or off for groups made from now on; call while no group exists."""
        self._beside.clear()
        self._last.clear()
        if is_on == self.is_on:
            return
        self.is_on = is_on
        for name, function in self._of_torch.items():
            for module in (dist, _C10D):
                setattr(module, name, self._compared(function) if is_on else function)

    def add(self, group: Any, store: Any) -> None:
        """Compare the collectives of ``group`` from now on, if comparing is on.

        Collective: every member of the group calls this, with the group's store.
        """
        if not self.is_on or not isinstance(group, dist.ProcessGroup):
            return
        own = dist.PrefixStore("detrain_nb/compare", store)
        rank, size = group.rank(), group.size()
        self._beside[group] = _C10D.ProcessGroupGloo(own, rank, size, timeout=self._timeout)

    def recorded(self) -> list[dict[str, Any]]:
        """Return the last comparison of each group, in the form of torch's recorder. May be called from any thread."""
        return list(self._last.copy().values())

    def _compared(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name, signature = function.__name__, inspect.signature(function)

        @functools.wraps(function)
        def compare(*args: Any, **options: Any) -> Any:
            try:
                given = signature.bind(*args, **options)
                given.apply_defaults()
                group = given.arguments.get("group") or dist.group.WORLD
                own = _describe(name, given.arguments, group) if group in self._beside else ""
            except (TypeError, ValueError, RuntimeError):  # torch itself reports what is wrong with the call
                own = ""
            if own:
                self._compare(group, name, own)
            return function(*args, **options)

        # so that the stack of a waiting rank shows the name of the collective
        compare.__code__ = compare.__code__.replace(co_name=name)  # type: ignore[attr-defined]
        return compare

    def _compare(self, group: Any, name: str, own: str) -> None:
        compared = own.partition(" [")[0] if own.startswith(_SIZES_MAY_DIFFER) else own
        checksum = torch.tensor([zlib.crc32(compared.encode())], device="cpu")
        everyones = [torch.empty_like(checksum) for _ in range(group.size())]
        entry = self._begin(group, name)
        try:
            self._beside[group].allgather([everyones], [checksum]).wait()
        finally:
            entry["retired"] = True
        if any(each != checksum for each in everyones):
            raise RuntimeError(f"ranks called different collectives; this rank called {own}; nothing was sent")

    def _begin(self, group: Any, name: str) -> dict[str, Any]:
        """Record the call that this rank is about to start: while it waits for checksums, it waits for the others."""
        self.begun += 1
        before = self._last.get(group)
        self._last[group] = {
            "profiling_name": name,
            "collective_seq_id": before["collective_seq_id"] + 1 if before else 1,
            "process_group": [group.group_name, group.group_desc],
            "recorder": COMPARED,
            "input_dtypes": [],
            "input_sizes": [],
            "is_p2p": False,
            "retired": False,
            "time_created_ns": time.time_ns(),
        }
        return self._last[group]


def _describe(name: str, given: Mapping[str, Any], group: Any) -> str:
    """Describe a collective call: ``reduce (MAX, root 0) of Float [3, 2]``."""
    parts = []
    if given.get("op") is not None:
        parts.append(getattr(given["op"], "op", given["op"]).name)
    for root, of_group in (("src", "group_src"), ("dst", "group_dst")):
        if root in given:
            is_of_group = given[of_group] is not None
            number = dist.get_global_rank(group, given[of_group]) if is_of_group else given[root] or 0
            parts.append(f"root {number}")
    how = f" ({', '.join(parts)})" if parts else ""
    tensor = next((each for value in given.values() for each in _tensors(value)), None)
    if tensor is None:
        return f"{name}{how}"
    kind = tensor.type().rpartition(".")[2].removesuffix("Tensor")
    return f"{name}{how} of {kind} {list(tensor.shape)}"


def _tensors(value: object) -> Iterator[torch.Tensor]:
    for each in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(each, torch.Tensor):
            yield each
