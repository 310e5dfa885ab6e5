"""DeTrain's own pipeline, as its users run it: a master, two workers, its training loop; the time of each step.

    torchrun --standalone --nproc-per-node=3 parallel_peers.py SIZES WIDTH MICROBATCHES FOLDER

A worker's shard is a module that the user writes; its input is a reference to a tensor. Only the data set is ours: it
records the time whenever the loop requests a batch. DeTrain is not modified.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from parallel_measures import DETRAIN, read_sizes
from parallel_models import first_shard, second_shard
from parallel_ranks import run_rank
from parallel_turns import draw, draw_tokens
from report import Samples
from torch import Tensor, nn
from torch.distributed.rpc import RRef

_WARM_UP = 4  # steps
_ARGUMENTS = sys.argv[1:]


class _Shard(nn.Module):
    """A shard as DeTrain requires it: its forward takes references, and it returns references to its parameters."""

    def __init__(self, device: str, layers: nn.Module) -> None:
        super().__init__()
        self._device, self._lock = device, threading.Lock()
        self._layers = layers.to(device)

    def forward(self, reference: RRef[Tensor]) -> Tensor:
        x = reference.to_here().to(self._device)
        with self._lock:
            return self._layers(x).cpu()

    def parameter_rrefs(self) -> list[RRef[Tensor]]:
        return [RRef(parameter) for parameter in self.parameters()]


class _First(_Shard):
    def __init__(self, device: str) -> None:
        super().__init__(device, first_shard(int(_ARGUMENTS[1])))


class _Second(_Shard):
    def __init__(self, device: str) -> None:
        super().__init__(device, second_shard(int(_ARGUMENTS[1])))


class _Data:
    """One batch, repeated; ``asked_at`` is when the loop requested each batch, that is, when a step was complete."""

    def __init__(self, batch: tuple[Tensor, Tensor], count: int) -> None:
        self._batch, self._count = batch, count
        self.dataset = range(count * len(batch[0]))  # the loop reads the number of samples
        self.asked_at: list[float] = []

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self._count):
            self.asked_at.append(time.perf_counter())
            yield self._batch
        self.asked_at.append(time.perf_counter())


def _measure(samples: Samples) -> None:
    from detrain.ppl.worker import run_worker

    sizes, width, count = read_sizes(_ARGUMENTS[0]), int(_ARGUMENTS[1]), int(_ARGUMENTS[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch = draw(sizes.mlp_rows, 784, seed=1), draw_tokens(sizes.mlp_rows, most=10, seed=2)
    data, evaluated = _Data(batch, sizes.mlp_steps + _WARM_UP), _Data(batch, 1)
    layout = (sizes.mlp_rows // count, ["worker1", "worker2"], ["cpu", "cpu"], [_First, _Second])
    loss, epochs, rate = nn.CrossEntropyLoss(), 1, 0.01
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sys.argv[1:] = []  # it reads the command line, too
    with contextlib.redirect_stdout(sys.stderr):
        run_worker(rank, world_size, layout, data, evaluated, loss, torch.optim.SGD, epochs, len(batch[0]), rate)
    ends = data.asked_at[_WARM_UP:]
    samples.add(DETRAIN, f"mlp_{width}_{count}_same", *(1 / (end - begin) for begin, end in itertools.pairwise(ends)))


if __name__ == "__main__":
    run_rank(_measure, Path(_ARGUMENTS[3]))
