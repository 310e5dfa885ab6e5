"""Selects which of many cases `make test` runs; the others are slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["one_in"]


def one_in(step: int, cases: Iterable[Any]) -> list[Any]:
    """Return ``cases`` of one value each; all but the first of every ``step`` are marked slow."""
    return [pytest.param(case, marks=() if n % step == 0 else pytest.mark.slow) for n, case in enumerate(cases)]
