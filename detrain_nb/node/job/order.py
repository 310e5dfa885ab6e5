"""What a node is asked to run: one node's part of a job. It is kept as order.json, and holds no secret."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...copying.json_lines import FilesError, clean
from ...plan.choices import SILENCE_S, TIMEOUT_S
from ...plan.names import NAME, NAME_RULE, VARIABLE

FORMAT = 1  # a higher one only where what an earlier release would pass over changes what runs
MOST_JSON_BYTES = 1 << 20
MOST_TEXT_BYTES = (1 << 17) - 1  # the kernel takes no longer argument, or variable with its name
MOST_ITEMS = 10_000
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


class JobRefused(FilesError):
    """What cannot be done with a job on this node, in words for the user."""


@dataclass(frozen=True)
class JobRendezvous:
    """How the nodes of a job find each other; ``address`` and ``port`` are those of the store, on node rank 0."""

    kind: str = "fixed"  # or "elastic"
    run_id: str = ""
    address: str = "127.0.0.1"
    port: int = 0
    timeout_s: float = TIMEOUT_S
    max_restarts: int = 0
    min_nodes: int = 1
    max_nodes: int = 1


@dataclass(frozen=True)
class JobOrder:
    """One node's part. ``ranks`` are the global numbers of its ranks; ``argv`` is what stands behind ``python``.

    A script in ``argv`` is named relative to the job's source. ``gpus`` are positions among those that the node has,
    None for all. ``nodes`` are the names of all nodes, by node rank. ``withheld`` are variables that the job does not
    inherit from the service that starts it.
    """

    id: str
    name: str
    argv: tuple[str, ...]
    node_rank: int = 0
    nodes: tuple[str, ...] = ("",)
    ranks: tuple[int, ...] = (0,)
    world_size: int = 1
    python: str = ""
    workdir: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    secret_names: tuple[str, ...] = ()
    withheld: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()
    spec: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    gpus: tuple[int, ...] | None = None
    address: str = "127.0.0.1"  # of this node
    interface: str = ""
    rendezvous: JobRendezvous = JobRendezvous()
    silence_s: float = SILENCE_S

    @property
    def node(self) -> str:
        """The user's name for this node."""
        return self.nodes[self.node_rank]

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> JobOrder:
        """Read one, of an earlier format too; names that a later release adds are passed over. Raises: JobRefused."""
        if len(text) > MOST_JSON_BYTES:
            raise JobRefused(f"the order has {len(text)} characters: {MOST_JSON_BYTES} at most")
        try:
            said = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise JobRefused("the order is not JSON") from exc
        return cls.from_dict(said)

    @classmethod
    def from_dict(cls, said: object) -> JobOrder:
        """Take what was asked for apart, checked. Raises: JobRefused."""
        if not isinstance(said, dict):
            raise JobRefused("the order is no object")
        number = said.get("format")
        if type(number) is not int or number < 1:
            raise JobRefused(f"{clean(number)[:20]!r} is no number of an order's format")
        if number > FORMAT:
            raise JobRefused(
                f"the order has format {number}, a later release has written it: this one reads up to format {FORMAT}: "
                "use that release, or a later one"
            )
        order = cls(**_checked(said, _CHECKS, required={"id", "name", "argv"}))
        if not 0 <= order.node_rank < len(order.nodes):
            raise JobRefused(f"node_rank is {order.node_rank}, of {len(order.nodes)} nodes")
        if not order.argv:
            raise JobRefused("argv is empty: name a script or a module")
        return order


def check_id(said: object) -> str:
    """Return the id of a job, which is a name of a folder. Raises: JobRefused."""
    if not isinstance(said, str) or not JOB_ID.fullmatch(said):
        raise JobRefused(f"{clean(said)[:80]!r} is no id of a job")
    return said


def check_number(said: object, *, most: int = 1 << 31) -> int:
    """Return a number from 0. Raises: JobRefused."""
    if type(said) is not int or not 0 <= said <= most:
        raise JobRefused(f"{clean(said)[:40]!r} is no number from 0 to {most}")
    return said


