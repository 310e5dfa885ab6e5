"""A node as the user describes it: how to reach it, what the ranks may use of it, how to find Python there."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, field_validator, model_validator

from ..errors import SpecError
from ..plan.names import NAME_RULE
from ..text import USER, USER_RULE, show, split_target
from .model import SpecModel, describe_field
from .words import NODE_NAME, PATH, Lines, NodePath, Path, Variables, is_node_name, is_path, like, only

_OF_SSH = ("port", "user", "identity_file", "proxy_jump", "setup")
_MOST_JUMPS = 20
THIS_MACHINE = "localhost"  # the host that means the notebook's own machine
OF_HOSTS = frozenset({*_OF_SSH, "address", "python", "workdir"})  # fields whose defaults in a file do not apply to it
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
_IPV6 = re.compile(r"(?P<address>[0-9A-Fa-f:.]{2,45})(?:%[A-Za-z0-9._-]{1,32})?")
_USER_IN_BRACKETS = re.compile(r"\[([^]]+)@([^]@]+)\](.*)")


def _is_ipv6(text: str) -> bool:
    match = _IPV6.fullmatch(text)
    if not match or ":" not in text:
        return False
    try:
        ipaddress.IPv6Address(match["address"])
    except ValueError:
        return False
    return True


def _is_host(text: str) -> bool:
    return bool(_HOST.fullmatch(text)) or _is_ipv6(text)


def is_address(text: str) -> bool:
    """Return whether a text is a host or an address; one of numbers must be valid, and not mean all addresses."""
    if not text.replace(".", "").isdigit() and ":" not in text:
        return _is_host(text)
    try:
        return _is_host(text) and not ipaddress.ip_address(text.partition("%")[0]).is_unspecified
    except ValueError:
        return False


def _is_workdir(text: str) -> bool:
    return text.startswith(("/", "~")) and is_path(text)


def _check_jumps(text: str) -> str:
    jumps = [jump.strip() for jump in text.split(",", _MOST_JUMPS)]
    if len(jumps) > _MOST_JUMPS:
        raise ValueError(f"{show(text)} names more than {_MOST_JUMPS} hosts: give fewer")
    for jump in jumps:
        parse_target(jump)
    return ",".join(jumps)


_HOST_LIKE = rf"{_HOST.pattern}|[0-9A-Fa-f:.]{{2,45}}(?:%[A-Za-z0-9._-]{{1,32}})?"
Address = Annotated[str, only(is_address), like(_HOST_LIKE)]
_GPUS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "uniqueItems": True}
_Devices = Annotated[
    Literal["auto", "cpu"] | tuple[int, ...],
    WithJsonSchema({"anyOf": [{"type": "string", "enum": ["auto", "cpu"]}, _GPUS]}),
]


class Node(SpecModel):
    """One machine with sshd or, with the host ``localhost``, the notebook's own machine, without SSH.

    Fields that are None come from the user's ssh config, or are detected on the node.

    Raises: SpecError with one line for each invalid field; so does a file or a command line with such a node.
    """

    name: Annotated[str, only(is_node_name), like(f"(?:{NODE_NAME})?")] = Field(
        title="Name",
        default="",  # the host's
        description=f"{NAME_RULE}, such as gpu-2; not 'all', 1 or 0-3, which mean ranks",
    )
    host: Annotated[str, only(_is_host), like(_HOST_LIKE)] = Field(
        title="Host", description="a host name, a Host of your ssh config or an address, without user and port"
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        title="Port", default=None, description="a number from 1 to 65535"
    )
    user: Annotated[str, only(USER.fullmatch), like(USER.pattern)] | None = Field(
        title="User", default=None, description=USER_RULE
    )
    identity_file: Path | None = Field(title="Key file", default=None, description="the path of a private key")
    proxy_jump: Annotated[str, AfterValidator(_check_jumps)] | None = Field(
        title="Jump host",
        default=None,
        description='the hosts to go through, "[user@]host[:port]", separated by commas',
    )
    address: Address | None = Field(
        title="Address for other nodes",
        default=None,
        description="the address or host name at which the other nodes reach this one",
    )
    devices: _Devices = Field(
        title="Devices", default="auto", description='"auto", "cpu", or the indices of GPUs, each once, such as [0, 1]'
    )
    ranks: Annotated[int, Field(ge=1)] | None = Field(
        title="Ranks", default=None, description="a number of ranks, at least 1"
    )
    python: NodePath = Field(
        title="Python", default="python3", description="the path or name of a Python on the node, on one line"
    )
    workdir: Annotated[str, only(_is_workdir), like(rf"(?=[/~]){PATH}")] | None = Field(
        title="Work folder", default=None, description="a folder on the node that starts with / or ~"
    )
    setup: Lines = Field(
        title="Setup lines",
        default=(),
        description='shell lines run before Python, such as "module load cuda" or a list, without control characters',
    )
    env: Variables = Field(
        title="Environment variables",
        default=(),
        description='a list of names of environment variables, each once, without values, such as ["HF_TOKEN"]',
    )
    bandwidth_mbit_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        title="Bandwidth in Mbit/s", default=None, description="megabits per second, more than 0"
    )
    latency_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        title="Latency in ms", default=None, description="milliseconds, at least 0"
    )
    memory_gb: Annotated[float, Field(gt=0)] | None = Field(
        title="Memory in GB",
        default=None,
        description="gigabytes of memory, of one GPU if the ranks use GPUs, more than 0",
    )
    relative_speed: Annotated[float, Field(gt=0)] | None = Field(
        title="Relative speed",
        default=None,
        description="how fast a rank there is relative to the fastest, such as 1.0 or 0.5, more than 0",
    )

    @model_validator(mode="before")
    @classmethod
    def _name_after_host(cls, fields: object) -> object:
        if isinstance(fields, Mapping) and "name" not in fields and isinstance(fields.get("host"), str):
            name = default_name(fields["host"])
            return {**fields, "name": name} if name else fields
        return fields

    @field_validator("devices", mode="before")
    @classmethod
    def _read_devices(cls, value: object) -> object:
        if value in ("auto", "cpu"):
            return value
        if not isinstance(value, list | tuple) or not value or len(set(map(repr, value))) < len(value):
            raise ValueError
        if any(type(index) is not int or index < 0 for index in value):  # a bool is an int
            raise ValueError
        return tuple(value)

    def to_fields(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as a document has them; the name unless the host's."""
        fields = super().to_fields()
        if self.name == default_name(self.host):
            del fields["name"]
        return fields

    @property
    def is_this_machine(self) -> bool:
        """True for the machine that this is read on, without SSH; ``127.0.0.1`` goes over SSH."""
        return self.host == THIS_MACHINE

    @model_validator(mode="after")
    def _check_this_machine(self) -> Node:
        if self.is_this_machine and (given := [field for field in _OF_SSH if getattr(self, field)]):
            raise ValueError(
                f"{THIS_MACHINE} is this machine itself, without SSH: leave out {', '.join(given)}, or name it "
                "127.0.0.1 to go over SSH"
            )
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> Node:
        if self.ranks is not None and isinstance(self.devices, tuple) and self.ranks != len(self.devices):
            gpus = f"{len(self.devices)} GPU{'s'[: len(self.devices) > 1]}"
            raise ValueError(f"ranks {self.ranks} but devices has {gpus}, one for each rank: leave out ranks")
        return self


