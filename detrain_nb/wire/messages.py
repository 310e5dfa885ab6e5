"""Messages between session, agent, worker and interpreter, and the validation of their fields.

The receiving side trusts nothing: it checks type and size of every field against the dataclass; anything else is a
``WireError``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import ClassVar

from ..errors import WireError
from .json_text import MAX_BUNDLE_BYTES, Json, count_values, parse_json, read_text, without_collections

PROTOCOL = 6
MAX_HEADER_BYTES = 1 << 20  # parsing can take 30 times as much memory: long data from a node is a body
MAX_ORDER_HEADER_BYTES = 16 << 20  # of messages from a notebook, which is trusted
MAX_BODY_BYTES = 64 << 20
MAX_DESCRIPTION_BYTES = 8 << 20  # of a value, as JSON
MAX_DESCRIPTION_VALUES = 1 << 20  # in it, by count_values: no other thread runs while it is parsed
PIECE_BYTES = 1 << 20
ALIVE_GAP_S = 5.0  # between signs of life of a notebook, on a connection that can break
SILENCE_LIMIT_S = 20.0  # after which its node drops a notebook that sends none

LongText = str


class OtherProtocol(WireError):
    """The other side has another version of detrain_nb."""


KINDS: dict[int, type[Message]] = {}
NUMBERS: dict[type[Message], int] = {}


class Message:
    """A message; a field named ``body``, or a LongText, travels as raw bytes after the header, others inside it.

    ``number``: the kind in the prefix of its frames, which never changes. 0 is unused: protocols up to 5 had 0 there.
    """

    __slots__ = ()

    def __init_subclass__(cls, *, number: int) -> None:
        assert number not in KINDS, f"{KINDS[number]} has that number"
        KINDS[number], NUMBERS[cls] = cls, number


# ---- notebook -> agent


@dataclass(frozen=True)
class Attach(Message, number=1):
    """First message of a notebook: the session it means, and who it is; ``steal`` takes it from another notebook.

    ``resumes``: continue after a broken connection; the numbers of the notebook's messages continue too.
    """

    session: str
    holder: str
    steal: bool = False
    resumes: bool = False
    protocol: int = PROTOCOL
    type: str = "Attach"  # an agent of a protocol before 6 reads the kind here, and refuses


@dataclass(frozen=True)
class OpenStore(Message, number=2):
    """Bind a socket for the rendezvous store to ``address``, and to no other; answered by ``StoreOpened``."""

    address: str


@dataclass(frozen=True)
class Launch(Message, number=3):
    """Start the launcher: ``argv`` and ``env`` as built by launch.py, for ranks ``ranks`` of this node.

    ``linger_s``: how long the ranks wait for another notebook when theirs has disappeared. ``info``: what the agent
    then reports to that notebook about the session. ``spool_limit_bytes``: how much unshown output is kept.
    """

    argv: list[str]
    env: dict[str, str] = field(repr=False)  # it may hold secrets
    ranks: list[int]
    linger_s: float
    info: Json
    spool_limit_bytes: int = 1 << 30


@dataclass(frozen=True)
class Unfinished(Message, number=4):
    """The beginning of a line unfinished at the number that is acknowledged next; passed to a later notebook."""

    rank: int
    cell: int
    stream: str
    body: bytes


@dataclass(frozen=True)
class Acknowledge(Message, number=5):
    """Everything up to the message of this number was shown; lines cut there were sent as ``Unfinished``."""

    number: int


@dataclass(frozen=True)
class Alive(Message, number=6):
    """A sign of life: a notebook that vanished would hold its session forever. ``Received`` answers."""


@dataclass(frozen=True)
class EndSession(Message, number=7):
    """End the ranks and the agent.

    With ``keep_s`` the agent stays for that many seconds, with the modules that its ranks imported, for ``Begin`` on
    the same connection; ``Kept`` is then its last message about this session.
    """

    keep_s: float = 0.0


@dataclass(frozen=True)
class Begin(Message, number=8):
    """Order to a kept agent to serve session ``session`` in ``folder`` (empty: next to the last one); see ``Begun``.

    ``work_folder``: to be created there, if not empty; ``uses`` as in agents.py. On the notebook's machine ``starter``
    is what an agent would now inherit from the notebook's process (node/system/surroundings.py), and ``env`` its
    environment; elsewhere ``starter`` is empty and ``env`` is None.
    """

    session: str
    folder: str
    work_folder: str
    uses: list[str]
    starter: dict[str, str]
    env: dict[str, str] | None = field(repr=False)  # it may hold secrets


# ---- notebook -> ranks


@dataclass(frozen=True)
class RunCell(Message, number=9):
    """Run ``code`` as cell ``cell`` on ``ranks``; its first line is line ``first_line`` of the cell in the notebook.

    Meant for the interpreters of ``incarnations``, one per rank: one forked since ignores it. ``is_replay``: it is an
    earlier cell, run again.
    """

    ranks: list[int]
    incarnations: list[int]
    cell: int
    code: str
    first_line: int = 1
    is_replay: bool = False


@dataclass(frozen=True)
class Interrupt(Message, number=10):
    """Raise KeyboardInterrupt in ``cell`` if a rank still runs it."""

    ranks: list[int]
    cell: int


@dataclass(frozen=True)
class NewGeneration(Message, number=11):
    """End the process groups of the previous generation, and make the default group of generation ``number``.

    ``is_checked``: ranks compare collectives before they begin them. Without ``has_group`` making groups is left to
    cells, and ranks do not answer.
    """

    ranks: list[int]
    number: int
    is_checked: bool = False
    has_group: bool = True


@dataclass(frozen=True)
class EndGeneration(Message, number=12):
    """End the process groups of generation ``number``, even if ranks wait in them; answered by ``GenerationEnded``."""

    ranks: list[int]
    number: int


@dataclass(frozen=True)
class Replace(Message, number=13):
    """Kill the interpreters of ranks and start fresh ones; ranks that were not restarted are started again.

    With ``cell``, only ranks that still run it.
    """

    ranks: list[int]
    cell: int = 0


@dataclass(frozen=True)
class Renumber(Message, number=14):
    """Renumber ranks, ``numbers[i]`` for ``ranks[i]``, in a smaller world; ``RequestDone`` has the new number.

    All these ranks are idle, and their groups were ended.
    """

    ranks: list[int]
    request: int
    numbers: list[int]
    world_size: int


@dataclass(frozen=True)
class Locate(Message, number=15):
    """Ask workers where their rank is; answered by ``Position``, which has the stack if ``stack`` is set."""

    ranks: list[int]
    request: int
    stack: bool


@dataclass(frozen=True)
class Broadcast(Message, number=16):
    """Send variables from rank ``source`` to the other ``ranks``, rank to rank; each answers with ``RequestDone``."""

    ranks: list[int]
    request: int
    names: list[str]
    source: int


@dataclass(frozen=True)
class Pull(Message, number=17):
    """Request the values of variables; answered by ``Value`` and its ``Piece`` s, or by ``RequestFailed``."""

    ranks: list[int]
    request: int
    names: list[str]


@dataclass(frozen=True)
class Push(Message, number=18):
    """Set a variable; its bytes follow in ``Piece`` s. Answered by ``RequestDone`` or ``RequestFailed``."""

    ranks: list[int]
    request: int
    name: str
    description: Json


@dataclass(frozen=True)
class Complete(Message, number=19):
    """Request completions of ``code`` at ``position``; answered by ``Completions``."""

    ranks: list[int]
    request: int
    code: str
    position: int


@dataclass(frozen=True)
class Inspect(Message, number=20):
    """Request the help text of ``name``; answered by ``Inspection``."""

    ranks: list[int]
    request: int
    name: str
    detail: int


@dataclass(frozen=True)
class Piece(Message, number=21):
    """The next bytes of buffer ``buffer`` of a value, in order. Travels in both directions."""

    ranks: list[int]
    request: int
    name: str
    buffer: int
    body: bytes


# ---- agent -> notebook


@dataclass(frozen=True)
class Attached(Message, number=22):
    """Answer to ``Attach``: which incarnation of an agent this is, what it runs on, and what it remembers.

    ``ranks`` is empty before the launch. Messages up to ``acknowledged`` were shown, those up to ``sent`` may have
    been, and all up to ``last_number`` were meant for an earlier notebook. The state of cells and ranks was sent
    before, without a number: ``RanCell``, ``Unfinished``, ``RankUp``, ``RankEnded``. Of the notebook's own messages,
    those up to ``received`` have arrived. ``free_bytes``: free memory; 0 if unknown. ``info`` is that of ``Launch``,
    plus optional abilities of this agent: ``measures``, ``tells_variables``.
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
class Received(Message, number=23):
    """The notebook's messages up to ``number`` have arrived, and need not be sent again after a broken connection."""

    number: int


