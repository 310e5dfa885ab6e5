"""Interface of a transport, the way to a node. Every transport has all methods, so callers need not check for them."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, runtime_checkable

from ..plan import NodeOffer

if TYPE_CHECKING:
    from ..spec.node import Node

__all__ = ["AgentFolders", "Transport"]


class AgentFolders(TypedDict):
    """Folders in which a kept agent serves the next session; fields of wire.Begin."""

    folder: str
    work_folder: str
    uses: list[str]


@runtime_checkable
class Transport(Protocol):
    """Way to one node for a session. Facts about the node are set once its agent was started or connected to.

    ``name`` is the user's name for the node, empty for this machine; ``node`` is the user's description of it, or None.
    Other nodes reach it at ``address``, on its ``interface``; its ranks get ``env``. ``reached_from`` is the address at
    which the node reaches this machine, if known independently of the node's report. ``is_forwarded``: this machine
    reaches the node at an address that the node itself does not have, such as a forwarded port. ``can_resume``: the
    agent survives a broken connection and can be connected to again. ``is_trusted``: the user allows the node to show
    active HTML, as this machine may. ``shares_paths``: paths are the same files there and here, so no folder is copied.
    ``place`` is equal for transports to the same node by the same route; ``account`` for transports to the same user of
    the same machine, whatever its name, None if unknown. ``project`` is the folder here that the node's work folder
    mirrors; empty: the folder given to ``work_folder``.
    """

    name: str
    is_this_machine: bool
    is_trusted: bool
    can_resume: bool
    shares_paths: bool
    python: str
    address: str
    interface: str
    reached_from: str
    is_forwarded: bool
    project: str

    @property
    def node(self) -> Node | None: ...

    @property
    def env(self) -> Mapping[str, str]:
        """Environment variables for the ranks, with their current values."""
        ...

    @property
    def place(self) -> object: ...

    @property
    def account(self) -> object: ...

    @property
    def torch(self) -> str:
        """Version of torch on the node; empty if unknown."""
        ...

    @property
    def contact(self) -> object:
        """Identity of the latest contact: a new object each time the node is reached, None before the first."""
        ...

    @property
    def folder_state(self) -> tuple[object, object]:
        """Reported state of the work folder at that contact: the source of its files, and the digest of their list."""
        ...

    @property
    def cache(self) -> str:
        """Our cache folder on the node; empty until the node was reached, and if it has none."""
        ...

    def begin(self, session: str) -> AgentFolders:
        """Prepare ``session`` on the kept agent of this node; returns its folders. Raises: DetrainError."""
        ...

    def start_agent(self, session: str) -> socket.socket:
        """Start the agent of ``session`` and return a byte stream to it. Raises: DetrainError."""
        ...

    def connect_agent(self, session: str) -> socket.socket:
        """Connect to a running agent. Raises: SessionError when none is running, TransportError."""
        ...

    def ask_meanwhile(self, work: Collection[Future[Any]]) -> None:
        """Ask the user, in this thread, the questions needed to reach the node, until all of ``work`` is done.

        A transport that never asks anything returns at once.
        """
        ...

    def offer(self, gpus: int) -> NodeOffer:
        """Return the node's ``gpus``, as counted by its agent, and the devices and ranks that the user chose."""
        ...

    def work_folder(self, folder: str) -> str:
        """Return the folder on this node in which ranks start, for ``folder`` on the notebook's machine."""
        ...

    def run_files(self) -> AbstractContextManager[socket.socket]:
        """Run copying/remote_program.py for one order and yield the byte stream to it.

        It ends with the block, and leaves no incomplete file. Raises: DetrainError.
        """
        ...

    def run_jobs(self) -> AbstractContextManager[socket.socket]:
        """Run node/job/service.py and yield the byte stream to it.

        It needs no agent and ends with the block. It then removes jobs that were prepared and not launched; running
        jobs continue. Afterwards ``python``, ``address`` etc. are set. Raises: DetrainError.
        """
        ...

    def wait_for_end(self, *, limit_s: float, is_ours: bool = True) -> None:
        """Wait until the agent, which was told to exit, has done so, and release our resources.

        With ``is_ours`` False, the agent has finished our session and may already serve another notebook.
        """

    def leave(self) -> None:
        """Close the connection; the agent keeps running."""
