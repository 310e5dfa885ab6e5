"""The command `detrain-nb`: execute a notebook from the shell, list the running sessions."""

from .commands import main

__all__ = ["main"]
