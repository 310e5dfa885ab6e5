"""What all models of a spec share: frozen, strict, and an error with one line for each field that cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ..errors import FieldError, FieldFault, SpecError
from ..plan.fields import nearest
from ..storage import has_password
from ..text import printable, show

# A secret may stand there, or it is long.
_NOT_SHOWN = {"setup", "env", "arguments", "script_text", "secrets", "token", "url", "ref", "nodes"}
_MOST_SHOWN = 60
_MOST_FAULTS = 50  # of one model


class SpecModel(BaseModel):
    """A part of a spec; the description of a field says what to give, and the errors are made of it.

    Raises: FieldError, a SpecError that has every fault.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True, allow_inf_nan=False)

    if not TYPE_CHECKING:  # a type checker sees the fields

        def __init__(self, /, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as exc:
                found = exc.errors(include_url=False)  # thousands, where it is a document of another kind
                faults = [each for fault in found[:_MOST_FAULTS] for each in _read_fault(type(self), fault)]
                more = [FieldFault("", f": and {len(found) - _MOST_FAULTS} more")] if len(found) > _MOST_FAULTS else []
                raise FieldError([*faults, *more]) from None

        def __setattr__(self, name: str, value: object) -> None:
            if name in type(self).model_fields:
                raise SpecError(
                    f"{name} cannot be set: a spec is frozen; with_overrides of a PipelineSpec gives another one, "
                    'as spec.with_overrides({"training.steps": 100})'
                )
            super().__setattr__(name, value)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_empty(cls, fields: object) -> object:
        """A table or a list whose lines are all comments is None in YAML: it is as if it were not there."""
        if not isinstance(fields, Mapping):
            return fields
        for name, value in fields.items():
            check_names(value, name)
        kinds = {name: type(field.default) for name, field in cls.model_fields.items()}
        return {name: value for name, value in fields.items() if value is not None or not _is_many(kinds.get(name))}

    def to_fields(self) -> dict[str, Any]:
        """Return what is not as by default, as a document has it."""
        return self.model_dump(mode="json", exclude_defaults=True)


def check_names(value: object, path: str = "") -> None:
    """Raises: FieldError where a table, or one in a list, has a name that is no text, as Python's own can."""
    items: Iterable[tuple[int | str, object]] = enumerate(value) if isinstance(value, list | tuple) else [("", value)]
    for place, table in items:
        if isinstance(table, Mapping) and (wrong := [name for name in table if not isinstance(name, str)]):
            where = path if place == "" else f"{path}[{place}]"
            raise FieldError([FieldFault(where, f": the name {show(wrong[0])} is no text: put it in quotes")])


def may_show(field: str, value: object) -> bool:
    """Whether a message may have the value of a field of that name: no secret can stand there, and it is short."""
    return field not in _NOT_SHOWN and not (isinstance(value, str) and has_password(value))


def _is_many(kind: type | None) -> bool:
    return kind is not None and issubclass(kind, BaseModel | tuple | dict)


def describe_field(model: type[BaseModel], field: str) -> str:
    """What to give for it."""
    return model.model_fields[field].description or ""


def _read_fault(model: type[BaseModel], fault: Mapping[str, Any]) -> list[FieldFault]:
    """Say what is wrong with which field, and what to give. A field that is a model itself tells its own faults."""
    loc, error = fault["loc"], fault.get("ctx", {}).get("error", "")
    if not loc:
        return [*error.faults] if isinstance(error, FieldError) else [FieldFault("", f": {error}")]
    field, path = str(loc[0]), _name_place(model, loc)
    if isinstance(error, FieldError):
        return [each.below(path) for each in error.faults]
    if fault["type"] == "extra_forbidden":
        return [FieldFault(path, f" is no field: {nearest(field, model.model_fields)}")]
    if fault["type"] == "missing":
        advice = f"give {describe_field(model, field)}"
        return [FieldFault(path, f" is missing: {advice}", advice)]
    value = f" {show(fault['input'])}" if may_show(field, fault["input"]) else ""
    advice = str(error) or f"give {describe_field(model, field)}{_say_slip(fault)}"
    return [FieldFault(path, f"{value}: {advice}", advice)]


def _say_slip(fault: Mapping[str, Any]) -> str:
    """How a value may have become one of another type than it looks."""
    given = fault["input"]
    if fault["type"] == "string_type" and isinstance(given, int | float):  # as YAML reads it
        return "; a number or true stands in quotes"
    return "; a comma behind it makes a tuple of it" if isinstance(given, tuple) and len(given) == 1 else ""


def _name_place(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    """Of a list the position, of a table the key; the kinds that pydantic tried are none of the user's."""
    field, *inner = loc
    path = printable(str(field))[:_MOST_SHOWN]
    if inner and isinstance(inner[0], int):
        return f"{path}[{inner[0]}]"
    if inner and field in model.model_fields and get_origin(model.model_fields[str(field)].annotation) is dict:
        return f"{path}.{printable(str(inner[0]))[:_MOST_SHOWN]}"
    return path
