"""The texts that are typed for nodes, the nodes that they stand for, and what is wrong with each text.

Texts stay, right or wrong. `spec.Node` alone decides what a field may be, and has its title and its hint.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ..errors import FieldError, SpecError
from ..session.output.safe_output import one_line
from ..spec.node import Node
from ..spec.nodes_file import find_twins
from ..text import count_of

__all__ = ["FIELDS", "Checked", "Draft", "Field", "check"]

Kind: TypeAlias = Literal["text", "whole", "number", "list", "lines", "choice"]

MOST_TEXT = 20_000  # characters of a field
_WHOLE = re.compile(r"[+-]?\d{1,15}")
_NUMBER = re.compile(r"[+-]?(?:\d{1,15}(?:\.\d{0,15})?|\.\d{1,15})(?:[eE][+-]?\d{1,3})?")
_ids = itertools.count(1)


@dataclass(frozen=True)
class Field:
    """A field of a node: how it is called, what to give, and how its text is read."""

    name: str
    title: str
    hint: str
    kind: Kind
    is_needed: bool
    default: str
    choices: tuple[str, ...] = ()

    def read(self, text: str) -> Any:
        """What a person means by ``text``; what cannot be stays as it is, and the node says so."""
        if self.kind == "lines":
            return text
        text = text.strip()
        if self.kind == "list":
            return re.split(r"[\s,]+", text.strip(", "))
        if self.kind == "choice" and text not in self.choices:
            parts = re.split(r"[\s,]+", text.strip("[], "))
            return [int(part) for part in parts] if all(map(_WHOLE.fullmatch, parts)) else text
        if self.kind == "whole" and _WHOLE.fullmatch(text):
            return int(text)
        return float(text) if self.kind == "number" and _NUMBER.fullmatch(text) else text

    def write(self, value: Any) -> str:
        """The text that is read as ``value``."""
        if isinstance(value, list | tuple):
            return ("\n" if self.kind == "lines" else ", ").join(map(str, value))
        return str(value)


def _fields() -> dict[str, Field]:
    """Those of `Node`, by its schema."""
    schema = Node.model_json_schema()
    found = {}
    for name, about in schema["properties"].items():
        kinds = [about, *about.get("anyOf", [])]
        types = {each.get("type") for each in kinds}
        choices = tuple(choice for each in kinds for choice in each.get("enum", ()))
        default = about.get("default")
        found[name] = Field(
            name,
            about["title"],
            about.get("description", ""),
            _kind(types, has_choices=bool(choices)),
            name in schema.get("required", ()),
            default if isinstance(default, str) else "",
            choices,
        )
    return found


def _kind(types: set[str | None], *, has_choices: bool) -> Kind:
    if has_choices:
        return "choice"
    if "array" in types:
        return "lines" if "string" in types else "list"
    return "whole" if "integer" in types else "number" if "number" in types else "text"


FIELDS: dict[str, Field] = _fields()


@dataclass
class Draft:
    """One node of a form. ``changed``: the revision at which each field changed last.

    ``other``: texts that another page has typed without having seen that change, by field.
    """

    texts: dict[str, str] = field(default_factory=dict)
    id: int = field(default_factory=lambda: next(_ids))
    changed: dict[str, int] = field(default_factory=dict)
    other: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, node: Node) -> Draft:
        return cls({name: FIELDS[name].write(value) for name, value in node.to_fields().items()})

    def copy(self) -> Draft:
        """Another one, whose name is to come from its host: two nodes have two names."""
        return Draft({name: text for name, text in self.texts.items() if name != "name"})

    def build(self) -> Node:
        """Raises: SpecError with what is wrong."""
        return Node(**{name: FIELDS[name].read(text) for name, text in self.texts.items() if text.strip()})

    @property
    def label(self) -> str:
        """What it is called, however wrong that is."""
        name = self.texts.get("name", "").strip() or self.texts.get("host", "").strip()
        return one_line(name, most_chars=80) or "new node"

    @property
    def where(self) -> str:
        """``user@host:port``, as it was typed."""
        user, host, port = (self.texts.get(name, "").strip() for name in ("user", "host", "port"))
        text = f"{user}@{host}" if user else host
        return one_line(f"{text}:{port}" if port else text, most_chars=200)

    @property
    def offers(self) -> str:
        """Its devices and ranks, in a few words."""
        node = _built(self)
        if node is None:
            return ""
        gpus = count_of(len(node.devices), "GPU") if isinstance(node.devices, tuple) else ""
        number = num_ranks(node)
        ranks = count_of(number, "rank") if number else "default ranks"
        return f"{gpus or node.devices}, {ranks}"


def num_ranks(node: Node) -> int | None:
    """How many ranks it has, where the node says it."""
    return node.ranks or (len(node.devices) if isinstance(node.devices, tuple) else None)


def _built(draft: Draft) -> Node | None:
    try:
        return draft.build()
    except SpecError:
        return None


@dataclass(frozen=True)
class Checked:
    """What the model says of drafts. ``nodes``: a node for each draft, None where it cannot be one.

    ``errors``: what is wrong with each draft, by field; "" is the whole node. ``twins``: what is wrong with several.
    """

    nodes: tuple[Node | None, ...]
    errors: tuple[Mapping[str, str], ...]
    twins: tuple[str, ...]


def check(drafts: Sequence[Draft]) -> Checked:
    """Have the model judge all of them."""
    nodes: list[Node | None] = []
    errors: list[Mapping[str, str]] = []
    for draft in drafts:
        try:
            nodes.append(draft.build())
            errors.append({})
        except SpecError as exc:
            nodes.append(None)
            errors.append(_by_field(exc))
    there = [node for node in nodes if node is not None]
    twins = find_twins(there) if len(there) == len(nodes) else []
    return Checked(tuple(nodes), tuple(errors), tuple(one_line(line) for line in twins))


def _by_field(error: SpecError) -> dict[str, str]:
    """The first fault of each field."""
    found: dict[str, str] = {}
    if not isinstance(error, FieldError):
        return {"": one_line(str(error))}
    for fault in error.faults:
        name = re.split(r"[.\[]", fault.path)[0]
        said = fault.advice or fault.said.removeprefix(":").strip()
        found.setdefault(name if name in FIELDS else "", one_line(said))
    return found


def describe_faults(drafts: Iterable[Draft], checked: Checked) -> list[str]:
    """A line for each fault: the node, the field, what to give."""
    lines = [
        f"{draft.label}, {FIELDS[name].title}: {said}" if name else f"{draft.label}: {said}"
        for draft, errors in zip(drafts, checked.errors)
        for name, said in errors.items()
    ]
    return [*lines, *checked.twins]
