"""Which git repositories are cloned, and which are refused: one rule for specs, and for submodules on a node."""

from __future__ import annotations

import re

from ..errors import SpecError

__all__ = ["check_git_ref", "check_git_url", "check_submodule_url", "git_host"]

_WITH_SCHEME = re.compile(
    r"(https|http|ssh|git|file)://(?:([^/@]*)@)?(\[[0-9A-Fa-f:.%]+\]|[^/:@\[\]]*)(:[0-9]{1,5})?(/.*)"
)
_LIKE_SCP = re.compile(r"(?:([A-Za-z0-9._+][A-Za-z0-9._+-]*)@)?([A-Za-z0-9_][A-Za-z0-9._-]*):(?!:)([^:].*)")
_REF = re.compile(r"[A-Za-z0-9._+@/#=-]{1,250}")
_MOST_CHARACTERS = 2000


def check_git_url(url: str) -> str:
    """Return ``url``, of a repository that git reaches by HTTPS, SSH or a path. Raises: SpecError.

    Refused are what git would take for an option or a command (``ext::``), a password, and control characters.
    """
    shown = repr(url if len(url) <= 60 else f"{url[:57]}...")
    if not url or len(url) > _MOST_CHARACTERS or not url.isprintable() or url != url.strip():
        raise SpecError(
            f"git url {shown}: give one line without control characters, at most {_MOST_CHARACTERS} of them"
        )
    if url.startswith("-"):
        raise SpecError(f"git url {shown} begins with '-', which git takes for an option: give a URL or ./{url}")
    if match := _WITH_SCHEME.fullmatch(url):
        scheme, user, host = match[1], match[2], match[3]
        if user is not None and (":" in user or scheme in ("http", "https")):
            raise SpecError(
                f"git url {_without_user(url)!r} had a user or password before its host: leave it out, and name the "
                "environment variable of a token in git.token"
            )
        if user is not None and not re.fullmatch(r"[A-Za-z0-9._+][A-Za-z0-9._+-]*", user):
            raise SpecError(f"git url {_without_user(url)!r} has a user that is none: give one of letters and digits")
        if bool(host) == (scheme == "file") or host.startswith("-"):
            raise SpecError(f"git url {shown}: give a host after https:// or ssh://, and after file:// a path")
        return url
    if "://" in url or "::" in url.partition("/")[0]:
        raise SpecError(f"git url {shown}: git would run a program for it: give https://, ssh:// or a path")
    if _LIKE_SCP.fullmatch(url) or ":" not in url.partition("/")[0]:
        return url
    raise SpecError(f"git url {shown}: give https://host/path, ssh://host/path, user@host:path or a path")


def check_git_ref(ref: str) -> str:
    """Return ``ref``, the name of a branch or tag, or a commit. Raises: SpecError."""
    if not _REF.fullmatch(ref) or ref.startswith("-") or ".." in ref or "@{" in ref:
        shown = repr(ref if len(ref) <= 60 else f"{ref[:57]}...")
        raise SpecError(f"git ref {shown}: give a branch, a tag or a commit, which does not begin with '-'")
    return ref


def check_submodule_url(url: str, *, of: str) -> str:
    """Return ``url`` of a submodule of the repository ``of``, which is on the same host. Raises: SpecError."""
    check_git_url(url)
    is_below = url.startswith(("./", "../"))  # git takes it from where the repository is
    if not is_below and git_host(url) != git_host(of):
        raise SpecError(
            f"submodule {url!r} is on {git_host(url) or 'this machine'}, not on {git_host(of) or 'this machine'} as "
            f"{of!r} is: only submodules of the same host are cloned"
        )
    return url


def git_host(url: str) -> str:
    """Return the host of a repository, in small letters; empty for one on this machine."""
    if match := _WITH_SCHEME.fullmatch(url):
        return match[3].lower()
    match = None if "/" in url.partition(":")[0] else _LIKE_SCP.fullmatch(url)
    return match[2].lower() if match else ""


def _without_user(url: str) -> str:
    """The URL without what may be a secret."""
    scheme, _, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}://{place.rpartition('@')[2]}{slash}{path}"
