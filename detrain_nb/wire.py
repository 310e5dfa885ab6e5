"""Messages between session, agent, worker and interpreter: a JSON header plus, for some, one raw buffer.

A frame is a fixed prefix (sizes of header and body, the message's number), a JSON header and the body. A number is
given by the agent to what it spools for the notebook; 0 means "not spooled". A notebook on a link that can break
numbers what it sends, too. The receiving side trusts nothing: types and sizes of every field are checked against the
dataclass, and what does not fit is a ``WireError``.
"""

from __future__ import annotations

import codecs
import json
import math
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

from .errors import WireError

PROTOCOL = 5
MAX_HEADER_BYTES = 1 << 20  # parsed it can take 30 times as much: what is long, and comes from a node, is a body
MAX_ORDER_HEADER_BYTES = 16 << 20  # of what a notebook says, which is trusted
MAX_BODY_BYTES = 64 << 20
MAX_DESCRIPTION_BYTES = 8 << 20  # of a value, as JSON
_TEXT_BYTES = 1 << 18  # with nothing but surrogates: 25 ms
MAX_BUNDLE_BYTES = 32 << 20  # of what a cell shows
MAX_BUNDLE_VALUES = 1 << 16  # of it: strings, numbers, lists; one takes up to 300 bytes parsed, and is kept
PIECE_BYTES = 1 << 20
ALIVE_GAP_S = 5.0  # between signs of life of a notebook, on a connection that can break
SILENCE_LIMIT_S = 20.0  # after which its node lets go of one that gives none
_SMALL_READ_BYTES = 1 << 16
_LARGE_READ_BYTES = 1 << 20
_PREFIX = struct.Struct("!IIQ")

Json = Any
LongText = str


class Message:
    """A message; a field named ``body``, or a LongText, travels as raw bytes behind the header, others inside it."""

    __slots__ = ()


# ---- notebook -> agent


@dataclass(frozen=True)
class Attach(Message):
    """First message of a notebook: which session it means, and who it is; ``steal`` takes it from another notebook.

    ``resumes`` goes on after a connection that broke: what the notebook sent is counted on.
    """

    session: str
    holder: str
    steal: bool = False
    resumes: bool = False
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class OpenStore(Message):
    """Bind a socket for the store of the rendezvous to ``address``, and to no other; answered by ``StoreOpened``."""

    address: str


@dataclass(frozen=True)
class Launch(Message):
    """Start the launcher: ``argv`` and ``env`` as launch.py wrote them, for ranks ``ranks`` of this node.

    ``linger_s``: how long the ranks wait for a notebook to attach again when theirs is gone. ``info``: what the agent
    tells such a notebook of the session. ``spool_limit_bytes``: how much of what nobody has shown is kept.
    """

    argv: list[str]
    env: dict[str, str] = field(repr=False)  # it may hold secrets
    ranks: list[int]
    linger_s: float
    info: Json
    spool_limit_bytes: int = 1 << 30


@dataclass(frozen=True)
class Unfinished(Message):
    """The beginning of a line that has not ended at the number that is acknowledged next; goes to a later notebook."""

    rank: int
    cell: int
    stream: str
    body: bytes


@dataclass(frozen=True)
class Acknowledge(Message):
    """Everything up to the message of this number has been shown; lines that are cut there came as ``Unfinished``."""

    number: int


@dataclass(frozen=True)
class Alive(Message):
    """The notebook is there: one that has gone without a word would hold its session for ever. ``Received`` answers."""


@dataclass(frozen=True)
class EndSession(Message):
    """End the ranks and the agent.

    With ``keep_s`` the agent stays for so long, with what its ranks have imported, for ``Begin`` on the same
    connection; then ``Kept`` is the last that it says of this session.
    """

    keep_s: float = 0.0


