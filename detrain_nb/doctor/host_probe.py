"""A host, asked by programs on it (node/ssh/: probe.py, speed.py) over one connection; host_facts.py reads answers."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..deploy.remote_program import RemoteProgram, read_program
from ..deploy.ssh_node import connect_to
from ..errors import TransportError
from ..node.ssh.rates import CHUNK_BYTES, find_rate
from ..plan.nodes import NodePlan
from ..spec.node import Node
from ..transport.connection import Connection
from ..transport.here import HereConnection
from ..transport.local import own_python
from ..transport.ssh import AskPassphrase
from .host_facts import HostFacts, Said

__all__ = ["Clock", "Door", "HostProbe", "Speed", "Way"]

_MAGIC = b"\ndetrain-nb probe 1\n"
_SPEED_MAGIC = b"\ndetrain-nb speed 1\n"
_CONNECT_LIMIT_S = 8.0
_START_LIMIT_S = 10.0
_SETUP_LIMIT_S = 60.0  # `module load` of a cluster takes its time
_ANSWER_LIMIT_S = 10.0
_REACH_LIMIT_S = 6.0  # packets may be lost on the way, and are sent again after a second or three
_TRANSFER_LIMIT_S = 20.0
_SPEED_LIMIT_S = 60  # nearly all of it for `import torch`, in all ranks at once
_LEAST_GFLOP_S, _MOST_GFLOP_S = 1e-6, 1e6  # 1e6 is ten times a B200
_CLOCK_ROUNDS = 8
_CLOCK_LIMIT_S = 0.5  # after which no further round begins
_MOST_BYTES = 1 << 28


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


@dataclass(frozen=True)
class Way:
    """From one host to another; ``error`` is empty when it could be gone."""

    error: str
    round_trip_s: float = 0.0


@dataclass(frozen=True)
class Speed:
    """1e9 operations a second of the slowest of the ranks, all at once; ``threads`` is None where they have GPUs."""

    gflop_s: float
    num_ranks: int
    threads: int | None


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
        self._connection: Connection | None = None
        self._started: RemoteProgram | None = None
        self._round_trip_s = 0.0

    def connect(self) -> Connection:
        """Connect and authenticate, where it is another machine. Raises: TransportError, SpecError."""
        if self.node.is_this_machine:
            self._connection = HereConnection()
        else:
            self._connection = connect_to(
                self.node,
                ask_passphrase=self._ask_passphrase,
                config_path=self._config_path,
                limit_s=_CONNECT_LIMIT_S,
            )
        return self._connection

    def look(self) -> HostFacts:
        """Start the program; what it sees."""
        self._started = self._start("probe", _MAGIC)
        return HostFacts.read(self._ask("look"))

    def compare_clocks(self) -> Clock:
        """The clock there against ours, by the quickest of a few questions: it was read somewhere on the way."""
        best = Clock(0.0, math.inf, math.inf)
        enough = time.monotonic() + _CLOCK_LIMIT_S
        for _ in range(_CLOCK_ROUNDS):
            asked, began = time.time(), time.perf_counter()
            there = Said(self._ask("clock")).number("time", low=-1e12, most=1e12)
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
        port = Said(self._ask("listen", address=address, token=token)).number("port", low=1, most=65535)
        return Door(address, int(port), token)

    def reach(self, doors: Sequence[Door]) -> list[Way]:
        """Let it connect to other hosts, all at once."""
        answer = Said(self._ask("reach", peers=list(map(asdict, doors)), within_s=_REACH_LIMIT_S))
        return answer.items("peers", _read_way, count=len(doors))

    def measure_rate(self, door: Door) -> float:
        """Bytes a second that arrive at another host, over one connection."""
        answer = self._ask("send", limit_s=_TRANSFER_LIMIT_S + 5.0, peer=asdict(door), within_s=_TRANSFER_LIMIT_S)
        return Said(answer).number("bytes_per_s", low=1e-3, most=1e15)

    def measure_rate_from_here(self) -> float:
        """Bytes a second that arrive there from the notebook, measured as between hosts (probe.py)."""
        deadline = time.monotonic() + _TRANSFER_LIMIT_S
        send = partial(self._send_bulk, deadline=deadline)
        try:
            return find_rate(send, round_trip_s=self._round_trip_s, deadline=deadline, most_bytes=_MOST_BYTES)
        except TransportError:
            self.close()
            raise

    def _send_bulk(self, size: int, *, deadline: float) -> float:
        """Bytes a second, as the other side has counted them; 0 where it has not."""
        chunk = os.urandom(min(size, CHUNK_BYTES))  # which nothing on the way can compress
        self._program.say(type="sink", size=size)
        for start in range(0, size, CHUNK_BYTES):
            self._program.send(chunk[: size - start], limit_s=max(0.1, deadline - time.monotonic()))
        said = Said(self._program.hear("sink", limit_s=max(0.1, deadline - time.monotonic())))
        seconds, counted = said.number("seconds", most=1e6), said.number("counted", most=size)
        return counted / seconds if counted and seconds else 0.0

    def measure_speed(self, ranks: NodePlan, *, threads: int) -> Speed:
        """Let a program of its own do what the ranks would, on their GPUs or with so many threads each."""
        count = len(ranks.ranks)
        program = self._start("speed", _SPEED_MAGIC)
        try:
            program.say(gpus=ranks.gpus or [None] * count, threads=threads, within_s=_SPEED_LIMIT_S)
            said = Said(program.hear("speed", limit_s=_SPEED_LIMIT_S + 5.0))
        finally:
            program.close()
        speeds = said.numbers("gflop_s", count, low=_LEAST_GFLOP_S, most=_MOST_GFLOP_S)
        return Speed(min(speeds), count, None if ranks.gpus else threads)

    def fix(self) -> str:
        """Let it make our folder, or close it to others; what was done, empty when there was nothing to do."""
        return Said(self._ask("fix")).text("done", most=1000)

    def close(self) -> None:
        """Hang up; the program there ends."""
        if self._started is not None:
            self._started.close()
        if self._connection is not None:
            self._connection.close()

    def _start(self, name: str, magic: bytes) -> RemoteProgram:
        assert self._connection is not None  # it was connected to
        node = self.node
        if node.is_this_machine:
            node = node.model_copy(update={"python": own_python(node)})
        return RemoteProgram.start(
            read_program(name),
            magic=magic,
            node=node,
            connection=self._connection,
            limit_s=_SETUP_LIMIT_S if node.setup else _START_LIMIT_S,
        )

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


def _read_way(said: Said) -> Way:
    if said.has("error"):
        return Way(said.text("error") or "no reason is given")
    return Way("", said.number("round_trip_s"))
