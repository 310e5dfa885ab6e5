"""What the tests of this room share."""

from __future__ import annotations

import pytest


@pytest.fixture
def few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are measured in as few passes as can be, for tests that do not look at them."""
    monkeypatch.setattr("detrain_nb.parallel.costs.measuring._ENOUGH_S", 0.0)
