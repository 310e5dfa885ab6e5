"""A document of another tool, read part by part into a spec: unused values are reported, faults have their place.

whole = Whole(foreign)
form = whole.part("state").part("form")
form.carry("epochs", "training.epochs")      # the spec validates it; a fault has the place in the file
form.leave("wallet", "a spec has no owner")
return whole.imported("detrain")             # reports everything that was neither carried nor left
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import Any

from ..documents.content import put_place
from ..errors import FieldError, SpecError
from ..plan.names import make_name
from ..spec import Node, PipelineSpec
from ..spec.nodes_file import find_twins
from ..storage import shown
from ..text import show
from .imported import Foreign, Imported

NO_FIELD = "a spec has no field for it"
_MOST = 10**12
_MOST_PLACE_CHARS = 400
_STEP = re.compile(r"[^.\[\]]+")

Steps = tuple[str | int, ...]


class Part:
    """A table in a document; a missing one is empty. None counts as missing."""

    def __init__(self, whole: Whole, table: Mapping[str, Any], steps: Steps = ()) -> None:
        self.whole, self.steps = whole, steps
        self._table = {key: value for key, value in table.items() if value is not None}

    def __contains__(self, key: str) -> bool:
        return key in self._table

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    @property
    def path(self) -> str:
        """The place of the table, such as ``state.nodes[0]``."""
        return write_steps(self.steps)

    def part(self, key: str) -> Part:
        """Return the table of that name. Raises: SpecError when the value is not a table."""
        value = self._table.get(key, {})
        if not isinstance(value, dict):
            raise self.fault(key, f"{_show(value)}: give a table of names and values")
        return Part(self.whole, value, (*self.steps, key))

    def parts(self, key: str) -> list[Part]:
        """Return the tables in the list of that name. Raises: SpecError when the value is not a list of tables."""
        value = self._table.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.fault(key, f"{_show(value)}: give a list of tables")
        return [Part(self.whole, item, (*self.steps, key, index)) for index, item in enumerate(value)]

    def look(self, key: str) -> Any:
        """Return the value, of any type, without marking it as used."""
        return self._table.get(key)

    def take(self, key: str) -> Any:
        """Return the value, of any type, and mark it as used."""
        self.whole.used.add((*self.steps, key))
        return self._table.get(key)

    def text(self, key: str, default: str = "") -> str:
        """Return a string, and mark it as used. Raises: SpecError."""
        return self._only(key, default, str, "a text")  # type: ignore[no-any-return]

    def texts(self, key: str) -> list[str]:
        """Return a list of strings, or a single string as a list, and mark it as used. Raises: SpecError."""
        value = self._only(key, [], (str, list), "a list of texts")
        if not all(isinstance(item, str) for item in value):
            raise self.fault(key, f"{_show(value)}: give a list of texts")
        return [value] if isinstance(value, str) else value

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean, and mark it as used. Raises: SpecError."""
        return self._only(key, default, bool, "true or false")  # type: ignore[no-any-return]

    def whole_number(self, key: str, default: int = 0, *, least: int = 0, most: int = _MOST) -> int:
        """Return a whole number, and mark it as used. Raises: SpecError."""
        value = self._only(key, default, int, advice := f"a whole number, {least} to {most:,}")
        if key in self and not least <= value <= most:
            raise self.fault(key, f"{value}: give {advice}")
        return value  # type: ignore[no-any-return]

    def need(self, *keys: str) -> None:
        """Check that keys are present. Raises: SpecError for the first that is missing."""
        for key in keys:
            if key not in self:
                raise self.fault(key, "is missing")

    def carry(self, key: str, field: str, value: Any = None) -> None:
        """Put the value, or the ``value`` made from it, into a field of the spec, such as nodes[0].host."""
        self.stands_for(key, field)
        if key in self:
            found = self.take(key)
            self.whole.put(field, found if value is None else value)

    def stands_for(self, key: str, field: str) -> None:
        """Report faults of that field of the spec at this place."""
        self.whole.origins[field] = (*self.steps, key)

    def leave(self, key: str, reason: str = NO_FIELD) -> None:
        """Report the value, with everything in it, as left out."""
        if key in self:
            self.whole.left[(*self.steps, key)] = reason

    def fault(self, key: str, said: str) -> SpecError:
        """Return the error for the value of a key."""
        return self.whole.fault((*self.steps, key), said)

    def _only(self, key: str, default: Any, kinds: Any, advice: str) -> Any:
        value = default if key not in self else self.take(key)
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise self.fault(key, f"{_show(value)}: give {advice}")
        return value


