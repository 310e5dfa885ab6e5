"""Sessions known to this machine: those running on it, and those that it started on nodes.

A file records how each session was started and, if it is on nodes, where: a restarted kernel finds the session again
and can restart it. The file of a session on nodes is in the run directory; that of a session on this machine is in its
agent's folder, and is deleted with it.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..agents import holder_of, running_sessions, runtime_folder
from ..errors import DetrainError
from ..plan import DEVICES

if TYPE_CHECKING:
    from ..spec.node import Node

__all__ = [
    "KnownSession",
    "StartedWith",
    "forget",
    "known_sessions",
    "note_left",
    "noted_owners",
    "remember",
    "session_names",
]

_FOLDER = ".remote"
_LOCAL_FILE = "started.json"
_MOST_RANKS = 1 << 16
_MOST_CHARS = 200


@dataclass(frozen=True)
class StartedWith:
    """Arguments of ``Session.start``, kept for a later notebook that restarts the session.

    ``env`` has the names of the variables only: their values may be secrets and are never written.
    """

    ranks: int | None = None
    device: str = "auto"
    backend: str | None = None
    init: bool = True
    sync: bool = True
    env: tuple[str, ...] = ()
    seed: int = 0
    start: str = "fork"
    linger_s: float | None = None
    group_timeout_s: float | None = None
    project: str = ""


@dataclass(frozen=True)
class KnownSession:
    """A known session. ``nodes`` is empty on this machine alone; ``pid`` is that of the agent here, 0 for none.

    ``started`` is None if unknown: another machine started the session, or the file is unreadable.
    ``is_left``: the user restarted the session's kernel while no cell ran, and no notebook has attached since.
    ``left_by`` is the id of the restarted kernel; the new kernel has the same id, whatever its notebook's name is.
    """

    holder: str
    pid: int = 0
    nodes: tuple[Node, ...] = ()
    started: StartedWith | None = None
    is_left: bool = False
    left_by: str = ""

    def __str__(self) -> str:
        if not self.nodes:
            return f"agent pid {self.pid}"
        return f"on {', '.join(node.name for node in self.nodes)}"

    @property
    def own_end(self) -> str:
        """Clause that says how long the session's ranks wait for a notebook before they exit."""
        linger_s = self.started.linger_s if self.started else None
        after = "some time" if linger_s is None else _duration(linger_s)
        return f"it ends {after} after its notebook leaves"


def known_sessions() -> dict[str, KnownSession]:
    """Return the known sessions by name. One on nodes may have ended meanwhile, which attaching to it reports."""
    found = {path.stem: known for path in sorted(_folder().glob("*.json")) if (known := _read(path))}
    for name, pid in running_sessions().items():
        if name in found and any(node.is_this_machine for node in found[name].nodes):
            found[name] = replace(found[name], pid=pid)
            continue
        found[name] = _known_by(_load(_local_file(name)), holder_of(name), pid=pid)
    return found


def noted_owners(session: str, names: Sequence[str]) -> dict[int, int]:
    """Return the index of each rank's node in ``names``, as last recorded here; empty when the nodes differ."""
    known = known_sessions().get(session)
    nodes = known.nodes if known else ()
    if [node.name for node in nodes] != list(names) or sum(node.ranks or 0 for node in nodes) > _MOST_RANKS:
        return {}
    owners = [position for position, node in enumerate(nodes) for _ in range(node.ranks or 0)]
    return dict(enumerate(owners))


def session_names() -> list[str]:
    """Return the names of the known sessions, without reading their files."""
    return sorted({path.stem for path in _folder().glob("*.json")} | running_sessions().keys())


def remember(session: str, nodes: Sequence[Node], *, holder: str, started: StartedWith | None = None) -> None:
    """Record the nodes of ``session`` (none: this machine alone) and how it was started.

    With ``started`` None, an earlier record of it is kept. If the file cannot be written, the session goes on, but a
    later notebook does not know it.
    """
    if not nodes:
        if started is not None:  # its holder is in a file of the agent
            _write(_local_file(session), {"started": asdict(started)})
        return
    path = _folder() / f"{session}.json"
    kept = asdict(started) if started is not None else _load(path).get("started")
    listed = [node.model_dump(mode="json", exclude_defaults=True) for node in nodes]
    with contextlib.suppress(OSError):
        _folder().mkdir(mode=0o700, exist_ok=True)
    _write(path, {"holder": holder, "nodes": listed, "started": kept})


