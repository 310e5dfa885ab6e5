"""Which models of the zoo run when, in every layout, and what outcome is required of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import pytest

from .outcomes import FAULTS, REFUSED, WHOLE
from .trials import Trials

__all__ = ["FOUR_RANKS", "QUICK", "SLOW", "cases", "require_expected"]

_TRAINED = ("pp", "tp", "dp_shard")
_LOOKS = ("looks",)
# One model for each kind of failure that a cut shows; these are quick, and none is of transformers.
QUICK: dict[str, tuple[str, ...]] = {
    "running buffers": _TRAINED,
    "scalar parameters": ("dp_shard",),
    "skip outside": ("pp",),
}
# The looks are of models that write while they run, or that read what they hold. None of transformers is slow:
# test_untouched inspects some, and test_families_on_meshes trains some on ranks.
SLOW: dict[str, tuple[str, ...]] = {
    "caches": _LOOKS,
    "checkpointed, reentrant": ("pp",),
    "LoRA": ("dp_shard",),
    "mixed dtypes": ("dp_shard",),
    "module hooks": ("pp",),
    "parameter hooks": ("tp",),
    "recurrent": ("dp_shard",),
    "skip outside": ("tp",),
    "weight outside": ("dp_shard",),
}
FOUR_RANKS = (
    "scalar parameters",
    "skip outside",
    "shared weights",
    "Bart",
    "Falcon",
    "GPT-J",
    "Gemma 3",
    "Phi-3",
    "Roberta",
    "Swin",
)


def cases(names: Iterable[str]) -> Iterator[object]:
    for name in names:
        for layout in (*_LOOKS, *_TRAINED):
            mark = pytest.mark.slow if layout in SLOW.get(name, ()) else pytest.mark.thorough
            marks = [] if layout in QUICK.get(name, ()) else [mark]
            yield pytest.param(name, layout, marks=marks, id=f"{name}-{layout}")
        if name in FOUR_RANKS:
            yield pytest.param(name, "pp x tp", marks=pytest.mark.thorough, id=f"{name}-pp x tp")


def require_expected(trials: Trials, name: str, layout: str) -> None:
    """Check that the model is right, or refused as REFUSED says; under tp a part must be cut, unless WHOLE names it."""
    outcome = trials.run(name, layout)
    if outcome.kind == "not possible here":
        pytest.skip(f"GPU: {outcome.told}")
    fault, reason = FAULTS.get(name, {}).get(layout), REFUSED.get(name, {}).get(layout)
    if fault is not None:
        assert re.search(fault, str(outcome)), f"no longer what FAULTS says of it, but {outcome}"
        pytest.xfail(str(outcome))
    if reason is not None:
        assert outcome.kind == "refused" and re.search(reason, outcome.told), str(outcome)
        return
    assert outcome.kind == "right", str(outcome)
    if layout == "tp":
        assert outcome.cut is not None
        assert bool(outcome.cut[0]) != (name in WHOLE), f"{outcome}; WHOLE in outcomes.py has what stays whole"
