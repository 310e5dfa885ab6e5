"""What a rank waits for before its Python ends: that gloo's threads have let go of the last tensors.

A collective returns when its data is there. The thread of gloo that ran it lets go of the tensors a moment later, and
needs the GIL for that. Where Python has begun to end by then, up to 3.13 it ends the thread instead, and C++ aborts the
process: "terminate called without an active exception". ``destroy_process_group`` joins these threads only where
nothing else holds the group, and a model or a mesh does.

A job has a copy of this file as ``sitecustomize``, which Python runs before a program: it imports nothing of ours.
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
_LIMIT_S = 10.0  # more than a thread waits for a processor


def wait_for_gloo_at_exit() -> None:
    """Have this process wait at its end until gloo's threads rest; its exit code stays what it is."""
    atexit.unregister(_wait_for_gloo)
    atexit.register(_wait_for_gloo)


def _wait_for_gloo() -> None:
    """One that sleeps, and has not been awake between two looks, is at rest: it has nothing, or waits for a peer."""
    deadline, before = time.monotonic() + _LIMIT_S, None
    while (now := _look()) and time.monotonic() < deadline:
        if now == before and all(state.startswith("State:\tS") for state, *_ in now.values()):
            return
        before = now
        time.sleep(_LOOK_S)  # without the GIL


def _look() -> dict[str, tuple[str, ...]]:
    """The state of gloo's threads, and how often each was switched; empty where there is none."""
    found = {}
    with contextlib.suppress(OSError):  # no Linux
        for thread in _THREADS.iterdir():
            with contextlib.suppress(OSError):  # it has ended
                name, *lines = (thread / "status").read_text().splitlines()
                if name.endswith(_NAME):
                    found[thread.name] = tuple(line for line in lines if line.startswith(_TOLD))
    return found


def _run_hidden() -> None:
    """Run the ``sitecustomize`` that Python would have run if ours did not stand before it."""
    with contextlib.suppress(ValueError):
        sys.path.remove(os.path.dirname(__file__))
    spec = importlib.machinery.PathFinder.find_spec(SITE_MODULE)
    if spec and spec.loader:
        sys.modules[SITE_MODULE] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == SITE_MODULE:
    wait_for_gloo_at_exit()
    _run_hidden()
