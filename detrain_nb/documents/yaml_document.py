"""Documents in YAML, by the core schema of version 1.2: ``no`` is a string, and nothing creates an object.

Only the library's parser and emitter are used, which know no types. Tags, anchors, aliases and merge keys are refused,
so that a document means what it shows, and is as large as it looks.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from ..errors import SpecError
from ..storage import shown
from .content import MOST_LEVELS, MOST_VALUES, TOO_DEEP, TOO_MANY, float_text, say_twice, write_visible

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NOT_IN_YAML = re.compile("[^\t\n\r -~\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_TAGS = re.compile("^%TAG", re.MULTILINE)  # the library needs quadratic time for many
_PLAIN = re.compile(r"[A-Za-z0-9_./~](?:[A-Za-z0-9_./~@+=,()*-]| (?=[A-Za-z0-9_./~]))*")
_NULL = re.compile("|~|null|Null|NULL")
_BOOL = re.compile("true|True|TRUE|false|False|FALSE")
_INT = re.compile("[-+]?[0-9]+")
_LEADING_ZERO = re.compile("[-+]?0[0-9]+")
_BASED = re.compile("0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NO_NUMBER = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
# What only Kubernetes' YAML parser in Go reads as a boolean, a number or a date.
_OF_GO = re.compile("[yYnN]|0[xXoObB].*|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*")
_IS_TEXT = "tag:yaml.org,2002:str"


@dataclass
class _Open:
    """A list or mapping that is still open."""

    content: list[Any] | dict[str, Any]
    key: str | None = None

    def put(self, value: Any, event: Any) -> None:
        if isinstance(self.content, list):
            self.content.append(value)
        elif self.key is not None:
            self.content[self.key], self.key = value, None
        elif type(value) is not str:
            raise _fault_at(event, "a key is not a string: quote it")
        elif value == "<<" and event.implicit[0]:
            raise _fault_at(event, "merge keys are refused: write out the merged keys")
        elif value in self.content:
            raise _fault_at(event, say_twice(value))
        else:
            self.key = value


def read(text: str) -> Any:
    """Parse a document. Raises: SpecError."""
    if wrong := _NOT_IN_YAML.search(text):
        line = text.count("\n", 0, wrong.start()) + 1
        raise SpecError(f"line {line}: {wrong[0]!r} is not allowed in YAML: escape it in a double-quoted string")
    if tags := _TAGS.search(text):
        line = text.count("\n", 0, tags.start()) + 1
        raise SpecError(f"line {line}: %TAG directives are refused: remove them")
    documents: list[Any] = []
    opened = [_Open(documents)]
    num_values = 0
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            if isinstance(event, yaml.CollectionEndEvent):
                opened.pop()
            elif isinstance(event, yaml.NodeEvent):
                num_values += 1
                value = _make_value(event)
                opened[-1].put(value, event)
                if isinstance(event, yaml.CollectionStartEvent):
                    opened.append(_Open(value))
                if len(opened) - 1 > MOST_LEVELS + 1:
                    raise _fault_at(event, TOO_DEEP)
                if num_values > 2 * MOST_VALUES:  # keys included
                    raise _fault_at(event, TOO_MANY)
            elif isinstance(event, yaml.DocumentStartEvent) and documents:
                raise _fault_at(event, "a second document begins: the file must hold one")
    except yaml.MarkedYAMLError as exc:
        raise _fault_at(exc, shown(exc.problem or exc.context or "invalid YAML")) from None
    return documents[0] if documents else None


def _fault_at(what: Any, fault: str) -> SpecError:
    mark = getattr(what, "start_mark", None) or what.problem_mark or what.context_mark
    return SpecError(f"line {mark.line + 1}, column {mark.column + 1}: {fault}" if mark else fault)


def _make_value(event: Any) -> Any:
    if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
        raise _fault_at(event, "anchors and aliases are refused: write the value out")
    if event.tag is not None:
        raise _fault_at(event, f"the tag {shown(repr(event.tag), most=60)} is refused: remove it")
    if isinstance(event, yaml.SequenceStartEvent):
        return []
    if isinstance(event, yaml.MappingStartEvent):
        return {}
    if event.implicit[0] and _LEADING_ZERO.fullmatch(event.value):  # octal by version 1.1, decimal by 1.2
        raise _fault_at(event, "a number with a leading 0 is ambiguous: remove the 0, or quote it")
    return _resolve(event.value) if event.implicit[0] else event.value


def _resolve(text: str) -> Any:
    """Return the value of a plain scalar by the core schema of YAML 1.2."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NO_NUMBER.fullmatch(text):
        return float(text.replace(".", ""))  # check_values refuses it, with its place
    return text


def write(value: object) -> str:
    stream = [yaml.StreamStartEvent(), yaml.DocumentStartEvent(explicit=False)]
    stream += [*_events(value), yaml.DocumentEndEvent(explicit=False), yaml.StreamEndEvent()]
    return write_visible(yaml.emit(stream, allow_unicode=True, width=sys.maxsize))


def _events(value: Any) -> Iterator[Any]:
    if type(value) is dict:
        yield yaml.MappingStartEvent(None, None, True, flow_style=not value)
        for key, item in value.items():
            yield _scalar(key, is_key=True)
            yield from _events(item)
        yield yaml.MappingEndEvent()
    elif type(value) in (list, tuple):
        is_short = all(type(item) in (int, float) for item in value)
        yield yaml.SequenceStartEvent(None, None, True, flow_style=is_short)
        for item in value:
            yield from _events(item)
        yield yaml.SequenceEndEvent()
    else:
        yield _scalar(value)


def _scalar(value: Any, *, is_key: bool = False) -> Any:
    if type(value) is not str:
        text = float_text(value) if type(value) is float else json.dumps(value)
        return yaml.ScalarEvent(None, None, (True, False), text)
    if _PLAIN.fullmatch(value) and _is_text_everywhere(value):
        return yaml.ScalarEvent(None, None, (True, True), value)  # the emitter puts ... in quotes
    lines = value.split("\n")
    is_block = not is_key and len(lines) > 1 and all(line.isprintable() for line in lines)
    return yaml.ScalarEvent(None, None, (False, True), value, style="|" if is_block else '"')


def _is_text_everywhere(text: str) -> bool:
    """Return whether every parser reads a plain scalar as a string.

    In YAML 1.1 ``no`` is a boolean and ``1:30`` a number; for Kubernetes ``y`` is a boolean.
    """
    plain = text.replace("_", "")
    if _INT.fullmatch(plain) or _FLOAT.fullmatch(plain) or _OF_GO.fullmatch(text):  # int() limits the number of digits
        return False
    return type(_resolve(text)) is str and (
        yaml.resolver.Resolver().resolve(yaml.ScalarNode, text, (True, False)) == _IS_TEXT
    )