def note_left(session: str, *, is_left: bool, kernel: str = "") -> None:
    """Record ``is_left`` of `KnownSession`, and ``kernel`` as the kernel that is being restarted."""
    for path in (_local_file(session), _folder() / f"{session}.json"):
        said = _load(path)
        known = _known_by(said, "")
        if said and (known.is_left, known.left_by) != (is_left, kernel):
            _write(path, {**said, "is_left": is_left, "left_by": kernel})


def forget(session: str) -> None:
    """Delete the record of ``session``, which has ended."""
    (_folder() / f"{session}.json").unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other sessions' files are in it
        _folder().rmdir()


def _folder() -> Path:
    return runtime_folder() / _FOLDER


def _local_file(session: str) -> Path:
    return runtime_folder() / session / _LOCAL_FILE


def _write(path: Path, said: dict[str, Any]) -> None:
    """Write ``said`` atomically, readable by this user alone."""
    from ..storage import replace_file

    with contextlib.suppress(OSError, TypeError):  # TypeError: a value JSON cannot hold, such as a NumPy number
        replace_file(path, json.dumps(said), mode=0o600)


def _load(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty when the file cannot be read, as if it were missing."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        said = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(said, dict):
            return said
    return {}


def _read(path: Path) -> KnownSession | None:
    from ..spec.node import Node

    said = _load(path)
    with contextlib.suppress(KeyError, TypeError, DetrainError):
        nodes = tuple(Node(**fields) for fields in said["nodes"])
        if nodes:
            return _known_by(said, str(said["holder"]), nodes=nodes)
    return None


def _known_by(said: dict[str, Any], holder: str, *, pid: int = 0, nodes: tuple[Node, ...] = ()) -> KnownSession:
    kernel = said.get("left_by")
    left_by = kernel if isinstance(kernel, str) else ""
    return KnownSession(holder, pid, nodes, _read_started(said), said.get("is_left") is True, left_by)


def _duration(seconds: float) -> str:
    """Format seconds in the largest of days, hours and minutes that divides them: 600 is ``10 minutes``."""
    units = ((86_400, "day"), (3_600, "hour"), (60, "minute"))
    size, unit = next((each for each in units if seconds and not seconds % each[0]), (1, "second"))
    count = seconds / size
    return f"{count:g} {unit}{'' if count == 1 else 's'}"


def _read_started(said: dict[str, Any]) -> StartedWith | None:
    """Return the arguments recorded in ``said``; None when one is invalid, as in an edited file."""
    found = said.get("started")
    if not isinstance(found, dict):
        return None
    known = {field.name: found[field.name] for field in fields(StartedWith) if field.name in found}
    if not all(_IS_RIGHT[name](value) for name, value in known.items()):
        return None
    return StartedWith(**{**known, "env": tuple(known.get("env", ()))})


def _is_int(value: object) -> bool:
    return type(value) is int and abs(value) < 1 << 63


def _is_seconds(value: object) -> bool:
    return value is None or type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]


def _is_name(value: object) -> bool:
    """Return True for a valid name of a variable or a backend, which is shown and passed in an environment or argv."""
    return isinstance(value, str) and 0 < len(value) <= _MOST_CHARS and value.isprintable() and "=" not in value


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


_IS_RIGHT: dict[str, Callable[[Any], bool]] = {
    "ranks": lambda value: value is None or _is_int(value) and 1 <= value <= _MOST_RANKS,
    "device": lambda value: value in DEVICES,
    "backend": lambda value: value is None or _is_name(value),
    "init": _is_bool,
    "sync": _is_bool,
    "project": lambda value: isinstance(value, str) and len(value) <= _MOST_CHARS,
    "env": lambda value: isinstance(value, list) and all(map(_is_name, value)),
    "seed": _is_int,
    "start": lambda value: value in ("fork", "exec"),
    "linger_s": _is_seconds,
    "group_timeout_s": _is_seconds,
}
