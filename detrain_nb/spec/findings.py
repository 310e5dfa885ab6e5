"""The findings of a check of a spec: each with its field, and whether the job can start anyway."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..errors import FieldError

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """A fault of a spec, or a warning. ``field`` is a path such as ``training.epochs``, or empty for the whole spec."""

    field: str
    text: str
    severity: Severity = "error"

    def __str__(self) -> str:
        return f"{'warning: ' if self.severity == 'warning' else ''}{self.told}"

    @property
    def told(self) -> str:
        """The field and the text, without the severity."""
        return f"{self.field}: {self.text}" if self.field else self.text


def findings_of(error: ValueError, *, field: str = "") -> list[Finding]:
    """Return the faults of an error, each with its field; ``field`` is for an error that has none."""
    if isinstance(error, FieldError):
        return [Finding(each.path, each.said.removeprefix(":").strip()) for each in error.faults]
    return [Finding(field, str(error))]


def worst(findings: Iterable[Finding]) -> Severity | None:
    """Return ``error`` if there is one, else ``warning``, or None without findings."""
    kinds = {each.severity for each in findings}
    return "error" if "error" in kinds else "warning" if kinds else None
