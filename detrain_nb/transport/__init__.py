"""Ways in which bytes and files reach a node."""

from .transport import AgentFolders, Transport

__all__ = ["AgentFolders", "Transport"]
