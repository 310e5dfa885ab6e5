"""The words around a launcher in a command line: what may precede it, and the text passed to a shell."""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Sequence

from ..storage import shown

__all__ = ["ASSIGNMENT", "KEYWORDS", "WRAPPERS", "find_text", "name_before", "name_before_text"]

ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
KEYWORDS = ("exec", "nohup", "time", "env", "command", "if", "then", "else", "do", "while", "until", "{", "!")
WRAPPERS = (
    *("srun", "numactl", "taskset", "nice", "sudo", "uv", "poetry", "conda", "timeout", "stdbuf", "mpirun"),
    *("docker", "podman", "singularity", "apptainer", "nsys", "setsid", "ionice"),
)
_SHELLS, _RUNS_TEXT = ("sh", "bash", "dash", "zsh"), re.compile("-[a-z]{0,5}c")
_IMAGE = re.compile(r".+\.(?:sif|simg|sqsh)|(?:docker|oras|library|shub)://.+", re.DOTALL)


def name_before(words: Sequence[str], what: str) -> list[str]:
    """Report the program that precedes ``what`` in a command line, such as srun, and the image of its container."""
    begun = [word for word in words if word not in KEYWORDS and not ASSIGNMENT.fullmatch(word)]
    if not begun:
        return []
    image = _find_image(begun)
    nor_image = f", nor its image {shown(image, most=200)}" if image else ""
    return [f"{posixpath.basename(begun[0])}: the part before {what} is not imported{nor_image}"]


def _find_image(words: Sequence[str]) -> str:
    for word, following in itertools.pairwise([*words, ""]):
        option, _, value = word.partition("=")
        if option == "--container-image":
            return value or following
        if _IMAGE.fullmatch(word):
            return word
    is_run = "run" in words and posixpath.basename(words[0]) in ("docker", "podman")
    return words[-1] if is_run else ""  # after its options, before the command


def find_text(words: Sequence[str]) -> str | None:
    """Return the text that a shell runs, as in ``srun bash -lc "torchrun train.py"``."""
    begun = [at for at, word in enumerate(words) if word not in KEYWORDS and not ASSIGNMENT.fullmatch(word)]
    may_follow = bool(begun) and posixpath.basename(words[begun[0]]) in WRAPPERS
    for at in begun if may_follow else begun[:1]:
        if posixpath.basename(words[at]) in _SHELLS and _RUNS_TEXT.fullmatch("".join(words[at + 1 : at + 2])):
            return words[at + 2] if at + 2 < len(words) else None
    return None


def name_before_text(words: Sequence[str], text: str) -> list[str]:
    """Report the program that precedes the shell whose text ``find_text`` found."""
    return name_before(words[: max(0, words.index(text) - 2)], "the text of its shell")
