"""Random small models, cut at random places: equal to the whole model, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from detrain_nb.errors import SpecError
from detrain_nb.parallel import profile, split

SIZE = 4


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(SIZE, 8), nn.Linear(8, SIZE), nn.LayerNorm(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        result: Tensor = self.linear(x).masked_fill(mask, 0.5)
        return result


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.constant: Tensor
        self.register_buffer("constant", torch.rand(SIZE, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) * self.constant + torch.arange(SIZE)
        return result


class GivesMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), ~mask


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x if x.sum() > 0 else 2 * x


# A chain consists of modules and of steps in the model's own code.
MODULES: dict[str, Any] = {
    "linear": lambda: nn.Linear(SIZE, SIZE),
    "frozen": lambda: nn.Linear(SIZE, SIZE).requires_grad_(False),
    "convolution": lambda: nn.Conv1d(SIZE, SIZE, 3, padding=1),
    "batch norm": lambda: nn.BatchNorm1d(SIZE),
    "layer norm": lambda: nn.LayerNorm(SIZE),
    "residual": Residual,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "linear, relu in place": lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(inplace=True)),
    "dropout": lambda: nn.Dropout(0.0),
    "masked": Masked,
    "constant": Constant,
    "gives a mask": GivesMask,
    "looks": Looks,
    "tied": lambda: nn.Linear(SIZE, SIZE),
    "skip": lambda: nn.Linear(SIZE, SIZE),
    "skip in place": lambda: nn.Sequential(nn.Tanh(), nn.Linear(SIZE, SIZE)),
    "skip, computed again": lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()),
}
CODE = [
    "first half",
    "same again",
    "add scale",
    "in place",
    "turn",
    "remember",
    "add remembered",
    "write a part",
    "read it",
    "look",
]
PLAIN = ["skip", "skip, computed again", "linear", "convolution", "layer norm", "residual", "masked", "constant"]


class Chain(nn.Module):
    """Runs the steps named by ``kinds`` in sequence."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.kinds = kinds
        self.blocks = nn.ModuleDict(
            {str(index): MODULES[kind]() for index, kind in enumerate(kinds) if kind in MODULES}
        )
        self.scale = nn.Parameter(torch.rand(SIZE) + 0.5)
        linears = [block for block in self.blocks.values() if type(block) is nn.Linear and block.weight.requires_grad]
        for index, kind in enumerate(kinds):
            if kind == "tied":
                self.blocks[str(index)].weight = linears[0].weight

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        remembered, part, last = x.new_zeros(()), x.new_zeros(len(x), SIZE, 2 * SIZE), None
        for index, kind in enumerate(self.kinds):
            if kind == "masked":
                x = self.blocks[str(index)](x, mask=mask)
            elif kind == "gives a mask":
                x, mask = self.blocks[str(index)](x, mask)
            elif kind == "skip":
                x = x + self.blocks[str(index)](x)
            elif kind == "skip in place":
                x += self.blocks[str(index)](x)
            elif kind == "skip, computed again":
                x = x + checkpoint(self.blocks[str(index)], x, use_reentrant=False)
            elif kind in MODULES:
                last = self.blocks[str(index)]
                x = last(x)
            elif kind == "same again" and last is not None:
                x = last(x)
            elif kind == "add scale":
                x = x + self.scale
            elif kind == "in place":
                x *= 1.5
            elif kind == "turn":
                x = x.transpose(1, 2)
            elif kind == "first half":
                x = torch.cat(x.chunk(2, -1), -1).split(SIZE, -1)[0]
            elif kind == "remember":
                remembered = x.clone()
            elif kind == "add remembered":
                x = x + remembered
            elif kind == "write a part":
                part[..., 1:5] = x
            elif kind == "read it":
                x = x + part[..., :SIZE]
            elif kind == "look" and x.sum() > 0.123:  # after a BatchNorm the sum is 0, except for rounding
                x = 0.5 * x
        return x


def make_inputs(rows: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    shape = (rows, SIZE, SIZE)
    return {
        "x": torch.randn(shape, generator=draw, dtype=torch.float64),
        "mask": torch.rand(shape, generator=draw) > 0.6,
    }


def assert_close(result: Tensor | None, expected: Tensor | None, name: str) -> None:
    """Compare in double precision: a boundary is made contiguous, which may change the order of sums."""
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12, msg=name)


