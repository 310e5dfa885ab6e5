"""The spec that the line of a magic names, with the fields that the line sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import SpecError

if TYPE_CHECKING:
    from ..spec import Finding, PipelineSpec

__all__ = ["SPEC", "file_of", "read_spec", "show_findings"]

SPEC = "a .json, .toml or .yaml file, its URL, a variable, or a Python script"


def read_spec(ipython: Any, where: str, fields: Sequence[str] = ()) -> PipelineSpec:
    """Load a spec from a variable of the notebook, a file or a URL; ``fields`` are those of `take_fields`.

    Raises: SpecError.
    """
    from ..spec import PipelineSpec  # pydantic is slow to import

    named = ipython.user_ns.get(where) if ipython is not None and where.isidentifier() else None
    if named is not None and not isinstance(named, PipelineSpec):
        raise SpecError(f"the variable {where} is of type {type(named).__name__}, not PipelineSpec")
    try:
        spec = named or PipelineSpec.load(where)
    except SpecError:
        from ..formats.importing import explain_no_spec

        if said := explain_no_spec(where):
            raise SpecError(said) from None
        raise
    return spec.with_overrides(PipelineSpec.parse_overrides(fields))


def file_of(where: str) -> str | None:
    """Return the path or URL; None where `read_spec` takes a variable, as files of specs have a suffix."""
    return None if where.isidentifier() else where


def show_findings(findings: Sequence[Finding], where: str) -> None:
    """Print the findings of the spec ``where``. Raises: SpecError with those that are errors."""
    errors = [str(each) for each in findings if each.severity == "error"]
    for each in findings:
        if each.severity != "error":
            print(each)
    if errors:
        raise SpecError("\n".join(errors))
    if not findings:
        print(f"{where}: no faults found")
