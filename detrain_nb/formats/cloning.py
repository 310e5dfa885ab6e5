"""Shell lines that clone a repository: no hook runs, and a token never leaves the node's environment."""

from __future__ import annotations

import re

from ..errors import SpecError
from ..plan.git_urls import parse_git_url
from ..spec import Git
from .shell import quote, quote_path

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SETTINGS = ("protocol.ext.allow=never", "core.hooksPath=/dev/null", "advice.detachedHead=false")


def write_clone(git: Git, *, to: str) -> list[str]:
    """Return lines that clone a repository into the folder ``to``, a shell word. Raises: SpecError."""
    if git.how == "bundle":
        raise SpecError('source.git.how "bundle": a shell script cannot contain a repository: give "clone"')
    settings = [f"-c {setting}" for setting in _SETTINGS]
    before = "GIT_TERMINAL_PROMPT=0"
    if git.token is not None:
        settings += [f"-c {quote(setting)}" for setting in ("credential.helper=", _credential(git))]
    if git.ssh_key is not None:
        key = quote_path(git.ssh_key)
        before += f" GIT_SSH_COMMAND={quote(f'ssh -o BatchMode=yes -o IdentitiesOnly=yes -i {key}')}"
    lines = [f"rm -rf {to}", f"{before} git {' '.join(settings)} clone --quiet -- {quote(git.url)} {to}"]
    if git.ref is not None:
        checkout = f"git {' '.join(settings)} -C {to} checkout --quiet --detach"
        if _COMMIT.fullmatch(git.ref):  # a branch or a tag may have such a name, too
            fault = f"{git.url} has no commit {git.ref}"
            lines.append(f"{checkout} {git.ref}")
            lines.append(f'[ "$(git -C {to} rev-parse HEAD)" = {git.ref} ] || fail {quote(fault)}')
        else:  # a branch, or otherwise a tag or a commit
            lines.append(f"{checkout} {quote('origin/' + git.ref)} 2>/dev/null ||\n  {checkout} {quote(git.ref)}")
    return lines


def _credential(git: Git) -> str:
    """Return a credential helper of git: a shell line that reads the token from its variable, for that host only."""
    url = parse_git_url(git.url)
    if not url.hides_token:
        raise SpecError(f"source.git.token: {url.base} would receive it unencrypted: give an https:// url")
    say = f'printf "username=%s\\npassword=%s\\n" {url.token_user} "${git.token}"'
    return f'credential.{url.base}.helper=!f() {{ test "$1" = get && {say}; }}; f'