class Whole(Part):
    """A whole document, and the spec that is built from it. Raises: SpecError when the document is not a table."""

    def __init__(self, foreign: Foreign, content: Any = None) -> None:
        self.where, self.stem = foreign.name, foreign.stem
        content = foreign.content if content is None else content
        if not isinstance(content, dict):
            raise SpecError(put_place(self.where, f"{_show(content)}: give a table of names and values"))
        self.content: dict[str, Any] = content
        self.fields: dict[str, Any] = {}
        self.used: set[Steps] = set()
        self.left: dict[Steps, str] = {}
        self.notes: list[str] = []  # what the document lacks but the spec needs
        self.origins: dict[str, Steps] = {}
        super().__init__(self, content)

    def put(self, field: str, value: Any) -> None:
        """Put a value into a field of the spec, such as nodes[0].host."""
        *above, last = [int(step) if step.isdigit() else step for step in _STEP.findall(field)]
        table: Any = self.fields
        for step, below in zip(above, [*above, last][1:], strict=True):
            if isinstance(table, list):
                table.extend({} for _ in range(int(step) + 1 - len(table)))
                table = table[int(step)]
            else:
                table = table.setdefault(step, [] if isinstance(below, int) else {})
        table[last] = value

    def name_after(self, text: str = "") -> str:
        """Return a name for the pipeline, derived from the text, else from the file name."""
        return make_name(text, default=make_name(self.stem, default="imported"))

    def fault(self, steps: Steps | str, said: str) -> SpecError:
        """Return the error for the value at a place."""
        path = write_steps(steps if isinstance(steps, tuple) else (steps,))
        return SpecError(put_place(self.where, put_place(path, said)))

    def imported(self, kind: str) -> Imported:
        """Build the spec, with the list of what was left out. Raises: SpecError with the place in the document."""
        try:
            spec = PipelineSpec.from_dict(self.fields)
        except FieldError as exc:
            raise SpecError("\n".join(self._tell(each.path, each.said) for each in exc.faults)) from None
        return Imported(kind, spec, left_out=self.list_left_out())

    def imported_nodes(self, kind: str) -> Imported:
        """Build only the nodes of ``fields``. Raises: SpecError with the place in the document."""
        nodes = []
        for index, table in enumerate(self.fields.get("nodes", [])):
            try:
                nodes.append(Node(**table))
            except FieldError as exc:
                lines = [self._tell(f"nodes[{index}].{each.path}", each.said) for each in exc.faults]
                raise SpecError("\n".join(lines)) from None
        if twins := find_twins(nodes):
            raise SpecError("\n".join(self._tell("nodes", f": {twin}") for twin in twins))
        return Imported(kind, nodes=tuple(nodes), left_out=self.list_left_out())

    def list_left_out(self) -> tuple[str, ...]:
        """Return the notes, and a line per reason with the places left out, in the order of the document."""
        return (*self.notes, *name_places(self._walk(self.content, (), "")))

    def _walk(self, value: Any, steps: Steps, place: str) -> Iterator[tuple[str, str]]:
        if steps in self.left:
            yield place, self.left[steps]
        elif steps in self.used or value is None:
            return
        elif isinstance(value, dict) and value:
            for key, item in value.items():
                yield from self._walk(item, (*steps, key), write_step(place, key))
        elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
            for index, item in enumerate(value):
                yield from self._walk(item, (*steps, index), write_step(place, index))
        else:
            yield place, NO_FIELD

    def _tell(self, field: str, said: str) -> str:
        """Return a fault of the spec at the place of its value in the document, or else at the field."""
        ends = [len(field), *reversed([match.start() for match in re.finditer(r"[.\[]", field)])]
        found = next((field[:end] for end in ends if field[:end] in self.origins), "")
        path = f"{write_steps(self.origins[found])}{field[len(found) :]}" if found else field
        return put_place(self.where, f"{path}{said}" if path else said.removeprefix(": "))


def name_places(found: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for each reason, with its places."""
    places: dict[str, list[str]] = {}
    for place, reason in found:
        places.setdefault(reason, []).append(place)
    yield from (f"{', '.join(some)}: {reason}" for reason, some in places.items())


def write_steps(steps: Steps) -> str:
    """Return a place in a document as text, such as state.nodes[0]."""
    return reduce(write_step, steps, "")


def write_step(place: str, step: str | int) -> str:
    """Return the place one step below another; a long one is cut to its end, as there may be many below it."""
    place = place if len(place) <= _MOST_PLACE_CHARS else f"...{place[-_MOST_PLACE_CHARS // 2 :]}"
    if isinstance(step, int):
        return f"{place}[{step}]"
    return f"{place}.{shown(step, most=60)}" if place else shown(step, most=60)


def _show(value: Any) -> str:
    """Return a value of the wrong type as an error may show it: strings are hidden, as they may be secret."""
    if isinstance(value, str):
        return "a text"
    return {dict: "a table", list: "a list", type(None): "null"}.get(type(value)) or show(value)
