"""Files that stay on the notebook's machine unless the user names them: keys, tokens, histories, home directories."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath

from pathspec import GitIgnoreSpec

__all__ = ["holds_homes", "is_private", "is_same", "why_kept"]

# Patterns as in .gitignore, in lower case. A folder is excluded with everything in it.
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
# A reader of a kernel's connection file can run code in the kernel; a server's file holds the token for its notebooks.
_JUPYTER = "kernel-*.json  jpserver-*.json  nbserver-*.json  .jupyter  jupyter_cookie_secret  notebook_cookie_secret"
_PRIVATE = tuple(f"{_KEYS} {_TOKENS} {_HISTORIES} {_JUPYTER}".split())
# Hardly any path matches, and this single expression rules out the others ten times as fast.
_NAMES = "|".join(re.escape(line.removeprefix("**/")).replace(r"\*", "[^/]*") for line in _PRIVATE if line[0] != "!")
_MAY_BE = re.compile(f"(?:^|/)(?:{_NAMES})(?:/|$)")
# Relative to one of these folders, a private file has a shorter name: `token` in `.cache/huggingface`.
_HOLDERS = tuple(
    f"/{above}" for line in _PRIVATE if line[:4] == "**/." for above in PurePosixPath(line[3:]).parents[:-1]
)
_BACKUP = re.compile(r"(?:~|\.(?:bak|backup|old|orig|save))+$")  # suffixes of copies that editors and people make
_NAMES_ONE = re.compile(r"[^*?./!][^/]*$")  # not `!*` or `!data/**`, which undo other lines and name no private file


@lru_cache(maxsize=100)
def _compile(lifted: tuple[str, ...]) -> GitIgnoreSpec:
    named = [line for line in (re.sub(r"/?\s*$", "", line.lower()) for line in lifted) if _NAMES_ONE.search(line)]
    return GitIgnoreSpec.from_lines((*_PRIVATE, *named))


@lru_cache(maxsize=100_000)
def is_private(path: str, lifted: tuple[str, ...] = ()) -> bool:
    """Return True when a path, with slashes, has a name that keys, tokens or histories have, in any letter case.

    ``lifted`` are the lines with ``!`` that name exceptions. Callers check each parent folder too.
    """
    path = path.lower()
    original = _BACKUP.sub("", path)
    name = path.rpartition("/")[2]
    if original != path and not any(line.lower().strip("!/ ").rpartition("/")[2] == name for line in lifted):
        return is_private(original, lifted)
    return _MAY_BE.search(path) is not None and _compile(lifted).match_file(path)


def why_kept(folder: str | os.PathLike[str]) -> str:
    """Return the reason why no file of ``folder`` leaves this machine; empty if its files may be sent."""
    real = Path(os.path.realpath(folder))
    if holds_homes(real):
        what = "is a home directory or contains one"
    elif is_private(real.as_posix()) or real.as_posix().lower().endswith(_HOLDERS):
        what = "is a folder for keys or tokens"
    else:
        return ""
    return (
        f"{folder} {what}: none of its files are sent to the nodes; "
        "to send a project's files, open the notebook in a folder of the project's own, or %cd there before the start"
    )


def holds_homes(path: str | os.PathLike[str]) -> bool:
    """Return True when ``path`` is a home directory, or contains one at any depth."""
    real = Path(os.path.realpath(path))
    return real == real.parent or any(is_same(real, above) for home in _homes(real) for above in (home, *home.parents))


def _homes(folder: Path) -> Iterator[Path]:
    """Yield the homes of this user, with and without HOME, and of the owner of ``folder``: root may work in others'."""
    found = {os.path.expanduser("~")}
    with contextlib.suppress(ImportError, OSError, KeyError):
        import pwd

        found.add(pwd.getpwuid(os.getuid()).pw_dir)
        found.add(pwd.getpwuid(folder.stat().st_uid).pw_dir)
    return (Path(os.path.realpath(home)) for home in found if os.path.isabs(home))


def is_same(one: Path, other: Path) -> bool:
    """Return True when two paths are one file or folder, also by letter case, links or a second mount."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
