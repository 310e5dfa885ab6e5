"""Every model of the zoo in every layout, on real ranks: as the whole model computes it, or refused with a reason.

A model that is only looked at (profile, split, tp_plan, dry_run) is afterwards what it was, to the last bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from .zoo.everything import ENTRIES
from .zoo.outcomes import FAULTS, REFUSED
from .zoo.trials import LAYOUTS, Trials

ON_TWO_RANKS = ("looks", "pp", "tp", "dp_shard")
# What each kind of trouble looks like, quick: nothing of transformers is among them.
QUICK = (
    "by value",
    "called twice",
    "running buffers",
    "scalar parameters",
    "shared weights",
    "skip outside",
)
SLOW = (
    "caches",
    "checkpointed",
    "checkpointed, reentrant",
    "complex parameters",
    "gives hidden states",
    "in place",
    "LoRA",
    "mixed dtypes",
    "module hooks",
    "parameter hooks",
    "recurrent",
    "sparse gradients",
    "statistics",
    "weight outside",
    "BEiT",
    "Bart",
    "Bert, third hidden state",
    "CLIP",
    "Falcon",
    "Mamba",
)
ON_FOUR_RANKS = ("skip outside", "shared weights", "Bart", "Falcon", "GPT-J", "Gemma 3", "Phi-3", "Roberta", "Swin")


def _cases() -> Iterator[object]:
    for name in ENTRIES:
        marks = [] if name in QUICK else [pytest.mark.slow if name in SLOW else pytest.mark.thorough]
        for layout in ON_TWO_RANKS:
            yield pytest.param(name, layout, marks=marks, id=f"{name}-{layout}")
        if name in ON_FOUR_RANKS:
            yield pytest.param(name, "pp x tp", marks=pytest.mark.thorough, id=f"{name}-pp x tp")


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    with Trials() as started:
        yield started


@pytest.mark.parametrize("name, layout", list(_cases()))
def test_model_is_right_or_refused_with_a_reason(trials: Trials, name: str, layout: str) -> None:
    outcome = trials.run(name, layout)
    fault, reason = FAULTS.get(name, {}).get(layout), REFUSED.get(name, {}).get(layout)
    if fault is not None:
        assert re.search(fault, str(outcome)), f"no longer what FAULTS says of it, but {outcome}"
        pytest.xfail(str(outcome))
    if reason is None:
        assert outcome.kind == "right", str(outcome)
    else:
        assert outcome.kind == "refused" and re.search(reason, outcome.told), str(outcome)


def test_lists_name_what_is_in_the_zoo() -> None:
    named = {*QUICK, *SLOW, *ON_FOUR_RANKS, *REFUSED, *FAULTS}
    assert named <= set(ENTRIES)
    assert all(layouts.keys() <= LAYOUTS.keys() for each in (REFUSED, FAULTS) for layouts in each.values())
    assert not [(name, layout) for name in REFUSED for layout in REFUSED[name].keys() & FAULTS.get(name, {}).keys()]
