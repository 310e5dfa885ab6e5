"""One execution of a notebook: a kernel with this Python, the cells in order, and the shutdown of all of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..agents import runtime_folder
from ..errors import LaunchError, SpecError
from ..guarded import find_guest_parent
from .notebook_file import code_cells
from .terminal import Terminal

if TYPE_CHECKING:  # a second's import, which only `run` needs
    from nbclient import NotebookClient
    from nbformat import NotebookNode

__all__ = ["FAILED", "NotebookRun"]

FAILED = 1  # exit status
SIGPIPE = 13  # not from signal: Windows does not have it
_RUN = (  # keep the current folder off sys.path meanwhile, unless it is listed elsewhere
    "import sys; sys.path[:1] = filter(None, sys.path[:1]); import runpy; "
    "runpy.run_module('detrain_nb.cli.kernel', run_name='__main__', alter_sys=True)"
)
_KERNEL = ["-Xfrozen_modules=off", "-c", _RUN]
_KERNEL_ARGUMENTS = [*_KERNEL, "-f", "{connection_file}", "--log-level=ERROR"]
_MOST_SOCKET_CHARS = 60  # of the socket folder: the system limits socket paths to about 100
_STOP_LIMIT_S = 10.0  # for an interrupted cell to end; a session gives its ranks less
_END_LIMIT_S = 10.0  # for the kernel to exit; it gets SIGTERM after half of it, as ipykernel can block
_WIDGET = "application/vnd.jupyter.widget-view+json"
_SETTLE = (
    "views = __import__('sys').modules.get('detrain_nb.widgets')\nif views is not None: views.LiveView.settle_all()"
)
_OUTPUT_LIMIT_S = 60  # how long output of a cell may arrive after the cell has ended


def _make_client(notebook: NotebookNode, tell: Callable[[str, dict[str, Any]], None], **options: Any) -> NotebookClient:
    """Create nbclient's client, which calls ``tell`` with every message of a cell before storing it."""
    from nbclient import NotebookClient

    class TellingClient(NotebookClient):
        def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> NotebookNode | None:
            tell(msg["msg_type"], msg["content"])
            return super().process_message(msg, cell, cell_index)

    return TellingClient(notebook, **options)


_HEADING = re.compile(r"#{1,6} ")


