"""The hosts in ~/.ssh/config, to choose from; no host is connected to."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from ..errors import SpecError
from ..session.output.safe_output import one_line
from ..spec.node import Node
from ..transport.ssh import resolve
from ..transport.ssh_config import SshTarget, default_config, list_hosts, read_config, without_questions

__all__ = ["count_hosts", "describe_hosts", "nodes_of_hosts"]

_MOST_HOSTS = 500
_MOST_CHARS = 200
_LOOKING_UP_S = 2.0


def count_hosts() -> int:
    """Count the hosts; 0 when the config cannot be read, which listing them reports."""
    try:
        return len(list_hosts(default_config()))
    except (SpecError, OSError):
        return 0


def describe_hosts(there: Collection[str]) -> dict[str, Any]:
    """Return the first 500 hosts as plain JSON: the address of each, and whether ``there`` already has it.

    The thread that serves pages looks addresses up, for 2 seconds at most; later hosts have a name alone.
    Raises: SpecError when the config cannot be read.
    """
    path = default_config()
    until = time.monotonic() + _LOOKING_UP_S
    names, config = list_hosts(path), without_questions(read_config(path))
    hosts = [
        {"name": name, "is_there": name in there, **_describe(name, config, until)} for name in names[:_MOST_HOSTS]
    ]
    return {"hosts": hosts, "more": max(0, len(names) - _MOST_HOSTS)}


def _describe(name: str, config: str, until: float) -> dict[str, str]:
    if time.monotonic() > until:
        return {"where": "", "jump": "", "fault": ""}
    try:
        settings = resolve(SshTarget(name), config)
    except SpecError as exc:
        return {"where": "", "jump": "", "fault": one_line(str(exc), most_chars=_MOST_CHARS)}
    jump = ", ".join(hop.name for hop in settings.proxy_jump)
    where = settings.where.removesuffix(":22")
    return {
        "where": one_line(where, most_chars=_MOST_CHARS),
        "jump": one_line(jump, most_chars=_MOST_CHARS),
        "fault": "",
    }


def nodes_of_hosts(names: Collection[str]) -> list[Node]:
    """Return a node for each named host; the config keeps its address. Raises: SpecError when a host is not in it."""
    known = list_hosts(default_config())
    if unknown := [name for name in names if name not in known]:
        raise SpecError(f"{one_line(unknown[0])} is no longer in {default_config()}: list the hosts again")
    return [Node(host=name) for name in known if name in names]
