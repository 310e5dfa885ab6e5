"""How bytes and files reach a node."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Protocol, TypedDict

from ..plan import NodeOffer


class AgentFolders(TypedDict):
    """Where an agent that was kept serves the next session; fields of wire.Begin."""

    folder: str
    work_folder: str
    uses: list[str]


class Transport(Protocol):
    """One node, as a session reaches it. What is known of the node is set when its agent was started or connected to.

    ``name`` is the user's name for it, empty for this machine. Other nodes reach it at ``address``, through its
    ``interface``; its ranks get ``env``. ``can_resume``: a connection that breaks says nothing of the agent, which can
    be connected to again. ``is_trusted``: the user lets it show active HTML, as this machine may. ``place`` is equal
    for transports to the same node, by the same way.
    """

    name: str
    is_this_machine: bool
    is_trusted: bool
    can_resume: bool
    python: str
    address: str
    interface: str

    @property
    def env(self) -> Mapping[str, str]:
        """What the ranks get, as it is now."""
        ...

    @property
    def place(self) -> object: ...

    @property
    def torch(self) -> str:
        """The version of torch there; empty where it is not known."""
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

    def offer(self, gpus: int) -> NodeOffer:
        """What the node has, of ``gpus`` that its agent counted, and what the user wants of it."""
        ...

    def work_folder(self, folder: str) -> str:
        """Where the ranks of this node start when they start in ``folder`` on the notebook's machine."""
        ...

    def wait_for_end(self, *, limit_s: float, is_ours: bool = True) -> None:
        """Wait until the agent, asked to end, has done so, and leave nothing of ours.

        Not ``is_ours``: it has done with us, and may serve another notebook now.
        """

    def leave(self) -> None:
        """The agent goes on without us."""
