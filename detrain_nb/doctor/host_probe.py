"""The probe of one host: programs on it (node/ssh/: probe.py, speed.py) answer over one connection."""

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
_SETUP_LIMIT_S = 60.0  # `module load` on a cluster is slow
_ANSWER_LIMIT_S = 10.0
_REACH_LIMIT_S = 6.0  # lost packets are sent again after one or three seconds
_TRANSFER_LIMIT_S = 20.0
_SPEED_LIMIT_S = 60  # nearly all of it for `import torch`, in all ranks at once
_LEAST_GFLOP_S, _MOST_GFLOP_S = 1e-6, 1e6  # 1e6 is ten times a B200
_CLOCK_ROUNDS = 8
_CLOCK_LIMIT_S = 0.5  # no further round begins after this time
_MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class Clock:
    """How far a host's clock is ahead of the notebook's, and the time of the round trip that measured it."""

    offset_s: float
    uncertainty_s: float
    round_trip_s: float


@dataclass(frozen=True)
class Door:
    """Where a probe listens for the probes of other hosts, which prove themselves with the token."""

    address: str
    port: int
    token: str = field(repr=False)


@dataclass(frozen=True)
class Way:
    """The link from one host to another; ``error`` is empty when the connection succeeded."""

    error: str
    round_trip_s: float = 0.0


@dataclass(frozen=True)
class Speed:
    """GFLOP/s of the slowest rank while all ranks run at once; ``threads`` per rank is None when they use GPUs."""

    gflop_s: float
    num_ranks: int
    threads: int | None


class HostProbe:
    """One host: connect to it, then query it. Used by one thread at a time.

    Every method that queries raises LaunchError when the operation failed on the host, TransportError when the
    connection can no longer be used.
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
        """Connect and authenticate, unless the node is this machine. Raises: TransportError, SpecError."""
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
        """Start the probe program; return the facts it reports."""
        self._started = self._start("probe", _MAGIC)
        return HostFacts.read(self._ask("look"))

    def compare_clocks(self) -> Clock:
        """Compare the host's clock with ours, by the fastest of a few round trips, which bounds the error."""
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
        """Make the program listen on one address and a port chosen by the system, until it exits."""
        token = secrets.token_hex(32)
        port = Said(self._ask("listen", address=address, token=token)).number("port", low=1, most=65535)
        return Door(address, int(port), token)

    def reach(self, doors: Sequence[Door]) -> list[Way]:
        """Make it connect to the doors of other hosts, all at once; return the links in their order."""
        answer = Said(self._ask("reach", peers=list(map(asdict, doors)), within_s=_REACH_LIMIT_S))
        return answer.items("peers", _read_way, count=len(doors))

    def measure_rate(self, door: Door) -> float:
        """Measure the rate, in bytes per second, at which data arrives at another host over one connection."""
        answer = self._ask("send", limit_s=_TRANSFER_LIMIT_S + 5.0, peer=asdict(door), within_s=_TRANSFER_LIMIT_S)
        return Said(answer).number("bytes_per_s", low=1e-3, most=1e15)

    def measure_rate_from_here(self) -> float:
        """Measure the rate, in bytes per second, from the notebook to the host, as between hosts (probe.py)."""
        deadline = time.monotonic() + _TRANSFER_LIMIT_S
        send = partial(self._send_bulk, deadline=deadline)
        try:
            return find_rate(send, round_trip_s=self._round_trip_s, deadline=deadline, most_bytes=_MOST_BYTES)
        except TransportError:
            self.close()
            raise

    def _send_bulk(self, size: int, *, deadline: float) -> float:
        """Send ``size`` bytes; return the rate that the peer measured, in bytes per second, 0 if it measured none."""
        chunk = os.urandom(min(size, CHUNK_BYTES))  # incompressible
        self._program.say(type="sink", size=size)
        for start in range(0, size, CHUNK_BYTES):
            self._program.send(chunk[: size - start], limit_s=max(0.1, deadline - time.monotonic()))
        said = Said(self._program.hear("sink", limit_s=max(0.1, deadline - time.monotonic())))
        seconds, counted = said.number("seconds", most=1e6), said.number("counted", most=size)
        return counted / seconds if counted and seconds else 0.0

    def measure_speed(self, ranks: NodePlan, *, threads: int) -> Speed:
        """Measure in a separate program that computes as the ranks would, on their GPUs or with ``threads`` each."""
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
        """Make it create our folder, or close it to others; return what was done, empty when nothing was."""
        return Said(self._ask("fix")).text("done", most=1000)

    def close(self) -> None:
        """Close the connection; the program on the host then exits."""
        if self._started is not None:
            self._started.close()
        if self._connection is not None:
            self._connection.close()

    def _start(self, name: str, magic: bytes) -> RemoteProgram:
        assert self._connection is not None  # connect was called
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
        assert self._started is not None  # look was called
        return self._started

    def _ask(self, kind: str, *, limit_s: float = _ANSWER_LIMIT_S, **fields: object) -> Mapping[str, Any]:
        try:
            self._program.say(type=kind, **fields)
            return self._program.hear(kind, limit_s=limit_s)
        except TransportError:  # a late answer would be taken for the answer to the next query
            self.close()
            raise


def _read_way(said: Said) -> Way:
    if said.has("error"):
        return Way(said.text("error") or "no reason given")
    return Way("", said.number("round_trip_s"))
