"""A check whether detached processes survive the user's logout; in the text of probe.py, so nothing newer than 3.7.

systemd's logind may end all processes of a login (KillUserProcesses). A scope of the user's own manager survives if
that manager stays (linger).
"""

from __future__ import annotations

import glob
import os
import pwd
import re

_FOLDERS = ("etc/systemd", "run/systemd", "usr/local/lib/systemd", "usr/lib/systemd", "lib/systemd")
_LOGIND_BYTES = 1 << 16


def look_at_logout(root: str = "/", user: str = "") -> dict[str, object]:
    """Return what logind does at the end of a login of ``user`` (default: the caller), by its files under ``root``."""
    user = user or pwd.getpwuid(os.getuid()).pw_name
    if not os.path.isdir(os.path.join(root, "run/systemd/seats")):  # logind creates it
        return {"kills": False, "lingers": False, "user": user}
    said = _read_logind(root)
    only, spared = said.get("KillOnlyUsers", ""), said.get("KillExcludeUsers", "root")
    kills = said.get("KillUserProcesses", "no").lower() in ("yes", "true", "on", "1")
    is_meant = user not in spared.split() and (not only or user in only.split())
    lingers = os.path.exists(os.path.join(root, "var/lib/systemd/linger", user))
    return {"kills": kills and is_meant, "lingers": lingers, "user": user}


def _read_logind(root: str) -> dict[str, str]:
    """Return the effective value of each setting. A distribution's built-in values are comments in its file."""
    folders = [os.path.join(root, folder) for folder in _FOLDERS]
    first = next((path for path in (f"{folder}/logind.conf" for folder in folders) if os.path.exists(path)), "")
    drop_ins: dict[str, str] = {}
    for folder in reversed(folders):  # one in /etc replaces one of the same name elsewhere
        drop_ins.update({os.path.basename(path): path for path in glob.glob(f"{folder}/logind.conf.d/*.conf")})
    built_in: dict[str, str] = {}
    said: dict[str, str] = {}
    for path in [first, *(drop_ins[name] for name in sorted(drop_ins))]:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read(_LOGIND_BYTES)
        except OSError:
            continue
        for hidden, name, value in re.findall(
            r"^[ \t]*(#?)[ \t]*(Kill\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", text, re.MULTILINE
        ):
            if hidden and path == first:
                built_in[name] = value
            elif not hidden:
                said[name] = value
    return dict(built_in, **said)
