"""The interpreter: the process of a rank that runs cells in its main thread, in the namespace ``__main__``.

Its worker forks it from memory with torch and IPython imported. It serves one message after another, and exits when
the worker hangs up.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import gc
import json
import mmap
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ... import values
from ...errors import DetrainError, SessionError
from ...guarded import enter_users_folder
from ...launch import RankConfig
from ...wire import (
    MAX_HEADER_BYTES,
    MAX_ORDER_HEADER_BYTES,
    PIECE_BYTES,
    AskVariables,
    Broadcast,
    CellDone,
    CellFailed,
    ClearOutput,
    Collectives,
    Complete,
    Completions,
    Display,
    EndGeneration,
    FrameReader,
    GenerationEnded,
    GenerationReady,
    Inspect,
    Inspection,
    Locate,
    Message,
    NewGeneration,
    Piece,
    Pull,
    Push,
    RankUp,
    Renumber,
    RequestDone,
    RequestFailed,
    RunCell,
    Value,
    json_body,
    to_frame,
)
from ..groups.broadcast import broadcast, noted_orphans
from ..groups.process_groups import Generation
from ..groups.stale_variables import StaleVariables
from ..system.memory_room import require_room
from .bars import use_text_bars
from .cellrunner import Bundle, CellRunner
from .failures import describe_largest, free_frames, is_context_broken, is_out_of_memory, speak_before_abort
from .given import Given
from .interrupts import HeldSignals, Interrupts
from .recorder import describe_last, look_inside
from .rings import break_rings
from .streams import Streams, flush_streams
from .tracebacks import chain_of, describe_error, error_message, user_traceback
from .unattended import refuse_questions
from .variables import answer_about

_LISTED_BYTES = MAX_HEADER_BYTES // 2  # of all lines or names in a message
_NAME_CHARS = 1000
_OWN_END_LIMIT_S = 0.4  # after another rank's end: shorter than the notebook waits for ranks that it freed
_LEAST_RECURSION = 1000  # Python's default

_Question = TypeVar("_Question", Pull, Push, Piece, Complete, Inspect, Broadcast, AskVariables)


@dataclass(frozen=True)
class Lines:
    """The connections of an interpreter with its worker, besides the pipes at descriptors 1 and 2.

    ``cells`` is served by the main thread, ``control`` by a thread of its own, even while the main thread waits. The
    worker writes the number of the cell that it sends a SIGINT for into ``interrupted_cell``.
    """

    cells: socket.socket
    control: socket.socket
    interrupted_cell: mmap.mmap


def serve(config: RankConfig, rank: int, incarnation: int, lines: Lines) -> None:
    """Run the interpreter of ``rank`` until the worker hangs up; ``incarnation`` is 1 for the first."""
    interpreter = _Interpreter(config, rank, incarnation, lines)
    gc.freeze()  # existing objects stay: collections need not scan them
    with contextlib.suppress(EOFError):
        interpreter.run()
    atexit._run_exitfuncs()


class _Interpreter:
    def __init__(self, config: RankConfig, rank: int, incarnation: int, lines: Lines) -> None:
        self._config = config
        self._rank = rank
        self._incarnation = incarnation
        self._pid = os.getpid()
        self._local_rank = int(os.environ["LOCAL_RANK"])
        self._world_size = int(os.environ["WORLD_SIZE"])
        self._cells_socket = lines.cells
        self._sending = threading.Lock()
        self._control_socket = lines.control
        self._interrupts = Interrupts(lines.interrupted_cell)
        self._held_signals = HeldSignals()
        self._cell = 0
        self._sequences_before: dict[str, int] = {}  # of the groups, at the start of the last cell
        self._arriving: dict[int, tuple[Push, list[int], list[bytearray]]] = {}
        self._streams = Streams(self._cells_socket.fileno())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._interrupts.install()
        sys.argv = [""]  # as in Python without a script: argparse must not see the launcher's options
        session_folder = Path.cwd()
        work_folder = os.fsdecode(config.folder.encode(errors="surrogateescape"))  # UTF-8, in any locale
        if config.is_work_folder:
            enter_users_folder(Path(work_folder))
        else:
            os.chdir(work_folder)
        others = [path for path in sys.path if path not in ("", work_folder)]
        sys.path[:] = [work_folder, "", *others]  # and, as in a notebook, the folder that %cd changed to
        self._device = self._set_device()
        self._seed()
        self._generation = Generation(
            rank=rank,
            world_size=self._world_size,
            backend=config.backend,
            device=self._device,
            timeout_s=config.group_timeout_s,
            folder=session_folder if config.is_only_node else None,
            is_apart=config.is_apart,
        )
        self._generation.take_over_torch()
        speak_before_abort(lambda: describe_last(since_ns=self._generation.started_ns))
        self._stale = StaleVariables()
        self._runner = CellRunner.create(self._display, self._clear)
        events = self._runner.events
        events.trigger = self._interrupts.raised_after(events.trigger)  # type: ignore[method-assign]
        self._given = Given(
            self._runner.user_ns,
            rank=rank,
            local_rank=self._local_rank,
            world_size=self._world_size,
            device=self._device,
            dist=dist,
            torch=torch,
        )
        self._runner.user_ns_hidden.update(self._runner.user_ns)
        self._handlers: dict[type[Message], Callable[[Any], None]] = {
            RunCell: self._run_cell,
            NewGeneration: self._start_generation,
            Renumber: self._renumber,
            Pull: partial(self._answer, self._pull),
            Push: partial(self._answer, self._begin_push),
            Piece: partial(self._answer, self._take_piece),
            Complete: partial(self._answer, self._complete),
            Inspect: partial(self._answer, self._inspect),
            Broadcast: partial(self._answer, self._broadcast),
            AskVariables: partial(self._answer, self._answer_about),
        }
        self._control_handlers: dict[type[Message], Callable[[Any], Message]] = {
            EndGeneration: self._end_generation,
            Locate: self._say_what_is_known,
        }
        refuse_questions(self._runner)
        use_text_bars()

    def run(self) -> NoReturn:
        """Serve messages. Raises: EOFError when the worker has hung up."""
        threading.Thread(target=self._serve_control, name="detrain_nb control", daemon=True).start()
        self._send_up()
        reader = FrameReader(max_header_bytes=MAX_ORDER_HEADER_BYTES)
        while True:
            data = self._cells_socket.recv(1 << 16)
            if not data:
                raise EOFError
            for frame in reader.feed(data):
                self._generation.is_in_use = True
                if handle := self._handlers.get(frame.kind):
                    handle(frame.message())
                self._generation.is_in_use = False

    def _send_up(self) -> None:
        self._send(
            RankUp(
                self._rank,
                self._incarnation,
                self._local_rank,
                self._world_size,
                os.getpid(),
                socket.gethostname(),
                str(self._device),
                torch.__version__,
            )
        )

    # ---- the control thread

    def _serve_control(self) -> None:
        """End generations and report collectives, while the main thread may wait for other ranks.

        This thread must survive whatever a cell has done to the process: without it no rank can be freed. Garbage is
        not collected here: what cells left behind may take long to go, as the workers of a DataLoader do.
        """
        reader = FrameReader()
        with contextlib.suppress(OSError):  # the worker has exited: answers themselves raise none
            while data := self._control_socket.recv(1 << 16):
                is_collecting = gc.isenabled()
                gc.disable()
                try:
                    for frame in reader.feed(data):
                        if handle := self._control_handlers.get(frame.kind):
                            self._control_socket.sendall(to_frame(handle(frame.message())).to_bytes())
                finally:
                    if is_collecting:
                        gc.enable()

    def _say_what_is_known(self, message: Locate) -> Collectives:
        known: dict[str, Any] = {}
        with contextlib.suppress(Exception):
            known = look_inside(
                since_ns=self._generation.started_ns,
                before_cell=self._sequences_before,
                comparisons=self._generation.comparisons,
            )
        if len(json.dumps(known)) > _LISTED_BYTES:  # the user has given a group a very long name
            known = {}
        return Collectives(self._rank, message.request, known)

    def _end_generation(self, message: EndGeneration) -> GenerationEnded:
        connections = 0
        stale: list[str] = []
        # The notebook waits for an answer in any case, and sees which ranks were not freed.
        with contextlib.suppress(Exception):
            connections = self._generation.end(message.number)
        with contextlib.suppress(Exception):
            stale = self._stale.note(self._runner.user_ns)
        return GenerationEnded(self._rank, message.number, connections, stale[: _count_fitting(stale)])

    # ---- cells

    def _run_cell(self, message: RunCell) -> None:
        self._cell = message.cell
        ended_before, operations_before = self._generation.ended, self._generation.operations
        self._sequences_before = self._generation.sequences
        started = time.perf_counter()
        value, error = self._run_code(message)
        if os.getpid() != self._pid:
            _end_forked(error)
        seconds = time.perf_counter() - started
        flush_streams()
        self._say_what_was_broken()
        flush_streams()
        self._given.hide(self._runner.user_ns_hidden)
        overwritten = self._given.newly_overwritten()
        if message.is_replay:  # it was reported when the cell ran first
            overwritten = []
        has_group, is_collective = self._generation.has_group, self._generation.operations != operations_before
        has_generation_ended = self._generation.ended > ended_before
        if error is None and has_generation_ended and self._device.type == "cuda":
            error = SessionError("its process groups were ended while the cell ran: do not use its results")
        body = json_body(value) if value else b""
        done = CellDone(self._rank, message.cell, seconds, has_group, is_collective, body, overwritten)
        if error is None:
            self._send(done)
        else:
            self._report_failure(done, error, was_freed=self._was_freed(error, ended_before))
            held, error = [error], None
            self._interrupts.let_go_by(lambda: break_rings(held[0]))
            self._interrupts.let_go_by(held.clear)

    def _run_code(self, message: RunCell) -> tuple[Bundle, BaseException | None]:
        """Return the value of a cell, or what it raised."""
        try:
            try:
                self._interrupts.begin(message.cell)
                self._held_signals.release()
                return self._runner.run(message.code, message.cell, first_line=message.first_line)
            finally:
                self._interrupts.is_in_cell = False
                self._held_signals.hold()
        except BaseException as exc:  # noqa: BLE001  an interrupt, or a user's handler, between their code and ours
            self._interrupts.is_in_cell = False
            self._held_signals.hold()
            return {}, exc

    def _say_what_was_broken(self) -> None:
        """Restore what the cell has broken and later cells need."""
        lines = self._streams.put_back()
        if sys.getrecursionlimit() < _LEAST_RECURSION:
            lines.append(
                f"this cell set the recursion limit to {sys.getrecursionlimit()}, too low for any later cell: "
                f"it was reset to {_LEAST_RECURSION}"
            )
            sys.setrecursionlimit(_LEAST_RECURSION)
        with contextlib.suppress(Exception):  # a cell may have put anything there
            sys.stderr.write("".join(f"{line}\n" for line in lines))

    def _was_freed(self, error: BaseException, ended_before: int) -> bool:
        """Return whether a stop has ended the generation in which the cell waited.

        A rank that waits for another one is freed as soon as the other rank ends the generation; this rank may end it a
        little later.
        """
        if not self._interrupts.is_due:
            return False
        if any(isinstance(step, RuntimeError) for step in chain_of(error)):  # torch raises this for a closed connection
            self._generation.wait_for_end(ended_before, _OWN_END_LIMIT_S)
        return self._generation.ended > ended_before

    def _report_failure(self, done: CellDone, error: BaseException, *, was_freed: bool) -> None:
        """Send what a cell raised, instead of ``done``; for a rank freed by a stop, only where it was."""
        traceback: list[str] = []
        is_broken = False
        text = "" if was_freed else error_message(error)
        try:
            traceback += [_bounded(line) for line in user_traceback(error, is_own_code_enough=was_freed)]
            if not was_freed:
                is_broken = is_context_broken(error, text)
                traceback += [f"  {line}" for line in self._explain(error, text, is_broken=is_broken)]
                text = self._stale.explain(error, text) or text
        except Exception as exc:  # noqa: BLE001  it inspects user objects: the error itself is reported in any case
            traceback.append(f"  no more details: {type(exc).__name__} while they were gathered")
        if was_freed:  # torch's error about the closed connection may have come first
            error = KeyboardInterrupt()
        self._send(
            CellFailed(
                self._rank,
                done.cell,
                done.seconds,
                self._generation.has_group,
                done.is_collective,
                _bounded(type(error).__name__, limit=_NAME_CHARS),
                _bounded(text),
                _bounded_lines(traceback),
                isinstance(error, KeyboardInterrupt),
                is_broken,
                done.overwritten,
            )
        )
        if is_broken:
            # if the report of its death arrives first, nothing else of the error is shown
            summary = _bounded(text.strip().partition("\n")[0], limit=_NAME_CHARS)
            words = f"{type(error).__name__}: {summary}: no CUDA call works in this process any more: it is replaced"
            os.write(2, f"{words}\n".encode())
            os._exit(1)

    def _explain(self, error: BaseException, text: str, *, is_broken: bool) -> Iterator[str]:
        """Yield lines for the traceback that add to the error's own text."""
        if is_out_of_memory(error, text):
            if largest := describe_largest(self._runner.user_ns):
                yield f"the largest variables on rank {self._rank}: {largest}"
            free_frames(error)
        if is_broken:
            yield f"no CUDA call works on rank {self._rank} after this: it is replaced, and its variables are lost"

    def _display(self, bundle: Bundle, display_id: str, is_update: bool) -> None:
        self._streams.before_display()
        self._send(
            Display(self._rank, self._cell, _bounded(display_id, limit=_NAME_CHARS), is_update, json_body(bundle))
        )

    def _clear(self, wait: bool) -> None:
        self._streams.before_display()
        self._send(ClearOutput(self._rank, self._cell, wait))

    def _start_generation(self, message: NewGeneration) -> None:
        if not message.has_group:
            self._generation.begin(message.number, is_checked=message.is_checked)
            return
        error = ""
        try:
            self._generation.start(message.number, is_checked=message.is_checked)
        except Exception as exc:  # noqa: BLE001  whatever torch raises: the notebook must know, the rank must survive
            error = f"{type(exc).__name__}: {exc}"
        self._send(GenerationReady(self._rank, message.number, _bounded(error)))

    def _renumber(self, message: Renumber) -> None:
        self._rank = message.numbers[message.ranks.index(self._rank)]
        self._world_size = message.world_size
        os.environ.update(RANK=str(self._rank), WORLD_SIZE=str(self._world_size))
        self._generation.renumber(self._rank, self._world_size)
        self._given.set(rank=self._rank, world_size=self._world_size)
        self._runner.user_ns_hidden.update(rank=self._rank, world_size=self._world_size)
        self._send_up()
        self._send(RequestDone(self._rank, message.request))

    # ---- requests

    def _complete(self, message: Complete) -> None:
        matches, types, start, end = self._runner.complete_code(message.code, message.position)
        count = _count_fitting([match + kind for match, kind in zip(matches, types)])
        self._send(Completions(self._rank, message.request, matches[:count], types[:count], start, end))

    def _inspect(self, message: Inspect) -> None:
        text = self._runner.inspect_name(message.name, message.detail)
        self._send(Inspection(self._rank, message.request, _bounded(text, limit=200_000)))

    def _answer(self, act: Callable[[_Question], None], message: _Question) -> None:
        try:
            act(message)
        except Exception as exc:  # noqa: BLE001  repr of a user's class, memory, torch: the rank must survive
            self._arriving.pop(message.request, None)
            error = str(exc) if isinstance(exc, DetrainError) else f"{type(exc).__name__}: {exc}"
            self._send(RequestFailed(self._rank, message.request, _bounded(error)))

    def _pull(self, message: Pull) -> None:
        self._send_values(message.request, {name: self._look_up(name) for name in message.names})

    def _answer_about(self, message: AskVariables) -> None:
        runner = self._runner
        found = answer_about(message.wanted, runner.user_ns, runner.user_ns_hidden, self._look_up)
        self._send_values(message.request, {message.ANSWER: found})

    def _send_values(self, request: int, named: Mapping[str, object]) -> None:
        packed = [(name, *values.pack(value, name=name)) for name, value in named.items()]
        for name, description, buffers in packed:
            self._send(Value(self._rank, request, name, json_body(description)))
            for index, buffer in enumerate(buffers):
                for start in range(0, len(buffer), PIECE_BYTES):
                    piece = bytes(buffer[start : start + PIECE_BYTES])
                    self._send(Piece([self._rank], request, name, index, piece))
        self._send(RequestDone(self._rank, request))

    def _look_up(self, name: str) -> object:
        namespace = self._runner.user_ns
        if name in namespace:
            return namespace[name]
        others = self._runner.user_ns_hidden  # names set by IPython, such as ``open``
        own = [n for n in namespace if n in self._given or n[:1] != "_" and namespace[n] is not others.get(n)]
        near = difflib.get_close_matches(name, own, 1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        if not name.isidentifier():
            raise DetrainError(f"{name!r} is not a variable name: first assign its value to a variable in a cell")
        raise DetrainError(f"there is no variable {name!r}{hint}")

    def _begin_push(self, message: Push) -> None:
        for request, (earlier, _, _) in list(self._arriving.items()):
            if earlier.name == message.name:  # the repetition of an interrupted push
                del self._arriving[request]
        sizes, memory_bytes = values.read_announcement(message.description)
        require_room(memory_bytes, what=message.name, advice="push a part of it, or copy a file with %distributed put")
        self._arriving[message.request] = (message, sizes, [bytearray() for _ in sizes])
        self._finish_push(message.request)

    def _take_piece(self, message: Piece) -> None:
        if message.request not in self._arriving:
            return  # its first message was refused
        _, _, buffers = self._arriving[message.request]
        buffers[message.buffer] += message.body
        self._finish_push(message.request)

    def _finish_push(self, request: int) -> None:
        message, sizes, buffers = self._arriving[request]
        if all(len(buffer) == size for buffer, size in zip(buffers, sizes)):
            del self._arriving[request]
            self._runner.user_ns[message.name] = values.unpack(message.description, buffers)
            self._given.newly_overwritten()  # %push reports it, not the next cell
            self._send(RequestDone(self._rank, request))

    def _broadcast(self, message: Broadcast) -> None:
        found = broadcast(
            lambda: {name: self._look_up(name) for name in message.names},
            message.ranks,
            message.source,
            self._device,
            self._generation.require_not_ended,
        )
        with noted_orphans(self._runner.user_ns, found) as orphans:
            self._runner.user_ns.update(found)
        self._given.newly_overwritten()  # %broadcast reports it, not the next cell
        self._send(RequestDone(self._rank, message.request, orphans[: _count_fitting(orphans)]))

    # ---- set-up

    def _set_device(self) -> torch.device:
        torch.set_num_threads(self._config.threads)
        os.environ["OMP_NUM_THREADS"] = str(self._config.threads)  # it was 1 until all ranks were forked
        if self._config.device != "cuda":
            return torch.device("cpu")
        torch.cuda.set_device(self._local_rank)
        return torch.device("cuda", self._local_rank)

    def _seed(self) -> None:
        """Seed every random generator per rank: forked ranks share the state of each."""
        seed = self._config.seed + self._rank
        random.seed(seed)
        torch.manual_seed(seed)
        with contextlib.suppress(ImportError):  # torch works without it
            import numpy as np

            np.random.seed(seed % (1 << 32))

    def _send(self, message: Message) -> None:
        if os.getpid() != self._pid:
            return  # a process forked by a cell: its messages would corrupt the rank's
        with self._interrupts.held_back(), self._sending:
            self._cells_socket.sendall(to_frame(message).to_bytes())


def _end_forked(error: BaseException | None) -> NoReturn:
    """End a process forked by a cell that has reached the end of the cell, as at the end of a script.

    It would otherwise take messages meant for the rank.
    """
    if error is not None and not isinstance(error, SystemExit):
        with contextlib.suppress(Exception):  # a cell may have put anything there
            sys.stderr.write(describe_error(error))
    flush_streams()
    code = error.code if isinstance(error, SystemExit) else error is not None
    os._exit(code & 0xFF if isinstance(code, int) else bool(code))


def _bounded_lines(lines: list[str]) -> list[str]:
    """Limit lines to what fits in a message: the first and the last ones."""
    if _count_fitting(lines) == len(lines):
        return lines
    first, last = _count_fitting(lines, limit=_LISTED_BYTES // 2), _count_fitting(lines[::-1], limit=_LISTED_BYTES // 2)
    return [*lines[:first], f"  ... {len(lines) - first - last:,} lines ...", *lines[len(lines) - last :]]


def _count_fitting(texts: Sequence[str], *, limit: int = 0) -> int:
    """Return how many of the first texts fit in a message."""
    left = limit or _LISTED_BYTES
    for count, text in enumerate(texts):
        left -= len(json.dumps(text)) + 4
        if left < 0:
            return count
    return len(texts)


def _bounded(text: str, *, limit: int = 20_000) -> str:
    """Limit a text to what fits in a message: the beginning and the end."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}\n... {len(text) - limit:,} characters ...\n{text[-half:]}"
