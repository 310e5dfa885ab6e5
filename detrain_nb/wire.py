"""Messages between session, agent, worker and interpreter: a JSON header plus, for some, one raw buffer.

A frame is a fixed prefix (sizes of header and body, the message's number), a JSON header and the body. A number is
given by the agent to what it spools for the notebook; 0 means "not spooled". The receiving side trusts nothing:
types and sizes of every field are checked against the dataclass, and what does not fit is a ``WireError``.
"""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple

from .errors import WireError

PROTOCOL = 1
MAX_HEADER_BYTES = 16 << 20
MAX_BODY_BYTES = 64 << 20
PIECE_BYTES = 1 << 20
_SMALL_READ_BYTES = 1 << 16
_LARGE_READ_BYTES = 1 << 20
_PREFIX = struct.Struct("!IIQ")

Json = Any


class Message:
    """A message; a field named ``body`` travels as raw bytes behind the header, all others inside it."""

    __slots__ = ()


# ---- notebook -> agent


@dataclass(frozen=True)
class Attach(Message):
    """First message of a notebook: which session it means, and who it is."""

    session: str
    holder: str
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Launch(Message):
    """Start the launcher: ``argv`` and ``env`` as launch.py wrote them, for ranks ``ranks`` of this node."""

    argv: list[str]
    env: dict[str, str]
    ranks: list[int]


@dataclass(frozen=True)
class EndSession(Message):
    """End the ranks and the agent."""


# ---- notebook -> ranks


@dataclass(frozen=True)
class RunCell(Message):
    """Run ``code`` as cell ``cell`` on ``ranks``; its first line is line ``first_line`` of the cell in the notebook."""

    ranks: list[int]
    cell: int
    code: str
    first_line: int = 1


@dataclass(frozen=True)
class Interrupt(Message):
    """Raise KeyboardInterrupt in ``cell`` if a rank still runs it."""

    ranks: list[int]
    cell: int


@dataclass(frozen=True)
class NewGeneration(Message):
    """End the process groups of the generation before, and make the default group of generation ``number``."""

    ranks: list[int]
    number: int


@dataclass(frozen=True)
class Locate(Message):
    """Ask workers where their rank is; answered by ``Position``."""

    ranks: list[int]
    request: int


@dataclass(frozen=True)
class Pull(Message):
    """Ask for the values of variables; answered by ``Value`` and its ``Piece`` s, or by ``RequestFailed``."""

    ranks: list[int]
    request: int
    names: list[str]


@dataclass(frozen=True)
class Push(Message):
    """Set a variable; its bytes follow in ``Piece`` s. Answered by ``RequestDone`` or ``RequestFailed``."""

    ranks: list[int]
    request: int
    name: str
    description: Json


@dataclass(frozen=True)
class Complete(Message):
    """Ask for completions of ``code`` at ``position``; answered by ``Completions``."""

    ranks: list[int]
    request: int
    code: str
    position: int


@dataclass(frozen=True)
class Inspect(Message):
    """Ask for the help text of ``name``; answered by ``Inspection``."""

    ranks: list[int]
    request: int
    name: str
    detail: int


@dataclass(frozen=True)
class Piece(Message):
    """The next bytes of buffer ``buffer`` of a value; pieces come in order. Travels in both directions."""

    ranks: list[int]
    request: int
    name: str
    buffer: int
    body: bytes


# ---- agent -> notebook


@dataclass(frozen=True)
class Attached(Message):
    """Answer to ``Attach``: which incarnation of an agent this is and what it runs on."""

    incarnation: str
    pid: int
    host: str
    gpus: int
    cpus: int
    last_number: int
    ranks: list[int]
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Refused(Message):
    """The agent did not do what it was asked, and why."""

    reason: str


@dataclass(frozen=True)
class Notice(Message):
    """Something the user should know that belongs to no cell: output was lost, a disk is full."""

    text: str


@dataclass(frozen=True)
class LauncherEnded(Message):
    """The launcher of this node, and so every rank, ended without being asked to."""

    exit_code: int
    log_tail: str


# ---- ranks -> notebook


@dataclass(frozen=True)
class WorkerUp(Message):
    """First message of a worker to its agent; stays on the node."""

    rank: int
    pid: int


