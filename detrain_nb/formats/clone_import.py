"""A git clone in a shell script, as the repository of a spec."""

from __future__ import annotations

import posixpath
import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from ..errors import SpecError
from ..storage import has_password_of_user, shown
from .reading import NO_FIELD
from .secret_words import may_be_secret
from .shell_words import Command, Word

# Options of git clone that take a value, and those that do not change the cloned files.
_VALUED = (
    "--depth",
    "-c",
    "--config",
    "-o",
    "--origin",
    "-j",
    "--jobs",
    "-u",
    "--upload-pack",
    "--template",
    "--filter",
)
_ALIKE = ("--depth", "--single-branch", "--filter", "--quiet", "--progress", "--jobs", "--no-tags", "--origin")
_ALIKE_SHORT = ("-q", "-v", "-j", "-o", "--")
_OUR_SSH = re.compile(r"GIT_SSH_COMMAND=ssh (?:-o \w+=\w+ )*-i ((?:[^\s\\'\"]|'[^']*'|\"[^\"\\]*\")+)")


@dataclass
class Clone:
    """What a git clone fetches, and to which folder; ``git`` is empty if its URL contains a variable."""

    git: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    left_out: list[str] = field(default_factory=list)


@dataclass
class Repository:
    """A repository that git clone has put into a folder."""

    git: dict[str, Any]
    folder: str

    def place(self, source: dict[str, Any], path: str, *, here: str) -> None:
        """Set the repository as the ``source`` of a script at ``path``, which starts in the folder ``here``."""
        below, folder = path.removeprefix(f"{self.folder}/"), ""
        if here.startswith(f"{self.folder}/"):
            folder = here.removeprefix(f"{self.folder}/")
        is_below = bool(folder) and below.startswith(f"{folder}/")
        source["git"] = {**self.git, "folder": folder} if is_below else self.git
        source["entry"] = below.removeprefix(f"{folder}/") if is_below else below
        del source["script"]


def read_clone(command: Command) -> Clone:
    """Parse a command that clones a repository. Raises: SpecError."""
    words = command.words[[word.text for word in command.words].index("clone") + 1 :]
    clone = Clone()
    git, plain = _find_key(command, clone), list[Word]()
    pending = ""
    for word in words:
        if pending:
            git |= {"ref": word.text} if pending == "ref" else {}
            pending = ""
        elif word.text in ("-b", "--branch"):
            pending = "ref"
        elif word.text.startswith("--branch="):
            git["ref"] = word.text.partition("=")[2]
        elif not word.text.startswith("-"):
            plain.append(word)
        else:
            pending = "passed over" if word.text in _VALUED else ""
            if word.text not in _ALIKE_SHORT and not word.text.startswith(_ALIKE):
                clone.left_out.append(f"git clone {shown(word.text.partition('=')[0], most=60)}: {NO_FIELD}")
    if plain and not plain[0].fills:
        clone.git = {"url": _without_password(plain[0].text, command, clone), **git}
        query = clone.git["url"].partition("?")[2]
        if any(may_be_secret(*pair.partition("=")[::2]) for pair in query.split("&")):
            said = "the part of its URL after ? may be a secret, and the spec contains it: give source.git.token"
            clone.left_out.append(f"git clone: {said}")
        base = posixpath.basename(clone.git["url"].rstrip("/")).removesuffix(".git")
        clone.folder = plain[1].text if plain[1:] else base
    return clone


def _without_password(url: str, command: Command, clone: Clone) -> str:
    if not has_password_of_user(url):
        return url
    scheme, slashes, rest = url.partition("://")
    server, slash, path = rest.partition("/")
    if not slashes or "@" not in server:  # the end of the password is ambiguous
        raise SpecError(f"line {command.line}: git clone: the URL contains a password: leave it out")
    clone.left_out.append("git clone: the user and password in its URL: give source.git.token")
    return f"{scheme}://{server.rpartition('@')[2]}{slash}{path}"


def _find_key(command: Command, clone: Clone) -> dict[str, Any]:
    """Return the credentials in a script of ours: the name of a variable with a token, or the path of a key."""
    for word in command.words:
        if token := re.fullmatch(r'credential\.\S+\.helper=!f\(\) \{ .* "\$(\w+)"; \}; f', word.text):
            return {"token": token[1]}
        if key := _OUR_SSH.fullmatch(word.text):
            return {"ssh_key": "".join(shlex.split(key[1]))}
        if word.text.startswith("GIT_SSH_COMMAND="):
            clone.left_out.append("GIT_SSH_COMMAND: give source.git.ssh_key")
    return {}
