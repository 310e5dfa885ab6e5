"""A real ipykernel, driven as a front end does it."""

from __future__ import annotations

import os
import queue
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from ..session.soon import assert_no_session_is_left


@dataclass
class Outcome:
    """What a cell sent to the front end, and what a front end then shows."""

    status: str = ""
    seconds: float = 0.0
    live: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    shown: list[tuple[str, Any]] = field(default_factory=list)

    def text(self, name: str = "stdout") -> str:
        """The final text of a stream."""
        return "".join(content for kind, content in self.shown if kind == name)

    @property
    def error(self) -> str:
        """The traceback, or the line on stderr that replaces one."""
        traces = ["\n".join(content["traceback"]) for kind, content in self.live if kind == "error"]
        return traces[0] if traces else self.text("stderr")

    def rich(self, mime: str = "text/plain") -> list[Any]:
        """The final rich outputs of one MIME type."""
        return [data[mime] for kind, data in self.shown if kind == "rich" and mime in data]


class Kernel:
    """One kernel; every wait has a deadline.

    It uses sockets in its folder: another process may take a chosen port before the kernel starts.
    """

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.manager = KernelManager(
            kernel_name="python3", transport="ipc", connection_file=str(folder / "kernel.json")
        )
        self.manager.start_kernel(cwd=str(folder), env={**os.environ, **env})
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=60)
        except RuntimeError:
            self.close(now=True)
            raise

    def run(
        self,
        code: str,
        *,
        interrupt_when: str | None = None,
        touch_when: Mapping[str, Path] | None = None,
        timeout_s: float = 100,
    ) -> Outcome:
        """Run a cell to its end; press stop when ``interrupt_when`` appears in its output.

        ``touch_when`` maps patterns to files that the cell waits for: output that matches creates the file.
        """
        message_id = self.client.execute(code, stop_on_error=False)  # otherwise an error may abort the next cell too
        outcome, started, clear = Outcome(), time.monotonic(), False
        displays: dict[str, int] = {}
        while True:
            assert time.monotonic() - started < timeout_s, f"the cell did not end within {timeout_s} s"
            try:
                message = self.client.get_iopub_msg(timeout=0.5)
            except queue.Empty:
                continue
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != message_id or kind == "execute_input":
                continue
            if kind == "status":
                if content["execution_state"] == "idle":
                    break
                continue
            outcome.live.append((kind, content))
            if kind == "clear_output":
                clear = content["wait"]
                outcome.shown = outcome.shown if clear else []
                continue
            if clear:
                outcome.shown, clear = [], False
            _show(outcome.shown, kind, content, displays)
            for pattern, path in (touch_when or {}).items():
                if re.search(pattern, content.get("text", "") or content.get("data", {}).get("text/plain", "")):
                    path.touch()
            if interrupt_when and any(interrupt_when in str(data) for _, data in outcome.shown):
                self.manager.interrupt_kernel()
                interrupt_when = None
        outcome.seconds = time.monotonic() - started
        outcome.status = self.reply_to(message_id)["status"]
        return outcome

    def reply_to(self, message_id: str) -> dict[str, Any]:
        """The kernel's reply to one request."""
        while True:
            message = self.client.get_shell_msg(timeout=60)
            if message["parent_header"].get("msg_id") == message_id:
                content: dict[str, Any] = message["content"]
                return content

    def close(self, *, now: bool = False) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=now)


def _show(shown: list[tuple[str, Any]], kind: str, content: dict[str, Any], displays: dict[str, int]) -> None:
    display_id = content.get("transient", {}).get("display_id", "")
    if kind == "stream":
        if shown and shown[-1][0] == content["name"]:
            shown[-1] = (content["name"], shown[-1][1] + content["text"])
        else:
            shown.append((content["name"], content["text"]))
    elif kind == "update_display_data":
        if displays.get(display_id, len(shown)) < len(shown):
            shown[displays[display_id]] = ("rich", content["data"])
    elif kind in ("display_data", "execute_result"):
        displays[display_id] = len(shown)
        shown.append(("rich", content["data"]))


@pytest.fixture(scope="session")
def runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A separate folder for the sessions of the tests; none may be left in it."""
    folder = tmp_path_factory.mktemp("run")
    folder.chmod(0o700)
    yield folder
    assert_no_session_is_left(folder)


@pytest.fixture(scope="module")
def start_kernel(runtime_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A function that starts a kernel with the given environment variables and loads the extension."""
    kernels: list[Kernel] = []

    def start(**env: str) -> Kernel:
        kernel = Kernel(tmp_path_factory.mktemp("notebook"), {"DETRAIN_NB_RUNTIME_DIR": str(runtime_folder), **env})
        kernels.append(kernel)
        assert kernel.run("%load_ext detrain_nb").status == "ok"
        return kernel

    yield start
    for kernel in kernels:
        if kernel.manager.is_alive():
            kernel.close()


@pytest.fixture(scope="module")
def kernel(start_kernel: Any) -> Kernel:
    """A kernel with a session of two ranks that the module's tests share; a test leaves them idle."""
    started: Kernel = start_kernel()
    assert started.run("%%distributed -n 2\nimport time, os, sys\nx = rank + 1").status == "ok"
    return started
