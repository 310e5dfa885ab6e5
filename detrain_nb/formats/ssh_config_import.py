"""The hosts of an ssh_config as nodes, with their options, unless it is the user's own, which connections read anyway.

No other file is read, no command in it is run, and no name is resolved.
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
from .imported import MOST_NODES, Foreign, Imported, Importer

__all__ = ["SSH_CONFIG"]

_IS_ONE = re.compile(r"^[ \t]*+host(?:[ \t]++|[ \t]*+=[ \t]*+)\S", re.MULTILINE | re.IGNORECASE)
_LINE = re.compile(r"(\w++)(?:[ \t]*+=[ \t]*+|[ \t]++)(.*)", re.ASCII)
_WORD = re.compile(r'"([^"]*+)"|([^\s"]++)')
_JUMP = re.compile(r"ssh[ \t]++(?:-q[ \t]++)?-W[ \t]++(?:%h|\[%h\]):%p[ \t]++([^\s-]\S*+)")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*+")
_FIELDS = {"hostname": "host", "user": "user", "port": "port"}
_FIELDS |= {"identityfile": "identity_file", "proxyjump": "proxy_jump"}
_NO_FIELD = "nodes have no field for it"
_MOST_PATTERNS, _MOST_CHARS = 1000, 253  # _MOST_CHARS: of each pattern
_MOST_KEYS = 10  # that are reported
_MOST_VALUE_CHARS = 4096  # of an option, which may apply to thousands of hosts
_MOST_LOOKS = 100_000  # matches of a pattern with a host


@dataclass
class _Block:
    """The options under one Host line, or at the top of the file, and the hosts that they apply to."""

    patterns: list[str]
    options: dict[str, str] = field(default_factory=dict)  # the first value of each applies, as in ssh
    more_keys: list[str] = field(default_factory=list)  # further keys, which ssh tries after the first

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
    blocks, left_out, unused = _take_apart(foreign)
    hosts = list(dict.fromkeys(name for block in blocks for name in block.patterns if _NAME.fullmatch(name)))
    patterns = [pattern for block in blocks if block.has_patterns for pattern in block.patterns]
    if not hosts:
        raise SpecError(put_place(foreign.name, "has no hosts: give Host and a name"))
    if len(hosts) > MOST_NODES or len(patterns) > _MOST_PATTERNS or len(hosts) * len(patterns) > _MOST_LOOKS:
        raise SpecError(put_place(foreign.name, "has too many hosts or host patterns: give fewer"))
    if long := [pattern for pattern in patterns if len(pattern) > _MOST_CHARS]:
        fault = f"Host {shown(long[0], most=60)}...: a pattern has at most {_MOST_CHARS} characters"
        raise SpecError(put_place(foreign.name, fault))
    if foreign.name == str(Path.home() / ".ssh" / "config"):
        nodes = [_make(foreign, {"host": host}) for host in hosts]
    else:
        nodes = [_make_node(foreign, host, found, left_out) for host, found in _find_options(blocks, hosts)]
        left_out |= dict.fromkeys([*_list_unmatched(patterns, hosts), *unused.values()])
    return Imported("ssh_config", nodes=tuple(nodes), left_out=tuple(left_out))


def _list_unmatched(patterns: list[str], hosts: list[str]) -> Iterator[str]:
    """Yield the patterns that match none of the hosts: their options are for hosts that the file does not name."""
    for pattern in patterns:
        if not pattern.startswith("!") and not any(_is_like(host, pattern) for host in hosts):
            yield f"Host {shown(pattern, most=60)}: matches no host of the file: add the hosts by name"


def _find_options(blocks: list[_Block], hosts: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each host with the options of all blocks that apply to it; the first value wins, as in ssh."""
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
            block = holding[number]
            keys = [key for key in (block.options.get("identityfile"), *block.more_keys) if key]
            options = {**block.options, **options, **{f"identityfile {key}": "" for key in keys}}
        options.pop(f"identityfile {options.get('identityfile')}", None)
        yield host, options


def _take_apart(foreign: Foreign) -> tuple[list[_Block], dict[str, None], dict[str, str]]:
    """Return the blocks, the lines that are not read, and the options that nodes do not have."""
    blocks = [_Block(["*"])]
    left_out: dict[str, None] = {}  # each once, as there may be thousands of hosts
    unused: dict[str, str] = {}
    for key, value in _lines(foreign.text):
        if key == "host":
            blocks.append(_Block([quoted or plain for quoted, plain in _WORD.findall(value)]))
        elif key == "match" and value.lower() == "all":
            blocks.append(_Block(["*"]))
        elif key == "match":
            left_out[f"Match {shown(value, most=60)}: is not evaluated, so its options are not read"] = None
            blocks.append(_Block([]))
        elif key == "include":
            left_out[f"Include {shown(value, most=60)}: import that file, too"] = None
        else:
            if key == "proxycommand" and (jump := _JUMP.fullmatch(value)):
                key, value = "proxyjump", jump[1]
            if key not in _FIELDS and key != "proxycommand":
                unused[key] = f"{shown(key, most=60)}: {_NO_FIELD}"
                continue
            value = value.strip('"')
            if len(value) > _MOST_VALUE_CHARS:
                fault = f"{key} {shown(value, most=60)}...: give at most {_MOST_VALUE_CHARS:,} characters"
                raise SpecError(put_place(foreign.name, fault))
            if blocks[-1].options.setdefault(key, value) != value and key == "identityfile":
                blocks[-1].more_keys = [*blocks[-1].more_keys[: _MOST_KEYS - 1], value]
    return blocks, left_out, unused


def _lines(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if (match := _LINE.fullmatch(line.strip())) and match[2]:
            yield match[1].lower(), match[2].partition(" #")[0].strip()


def _make_node(foreign: Foreign, host: str, options: dict[str, str], left_out: dict[str, None]) -> Node:
    fields: dict[str, object] = {"name": host, "host": host}
    for key, value in options.items():
        if key == "hostname" and len(value) <= _MOST_CHARS:
            value = value.replace("%h", host)
        if key not in _FIELDS or "%" in value:
            reason = "write it as ProxyJump" if key == "proxycommand" else _NO_FIELD
            reason = "a node has only one key" if key.startswith("identityfile ") else reason
            left_out[f"{key}: {reason}"] = None
        elif key != "proxyjump" or value.lower() != "none":
            fields[_FIELDS[key]] = int(value) if key == "port" and re.fullmatch("[0-9]{1,9}", value) else value
    return _make(foreign, fields)


def _make(foreign: Foreign, fields: dict[str, object]) -> Node:
    try:
        return Node(**fields)  # type: ignore[arg-type]  # the model checks them
    except SpecError as exc:
        name = shown(str(fields.get("name", fields["host"])), most=60)
        where = f"Host {name}: {str(exc).splitlines()[0]}"
        raise SpecError(put_place(foreign.name, where)) from None


SSH_CONFIG = Importer(_is_one, _read, "an ssh_config: its hosts as nodes")
