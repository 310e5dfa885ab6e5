"""Which plans are accepted, how others are refused, and what a saved notebook keeps of the view."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from detrain_nb.widgets.plan_facts import layers_text, short_names, time_text

from detrain_nb import widgets
from detrain_nb.errors import SpecError
from detrain_nb.plan import Layer, MeshMemory, PlanDescription, RankBytes, StageCost, StageCosts, StepTimeline, Work


def costs(*stage_s: float, node_memory_bytes: float | None = None, name: str = "layers.{}") -> StageCosts:
    """Return costs with one layer per stage."""
    layers = tuple(Layer(name.format(index), time_s, 30e6, 10e6, 2e6) for index, time_s in enumerate(stage_s))
    stages = tuple(StageCost(1, time_s, 40e6, f"gpu{i}", node_memory_bytes) for i, time_s in enumerate(stage_s))
    return StageCosts(layers, stages, 4, 1.5)


LINE = StepTimeline("GPipe", ((Work("F", 0, 0, 0.0, 1.0),), (Work("F", 1, 0, 1.0, 2.0),)))
MEMORY = MeshMemory({"pp": 2}, "GPipe", tuple(RankBytes((i,), (i,), 5, 20, 20, 40, 10, 10, "loss") for i in (0, 1)))
PLAN = PlanDescription("GPT", costs(1e-3, 3e-3), (LINE,), MEMORY)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: PLAN.to_dict(),
        lambda path: json.dumps(PLAN.to_dict()),
        lambda path: "\n  " + json.dumps(PLAN.to_dict(), indent=1),
        lambda path: path,
        str,
        lambda path: PLAN,
    ],
    ids=["dict", "text", "indented", "path", "name", "object"],
)
def test_a_plan_is_taken_in_each_of_its_forms(make: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN.to_dict()), encoding="utf-8")
    assert widgets.plan(make(path)).plan == PLAN


def test_parts_are_shown_as_one_plan() -> None:
    parts = (PlanDescription("GPT", costs=PLAN.costs), PlanDescription(timelines=(LINE,)).to_dict())
    view = widgets.plan(*parts, PlanDescription(memory=MEMORY))
    assert view.plan == PLAN


@pytest.mark.parametrize(
    "parts, told",
    [
        ((), "no plan was given: give the result of par.describe_plan"),
        ((3,), "3 is not a plan: give the result"),
        ((None,), "None is not a plan"),
        (([PLAN.to_dict()],), r"as pull returns one for each rank: give one of them, such as plans\[0\]"),
        (({2: PLAN.to_dict()},), r"plans by rank: give one of them, such as plans\[2\]"),
        (({},), "this is not a plan"),
        (("{",), "the plan: line 1, column 2"),
        (("[1]",), "the plan: must be a table of named fields"),
        (("none.json",), "none.json"),
        ((PLAN, PLAN), "both plans have costs"),
        ((PlanDescription,), "is not a plan"),
    ],
)
def test_what_is_none_is_told_of_with_what_to_give(parts: tuple[object, ...], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        widgets.plan(*parts)


def test_settled_form_has_numbers_and_a_row_for_each_stage() -> None:
    left = widgets.plan(PLAN).settled()
    assert left.text.splitlines()[:6] == [
        "Plan: GPT, pp 2, GPipe, 4 microbatches, dry run",
        "Imbalance, slowest / mean: 1.50, stage 1 slowest, cut evenly 1.50",
        "Bubble: 50 % of all ranks' time",
        "Step, estimated: 2 s",
        "Memory, fullest rank: 100 B, rank 0",
        "Timeline: GPipe, 1 microbatch, 2 s, 50 % bubble",
    ]
    assert "1      gpu1  layers.1  3 ms slowest  40 MB   -" in left.text
    for cell in ("gpu1", "layers.1", "3 ms slowest", "rank 1", "weights 20 B, gradients 20 B, optimizer 40 B"):
        assert f"<td style='text-align:left'>{cell}" in left.html


def test_settled_form_of_the_largest_plan_fits_into_a_notebook_and_shows_text_as_text() -> None:
    found = costs(*[1e-3] * 256, name="<script>alert({0})</script>" * 6)
    bundle = widgets.plan(PlanDescription(costs=found)).settled().bundle(end="live")
    assert sum(map(len, bundle.values())) < 80_000 and len(bundle["text/html"]) < 50_000
    assert "<script" not in bundle["text/html"] and "&lt;script&gt;" in bundle["text/html"]
    assert "... 192 more" in bundle["text/plain"]


def test_settled_form_has_no_column_of_nodes_where_there_are_none() -> None:
    found = costs(1e-3, 3e-3)
    found = replace(found, stages=tuple(replace(stage, node="") for stage in found.stages))
    left = widgets.plan(PlanDescription(costs=found)).settled()
    assert "\nstage  layers " in left.text and "node" not in left.text + left.html


def numbers(**parts: Any) -> list[dict[str, str]]:
    found: list[dict[str, str]] = widgets.plan(PlanDescription(**parts)).state()["numbers"]
    return found


def test_numbers_that_are_not_known_say_what_they_need() -> None:
    assert [each["unit"] for each in numbers(timelines=(LINE,))] == [
        "needs a partition",
        "of all ranks' time",
        "",
        "needs a partition or a dry run",
    ]
    assert [each["value"] for each in numbers(memory=MEMORY)] == ["-", "-", "-", "100 B"]
    assert numbers(costs=costs(1e-3))[1]["unit"] == "no bubble with one stage"


def test_a_stage_that_does_not_fit_and_one_that_holds_up_the_others_are_told_of() -> None:
    assert [each["word"] for each in numbers(costs=costs(1e-3, 2e-3, node_memory_bytes=30e6))] == [
        "stage 1 slowest",
        "",
        "",
        "does not fit",
    ]
    assert [each["state"] for each in numbers(costs=costs(1.0, 1.0, node_memory_bytes=42e6))] == ["", "", "", "warn"]
    assert numbers(costs=costs(1.0, 2.0, 2.0))[0]["word"] == "2 stages slowest"
    rows = widgets.plan(PlanDescription(costs=costs(1.0, 2.0, 2.0, node_memory_bytes=30e6))).state()["stages"]
    assert [(row["word"], row["is_too_full"]) for row in rows] == [("", True), ("slowest", True), ("slowest", True)]


def test_a_stage_that_is_a_little_slower_is_told_of_where_another_cut_is_quicker() -> None:
    assert numbers(costs=costs(1.0, 1.13))[0] == {
        "label": "Imbalance, slowest / mean", "value": "1.06", "unit": "", "state": "", "word": "",
        "beside": "cut evenly 1.50",
    }  # fmt: skip
    assert widgets.plan(PlanDescription(costs=costs(1.0, 1.13))).state()["stages"][1]["word"] == "slowest"
    assert numbers(costs=costs(1.0, 1.3))[0]["word"] == "stage 1 slowest", "no other cut, and it is notable"
    layers = costs(0.5, 0.5, 0.06, 0.94).layers
    late = StageCosts(layers, (StageCost(3, 1.06, 1), StageCost(1, 0.94, 1)), 4)
    assert numbers(costs=late)[0]["word"] == "stage 0 slowest"
    early = StageCosts(layers, (StageCost(1, 0.5, 1), StageCost(2, 0.56, 1), StageCost(1, 0.94, 1)), 4)
    assert early.best_slowest_s == pytest.approx(0.94) and late.best_slowest_s == pytest.approx(1.0)


def test_a_stage_that_is_a_little_slower_is_not_warned_of_where_the_quicker_cut_does_not_fit() -> None:
    """Cut after the first layer, the stages would take 1 s and 1.06 s; now they take 1.12 s and 0.94 s."""
    layers = tuple(Layer(f"h.{n}", time_s, 30e6, 10e6) for n, time_s in enumerate((1.0, 0.12, 0.94)))

    def word(last_memory_bytes: float) -> str:
        stages = (StageCost(2, 1.12, 80e6, "a", 100e6), StageCost(1, 0.94, 40e6, "b", last_memory_bytes))
        return str(numbers(costs=StageCosts(layers, stages, 4))[0]["word"])

    assert word(74e6) == "", "two layers there need 75 MB: 30 + 5 of a microbatch less, and 30 + 10"
    assert word(76e6) == "stage 0 slowest"


def test_a_stage_that_waits_for_its_link_says_so() -> None:
    found = PlanDescription(costs=StageCosts((Layer("a", 1e-3, 1, 1),), (StageCost(1, 4e-3, 2),), 1))
    assert widgets.plan(found).state()["stages"][0]["link"] == "link-bound; layers 1 ms"


def test_layers_are_called_by_what_tells_them_apart() -> None:
    names = ["the start", "model.layers.0.attn", "model.layers.0", "model.layers.11", "model.norm", "h2o"]
    assert short_names(names) == ["start", "0.attn", "0", "11", "model.norm", "h2o"]
    assert short_names(["0", "1", "12"]) == ["0", "1", "12"]
    assert short_names(["a"]) == ["a"]
    assert [layers_text(costs(1.0, 2.0), stage) for stage in (0, 1)] == ["layers.0", "layers.1"]


def test_times_have_three_digits_and_a_unit() -> None:
    assert [time_text(each) for each in (0.0, 2.5e-7, 1e-3, 0.1304, 1.0, 99.96, 4e3)] == [
        "0 µs",
        "0.25 µs",
        "1 ms",
        "130 ms",
        "1 s",
        "100 s",
        "4,000 s",
    ]


def test_state_is_plain_json_and_bounded() -> None:
    works = tuple(Work("F", 0, number, float(number), number + 1.0) for number in range(5_000))
    parts = {"costs": costs(*[1e-3] * 256), "timelines": (StepTimeline("GPipe", (works, works)),)}
    told = json.dumps(widgets.plan(PlanDescription(**parts)).state(), allow_nan=False)
    assert len(told) < 1_000_000
    assert not re.search(r"NaN|Infinity", told)