@dataclass(frozen=True)
class Begin(Message):
    """To an agent that was kept: serve session ``session`` in ``folder`` (empty: beside the last); see ``Begun``.

    ``work_folder``: to be made there, if not empty; ``uses`` as in agents.py. On the notebook's machine ``starter`` is
    what an agent would get from the notebook's process now (node/system/surroundings.py), and ``env`` its
    environment; elsewhere the one is empty, the other None.
    """

    session: str
    folder: str
    work_folder: str
    uses: list[str]
    starter: dict[str, str]
    env: dict[str, str] | None = field(repr=False)  # it may hold secrets


# ---- notebook -> ranks


@dataclass(frozen=True)
class RunCell(Message):
    """Run ``code`` as cell ``cell`` on ``ranks``; its first line is line ``first_line`` of the cell in the notebook.

    Meant for the interpreters of ``incarnations``, one for each rank: one that was forked since leaves it alone.
    ``is_replay``: it is an earlier cell, run once more.
    """

    ranks: list[int]
    incarnations: list[int]
    cell: int
    code: str
    first_line: int = 1
    is_replay: bool = False


@dataclass(frozen=True)
class Interrupt(Message):
    """Raise KeyboardInterrupt in ``cell`` if a rank still runs it."""

    ranks: list[int]
    cell: int


@dataclass(frozen=True)
class NewGeneration(Message):
    """End the process groups of the generation before, and make the default group of generation ``number``.

    ``is_checked``: its ranks compare collectives before they begin them. Without ``has_group`` it is left to cells to
    make groups, and nobody answers.
    """

    ranks: list[int]
    number: int
    is_checked: bool = False
    has_group: bool = True


@dataclass(frozen=True)
class EndGeneration(Message):
    """End the process groups of generation ``number``, whoever waits in them; answered by ``GenerationEnded``."""

    ranks: list[int]
    number: int


@dataclass(frozen=True)
class Replace(Message):
    """Kill the interpreters of ranks and start fresh ones; those that were left down are started again.

    With ``cell`` only those that still run it.
    """

    ranks: list[int]
    cell: int = 0


@dataclass(frozen=True)
class Renumber(Message):
    """Ranks get other numbers, ``numbers[i]`` for ``ranks[i]``, in a smaller world; ``RequestDone`` comes with the new.

    All of them are idle, and their groups were ended.
    """

    ranks: list[int]
    request: int
    numbers: list[int]
    world_size: int


@dataclass(frozen=True)
class Locate(Message):
    """Ask workers where their rank is; answered by ``Position``, with the stack only where ``stack`` says so."""

    ranks: list[int]
    request: int
    stack: bool


@dataclass(frozen=True)
class Broadcast(Message):
    """Send variables from rank ``source`` to the other ``ranks``, rank to rank; each answers with ``RequestDone``."""

    ranks: list[int]
    request: int
    names: list[str]
    source: int


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
    """Answer to ``Attach``: which incarnation of an agent this is, what it runs on, and what it remembers.

    ``ranks`` is empty before the launch. Messages up to ``acknowledged`` were shown, up to ``sent`` perhaps, up to
    ``last_number`` not by this notebook. How cells and ranks stand has come before, without a number: ``RanCell``,
    ``Unfinished``, ``RankUp``, ``RankEnded``. Of the notebook's own messages, those up to ``received`` have arrived.
    ``free_bytes``: of its memory; 0 where that is not known.
    """

    incarnation: str
    pid: int
    host: str
    gpus: int
    cpus: int
    last_number: int
    acknowledged: int
    sent: int
    ranks: list[int]
    with_group: list[int]
    generation: int
    info: Json
    received: int = 0
    free_bytes: int = 0
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Received(Message):
    """The notebook's messages up to ``number`` have arrived: they need not be sent again when the connection breaks."""

    number: int


@dataclass(frozen=True)
class StoreOpened(Message):
    """The store will listen on ``port``; where that cannot be, ``port`` is 0 and ``error`` says why."""

    port: int
    error: str = ""


@dataclass(frozen=True)
class RanCell(Message):
    """A cell that an earlier notebook has run on ``ranks``; ``running`` still do. ``has_failed``: on some rank."""

    ranks: list[int]
    cell: int
    code: LongText
    first_line: int
    is_collective: bool
    running: list[int]
    has_failed: bool
    is_replay: bool = False


