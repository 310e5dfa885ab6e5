"""Recomputed activations and compiled blocks: the numbers are right, and recomputing and compiling do happen."""

from __future__ import annotations

import random
import shutil
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from detrain_nb import Session
from detrain_nb.parallel.data_parallel import Sharding

from .test_parallelize import CLOSE

AXES = [
    {"dp_shard": 2},
    pytest.param({"dp_replicate": 2}, marks=pytest.mark.thorough),
    pytest.param({"tp": 2}, marks=pytest.mark.thorough),
    pytest.param({"pp": 2}, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def session(two_ranks: Session) -> Session:
    two_ranks.run_cell("import recomputing_ranks", timeout_s=60)
    return two_ranks


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_what_is_computed_again_is_not_kept(session: Session, axes: dict[str, int]) -> None:
    """Four blocks have four matrix products each; with "pp" there are two microbatches of two blocks.

    "full" recomputes all but the last product of a block, whose output is not needed. "selective" recomputes everything
    but the products. Of the bytes kept, "full" frees two thirds and "selective" a fifth.
    """
    none, selective, full = (
        session.run_cell(f"recomputing_ranks.step({axes}, {activations!r})", timeout_s=30).values
        for activations in ("none", "selective", "full")
    )
    for rank in range(2):
        assert [found[rank]["products"] for found in (none, selective, full)] == [16, 16, 28]
        assert [found[rank]["gelu"] for found in (none, selective, full)] == [4, 8, 8]
    last = max(none, key=lambda rank: none[rank]["bytes"])  # with pp only this rank computes the loss
    kept = [found[last]["bytes"] for found in (none, selective, full)]
    assert kept[0] > 1.1 * kept[1] and kept[1] > 2 * kept[2] > 0


@pytest.mark.parametrize(
    "axes",
    [{"pp": 2}, *(pytest.param({axis: 2}, marks=pytest.mark.slow) for axis in ("tp", "dp_shard", "dp_replicate"))],
    ids=str,
)
def test_what_a_forward_writes_is_written_once(session: Session, axes: dict[str, int]) -> None:
    """All ranks have the same batch, so the mean over replicas is the same too."""
    for activations in ("selective", "full"):
        found = session.run_cell(f"recomputing_ranks.write({axes}, {activations!r})", timeout_s=30).values
        assert all(apart < 1e-5 for apart in found.values()), (activations, found)


class Recording(nn.Module):
    """Keeps something of each run; ``way``: how."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.linear, self.average = nn.Linear(4, 4), nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("table", torch.zeros(4, 4))
        self.calls = 0
        self.kept: dict[str, int] = {}
        self.recent = deque[float]([0.0], maxlen=2)
        self.counts, self.is_inside = Counter[str](), False
        self.own, self.of_torch = random.Random(1), torch.Generator().manual_seed(1)
        self.log = SimpleNamespace(times=[0], array=np.ones(2))
        self.row = self.table[0] if way == "common memory" else None
        self.norms = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "parameter":
            with torch.no_grad():
                self.average.lerp_(x.mean(0), 0.5)
        elif self.way == "new attribute":
            self.last = getattr(self, "last", 0) + 1
            x = x * self.last
        elif self.way == "dict":
            self.kept["calls"] = self.kept.get("calls", 0) + 1
            x = x * self.kept["calls"]
        elif self.way == "deque":
            self.recent.append(1 + self.recent[-1])
            x = x * self.recent[-1]
        elif self.way == "data":
            self.table.data.add_(1)
            x = x * self.table.sum().detach()
        elif self.way == "later":
            self.calls += 1
            if self.calls > 1:
                self.table += 1
        elif self.way == "counter":
            self.counts["calls"] += 1
            x = x * self.counts["calls"]
        elif self.way == "flag":  # reset at the end, which a recomputation does not reach
            self.is_inside = True
            x = self.linear(x).tanh()
            self.is_inside = False
            return x
        elif self.way == "generators":
            x = x * (self.own.random() + random.random() + float(np.random.rand()))
            x = x * torch.rand((), generator=self.of_torch)
        elif self.way == "objects":
            self.log.times.append(len(self.log.times))
            self.log.array += 1
            x = x * len(self.log.times) * float(self.log.array[0])
        elif self.way == "common memory":
            assert self.row is not None
            self.row.add_(1)
            x = x * self.table[0].sum().detach()
        elif self.way == "gradients":
            self.state = x + 0.5 * getattr(self, "state", torch.zeros(4))
            x = self.linear(self.state).tanh()
            self.state = self.state + self.linear(x)
            return self.linear(self.state).tanh()
        elif self.way == "norms":
            self.calls += 1
            x = self.norms[self.calls - 1](x + self.linear(x))
        elif self.way == "views":
            self.table[self.calls] = x.detach().mean(0)
            x = x + self.table[: self.calls + 1].sum(0)
            self.calls += 1
        result: Tensor = self.linear(x).tanh()
        return result


def run_twice(way: str, *, activations: str) -> dict[str, Any]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    blocks = [Recording(way), Recording(way)]
    model = nn.Sequential(nn.Sequential(*blocks))
    called = Sharding("none", activations=activations).apply(model, is_last=True)
    outputs = [called(torch.full((2, 4), 0.1 * number)) for number in (1, 2)]
    between = random.random(), float(np.random.rand())  # draws that a backward pass must not undo
    torch.stack(outputs).sum().backward()  # the second graph may start in the first one
    drawn = between, random.random(), float(np.random.rand()), [part.own.random() for part in blocks]
    lasts = [getattr(part, "last", 0) for part in blocks]
    kept = [(part.calls, part.kept, [*part.recent], part.counts, part.is_inside, part.log.times) for part in blocks]
    gradients = [parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None]
    state = [each.tolist() for each in model.state_dict().values()]
    return {"state": state, "kept": [kept, lasts, drawn], "gradients": gradients}


_WAYS = (
    *("new attribute", "dict", "deque", "data", "views", "counter", "flag", "generators", "objects", "common memory"),
    *("gradients", "norms"),
)


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("activations", ["selective", "full"])
def test_second_run_begins_as_the_first_and_leaves_nothing(way: str, activations: str) -> None:
    """With two microbatches, the second forward runs before the first one is recomputed."""
    assert run_twice(way, activations=activations) == run_twice(way, activations="none")


@pytest.mark.parametrize(
    "way, message",
    [
        (
            "parameter",
            "0.0: the parameter average is written by each forward; the block runs twice as activations are",
        ),
        ("later", "0.0: table is written by this forward, but was not by the first one; the block runs twice"),
    ],
)
def test_what_a_second_run_writes_again_is_told(way: str, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        run_twice(way, activations="full")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(
    "axes", [{"dp_shard": 2}, pytest.param({"tp": 2}, marks=pytest.mark.thorough), {"pp": 2}], ids=str
)
def test_blocks_are_compiled_on_every_rank(session: Session, axes: dict[str, int]) -> None:
    """All blocks share their code, and so one graph with gradients and one without.

    The numbers are those of the whole model.
    """
    for apart, frames, graphs in session.run_cell(
        f"recomputing_ranks.compile_blocks({axes}, compile=True)", timeout_s=100
    ).values.values():
        assert frames >= 2 and graphs >= 2
        assert all(apart[name] < limit for name, limit in CLOSE.items()), apart


def test_nothing_is_compiled_where_nobody_asks_for_it(session: Session) -> None:
    for _, frames, graphs in session.run_cell(
        "recomputing_ranks.compile_blocks({'pp': 2}, compile=False)", timeout_s=60
    ).values.values():
        assert (frames, graphs) == (0, 0)
