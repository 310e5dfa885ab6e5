"""This machine as a node: the agent is a detached process, its byte stream is its own socket."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..agents import (
    connect,
    live_agent,
    remove_dead_agent,
    remove_dead_agents,
    running_sessions,
    runtime_folder,
    start_agent,
    wait_for_pid,
)
from ..errors import SessionError
from ..plan import NodeOffer
from .transport import AgentFolders


class LocalTransport:
    """Brings up an agent on this machine and connects to it."""

    name = ""  # of the node: this machine has none
    is_this_machine = True
    is_trusted = False  # nobody needs to say so
    can_resume = False
    shares_paths = True
    python = sys.executable
    address = "127.0.0.1"
    interface = "lo"
    torch = ""
    place = "this machine"
    node = None
    account: object = None
    contact: object = None
    folder_state: tuple[object, object] = ("", "")
    cache = ""
    project = ""

    def __init__(self) -> None:
        self.env: dict[str, str] = {}
        self._agent: subprocess.Popen[bytes] | None = None
        self._pid = 0  # of an agent that another process started
        self._folder = Path()

    def start_agent(self, session: str) -> socket.socket:
        """Start the agent of ``session`` and return a connected socket.

        Raises: LaunchError when it does not come up, SessionError when a session of that name runs already.
        """
        self._folder = runtime_folder() / session
        self._agent, sock = start_agent(self._folder)
        return sock

    def connect_agent(self, session: str) -> socket.socket:
        """Connect to an agent that runs already. Raises: SessionError when none of that name does."""
        self._folder = runtime_folder() / session
        self._pid = running_sessions().get(session, 0)
        if not self._pid:
            remove_dead_agent(self._folder)
            known = ", ".join(running_sessions()) or "none"
            raise SessionError(f"no session {session!r} runs on this machine; those that run: {known}")
        return connect(self._folder)

    def begin(self, session: str) -> AgentFolders:
        """In the folder that a fresh agent would have."""
        self._folder = runtime_folder() / session
        return {"folder": str(self._folder), "work_folder": "", "uses": []}

    def ask_meanwhile(self, work: Collection[Future[Any]]) -> None:
        """Nothing."""

    def offer(self, gpus: int) -> NodeOffer:
        """All there is."""
        return NodeOffer(self.name, tuple(range(gpus)))

    def work_folder(self, folder: str) -> str:
        """The same folder."""
        return folder

    def run_files(self) -> AbstractContextManager[socket.socket]:
        """In a thread of this process."""
        from ..copying.served_here import served_here

        return served_here()

    def wait_for_end(self, *, limit_s: float, is_ours: bool = True) -> None:
        """Wait until the agent has ended the session; kill it when it does not.

        Not ``is_ours``: it has done with us. One that lives then serves another notebook, and is left alone.
        """
        if not is_ours and live_agent(self._folder):
            self.leave()
            return
        if self._agent is None:
            wait_for_pid(self._pid, limit_s=limit_s)
        else:
            try:
                self._agent.wait(limit_s)
            except subprocess.TimeoutExpired:
                self._agent.kill()
                self._agent.wait()
        remove_dead_agents(self._folder.parent)  # perhaps it could not tidy up itself

    def leave(self) -> None:
        """The agent goes on without us; as its parent we take note of its end, whenever that is."""
        if self._agent is not None:
            with contextlib.suppress(RuntimeError):  # this process is ending itself
                threading.Thread(target=self._agent.wait, name="detrain_nb agent", daemon=True).start()
