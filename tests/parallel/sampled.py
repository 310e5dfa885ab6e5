"""Which of many cases are tried by `make test`; the others are slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["one_in"]


def one_in(step: int, cases: Iterable[Any]) -> list[Any]:
    """``cases`` of one value each, of which the first of every ``step`` is quick."""
    return [pytest.param(case, marks=() if n % step == 0 else pytest.mark.slow) for n, case in enumerate(cases)]
