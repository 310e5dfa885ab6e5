"""The facts that a host reports about itself.

None of them is trusted: types, ranges, counts and lengths are limited, control characters are removed from texts.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import TransportError
from ..text import printable

__all__ = [
    "Disk",
    "Fault",
    "Folder",
    "Gpu",
    "Gpus",
    "HostFacts",
    "Limited",
    "Logout",
    "Said",
    "Torch",
    "read_addresses",
]

_MOST_TEXT = 200
_MOST_ITEMS = 64
_MOST_BYTES_OF_ANYTHING = 1 << 62

T = TypeVar("T")


@dataclass(frozen=True)
class Fault:
    """The reason why a fact of a host could not be determined."""

    text: str


@dataclass(frozen=True)
class Disk:
    path: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Gpu:
    """One GPU; ``users`` has a text for every process that computes on it."""

    name: str
    total_bytes: int
    used_bytes: int
    users: tuple[str, ...]


@dataclass(frozen=True)
class Gpus:
    """All GPUs; ``cuda`` is the newest version that the driver supports, ``visible`` is CUDA_VISIBLE_DEVICES."""

    gpus: tuple[Gpu, ...]
    driver: str
    cuda: str
    visible: str


@dataclass(frozen=True)
class Torch:
    """Versions; empty means missing. That of NCCL is also empty when NCCL is built into torch."""

    version: str
    cuda: str
    nccl: str


@dataclass(frozen=True)
class Folder:
    """The folder for our code on the host, and its state; ``other`` is the fallback when it cannot be used."""

    path: str
    state: str
    other: str
    other_state: str


@dataclass(frozen=True)
class Limited:
    """Memory in bytes, or processors: the machine's total, the free part, and the limit of the cgroups."""

    total: float
    free: float
    limit: float | None


@dataclass(frozen=True)
class Logout:
    """Whether logging out ``user`` kills detached processes; with ``lingers``, those in scopes survive."""

    kills: bool
    lingers: bool
    user: str


@dataclass(frozen=True)
class HostFacts:
    """The facts that a host reports about itself; the values are valid but not trusted."""

    host: str
    system: str
    python: str
    python_version: tuple[int, int, int]
    descriptors: int  # the limit of open files of a process
    reached_at: str
    torch: Torch | Fault
    ipython: str | Fault
    gpus: Gpus | Fault
    home: Disk | Fault
    tmp: Disk | Fault
    shm: Disk | Fault
    folder: Folder | Fault
    memory: Limited | Fault
    processors: Limited | Fault
    addresses: tuple[tuple[str, str], ...] | Fault
    logout: Logout | Fault

    @classmethod
    def read(cls, answer: Mapping[str, Any]) -> HostFacts:
        """Read a host's answer. Raises: TransportError for an invalid field."""
        said = Said(answer)
        major, minor, micro = (int(number) for number in said.numbers("python_version", 3, most=999))
        return cls(
            host=said.text("host"),
            system=said.text("system"),
            python=said.text("python", most=1000),
            python_version=(major, minor, micro),
            descriptors=int(said.number("descriptors")),
            reached_at=said.text("reached_at"),
            torch=said.part("torch", lambda part: Torch(part.text("version"), part.text("cuda"), part.text("nccl"))),
            ipython=said.part("ipython", lambda part: part.text("version")),
            gpus=said.part("gpus", _read_gpus),
            home=said.part("home", _read_disk),
            tmp=said.part("tmp", _read_disk),
            shm=said.part("shm", _read_disk),
            folder=said.part("folder", _read_folder),
            memory=said.part("memory", lambda part: _read_limited(part, "available")),
            processors=said.part("processors", lambda part: _read_limited(part, "usable", total="count")),
            addresses=said.part("addresses", read_addresses),
            logout=said.part("logout", _read_logout),
        )


