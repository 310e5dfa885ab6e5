"""How fast a session on hosts over SSH is, next to its lower bounds: one table, raw figures in results/.

    python benchmarks/ssh.py [--quick] [--results FOLDER]

The hosts are namespaces of this machine with real SSH servers (tests/testbed); needs root. Comparisons alternate: a
remote no-op cell, a local one and a ping; our start and torchrun's; a pull and `sftp get`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from benchmark import Benchmark, run_benchmark
from hosts import Download, Hosts, Link, hosts_up, time_channel, unavailable
from kernel import Kernel
from peers import DETRAIN_NB
from report import US, median
from ssh_faults import measure_faults
from ssh_measures import CHANNEL, DELAY_MS, LOCAL_AND_LINK, QUICK, SFTP, TORCHRUN_AND_SSH, Sizes, list_measures

from detrain_nb import Session
from detrain_nb.session.state.cell_observer import CellObserver
from detrain_nb.wire import Output

_WARM_UP = 5
_ALL_REDUCE = "t = torch.ones(1)\ndist.all_reduce(t)"
_NOOP = DETRAIN_NB.on_all.replace("{code}", "pass")
# One more channel of the session's own connection to each host: 64 bytes to each, and back from the slowest.
_OPEN_PING = """
import json, time
_session = get_ipython().find_line_magic("distributed").__self__.session
_channels = [transport._connection._transport.open_session() for transport in _session._core.transports]
for _channel in _channels:
    _channel.exec_command("cat")
def _ping():
    started = time.perf_counter()
    for channel in _channels:
        channel.sendall(bytes(64))
    for channel in _channels:
        missing = 64
        while missing:
            missing -= len(channel.recv(missing))
    return 1e3 * (time.perf_counter() - started)
"""
_PING = """
import json, time
_connection = get_ipython().find_line_magic("distributed").__self__.session._core.transports[0]._connection
_channel = _connection._transport.open_session()
_channel.exec_command("cat")
def _ping():
    started = time.perf_counter()
    _channel.sendall(bytes(64))
    missing = 64
    while missing:
        missing -= len(_channel.recv(missing))
    return 1e3 * (time.perf_counter() - started)