@dataclass(frozen=True)
class StoreOpened(Message, number=24):
    """The store will listen on ``port``; if that failed, ``port`` is 0 and ``error`` the reason."""

    port: int
    error: str = ""


@dataclass(frozen=True)
class RanCell(Message, number=25):
    """A cell that an earlier notebook ran on ``ranks``; ``running`` still run it. ``has_failed``: on some rank."""

    ranks: list[int]
    cell: int
    code: LongText
    first_line: int
    is_collective: bool
    running: list[int]
    has_failed: bool
    is_replay: bool = False


@dataclass(frozen=True)
class Refused(Message, number=26):
    """The agent refused a request, and why. ``is_taken``: its session now belongs to another notebook."""

    reason: str
    is_taken: bool = False
    type: str = "Refused"  # a notebook of a protocol before 6 reads the kind here


@dataclass(frozen=True)
class Kept(Message, number=27):
    """The session has ended; only its agent is left, and waits for ``Begin``."""


@dataclass(frozen=True)
class Begun(Message, number=28):
    """The agent serves the session, or ``error`` is the reason why not.

    ``is_taken``: a session of that name runs; otherwise the agent is about to exit.
    """

    error: str = ""
    is_taken: bool = False


@dataclass(frozen=True)
class Notice(Message, number=29):
    """Information for the user that belongs to no cell: output was lost, a disk is full."""

    text: str