@dataclass(frozen=True)
class RankUp(Message):
    """The interpreter of a rank is ready for its first generation."""

    rank: int
    local_rank: int
    world_size: int
    pid: int
    host: str
    device: str
    torch: str


@dataclass(frozen=True)
class GenerationReady(Message):
    """A rank has its default group of generation ``number``, or could not make it and says why."""

    rank: int
    number: int
    error: str = ""


@dataclass(frozen=True)
class Output(Message):
    """Bytes that a rank wrote to ``stream`` (stdout or stderr) while, or after, it ran ``cell``."""

    rank: int
    cell: int
    stream: str
    body: bytes


@dataclass(frozen=True)
class Display(Message):
    """A rich output: the body is a JSON object {mime type: data}. ``update`` redraws an earlier ``display_id``."""

    rank: int
    cell: int
    display_id: str
    update: bool
    body: bytes


@dataclass(frozen=True)
class ClearOutput(Message):
    """The cell asked for its earlier output on this rank to go away."""

    rank: int
    cell: int
    wait: bool


@dataclass(frozen=True)
class CellDone(Message):
    """A cell ended well; the body is the rich form of its last expression's value, or empty."""

    rank: int
    cell: int
    seconds: float
    has_group: bool
    body: bytes


@dataclass(frozen=True)
class CellFailed(Message):
    """A cell raised; ``traceback`` has the user's lines."""

    rank: int
    cell: int
    seconds: float
    has_group: bool
    name: str
    message: str
    traceback: list[str]
    interrupted: bool


@dataclass(frozen=True)
class Value(Message):
    """The description of a pulled variable; its bytes follow in ``Piece`` s."""

    rank: int
    request: int
    name: str
    description: Json


@dataclass(frozen=True)
class RequestDone(Message):
    rank: int
    request: int


@dataclass(frozen=True)
class RequestFailed(Message):
    rank: int
    request: int
    error: str


@dataclass(frozen=True)
class Completions(Message):
    """Completions with the type of each ("function", "instance", "" where unknown)."""

    rank: int
    request: int
    matches: list[str]
    types: list[str]
    start: int
    end: int


@dataclass(frozen=True)
class Inspection(Message):
    """The help text of a name; empty where there is none."""

    rank: int
    request: int
    text: str


@dataclass(frozen=True)
class Position(Message):
    """Where a rank is: its state (starting, idle, running, lost), the cell and the line it is at, its memory."""

    rank: int
    request: int
    pid: int
    state: str
    cell: int
    line: int
    seconds: float
    rss_bytes: int
    stack: list[str]


@dataclass(frozen=True)
class RankEnded(Message):
    """The interpreter of a rank ended by itself: by ``signal`` or, where that is 0, with ``exit_code``."""

    rank: int
    pid: int
    cell: int
    signal: int
    exit_code: int
    stderr_tail: str


# ---- frames


class Frame(NamedTuple):
    """One message as it lies on the wire."""

    number: int
    header: bytes
    body: bytes

    def to_bytes(self, *, number: int | None = None) -> bytes:
        number = self.number if number is None else number
        return b"".join((_PREFIX.pack(len(self.header), len(self.body), number), self.header, self.body))

    def message(self) -> Message:
        """The message. Raises: WireError when it is not one."""
        return _decode(self.header, self.body)


def to_frame(message: Message) -> Frame:
    """Lay a message out; the frame has no number yet."""
    kind = type(message)
    header = {name: getattr(message, name) for name in _HEADER_FIELDS[kind]}
    header["type"] = kind.__name__
    return Frame(0, json.dumps(header, separators=(",", ":")).encode(), getattr(message, "body", b""))


class FrameReader:
    """Cut a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Take the next bytes; return the frames that are now complete. Raises: WireError."""
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        position = 0
        while len(buffer) - position >= _PREFIX.size:
            header_bytes, body_bytes, number = _PREFIX.unpack_from(buffer, position)
            if header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
                raise WireError(f"a frame announces {header_bytes} + {body_bytes} bytes, more than any message has")
            header_at = position + _PREFIX.size
            body_at = header_at + header_bytes
            if len(buffer) < body_at + body_bytes:
                break
            position = body_at + body_bytes
            with memoryview(buffer) as view:
                frames.append(Frame(number, bytes(view[header_at:body_at]), bytes(view[body_at:position])))
        del buffer[:position]
        return frames

    @property
    def is_empty(self) -> bool:
        """Nothing is left of an unfinished frame."""
        return not self._buffer


