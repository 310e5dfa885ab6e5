"""A real ipykernel, driven over its own sockets as a front end does it.

Messages are kept as they arrived, with their times, and decoded after the cell has ended, so that the time of decoding
is not measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import KernelManager

_COMMAND = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
_START_LIMIT_S = 60.0
_LOOK_MS = 500
_OFTEN_MS = 20  # if ``until`` is checked as well
_LAST_WORDS_LIMIT_S = 30.0
# Variables of the user that would change what a kernel does.
_NOT_FOR_A_KERNEL = {
    *("DETRAIN_NB_OUTPUT", "DETRAIN_NB_NOTEBOOK", "DETRAIN_NB_LINGER"),
    *("JPY_PARENT_PID", "JPY_SESSION_NAME", "PYTHONSTARTUP"),
}


@dataclass(frozen=True)
class Arrival:
    """A message of a cell as it arrived; ``at`` is ``time.time()``."""

    kind: str
    body: bytes
    at: float

    @property
    def content(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.body)
        return content

    @property
    def display_id(self) -> str:
        """The id by which a display can be updated; empty if it has none."""
        return str(self.content.get("transient", {}).get("display_id", ""))

    @property
    def text(self) -> str:
        """The text of a stream or a display; empty for other messages."""
        if self.kind == "stream":
            return str(self.content["text"])
        if self.kind in ("display_data", "update_display_data"):
            return str(self.content["data"].get("text/plain", ""))
        return ""


@dataclass
class Cell:
    """A cell that was sent; after its end, ``seconds`` until both its reply and the kernel's "idle" had arrived."""

    name: str
    sent_at: float
    message_id: str = ""
    seconds: float = 0.0
    status: str = ""
    is_idle: bool = False
    arrivals: list[Arrival] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return self.is_idle and self.status != ""

    @property
    def ended_at(self) -> float:
        return self.sent_at + self.seconds

    @property
    def wire_bytes(self) -> int:
        """The size of all its messages' content as JSON, escapes and repetitions included."""
        return sum(len(arrival.body) for arrival in self.arrivals)

    def shown(self) -> str:
        """Return the text of the cell's output at the end; each display is on lines of its own."""
        texts: list[str] = []
        displays: dict[str, int] = {}
        will_clear = False
        for arrival in self.arrivals:
            if arrival.kind == "clear_output":
                will_clear = arrival.content["wait"]
                texts = texts if will_clear else []
            elif arrival.kind in ("stream", "display_data"):
                if will_clear:
                    texts, displays, will_clear = [], {}, False
                displays[arrival.display_id] = len(texts)
                texts.append(arrival.text if arrival.kind == "stream" else f"\n{arrival.text}\n")
            elif arrival.kind == "update_display_data" and arrival.display_id in displays:
                texts[displays[arrival.display_id]] = f"\n{arrival.text}\n"
        return "".join(texts)

    def text_by_arrival(self) -> Iterator[tuple[str, float]]:
        """Yield all text in whole lines, with its time of arrival; text that was sent twice is yielded twice."""
        unfinished: dict[str, str] = {}
        for arrival in self.arrivals:
            if arrival.kind == "stream":
                name = arrival.content["name"]
                text = unfinished.pop(name, "") + arrival.text
                whole, newline, unfinished[name] = text.rpartition("\n")
                yield whole + newline, arrival.at
            elif arrival.text:
                yield arrival.text, arrival.at
        if self.arrivals:
            yield from ((text, self.arrivals[-1].at) for text in unfinished.values() if text)


class KernelError(Exception):
    """Error of a cell that failed, or that did not end in time."""