class Said:
    """A JSON object from a host, read field by field. Raises: TransportError for an invalid field."""

    def __init__(self, fields: object) -> None:
        if not isinstance(fields, dict):
            raise TransportError("the host's answer is invalid: it is not an object")
        self._fields = fields

    def text(self, name: str, *, most: int = _MOST_TEXT) -> str:
        value = self._fields.get(name)
        if not isinstance(value, str):
            raise self._complain(name)
        return printable(value[:most], "")

    def number(self, name: str, *, low: float = 0.0, most: float = _MOST_BYTES_OF_ANYTHING) -> float:
        return self._check(name, self._fields.get(name), low, most)

    def numbers(self, name: str, count: int, *, low: float = 0.0, most: float) -> list[float]:
        values = self._fields.get(name)
        if not isinstance(values, list) or len(values) != count:
            raise self._complain(name)
        return [self._check(name, value, low, most) for value in values]

    def flag(self, name: str) -> bool:
        value = self._fields.get(name)
        if not isinstance(value, bool):
            raise self._complain(name)
        return value

    def items(self, name: str, read: Callable[[Said], T], *, count: int | None = None) -> list[T]:
        values = self._fields.get(name)
        if not isinstance(values, list) or not (len(values) <= _MOST_ITEMS if count is None else len(values) == count):
            raise self._complain(name)
        return [read(Said(value)) for value in values]

    def part(self, name: str, read: Callable[[Said], T]) -> T | Fault:
        """Read an object in the field ``name`` with ``read``, or the fault that the host reports there."""
        part = Said(self._fields.get(name))
        return Fault(part.text("error")) if "error" in part._fields else read(part)

    def has(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def _check(self, name: str, value: object, low: float, most: float) -> float:
        if type(value) not in (int, float) or not low <= value <= most:  # type: ignore[operator]  # a bool is an int
            raise self._complain(name)
        return value  # type: ignore[return-value]

    def _complain(self, name: str) -> TransportError:
        return TransportError(f"the host's answer is invalid: field {name} is missing or malformed")


def _read_gpus(said: Said) -> Gpus:
    visible = said.text("visible", most=1000)  # a UUID has 40 characters
    return Gpus(tuple(said.items("gpus", _read_gpu)), said.text("driver"), said.text("cuda"), visible)


def _read_gpu(said: Said) -> Gpu:
    return Gpu(
        said.text("name"),
        int(said.number("total")),
        int(said.number("used")),
        tuple(said.items("users", _describe_user)),
    )


def _describe_user(said: Said) -> str:
    user, command = said.text("user", most=32), said.text("command", most=32)
    who = f"{user}: {command}" if user else "another container"
    return f"{who} (pid {said.number('pid'):.0f}, {said.number('used') / 1e9:.1f} GB)"


def _read_disk(said: Said) -> Disk:
    return Disk(said.text("path", most=1000), int(said.number("total")), int(said.number("free")))


def _read_folder(said: Said) -> Folder:
    path, other = said.text("path", most=1000), said.text("other", most=1000)
    return Folder(path, said.text("state"), other, said.text("other_state"))


def _read_logout(said: Said) -> Logout:
    return Logout(said.flag("kills"), said.flag("lingers"), said.text("user", most=32))


def _read_limited(said: Said, free: str, *, total: str = "total") -> Limited:
    return Limited(said.number(total), said.number(free), said.number("limit") if said.has("limit") else None)


def read_addresses(said: Said) -> tuple[tuple[str, str], ...]:
    found = said._fields.get("addresses")
    if not isinstance(found, list) or len(found) > 256:
        raise TransportError("the host's answer is invalid: field addresses is missing or malformed")
    pairs = []
    for entry in found:
        try:
            name, address = entry
            said = Said({"name": name, "address": address})
            pairs.append((said.text("name", most=32), str(ipaddress.ip_address(said.text("address")))))
        except (ValueError, TypeError):
            raise TransportError("the host's answer is invalid: field addresses has an invalid address") from None
    return tuple(pairs)
