"""Rules for the git repositories that may be fetched, the same in a spec and on the node that fetches.

Nothing here contacts a host or runs git.
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
    """A repository: ``scheme`` is https, http, ssh or file; ``host`` is in lower case, and empty for a file."""

    text: str
    scheme: str
    host: str
    port: int | None
    path: str

    @property
    def place(self) -> tuple[str, str, int | None]:
        """Scheme, host and port, which a submodule must share with its repository."""
        return self.scheme, self.host, self.port

    @property
    def owner(self) -> str:
        """The owner of the repository at its host: the first part of its path; empty when there is only one."""
        return self.path.strip("/").partition("/")[0] if "/" in self.path.strip("/") else ""

    @property
    def base(self) -> str:
        """Scheme, host and port, by which git looks up credentials."""
        port = "" if self.port in (None, _PORTS.get(self.scheme)) else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}"

    @property
    def token_user(self) -> str:
        """The user name to send with a token at that host."""
        return _TOKEN_USERS.get(self.host, "x-access-token")

    @property
    def hides_token(self) -> bool:
        """Whether a token sent there cannot be read on the way."""
        return self.scheme == "https" or (self.scheme == "http" and bool(_LOOPBACK.fullmatch(self.host)))


def check_git_url(text: str) -> str:
    """Check the URL or full path of a repository, and return it. Raises: SpecError, see `parse_git_url`."""
    return parse_git_url(text).text


def parse_git_url(text: str) -> GitUrl:
    """Parse the URL of a repository: https, http, ssh, file, ``user@host:path``, or a full path.

    Raises: SpecError for anything else: URLs that make git run a program (``ext::``), are an option, or contain a
    password.
    """
    shown = printable(text[:200])
    if (
        not text
        or len(text) > _MOST_CHARS
        or any(_is_odd(char) for char in (text.replace(" ", "") if text.startswith("/") else text))
    ):
        raise SpecError(f"git url {_hide_user(shown)!r}: give 1 to {_MOST_CHARS} characters, no space or backslash")
    if text.startswith("-"):
        raise SpecError(f"git url {shown!r} begins with -, which git would read as an option")
    if text.startswith("/"):
        return GitUrl(text, "file", "", None, text)
    if match := _WITH_SCHEME.fullmatch(text):
        return _parse_with_scheme(text, match[1].lower(), match[2], match[3] or "")
    if re.match(r"[A-Za-z0-9+.-]+::", text):
        raise SpecError(f"git url {_hide_user(shown)!r} makes git run a helper: give an https:// or ssh:// address")
    if match := _LIKE_SCP.fullmatch(text):
        _check_user(match[1], text)
        if match[3].startswith("-") or "@" in match[3]:
            raise SpecError(f"git url {_hide_user(shown)!r}: the path must not begin with -, or contain @")
        return GitUrl(text, "ssh", match[2].lower(), _PORTS["ssh"], "/" + match[3].lstrip("/"))
    kinds = "https://HOST/PATH, ssh://HOST/PATH, user@HOST:PATH, or the full path of a repository on the nodes"
    raise SpecError(f"git url {_hide_user(shown)!r} is invalid: give {kinds}")


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
            f"git url {shown!r} contains a user or password: name the environment variable of a token instead (token)"
        )
    if at:
        _check_user(user, text)
    match = _HOST.fullmatch(host)
    if match is None or (match[1] and not 0 < int(match[1]) < 1 << 16):
        raise SpecError(f"git url {shown!r} has no valid host")
    if len(path) < 2:
        raise SpecError(f"git url {shown!r} has no path")
    name = host[: match.start(1) - 1] if match[1] else host
    return GitUrl(text, scheme, name.lower(), int(match[1] or _PORTS[scheme]), path)


def _check_user(user: str | None, text: str) -> None:
    if user is None:
        return
    if ":" in user:
        raise SpecError(f"git url {_hide_user(printable(text[:200]))!r} contains a password: use a key (ssh_key)")
    if not _USER.fullmatch(user):
        raise SpecError(f"git url {_hide_user(printable(text[:200]))!r} has an invalid user")


def _hide_user(text: str) -> str:
    """Replace everything that may be a password."""
    return re.sub(r"^([A-Za-z0-9+.-]+:/*)?.*@", lambda found: f"{found[1] or ''}***@", text, flags=re.DOTALL)


def check_git_ref(ref: str) -> str:
    """Check a branch, tag or commit, and return it; empty: the repository's default. Raises: SpecError."""
    if len(ref) > _MOST_REF_CHARS or not ref.isprintable() or _NOT_IN_REF.search(ref):
        shown = printable(_hide_user(ref) if "://" in ref else ref)[:80]
        raise SpecError(f"git ref {shown!r} is not a branch, tag or commit: give the name alone, such as main or v1.2")
    return ref


def resolve_submodule(parent: GitUrl, text: str) -> GitUrl:
    """Resolve the URL of a submodule, which may be relative to its parent's. Raises: SpecError for another host."""
    if text.startswith(("./", "../")):
        text = _join(parent, text)
    found = parse_git_url(text)
    if found.place != parent.place or parent.scheme == "file":
        where, above = (each.host or "files of this machine" for each in (found, parent))
        only = "only submodules with the same host, scheme and port are fetched"
        raise SpecError(f"a submodule is at {where}, its repository at {above}: {only}")
    return found


def _join(parent: GitUrl, text: str) -> str:
    path = posixpath.normpath(posixpath.join(parent.path, text))
    return parent.text[: len(parent.text) - len(parent.path.lstrip("/"))] + path.lstrip("/")
