"""What a host says of itself, asked by a program on it (node/probe.py) over one connection.

Nothing that comes is trusted: types, ranges, counts and lengths have limits, texts lose their control characters.
"""

from __future__ import annotations

import ipaddress
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..errors import TransportError
from ..spec.node import Node
from ..transport.ssh import AskPassphrase, SshConnection
from .remote_program import RemoteProgram, connect_to

__all__ = [
    "Clock",
    "Disk",
    "Door",
    "Fault",
    "Folder",
    "Gpu",
    "Gpus",
    "HostFacts",
    "HostProbe",
    "Limited",
    "Torch",
    "Way",
]

_PROGRAM = Path(__file__).parent.parent / "node" / "probe.py"
_MAGIC = b"\ndetrain-nb probe 1\n"
_CONNECT_LIMIT_S = 8.0
_START_LIMIT_S = 10.0
_SETUP_LIMIT_S = 60.0  # `module load` of a cluster takes its time
_ANSWER_LIMIT_S = 10.0
_REACH_LIMIT_S = 6.0  # packets may be lost on the way, and are sent again after a second or three
_TRANSFER_LIMIT_S = 20.0
_CLOCK_ROUNDS = 8
_CLOCK_LIMIT_S = 0.5  # after which no further round begins
_LONG_ENOUGH_S = 0.5
_SETTLED_ROUND_TRIPS = 20
_SETTLED_GAIN = 1.25
_FIRST_BYTES = 1 << 16
_MOST_BYTES = 1 << 28
_CHUNK_BYTES = 1 << 20
_MOST_TEXT = 200
_MOST_BYTES_OF_ANYTHING = 1 << 62

T = TypeVar("T")


@dataclass(frozen=True)
class Fault:
    """Why something could not be found out there."""

    text: str


@dataclass(frozen=True)
class Disk:
    path: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Gpu:
    """``users`` has a text for every process that computes on it."""

    name: str
    total_bytes: int
    used_bytes: int
    users: tuple[str, ...]


@dataclass(frozen=True)
class Gpus:
    """``cuda`` is the newest that the driver takes, ``visible`` what CUDA_VISIBLE_DEVICES says."""

    gpus: tuple[Gpu, ...]
    driver: str
    cuda: str
    visible: str


@dataclass(frozen=True)
class Torch:
    """Versions; empty is none. NCCL's is empty too where it is built into torch."""

    version: str
    cuda: str
    nccl: str


@dataclass(frozen=True)
class Folder:
    """Where our code would live there, and what stands in the way of it; ``other`` is used where it cannot be."""

    path: str
    state: str
    other: str
    other_state: str


@dataclass(frozen=True)
class Limited:
    """Memory in bytes, or processors: what the machine has, what of it is free, what the cgroups allow."""

    total: float
    free: float
    limit: float | None


@dataclass(frozen=True)
class HostFacts:
    """What a host says of itself; it may say anything that fits."""

    host: str
    system: str
    python: str
    python_version: tuple[int, int, int]
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

    @classmethod
    def read(cls, answer: Mapping[str, Any]) -> HostFacts:
        """Raises: TransportError for what is not as it should be."""
        said = _Said(answer)
        major, minor, micro = (int(number) for number in said.numbers("python_version", 3, most=999))
        return cls(
            host=said.text("host"),
            system=said.text("system"),
            python=said.text("python", most=1000),
            python_version=(major, minor, micro),
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
            addresses=said.part("addresses", _read_addresses),
        )


@dataclass(frozen=True)
class Clock:
    """How far a host's clock is ahead of the notebook's, and what it took to ask."""

    offset_s: float
    uncertainty_s: float
    round_trip_s: float


@dataclass(frozen=True)
class Door:
    """Where a probe listens for those of the other hosts, who show that they have the token."""

    address: str
    port: int
    token: str = field(repr=False)

    def to_json(self) -> dict[str, object]:
        return {"address": self.address, "port": self.port, "token": self.token}


@dataclass(frozen=True)
class Way:
    """From one host to another; ``error`` is empty when it could be gone."""

    error: str
    round_trip_s: float = 0.0


