"""A node reached over SSH: how a connection to it is opened, and whether the user trusts its host key."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ..errors import TransportError
from ..spec.node import Node
from ..transport.ssh import CONNECT_LIMIT_S, AskPassphrase, SshConnection, find_route
from ..transport.ssh_config import SshTarget, read_config
from .bootstrapped_node import BootstrappedNode
from .questions import Questions
from .trust import trust_file, trusted_host_keys

__all__ = ["SshNode", "connect_to"]


class SshNode(BootstrappedNode[SshConnection]):
    """A transport over SSH: one connection, on it one channel to the agent's socket."""

    def __init__(self, node: Node, *, questions: Questions | None = None, config_path: Path | None = None) -> None:
        super().__init__(node)
        self.questions = questions
        self.config_path = config_path

    def ask_meanwhile(self, work: Collection[Future[Any]]) -> None:
        """Ask for passphrases, if a way to ask for them was given."""
        if self.questions is not None:
            self.questions.serve(work)

    def _connect(self) -> SshConnection:
        return connect_to(self.node, ask_passphrase=self.questions, config_path=self.config_path)

    def _find_place(self) -> object:
        """Return the node's description and the SSH route to it."""
        return self.node, find_route(_target(self.node), read_config(self.config_path))

    def _admit(self, connection: SshConnection) -> None:
        """Set ``is_trusted``: whether HTML from this host may be shown, by its host key.

        Raises: TransportError when an earlier connection was trusted and this one is not: the session's output is
        already shown as trusted.
        """
        host_key = connection.host_key_fingerprint
        is_trusted = host_key in trusted_host_keys()
        if self.is_trusted and not is_trusted:
            raise TransportError(f"the host key has changed to {host_key}, which is not in {trust_file()}")
        self.is_trusted = is_trusted


def connect_to(
    node: Node,
    *,
    ask_passphrase: AskPassphrase | None = None,
    config_path: Path | None = None,
    limit_s: float = CONNECT_LIMIT_S,
) -> SshConnection:
    """Connect to ``node`` with its own settings, and those of ssh_config for the rest.

    Raises: TransportError, SpecError.
    """
    return SshConnection.open(_target(node), ask_passphrase=ask_passphrase, config_path=config_path, limit_s=limit_s)


def _target(node: Node) -> SshTarget:
    return SshTarget(
        node.host, port=node.port, user=node.user, identity_file=node.identity_file, proxy_jump=node.proxy_jump
    )
