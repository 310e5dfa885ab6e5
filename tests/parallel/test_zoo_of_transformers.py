"""The zoo's models of transformers, tested as test_zoo.py tests those written by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .zoo.cases import cases, require_expected
from .zoo.everything import OF_TRANSFORMERS
from .zoo.trials import Trials

pytestmark = pytest.mark.timeout(300)  # as in test_zoo.py


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    with Trials() as started:
        yield started


@pytest.mark.parametrize("name, layout", list(cases(OF_TRANSFORMERS)))
def test_model_is_right_or_refused_with_a_reason(trials: Trials, name: str, layout: str) -> None:
    require_expected(trials, name, layout)
