"""What a session asks of a way to a node: whoever has a transport looks for no method that may be missing."""

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
    """Where an agent that was kept serves the next session; fields of wire.Begin."""

    folder: str
    work_folder: str
    uses: list[str]


@runtime_checkable
class Transport(Protocol):
    """One node, as a session reaches it. What is known of the node is set when its agent was started or connected to.

    ``name`` is the user's name for it, empty for this machine; ``node`` is how the user described it, None where there
    is nothing to describe. Other nodes reach it at ``address``, through its ``interface``; its ranks get ``env``. This
    machine is reached by it at ``reached_from``, where that is known otherwise than by the node's own word. It
    ``is_forwarded`` where this machine reaches it at an address that it does not have, as through a forwarded port.
    ``can_resume``: a connection that breaks says nothing of the agent, which can be connected to again. ``is_trusted``:
    the user lets it show active HTML, as this machine may. ``shares_paths``: a path there is the same file as here, so
    that no folder has to be brought. ``place`` is equal for transports to the same node, by the same way; ``account``
    for those to the same user of the same machine, whatever it is called, None where that is not known. ``project`` is
    set to the folder of the notebook's machine which the node's work folder is like; empty: the one that is asked for.
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
        """What the ranks get, as it is now."""
        ...

    @property
    def place(self) -> object: ...

    @property
    def account(self) -> object: ...

    @property
    def torch(self) -> str:
        """The version of torch there; empty where it is not known."""
        ...

    @property
    def contact(self) -> object:
        """Another object each time that it was reached, None before."""
        ...

    @property
    def folder_state(self) -> tuple[object, object]:
        """What it said then of its work folder: where the files came from, and the digest of their list."""
        ...

    @property
    def cache(self) -> str:
        """Our folder there; empty before it was reached, and where there is none."""
        ...

    def begin(self, session: str) -> AgentFolders:
        """The agent, which was kept, is to serve ``session`` from now on; returns where. Raises: DetrainError."""
        ...

    def start_agent(self, session: str) -> socket.socket:
        """Start the agent of ``session`` and return a byte stream to it. Raises: DetrainError."""
        ...

    def connect_agent(self, session: str) -> socket.socket:
        """Connect to an agent that runs already. Raises: SessionError when none does, TransportError."""
        ...

    def ask_meanwhile(self, work: Collection[Future[Any]]) -> None:
        """Ask the user, in this thread, what has to be known to reach it, until all of ``work`` is done.

        Where nothing ever has to be asked it returns at once.
        """
        ...

    def offer(self, gpus: int) -> NodeOffer:
        """What the node has, of ``gpus`` that its agent counted, and what the user wants of it."""
        ...

    def work_folder(self, folder: str) -> str:
        """Where the ranks of this node start when they start in ``folder`` on the notebook's machine."""
        ...

    def run_files(self) -> AbstractContextManager[socket.socket]:
        """Have copying/remote_program.py serve one order, at the other end of the byte stream that this gives.

        It ends with the block, and leaves nothing that is not whole. Raises: DetrainError.
        """
        ...

    def run_jobs(self) -> AbstractContextManager[socket.socket]:
        """Have node/job/service.py serve orders, at the other end of the byte stream that this gives.

        It needs no agent, ends with the block, and removes what it was to prepare and not to launch; jobs go on.
        Afterwards ``python``, ``address`` and so on are known. Raises: DetrainError.
        """
        ...

    def wait_for_end(self, *, limit_s: float, is_ours: bool = True) -> None:
        """Wait until the agent, asked to end, has done so, and leave nothing of ours.

        Not ``is_ours``: it has done with us, and may serve another notebook now.
        """

    def leave(self) -> None:
        """The agent goes on without us."""
