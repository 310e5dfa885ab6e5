"""The spec that a line of a magic names, with the fields that the line sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import SpecError

if TYPE_CHECKING:
    from ..spec import Finding, PipelineSpec

__all__ = ["SPEC", "file_of", "read_spec", "show_findings"]

SPEC = "a .json, .toml or .yaml file, its URL, or a variable; or a script, .py"


def read_spec(ipython: Any, where: str, fields: Sequence[str] = ()) -> PipelineSpec:
    """The spec in a variable of the notebook, in a file or at a URL; ``fields`` as `take_fields` gives them.

    Raises: SpecError.
    """
    from ..spec import PipelineSpec  # pydantic takes its time

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
    """Its path or URL; None for what `read_spec` takes from a variable: no file of a spec is without a suffix."""
    return None if where.isidentifier() else where


def show_findings(findings: Sequence[Finding], where: str) -> None:
    """Print what was found in the spec that the line names as ``where``. Raises: SpecError with what is an error."""
    errors = [str(each) for each in findings if each.severity == "error"]
    for each in findings:
        if each.severity != "error":
            print(each)
    if errors:
        raise SpecError("\n".join(errors))
    if not findings:
        print(f"{where}: nothing is wrong with it")