@dataclass(frozen=True)
class StartedCold(Message, number=30):
    """The kept warm process could not be used: ``reason`` names what has changed."""

    reason: str


@dataclass(frozen=True)
class LauncherEnded(Message, number=31):
    """The launcher of this node, and so every rank, exited without being asked to, or could not be started."""

    exit_code: int
    log_tail: str


# ---- ranks -> notebook


@dataclass(frozen=True)
class WorkerUp(Message, number=32):
    """First message of a worker to its agent; not passed on to the notebook."""

    rank: int
    pid: int


@dataclass(frozen=True)
class RankUp(Message, number=33):
    """The interpreter of a rank is ready for a generation; ``incarnation`` is 1 for the first interpreter."""

    rank: int
    incarnation: int
    local_rank: int
    world_size: int
    pid: int
    host: str
    device: str
    torch: str


@dataclass(frozen=True)
class GenerationReady(Message, number=34):
    """A rank has its default group of generation ``number``, or could not make it because of ``error``."""

    rank: int
    number: int
    error: str = ""


@dataclass(frozen=True)
class GenerationEnded(Message, number=35):
    """A rank has ended its groups of generation ``number`` by shutting ``connections``.

    ``stale`` are its variables that hold a communicator of that generation: groups, meshes, DDP and FSDP modules.
    """

    rank: int
    number: int
    connections: int
    stale: list[str]


@dataclass(frozen=True)
class Collectives(Message, number=36):
    """The report of an interpreter on itself to its worker. See node/cell/recorder.py."""

    rank: int
    request: int
    known: Json


@dataclass(frozen=True)
class Output(Message, number=37):
    """Bytes that a rank wrote to ``stream`` (stdout or stderr) while, or after, it ran ``cell``."""

    rank: int
    cell: int
    stream: str
    body: bytes


@dataclass(frozen=True)
class Display(Message, number=38):
    """A rich output: the body is a JSON object {mime type: data}. ``update`` redraws an earlier ``display_id``."""

    rank: int
    cell: int
    display_id: str
    update: bool
    body: bytes


@dataclass(frozen=True)
class ClearOutput(Message, number=39):
    """The cell asked to clear its earlier output on this rank."""

    rank: int
    cell: int
    wait: bool


