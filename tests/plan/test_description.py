"""A plan as plain JSON: reading it gives the plan that was written, and an invalid plan is refused with a reason."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrain_nb.errors import SpecError
from detrain_nb.plan import (
    Layer,
    MeshMemory,
    PlanDescription,
    RankBytes,
    StageCost,
    StageCosts,
    StepTimeline,
    Work,
)

COSTS = StageCosts(
    (Layer("the start", 1.0, 40.0, 8.0), Layer("layers.1", 2.0, 80.0, 4.0, 16.0)),
    (StageCost(1, 1.0, 48.0, "gpu1", 100.0), StageCost(1, 2.0, 84.0)),
    num_microbatches=2,
    even_imbalance=1.5,
)
LINE = StepTimeline(
    "1F1B",
    (
        (Work("F", 0, 0, 0.0, 1.0), Work("B", 0, 0, 4.0, 6.0)),
        (Work("F", 1, 0, 1.0, 2.0), Work("B", 1, 0, 2.0, 4.0)),
    ),
)
MEMORY = MeshMemory(
    {"pp": 2},
    "1F1B",
    (RankBytes((0,), (0,), 10, 40, 40, 80, 8, 4, "backward"), RankBytes((1,), (1,), 20, 80, 0, 160, 4)),
)
WHOLE = PlanDescription("GPT", COSTS, (LINE,), MEMORY, ("times are estimated",))


def through_json(found: PlanDescription) -> PlanDescription:
    return PlanDescription.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False)))


@pytest.mark.parametrize(
    "found",
    [WHOLE, PlanDescription(costs=COSTS), PlanDescription(timelines=(LINE, LINE)), PlanDescription(memory=MEMORY)],
)
def test_what_is_read_back_is_what_was_written(found: PlanDescription) -> None:
    assert through_json(found) == found
    assert PlanDescription.from_dict(found.to_dict()) == found


def test_numbers_follow_from_what_is_in_it() -> None:
    assert (COSTS.imbalance, COSTS.step_s, COSTS.bounds) == (2 / 1.5, 5.0, (0, 1, 2))
    assert COSTS.bubble == pytest.approx(1 - 4 / 5)
    assert (LINE.step_s, LINE.bubble, LINE.num_microbatches) == (6.0, 0.5, 1)
    assert [LINE.idle(rank) for rank in (0, 1)] == [0.5, 0.5]
    assert (MEMORY.peak.ranks, MEMORY.peak.total_bytes) == ((1,), 244)


Change = Callable[[dict[str, Any]], object]
REFUSED: dict[str, tuple[Change, str]] = {
    "no mark": (lambda plan: plan.pop("detrain_nb_plan"), "this is not a plan .*pass the result of par.describe_plan"),
    "another version": (lambda plan: plan.update(detrain_nb_plan=2), "has version 2, but this .* reads version 1"),
    "nothing in it": (
        lambda plan: plan.update(costs=None, memory=None, timelines=[]),
        "has no costs, timelines or memory",
    ),
    "a long text": (lambda plan: plan.update(name="x" * 301), "a text of 301 characters"),
    "a long number": (lambda plan: plan["costs"].update(num_microbatches=1 << 70), "more than 64 bits"),
    "too deep": (lambda plan: plan.update(more=json.loads("[" * 20 + "]" * 20)), "or 8 levels"),
    "too many values": (lambda plan: plan.update(more=[0] * 100_000), "more than 100000 values"),
    "notes without end": (lambda plan: plan.update(notes=["a"] * 21), "21 notes, the limit is 20"),
    "a name that is no text": (lambda plan: plan.update(name=3), "plan.name 3: give a text"),
    "no layers": (lambda plan: plan["costs"].update(layers=[]), "0 layers"),
    "too many layers": (lambda plan: plan["costs"].update(layers=1001 * plan["costs"]["layers"][:1]), "1001 layers"),
    "a layer in no stage": (
        lambda plan: plan["costs"]["stages"].pop(),
        "the stages have 1 layers, but the model has 2",
    ),
    "an empty stage": (lambda plan: plan["costs"]["stages"][0].update(num_layers=0), "the stages have 0, 1 layers"),
    "no number": (lambda plan: plan["costs"]["layers"][0].update(time_s=math.nan), r"layers\[0\].time_s nan"),
    "without an end": (lambda plan: plan["costs"]["stages"][0].update(memory_bytes=math.inf), "memory_bytes inf"),
    "time below 0": (lambda plan: plan["costs"]["layers"][1].update(time_s=-1), "layer 1 has the number -1.0"),
    "bytes that no sum holds": (
        lambda plan: plan["costs"]["layers"][1].update(state_bytes=1e308),
        "bytes must be from 0",
    ),
    "a time that no sum holds": (
        lambda plan: plan["timelines"][0]["ranks"][0].update(end_s=[1.0, 1e308]),
        r"to 1e\+308 s",
    ),
    "memory of no byte": (
        lambda plan: plan["costs"]["stages"][0].update(node_memory_bytes=5e-324),
        "when it is unknown",
    ),
    "true as a number": (lambda plan: plan["costs"].update(num_microbatches=True), "give a whole number"),
    "no microbatches": (lambda plan: plan["costs"].update(num_microbatches=0), "0 microbatches"),
    "a field is missing": (lambda plan: plan["costs"]["layers"][0].pop("state_bytes"), "state_bytes is missing"),
    "a name in a tuple": (lambda plan: plan["costs"].update({("a", "b"): 1}), "a key that is not a string"),
    "a list as costs": (lambda plan: plan.update(costs=[]), r"plan.costs \[\]: give a table of fields"),
    "no lanes": (lambda plan: plan["timelines"][0].update(ranks=[]), "0 ranks of a pipeline"),
    "columns unlike": (lambda plan: plan["timelines"][0]["ranks"][1]["kinds"].pop(), "the columns of rank 1 differ"),
    "an idle rank": (
        lambda plan: [column.clear() for column in plan["timelines"][0]["ranks"][0].values()],
        "has a rank without passes",
    ),
    "a pass of no kind": (lambda plan: plan["timelines"][0]["ranks"][0].update(kinds=["F", "<b>"]), "of kind '<b>'"),
    "passes that overlap": (
        lambda plan: plan["timelines"][0]["ranks"][0].update(begin_s=[0.0, 0.5]),
        "rank 0 .* has a pass from 0.5 s .* one that ends at 1.0 s",
    ),
    "a stage of no model": (lambda plan: plan["timelines"][0]["ranks"][0].update(stages=[0, 999]), "of stage 999"),
    "no time": (
        lambda plan: [lane.update(begin_s=[0, 0], end_s=[0, 0]) for lane in plan["timelines"][0]["ranks"]],
        "has length 0 s",
    ),
    "too many timelines": (lambda plan: plan.update(timelines=17 * plan["timelines"]), "17 timelines"),
    "no axes": (lambda plan: plan["memory"].update(mesh={}), "0 axes"),
    "an axis of 0": (lambda plan: plan["memory"].update(mesh={"pp": 0}), "0 ranks along pp"),
    "a row of nobody": (lambda plan: plan["memory"]["rows"][0].update(ranks=[]), "needs at least 1 rank"),
    "bytes below 0": (lambda plan: plan["memory"]["rows"][0].update(gradient_bytes=-1), "rank 0 has the number -1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_plan_can_be_is_refused_in_words(case: str) -> None:
    change, told = REFUSED[case]
    plan = copy.deepcopy(WHOLE.to_dict())
    change(plan)
    with pytest.raises(SpecError, match=told):
        PlanDescription.from_dict(plan)


@pytest.mark.parametrize("data", [None, 3, "plan", [], {}, [["detrain_nb_plan", 1]]])
def test_what_is_no_plan_at_all_says_what_to_give(data: object) -> None:
    with pytest.raises(SpecError, match=r"this is not a plan .*pass the result of par.describe_plan"):
        PlanDescription.from_dict(data)


def test_too_many_passes_are_refused_where_they_are_written() -> None:
    works = tuple(Work("F", 0, number, float(number), number + 1.0) for number in range(10_001))
    with pytest.raises(SpecError, match="10001 passes, the limit is 10000: use fewer microbatches"):
        PlanDescription(timelines=(StepTimeline("GPipe", (works,)),)).to_dict()


def test_texts_are_made_fit_to_be_shown() -> None:
    plan = WHOLE.to_dict()
    plan["costs"]["stages"][0]["node"] = "gpu\x1b[31m\n\u202e1"
    found = PlanDescription.from_dict(plan)
    assert found.costs is not None
    assert found.costs.stages[0].node == r"gpu\x1b[31m\n\u202e1"


def test_parts_go_together_each_once() -> None:
    both = PlanDescription(costs=COSTS).joined(PlanDescription(timelines=(LINE,), name="GPT"))
    assert both.joined(PlanDescription(memory=MEMORY, notes=WHOLE.notes)) == WHOLE
    with pytest.raises(SpecError, match="both plans have costs: pass one of them"):
        both.joined(WHOLE)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.data())
def test_whatever_stands_somewhere_is_read_or_refused(data: st.DataObject) -> None:
    """Only a SpecError is raised, and an accepted plan can be written again."""
    plan: Any = copy.deepcopy(WHOLE.to_dict())
    place = plan
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not (isinstance(place[key], (dict, list)) and place[key]) or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    try:
        found = PlanDescription.from_dict(plan)
    except SpecError:
        return
    assert through_json(found) == found
