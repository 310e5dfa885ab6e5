"""The assignment of units to stages, compared with all possible splits."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from detrain_nb.errors import SpecError
from detrain_nb.parallel import ModelProfile, Partition, StageNode, Unit, dry_run, partition, profile
from detrain_nb.plan import PlanDescription

from .models import GPT

TIMES = st.integers(0, 20).map(lambda tenths: tenths / 10)


def make_profile(*units: tuple[tuple[str, ...], int, int], parameter_bytes: int = 100) -> ModelProfile:
    """Return a profile of units given as (parameters, saved bytes, input bytes)."""
    made = [
        Unit(f"m{index}" if index else None, 0.0, 0, saved, size, names)
        for index, (names, saved, size) in enumerate(units)
    ]
    return ModelProfile(tuple(made), {name: parameter_bytes for unit in made for name in unit.parameters})


def plain(count: int) -> ModelProfile:
    return make_profile(*(((f"p{index}",), 10, 8) for index in range(count)))


def cost(found: Partition) -> float:
    """Return what is optimised: the time of the slowest stage, or infinity if a stage does not fit."""
    return max(found.stage_s) if found.fits else math.inf


def parameters_of(span: tuple[int, int], profile: ModelProfile) -> set[str]:
    return {name for unit in profile.units[slice(*span)] for name in unit.parameters}


NODES = st.builds(
    StageNode,
    memory_bytes=st.sampled_from([math.inf, 400.0, 900.0, 2000.0]),
    speed=st.sampled_from([0.5, 1.0, 3.0]),
    bytes_per_s=st.sampled_from([math.inf, 10.0, 100.0]),
    latency_s=st.sampled_from([0.0, 0.1]),
)


@st.composite
def problems(draw: st.DrawFn) -> tuple[ModelProfile, list[float], list[StageNode], bool]:
    count = draw(st.integers(1, 7))
    names = st.lists(st.sampled_from("abcde"), max_size=2, unique=True).map(tuple)
    units = [(draw(names), draw(st.integers(0, 50)), draw(st.integers(0, 50))) for _ in range(count)]
    nodes = draw(st.lists(NODES, min_size=1, max_size=min(4, count)))
    return make_profile(*units), [draw(TIMES) for _ in range(count)], nodes, draw(st.booleans())


def enumerate_all(profile: ModelProfile, times: list[float], nodes: list[StageNode], is_free: bool) -> float:
    """Return the best cost over all orders and bounds, with sums computed from scratch.

    Only splits whose stages all have parameters count, or all splits if no such split fits.
    """
    best = {True: math.inf, False: math.inf}
    for order in itertools.permutations(nodes) if is_free else [tuple(nodes)]:
        for inner in itertools.combinations(range(1, len(times)), len(nodes) - 1):
            bounds = (0, *inner, len(times))
            slowest, have_parameters = 0.0, True
            for stage, (node, begin, end) in enumerate(zip(order, bounds, bounds[1:])):
                units = profile.units[begin:end]
                have_parameters &= any(unit.parameters for unit in units)
                needed = 4 * 100 * len({name for unit in units for name in unit.parameters})
                needed += sum(unit.saved_bytes for unit in units) * min(2 * len(nodes), len(nodes) - stage)
                travel = 0.0
                for bound in (begin, end):
                    if 0 < bound < len(times):
                        travel += 2 * profile.units[bound].input_bytes / node.bytes_per_s + 2 * node.latency_s
                fits = needed <= node.memory_bytes
                slowest = max(slowest, sum(times[begin:end]) / node.speed, travel, 0.0 if fits else math.inf)
            best[have_parameters] = min(best[have_parameters], slowest)
    return best[True] if best[True] < math.inf else best[False]


@settings(deadline=None, max_examples=150)
@given(problems())
def test_no_split_is_better(problem: tuple[ModelProfile, list[float], list[StageNode], bool]) -> None:
    profile, times, nodes, is_free = problem
    best = enumerate_all(profile, times, nodes, is_free)
    if best == math.inf:
        with pytest.raises(SpecError, match=rf"no split into {len(nodes)} stages fits"):
            partition(profile, nodes, times_s=times, is_order_free=is_free)
        return
    found = partition(profile, nodes, times_s=times, is_order_free=is_free)
    assert cost(found) == pytest.approx(best, abs=1e-9)
    assert sorted(map(repr, found.nodes)) == sorted(map(repr, nodes))
    assert found.bounds[0] == 0 and found.bounds[-1] == len(times) and list(found.bounds) == sorted(set(found.bounds))
    assert found.even is not None
    if all(map(parameters_of, itertools.pairwise(found.even.bounds), itertools.repeat(profile))):
        assert cost(found) <= cost(found.even) + 1e-9


def test_stage_without_parameters_is_made_only_where_there_is_no_other() -> None:
    """The fastest split into three stages would leave the last unit alone; with four each unit has a stage."""
    profile = make_profile((("a",), 0, 8), (("b",), 0, 8), (("c",), 0, 8), ((), 0, 8))
    assert partition(profile, 3, times_s=[1, 1, 1, 3]).bounds == (0, 1, 2, 4)
    assert partition(profile, 4, times_s=[1, 1, 1, 3]).bounds == (0, 1, 2, 3, 4)
    small = [StageNode(), StageNode(), StageNode(memory_bytes=100)]
    assert partition(profile, small, times_s=[1, 1, 1, 3]).bounds == (0, 1, 3, 4), "no other fits"


def test_what_is_said_of_a_split() -> None:
    profile = plain(6)
    found = partition(profile, 3, times_s=[3, 1, 1, 1, 2, 4], num_microbatches=4)
    assert (found.bounds, found.cuts, found.stage_s) == ((0, 2, 5, 6), ("m2", "m5"), (4.0, 4.0, 4.0))
    assert (found.imbalance, found.step_s) == (1.0, 24.0)
    assert found.bubble == pytest.approx(2 / 6), "(stages - 1) / (microbatches + stages - 1)"
    assert found.memory_bytes == (2 * 400 + 2 * 10 * 3, 3 * 400 + 3 * 10 * 2, 400 + 10)
    assert found.even is not None and found.even.stage_s == (4.0, 2.0, 6.0)
    assert found.even.imbalance == pytest.approx(1.5)
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines] == ["stage", "0", "1", "2", "slowest", "equal"]
    assert "begins at" in lines[0] and " m5 " in lines[3]
    assert lines[-2] == ("slowest stage / mean 1.000, a step of 4 microbatches 24000.000 ms, of which 33 % bubble")


class WithUnused(nn.Module):
    """Four layers; the third has an unused matrix, and the model an unused vector and a frozen one."""

    def __init__(self, unused: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        self.vector = nn.Parameter(torch.zeros(unused))
        self.frozen = nn.Parameter(torch.zeros(unused), requires_grad=False)
        self.layers[2].spare = nn.Parameter(torch.zeros(unused, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("stages", [2, 4])
def test_parameters_that_nobody_uses_count_where_a_dry_run_has_them(stages: int) -> None:
    """Expected by hand: 4 bytes for each value, and 8 for Adam if it is trained; no gradient.

    The root is in stage 0.
    """
    with_them, without = WithUnused(100), WithUnused(0)
    x = torch.zeros(2, 64)
    added = [0] * stages
    added[0] += 100 * 4 * 3 + 100 * 4
    added[stages // 2] += 64 * 100 * 4 * 3
    split, other = (partition(profile(model, x), stages) for model in (with_them, without))
    assert split.cuts == other.cuts == {2: ("layers.2",), 4: ("layers.1", "layers.2", "layers.3")}[stages]
    assert [a - b for a, b in zip(split.memory_bytes, other.memory_bytes, strict=True)] == added
    costs = split.costs()
    of_layers = [sum(layer.memory_bytes for layer in costs.layers[a:b]) for a, b in itertools.pairwise(costs.bounds)]
    assert of_layers == list(split.memory_bytes)
    rows, others = (dry_run(model, {"pp": stages}, example_inputs=x).rows for model in (with_them, without))
    assert [row.total_bytes - before.total_bytes for row, before in zip(rows, others, strict=True)] == added


def test_parameters_that_nobody_uses_have_to_fit() -> None:
    used_bytes = 2 * 64 * 64 * 4 * 4
    costs = profile(WithUnused(1000), torch.zeros(2, 64))
    with pytest.raises(SpecError, match="no split into 2 stages fits"):
        partition(costs, [StageNode(memory_bytes=3 * used_bytes)] * 2)


def test_model_in_the_place_of_its_profile_is_told() -> None:
    with pytest.raises(
        SpecError, match=r"needs a profile, not a GPT: call partition\(profile\(model, example_inputs\)"
    ):
        partition(GPT(), 2)  # type: ignore[arg-type]


def test_times_that_were_measured_are_used() -> None:
    found = profile(GPT(), torch.zeros(2, 16, dtype=torch.long))
    estimated = partition(found, 2)
    slow_start = [(9.0, 1.0), *[(0.5, 0.5)] * (len(found.units) - 1)]
    measured = [replace(unit, forward_s=there, backward_s=back) for unit, (there, back) in zip(found.units, slow_start)]
    best = partition(replace(found, units=tuple(measured)), 2)
    assert best.cuts == ("h.0",) != estimated.cuts and best.stage_s == (10.0, 6.0)
    assert partition(best.profile, 2, is_training=False).stage_s == (9.0, 3.0)


def test_without_training_nothing_is_kept_for_a_backward_pass() -> None:
    found = partition(plain(2), 2, times_s=[1, 1], is_training=False)
    assert found.memory_bytes == (100.0, 100.0)


def test_tied_parameters_are_on_both_stages_and_once_on_one() -> None:
    tied = make_profile((("a",), 0, 8), (("b",), 0, 8), (("a", "c"), 0, 8))
    assert partition(tied, 1, times_s=[1, 1, 1]).memory_bytes == (3 * 400.0,)
    assert partition(tied, 2, times_s=[1, 1, 3]).memory_bytes == (2 * 400.0, 2 * 400.0)


def test_free_order_puts_the_quick_node_where_the_work_is() -> None:
    nodes = [StageNode("quick", speed=4), StageNode("slow")]
    times = [1.0, 8.0]
    assert max(partition(plain(2), nodes, times_s=times).stage_s) == 8.0
    found = partition(plain(2), nodes, times_s=times, is_order_free=True)
    assert [node.name for node in found.nodes] == ["slow", "quick"] and found.stage_s == (1.0, 2.0)


@pytest.mark.parametrize(
    "nodes",
    [
        64,
        pytest.param(
            [StageNode(str(index), memory_bytes=1e9 + index) for index in range(64)],
            marks=pytest.mark.slow,
            id="unlike",
        ),
    ],
)
def test_many_units_on_many_stages(nodes: int | list[StageNode]) -> None:
    found = partition(plain(1000), nodes, times_s=[1.0] * 1000)
    assert max(found.stage_s) == math.ceil(1000 / 64)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_gpt_with_a_large_head_is_cut_as_well_as_can_be(stages: int) -> None:
    with torch.device("meta"):
        model = GPT(vocabulary=20_000, width=128, layers=12)
    found = profile(model, torch.zeros(2, 16, dtype=torch.long))
    times = found.times()
    inner = itertools.combinations(range(1, len(times)), stages - 1)
    all_bounds = [(0, *bounds, len(times)) for bounds in inner]
    costs = [max(sum(times[begin:end]) for begin, end in itertools.pairwise(bounds)) for bounds in all_bounds]
    best = partition(found, stages)
    assert max(best.stage_s) == pytest.approx(min(costs)) and best.even is not None
    assert times[-1] > 10 * times[1] and max(best.stage_s) < 0.95 * max(best.even.stage_s), "the head is large"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"nodes": 4}, r"the model can be cut into at most 3 \(cuts: m1, m2\): use fewer stages"),
        ({"nodes": 0}, "stages=0: give a whole number, 1 or more"),
        ({"nodes": ["gpu1"]}, "give a StageNode for each stage, or the number of stages"),
        ({"nodes": [StageNode("a", memory_bytes=500)] * 2}, r"no split into 2 stages fits: the model needs 0.00 GB"),
        ({"nodes": 2, "times_s": [1.0]}, "1 times for 3 units: give one time for each unit"),
        ({"nodes": 2, "num_microbatches": 0}, "num_microbatches=0: a step has at least 1 microbatch"),
    ],
)
def test_what_cannot_be_is_told(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        partition(plain(3), **arguments)  # type: ignore[arg-type]


def test_plan_of_very_many_units_has_neighbours_together() -> None:
    found = partition(plain(2500), 3, times_s=[float(1 + index % 7) for index in range(2500)])
    costs = found.costs()
    assert 500 < len(costs.layers) <= 1000 and costs.layers[0].name == "the start and 2 more"
    for stage, (begin, end) in enumerate(itertools.pairwise(costs.bounds)):
        of_stage = costs.layers[begin:end]
        assert sum(layer.time_s for layer in of_stage) == found.stage_s[stage] == costs.stage_s[stage]
        assert sum(layer.memory_bytes for layer in of_stage) == found.memory_bytes[stage]
    assert PlanDescription.from_dict(found.to_dict()).costs == costs


def test_of_many_cuts_some_are_named() -> None:
    with pytest.raises(SpecError, match=r"m9, m10 and 29 more\): use fewer stages"):
        partition(plain(40), 41)


@pytest.mark.parametrize("field, value", [("speed", 0), ("memory_bytes", -1), ("bytes_per_s", 0), ("latency_s", -1)])
def test_node_that_cannot_be_is_told(field: str, value: float) -> None:
    with pytest.raises(SpecError, match=rf"node 'gpu1': {field}={value} must be "):
        StageNode("gpu1", **{field: value})
