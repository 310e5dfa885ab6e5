"""Messages from pages to views while a cell runs: they are routed to a sub-shell of the kernel.

A page that has just opened lists the widgets through the main shell, as it does not know yet that the kernel has
sub-shells; other front ends do not support sub-shells at all. In the main shell it would wait for the running cell.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import zmq
from ipykernel.kernelbase import Kernel

__all__ = ["serve_beside_cells"]

_CONTROL = "jupyter.widget.control"  # a page requests the states of all widgets by it
_MOST_CONTROLS = 100  # of pages that opened recently
_QUESTIONS = ("kernel_info_request", "comm_info_request")


def serve_beside_cells(comm_id: str) -> None:
    """Handle messages to the view with this comm also while a cell runs.

    Without a kernel, or in one without sub-shells (ipykernel 6), nothing changes: messages wait for the cell.
    """
    kernel: Any = Kernel.instance() if Kernel.initialized() else None
    thread = getattr(kernel, "shell_channel_thread", None)
    if thread is None:
        return
    if not isinstance(kernel.shell_channel_thread_main, _Switch):
        kernel.shell_channel_thread_main = _Switch(kernel)
        thread.io_loop.add_callback(kernel.shell_stream.on_recv, kernel.shell_channel_thread_main, copy=False)
    kernel.shell_channel_thread_main.views.add(comm_id)


class _Switch:
    """A router of the shell channel's messages, in its thread: to a sub-shell or to the kernel."""

    def __init__(self, kernel: Any) -> None:
        self.views: set[str] = set()
        self._kernel = kernel
        self._hand_to_kernel = kernel.shell_channel_thread_main
        self._controls: deque[str] = deque(maxlen=_MOST_CONTROLS)
        self._subshell: str | None = None

    async def __call__(self, frames: list[zmq.Frame]) -> None:
        try:
            is_taken = self._take(frames)
        except Exception:  # noqa: BLE001  the kernel reports what is wrong with a message
            is_taken = False
        if not is_taken:
            await self._hand_to_kernel(frames)

    def _take(self, frames: list[zmq.Frame]) -> bool:
        session, manager = self._kernel.session, self._kernel.shell_channel_thread.manager
        _, parts = session.feed_identities(frames, copy=False)
        message = session.deserialize(parts, content=False, copy=False)
        if not self._is_of_page(message["msg_type"], session.unpack(message["content"])):
            return False
        if self._subshell is None:
            self._subshell = manager._create_subshell()
        header = session.pack({**session.unpack(parts[1].bytes), "subshell_id": self._subshell})
        signed = [header, *(part.bytes for part in parts[2:5])]
        sent = [*frames[: -len(parts)], session.sign(signed), *signed, *parts[5:]]
        manager.get_shell_channel_to_subshell_socket(self._subshell).send_multipart(sent, copy=False)
        return True

    def _is_of_page(self, kind: str, content: dict[str, Any]) -> bool:
        """Return whether the message is for a view, or from a page that opens."""
        comm_id = content.get("comm_id", "")
        if kind == "comm_open" and content.get("target_name") == _CONTROL:
            self._controls.append(comm_id)
            return True
        return kind in _QUESTIONS or (kind == "comm_msg" and (comm_id in self.views or comm_id in self._controls))
