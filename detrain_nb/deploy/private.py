"""What stays on the notebook's machine unless its user names it: keys, tokens, histories; and a home as a whole."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath

from pathspec import GitIgnoreSpec

__all__ = ["holds_homes", "is_private", "is_same", "why_kept"]

# As in .gitignore, in small letters. What is a folder is left out with all that is in it.
_KEYS = """
.ssh  .gnupg  .password-store  keyrings  id_rsa*  id_dsa*  id_ecdsa*  id_ed25519*
*.pem  *.key  *.ppk  *.p12  *.pfx  *.jks  *.keystore  *.kdbx
"""
_TOKENS = """
.env  .env.*  !.env.example  !.env.sample  !.env.template  !.env.dist  .envrc
.netrc  _netrc  .git-credentials  .pypirc  .npmrc  .pgpass  .my.cnf  .boto  .s3cfg  .htpasswd  .vault-token
.aws  .azure  .kube  .docker  .dockercfg  .oci  .akash  .kaggle  .huggingface  .modal.toml  .databrickscfg
**/.cache/huggingface/token  **/.cache/huggingface/stored_tokens  **/.config/gcloud  **/.config/gh  **/.config/hub
**/.config/git/credentials  **/.config/rclone  **/.config/wandb  **/wandb/settings  **/.cargo/credentials*
**/.gem/credentials
credentials.json  application_default_credentials.json  client_secret*.json  *service-account*.json  kaggle.json
secrets.toml  rclone.conf  kubeconfig
"""
_HISTORIES = ".*_history  .histfile  .lesshst  .viminfo  fish_history  history.sqlite*  .ipython  .mozilla"
# Who reads a connection file runs code in the kernel; a server's has the password of all its notebooks.
_JUPYTER = "kernel-*.json  jpserver-*.json  nbserver-*.json  .jupyter  jupyter_cookie_secret  notebook_cookie_secret"
_PRIVATE = tuple(f"{_KEYS} {_TOKENS} {_HISTORIES} {_JUPYTER}".split())
# Nearly no path has one of the names: a single expression finds that out ten times as fast.
_NAMES = "|".join(re.escape(line.removeprefix("**/")).replace(r"\*", "[^/]*") for line in _PRIVATE if line[0] != "!")
_MAY_BE = re.compile(f"(?:^|/)(?:{_NAMES})(?:/|$)")
# Seen from one of these, what is private has another name: `token` in `.cache/huggingface`.
_HOLDERS = tuple(
    f"/{above}" for line in _PRIVATE if line[:4] == "**/." for above in PurePosixPath(line[3:]).parents[:-1]
)
_BACKUP = re.compile(r"(?:~|\.(?:bak|backup|old|orig|save))+$")  # of the same content, as editors and people name it
_NAMES_ONE = re.compile(r"[^*?./!][^/]*$")  # not `!*`, nor `!data/**`, which mean what other lines leave out


@lru_cache(maxsize=100)
def _compile(lifted: tuple[str, ...]) -> GitIgnoreSpec:
    named = [line for line in (re.sub(r"/?\s*$", "", line.lower()) for line in lifted) if _NAMES_ONE.search(line)]
    return GitIgnoreSpec.from_lines((*_PRIVATE, *named))


@lru_cache(maxsize=100_000)
def is_private(path: str, lifted: tuple[str, ...] = ()) -> bool:
    """Say whether a path, with slashes, has a name that keys, tokens or histories have, as large or small as it is.

    ``lifted`` are the lines with ``!`` that say what is none. It is asked for each folder on the way too.
    """
    path = path.lower()
    original = _BACKUP.sub("", path)
    name = path.rpartition("/")[2]
    if original != path and not any(line.lower().strip("!/ ").rpartition("/")[2] == name for line in lifted):
        return is_private(original, lifted)
    return _MAY_BE.search(path) is not None and _compile(lifted).match_file(path)


def why_kept(folder: str | os.PathLike[str]) -> str:
    """Say why no file of ``folder`` leaves this machine; empty where they may."""
    real = Path(os.path.realpath(folder))
    if holds_homes(real):
        what = "is a home, or holds homes"
    elif is_private(real.as_posix()) or real.as_posix().lower().endswith(_HOLDERS):
        what = "is where keys or tokens are"
    else:
        return ""
    return (
        f"{folder} {what}: its files stay here, nothing of it goes to the nodes; "
        "for a project's files there, start from a notebook, or after %cd, in a folder of the project's own"
    )


def holds_homes(path: str | os.PathLike[str]) -> bool:
    """Whether it is a home, or homes are below it."""
    real = Path(os.path.realpath(path))
    return real == real.parent or any(is_same(real, above) for home in _homes(real) for above in (home, *home.parents))


def _homes(folder: Path) -> Iterator[Path]:
    """The user's, whatever HOME says, and that of whose folder it is: a notebook of root may stand in another's."""
    found = {os.path.expanduser("~")}
    with contextlib.suppress(ImportError, OSError, KeyError):
        import pwd

        found.add(pwd.getpwuid(os.getuid()).pw_dir)
        found.add(pwd.getpwuid(folder.stat().st_uid).pw_dir)
    return (Path(os.path.realpath(home)) for home in found if os.path.isabs(home))


def is_same(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file or folder: also by another case of its name, or mounted in two places."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
