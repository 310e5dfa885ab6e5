"""The hosts that ~/.ssh/config names, for who chooses among them; nothing is connected to."""

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
    """How many there are; 0 where the config cannot be read, which is told when they are to be listed."""
    try:
        return len(list_hosts(default_config()))
    except (SpecError, OSError):
        return 0


def describe_hosts(there: Collection[str]) -> dict[str, Any]:
    """The first ones, as plain JSON: where each is, and whether it is ``there`` already. Raises: SpecError.

    Of very many the last are told by name alone: the thread that pages are answered in looks them up.
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
    """A node for each of these hosts that the config has: how it is reached stays there. Raises: SpecError."""
    known = list_hosts(default_config())
    if unknown := [name for name in names if name not in known]:
        raise SpecError(f"{one_line(unknown[0])} is no host of {default_config()} any more: list them again")
    return [Node(host=name) for name in known if name in names]
