"""The hosts of an ssh_config as nodes: of the user's own, how they are reached stays there; of another it is copied.

No other file is read, no command of it is run, and no name is looked up.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from ..documents.content import put_place
from ..errors import SpecError
from ..spec import Node
from ..storage import shown
from .command_import import MOST_NODES
from .imported import Foreign, Imported, Importer

__all__ = ["SSH_CONFIG"]

_IS_ONE = re.compile(r"^[ \t]*+host(?:[ \t]++|[ \t]*+=[ \t]*+)\S", re.MULTILINE | re.IGNORECASE)
_LINE = re.compile(r"(\w++)(?:[ \t]*+=[ \t]*+|[ \t]++)(.*)", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*+")
_FIELDS = {"hostname": "host", "user": "user", "port": "port"}
_FIELDS |= {"identityfile": "identity_file", "proxyjump": "proxy_jump"}
_MOST_PATTERNS, _MOST_CHARS = 1000, 253  # characters of each
_MOST_LOOKS = 100_000  # at a pattern, for a host


@dataclass
class _Block:
    """What stands below one Host line, or at the top, and for which hosts."""

    patterns: list[str]
    options: dict[str, str] = field(default_factory=dict)  # the first of each name holds, as in ssh
    unused: list[str] = field(default_factory=list)  # options that are none of a node

    @property
    def has_patterns(self) -> bool:
        return any(not _NAME.fullmatch(pattern) for pattern in self.patterns)

    def holds_for(self, host: str) -> bool:
        if any(_is_like(host, pattern[1:]) for pattern in self.patterns if pattern.startswith("!")):
            return False
        return any(_is_like(host, pattern) for pattern in self.patterns)


def _is_like(host: str, pattern: str) -> bool:
    return _compile(pattern).match(host) is not None


@lru_cache(maxsize=_MOST_PATTERNS)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(pattern.replace("[", "[[]")))


def _is_one(foreign: Foreign) -> bool:
    return not foreign.suffix and bool(_IS_ONE.search(foreign.text))


def _read(foreign: Foreign) -> Imported:
    blocks, left_out = _take_apart(foreign.text)
    hosts = list(dict.fromkeys(name for block in blocks for name in block.patterns if _NAME.fullmatch(name)))
    patterns = [pattern for block in blocks if block.has_patterns for pattern in block.patterns]
    if not hosts:
        raise SpecError(put_place(foreign.name, "names no host: give Host and a name"))
    if len(hosts) > MOST_NODES or len(patterns) > _MOST_PATTERNS or len(hosts) * len(patterns) > _MOST_LOOKS:
        raise SpecError(put_place(foreign.name, "has too many hosts, or patterns of hosts: give fewer"))
    if long := [pattern for pattern in patterns if len(pattern) > _MOST_CHARS]:
        fault = f"Host {shown(long[0], most=60)}...: a pattern has at most {_MOST_CHARS} characters"
        raise SpecError(put_place(foreign.name, fault))
    if foreign.name == str(Path.home() / ".ssh" / "config"):
        nodes = [_make(foreign, {"host": host}) for host in hosts]
    else:
        left_out += [f"{key}: {_reason_of(key)}" for block in blocks for key in block.unused]
        nodes = [_make_node(foreign, host, found, left_out) for host, found in _find_options(blocks, hosts)]
    return Imported("ssh_config", nodes=tuple(nodes), left_out=tuple(dict.fromkeys(left_out)))


def _find_options(blocks: list[_Block], hosts: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each host with what all blocks say that hold for it; of several the first, as in ssh."""
    by_name: dict[str, dict[int, _Block]] = {host: {} for host in hosts}
    patterns: dict[int, _Block] = {}
    for number, block in enumerate(blocks):
        if block.has_patterns:
            patterns[number] = block
            continue
        for name in block.patterns:
            by_name[name][number] = block
    for host, own in by_name.items():
        holding = own | {number: block for number, block in patterns.items() if block.holds_for(host)}
        options: dict[str, str] = {}
        for number in sorted(holding):
            options = {**holding[number].options, **options}
        yield host, options


def _take_apart(text: str) -> tuple[list[_Block], list[str]]:
    blocks = [_Block(["*"])]
    left_out: list[str] = []
    for key, value in _lines(text):
        if key == "host":
            blocks.append(_Block([word.strip('"') for word in value.split()]))
        elif key == "match":
            left_out.append(f"Match {shown(value, most=60)}: is not decided here: what stands below it is not read")
            blocks.append(_Block([]))
        elif key == "include":
            left_out.append(f"Include {shown(value, most=60)}: import that file, too")
        elif key in _FIELDS:
            blocks[-1].options.setdefault(key, value.strip('"'))
        else:
            blocks[-1].unused.append(key)
    return blocks, left_out


def _lines(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if (match := _LINE.fullmatch(line.strip())) and match[2]:
            yield match[1].lower(), match[2].partition(" #")[0].strip()


def _make_node(foreign: Foreign, host: str, options: dict[str, str], left_out: list[str]) -> Node:
    fields: dict[str, object] = {"name": host, "host": host}
    for key, value in options.items():
        if key == "hostname":
            value = value.replace("%h", host)
        if "%" in value:
            left_out.append(f"{key}: {_reason_of(key)}")
        elif key != "proxyjump" or value.lower() != "none":
            fields[_FIELDS[key]] = int(value) if key == "port" and re.fullmatch("[0-9]{1,9}", value) else value
    return _make(foreign, fields)


def _reason_of(key: str) -> str:
    return "write it as ProxyJump" if key == "proxycommand" else "nodes have no field for it"


def _make(foreign: Foreign, fields: dict[str, object]) -> Node:
    try:
        return Node(**fields)  # type: ignore[arg-type]  # the model checks them
    except SpecError as exc:
        where = f"Host {fields.get('name', fields['host'])}: {str(exc).splitlines()[0]}"
        raise SpecError(put_place(foreign.name, where)) from None


SSH_CONFIG = Importer(_is_one, _read, "an ssh_config: its hosts as nodes")
