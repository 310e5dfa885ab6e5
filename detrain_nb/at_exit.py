"""Wait at the exit of a rank until gloo's threads have released the last tensors.

A collective returns when its data has arrived. The gloo thread that ran it releases the tensors a moment later, and
needs the GIL for that. If Python is already shutting down by then, Python up to 3.13 ends the thread instead, and C++
aborts the process: "terminate called without an active exception". ``destroy_process_group`` joins these threads only
when nothing else holds the group, and a model or a mesh does.

A job gets a copy of this file as ``sitecustomize``, which Python runs before a program: it imports nothing of ours.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.machinery
import importlib.util
import os
import sys
import time
from pathlib import Path

__all__ = ["SITE_MODULE", "wait_for_gloo_at_exit"]

SITE_MODULE = "sitecustomize"
_THREADS = Path("/proc/self/task")
_NAME = "pt_gloo_runloop"
_TOLD = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")
_LOOK_S = 0.02  # a thread that waits for the GIL tries again each 5 ms, which counts as a switch
_LIMIT_S = 10.0  # longer than a thread waits for a processor


def wait_for_gloo_at_exit() -> None:
    """Make this process wait at its exit until gloo's threads are idle; the exit code does not change."""
    atexit.unregister(_wait_for_gloo)
    atexit.register(_wait_for_gloo)


def _wait_for_gloo() -> None:
    """Wait until every gloo thread sleeps and has not run between two looks: it is done, or waits for a peer."""
    deadline, before = time.monotonic() + _LIMIT_S, None
    while (now := _look()) and time.monotonic() < deadline:
        if now == before and all(state.startswith("State:\tS") for state, *_ in now.values()):
            return
        before = now
        time.sleep(_LOOK_S)  # without the GIL


def _look() -> dict[str, tuple[str, ...]]:
    """Return the state of gloo's threads and their context switch counts; empty when there are none."""
    found = {}
    with contextlib.suppress(OSError):  # not Linux
        for thread in _THREADS.iterdir():
            with contextlib.suppress(OSError):  # the thread has exited
                name, *lines = (thread / "status").read_text().splitlines()
                if name.endswith(_NAME):
                    found[thread.name] = tuple(line for line in lines if line.startswith(_TOLD))
    return found


def _run_hidden() -> None:
    """Run the ``sitecustomize`` that Python would have run if ours did not come first on the path."""
    with contextlib.suppress(ValueError):
        sys.path.remove(os.path.dirname(__file__))
    spec = importlib.machinery.PathFinder.find_spec(SITE_MODULE)
    if spec and spec.loader:
        sys.modules[SITE_MODULE] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == SITE_MODULE:
    wait_for_gloo_at_exit()
    _run_hidden()
