"""What the tests of stops and deaths have alive on every rank: all that holds a communicator, and a counter."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence

from detrain_nb import Session
from detrain_nb.session.state.cell_observer import CellObserver

EQUIP = """
import os, time, signal, subprocess, sys
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
ddp = DDP(nn.Linear(4, 4))
sharded = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
fully_shard(sharded)
mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
subgroup = dist.new_group(list(range(world_size)))
x = torch.ones(2, 4)
for model in (ddp, sharded):
    model(x).sum().backward()
dist.all_reduce(torch.ones(1), group=subgroup)
dist.all_reduce(torch.ones(1), group=mesh.get_group())
"""
STALE = {"ddp", "mesh", "sharded", "subgroup"}
COLLECTIVE = "t = torch.ones(1)\ndist.all_reduce(t)\nt.item()"


def equip(session: Session) -> None:
    """Make a DDP model, a fully sharded one, a mesh and a subgroup, and use each; ``counter`` goes up by one."""
    session.run_cell(EQUIP)
    session.run_cell("counter = globals().get('counter', 100 * rank) + 1")


def assert_works(session: Session) -> None:
    """Collectives of all ranks work, on groups and models made anew too."""
    world_size = len(session.ranks)
    assert session.run_cell(COLLECTIVE).values == dict.fromkeys(range(world_size), float(world_size))
    equip(session)


def be_patient(session: Session) -> None:
    """Wait longer for ranks that are about to end a cell: what is told must not hang on how busy this machine is."""
    session.settings.limits.freed_s = session.settings.limits.group_end_s = 10.0


def press_stop() -> None:
    """As Jupyter does: to the process, and so to its main thread."""
    os.kill(os.getpid(), signal.SIGINT)


class Watcher(CellObserver):
    """Observes a cell; ``press_at`` presses stop ``after_s`` so many ranks have printed that."""

    def __init__(self, *, press_at: str = "", ranks: int = 1, after_s: Sequence[float] = (0.1,)) -> None:
        self.printed = ""
        self.waited: list[str] = []
        self.notices: list[str] = []
        self._press_at = press_at
        self._ranks = ranks
        self._presses = [threading.Timer(seconds, press_stop) for seconds in after_s]

    def output(self, rank: int, stream: str, text: str) -> None:
        self.printed += text
        if self._press_at and self.printed.count(self._press_at) >= self._ranks:
            self._press_at = ""
            for press in self._presses:
                press.start()

    def press_no_more(self) -> None:
        """None comes after this."""
        for press in self._presses:
            press.cancel()
            if press.is_alive():
                press.join()

    def waiting(self, text: str) -> None:
        self.waited.append(text)

    def notice(self, text: str) -> None:
        self.notices.append(text)
