"""The hosts of a testbed as nodes of a session, and as a user's own."""

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

_NOBODYS = "02:00:00:00:00:00"  # hardware address
_CLONE = str(Path(__file__).parents[2])


def ssh_nodes(testbed: Testbed, count: int = 2, **fields: Any) -> list[SshNode]:
    """The first hosts; ``fields`` are those of `Node`. They run this Python, which they share with us."""
    config = Path(testbed.inventory.ssh_config)
    return [
        SshNode(Node(**{"host": host.name, "python": sys.executable, **fields}), config_path=config)
        for host in testbed.hosts[:count]
    ]


def processes_of_sessions(testbed: Testbed, host: str) -> dict[int, list[str]]:
    """The argv of what runs on a host for sessions, by pid. The clone itself may lie in a folder of our name."""
    running = testbed.processes(host)
    return {pid: argv for pid, argv in running.items() if "detrain_nb" in " ".join(argv).replace(_CLONE, "")}


def home_with_hosts(make_testbed: MakeTestbed, folder: Path, **options: Any) -> Path:
    """A home in ``folder`` whose ssh config knows two hosts, gpu1 and gpu2; their python3 is this one."""
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
    """Gives an address of this machine from which a host gets no answer, as from a laptop behind a router."""
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
