"""The base of all models of a spec: frozen, strict, and an error with one line for each invalid field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ..errors import FieldError, FieldFault, SpecError
from ..plan.fields import nearest
from ..storage import has_password
from ..text import printable, show

# These fields may hold a secret, or a long value.
_NOT_SHOWN = {"setup", "env", "arguments", "script_text", "secrets", "token", "url", "ref", "nodes"}
_MOST_SHOWN = 60
_MOST_FAULTS = 50  # of one model


class SpecModel(BaseModel):
    """A part of a spec; the description of a field says what to give, and errors are built from it.

    Raises: FieldError, a SpecError that has every fault.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True, allow_inf_nan=False)

    if not TYPE_CHECKING:  # a type checker sees the fields

        def __init__(self, /, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as exc:
                found = exc.errors(include_url=False)  # thousands, for a document of another kind
                faults = [each for fault in found[:_MOST_FAULTS] for each in _read_fault(type(self), fault)]
                more = [FieldFault("", f": and {len(found) - _MOST_FAULTS} more")] if len(found) > _MOST_FAULTS else []
                raise FieldError([*faults, *more]) from None

        def __setattr__(self, name: str, value: object) -> None:
            if name in type(self).model_fields:
                raise SpecError(
                    f"{name} cannot be set: a spec is frozen; get a changed copy from a PipelineSpec's with_overrides, "
                    'as in spec.with_overrides({"training.steps": 100})'
                )
            super().__setattr__(name, value)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_empty(cls, fields: object) -> object:
        """Drop tables and lists whose lines are all comments, which are None in YAML."""
        if not isinstance(fields, Mapping):
            return fields
        for name, value in fields.items():
            check_names(value, name)
        kinds = {name: type(field.default) for name, field in cls.model_fields.items()}
        return {name: value for name, value in fields.items() if value is not None or not _is_many(kinds.get(name))}

    def to_fields(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as a document has them."""
        return self.model_dump(mode="json", exclude_defaults=True)


def check_names(value: object, path: str = "") -> None:
    """Check that tables, also in a list, have text keys, which YAML and Python do not ensure. Raises: FieldError."""
    items: Iterable[tuple[int | str, object]] = enumerate(value) if isinstance(value, list | tuple) else [("", value)]
    for place, table in items:
        if isinstance(table, Mapping) and (wrong := [name for name in table if not isinstance(name, str)]):
            where = path if place == "" else f"{path}[{place}]"
            raise FieldError([FieldFault(where, f": the name {show(wrong[0])} is not a text: put it in quotes")])


def may_show(field: str, value: object) -> bool:
    """Return whether a message may show the value of a field: it is short and cannot hold a secret."""
    return field not in _NOT_SHOWN and not (isinstance(value, str) and has_password(value))


def _is_many(kind: type | None) -> bool:
    return kind is not None and issubclass(kind, BaseModel | tuple | dict)


def describe_field(model: type[BaseModel], field: str) -> str:
    """Return what to give for a field."""
    return model.model_fields[field].description or ""


def _read_fault(model: type[BaseModel], fault: Mapping[str, Any]) -> list[FieldFault]:
    """Return what is wrong with which field, and what to give; a field that is a model reports its own faults."""
    loc, error = fault["loc"], fault.get("ctx", {}).get("error", "")
    if not loc:
        return [*error.faults] if isinstance(error, FieldError) else [FieldFault("", f": {error}")]
    field, path = str(loc[0]), _name_place(model, loc)
    if isinstance(error, FieldError):
        return [each.below(path) for each in error.faults]
    if fault["type"] == "extra_forbidden":
        return [FieldFault(path, f" is not a field: {nearest(field, model.model_fields)}")]
    if fault["type"] == "missing":
        advice = f"give {describe_field(model, field)}"
        return [FieldFault(path, f" is missing: {advice}", advice)]
    value = f" {show(fault['input'])}" if may_show(field, fault["input"]) else ""
    advice = str(error) or f"give {describe_field(model, field)}{_say_slip(fault)}"
    return [FieldFault(path, f"{value}: {advice}", advice)]


def _say_slip(fault: Mapping[str, Any]) -> str:
    """Return a hint when a value may have become another type than it looks."""
    given = fault["input"]
    if fault["type"] == "string_type" and isinstance(given, int | float):  # as YAML reads it
        return "; put a number or true in quotes"
    return "; the comma after it makes it a tuple" if isinstance(given, tuple) and len(given) == 1 else ""


def _name_place(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    """Return a field's path, with the index in a list or the key in a table, without the types that pydantic tried."""
    field, *inner = loc
    path = printable(str(field))[:_MOST_SHOWN]
    if inner and isinstance(inner[0], int):
        return f"{path}[{inner[0]}]"
    if inner and field in model.model_fields and get_origin(model.model_fields[str(field)].annotation) is dict:
        return f"{path}.{printable(str(inner[0]))[:_MOST_SHOWN]}"
    return path