def check_seconds(said: object) -> float:
    """Return a time that can be waited for. Raises: JobRefused."""
    if type(said) not in (int, float) or not 0 <= said <= 1e9:  # type: ignore[operator]
        raise JobRefused(f"{clean(said)[:40]!r} is no number of seconds")
    return float(said)  # type: ignore[arg-type]


def check_texts(said: object) -> tuple[str, ...]:
    """Return a list of texts. Raises: JobRefused."""
    if not isinstance(said, (list, tuple)) or len(said) > MOST_ITEMS:
        raise JobRefused(f"a list of at most {MOST_ITEMS} texts was expected")
    return tuple(map(_text, said))


def check_env(said: object) -> dict[str, str]:
    """Return variables by name. Raises: JobRefused, without a value in it: it may be a secret."""
    if not isinstance(said, dict) or len(said) > MOST_ITEMS:
        raise JobRefused(f"at most {MOST_ITEMS} variables by name were expected")
    for name, value in said.items():
        if not isinstance(name, str) or not VARIABLE.fullmatch(name):
            raise JobRefused(f"{clean(name)[:80]!r} is no name of a variable")
        if not isinstance(value, str) or not fits_kernel(f"{name}={value}"):
            raise JobRefused(f"the value of {name} is no text of at most {MOST_TEXT_BYTES - len(name) - 1} bytes")
    return said


def fits_kernel(text: str) -> bool:
    """Whether it can be an argument, or a variable with its name."""
    return "\0" not in text and len(text.encode("utf-8", "surrogatepass")) <= MOST_TEXT_BYTES


def _text(said: object) -> str:
    if not isinstance(said, str) or not fits_kernel(said):
        raise JobRefused(f"{clean(said)[:40]!r} is no text of at most {MOST_TEXT_BYTES} bytes")
    return said


def _name(said: object) -> str:
    if not isinstance(said, str) or not NAME.fullmatch(said):
        raise JobRefused(f"{clean(said)[:80]!r} is no name of a job: give {NAME_RULE}")
    return said


def _numbers(said: object) -> tuple[int, ...]:
    if not isinstance(said, (list, tuple)) or len(said) > MOST_ITEMS:
        raise JobRefused(f"a list of at most {MOST_ITEMS} numbers was expected")
    return tuple(map(check_number, said))


def _object(said: object) -> dict[str, Any]:
    if not isinstance(said, dict):
        raise JobRefused(f"{clean(said)[:40]!r} is no object")
    return said


def _rendezvous(said: object) -> JobRendezvous:
    made = JobRendezvous(**_checked(_object(said), _RENDEZVOUS_CHECKS))
    if made.kind not in ("fixed", "elastic"):
        raise JobRefused(f"{clean(made.kind)[:40]!r} is no kind of rendezvous: fixed, elastic")
    return made


def _checked(
    said: Mapping[str, Any], checks: Mapping[str, Callable[[object], Any]], *, required: set[str] | None = None
) -> dict[str, Any]:
    if lacking := sorted((required or set()) - said.keys()):
        raise JobRefused(f"the order has no {', '.join(lacking)}")
    found = {}
    for name, check in checks.items():
        if name in said:
            try:
                found[name] = check(said[name])
            except JobRefused as exc:
                raise JobRefused(f"{name}: {exc}") from exc
    return found


_RENDEZVOUS_CHECKS: Mapping[str, Callable[[object], Any]] = {
    "kind": _text,
    "run_id": _text,
    "address": _text,
    "port": lambda said: check_number(said, most=65535),
    "timeout_s": check_seconds,
    "max_restarts": check_number,
    "min_nodes": check_number,
    "max_nodes": check_number,
}
_CHECKS: Mapping[str, Callable[[object], Any]] = {
    "id": check_id,
    "name": _name,
    "argv": check_texts,
    "node_rank": check_number,
    "nodes": check_texts,
    "ranks": _numbers,
    "world_size": check_number,
    "python": _text,
    "workdir": _text,
    "env": check_env,
    "secret_names": check_texts,
    "withheld": check_texts,
    "setup": check_texts,
    "artifacts": check_texts,
    "spec": _object,
    "device": _text,
    "gpus": lambda said: None if said is None else _numbers(said),
    "address": _text,
    "interface": _text,
    "rendezvous": _rendezvous,
    "silence_s": check_seconds,
}
