"""What a look at a spec has found: each with its field, and whether the job can start all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import FieldError, SpecError

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """``field`` is a path as ``training.epochs``, or empty where it is about the whole."""

    field: str
    text: str
    severity: Severity = "error"

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        return f"{'warning: ' if self.severity == 'warning' else ''}{where}{self.text}"


def findings_of(error: ValueError, *, field: str = "") -> list[Finding]:
    """The faults of an error, each with its field; ``field`` is the one of an error that has none."""
    if isinstance(error, FieldError):
        return [Finding(each.path, each.said.removeprefix(":").strip()) for each in error.faults]
    return [Finding(field, str(error))]


def worst(findings: Iterable[Finding]) -> Severity | None:
    """``error`` where there is one, None where nothing was found."""
    kinds = {each.severity for each in findings}
    return "error" if "error" in kinds else "warning" if kinds else None


def ask_nodes_by(check: Callable[[Any], list[Finding]]) -> None:
    """Have ``check`` ask the nodes of a spec: what reaches them stands above this room, and says so when imported."""
    _asks_nodes.append(check)


def check_with_nodes(spec: Any) -> list[Finding]:
    """Return what is wrong with a spec, as its nodes are now, too. Raises: SpecError."""
    if not _asks_nodes:
        raise SpecError("nodes are asked by detrain_nb.jobs: import that first")
    return _asks_nodes[-1](spec)


_asks_nodes: list[Callable[[Any], list[Finding]]] = []
