"""A command that ends: by itself, or at its deadline, with its process group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

GRACE_S = 60.0  # to end sessions and hosts of tests, after it was asked to stop


def run_until(
    command: Sequence[str],
    *,
    timeout_s: float,
    environment: Mapping[str, str],
    output: IO[str] | None = None,
    folder: Path | None = None,
    grace_s: float = GRACE_S,
) -> int | None:
    """Run a command, its output to ours or to a file; returns its status, or None where the deadline ended it."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        start_new_session=True,  # so that the deadline ends make and pytest together
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process, grace_s)


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Stop what runs as Ctrl-C would, then end what did not stop."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
