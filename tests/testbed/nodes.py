"""The hosts of a testbed as nodes of a session, and as hosts in a user's ssh config."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from detrain_nb.deploy.ssh_node import SshNode
from detrain_nb.spec.node import Node

from .fixtures import MakeTestbed
from .testbed import Testbed

_NOBODYS = "02:00:00:00:00:00"  # a hardware address that no device has
_CLONE = str(Path(__file__).parents[2])


def ssh_nodes(testbed: Testbed, count: int = 2, **fields: Any) -> list[SshNode]:
    """Return the first hosts as nodes; ``fields`` are those of `Node`. They run this Python, which the hosts share."""
    config = Path(testbed.inventory.ssh_config)
    return [
        SshNode(Node(**{"host": host.name, "python": sys.executable, **fields}), config_path=config)
        for host in testbed.hosts[:count]
    ]


def processes_of_sessions(testbed: Testbed, host: str) -> dict[int, list[str]]:
    """Return the argv of a host's processes for sessions, by pid. The path of the clone may contain our name."""
    running = testbed.processes(host)
    return {pid: argv for pid, argv in running.items() if "detrain_nb" in " ".join(argv).replace(_CLONE, "")}


def home_with_hosts(make_testbed: MakeTestbed, folder: Path, **options: Any) -> Path:
    """Create a home in ``folder`` whose ssh config has two hosts, gpu1 and gpu2; this Python is their python3."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    testbed = make_testbed(2, sshd_options=[f"SetEnv PATH={path}"], **options)
    config = Path(testbed.inventory.ssh_config).read_text()
    home = folder / "home"
    (home / ".ssh").mkdir(mode=0o700, parents=True)
    named = config.replace("Host h0\n", "Host gpu1\n").replace("Host h1\n", "Host gpu2\n")
    (home / ".ssh/config").write_text(named)
    return home


@contextlib.contextmanager
def away_from(testbed: Testbed, host: str) -> Iterator[str]:
    """Yield an address of this machine from which a host gets no answer, like a laptop behind a router."""
    inventory = testbed.inventory
    address, device = f"198.51.100.{inventory.notebook_ip.split('.')[2]}", f"{inventory.prefix}-nat"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=10)

    ip("link", "add", "name", device, "type", "veth", "peer", "name", f"{device}x")
    try:
        ip("addr", "add", f"{address}/32", "dev", device)
        ip("link", "set", device, "up")
        testbed.output(host, f"ip route add {address}/32 dev eth0")
        testbed.output(host, f"ip neigh replace {address} lladdr {_NOBODYS} dev eth0 nud permanent")
        yield address
    finally:
        ip("link", "del", device)
        testbed.output(host, f"ip route del {address}/32; ip neigh del {address} dev eth0")
