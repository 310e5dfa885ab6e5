"""Every model of the zoo in every layout, on real ranks: equal to the whole model, or refused with a reason.

A model that is only inspected (profile, split, tp_plan, dry_run) stays the same, to the last bit. This file runs the
models written by hand. test_zoo_of_transformers.py runs the others, in sessions of its own, so that two workers share
the models.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .zoo.cases import FOUR_RANKS, QUICK, SLOW, cases, require_expected
from .zoo.everything import ENTRIES, OWN
from .zoo.outcomes import FAULTS, REFUSED, WHOLE
from .zoo.trials import LAYOUTS, Trials

pytestmark = pytest.mark.timeout(300)  # a hang is limited to 100 s, and a session may have to start first


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    with Trials() as started:
        yield started


@pytest.mark.parametrize("name, layout", list(cases(OWN)))
def test_model_is_right_or_refused_with_a_reason(trials: Trials, name: str, layout: str) -> None:
    require_expected(trials, name, layout)


def test_lists_name_what_is_in_the_zoo() -> None:
    named = {*QUICK, *SLOW, *FOUR_RANKS, *REFUSED, *FAULTS, *WHOLE}
    assert named <= set(ENTRIES)
    assert all(set(layouts) <= LAYOUTS.keys() for each in (QUICK, SLOW, REFUSED, FAULTS) for layouts in each.values())
    assert not [(name, layout) for name in REFUSED for layout in REFUSED[name].keys() & FAULTS.get(name, {}).keys()]
    assert not [name for name in QUICK if set(QUICK[name]) & set(SLOW.get(name, ()))]