class HostProbe:
    """One host: connected to, then asked. Used by one thread at a time.

    Every method that asks raises LaunchError when what it asks for failed there, TransportError when nothing more can
    be asked.
    """

    def __init__(
        self, node: Node, *, config_path: Path | None = None, ask_passphrase: AskPassphrase | None = None
    ) -> None:
        self.node = node
        self._config_path = config_path
        self._ask_passphrase = ask_passphrase
        self._connection: SshConnection | None = None
        self._started: RemoteProgram | None = None
        self._round_trip_s = 0.0

    def connect(self) -> SshConnection:
        """Connect and authenticate. Raises: TransportError, SpecError."""
        self._connection = connect_to(
            self.node,
            ask_passphrase=self._ask_passphrase,
            config_path=self._config_path,
            limit_s=_CONNECT_LIMIT_S,
        )
        return self._connection

    def look(self) -> HostFacts:
        """Start the program; what it sees."""
        assert self._connection is not None  # it was connected to
        self._started = RemoteProgram.start(
            _PROGRAM.read_text(encoding="utf-8"),
            magic=_MAGIC,
            node=self.node,
            connection=self._connection,
            limit_s=_SETUP_LIMIT_S if self.node.setup else _START_LIMIT_S,
        )
        return HostFacts.read(self._ask("look"))

    def compare_clocks(self) -> Clock:
        """The clock there against ours, by the quickest of a few questions: it was read somewhere on the way."""
        best = Clock(0.0, math.inf, math.inf)
        enough = time.monotonic() + _CLOCK_LIMIT_S
        for _ in range(_CLOCK_ROUNDS):
            asked, began = time.time(), time.perf_counter()
            there = _Said(self._ask("clock")).number("time", low=-1e12, most=1e12)
            round_trip_s = time.perf_counter() - began
            if round_trip_s < best.round_trip_s:
                self._round_trip_s = round_trip_s
                best = Clock(there - asked - round_trip_s / 2, round_trip_s / 2, round_trip_s)
            if time.monotonic() > enough:
                break
        return best

    def listen(self, address: str) -> Door:
        """Let the program listen on one address, on a port that the system picks, as long as it runs."""
        token = secrets.token_hex(32)
        port = _Said(self._ask("listen", address=address, token=token)).number("port", low=1, most=65535)
        return Door(address, int(port), token)

    def reach(self, doors: Sequence[Door]) -> list[Way]:
        """Let it connect to other hosts, all at once."""
        peers = [door.to_json() for door in doors]
        answer = _Said(self._ask("reach", peers=peers, within_s=_REACH_LIMIT_S))
        return answer.items("peers", _read_way, count=len(doors))

    def measure_rate(self, door: Door) -> float:
        """Bytes a second that arrive at another host, over one connection."""
        answer = self._ask("send", limit_s=_TRANSFER_LIMIT_S + 5.0, peer=door.to_json(), within_s=_TRANSFER_LIMIT_S)
        return _Said(answer).number("bytes_per_s", low=1e-3, most=1e15)

    def measure_rate_from_here(self) -> float:
        """Bytes a second that arrive there from the notebook, measured as between hosts (probe.py)."""
        deadline = time.monotonic() + _TRANSFER_LIMIT_S
        size, before = _FIRST_BYTES, 0.0
        while True:
            began = time.monotonic()
            try:
                said = self._send_bulk(size, deadline)
            except TransportError:
                self.close()
                raise
            now = time.monotonic()
            took_s = now - began
            seconds, counted = said.number("seconds", most=1e6), said.number("counted", most=size)
            rate = counted / seconds if counted and seconds else size / took_s
            has_settled = took_s > _SETTLED_ROUND_TRIPS * self._round_trip_s or rate < _SETTLED_GAIN * before
            is_over = now + 2 * took_s > deadline or size * 2 > _MOST_BYTES
            if is_over or (took_s >= _LONG_ENOUGH_S and has_settled):
                return rate
            size, before = size * 2, rate

    def _send_bulk(self, size: int, deadline: float) -> _Said:
        chunk = os.urandom(min(size, _CHUNK_BYTES))  # which nothing on the way can compress
        self._program.say(type="sink", size=size)
        for start in range(0, size, _CHUNK_BYTES):
            self._program.send(chunk[: size - start], limit_s=max(0.1, deadline - time.monotonic()))
        return _Said(self._program.hear("sink", limit_s=max(0.1, deadline - time.monotonic())))

    def fix(self) -> str:
        """Let it make our folder, or close it to others; what was done, empty when there was nothing to do."""
        return _Said(self._ask("fix")).text("done", most=1000)

    def close(self) -> None:
        """Hang up; the program there ends."""
        if self._started is not None:
            self._started.close()
        if self._connection is not None:
            self._connection.close()

    @property
    def _program(self) -> RemoteProgram:
        assert self._started is not None  # it has looked
        return self._started

    def _ask(self, kind: str, *, limit_s: float = _ANSWER_LIMIT_S, **fields: object) -> Mapping[str, Any]:
        try:
            self._program.say(type=kind, **fields)
            return self._program.hear(kind, limit_s=limit_s)
        except TransportError:  # a late answer would be taken for that to the next question
            self.close()
            raise


