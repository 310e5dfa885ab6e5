"""A spec as the Python that builds and submits it, for a notebook cell in place of a form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from ..spec import PipelineSpec

__all__ = ["write_code"]

_MOST_CHARS = 100  # of a line that can be broken
_INDENT = "    "


def write_code(spec: PipelineSpec) -> str:
    """Write Python for a cell that builds an equal spec, submits it and shows the job."""
    fields = spec.to_dict()
    script = fields.get("source", {}).get("script_text", "")
    before = ""
    names = {"PipelineSpec"}
    if _has_lines(script):
        before = f'script = """\\\n{script}"""\n\n'
        fields["source"]["script_text"] = _Name("script")
    built = _call(PipelineSpec, fields, "", names, before="spec = ")
    imports = f"from detrain_nb.jobs import submit\nfrom detrain_nb.spec import {', '.join(sorted(names))}\n\n"
    return f"{imports}{before}spec = {built}\njob = submit(spec)\njob\n"


class _Name(str):
    """The name of a variable, in place of a value."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _has_lines(text: str) -> bool:
    """Return whether a text has several lines, and fits between triple quotes unchanged."""
    lines = text.split("\n")
    is_plain = all(line.isprintable() for line in lines) and '"""' not in text and "\\" not in text
    return len(lines) > 1 and is_plain and not text.endswith('"')


def _call(model: type[BaseModel], fields: dict[str, Any], indent: str, names: set[str], *, before: str = "") -> str:
    names.add(model.__name__)
    inside = indent + _INDENT
    arguments = [f"{name}={_value(model, name, value, inside, names)}" for name, value in fields.items()]
    return _bracket(f"{model.__name__}(", arguments, ")", indent, begins=len(before))


def _value(model: type[BaseModel], name: str, value: Any, indent: str, names: set[str]) -> str:
    inner = next(_models_in(model.model_fields[name].annotation), None)
    if inner is not None and isinstance(value, dict):
        return _call(inner, value, indent, names, before=f"{name}=")
    if inner is not None and isinstance(value, list):
        items = [_call(inner, each, indent + _INDENT, names) for each in value]
        return _bracket("[", items, "]", indent, begins=len(name) + 1)
    if isinstance(value, list | tuple):
        return _bracket("[", [repr(each) for each in value], "]", indent, begins=len(name) + 1)
    if isinstance(value, dict):
        return _bracket("{", [f"{key!r}: {each!r}" for key, each in value.items()], "}", indent, begins=len(name) + 1)
    return repr(value)


def _bracket(opening: str, items: list[str], closing: str, indent: str, *, begins: int) -> str:
    """Write the items on one line if they fit, else one per line."""
    line = f"{opening}{', '.join(items)}{closing}"
    if "\n" not in line and len(indent) + begins + len(line) < _MOST_CHARS:
        return line
    rows = "".join(f"{indent}{_INDENT}{item},\n" for item in items)
    return f"{opening}\n{rows}{indent}{closing}"


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind
