"""How each toolkit is used from a notebook: the cells that start ranks, run code on them, move a value, come back.

A peer is measured when it is installed (extra ``bench``). One that ends processes by name, or listens to other hosts,
is measured only where it can have a process and a network namespace of its own.
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
    """Cells of a notebook; ``{n}``, ``{ranks}`` and ``{code}`` are filled in. An empty one: there is no such thing."""

    name: str
    load: str
    start: tuple[str, ...]  # the last one runs {code} on all ranks, with a process group, `rank`, `torch` and `dist`
    on_all: str
    on_first: str  # nothing that {code} prints is left out
    on_some: str  # on {ranks}: 0,1
    stop: str = ""
    pull: str = ""  # the `x` of rank 0 becomes the notebook's `y`
    push: str = ""  # the notebook's `y` becomes the `y` of rank 0
    push_all: str = ""
    value: str = "x = torch.ones({count})"  # float32
    name_hung: str = ""  # from now on a cell says which rank the others wait for, after a second
    attach: str = ""  # in a new kernel: takes the ranks over, and shows what the first rank's last cell has printed
    attempts: int = 1  # how often the first cell is sent
    rest_s: float = 0.0  # how long its user waits after a stop before the next cell
    is_isolated: bool = False

    def open_kernel(self, folder: Path) -> Kernel:
        """A kernel with the toolkit loaded and no ranks; in the same ``folder`` again, the same notebook's next one."""
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
        """Seconds until all ``ranks`` have done an all_reduce. Raises: KernelError when they do not get there."""
        *before, first = (cell.replace("{n}", str(ranks)).replace("{code}", _ALL_REDUCE) for cell in self.start)
        seconds = sum(kernel.run(cell).seconds for cell in before)
        for _ in range(self.attempts):
            cell = kernel.run(first)
            seconds += cell.seconds
            if f"reduced {ranks}" in cell.shown():
                return seconds
        raise KernelError(f"no all_reduce of {ranks} ranks in {self.attempts} attempts: {cell.shown()[-500:].strip()}")

    def why_not_here(self) -> str:
        """What is missing on this machine; empty when the toolkit can be measured."""
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
    value="import numpy\nx = numpy.ones({count}, dtype='float32')",  # without a copy; a tensor takes twice as long
    rest_s=2.0,  # its prompt is back before its ranks have stopped: a cell sent at once is lost on some of them
    # It does not show again what was missed; its hub keeps it, and gives what there is whenever it is asked.
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

# It serves pickles to every host, and its shutdown ends whatever has "worker" in its command line. Its first cell after
# the start is lost. It has no pull and no push.
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
