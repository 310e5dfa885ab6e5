"""Nodes as they are written down: a file in TOML or JSON, or ``alice@gpu1,gpu2:2222`` on a command line.

    [defaults]            # what holds for every node that does not say otherwise
    user = "alice"

    [[nodes]]
    host = "gpu1"

    [[nodes]]
    host = "gpu2"
    devices = [0, 1]

In JSON: ``{"defaults": {...}, "nodes": [{...}, {...}]}``, or the list alone.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..guarded import can_others_write
from ..storage import replace_file
from .node import OF_HOSTS, THIS_MACHINE, Node, default_name, describe_twice_here, parse_target

_SUFFIXES = (".toml", ".json")
_LIMIT_BYTES = 1_000_000
_MOST_FAULTS = 20
_MOST_DOTS = 20  # in a key: TOML's parser takes memory and time by the square of its parts
# Of TOML: what may have dots and is no key, what stands between keys, a dot.
_TOKEN = re.compile(
    r"""\"{3}(?:[^\\]|\\.?)*?(?:"{3,5}|\Z)|'{3}.*?(?:'{3,5}|\Z)|"(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?|\#[^\n]*|[\n=,.]""",
    re.DOTALL,
)
_TOML_FAULT = re.compile(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", re.DOTALL)


def parse_nodes(text: str) -> tuple[Node, ...]:
    """Read nodes from a command line: ``[user@]host[:port]`` with commas between them, or the path of a nodes file.

    A path is what ends in .toml or .json or has a slash. A host that stands there with several ports gives nodes that
    are named host-port. Raises: SpecError.
    """
    text = text.strip()
    if text.lower().endswith(_SUFFIXES) or any(slash in text for slash in {"/", os.sep}):
        return read_nodes(Path(text).expanduser())
    try:
        targets = [parse_target(part.strip()) for part in text.split(",")]
    except SpecError as exc:
        raise SpecError(f"nodes {text!r}: {exc}") from None
    times = Counter(target.host for target in targets)
    nodes: list[Node] = []
    faults: list[str] = []
    for target in targets:
        name = default_name(target.host)
        if times[target.host] > 1 and target.port:
            name += f"-{target.port}"
        try:
            nodes.append(Node(host=target.host, user=target.user, port=target.port, name=name))
        except SpecError as exc:
            faults += [f"{line}; a nodes file can name it" for line in str(exc).splitlines()]
    _refuse(faults or _find_twins(nodes, advice=_PORTS_APART), where=f"nodes {text!r}")
    return tuple(nodes)


def read_nodes(path: str | os.PathLike[str]) -> tuple[Node, ...]:
    """Read a nodes file, TOML or JSON by its suffix, in the layout above. Raises: SpecError with one line per fault."""
    is_toml = _is_toml(path)
    text = _read_text(Path(path))
    if is_toml:
        _refuse_long_key(text, where=path)
    try:
        content = tomllib.loads(text) if is_toml else json.loads(text, object_pairs_hook=_refuse_twice)
        json.dumps(content, default=str)  # TOML takes a number in hexadecimal that no message of ours could show
    except RecursionError:
        raise SpecError(f"{path}: nested too deeply for a nodes file") from None
    except ValueError as exc:
        raise SpecError(f"{path}: {_describe_syntax(exc)}") from None
    tables, defaults, faults = _take_apart(content)
    _refuse(faults, where=path)
    _refuse(_build({"host": "any", **defaults})[1], where=f"{path}, defaults")
    nodes: list[Node] = []
    for number, table in enumerate(tables, 1):
        node, lines = _build({**_defaults_for(table, defaults), **table})
        faults += [f"{_label(number, table)}: {line}" for line in lines]
        nodes += [node] if node else []
    _refuse(faults or _find_twins(nodes, advice=_NAMES_APART), where=path)
    return tuple(nodes)


def write_nodes(
    path: str | os.PathLike[str], nodes: Iterable[Node], *, before: str | os.PathLike[str] | None = None
) -> bool:
    """Write a nodes file, TOML or JSON by its suffix, that `read_nodes` reads as equal nodes; whole or not at all.

    It takes the place of an earlier file, whose comments and ``[defaults]`` are gone; ``before``: where that is kept,
    if it has any. Returns whether it was kept. Raises: SpecError.
    """
    is_toml, is_kept = _is_toml(path), False
    nodes = tuple(nodes)
    _refuse(_find_twins(nodes, advice=_NAMES_APART) if nodes else ["no nodes to write"], where=path)
    text = _dump(nodes, is_toml=is_toml)
    target = Path(path)
    try:
        if not can_others_write(target.parent.stat(), target.parent):  # else the link may be theirs
            target = Path(os.path.realpath(path))
        earlier = "" if before is None else _read_text(target)
        if before is not None and earlier != _dump(read_nodes(target), is_toml=is_toml):
            replace_file(Path(before), earlier, mode=target.stat().st_mode)
            is_kept = True
        replace_file(target, text)
    except OSError as exc:
        raise SpecError(f"{path}: cannot be written: {exc.strerror}") from exc
    return is_kept


def _dump(nodes: Iterable[Node], *, is_toml: bool) -> str:
    tables = [_list_fields(node) for node in nodes]
    return "\n".join(map(_dump_toml, tables)) if is_toml else _dump_json({"nodes": tables}, indent=2) + "\n"


def _is_toml(path: str | os.PathLike[str]) -> bool:
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise SpecError(f"{path}: a nodes file ends in {' or '.join(_SUFFIXES)}")
    return suffix == ".toml"


def _read_text(path: Path) -> str:
    if path.exists() and not path.is_file():  # a pipe would keep us waiting
        raise SpecError(f"{path}: is no file: give the path of a nodes file")
    try:
        with path.open("rb") as file:
            data = file.read(_LIMIT_BYTES + 1)
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file, looked for in {path.absolute().parent}") from None
    except OSError as exc:
        raise SpecError(f"{path}: cannot be read: {exc.strerror}") from exc
    except ValueError:  # a NUL
        raise SpecError(f"{str(path)!r}: no such file") from None
    if len(data) > _LIMIT_BYTES:
        raise SpecError(f"{path}: larger than {_LIMIT_BYTES // 1_000_000} MB: this is no nodes file")
    try:
        return data.decode("utf-8-sig")  # editors on Windows put a mark in front
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise SpecError(f"{path}: line {line}: is not UTF-8: save the file as UTF-8") from None


def _refuse_long_key(text: str, *, where: object) -> None:
    num_dots = 0
    for token in _TOKEN.finditer(text):
        if token[0] in ("\n", "=", ","):
            num_dots = 0
        elif token[0] == ".":
            num_dots += 1
        if num_dots > _MOST_DOTS:
            line = text.count("\n", 0, token.start()) + 1
            raise SpecError(f"{where}: line {line}: a key has more than {_MOST_DOTS} dots: this is no nodes file")


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """As TOML does: JSON's reader lets the last one win."""
    twice = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} stands twice in one object: leave out one")
    return dict(pairs)


