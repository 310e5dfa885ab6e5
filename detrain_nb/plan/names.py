"""What names may be: the same rules for who writes a spec and for the node that is told of one."""

from __future__ import annotations

import re

MOST_NAME_CHARS = 63
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MOST_NAME_CHARS - 1}}}")  # of a job or a node: it becomes a file's
NAME_RULE = f"a-z, A-Z, 0-9 and . _ -, at most {MOST_NAME_CHARS}, the first a letter or a digit"
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")  # of the environment
CHECKPOINT_FOLDER = re.compile(r"step-([0-9]{8,19})")  # of a checkpoint, with its step
CHECKPOINT_NOTE = "checkpoint.json"  # the last file in it: without that it is not whole
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def make_name(text: str, *, default: str) -> str:
    """Make a name of a text, with a dash for what no name may have."""
    return _NOT_IN_NAME.sub("-", text).lstrip("-._")[:MOST_NAME_CHARS] or default