def default_name(host: str) -> str:
    """Return a node's default name: its host, with dashes for the colons of IPv6; empty if ``host`` is invalid."""
    if _is_ipv6(host):
        return "ip6-" + re.sub("[:%]", "-", host)
    return host if _HOST.fullmatch(host) else ""


def describe_twice_here(nodes: Iterable[Node]) -> str:
    """Return the fault when several of ``nodes`` are this machine; empty when at most one is."""
    here = [node.name for node in nodes if node.is_this_machine]
    return f"{' and '.join(here)} are both this machine: name it once, with ranks = N" if len(here) > 1 else ""


@dataclass(frozen=True)
class Target:
    """The parts of ``[user@]host[:port]``."""

    host: str
    user: str | None = None
    port: int | None = None


def parse_target(text: str) -> Target:
    """Split ``[user@]host[:port]``; an IPv6 address is in brackets, with the user before or inside them.

    Raises: SpecError.
    """
    if inside := _USER_IN_BRACKETS.fullmatch(text):
        text = f"{inside[1]}@[{inside[2]}]{inside[3]}"
    user, host, port, has_brackets = split_target(text)
    if not (_is_ipv6(host) if has_brackets else _HOST.fullmatch(host)):
        advice = f"write [{text}]" if _is_ipv6(text) else "give [user@]host[:port], an IPv6 address in brackets"
        raise SpecError(f"{show(text)} is not a host: {advice}")
    if user is not None and ":" in user:
        raise SpecError(f"{show(text)}: it contains a password: leave it out, and log in with a key")
    if user is not None and not USER.fullmatch(user):
        raise SpecError(f"{show(text)}: user {show(user)}: give {USER_RULE}")
    if port is not None and (len(port) > 5 or not 1 <= int(port) <= 65535):
        raise SpecError(f"{show(text)}: port {port}: give {describe_field(Node, 'port')}")
    return Target(host, user, int(port) if port else None)
