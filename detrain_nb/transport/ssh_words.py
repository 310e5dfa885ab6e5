"""Words of an ssh_config: splitting of values, and expansion of ``~``, variables and tokens such as ``%h`` in paths."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

from ..errors import SpecError

__all__ = ["in_home", "local_user", "read_sign", "split_words"]

_NEEDS_CARE = re.compile(r"[\"'\\]|[^\S \t]")
_PIECE = re.compile(r"\\(['\"\\ ])|(.)", re.DOTALL)
_STANDS_FOR_MORE = re.compile(r"\$\{(\w+)\}|%(.?)")


def split_words(where: Path | str, key: str, value: str) -> list[str]:
    """Split words as ssh does: a backslash escapes only a quote, a blank or another backslash, else it is literal.

    Empty words are dropped. Raises: SpecError when a quote is not closed.
    """
    if not _NEEDS_CARE.search(value):  # the loop below is slow
        return value.split()
    words, word, quote = list[str](), "", ""
    for escaped, char in _PIECE.findall(value):
        if escaped:
            word += "\\ " if quote and escaped == " " else escaped
        elif char == quote or (not quote and char in "\"'"):
            quote = "" if quote else char
        elif quote or char not in " \t":
            word += char
        else:
            words.append(word)
            word = ""
    if quote:
        raise SpecError(f"{where}: cannot read {key} {value!r}: a quote is not closed")
    return [each for each in (*words, word) if each]


def in_home(path: str, read: Callable[[str], str] = "%{}".format) -> Path:
    """Replace ``~``, ``${NAME}`` and ``%`` tokens, whose letter is passed to ``read``.

    An unknown user and an unset variable are left as they are.
    """

    def replace(match: re.Match[str]) -> str:
        return os.environ.get(match[1], match[0]) if match[1] else read(match[2])

    return Path(_STANDS_FOR_MORE.sub(replace, os.path.expanduser(path)))


def read_sign(letter: str, *, name: str, hostname: str, port: int, user: str, key_name: str) -> str:
    """Return the value of the token ``%letter``, as in ssh, for the host that the user calls ``name``.

    ``key_name`` is the name under which the host key is looked up. Raises: SpecError for an unsupported letter.
    """
    here = socket.gethostname()
    known: dict[str, Callable[[], str]] = {
        "%": lambda: "%",
        "d": lambda: str(Path.home()),
        "h": lambda: hostname,
        "i": lambda: str(os.getuid()),
        "k": lambda: key_name,
        "L": lambda: here.partition(".")[0],
        "l": lambda: here,
        "n": lambda: name,
        "p": lambda: str(port),
        "r": lambda: user,
        "u": lambda: local_user(name),
    }
    if not hasattr(os, "getuid"):
        del known["i"]
    if letter not in known:
        signs = " ".join(f"%{each}" for each in known)
        raise SpecError(
            f"the SSH configuration of {name} has a path with %{letter}, which is not supported: use one of {signs}"
        )
    return known[letter]()


def local_user(name: str) -> str:
    """Return the user name of this process, with which ssh logs in at host ``name`` too. Raises: SpecError."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError) as exc:
        raise SpecError(f"no user is given for {name}, and the user of this process has no name: give a user") from exc