@dataclass(frozen=True)
class Refused(Message):
    """The agent did not do what it was asked, and why. ``is_taken``: it goes on, for another notebook."""

    reason: str
    is_taken: bool = False


@dataclass(frozen=True)
class Kept(Message):
    """The session has ended, and nothing of it is left but the agent, which waits for ``Begin``."""


@dataclass(frozen=True)
class Begun(Message):
    """The agent serves the session, or says why not: ``is_taken``, one of that name runs, else it is about to end."""

    error: str = ""
    is_taken: bool = False


@dataclass(frozen=True)
class Notice(Message):
    """Something the user should know that belongs to no cell: output was lost, a disk is full."""

    text: str


@dataclass(frozen=True)
class StartedCold(Message):
    """The warm process that was kept could not be used: ``reason`` says what has changed."""

    reason: str


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
    """The interpreter of a rank is ready for a generation; ``incarnation`` counts those before it in this session."""

    rank: int
    incarnation: int
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
class GenerationEnded(Message):
    """A rank has ended its groups of generation ``number`` by shutting ``connections``.

    ``stale`` are its variables that hold a communicator of that generation: groups, meshes, DDP and FSDP modules.
    """

    rank: int
    number: int
    connections: int
    stale: list[str]


@dataclass(frozen=True)
class Collectives(Message):
    """What a rank's process says of itself; from the interpreter to its worker. See node/cell/recorder.py."""

    rank: int
    request: int
    known: Json


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
    """A cell ended well; the body is the rich form of its last expression's value, or empty.

    ``is_collective``: it began something with other ranks. ``overwritten``: of the variables that the rank began with.
    """

    rank: int
    cell: int
    seconds: float
    has_group: bool
    is_collective: bool
    body: bytes
    overwritten: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CellFailed(Message):
    """A cell raised; ``traceback`` has the user's lines. ``is_collective``, ``overwritten``: see ``CellDone``.

    ``is_ending``: the process of the rank ends because of it.
    """

    rank: int
    cell: int
    seconds: float
    has_group: bool
    is_collective: bool
    name: str
    message: str
    traceback: list[str]
    interrupted: bool
    is_ending: bool = False
    overwritten: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Value(Message):
    """The description of a pulled variable, as JSON in the body; its bytes follow in ``Piece`` s."""

    rank: int
    request: int
    name: str
    body: bytes

    @cached_property
    def description(self) -> Json:
        """Parsed when somebody wants the value: it may be large. Raises: WireError."""
        if len(self.body) > MAX_DESCRIPTION_BYTES:
            raise WireError(f"a value is described in {len(self.body)} bytes, more than any has")
        return parse_json(self.body)


@dataclass(frozen=True)
class RequestDone(Message):
    """What was asked for is done. ``orphans``: optimizers of parameters that no model has there, after a broadcast."""

    rank: int
    request: int
    orphans: list[str] = field(default_factory=list)


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
    text: LongText


@dataclass(frozen=True)
class Position(Message):
    """Where a rank is: its state (starting, idle, running, down), the cell and the line it is at, its memory.

    ``seconds``: since it came into that state. ``cpu_s``: processor time of its main thread so far, on the clock
    ``clock_s``. ``stack``: frames, innermost first, down to the cell's own. ``call``: the source of what the innermost
    calls; ``asleep_in``: the function of the kernel that the main thread sleeps in; empty where not known.
    ``collectives``: what the interpreter said ``age_s`` ago (-1: nothing yet). See node/cell/recorder.py.
    """

    rank: int
    request: int
    pid: int
    state: str
    cell: int
    line: int
    function: str
    seconds: float
    rss_bytes: int
    stack: list[str]
    cpu_s: float
    clock_s: float
    collectives: Json
    age_s: float
    call: str = ""
    asleep_in: str = ""