def run(kinds: list[str], data: st.DataObject) -> None:
    torch.manual_seed(0)
    model, inputs = Chain(kinds).double(), make_inputs(3)
    whole, other = copy.deepcopy(model), make_inputs(2)
    try:
        expected = whole(**copy.deepcopy(other))
        expected.square().sum().backward()
    except RuntimeError:  # it writes in place where torch does not allow it
        reject()
    known = profile(model, inputs)
    cuts = data.draw(st.lists(st.sampled_from(known.cuts), unique=True) if known.cuts else st.just([]), label="cuts")
    cuts.sort(key=known.cuts.index)
    found = split(model, inputs, at=cuts, profile_of_model=known)
    result = found.stage(0)(**copy.deepcopy(other))
    for index in range(1, found.num_stages):
        result = found.stage(index)(result, **copy.deepcopy(other))  # each rank has its own copy of the inputs
    assert_close(result, expected, "output")
    result.square().sum().backward()
    for (name, parameter), (_, reference) in zip(model.named_parameters(), whole.named_parameters()):
        assert_close(parameter.grad, reference.grad, name)
    for (name, buffer), (_, reference) in zip(model.named_buffers(), whole.named_buffers()):
        assert_close(buffer, reference, name)
    others = [name for name, _ in model.named_modules() if name and name not in known.cuts]
    if others:
        with pytest.raises(SpecError, match=r"the model cannot be cut at '.*It can be cut at: "):
            split(model, inputs, at=[data.draw(st.sampled_from(others), label="no cut")], profile_of_model=known)
    with pytest.raises(SpecError, match=rf"the model can be cut into at most {len(known.units)} \(cuts: "):
        split(model, inputs, len(known.units) + 1, profile_of_model=known)


# A few kinds for each chain, so that those that belong together meet.
SOME = st.lists(
    st.sampled_from([*MODULES, *CODE, ("write a part", "read it"), ("remember", "add remembered")]), min_size=1
)
KINDS = SOME.map(
    lambda some: ["linear", *(kind for one in some[:4] for kind in ([one] if isinstance(one, str) else one))]
)
KINDS = KINDS.flatmap(lambda some: st.lists(st.sampled_from(some), min_size=2, max_size=9))
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(deadline=None, max_examples=30, suppress_health_check=QUIET)
@given(KINDS, st.data())
def test_random_model_is_cut_rightly_or_refused(kinds: list[str], data: st.DataObject) -> None:
    run(["linear", *kinds, "linear"], data)


@pytest.mark.slow
@settings(deadline=None, max_examples=50, suppress_health_check=QUIET)
@given(KINDS, st.data())
def test_many_random_models_are_cut_rightly_or_refused(kinds: list[str], data: st.DataObject) -> None:
    run(["linear", *kinds, "linear"], data)


@settings(deadline=None, max_examples=10, suppress_health_check=QUIET)
@given(st.lists(st.sampled_from(PLAIN), min_size=2, max_size=5))
def test_plain_chain_is_cut_before_every_block(kinds: list[str]) -> None:
    model = Chain(kinds).double()
    assert {f"blocks.{index}" for index in range(1, len(kinds))} <= set(profile(model, make_inputs(3)).cuts)


@pytest.mark.parametrize("kind", ["skip", "skip, computed again"])
def test_a_skip_over_a_turned_tensor_is_cut(kind: str) -> None:
    """The stage receives the tensor in its memory layout, for the skip too. A checkpoint has saved a view of zeros."""
    torch.manual_seed(0)
    model, inputs = Chain(["linear", "turn", kind, "linear"]).double(), make_inputs(3)
    whole = copy.deepcopy(model)
    expected = whole(**inputs)
    expected.square().sum().backward()
    found = split(model, inputs, at=["blocks.2"])
    result = found.stage(1)(found.stage(0)(**inputs), **inputs)
    assert_close(result, expected, "output")
    result.square().sum().backward()
    for (name, parameter), (_, reference) in zip(model.named_parameters(), whole.named_parameters()):
        assert_close(parameter.grad, reference.grad, name)
