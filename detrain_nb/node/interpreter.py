"""The interpreter: the process of a rank in which cells run, in its main thread, in the namespace ``__main__``.

It is forked by its worker from memory in which torch and IPython are imported, serves one message after the other, and
ends when the worker hangs up.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import difflib
import gc
import mmap
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import torch
import torch.distributed as dist

from .. import values
from ..errors import DetrainError
from ..launch import RankConfig
from ..wire import (
    PIECE_BYTES,
    CellDone,
    CellFailed,
    ClearOutput,
    Complete,
    Completions,
    Display,
    FrameReader,
    GenerationReady,
    Inspect,
    Inspection,
    Message,
    NewGeneration,
    Piece,
    Pull,
    Push,
    RankUp,
    RequestDone,
    RequestFailed,
    RunCell,
    Value,
    json_body,
    to_frame,
)
from .cellrunner import Bundle, CellRunner, Screen, error_message, user_traceback
from .generation import Generation

_libc = ctypes.CDLL(None)


def serve(config: RankConfig, rank: int, link: socket.socket, interrupted_cell: mmap.mmap) -> None:
    """Be the interpreter of ``rank`` until the worker hangs up. Descriptors 1 and 2 already are the worker's pipes.

    ``interrupted_cell``: where the worker writes the number of the cell that it sends a SIGINT for.
    """
    interpreter = _Interpreter(config, rank, link, interrupted_cell)
    gc.freeze()  # what is there now stays: no collection has to look at it
    with contextlib.suppress(EOFError):
        interpreter.run()
    atexit._run_exitfuncs()


class _Interpreter:
    def __init__(self, config: RankConfig, rank: int, link: socket.socket, interrupted_cell: mmap.mmap) -> None:
        self._config = config
        self._rank = rank
        self._local_rank = int(os.environ["LOCAL_RANK"])
        self._world_size = int(os.environ["WORLD_SIZE"])
        self._link = link
        self._sending = threading.Lock()
        self._interrupted_cell = interrupted_cell
        self._cell = 0
        self._is_in_cell = False
        self._arriving: dict[int, tuple[Push, list[bytearray], list[int]]] = {}
        _open_streams()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, self._on_interrupt)
        os.chdir(config.folder)
        sys.path[:] = [config.folder, *(path for path in sys.path if path not in ("", config.folder))]
        self._device = self._set_device()
        self._seed()
        self._generation = Generation(
            rank=rank, world_size=self._world_size, backend=config.backend, device=self._device
        )
        self._generation.take_over_torch()
        self._runner = CellRunner.create(Screen(self._display, self._clear))
        self._runner.user_ns.update(
            rank=rank,
            local_rank=self._local_rank,
            world_size=self._world_size,
            device=self._device,
            dist=dist,
            torch=torch,
        )
        self._runner.user_ns_hidden.update(self._runner.user_ns)
        builtins.input = _refuse_input

    def run(self) -> NoReturn:
        """Serve messages. Raises: EOFError when the worker has hung up."""
        self._send(
            RankUp(
                self._rank,
                self._local_rank,
                self._world_size,
                os.getpid(),
                socket.gethostname(),
                str(self._device),
                torch.__version__,
            )
        )
        reader = FrameReader()
        while True:
            data = self._link.recv(1 << 16)
            if not data:
                raise EOFError
            for frame in reader.feed(data):
                self._handle(frame.message())

    def _handle(self, message: Message) -> None:
        if isinstance(message, RunCell):
            self._run_cell(message)
        elif isinstance(message, NewGeneration):
            self._start_generation(message)
        elif isinstance(message, Pull):
            self._answer(message.request, lambda: self._pull(message))
        elif isinstance(message, Push):
            self._answer(message.request, lambda: self._begin_push(message))
        elif isinstance(message, Piece):
            self._answer(message.request, lambda: self._take_piece(message))
        elif isinstance(message, Complete):
            self._answer(message.request, lambda: self._complete(message))
        elif isinstance(message, Inspect):
            self._answer(message.request, lambda: self._inspect(message))

    # ---- cells

    def _run_cell(self, message: RunCell) -> None:
        self._cell = message.cell
        started = time.perf_counter()
        value: Bundle = {}
        try:
            try:
                self._is_in_cell = True
                self._on_interrupt()  # one that came before the cell had begun
                outcome = self._runner.run(message.code, message.cell, first_line=message.first_line)
            finally:
                self._is_in_cell = False
            value, error = outcome.value, outcome.error
        except KeyboardInterrupt as exc:  # it came between the user's code and ours
            self._is_in_cell = False
            error = exc
        seconds = time.perf_counter() - started
        _flush_streams()
        has_group = self._generation.has_group
        if error is None:
            body = json_body(value) if value else b""
            self._send(CellDone(self._rank, message.cell, seconds, has_group, body))
            return
        self._send(
            CellFailed(
                self._rank,
                message.cell,
                seconds,
                has_group,
                name=type(error).__name__,
                message=_bounded(error_message(error)),
                traceback=[_bounded(line) for line in user_traceback(error)],
                interrupted=isinstance(error, KeyboardInterrupt),
            )
        )

    def _on_interrupt(self, *signal_and_frame: object) -> None:
        """Interrupt the cell that the signal was sent for, and no other: it may come too early or too late."""
        if self._is_in_cell and int.from_bytes(self._interrupted_cell[:], "little") == self._cell:
            raise KeyboardInterrupt

    def _display(self, bundle: Bundle, display_id: str, is_update: bool) -> None:
        _flush_streams()
        self._send(Display(self._rank, self._cell, display_id, is_update, json_body(bundle)))

    def _clear(self, wait: bool) -> None:
        _flush_streams()
        self._send(ClearOutput(self._rank, self._cell, wait))

    def _start_generation(self, message: NewGeneration) -> None:
        error = ""
        try:
            self._generation.start(message.number)
        except Exception as exc:  # noqa: BLE001  whatever torch raises here, the notebook has to know and the rank lives on
            error = f"{type(exc).__name__}: {exc}"
        self._send(GenerationReady(self._rank, message.number, _bounded(error)))

    # ---- questions

    def _complete(self, message: Complete) -> None:
        found = self._runner.complete_code(message.code, message.position)
        self._send(Completions(self._rank, message.request, *found))

    def _inspect(self, message: Inspect) -> None:
        text = self._runner.inspect_name(message.name, message.detail)
        self._send(Inspection(self._rank, message.request, _bounded(text, limit=200_000)))

    def _answer(self, request: int, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as exc:  # noqa: BLE001  repr of a user's class, memory, torch: the rank lives on and says what it was
            self._arriving.pop(request, None)
            error = str(exc) if isinstance(exc, DetrainError) else f"{type(exc).__name__}: {exc}"
            self._send(RequestFailed(self._rank, request, _bounded(error)))

    def _pull(self, message: Pull) -> None:
        packed = [(name, *values.pack(self._look_up(name), name=name)) for name in message.names]
        for name, description, buffers in packed:
            self._send(Value(self._rank, message.request, name, description))
            for index, buffer in enumerate(buffers):
                for start in range(0, len(buffer), PIECE_BYTES):
                    piece = bytes(buffer[start : start + PIECE_BYTES])
                    self._send(Piece([self._rank], message.request, name, index, piece))
        self._send(RequestDone(self._rank, message.request))

    def _look_up(self, name: str) -> object:
        namespace = self._runner.user_ns
        if name in namespace:
            return namespace[name]
        near = difflib.get_close_matches(name, [known for known in namespace if not known.startswith("_")], 1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise DetrainError(f"there is no variable {name!r}{hint}")

    def _begin_push(self, message: Push) -> None:
        buffers = [bytearray(size) for size in values.buffer_sizes(message.description)]
        self._arriving[message.request] = (message, buffers, [0] * len(buffers))
        self._finish_push(message.request)

    def _take_piece(self, message: Piece) -> None:
        if message.request not in self._arriving:
            return  # its first part was refused
        _, buffers, filled = self._arriving[message.request]
        start = filled[message.buffer]
        filled[message.buffer] = end = start + len(message.body)
        memoryview(buffers[message.buffer])[start:end] = message.body
        self._finish_push(message.request)

    def _finish_push(self, request: int) -> None:
        message, buffers, filled = self._arriving[request]
        if all(have == len(buffer) for have, buffer in zip(filled, buffers)):
            del self._arriving[request]
            self._runner.user_ns[message.name] = values.unpack(message.description, buffers)
            self._send(RequestDone(self._rank, request))

    # ---- set-up

    def _set_device(self) -> torch.device:
        torch.set_num_threads(self._config.threads)
        if self._config.device != "cuda":
            return torch.device("cpu")
        torch.cuda.set_device(self._local_rank)
        return torch.device("cuda", self._local_rank)

    def _seed(self) -> None:
        """Forked ranks share the state of every generator of random numbers: give each rank its own."""
        seed = self._config.seed + self._rank
        random.seed(seed)
        torch.manual_seed(seed)
        with contextlib.suppress(ImportError):  # torch goes without it
            import numpy as np

            np.random.seed(seed % (1 << 32))

    def _send(self, message: Message) -> None:
        with self._sending:
            self._link.sendall(to_frame(message).to_bytes())


def _open_streams() -> None:
    """Streams on descriptors 1 and 2 that give each line at once, C's too: a pipe would hold back whole blocks."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        stream = open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    with contextlib.suppress(ValueError, AttributeError):
        _libc.setvbuf(ctypes.c_void_p.in_dll(_libc, "stdout"), None, 1, 0)  # 1 is _IOLBF


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a cell may have put anything there
            stream.flush()
    _libc.fflush(None)


def _refuse_input(prompt: object = "") -> str:
    raise EOFError("input() has nobody to ask on a rank: ask in a cell of the notebook, then %push the answer")


def _bounded(text: str, *, limit: int = 20_000) -> str:
    """Text that fits a message: the first and the last part of what is too long."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}\n... {len(text) - limit:,} characters ...\n{text[-half:]}"
