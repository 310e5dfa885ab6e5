"""Which git repositories are fetched from where: the same rules for who writes a spec and for the node that fetches.

Nothing here asks a host, or runs git.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from ..errors import SpecError
from ..text import printable

__all__ = ["GitUrl", "check_git_ref", "check_git_url", "parse_git_url", "resolve_submodule"]

_MOST_CHARS = 2048
_MOST_REF_CHARS = 255
_PORTS = {"https": 443, "http": 80, "ssh": 22}
_WITH_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)(/.*)?", re.DOTALL)
_LIKE_SCP = re.compile(r"(?:([^@/:]+)@)?([A-Za-z0-9][A-Za-z0-9.-]*):(?!:)(.+)", re.DOTALL)
_HOST = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_NOT_IN_REF = re.compile(r"[\s~^:?*\[\\]|\.\.|@\{|//|/\.|^[-/.+]|[/.]$|\.lock(?:/|$)|^@$")
_TOKEN_USERS = {"bitbucket.org": "x-token-auth"}
_LOOPBACK = re.compile(r"localhost|127(?:\.[0-9]{1,3}){3}|\[::1\]")


@dataclass(frozen=True)
class GitUrl:
    """A repository: ``scheme`` is https, http, ssh or file. ``host`` is in small letters, and empty for a file."""

    text: str
    scheme: str
    host: str
    port: int | None
    path: str

    @property
    def place(self) -> tuple[str, str, int | None]:
        """What the submodules of a repository have in common with it."""
        return self.scheme, self.host, self.port

    @property
    def owner(self) -> str:
        """Whose it is at its host: the folder that it is in there, as far as the first slash."""
        return self.path.strip("/").partition("/")[0] if "/" in self.path.strip("/") else ""

    @property
    def base(self) -> str:
        """Scheme, host and port, as git names credentials by."""
        port = "" if self.port in (None, _PORTS.get(self.scheme)) else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}"

    @property
    def token_user(self) -> str:
        """Whom a token is of at that host, where it names nobody."""
        return _TOKEN_USERS.get(self.host, "x-access-token")

    @property
    def hides_token(self) -> bool:
        """Nobody on the way reads what is sent there."""
        return self.scheme == "https" or (self.scheme == "http" and bool(_LOOPBACK.fullmatch(self.host)))


def check_git_url(text: str) -> str:
    """Return the URL of a repository, or its full path. Raises: SpecError, see `parse_git_url`."""
    return parse_git_url(text).text


def parse_git_url(text: str) -> GitUrl:
    """Take the URL of a repository apart: https, http, ssh, file, ``user@host:path``, or a full path.

    Raises: SpecError for all else: for what has git run a program (``ext::``), is an option, or has a password in it.
    """
    shown = printable(text[:200])
    if (
        not text
        or len(text) > _MOST_CHARS
        or any(_is_odd(char) for char in (text.replace(" ", "") if text.startswith("/") else text))
    ):
        raise SpecError(f"git url {_hide_user(shown)!r}: give 1 to {_MOST_CHARS} characters, no space or backslash")
    if text.startswith("-"):
        raise SpecError(f"git url {shown!r} begins with -, which git takes for an option")
    if text.startswith("/"):
        return GitUrl(text, "file", "", None, text)
    if match := _WITH_SCHEME.fullmatch(text):
        return _parse_with_scheme(text, match[1].lower(), match[2], match[3] or "")
    if re.match(r"[A-Za-z0-9+.-]+::", text):
        raise SpecError(f"git url {_hide_user(shown)!r} has git run a helper: give an https:// or ssh:// address")
    if match := _LIKE_SCP.fullmatch(text):
        _check_user(match[1], text)
        if match[3].startswith("-") or "@" in match[3]:
            raise SpecError(f"git url {_hide_user(shown)!r} has a path that begins with -, or has @ in it")
        return GitUrl(text, "ssh", match[2].lower(), _PORTS["ssh"], "/" + match[3].lstrip("/"))
    kinds = "https://HOST/PATH, ssh://HOST/PATH, user@HOST:PATH, or the full path of one that is on the nodes"
    raise SpecError(f"git url {_hide_user(shown)!r} is none: give {kinds}")


def _is_odd(char: str) -> bool:
    return char.isspace() or not char.isprintable() or char == "\\"


def _parse_with_scheme(text: str, scheme: str, authority: str, path: str) -> GitUrl:
    shown = _hide_user(printable(text[:200]))
    if scheme == "file":
        if authority or len(path) < 2:
            raise SpecError(f"git url {shown!r}: write file:///PATH")
        return GitUrl(text, scheme, "", None, path)
    if scheme not in _PORTS:
        raise SpecError(f"git url {shown!r}: {scheme}:// is refused: give an https:// or ssh:// address")
    user, at, host = authority.rpartition("@")
    if (at and scheme != "ssh") or re.search(":.*@", path, re.DOTALL):
        raise SpecError(
            f"git url {shown!r} has a user or password in it: name the environment variable as token instead"
        )
    if at:
        _check_user(user, text)
    match = _HOST.fullmatch(host)
    if match is None or (match[1] and not 0 < int(match[1]) < 1 << 16):
        raise SpecError(f"git url {shown!r} has no host that can be one")
    if len(path) < 2:
        raise SpecError(f"git url {shown!r} has no path")
    name = host[: match.start(1) - 1] if match[1] else host
    return GitUrl(text, scheme, name.lower(), int(match[1] or _PORTS[scheme]), path)


def _check_user(user: str | None, text: str) -> None:
    if user is None:
        return
    if ":" in user:
        raise SpecError(f"git url {_hide_user(printable(text[:200]))!r} has a password in it: use a key (ssh_key)")
    if not _USER.fullmatch(user):
        raise SpecError(f"git url {_hide_user(printable(text[:200]))!r} has a user that can be none")


def _hide_user(text: str) -> str:
    """Without what may be a password."""
    return re.sub(r"^([A-Za-z0-9+.-]+:/*)?.*@", lambda found: f"{found[1] or ''}***@", text, flags=re.DOTALL)


def check_git_ref(ref: str) -> str:
    """Return the name of a branch or tag, or a commit; empty is the repository's own choice. Raises: SpecError."""
    if len(ref) > _MOST_REF_CHARS or not ref.isprintable() or _NOT_IN_REF.search(ref):
        shown = printable(_hide_user(ref) if "://" in ref else ref)[:80]
        raise SpecError(f"git ref {shown!r} can be no branch, tag or commit: give the name alone, as in main or v1.2")
    return ref


def resolve_submodule(parent: GitUrl, text: str) -> GitUrl:
    """The URL of a submodule, which may be written from its parent's. Raises: SpecError for one of another host."""
    if text.startswith(("./", "../")):
        text = _join(parent, text)
    found = parse_git_url(text)
    if found.place != parent.place or parent.scheme == "file":
        where, above = (each.host or "files of this machine" for each in (found, parent))
        only = "only those of the same host, scheme and port are fetched"
        raise SpecError(f"a submodule comes from {where}, its repository from {above}: {only}")
    return found


def _join(parent: GitUrl, text: str) -> str:
    path = posixpath.normpath(posixpath.join(parent.path, text))
    return parent.text[: len(parent.text) - len(parent.path.lstrip("/"))] + path.lstrip("/")
