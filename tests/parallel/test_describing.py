"""Plans of real models as plain JSON: read without torch, they have the numbers that they were made from."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from detrain_nb import Session
from detrain_nb import parallel as par
from detrain_nb.errors import SpecError
from detrain_nb.plan import PlanDescription

from .models import GPT

TOKENS = torch.zeros(2, 16, dtype=torch.long)
# What a kernel without torch reads from a plan.
READ = """
import json, sys
sys.modules["torch"] = None
from detrain_nb.plan import PlanDescription
found = PlanDescription.from_dict(json.load(sys.stdin))
costs, memory = found.costs, found.memory
print(json.dumps({
    "costs": costs and {
        "bounds": costs.bounds, "stage_s": costs.stage_s, "memory": [stage.memory_bytes for stage in costs.stages],
        "numbers": [costs.imbalance, costs.step_s, costs.bubble, costs.even_imbalance],
        "nodes": [[stage.node, stage.node_memory_bytes] for stage in costs.stages],
        "layers": [layer.name for layer in costs.layers]},
    "timelines": [
        [line.schedule, line.step_s, line.bubble, [[list(vars(work).values()) for work in rank] for rank in line.ranks]]
        for line in found.timelines],
    "memory": memory and [
        dict(memory.mesh), memory.schedule, list(memory.peak.ranks),
        [[list(row.ranks), list(row.stages), row.num_parameters, list(row.parts_bytes), row.phase]
         for row in memory.rows]],
}))
assert not any(name.partition(".")[0] == "torch" for name in sys.modules if sys.modules[name] is not None)
"""


def read_without_torch(plan: dict[str, Any]) -> dict[str, Any]:
    told = subprocess.run(
        [sys.executable, "-c", READ], input=json.dumps(plan), capture_output=True, text=True, timeout=60, check=False
    )
    assert told.returncode == 0, told.stderr
    found: dict[str, Any] = json.loads(told.stdout)
    return found


def numbers_of(found: par.Partition) -> dict[str, Any]:
    assert found.even is not None
    return {
        "bounds": list(found.bounds),
        "stage_s": list(found.stage_s),
        "memory": list(found.memory_bytes),
        "numbers": [found.imbalance, found.step_s, found.bubble, found.even.imbalance],
        "nodes": [
            [node.name, None if node.memory_bytes == float("inf") else node.memory_bytes] for node in found.nodes
        ],
        "layers": [unit.cut or "the start" for unit in found.profile.units],
    }


def numbers_of_line(line: par.Timeline) -> list[Any]:
    return [
        line.schedule,
        line.step_s,
        line.bubble,
        [[list(asdict(work).values()) for work in rank] for rank in line.ranks],
    ]


def numbers_of_dry_run(found: par.DryRun) -> list[Any]:
    rows = [[[*row.ranks], [*row.stages], row.num_parameters, [*row.parts_bytes], row.phase] for row in found.rows]
    return [dict(found.mesh), found.schedule, list(found.peak.ranks), rows]


def test_a_partition_has_its_numbers_where_no_torch_is() -> None:
    nodes = [par.StageNode("fast", memory_bytes=1e9, speed=2.0), par.StageNode("slow", bytes_per_s=1e6, latency_s=0.1)]
    found = par.partition(par.profile(GPT(is_tied=True), TOKENS), nodes, num_microbatches=6)
    assert read_without_torch(found.to_dict())["costs"] == numbers_of(found)


@pytest.mark.parametrize("is_tied", [False, True])
def test_layers_add_up_to_their_stages(is_tied: bool) -> None:
    """A tied parameter counts once in each stage that uses it."""
    found = par.partition(par.profile(GPT(is_tied=is_tied), TOKENS), 3)
    costs = found.costs()
    for stage, begin, end in zip(costs.stages, costs.bounds, costs.bounds[1:]):
        layers = costs.layers[begin:end]
        assert sum(layer.time_s for layer in layers) == pytest.approx(stage.time_s)
        assert sum(layer.memory_bytes for layer in layers) == pytest.approx(stage.memory_bytes)


@pytest.mark.parametrize("name", par.SCHEDULES)
def test_a_timeline_has_its_numbers_where_no_torch_is(name: str) -> None:
    line = par.timeline(name, 2, 4)
    assert read_without_torch(line.to_dict())["timelines"] == [numbers_of_line(line)]


def test_a_dry_run_has_its_numbers_where_no_torch_is() -> None:
    found = par.dry_run(GPT(), {"pp": 2, "dp_shard": 2}, example_inputs=TOKENS)
    told = read_without_torch(found.to_dict())
    assert found.split is not None and found.split.partition is not None
    assert told["memory"] == numbers_of_dry_run(found)
    assert told["costs"] == numbers_of(found.split.partition)


def test_one_call_has_all_parts() -> None:
    model = GPT()
    plan = par.describe_plan(
        model, {"pp": 2, "dp_shard": 2}, example_inputs=TOKENS, num_microbatches=6, compare=["GPipe"]
    )
    told = read_without_torch(plan)
    split = par.split(model, TOKENS, 2)
    chosen = par.partition(split.profile, 2, num_microbatches=6)
    assert told["costs"] == numbers_of(chosen)
    counts = [("1F1B", 6), ("1F1B", 12), ("GPipe", 6)]
    lines = [par.timeline(name, 2, count, stage_s=chosen.stage_s) for name, count in counts]
    assert told["timelines"] == [numbers_of_line(line) for line in lines]
    dry = par.dry_run(model, {"pp": 2, "dp_shard": 2}, example_inputs=TOKENS, num_microbatches=6)
    assert told["memory"] == numbers_of_dry_run(dry)
    assert plan["name"] == f"GPT, {sum(p.numel() for p in model.parameters()):,} parameters ({plan['name'][-7:-1]})"
    assert len(plan["notes"]) == 1 and "estimated" in plan["notes"][0]


def test_cuts_of_ones_own_and_measured_times_are_those_of_the_plan(few_passes: None) -> None:
    layers = [nn.Linear(8, 8) for _ in range(4)]
    example = torch.zeros(4, 8)
    plan = par.describe_plan(nn.Sequential(*layers), {"pp": 2}, example_inputs=example, pp=["3"], measure=True)
    found = PlanDescription.from_dict(plan)
    assert found.costs is not None and found.memory is not None
    assert [stage.num_layers for stage in found.costs.stages] == [3, 1]
    assert found.costs.num_microbatches == found.timelines[0].num_microbatches == 4
    assert all(layer.time_s > 0 for layer in found.costs.layers)
    assert found.notes == ()


def test_without_a_pipeline_there_is_one_stage_and_no_timeline() -> None:
    found = PlanDescription.from_dict(
        par.describe_plan(GPT(), {"dp_shard": 2}, example_inputs=TOKENS, precision="bf16")
    )
    assert found.costs is not None and found.memory is not None
    assert (len(found.costs.stages), found.timelines, found.costs.imbalance) == (1, (), 1.0)
    assert found.memory.rows[0].ranks == (0, 1)


def test_timelines_that_are_too_long_are_left_out_and_told_of() -> None:
    model, example = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.zeros(1, 8)
    plan = par.describe_plan(model, {"pp": 2}, example_inputs=example, num_microbatches=1_000)
    assert [len(line["ranks"][0]["kinds"]) for line in plan["timelines"]] == [2_000]
    assert any("1F1B with 2000 microbatches has too many passes to draw; its bubble is 0 %" in n for n in plan["notes"])


@pytest.mark.parametrize(
    "mesh, told",
    [
        ({"pp": -1}, "pp=-1: a plan needs the size of every axis"),
        (3, "the mesh is"),
        ({"pp": 2.5}, "give a whole number"),
    ],
)
def test_a_mesh_that_is_none_is_told_of(mesh: Any, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        par.describe_plan(nn.Linear(2, 2), mesh, example_inputs=torch.zeros(1, 2))


ON_RANKS = """
import torch
from detrain_nb import parallel as par
from parallel.models import GPT
model, example = GPT(layers=4), torch.zeros(2, 16, dtype=torch.long)
mesh = par.make_mesh(pp={ranks}, device_type="cpu")
plan = par.describe_plan(model, mesh, example_inputs=example, schedule="{schedule}", num_microbatches=8)
stages = par.PipelineStages(
    par.split(model, example, {stages}), mesh, schedule="{schedule}", num_microbatches=8, device="cpu")
list(stages.indices)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks, schedule, stages", [(2, "1F1B", 2), (4, "1F1B", 4), (2, "Interleaved1F1B", 4)])
def test_ranks_tell_the_plan_of_what_they_run(
    two_ranks: Session, four_ranks: Session, ranks: int, schedule: str, stages: int
) -> None:
    """The plan is pulled as it is; its stages have the ranks and the layers of the pipeline made of that model."""
    session = two_ranks if ranks == 2 else four_ranks
    code = ON_RANKS.format(ranks=ranks, schedule=schedule, stages=stages)
    run = session.run_cell(code, timeout_s=120).values
    plans = session.pull("plan")
    assert all(plans[rank] == plans[0] for rank in range(ranks))
    found = par.split(GPT(layers=4), TOKENS, stages)
    told = read_without_torch(plans[0])
    assert told["costs"] == numbers_of(par.partition(found.profile, stages, num_microbatches=8))
    assert told["memory"] is None and any("while a process group exists" in note for note in plans[0]["notes"])
    for rank in range(ranks):
        assert sorted({work[1] for work in told["timelines"][0][3][rank]}) == run[rank]
