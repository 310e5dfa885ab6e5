"""Rules for names, the same in a spec and on a node that receives one."""

from __future__ import annotations

import re

MOST_NAME_CHARS = 63
# The name of a job or a node, which becomes a file name.
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MOST_NAME_CHARS - 1}}}")
NAME_RULE = f"a-z, A-Z, 0-9 and . _ -, at most {MOST_NAME_CHARS}, the first a letter or a digit"
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")  # of the environment
CHECKPOINT_FOLDER = re.compile(r"step-([0-9]{8,19})")  # the name of a checkpoint's folder, with its step
CHECKPOINT_NOTE = "checkpoint.json"  # written last: without it a checkpoint is incomplete
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def make_name(text: str, *, default: str) -> str:
    """Turn text into a valid name, replacing forbidden characters by a dash."""
    return _NOT_IN_NAME.sub("-", text).lstrip("-._")[:MOST_NAME_CHARS] or default
