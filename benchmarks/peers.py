"""How each toolkit is used from a notebook: the cells that start ranks, run code on them, move a value, attach again.

A peer is measured if it is installed (extra ``bench``). A peer that kills processes by name, or listens to other hosts,
is measured only if it can have its own process and network namespace.
"""

from __future__ import annotations

import importlib.util
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kernel import Kernel, KernelError

_NAMESPACES = ("unshare", "--user", "--map-root-user", "--pid", "--net", "--fork", "--mount-proc", "--kill-child")
_WITH_LOOPBACK = ("sh", "-c", 'ip link set lo up && exec "$@"', "sh")
_UNSHARE_LIMIT_S = 10.0
_ALL_REDUCE = "t = torch.ones(1)\ndist.all_reduce(t)\nprint(f'reduced {int(t)}')"


@dataclass(frozen=True)
class Toolkit:
    """Cells of a notebook, with ``{n}``, ``{ranks}`` and ``{code}`` as placeholders. An empty cell is not supported."""

    name: str
    load: str
    start: tuple[str, ...]  # the last one runs {code} on all ranks, with a process group, `rank`, `torch` and `dist`
    on_all: str
    on_first: str  # shows everything that {code} prints
    on_some: str  # on {ranks}: 0,1
    stop: str = ""
    pull: str = ""  # copies `x` of rank 0 to the notebook's `y`
    push: str = ""  # copies the notebook's `y` to `y` of rank 0
    push_all: str = ""
    value: str = "x = torch.ones({count})"  # float32
    name_hung: str = ""  # makes later cells show, after a second, the rank that the others wait for
    attach: str = ""  # in a new kernel: attaches to the ranks and shows the output of the first rank's last cell
    attempts: int = 1  # how often the first cell is sent
    rest_s: float = 0.0  # how long a user waits after a stop before the next cell
    is_isolated: bool = False

    def open_kernel(self, folder: Path) -> Kernel:
        """Open a kernel with the toolkit loaded and no ranks; with the same ``folder``, the notebook's next kernel."""
        folder.mkdir(exist_ok=True)
        wrapper, transport = ((*_NAMESPACES, *_WITH_LOOPBACK), "ipc") if self.is_isolated else ((), "tcp")
        kernel = Kernel(folder, wrapper=wrapper, transport=transport)
        try:
            kernel.run(self.load)
        except BaseException:
            kernel.close()
            raise
        return kernel

    def start_ranks(self, kernel: Kernel, ranks: int) -> float:
        """Return the seconds until all ``ranks`` have done an all_reduce. Raises: KernelError if they fail."""
        *before, first = (cell.replace("{n}", str(ranks)).replace("{code}", _ALL_REDUCE) for cell in self.start)
        seconds = sum(kernel.run(cell).seconds for cell in before)
        for _ in range(self.attempts):
            cell = kernel.run(first)
            seconds += cell.seconds
            if f"reduced {ranks}" in cell.shown():
                return seconds
        raise KernelError(f"no all_reduce of {ranks} ranks in {self.attempts} attempts: {cell.shown()[-500:].strip()}")

    def why_not_here(self) -> str:
        """Return what is missing on this machine; empty if the toolkit can be measured."""
        if importlib.util.find_spec(self.name) is None:
            return "not installed"
        if self.is_isolated and not _has_namespaces():
            return "needs unshare and ip"
        return ""


DETRAIN_NB = Toolkit(
    name="detrain_nb",
    load="%load_ext detrain_nb",
    start=("%%distributed -n {n}\n{code}",),
    on_all="%%distributed\n{code}",
    on_first="%%distributed -r 0 --max-lines 0\n{code}",
    on_some="%%distributed -r {ranks}\n{code}",
    stop="%distributed stop",
    pull="%pull x -r 0 --as y",
    push="%push y -r 0",
    push_all="%push y",
    name_hung="%distributed config hang=1",
    attach="%distributed attach",
)

IPYPARALLEL = Toolkit(
    name="ipyparallel",
    load="import os\nimport ipyparallel",
    start=(
        """
cluster = ipyparallel.Cluster(n={n})
connected = cluster.start_and_connect_sync()
view = connected[:]
view.block = True
view.activate()
view.scatter("rank", connected.ids, flatten=True)
view["store"] = "file://" + os.path.abspath(cluster.cluster_id)
""",
        """%%px
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=store, rank=rank, world_size={n})
""",
        "%%px\n{code}",
    ),
    on_all="%%px\n{code}",
    on_first="%%px --targets 0\n{code}",
    on_some="%%px --targets [{ranks}]\n{code}",
    stop="connected.close()\ncluster.stop_cluster_sync()",
    pull="y = connected[0].pull('x', block=True)",
    push="connected[0].push({'y': y}, block=True)",
    push_all="view.push({'y': y}, block=True)",
    value="import numpy\nx = numpy.ones({count}, dtype='float32')",  # not copied; a tensor takes twice as long
    rest_s=2.0,  # its prompt returns before its ranks have stopped: some lose a cell that is sent at once
    # It does not replay missed output; its hub keeps the output and returns it on request.
    attach="""
import time
from ipyparallel.cluster import ClusterManager
(cluster,) = ClusterManager().load_clusters().values()
connected = cluster.connect_client_sync()
view = connected[:]
view.block = True
view.activate()
last, shown, is_over = connected.hub_history()[-1], 0, False
while not is_over:
    (record,) = connected.db_query({"msg_id": last}, keys=["stdout", "completed"])
    is_over = record["completed"] is not None
    print(record["stdout"][shown:], end="", flush=True)
    shown = len(record["stdout"])
    time.sleep(0.1)
""",
)

# It serves pickles to every host, and its shutdown kills every process with "worker" in its command line. Its first
# cell after the start is lost. It has no pull and no push.
NBDISTRIBUTED = Toolkit(
    name="nbdistributed",
    load="%load_ext nbdistributed",
    start=("%dist_init -n {n}", "%dist_mode -d", "%%distributed\n{code}"),
    on_all="%%distributed\n{code}",
    on_first="%%rank [0]\n{code}",
    on_some="%%rank [{ranks}]\n{code}",
    attempts=3,
    rest_s=2.0,
    is_isolated=True,
)

PEERS = (IPYPARALLEL, NBDISTRIBUTED)


def _has_namespaces() -> bool:
    try:
        tried = subprocess.run(
            [*_NAMESPACES, *_WITH_LOOPBACK, "true"], capture_output=True, timeout=_UNSHARE_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0
