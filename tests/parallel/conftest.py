"""Fixtures shared by the tests in this folder."""

from __future__ import annotations

import pytest


@pytest.fixture
def few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure costs in as few passes as possible, for tests that do not check them."""
    monkeypatch.setattr("detrain_nb.parallel.costs.measuring._ENOUGH_S", 0.0)
