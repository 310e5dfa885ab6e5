"""Whether what is started here goes on when its user logs out: systemd may end all that belongs to the login."""

from __future__ import annotations

import os
import pwd
import shutil

_LINGER = "/var/lib/systemd/linger"


def outlives_logout(job: str, *, linger: str = _LINGER) -> list[str]:
    """What to put before a command: a scope of the user's own manager, which stays only where the user may linger.

    Elsewhere nothing: a process in a session of its own goes on where the system lets it.
    """
    bus = os.path.join(os.environ.get("XDG_RUNTIME_DIR", ""), "bus")
    program = shutil.which("systemd-run")
    if program and os.path.exists(bus) and os.path.exists(os.path.join(linger, _user())):
        return [program, "--user", "--scope", "--quiet", "--collect", f"--description=detrain_nb job {job}", "--"]
    return []


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # the number has no name: nothing could be said of it
        return f"uid {os.getuid()}"
