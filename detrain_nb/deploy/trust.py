"""Hosts that the user trusts to show HTML, by the key that the host proves to have: the one place where that is read.

Only the user's own file says so, never a nodes file, a notebook or a spec: those may have come with a repository.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from pathlib import Path

from ..errors import SpecError
from ..guarded import can_others_write, describe, find_guest_parent

__all__ = ["trust_file", "trusted_host_keys"]

_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
_MOST_BYTES = 1 << 20


def trust_file() -> Path:
    """Where the user says it: ``host_keys = ["SHA256:..."]``, fingerprints as ``ssh-keygen -l`` prints them."""
    return Path.home() / ".config" / "detrain_nb" / "trust.toml"


def trusted_host_keys() -> frozenset[str]:
    """The fingerprints of the host keys that the user trusts; none without the file.

    Raises: SpecError when it is not such a file, or others may write it.
    """
    path = trust_file()
    try:
        with open(path, "rb") as file:
            state = os.fstat(file.fileno())
            if can_others_write(state, file.fileno()):
                mode = stat.S_IMODE(state.st_mode)
                raise SpecError(f"{path} can be written by others (mode {mode:04o}, uid {state.st_uid}): chmod 600")
            if guest := find_guest_parent(Path(os.path.realpath(path))):
                raise SpecError(f"others can put another file in the place of {path}: they can write {describe(guest)}")
            said = tomllib.loads(file.read(_MOST_BYTES).decode())
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError) as exc:
        if isinstance(exc, SpecError):
            raise
        raise SpecError(f"{path} cannot be read: {exc}") from exc
    keys = said.pop("host_keys", [])
    if said or not isinstance(keys, list):
        raise SpecError(f'{path}: write host_keys = ["SHA256:..."], and nothing else')
    for key in keys:
        if not isinstance(key, str) or not _FINGERPRINT.fullmatch(key):
            raise SpecError(f"{path}: {key!r} is no fingerprint: give it as ssh-keygen -l prints it, SHA256:...")
    return frozenset(keys)