@dataclass(frozen=True)
class CellDone(Message, number=40):
    """A cell ended without error; the body is the rich form of its last expression's value, or empty.

    ``is_collective``: it began an operation with other ranks. ``overwritten``: predefined variables that it replaced.
    """

    rank: int
    cell: int
    seconds: float
    has_group: bool
    is_collective: bool
    body: bytes
    overwritten: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CellFailed(Message, number=41):
    """A cell raised; ``traceback`` has the user's lines. ``is_collective``, ``overwritten``: see ``CellDone``.

    ``is_ending``: the process of the rank exits because of it.
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
class Value(Message, number=42):
    """The description of a pulled variable, as JSON in the body; its bytes follow in ``Piece`` s."""

    rank: int
    request: int
    name: str
    body: bytes

    @cached_property
    def description(self) -> Json:
        """The parsed description, on first use: it may be large. Raises: WireError."""
        if len(self.body) > MAX_DESCRIPTION_BYTES:
            raise WireError(f"a value is described in {len(self.body):,} bytes, more than {MAX_DESCRIPTION_BYTES:,}")
        if count_values(self.body, most=MAX_DESCRIPTION_VALUES) > MAX_DESCRIPTION_VALUES:
            raise WireError(f"a value is described in more than {MAX_DESCRIPTION_VALUES:,} values")
        with without_collections():
            return parse_json(self.body)


@dataclass(frozen=True)
class RequestDone(Message, number=43):
    """A request is done. ``orphans``: optimizers whose parameters belong to no model there, after a broadcast."""

    rank: int
    request: int
    orphans: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RequestFailed(Message, number=44):
    rank: int
    request: int
    error: str


@dataclass(frozen=True)
class Completions(Message, number=45):
    """Completions with the type of each ("function", "instance", "" if unknown)."""

    rank: int
    request: int
    matches: list[str]
    types: list[str]
    start: int
    end: int


@dataclass(frozen=True)
class Inspection(Message, number=46):
    """The help text of a name; empty if there is none."""

    rank: int
    request: int
    text: LongText


@dataclass(frozen=True)
class Position(Message, number=47):
    """Where a rank is: its state (starting, idle, running, down), the cell and the line it is at, its memory.

    ``seconds``: since it entered that state. ``cpu_s``: processor time of its main thread so far, on the clock
    ``clock_s``. ``stack``: frames, innermost first, down to the cell's own. ``call``: the source of the innermost
    frame's call; ``asleep_in``: the kernel function in which the main thread sleeps; empty if unknown. ``collectives``:
    the interpreter's report ``age_s`` ago (-1: none yet). See node/cell/recorder.py.
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
class RankEnded(Message, number=48):
    """The interpreter of a rank ended: by ``signal`` or, if that is 0, with ``exit_code``.

    ``reason``: what else is known (out of memory). ``asked``: it was replaced on request. ``down``: why no fresh one is
    started; empty if one is.
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


# ---- live views: sent only to agents with ``measures`` in ``Attached.info``


@dataclass(frozen=True)
class Measure(Message, number=49):
    """From the notebook: report the resource use of this node's ranks every ``every_s``, for ``for_s`` from now on.

    With ``for_s`` 0, stop. Answered by ``Measured``, repeatedly.
    """

    every_s: float
    for_s: float


@dataclass(frozen=True)
class Measured(Message, number=50):
    """From an agent: what its ranks use. It is not kept: a notebook that is slow misses some.

    The first lists have an entry for each of ``ranks``, those of ``gpu_...`` one for each GPU of the node; ``gpus``
    maps ranks to these. Unknown values are -1. ``cpu_percent`` is of one processor, and of the rank's process alone;
    ``node_cpu_percent`` is of all processors. ``steps_per_s`` is that of the cell in ``cells``, which the rank runs
    (-1: none); see node/agent/step_rates.py. Values above ``MOST_...`` are not believed, and end the session.
    """

    MOST_PERCENT: ClassVar[float] = 100.0 * (1 << 16)  # of a processor, by the threads of one process
    MOST_STEPS_PER_S: ClassVar[float] = 1e9

    ranks: list[int]
    cpu_percent: list[float]
    rss_bytes: list[int]
    steps_per_s: list[float]
    cells: list[int]
    gpus: list[int]
    gpu_names: list[str]
    gpu_percent: list[float]
    gpu_used_bytes: list[int]
    gpu_total_bytes: list[int]
    node_cpu_percent: float
    memory_used_bytes: int
    memory_total_bytes: int


# ---- the variables of ranks


@dataclass(frozen=True)
class AskVariables(Message, number=51):
    """Ask which variables ranks have, of an agent that ``tells_variables``.

    Answered like ``Pull``, with one value named ``ANSWER``. ``wanted``: see node/cell/variables.py.
    """

    ANSWER: ClassVar[str] = "variables"
    MOST_NAMES: ClassVar[int] = 2_000  # in an answer

    ranks: list[int]
    request: int
    wanted: Json


# ---- the prefix of a frame


# Who sends what; a worker passes on what its interpreter sends.
FROM_NOTEBOOK = frozenset(kind for number, kind in KINDS.items() if number <= NUMBERS[Piece]) | {Measure, AskVariables}
FROM_INTERPRETER = frozenset(
    kind for number, kind in KINDS.items() if NUMBERS[WorkerUp] < number <= NUMBERS[RankEnded]
) | {Piece}
FROM_WORKER = FROM_INTERPRETER - {Collectives}
FROM_NODE = frozenset(NUMBERS) - FROM_NOTEBOOK - {WorkerUp, Collectives} | {Piece, Unfinished}


def find_kind(number: int, kinds: Collection[type[Message]]) -> type[Message]:
    """Return the kind with that number. Raises: WireError when there is none, or the sender may not send it."""
    if (kind := KINDS.get(number)) is not None:
        check_sender(kind, kinds)
        return kind
    if number == 0:
        raise OtherProtocol(
            f"one side uses protocol {PROTOCOL}, the other one before 6: install one version of detrain_nb on both"
        )
    raise WireError(f"a frame has the unknown kind {number}")


def check_sender(kind: type[Message], kinds: Collection[type[Message]]) -> None:
    """Check that ``kind`` is one of the ``kinds`` that the sender may send. Raises: WireError."""
    if kind not in kinds:
        raise WireError(f"{kind.__name__} may not be sent by that side")


def check_sizes(kind: type[Message], header_bytes: int, body_bytes: int) -> None:
    """Check the sizes in a prefix. Raises: WireError when one exceeds the largest for that kind."""
    if header_bytes > _MOST_HEADER_BYTES.get(kind, header_bytes):
        raise WireError(f"{kind.__name__} has {header_bytes:,} bytes of header, more than {_MOST_HEADER_BYTES[kind]:,}")
    if body_bytes and kind not in _BEHIND_HEADER:
        raise WireError(f"{kind.__name__} has an unexpected body")
    if body_bytes > _MOST_BYTES_BEHIND.get(kind, body_bytes):
        raise WireError(f"{kind.__name__} has {body_bytes:,} bytes, more than {_MOST_BYTES_BEHIND[kind]:,}")


# ---- their fields


def lay_out(message: Message) -> tuple[dict[str, Json], bytes]:
    """Split a message into its header and the raw bytes after it."""
    kind = type(message)
    header = {name: getattr(message, name) for name in _HEADER_FIELDS[kind]}
    behind = _BEHIND_HEADER.get(kind)
    body = getattr(message, behind) if behind else b""
    return header, body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body


def make_message(kind: type[Message], values: dict[str, Json], body: bytes) -> Message:
    """Make a message, and empty ``values``, its header. Raises: WireError for missing, unknown or invalid fields."""
    unknown = values.keys() - _HEADER_FIELDS[kind]
    if unknown:
        raise WireError(f"{kind.__name__} has no field {min(unknown)[:40]!r}")
    if behind := _BEHIND_HEADER.get(kind):
        values[behind] = body if behind == "body" else read_text(body)
    for name, (fits, required) in _CHECKED_FIELDS[kind].items():
        if name not in values:
            if required:
                raise WireError(f"{kind.__name__} lacks the field {name}")
        elif not fits(values[name]):
            raise WireError(f"{kind.__name__}.{name} has an invalid value (type {type(values[name]).__name__})")
    return kind(**values)


def _is_int(value: object) -> bool:
    return type(value) is int and -(1 << 53) <= value <= 1 << 53


def _is_float(value: object) -> bool:
    return math.isfinite(value) if type(value) is float else _is_int(value)  # no int of any size


def _is_list_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(fits(item) for item in value)


def _is_str(value: object) -> bool:
    return isinstance(value, str)


def _is_dict_of_str(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_str, value.values()))


_FITS: dict[str, Callable[[object], bool]] = {
    "int": _is_int,
    "float": _is_float,
    "bool": lambda value: isinstance(value, bool),
    "str": _is_str,
    "bytes": lambda value: isinstance(value, bytes),
    "LongText": _is_str,
    "Json": lambda value: True,
    "list[int]": _is_list_of(_is_int),
    "list[float]": _is_list_of(_is_float),
    "list[str]": _is_list_of(_is_str),
    "dict[str, str]": _is_dict_of_str,
    "dict[str, str] | None": lambda value: value is None or _is_dict_of_str(value),
}

_CHECKED_FIELDS = {
    kind: {f.name: (_FITS[str(f.type)], f.default is f.default_factory is MISSING) for f in fields(kind)}  # type: ignore
    for kind in NUMBERS
}
_BEHIND_HEADER = {kind: f.name for kind in NUMBERS for f in fields(kind) if f.type in ("bytes", "LongText")}  # type: ignore[arg-type]
# No rank sends more, and parsing or cleaning more takes time and memory.
_MOST_BYTES_BEHIND: dict[type[Message], int] = {
    Inspection: 1 << 20,  # 200,000 characters of help
    RanCell: MAX_ORDER_HEADER_BYTES,  # it contains code, which came in one
    Display: MAX_BUNDLE_BYTES,
    CellDone: MAX_BUNDLE_BYTES,
}
_MOST_HEADER_BYTES: dict[type[Message], int] = {Position: 1 << 19, Measured: 1 << 19}  # sent every second
_HEADER_FIELDS = {
    kind: dict.fromkeys(name for name in checks if name != _BEHIND_HEADER.get(kind)).keys()
    for kind, checks in _CHECKED_FIELDS.items()
}
