"""What a look at a spec has found: each with its field, and whether the job can start all the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..errors import FieldError

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """``field`` is a path as ``training.epochs``, or empty where it is about the whole."""

    field: str
    text: str
    severity: Severity = "error"

    def __str__(self) -> str:
        return f"{'warning: ' if self.severity == 'warning' else ''}{self.told}"

    @property
    def told(self) -> str:
        """Where it is, and what: for whoever says by other means how bad it is."""
        return f"{self.field}: {self.text}" if self.field else self.text


def findings_of(error: ValueError, *, field: str = "") -> list[Finding]:
    """The faults of an error, each with its field; ``field`` is the one of an error that has none."""
    if isinstance(error, FieldError):
        return [Finding(each.path, each.said.removeprefix(":").strip()) for each in error.faults]
    return [Finding(field, str(error))]


def worst(findings: Iterable[Finding]) -> Severity | None:
    """``error`` where there is one, None where nothing was found."""
    kinds = {each.severity for each in findings}
    return "error" if "error" in kinds else "warning" if kinds else None
