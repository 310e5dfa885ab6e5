"""Survival of jobs after a logout: systemd may kill all processes of a login."""

from __future__ import annotations

import os
import pwd
import shutil

_LINGER = "/var/lib/systemd/linger"


def outlives_logout(job: str, *, linger: str = _LINGER) -> list[str]:
    """Return a command prefix for a scope of the user's own systemd, which survives only if the user may linger.

    Otherwise empty: then a process in its own session survives if the system allows it.
    """
    bus = os.path.join(os.environ.get("XDG_RUNTIME_DIR", ""), "bus")
    program = shutil.which("systemd-run")
    if program and os.path.exists(bus) and os.path.exists(os.path.join(linger, _user())):
        return [program, "--user", "--scope", "--quiet", "--collect", f"--description=detrain_nb job {job}", "--"]
    return []


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # the uid has no name, so no linger file either
        return f"uid {os.getuid()}"
