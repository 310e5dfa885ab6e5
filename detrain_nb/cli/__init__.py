"""The command `detrain-nb`: run notebooks and jobs from the shell, list running sessions, export and import specs."""

from .commands import main

__all__ = ["main"]
