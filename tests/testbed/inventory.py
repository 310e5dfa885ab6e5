"""The parts of a testbed, as data; ``testbed.py up`` prints an `Inventory` as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Literal

Mode = Literal["netns", "loopback"]
OwnName = Literal["address", "nothing", "127.0.1.1"]


@dataclass(frozen=True)
class Link:
    """The cable of a host, in each direction."""

    delay_s: float = 0.0
    rate_bits_per_s: float = 0.0  # 0: without limit
    loss: float = 0.0  # the fraction of frames that are lost

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Host:
    """The address of a host, and what an SSH client needs to log in."""

    name: str  # h0, h1, ...
    hostname: str  # the host name inside the host
    ip: str
    port: int
    user: str
    mac: str
    identity_file: str
    known_hosts_file: str


@dataclass(frozen=True)
class Inventory:
    """The parts of a testbed when it was brought up; inventory.json in its folder."""

    id: str
    prefix: str
    mode: Mode
    notebook_ip: str
    notebook_mac: str
    hosts: tuple[Host, ...]
    link: Link | None
    share: tuple[str, ...]
    disk: str | None
    ttl_s: float
    owner_pid: int | None
    own_name: OwnName
    user_home: str  # the user's home, which the host's own home covers
    ssh_config: str

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Inventory:
        fields = json.loads(text)
        fields["hosts"] = tuple(Host(**host) for host in fields["hosts"])
        fields["link"] = Link(**fields["link"]) if fields["link"] else None
        fields["share"] = tuple(fields["share"])
        return cls(**fields)


def parse_link(delay: str | None = None, rate: str | None = None, loss: str | None = None) -> Link | None:
    """Read options like '20ms', '100mbit' and '1%'; returns None without options: the cable is then a plain veth pair.

    Raises: ValueError for anything else.
    """
    if delay is rate is loss is None:
        return None
    return Link(
        delay_s=_parse_quantity(delay, {"ms": 1e-3, "us": 1e-6, "s": 1.0}),
        rate_bits_per_s=_parse_quantity(rate, {"mbit": 1e6, "kbit": 1e3, "gbit": 1e9}),
        loss=_parse_quantity(loss, {"%": 0.01}),
    )


def _parse_quantity(text: str | None, units: dict[str, float]) -> float:
    if text is None:
        return 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)([a-z%]+)", text)
    if not match or match[2] not in units:
        raise ValueError(f"link option {text!r}: want a number and one of {', '.join(units)}")
    return float(match[1]) * units[match[2]]
