"""The order to a node to run its part of a job. It is stored as order.json and contains no secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...copying.json_lines import FilesError, clean
from ...plan.choices import SILENCE_S, TIMEOUT_S
from ...plan.names import NAME, NAME_RULE, VARIABLE

FORMAT = 1  # raised only when a field that earlier releases would ignore changes what runs
MOST_JSON_BYTES = 1 << 20
MOST_TEXT_BYTES = (1 << 17) - 1  # the kernel's limit for an argument, or a variable with its name
MOST_ITEMS = 10_000
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


class JobRefused(FilesError):
    """Refusal of a request about a job on this node, worded for the user."""


@dataclass(frozen=True)
class JobRendezvous:
    """Rendezvous of the nodes of a job; ``address`` and ``port`` are those of the store on node rank 0."""

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
    """One node's part of a job. ``ranks`` are global rank numbers; ``argv`` are the arguments of ``python``.

    A script in ``argv`` is relative to the job's source. ``gpus`` are indices of the node's GPUs, None for all.
    ``nodes`` are the names of all nodes, by node rank. ``withheld`` are variables that the job does not inherit from
    the service that starts it.
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
        """The user's name of this node."""
        return self.nodes[self.node_rank]

    def to_dict(self) -> dict[str, Any]:
        """Return the order as JSON values, with its format."""
        return {"format": FORMAT, **asdict(self)}

    def to_json(self) -> str:
        """Return the order as JSON text."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> JobOrder:
        """Read an order of this or an earlier format; unknown fields are ignored. Raises: JobRefused."""
        if len(text) > MOST_JSON_BYTES:
            raise JobRefused(f"the order has {len(text)} characters; the limit is {MOST_JSON_BYTES}")
        try:
            said = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise JobRefused("the order is not JSON") from exc
        return cls.from_dict(said)

    @classmethod
    def from_dict(cls, said: object) -> JobOrder:
        """Read and check an order from JSON values. Raises: JobRefused."""
        if not isinstance(said, dict):
            raise JobRefused("the order is not an object")
        number = said.get("format")
        if type(number) is not int or number < 1:
            raise JobRefused(f"{clean(number)[:20]!r} is not a valid format number of an order")
        if number > FORMAT:
            raise JobRefused(
                f"the order has format {number}, from a later release; this one reads up to format {FORMAT}: use that "
                "release, or a later one"
            )
        order = cls(**_checked(said, _CHECKS, required={"id", "name", "argv"}))
        if not 0 <= order.node_rank < len(order.nodes):
            raise JobRefused(f"node_rank {order.node_rank} is out of range for {len(order.nodes)} nodes")
        if not order.argv:
            raise JobRefused("argv is empty: name a script or a module")
        return order


def check_id(said: object) -> str:
    """Check and return the id of a job, which is also a folder name. Raises: JobRefused."""
    if not isinstance(said, str) or not JOB_ID.fullmatch(said):
        raise JobRefused(f"{clean(said)[:80]!r} is not a job id")
    return said


def check_number(said: object, *, most: int = 1 << 31) -> int:
    """Check and return a whole number from 0 to ``most``. Raises: JobRefused."""
    if type(said) is not int or not 0 <= said <= most:
        raise JobRefused(f"{clean(said)[:40]!r} is not a whole number from 0 to {most}")
    return said


def check_seconds(said: object) -> float:
    """Check and return a number of seconds from 0 to 1e9. Raises: JobRefused."""
    if type(said) not in (int, float) or not 0 <= said <= 1e9:  # type: ignore[operator]
        raise JobRefused(f"{clean(said)[:40]!r} is not a number of seconds from 0 to 1e9")
    return float(said)  # type: ignore[arg-type]


def check_texts(said: object) -> tuple[str, ...]:
    """Check and return a list of texts. Raises: JobRefused."""
    if not isinstance(said, (list, tuple)) or len(said) > MOST_ITEMS:
        raise JobRefused(f"a list of at most {MOST_ITEMS} texts was expected")
    return tuple(map(_text, said))


def check_env(said: object) -> dict[str, str]:
    """Check and return variables by name. Raises: JobRefused, whose text has no values, as they may be secrets."""
    if not isinstance(said, dict) or len(said) > MOST_ITEMS:
        raise JobRefused(f"an object of at most {MOST_ITEMS} variables was expected")
    for name, value in said.items():
        if not isinstance(name, str) or not VARIABLE.fullmatch(name):
            raise JobRefused(f"{clean(name)[:80]!r} is not a valid variable name")
        if not isinstance(value, str) or not fits_kernel(f"{name}={value}"):
            raise JobRefused(f"the value of {name} is not a text of at most {MOST_TEXT_BYTES - len(name) - 1} bytes")
    return said


def fits_kernel(text: str) -> bool:
    """Return whether the kernel accepts a text as an argument, or as a variable with its name."""
    return "\0" not in text and len(text.encode("utf-8", "surrogatepass")) <= MOST_TEXT_BYTES


def _text(said: object) -> str:
    if not isinstance(said, str) or not fits_kernel(said):
        raise JobRefused(f"{clean(said)[:40]!r} is not a text of at most {MOST_TEXT_BYTES} bytes")
    return said


def _name(said: object) -> str:
    if not isinstance(said, str) or not NAME.fullmatch(said):
        raise JobRefused(f"{clean(said)[:80]!r} is not a valid job name: give {NAME_RULE}")
    return said


def _numbers(said: object) -> tuple[int, ...]:
    if not isinstance(said, (list, tuple)) or len(said) > MOST_ITEMS:
        raise JobRefused(f"a list of at most {MOST_ITEMS} numbers was expected")
    return tuple(map(check_number, said))


def _object(said: object) -> dict[str, Any]:
    if not isinstance(said, dict):
        raise JobRefused(f"{clean(said)[:40]!r} is not an object")
    return said


def _rendezvous(said: object) -> JobRendezvous:
    made = JobRendezvous(**_checked(_object(said), _RENDEZVOUS_CHECKS))
    if made.kind not in ("fixed", "elastic"):
        raise JobRefused(f"{clean(made.kind)[:40]!r} is not a kind of rendezvous: give fixed or elastic")
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
