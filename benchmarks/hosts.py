"""Hosts with a real SSH server on this machine, and measurements there without us: torchrun, a ping, `sftp get`."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import paramiko
from floors import RANK

from detrain_nb.agents import AGENT_MODULE
from detrain_nb.deploy.ssh_node import SshNode, connect_to
from detrain_nb.spec.node import Node
from detrain_nb.transport.ssh import SshConnection

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.testbed.nodes import ssh_nodes
from tests.testbed.testbed import Link, Testbed, unavailable

__all__ = ["Hosts", "Link", "hosts_up", "unavailable"]

_TTL_S = 3600.0
_TORCHRUN_LIMIT_S = 180.0
_TORCHRUN_PORT = 29500  # free, since the hosts run nothing else
_ENDED, _PROGRAM = "ended", "rank.py"
_READ_BYTES = 1 << 20
_READS_AHEAD = 64  # the default is all at once, which is four times slower: paramiko searches all of them for each


class Hosts:
    """The hosts of a running testbed."""

    def __init__(self, testbed: Testbed) -> None:
        self._testbed = testbed
        self._config = Path(testbed.inventory.ssh_config)

    @property
    def count(self) -> int:
        return len(self._testbed.hosts)

    def nodes(self, count: int | None = None, *, ranks: int | None = None) -> list[SshNode]:
        """Return the first hosts as nodes of a session or a job; they run this Python."""
        fields = {} if ranks is None else {"ranks": ranks}
        return ssh_nodes(self._testbed, count or self.count, **fields)

    def write_home(self, folder: Path) -> None:
        """Make ``folder`` the home of a user with these hosts in the ssh config; nodes.toml in it lists them."""
        (folder / ".ssh").mkdir(mode=0o700, parents=True)
        shutil.copy(self._config, folder / ".ssh" / "config")
        nodes = [f'[[nodes]]\nhost = "{host.name}"\npython = "{sys.executable}"\n' for host in self._testbed.hosts]
        (folder / "nodes.toml").write_text("\n".join(nodes), encoding="utf-8")

    def connect(self) -> SshConnection:
        """Return a connection to the first host, of the kind that a session uses."""
        host = self._testbed.hosts[0]
        return connect_to(Node(host=host.name), config_path=self._config)

    def time_connect(self) -> float:
        """Return the seconds until plain paramiko has connected to the first host and authenticated."""
        host = self._testbed.hosts[0]
        with paramiko.SSHClient() as client:
            client.load_host_keys(host.known_hosts_file)
            started = time.perf_counter()
            client.connect(
                host.ip, host.port, host.user, key_filename=host.identity_file, allow_agent=False, look_for_keys=False
            )
            return time.perf_counter() - started

    def time_torchrun(self, ranks: int) -> float:
        """Return the seconds from ``torchrun`` on all hosts at once until the last rank has done one all_reduce."""
        hosts = self._testbed.hosts
        homes = [self._testbed.path_home(host.name) for host in hosts]
        for home in homes:
            shutil.rmtree(home / _ENDED, ignore_errors=True)
            (home / _ENDED).mkdir()
            (home / _PROGRAM).write_text(RANK, encoding="utf-8")
        with ThreadPoolExecutor(len(hosts)) as pool:
            started_at = time.time()
            outputs = list(pool.map(lambda node_rank: self._run_torchrun(node_rank, ranks), range(len(hosts))))
        times = [float(path.read_text()) for home in homes for path in (home / _ENDED).iterdir()]
        if len(times) != ranks * len(hosts):
            raise RuntimeError(f"torchrun of {len(hosts)} x {ranks} ranks failed: {''.join(outputs)[-2000:]}")
        return max(times) - started_at

    def _torchrun(self, node_rank: int, ranks: int, *program: str) -> list[str]:
        where = [f"--nnodes={self.count}", f"--node-rank={node_rank}", f"--nproc-per-node={ranks}"]
        where += [f"--master-addr={self._testbed.hosts[0].ip}", f"--master-port={_TORCHRUN_PORT}"]
        settings = ["OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=eth0", "CUDA_VISIBLE_DEVICES="]
        return ["env", *settings, sys.executable, "-m", "torch.distributed.run", *where, *program]

    def _run_torchrun(self, node_rank: int, ranks: int) -> str:
        command = self._torchrun(node_rank, ranks, _PROGRAM, _ENDED)
        name = self._testbed.hosts[node_rank].name
        done = self._testbed.exec(name, *command, timeout_s=_TORCHRUN_LIMIT_S, capture_output=True, text=True)
        return f"{done.stdout}{done.stderr}"

    def copy(self, name: str, text: str) -> None:
        """Write a file into the home of each host."""
        for host in self._testbed.hosts:
            (self._testbed.path_home(host.name) / name).write_text(text, encoding="utf-8")

    def ssh_torchrun(self, program: str, ranks: int) -> list[list[str]]:
        """Return the ``ssh`` command for each host, as a user types it: torchrun runs a program in the home."""
        return [
            ["ssh", "-F", str(self._config), host.name, shlex.join(self._torchrun(node_rank, ranks, program))]
            for node_rank, host in enumerate(self._testbed.hosts)
        ]

    def agent(self, host: int = 0) -> int:
        """Return the outer pid of the agent on a host."""
        return self._find_process(host, lambda process: AGENT_MODULE.encode() in (process / "cmdline").read_bytes())

    def pid_of(self, host: int, pid: int) -> int:
        """Return the outer pid of the process that has ``pid`` on a host."""
        own = re.compile(rf"^NSpid:.*\t{pid}$", re.MULTILINE)
        return self._find_process(host, lambda process: bool(own.search((process / "status").read_text())))

    def kill_sessions(self, host: int) -> None:
        """Kill the SSH sessions of a host, like a server that goes down."""
        self._testbed.kill_sessions(self._testbed.hosts[host].name)

    def _find_process(self, host: int, is_it: Callable[[Path], bool]) -> int:
        inside = os.readlink(f"/proc/{self._testbed.pid(self._testbed.hosts[host].name)}/ns/pid")
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has exited meanwhile
                if os.readlink(process / "ns/pid") == inside and is_it(process):
                    return int(process.name)
        raise RuntimeError(f"no such process runs on {self._testbed.hosts[host].name}")


class Download:
    """A file on the first host, and a connection that downloads it with paramiko's SFTP; close it."""

    def __init__(self, hosts: Hosts, size_bytes: int, target: Path) -> None:
        self._target = target
        self._connection = hosts.connect()
        self._sftp = self._connection._transport.open_sftp_client()
        assert self._sftp is not None
        with self._sftp.open("download", "wb") as file:
            file.set_pipelined(True)
            for _ in range(size_bytes >> 20):
                file.write(os.urandom(1 << 20))

    def time(self) -> float:
        started = time.perf_counter()
        assert self._sftp is not None
        self._sftp.get("download", str(self._target), max_concurrent_prefetch_requests=_READS_AHEAD)
        return time.perf_counter() - started

    def close(self) -> None:
        self._connection.close()


def time_channel(hosts: Hosts, size_bytes: int) -> float:
    """Return the seconds until one SSH channel has delivered so many bytes, which are discarded."""
    with hosts.connect() as connection:
        channel = connection._transport.open_session()
        started = time.perf_counter()
        channel.exec_command(f"head -c {size_bytes} /dev/zero")
        missing = size_bytes
        while missing:
            data = channel.recv(_READ_BYTES)
            if not data:
                raise RuntimeError(f"the channel ended {missing} bytes too early")
            missing -= len(data)
        return time.perf_counter() - started


@contextmanager
def hosts_up(count: int, *, letter: str, link: Link | None = None) -> Iterator[Hosts]:
    """Run ``count`` hosts for the block; they and all their processes are stopped afterwards."""
    testbed = Testbed(f"{letter}{os.getpid()}")
    try:
        testbed.up(count, link=link, ttl_s=_TTL_S, owner_pid=os.getpid())
        yield Hosts(testbed)
    finally:
        testbed.down()