"""
_PING = "print(json.dumps([_ping() for _ in range({count})]))"
_LINE_BYTES = 60
_WRITE_LINES = 1092  # 64 KB
_PRINT_LINES = "line = 'x' * 59\nfor _ in range({lines}):\n    print(line)"
_WRITE_MANY = """
import sys
piece = ("x" * 59 + "\\n") * {write_lines}
for _ in range({lines} // {write_lines}):
    sys.stdout.write(piece)
sys.stdout.write(("x" * 59 + "\\n") * ({lines} % {write_lines}))
"""


class SshBenchmark(Benchmark[Sizes]):
    """Starts, cells, output, values, faults and an attach, on hosts of a testbed."""

    name = "ssh"
    peers = ()

    def run(self) -> None:
        """Measure everything."""
        sizes = self._sizes
        with hosts_up(sizes.hosts, letter="b") as hosts:
            self._measure_starts(hosts)
            for turn in range(1, sizes.rounds + 1):
                with self._kernels(hosts, f"round {turn}: cells") as (far, here):
                    self._measure_noop(far, here, "noop_ms")
            self._measure_pull(hosts)
            self._measure_output(hosts)
            for turn in range(1, sizes.fault_rounds + 1):
                folder = self._begin(f"round {turn}: faults")
                folder.mkdir()
                measure_faults(hosts, folder, lambda what, figure: self.samples.add(US, what, figure))
        with hosts_up(sizes.hosts, letter="d", link=Link(delay_s=DELAY_MS / 1e3)) as hosts:
            for turn in range(1, sizes.rounds_far + 1):
                with self._kernels(hosts, f"round {turn}: cells {DELAY_MS} ms away") as (far, here):
                    self._measure_noop(far, here, "noop_far_ms")
        if sizes.attach_hosts:
            with hosts_up(sizes.attach_hosts, letter="s") as hosts:
                self._measure_attach(hosts)

    # ---- start and attach

    def _measure_starts(self, hosts: Hosts) -> None:
        """Measure until every rank has done one all_reduce: ours, and torchrun's on each host plus a connect."""
        sizes = self._sizes
        folder = self._begin("start")
        folder.mkdir()
        _time_our_start(hosts, sizes.ranks, folder)  # the first one transfers our code, and both read files from disk
        hosts.time_torchrun(sizes.ranks)
        hosts.time_connect()
        for _ in range(sizes.starts):
            self.samples.add(US, "start_s", _time_our_start(hosts, sizes.ranks, folder))
            torchrun_s, connect_s = hosts.time_torchrun(sizes.ranks), hosts.time_connect()
            self.samples.add(TORCHRUN_AND_SSH, "torchrun_s", torchrun_s)
            self.samples.add(TORCHRUN_AND_SSH, "connect_s", connect_s)
            self.samples.add(TORCHRUN_AND_SSH, "start_s", torchrun_s + connect_s)

    def _measure_attach(self, hosts: Hosts) -> None:
        """Measure from ``Session.attach`` until every rank has run a cell, in the folder of the start."""
        folder, before = self._begin(f"attach to {hosts.count} hosts"), os.getcwd()
        folder.mkdir()
        os.chdir(folder)
        name = f"attach-{os.getpid()}"
        session = Session.start(1, nodes=hosts.nodes(), device="cpu", init=False, name=name, folder=str(folder))
        try:
            for repetition in range(self._sizes.attaches + 1):
                session.run_cell("pass")
                session.detach()
                started = time.perf_counter()
                session = Session.attach(name, nodes=hosts.nodes())
                attached_s = time.perf_counter() - started
                session.run_cell("pass")
                if repetition:
                    self.samples.add(US, "attach_returned_s", attached_s)
                    self.samples.add(US, "attach_s", time.perf_counter() - started)
        finally:
            session.stop()
            os.chdir(before)

    # ---- cells

    @contextmanager
    def _kernels(self, hosts: Hosts, part: str) -> Iterator[tuple[Kernel, Kernel]]:
        """Open two notebooks: one with ranks on the hosts, one with as many ranks here."""
        folder, sizes = self._begin(part), self._sizes
        folder.mkdir()
        with _home_for(hosts, folder / "home"), closing(_open_notebook(folder / "far")) as far:
            with closing(DETRAIN_NB.open_kernel(folder / "here")) as here:
                far.run(f"%distributed start --nodes {folder / 'home' / 'nodes.toml'} -n {sizes.ranks}")
                far.run(DETRAIN_NB.on_all.replace("{code}", _ALL_REDUCE))
                DETRAIN_NB.start_ranks(here, sizes.ranks * hosts.count)
                yield far, here
                here.run(DETRAIN_NB.stop)
            far.run(DETRAIN_NB.stop)

    def _measure_noop(self, far: Kernel, here: Kernel, what: str) -> None:
        """Measure a remote cell, a local cell, and the link alone; the floor is the sum of the last two."""
        far.run(_OPEN_PING)
        ping = _PING.replace("{count}", str(self._sizes.pings))
        for repetition in range(-_WARM_UP, self._sizes.cells):
            far_ms, here_ms = 1e3 * far.run(_NOOP).seconds, 1e3 * here.run(_NOOP).seconds
            link_ms = median(json.loads(far.run(ping).shown()))
            if repetition >= 0:
                self.samples.add(US, what, far_ms)
                self.samples.add(LOCAL_AND_LINK, f"{what}_local", here_ms)
                self.samples.add(LOCAL_AND_LINK, f"{what}_link", link_ms)
                self.samples.add(LOCAL_AND_LINK, what, here_ms + link_ms)

    # ---- values

    def _measure_pull(self, hosts: Hosts) -> None:
        """Measure a tensor, and a file of as many bytes over a similar connection; the first of each does not count."""
        folder, size_bytes = self._begin("pull"), self._sizes.value_bytes
        folder.mkdir()
        with (
            _home_for(hosts, folder / "home"),
            closing(_open_notebook(folder / "far")) as kernel,
            closing(Download(hosts, size_bytes, folder / "file")) as download,
        ):
            kernel.run(f"%distributed start --nodes {folder / 'home' / 'nodes.toml'} -n {self._sizes.ranks}")
            value = DETRAIN_NB.value.replace("{count}", str(size_bytes // 4))
            kernel.run(DETRAIN_NB.on_first.replace("{code}", value))
            for repetition in range(self._sizes.values + 1):
                pulled_s, got_s = kernel.run(DETRAIN_NB.pull).seconds, download.time()
                if repetition:
                    self.samples.add(US, "pull", size_bytes / pulled_s / 1e6)
                    self.samples.add(SFTP, "mb_per_s", size_bytes / got_s / 1e6)
            kernel.run(DETRAIN_NB.stop)

    # ---- output

    def _measure_output(self, hosts: Hosts) -> None:
        """Count the output of a printing rank that a front end would get, next to a channel that sends equal bytes."""
        folder = self._begin("output")
        folder.mkdir()
        lines = self._sizes.flood_bytes // _LINE_BYTES
        size_bytes = lines * _LINE_BYTES
        written = _WRITE_MANY.replace("{lines}", str(lines)).replace("{write_lines}", str(_WRITE_LINES))
        printed = _PRINT_LINES.replace("{lines}", str(lines))
        with Session.start(1, nodes=hosts.nodes(1), device="cpu", init=False, folder=str(folder)) as session:
            agent = hosts.agent()
            session.run_cell("print('ready')")
            for _ in range(self._sizes.floods):
                for what, code in (("flood", written), ("flood_lines", printed)):
                    observer = _Counter()
                    started = time.perf_counter()
                    result = session.run_cell(code, observer=observer)
                    seconds = time.perf_counter() - started
                    logged = sum(len(said.body) for said in session.log.read(result.cell) if isinstance(said, Output))
                    self.samples.add(US, what, size_bytes / seconds / 1e6)
                    lost = abs(size_bytes - observer.size_bytes) + abs(size_bytes - logged)
                    self.samples.add(US, "flood_lost", lost)
                self.samples.add(CHANNEL, "mb_per_s", size_bytes / time_channel(hosts, size_bytes) / 1e6)
            self.samples.add(US, "flood_memory_mb", _most_memory_bytes(agent) / 1e6)


def _open_notebook(folder: Path) -> Kernel:
    """Open a kernel in a notebook's folder; the kernel's own files in it are not sent to the hosts."""
    folder.mkdir()
    (folder / ".detrainignore").write_text("ipython/\nkernel.*\n", encoding="utf-8")
    return DETRAIN_NB.open_kernel(folder)


class _Counter(CellObserver):
    """Counter of the text that a front end would show; the text is ASCII."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def output(self, rank: int, stream: str, text: str) -> None:
        self.size_bytes += len(text)

    def display(self, rank: int, bundle: object, display_id: str, is_update: bool) -> None: ...
    def clear(self, rank: int, wait: bool) -> None: ...


def _time_our_start(hosts: Hosts, ranks: int, folder: Path) -> float:
    started = time.perf_counter()
    with Session.start(ranks, nodes=hosts.nodes(), device="cpu", folder=str(folder)) as session:
        session.run_cell(_ALL_REDUCE)
        return time.perf_counter() - started


@contextmanager
def _home_for(hosts: Hosts, folder: Path) -> Iterator[None]:
    """Give kernels that are started in the block a home whose ssh config has the hosts."""
    hosts.write_home(folder)
    before = os.environ.get("HOME")
    os.environ["HOME"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["HOME"]
        else:
            os.environ["HOME"] = before


def _most_memory_bytes(pid: int) -> int:
    """Return the peak memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status does not say the most memory")


if __name__ == "__main__":
    if reason := unavailable(has_link=True):
        sys.exit(reason)
    run_benchmark(SshBenchmark, description=__doc__, sizes=Sizes(), quick=QUICK, list_measures=list_measures)
