"""Host lists of Slurm and MPI as nodes: ``gpu[01-04,07]``, ``gpu1 slots=8`` or ``gpu1:8``, one per line."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..documents.content import put_place
from ..errors import SpecError
from ..spec import Node
from ..storage import shown
from .imported import MOST_NODES, Foreign, Imported, Importer
from .reading import NO_FIELD

__all__ = ["HOSTFILE", "expand_hosts"]

_MOST_SLOTS = 1024
_MOST_CHARS = 253  # of a host name
_MOST_TIMES = 500_000  # mentions of hosts in all
_LINE = re.compile(r"(\S++)((?:[ \t]++[A-Za-z_][\w-]*+[ \t]*+=[ \t]*+[^\s=]++)*+)[ \t]*+")
_HOSTS = re.compile(r"(?:\w++@)?(?:[\w.-]|\[[\d,-]++\])++(?:,(?:[\w.-]|\[[\d,-]++\])++)*+(?::\d++)?", re.ASCII)
_GIVES_SLOTS = re.compile(r"\S++[ \t]++slots=\d")
_SETTING = re.compile(r"([\w-]++)[ \t]*+=[ \t]*+(\S++)")
_PIECE = re.compile(r"[^,\[\]]++|\[[^\[\]]*+\]|,")
_NUMBERS = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?", re.ASCII)


def expand_hosts(text: str) -> list[str]:
    """Expand a Slurm host list, such as ``gpu[01-04,07],login1``; too long a list is refused before it is built.

    Raises: SpecError.
    """
    found: list[str] = []
    names, end = [""], 0
    for piece in _PIECE.finditer(text):
        if piece.start() != end:
            break
        end = piece.end()
        if piece[0] == ",":
            found += names
            names = [""]
            continue
        if len(piece[0]) > _MOST_CHARS and piece[0][0] != "[":
            raise SpecError(f"{shown(piece[0], most=60)}...: a host name has at most {_MOST_CHARS} characters")
        numbers = _expand_numbers(piece[0][1:-1]) if piece[0][0] == "[" else [piece[0]]
        if len(names) * len(numbers) + len(found) > MOST_NODES:
            raise _too_many(text)
        names = [name + number for name in names for number in numbers]
        if len(names[0]) > _MOST_CHARS:
            raise SpecError(f"{shown(names[0], most=60)}...: a host name has at most {_MOST_CHARS} characters")
    if end != len(text) or "" in (found := found + names):
        raise SpecError(f"{shown(repr(text), most=60)}: give hosts with commas, such as gpu[01-04,07],login1")
    return found


def _expand_numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _NUMBERS.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or last < first:
            raise SpecError(f"[{shown(text, most=60)}]: give numbers and ranges, such as [01-04,07]")
        if last - first + len(numbers) >= MOST_NODES:
            raise _too_many(f"[{text}]")
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return numbers


def _too_many(text: str) -> SpecError:
    return SpecError(f"{shown(text, most=60)}: has more than {MOST_NODES:,} hosts: give fewer")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if plain := line.partition("#")[0].strip():
            yield number, plain


def _is_one(foreign: Foreign) -> bool:
    """Recognize a host list: one line with slots is enough, as faults of the others are reported on reading."""
    if foreign.suffix or foreign.text.startswith("#!") or "#SBATCH" in foreign.text:
        return False
    lines = [line for _, line in _lines(foreign.text)]
    is_list = all((match := _LINE.fullmatch(line)) and _HOSTS.fullmatch(match[1]) for line in lines)
    return bool(lines) and (is_list or any(map(_GIVES_SLOTS.match, lines)))


def _read(foreign: Foreign) -> Imported:
    slots: dict[str, int] = {}
    has_slots: set[str] = set()
    left_out: dict[str, int] = {}
    times = 0
    for number, line in _lines(foreign.text):
        try:
            hosts, count, unused = _read_line(line)
            times += len(hosts)
            if times > _MOST_TIMES:
                raise SpecError(f"more than {_MOST_TIMES:,} mentions of hosts: give each once, with its slots")
            for host in hosts:
                slots[host] = slots.get(host, 0) + (count or 1)
                has_slots.update([host] if count or slots[host] > 1 else [])
                if slots[host] > _MOST_SLOTS:
                    raise SpecError(f"{shown(host, most=60)} has more than {_MOST_SLOTS:,} slots: give fewer")
            if len(slots) > MOST_NODES:
                raise _too_many(line)
        except SpecError as exc:
            raise SpecError(put_place(foreign.name, f"line {number}: {exc}")) from None
        for name in unused:
            left_out.setdefault(name, number)
    if not slots:
        raise SpecError(put_place(foreign.name, "has no hosts: give one per line"))
    nodes = [_make(foreign, host, slots[host] if host in has_slots else None) for host in slots]
    return Imported(
        "hostfile",
        nodes=tuple(nodes),
        left_out=tuple(f"{name} (line {number}): {NO_FIELD}" for name, number in left_out.items()),
    )


def _read_line(line: str) -> tuple[list[str], int, list[str]]:
    """Return the hosts of a line, the ranks of each (0: not given), and the names of its other settings."""
    match = _LINE.fullmatch(line)
    if match is None or not _HOSTS.fullmatch(match[1]):
        raise SpecError(f"{shown(repr(line), most=60)}: give a host, as in gpu1, gpu[01-04], gpu1 slots=8 or gpu1:8")
    text, colon, count = match[1].partition(":")
    settings = dict(_SETTING.findall(match[2]))
    count = settings.pop("slots", settings.pop("np", count))
    if count and (not re.fullmatch("[0-9]{1,9}", count) or not 1 <= int(count) <= _MOST_SLOTS):
        advice = "; if it is a port, give it in a nodes file" if colon else ""
        raise SpecError(f"{shown(count, most=60)} slots: give a number, 1 to {_MOST_SLOTS:,}{advice}")
    return expand_hosts(text), int(count or 0), list(settings)


def _make(foreign: Foreign, host: str, ranks: int | None) -> Node:
    user, _, name = host.rpartition("@")
    try:
        return Node(host=name, user=user or None, ranks=ranks)
    except SpecError as exc:
        raise SpecError(put_place(foreign.name, f"{shown(host, most=60)}: {str(exc).splitlines()[0]}")) from None


HOSTFILE = Importer(_is_one, _read, "a host list of Slurm or MPI")