class NotebookRun:
    """One execution of a notebook, from top to bottom, up to the first cell that fails, or a signal."""

    def __init__(
        self, notebook: NotebookNode, *, folder: Path, env: dict[str, str], kernel: str | None, timeout_s: float | None
    ) -> None:
        self.terminal = Terminal(sys.stdout, sys.stderr, on_gone=self._stop_unread)
        self.failure = ""
        self._notebook = notebook
        self._start_options: dict[str, Any] = {"cwd": str(folder), "env": env}
        self._kernel = kernel
        self._timeout_s = timeout_s
        self._stopped_by = 0
        self._is_stopped = asyncio.Event()  # set by a signal: stop the cell, then the kernel
        self._is_hurried = asyncio.Event()  # set by a second signal, or a cell that does not stop: kill the kernel
        self._client = _make_client(notebook, self.terminal.take, iopub_timeout=_OUTPUT_LIMIT_S, record_timing=False)

    async def execute(self) -> int:
        """Run the cells, stop the kernel and its session; return the exit status, and set ``failure`` to the reason.

        Raises: SpecError for an unknown kernel, LaunchError for one that does not start.
        """
        manager: Any = self._make_manager()
        with _private_sockets(manager), _on_signals(self._stop):
            try:
                if await self._is_in_time(self._start_kernel()):
                    self.failure = await self._run_cells(manager)
                    await self._settle_views()
            finally:
                await self._end_kernel(manager)
        if self._stopped_by:
            self.failure = self.failure or "stopped"
            return 128 + self._stopped_by
        return FAILED if self.failure else 0

    def _make_manager(self) -> Any:
        """Create the manager of a kernel with this Python: the kernel installed as python3 may use another."""
        self._client.kernel_name = self._kernel or "python3"
        manager: Any = self._client.create_kernel_manager()
        manager.shutdown_wait_time = _END_LIMIT_S
        users_umask = os.umask(0o077)  # this creates IPython's folder, whose content is executed
        try:
            spec = manager.kernel_spec
        except KeyError as exc:
            raise SpecError(
                f"no Jupyter kernel {self._client.kernel_name!r} is installed: see jupyter kernelspec list"
            ) from exc
        finally:
            os.umask(users_umask)
        if self._kernel is None:
            spec.argv = [sys.executable, *_KERNEL_ARGUMENTS]
            spec.env, spec.metadata, spec.interrupt_mode = {}, {}, "signal"
        return manager

    async def _start_kernel(self) -> None:
        try:
            await self._client.async_start_new_kernel(**self._start_options)
            await self._client.async_start_new_kernel_client()
        except (OSError, RuntimeError) as exc:
            raise LaunchError(f"the kernel did not start: {exc}") from exc

    async def _run_cells(self, manager: Any) -> str:
        """Run the cells until one fails; return the failure, or an empty string."""
        numbers = itertools.count(1)
        total = len(code_cells(self._notebook))
        for index, cell in enumerate(self._notebook.cells):
            if cell.cell_type == "markdown":
                self.terminal.say("\n".join(f"\n{line}" for line in cell.source.splitlines() if _HEADING.match(line)))
            if cell.cell_type != "code":
                continue
            name = f"cell {next(numbers)} of {total}"
            if not cell.source.strip():
                continue
            if self._stopped_by:
                return f"stopped before {name}"
            self.terminal.begin_cell(f"=== {name}: {cell.source.strip().splitlines()[0]}")
            failure = await self._run_cell(manager, index, cell)
            self.terminal.end_cell()
            if failure:
                return f"{name} {failure}"
        return ""

    async def _run_cell(self, manager: Any, index: int, cell: NotebookNode) -> str:
        from nbclient.exceptions import CellExecutionError, DeadKernelError

        running = asyncio.ensure_future(self._client.async_execute_cell(cell, index))
        failure = ""
        try:
            if not await self._is_in_time(asyncio.shield(running), limit_s=self._timeout_s):
                failure = "was interrupted" if self._stopped_by else f"did not end within {self._timeout_s:g} s"
                await manager.interrupt_kernel()
                await _first(running, self._is_hurried.wait(), limit_s=_STOP_LIMIT_S)
                if not running.done():
                    self._is_hurried.set()
        except CellExecutionError:  # the terminal has shown the error
            return failure or "failed"
        except DeadKernelError:
            return failure or "killed the kernel"
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return failure

    async def _settle_views(self) -> None:
        """Replace live views by plain HTML: a stored notebook is opened without a kernel to draw them."""
        from nbformat.v4 import new_code_cell

        cells = self._notebook.cells
        outputs = [output for cell in code_cells(self._notebook) for output in cell.outputs]
        if not any(_WIDGET in output.get("data", {}) for output in outputs):
            return
        # nbclient runs only cells of the notebook; this one is removed before saving
        cells.append(new_code_cell(_SETTLE))  # type: ignore[no-untyped-call]
        settling = asyncio.ensure_future(
            self._client.async_execute_cell(cells[-1], len(cells) - 1, store_history=False)
        )
        try:
            await _first(settling, self._is_hurried.wait(), limit_s=_STOP_LIMIT_S)
        finally:
            settling.cancel()
            await asyncio.gather(settling, return_exceptions=True)  # the terminal shows an error
            del cells[-1]

    async def _end_kernel(self, manager: Any) -> None:
        """Shut the kernel down, which stops its session; kill it when hurried: its ranks notice that and exit."""
        if self._client.kc is not None:
            self._client.kc.stop_channels()
        if not await manager.is_alive():
            await manager.cleanup_resources()
            return
        ending = asyncio.ensure_future(manager.shutdown_kernel(now=self._is_hurried.is_set()))
        await _first(ending, self._is_hurried.wait(), limit_s=None)
        if ending.done():
            ending.result()
            return
        ending.cancel()
        await asyncio.wait([ending])
        await manager.shutdown_kernel(now=True)

    async def _is_in_time(self, work: Awaitable[Any], *, limit_s: float | None = None) -> bool:
        """Wait for ``work`` until a signal or the limit, then cancel it; return whether it was done."""
        task = asyncio.ensure_future(work)
        await _first(task, self._is_stopped.wait(), limit_s=limit_s)
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.wait([task])
        return False

    def _stop_unread(self) -> None:
        if not self._stopped_by:
            self._stop(SIGPIPE)

    def _stop(self, number: int) -> None:
        if self._stopped_by:
            self._is_hurried.set()
        self._stopped_by = self._stopped_by or number
        self._is_stopped.set()


async def _first(task: asyncio.Future[Any], other: Awaitable[Any], *, limit_s: float | None) -> None:
    """Wait until one of the two is done, or for ``limit_s``."""
    waiting = asyncio.ensure_future(other)
    try:
        await asyncio.wait([task, waiting], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


@contextlib.contextmanager
def _private_sockets(manager: Any) -> Iterator[None]:
    """Connect to the kernel over sockets in a private folder: any user of the machine could read from a TCP port."""
    if os.name != "posix":
        yield
        return
    prefix, place = "detrain_nb-", _place_of_sockets()
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True) as folder:
        manager.transport, manager.ip = "ipc", os.path.join(folder, "kernel")
        # it holds the key; the kernel is named after this file
        manager.connection_file = os.path.join(folder, f"{os.path.basename(folder)}.json")
        yield


def _place_of_sockets() -> str:
    """Return a folder in which other users cannot replace our folders. Raises: LaunchError."""
    for place in (tempfile.gettempdir(), "/tmp", os.fspath(runtime_folder())):
        real = os.path.realpath(place)
        if len(real) < _MOST_SOCKET_CHARS and find_guest_parent(Path(real, "ours")) is None:
            return real
    raise LaunchError(
        f"other users can replace folders in {tempfile.gettempdir()} and /tmp, or these paths are too long: set TMPDIR "
        f"to a folder of your own, with a path of less than {_MOST_SOCKET_CHARS} characters"
    )


@contextlib.contextmanager
def _on_signals(act: Callable[[int], None]) -> Iterator[None]:
    """Call ``act`` in the event loop on SIGINT, SIGTERM and SIGHUP; a signal that is ignored (nohup) stays ignored."""
    loop = asyncio.get_running_loop()
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: loop.call_soon_threadsafe(act, number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
