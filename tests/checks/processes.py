"""Run a command until it exits or reaches its deadline; its process group is then stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

GRACE_S = 60.0  # for tests to stop their sessions and hosts after SIGINT


def run_until(
    command: Sequence[str],
    *,
    timeout_s: float,
    environment: Mapping[str, str],
    output: IO[str] | None = None,
    folder: Path | None = None,
    grace_s: float = GRACE_S,
) -> int | None:
    """Run a command with its output in ours or in a file; returns its exit status, or None after the deadline."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        start_new_session=True,  # the deadline then stops make and pytest together
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process, grace_s)


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Send SIGINT, as Ctrl-C does, then SIGKILL if the group is still running."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
