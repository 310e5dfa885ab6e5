"""Two real ranks: on the first, a gloo thread releases a tensor only after the script's last line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from detrain_nb import at_exit

LIMIT_S = 120
# The main thread of rank 0 holds the GIL from before the end of the collective until Python exits.
_SCRIPT = """
import mmap, os, sys, time
import torch, torch.distributed as dist

begun, done = 0, 1
shared = mmap.mmap(-1, 2)  # both ranks see it; to look there is no system call, which would give the GIL away
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", init_method=f"file://{os.environ['MEET']}", rank=rank, world_size=2)
total = torch.ones(1)
dist.all_reduce(total)
if rank == 1:
    while not shared[begun]:
        time.sleep(0.01)
    dist.all_reduce(total)
    shared[done] = 1
    os._exit(0)
from detrain_nb.at_exit import wait_for_gloo_at_exit
wait_for_gloo_at_exit()
sys.setswitchinterval(1000)
dist.all_reduce(total, async_op=True)
shared[begun] = 1
while not shared[done]:
    pass
until = time.monotonic() + 0.5
while time.monotonic() < until:
    pass
"""
_OURS = "from detrain_nb.at_exit import wait_for_gloo_at_exit\nwait_for_gloo_at_exit()\n"


def _run(script: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "MEET": str(folder / "meet"), **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.timeout(LIMIT_S)
def test_thread_of_gloo_does_not_abort_a_script_that_has_ended(tmp_path: Path) -> None:
    """The script keeps its exit code."""
    done = _run(_SCRIPT + "sys.exit(3)", tmp_path)
    assert done.returncode == 3, done.stderr


@pytest.mark.timeout(LIMIT_S)
def test_copy_of_it_does_the_same_for_a_script_that_knows_nothing_of_us(tmp_path: Path) -> None:
    """The ``sitecustomize`` that the copy precedes on the path is still run."""
    ours, hidden = tmp_path / "ours", tmp_path / "hidden"
    for folder in (ours, hidden):
        folder.mkdir()
    shutil.copy(at_exit.__file__, ours / f"{at_exit.SITE_MODULE}.py")
    (hidden / f"{at_exit.SITE_MODULE}.py").write_text("import sys\nprint('hidden', sys.modules[__name__].__file__)\n")
    done = _run(_SCRIPT.replace(_OURS, ""), tmp_path, PYTHONPATH=f"{ours}:{hidden}")
    assert (done.returncode, done.stdout) == (0, f"hidden {hidden / at_exit.SITE_MODULE}.py\n"), done.stderr