class Kernel:
    """A kernel of the notebook in ``folder``, without user configuration; close it. Every wait has a deadline.

    ``wrapper`` is a command that runs the kernel's command. ``transport`` is "tcp", as in front ends, or "ipc".
    """

    def __init__(self, folder: Path, *, wrapper: tuple[str, ...] = (), transport: str = "tcp") -> None:
        self._manager = KernelManager(
            kernel_spec_manager=_OneSpec([*wrapper, *_COMMAND]),
            connection_file=str(folder / "kernel.json"),
            transport=transport,
        )
        kept = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_A_KERNEL}
        programs = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
        own = {
            "PATH": programs,
            "IPYTHONDIR": str(folder / "ipython"),
            "DETRAIN_NB_NOTEBOOK": str(folder / "notebook.ipynb"),  # unlike a server's variable, it does not pace lines
        }
        with open(folder / "kernel.log", "ab") as log:
            self._manager.start_kernel(cwd=str(folder), env={**kept, **own}, stdout=log, stderr=log)
        self._pid: int = self._manager.provisioner.pid  # type: ignore[union-attr]
        self._front = self._manager.blocking_client()
        self._front.start_channels()
        try:
            self._front.wait_for_ready(timeout=_START_LIMIT_S)
        except BaseException as exc:
            self.close()
            if isinstance(exc, RuntimeError):
                raise KernelError(f"the kernel did not start: {exc}") from exc
            raise
        self._shell, self._iopub = self._front.shell_channel.socket, self._front.iopub_channel.socket
        self._poller = zmq.Poller()
        for socket in (self._shell, self._iopub):
            self._poller.register(socket, zmq.POLLIN)

    def run(self, code: str, *, timeout_s: float = 120.0) -> Cell:
        """Run a cell to its end. Raises: KernelError if it fails, or does not end in time."""
        cell = self.send(code)
        if not self.watch(cell, timeout_s=timeout_s):
            raise KernelError(f"{cell.name} did not end within {timeout_s:g} s")
        if cell.status != "ok":
            raise KernelError(f"{cell.name} failed: {_error(cell)}")
        return cell

    def send(self, code: str) -> Cell:
        """Send a cell without waiting."""
        cell = Cell(_name(code), time.time())
        self._sent = time.perf_counter()
        cell.message_id = self._front.execute(code, allow_stdin=False)
        return cell

    def watch(self, cell: Cell, *, until: Callable[[], bool] | None = None, timeout_s: float) -> bool:
        """Receive messages of the last cell until it has ended or ``until()`` is true; returns False after the timeout.

        Raises: KernelError if the kernel dies.
        """
        deadline = time.perf_counter() + timeout_s
        look_ms = _OFTEN_MS if until else _LOOK_MS
        while not (until() if until else cell.has_ended):
            ready = self._poller.poll(look_ms)
            for socket, _ in ready:
                self._take(cell, socket)
            if cell.has_ended and not cell.seconds:
                cell.seconds = time.perf_counter() - self._sent
            if time.perf_counter() > deadline:
                return False
            if not ready and not self._manager.is_alive():
                raise KernelError(f"the kernel died in {cell.name}")
        return True

    def interrupt(self) -> None:
        """Interrupt the kernel, as a front end's stop button does."""
        self._manager.interrupt_kernel()

    def kill(self, cell: Cell) -> None:
        """Kill the kernel with SIGKILL while ``cell`` runs; messages that it had sent are still received."""
        os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(KernelError):
            self.watch(cell, timeout_s=_LAST_WORDS_LIMIT_S)

    def close(self) -> None:
        """Stop the kernel, by force if it does not exit by itself."""
        self._front.stop_channels()
        self._manager.shutdown_kernel()

    def _take(self, cell: Cell, socket: Any) -> None:
        kind, parent_id, body = self._receive(socket)
        if parent_id != cell.message_id:
            return
        if socket is self._shell:
            cell.status = json.loads(body)["status"]
            return
        cell.arrivals.append(Arrival(kind, body, time.time()))
        cell.is_idle = cell.is_idle or kind == "status" and json.loads(body)["execution_state"] == "idle"

    def _receive(self, socket: Any) -> tuple[str, str, bytes]:
        """Receive a message: its type, the id of its request, and its content."""
        _, parts = self._front.session.feed_identities(socket.recv_multipart())
        header, parent = json.loads(parts[1]), json.loads(parts[2])
        return header["msg_type"], parent.get("msg_id", ""), parts[4]


class _OneSpec(KernelSpecManager):
    """Kernel spec of this Python, whatever kernels the user has registered."""

    def __init__(self, command: list[str]) -> None:
        super().__init__()
        self._command = command

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(argv=self._command, display_name=kernel_name, language="python")


def _name(code: str) -> str:
    return repr(code.splitlines()[0])


def _error(cell: Cell) -> str:
    for arrival in cell.arrivals:
        if arrival.kind == "error":
            return f"{arrival.content['ename']}: {arrival.content['evalue']}"
    return cell.shown().strip()
