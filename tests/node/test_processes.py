"""Processes and how they watch their children."""

from __future__ import annotations

import subprocess
import sys

# Since Python 3.12, an imported asyncio resets the wakeup descriptor in a forked child, as this code does.
_CODE = """
import os, signal
from detrain_nb.node.system.processes import forget_children, watch_children

before = os.listdir("/proc/self/fd")
ended = watch_children()
assert len(os.listdir("/proc/self/fd")) == len(before) + 2
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
child = os.fork()
if child == 0:
    forget_children(ended)
    os._exit(0 if os.listdir("/proc/self/fd") == before else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_forked_process_forgets_the_children_though_another_has_reset_the_wakeup_descriptor() -> None:
    ran = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=30)
    assert (ran.stdout, ran.stderr) == ("0\n", "")
