"""The two flight recorders of a rank: gloo's and NCCL's sequence numbers of one group are kept apart."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d

from detrain_nb.node.cell.recorder import look_inside, read_collectives
from detrain_nb.node.groups.process_groups import count_operations


def _entry(number: int, *, is_pending: bool = False) -> dict[str, Any]:
    return {
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "time_created_ns": time.time_ns(),
        "is_p2p": False,
        "retired": not is_pending,
        "profiling_name": "c10d:all_reduce",
        "input_dtypes": ["Float"],
        "input_sizes": [[1]],
    }


def test_group_on_gloo_and_nccl_has_two_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU rank: the number of a hanging NCCL collective is below the one that gloo has reached."""
    entries = {"_dump_fr_trace_json": [_entry(9)], "_dump_nccl_trace_json": [_entry(3, is_pending=True)]}
    for name, dumped in entries.items():
        text = json.dumps({"entries": dumped})
        monkeypatch.setattr(_distributed_c10d, name, lambda *_, text=text: text, raising=False)
    found = [entry[:3] + entry[5:6] for entry in read_collectives(since_ns=0)]
    assert found == [["all_reduce", 9, "0", False], ["all_reduce", 3, "0/nccl", True]]


def test_group_of_one_backend_is_counted_once() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.barrier()
        (group,) = dist.distributed_c10d._world.pg_map
        assert count_operations(group) == {"": 1}, "for CPU and CUDA tensors it is the same"
        known = look_inside(since_ns=0, before_cell={})
        assert set(known["steps"]) == {"0"} and known["operations"] == 2
    finally:
        dist.destroy_process_group()