class _Said:
    """An object of JSON from there, read field by field. Raises: TransportError for what does not fit."""

    def __init__(self, fields: object) -> None:
        if not isinstance(fields, dict):
            raise TransportError("what it says of itself cannot be read")
        self._fields = fields

    def text(self, name: str, *, most: int = _MOST_TEXT) -> str:
        value = self._fields.get(name)
        if not isinstance(value, str):
            raise self._complain(name)
        return "".join(char for char in value[:most] if char.isprintable())

    def number(self, name: str, *, low: float = 0.0, most: float = _MOST_BYTES_OF_ANYTHING) -> float:
        return self._check(name, self._fields.get(name), low, most)

    def numbers(self, name: str, count: int, *, most: float) -> list[float]:
        values = self._fields.get(name)
        if not isinstance(values, list) or len(values) != count:
            raise self._complain(name)
        return [self._check(name, value, 0, most) for value in values]

    def items(self, name: str, read: Callable[[_Said], T], *, count: int | None = None, most: int = 64) -> list[T]:
        values = self._fields.get(name)
        if not isinstance(values, list) or len(values) > (most if count is None else count):
            raise self._complain(name)
        if count is not None and len(values) != count:
            raise self._complain(name)
        return [read(_Said(value)) for value in values]

    def part(self, name: str, read: Callable[[_Said], T]) -> T | Fault:
        """What ``read`` makes of an object in it, or why it could not be found out there."""
        part = _Said(self._fields.get(name))
        return Fault(part.text("error")) if "error" in part._fields else read(part)

    def has(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def _check(self, name: str, value: object, low: float, most: float) -> float:
        if type(value) not in (int, float) or not low <= value <= most:  # type: ignore[operator]  # a bool is an int
            raise self._complain(name)
        return value  # type: ignore[return-value]

    def _complain(self, name: str) -> TransportError:
        return TransportError(f"what it says of itself cannot be read: {name} is not as it should be")


def _read_gpus(said: _Said) -> Gpus:
    return Gpus(tuple(said.items("gpus", _read_gpu)), said.text("driver"), said.text("cuda"), said.text("visible"))


def _read_gpu(said: _Said) -> Gpu:
    return Gpu(
        said.text("name"),
        int(said.number("total")),
        int(said.number("used")),
        tuple(said.items("users", _describe_user)),
    )


def _describe_user(said: _Said) -> str:
    user, command = said.text("user", most=32), said.text("command", most=32)
    who = f"{user}: {command}" if user else "another container"
    return f"{who} (pid {said.number('pid'):.0f}, {said.number('used') / 1e9:.1f} GB)"


def _read_disk(said: _Said) -> Disk:
    return Disk(said.text("path", most=1000), int(said.number("total")), int(said.number("free")))


def _read_folder(said: _Said) -> Folder:
    path, other = said.text("path", most=1000), said.text("other", most=1000)
    return Folder(path, said.text("state"), other, said.text("other_state"))


def _read_limited(said: _Said, free: str, *, total: str = "total") -> Limited:
    return Limited(said.number(total), said.number(free), said.number("limit") if said.has("limit") else None)


def _read_addresses(said: _Said) -> tuple[tuple[str, str], ...]:
    found = said._fields.get("addresses")
    if not isinstance(found, list) or len(found) > 256:
        raise TransportError("what it says of itself cannot be read: addresses are not as they should be")
    pairs = []
    for entry in found:
        try:
            name, address = entry
            pairs.append((_Said({"name": name}).text("name", most=32), str(ipaddress.ip_address(str(address)))))
        except (ValueError, TypeError):
            raise TransportError("what it says of itself cannot be read: an address is none") from None
    return tuple(pairs)


def _read_way(said: _Said) -> Way:
    return (
        Way(said.text("error") or "no reason is given") if said.has("error") else Way("", said.number("round_trip_s"))
    )