def _describe_syntax(error: ValueError) -> str:
    """Put the place first: ``line 3, column 5: expected '=' after a key``."""
    if isinstance(error, json.JSONDecodeError):
        place, text = f"line {error.lineno}, column {error.colno}", error.msg
    elif match := _TOML_FAULT.fullmatch(str(error)):
        place, text = f"line {match[2]}, column {match[3]}" if match[2] else "at its end", match[1]
    elif str(error).startswith("Exceeds the limit"):
        return "a number has too many digits"
    else:
        return str(error)
    return f"{place}: {text[:1].lower()}{text[1:]}"


def _take_apart(content: object) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """Return the tables of the nodes, the defaults, and what is wrong with the layout."""
    if isinstance(content, list):
        content = {"nodes": content}
    if not isinstance(content, dict):
        return [], {}, ["give a list of nodes"]
    tables, defaults = content.get("nodes"), content.get("defaults", {})
    faults = [f"{name!r}: there are only nodes and defaults" for name in content if name not in {"nodes", "defaults"}]
    if not isinstance(defaults, dict):
        faults.append("defaults: give a table of fields, in TOML below [defaults]")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        faults.append("nodes: give a list with at least one node, in TOML below [[nodes]] for each")
    return tables, defaults, faults  # type: ignore[return-value]


def _defaults_for(table: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Those that say how hosts are reached, and where things are there, do not hold for this machine."""
    is_here = table.get("host", defaults.get("host")) == THIS_MACHINE
    return {name: value for name, value in defaults.items() if not (is_here and name in OF_HOSTS)}


def _build(fields: Mapping[str, Any]) -> tuple[Node | None, list[str]]:
    try:
        return Node(**fields), []
    except SpecError as exc:
        return None, str(exc).splitlines()


def _label(number: int, table: Mapping[str, Any]) -> str:
    known = [text for text in (table.get("name"), table.get("host")) if isinstance(text, str) and text.isprintable()]
    return f"node {number} ({known[0]})" if known else f"node {number}"


_PORTS_APART = "leave out one, or give each a port of its own"
_NAMES_APART = "give each a name of its own; one machine is named once, with ranks = N for several ranks"


def _find_twins(nodes: Sequence[Node], *, advice: str) -> list[str]:
    if twice := describe_twice_here(nodes):
        return [twice]
    numbers: dict[str, list[str]] = {}
    for number, node in enumerate(nodes, 1):
        numbers.setdefault(node.name, []).append(str(number))
    twins = {name: " and ".join(found) for name, found in numbers.items() if len(found) > 1}
    return [f"nodes {found} have the same name {name!r}: {advice}" for name, found in twins.items()]


def _refuse(faults: list[str], *, where: object) -> None:
    """Raise one SpecError for ``faults``, each with ``where`` it is; no faults, no error."""
    if faults:
        more = [f"and {len(faults) - _MOST_FAULTS} more"] if len(faults) > _MOST_FAULTS else []
        raise SpecError("\n".join([f"{where}: {fault}" for fault in faults[:_MOST_FAULTS]] + more))


def _list_fields(node: Node) -> dict[str, Any]:
    fields = node.model_dump(exclude_defaults=True)
    if node.name == default_name(node.host):
        del fields["name"]
    return fields


def _dump_json(value: object, *, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _dump_toml(table: Mapping[str, Any]) -> str:
    """What a node has, texts without control characters, numbers and lists of them, TOML writes as JSON does."""
    return "\n".join(["[[nodes]]", *(f"{name} = {_dump_json(value)}" for name, value in table.items()), ""])