@dataclass(frozen=True)
class RankEnded(Message):
    """The interpreter of a rank ended: by ``signal`` or, where that is 0, with ``exit_code``.

    ``reason`` is what else is known of it (out of memory). ``asked``: it was to be replaced. ``down`` says why no fresh
    one is started; empty when one is.
    """

    rank: int
    pid: int
    cell: int
    signal: int
    exit_code: int
    stderr_tail: str
    reason: str
    asked: bool
    down: str


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
    behind = _BEHIND_HEADER.get(kind)
    body = getattr(message, behind) if behind else b""
    if isinstance(body, str):
        body = body.encode("utf-8", "surrogatepass")
    return Frame(0, json.dumps(header, separators=(",", ":")).encode(), body)


class FrameReader:
    """Cut a stream of bytes into frames."""

    def __init__(self, *, max_header_bytes: int = MAX_HEADER_BYTES) -> None:
        self.max_header_bytes = max_header_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Take the next bytes; return the frames that are now complete. Raises: WireError."""
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        position = 0
        while len(buffer) - position >= _PREFIX.size:
            header_bytes, body_bytes, number = _PREFIX.unpack_from(buffer, position)
            if header_bytes > self.max_header_bytes or body_bytes > MAX_BODY_BYTES:
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

    def __init__(self, sock: socket.socket, *, max_header_bytes: int = MAX_HEADER_BYTES) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._reader = FrameReader(max_header_bytes=max_header_bytes)
        self._waiting: deque[memoryview] = deque()
        self.waiting_bytes = 0
        self._receive_bytes = _SMALL_READ_BYTES

    def fileno(self) -> int:
        return self.sock.fileno()

    def limit_headers(self, max_bytes: int) -> None:
        """From now on."""
        self._reader.max_header_bytes = max_bytes

    def send(self, message: Message) -> None:
        self.send_bytes(to_frame(message).to_bytes())

    def send_bytes(self, data: bytes) -> None:
        """Send now what the socket takes; the rest goes with ``flush``. Raises: LinkClosed."""
        self.add_bytes(data)
        if len(self._waiting) == 1:
            self.flush()

    def add_bytes(self, data: bytes) -> None:
        """Send a frame with the next ``flush``."""
        self.waiting_bytes += len(data)
        self._waiting.append(memoryview(data))

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
        self.waiting_bytes = 0
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
    """JSON from the other side. Raises: WireError, also on NaN, nesting without end, and a key that comes twice."""
    try:
        return _DECODER.decode(data.decode())
    except (ValueError, RecursionError) as exc:
        raise WireError(f"not JSON: {exc}") from exc


SIZES = "application/vnd.detrain_nb.sizes+json"  # in what a cell shows: {mime type: {"width": .., "height": ..}}


def parse_bundle(data: bytes) -> dict[str, Json]:
    """What a cell shows, by mime type. Raises: WireError, also when it has more than ``MAX_BUNDLE_VALUES``."""
    if len(data) > MAX_BUNDLE_VALUES and count_values(data) > MAX_BUNDLE_VALUES:
        raise WireError("what a cell shows has more values than any has")
    bundle = parse_json(data)
    if not isinstance(bundle, dict):
        raise WireError("what a cell shows is not by mime type")
    return bundle


def count_values(data: bytes, *, most: int = MAX_BUNDLE_VALUES) -> int:
    """How many values a JSON text has at most, without parsing it; stops to count soon after ``most``."""
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")
    strings = plain.count(b'"') // 2
    if strings <= most:
        outside = b"".join(plain.split(b'"')[::2])
        return strings + sum(outside.count(mark) for mark in (b",", b"[", b"{"))
    return strings


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _refuse_repeats(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key comes twice")
    return made


_PLAIN = bytes(range(0x20, 0x7F))


def _read_whole(digits: str) -> int:
    """In Python: other threads have their turn between two numbers, which may have thousands of digits."""
    return int(digits)


def _read_float(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits[:40]} is too large")
    return number


_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant,
    parse_int=_read_whole,
    parse_float=_read_float,
    object_pairs_hook=_refuse_repeats,
)


def _decode(header: bytes, body: bytes) -> Message:
    if header.translate(None, _PLAIN):  # else it would be longer when it is written again, to a log
        raise WireError("a header is not JSON in plain ASCII")
    values = parse_json(header)
    if not isinstance(values, dict):
        raise WireError("a header is not a JSON object")
    name = values.pop("type", "")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise WireError("a header names no known type of message")
    if len(header) > _MOST_HEADER_BYTES.get(kind, len(header)):
        raise WireError(f"{kind.__name__} has a header of {len(header):,} bytes, more than any has")
    checks = _CHECKED_FIELDS[kind]
    behind = _BEHIND_HEADER.get(kind)
    if body and not behind:
        raise WireError(f"{kind.__name__} has a body")
    unknown = values.keys() - _HEADER_FIELDS[kind]
    if unknown:
        raise WireError(f"{kind.__name__} has no field {min(unknown)[:40]!r}")
    if behind:
        if len(body) > _MOST_BYTES_BEHIND.get(kind, len(body)):
            raise WireError(f"{kind.__name__} has {len(body):,} bytes, at most {_MOST_BYTES_BEHIND[kind]:,} are sent")
        values[behind] = body if behind == "body" else read_text(body)
    for name, (fits, required) in checks.items():
        if name not in values:
            if required:
                raise WireError(f"{kind.__name__} lacks {name}")
        elif not fits(values[name]):
            raise WireError(f"{kind.__name__}.{name} is a {type(values[name]).__name__}")
    return kind(**values)


def read_text(data: bytes | memoryview) -> str:
    """Text from the other side, which may have halves of surrogates, as Python's may. Raises: WireError.

    They are slow to read: other threads have their turn between two pieces of it.
    """
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        pass
    reader = codecs.getincrementaldecoder("utf-8")("surrogatepass")
    pieces = (data[start : start + _TEXT_BYTES] for start in range(0, len(data), _TEXT_BYTES))
    try:
        return "".join([*(reader.decode(piece) for piece in pieces), reader.decode(b"", final=True)])
    except UnicodeDecodeError as exc:
        raise WireError(f"not text: {exc.reason}") from exc


def _is_int(value: object) -> bool:
    return type(value) is int and -(1 << 53) <= value <= 1 << 53


def _is_list_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(fits(item) for item in value)


def _is_str(value: object) -> bool:
    return isinstance(value, str)


def _is_dict_of_str(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_str, value.values()))


_FITS: dict[str, Callable[[object], bool]] = {
    "int": _is_int,
    "float": lambda value: math.isfinite(value) if type(value) is float else _is_int(value),  # no int without end
    "bool": lambda value: isinstance(value, bool),
    "str": _is_str,
    "bytes": lambda value: isinstance(value, bytes),
    "LongText": _is_str,
    "Json": lambda value: True,
    "list[int]": _is_list_of(_is_int),
    "list[str]": _is_list_of(_is_str),
    "dict[str, str]": _is_dict_of_str,
    "dict[str, str] | None": lambda value: value is None or _is_dict_of_str(value),
}

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in Message.__subclasses__()}
_CHECKED_FIELDS = {
    kind: {f.name: (_FITS[str(f.type)], f.default is f.default_factory is MISSING) for f in fields(kind)}  # type: ignore
    for kind in _KINDS.values()
}
_BEHIND_HEADER = {kind: f.name for kind in _KINDS.values() for f in fields(kind) if f.type in ("bytes", "LongText")}  # type: ignore[arg-type]
# No rank sends more, and to read or to clean more takes time and memory.
_MOST_BYTES_BEHIND: dict[type[Message], int] = {
    Inspection: 1 << 20,  # 200,000 characters of help
    RanCell: MAX_ORDER_HEADER_BYTES,  # the code was in one
    Display: MAX_BUNDLE_BYTES,
    CellDone: MAX_BUNDLE_BYTES,
}
_MOST_HEADER_BYTES: dict[type[Message], int] = {Position: 1 << 19}  # all ranks say one at once, each second
_HEADER_FIELDS = {
    kind: dict.fromkeys(name for name in checks if name != _BEHIND_HEADER.get(kind)).keys()
    for kind, checks in _CHECKED_FIELDS.items()
}
