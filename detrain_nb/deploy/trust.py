"""Hosts whose HTML the user trusts, identified by their proven host keys; the only module that reads that trust.

Only the user's own file grants it, never a nodes file, a notebook or a spec, which may have come with a repository.
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
    """Return the path of the user's file: ``host_keys = ["SHA256:..."]``, fingerprints as ``ssh-keygen -l`` prints."""
    return Path.home() / ".config" / "detrain_nb" / "trust.toml"


def trusted_host_keys() -> frozenset[str]:
    """Return the fingerprints of the host keys that the user trusts; none without the file.

    Raises: SpecError when the file is invalid, or writable by others.
    """
    path = trust_file()
    try:
        with open(path, "rb") as file:
            state = os.fstat(file.fileno())
            if can_others_write(state, file.fileno()):
                mode = stat.S_IMODE(state.st_mode)
                raise SpecError(
                    f"{path} is writable by others (mode {mode:04o}, uid {state.st_uid}): run chmod 600 {path}"
                )
            if guest := find_guest_parent(Path(os.path.realpath(path))):
                raise SpecError(f"others can replace {path}, as they can write to {describe(guest)}")
            said = tomllib.loads(file.read(_MOST_BYTES).decode())
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError) as exc:
        if isinstance(exc, SpecError):
            raise
        raise SpecError(f"{path} cannot be read: {exc}") from exc
    keys = said.pop("host_keys", [])
    if said or not isinstance(keys, list):
        raise SpecError(f'{path} is invalid: it must contain host_keys = ["SHA256:..."] and nothing else')
    for key in keys:
        if not isinstance(key, str) or not _FINGERPRINT.fullmatch(key):
            raise SpecError(f"{path}: {key!r} is not a fingerprint: write SHA256:... as ssh-keygen -l prints it")
    return frozenset(keys)
