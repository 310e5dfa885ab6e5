"""One host over SSH is slower than the others: the notebook shows which rank it waits for, and on which host."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from detrain_nb import Session

from ..node.cgroups import cgroup, is_version_1
from ..testbed.nodes import ssh_nodes
from ..testbed.testbed import Testbed
from .training import Watcher

_PERIOD_US, _QUOTA_US = 100_000, 5_000
_LIMIT_S = 60.0
_COMPUTE = """
total = 0
for i in range(20_000_000 if rank == 1 and not is_throttled else 1_200_000):
    total += i * i
"""


@contextlib.contextmanager
def _slow_cgroup() -> Iterator[Path | None]:
    """A cgroup that gives its processes a twentieth of a processor; None where no cgroup can be made."""
    with contextlib.ExitStack() as made:
        try:
            folder = made.enter_context(cgroup("cpu"))
        except OSError:
            yield None
            return
        if is_version_1("cpu"):
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(_QUOTA_US))
        else:
            (folder / "cpu.max").write_text(f"{_QUOTA_US} {_PERIOD_US}")
        yield folder


@pytest.fixture
def session(testbed: Testbed) -> Iterator[Session]:
    """Rank 0 on h0; rank 1 on h1 is slowed by a cgroup, or has more to compute where no cgroup can be made."""
    with _slow_cgroup() as cgroup, Session.start(1, sync=False, nodes=ssh_nodes(testbed), device="cpu") as started:
        started.settings.limits.look_gap_s = 0.2
        started.run_cell(f"is_throttled = {cgroup is not None}")
        if cgroup:
            started.run_cell(f"open('{cgroup}/cgroup.procs', 'w').write('0')", ranks="h1")
        yield started


@pytest.mark.slow
def test_slow_rank_is_named_with_its_host(session: Session) -> None:
    eyes = Watcher()
    session.run_cell(_COMPUTE, observer=eyes, timeout_s=_LIMIT_S)
    found = [text for text in eyes.waited if text]
    assert found, "it took no time"
    assert all(re.fullmatch(r"waiting for rank 1 on h1( \(line [1-4]\))?", text) for text in found), found
    assert any(text.endswith(("(line 3)", "(line 4)")) for text in found), found
    session.settings.hang_s = 1.0
    eyes = Watcher()
    session.run_cell(_COMPUTE + "t = torch.ones(1); dist.all_reduce(t)", observer=eyes, timeout_s=_LIMIT_S)
    words = r"rank 0 waits in all_reduce #\d+ \(line 5\); rank 1 on h1 is (computing )?at line [34]"
    assert [text for text in eyes.waited if re.fullmatch(words, text)], eyes.waited