class LinkClosed(WireError):
    """The other end of a link is gone."""


class Link:
    """Frames over one connected, non-blocking socket, with a queue of what is still to be sent."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._reader = FrameReader()
        self._waiting: deque[memoryview] = deque()
        self.waiting_bytes = 0
        self._receive_bytes = _SMALL_READ_BYTES

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Message) -> None:
        self.send_bytes(to_frame(message).to_bytes())

    def send_bytes(self, data: bytes) -> None:
        """Send now what the socket takes; the rest goes with ``flush``. Raises: LinkClosed."""
        self._waiting.append(memoryview(data))
        self.waiting_bytes += len(data)
        if len(self._waiting) == 1:
            self.flush()

    def flush(self) -> bool:
        """Send what waits; True when nothing waits any more. Raises: LinkClosed."""
        while self._waiting:
            try:
                sent = self.sock.send(self._waiting[0])
            except BlockingIOError:
                return False
            except OSError as exc:
                raise LinkClosed(f"the other end is gone: {exc}") from exc
            self.waiting_bytes -= sent
            if sent == len(self._waiting[0]):
                self._waiting.popleft()
            else:
                self._waiting[0] = self._waiting[0][sent:]
        return True

    def receive(self) -> list[Frame]:
        """Read once; the frames that are now complete. Raises: LinkClosed at the end, WireError on nonsense."""
        try:
            data = self.sock.recv(self._receive_bytes)
        except BlockingIOError:
            return []
        except OSError as exc:
            raise LinkClosed(f"the other end is gone: {exc}") from exc
        if not data:
            raise LinkClosed("the other end closed the connection")
        # room for a large read costs time at every small one: make it while large ones come
        self._receive_bytes = _SMALL_READ_BYTES if len(data) < self._receive_bytes else _LARGE_READ_BYTES
        return self._reader.feed(data)

    def close(self) -> None:
        self.sock.close()


def json_body(value: Json) -> bytes:
    """A JSON value as the body of a message."""
    return json.dumps(value, separators=(",", ":")).encode()


def parse_json(data: bytes) -> Json:
    """JSON from the other side. Raises: WireError, also on NaN and on nesting without end."""
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as exc:
        raise WireError(f"not JSON: {exc}") from exc


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _decode(header: bytes, body: bytes) -> Message:
    values = parse_json(header)
    if not isinstance(values, dict):
        raise WireError("a header is not a JSON object")
    kind = _KINDS.get(str(values.pop("type", "")))
    if kind is None:
        raise WireError("a header names no known type of message")
    checks = _CHECKED_FIELDS[kind]
    if "body" in checks:
        values["body"] = body
    elif body:
        raise WireError(f"{kind.__name__} has a body")
    unknown = values.keys() - checks.keys()
    if unknown:
        raise WireError(f"{kind.__name__} has no field {min(unknown)[:40]!r}")
    for name, (fits, required) in checks.items():
        if name not in values:
            if required:
                raise WireError(f"{kind.__name__} lacks {name}")
        elif not fits(values[name]):
            raise WireError(f"{kind.__name__}.{name} is a {type(values[name]).__name__}")
    return kind(**values)


def _is_int(value: object) -> bool:
    return type(value) is int and -(1 << 53) <= value <= 1 << 53


def _is_list_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(fits(item) for item in value)


def _is_str(value: object) -> bool:
    return isinstance(value, str)


_FITS: dict[str, Callable[[object], bool]] = {
    "int": _is_int,
    "float": lambda value: type(value) in (int, float),
    "bool": lambda value: isinstance(value, bool),
    "str": _is_str,
    "bytes": lambda value: isinstance(value, bytes),
    "Json": lambda value: True,
    "list[int]": _is_list_of(_is_int),
    "list[str]": _is_list_of(_is_str),
    "dict[str, str]": lambda value: isinstance(value, dict) and all(map(_is_str, value.values())),
}

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in Message.__subclasses__()}
_CHECKED_FIELDS = {
    kind: {f.name: (_FITS[str(f.type)], f.default is MISSING) for f in fields(kind)}  # type: ignore[arg-type]
    for kind in _KINDS.values()
}
_HEADER_FIELDS = {kind: tuple(name for name in checks if name != "body") for kind, checks in _CHECKED_FIELDS.items()}
