"""From a lease of Akash to a session, in a real kernel: pods behind forwarded ports that run the image's entrypoint."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..testbed.fixtures import MakeTestbed
from ..testbed.pods import HOME, Pod, forwarded
from ..testbed.testbed import Testbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_ODD = "a \"b\" 'c' \\ \\\\ $HOME #d "


@contextlib.contextmanager
def _lease(testbed: Testbed, folder: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Two pods: what lease-status says of them, and a home whose user has their keys. The second comes first there."""
    pods = [Pod(testbed, host.name, folder) for host in testbed.hosts]
    for pod in pods:
        pod.start(SSH_PUBKEY=pod.public_key, ODD=_ODD, HF_TOKEN="very-secret")
    for pod in pods:
        pod.wait_for("Server listening on 0.0.0.0 port 2222")
    with contextlib.ExitStack() as stack:
        for pod in pods:
            stack.callback(pod.stop)
        ports = [stack.enter_context(forwarded(pod)) for pod in pods]
        (ssh := folder / "home/.ssh").mkdir(mode=0o700, parents=True)
        known = "".join(pod.known_host("127.0.0.1", port) for pod, port in zip(pods, ports))
        (ssh / "known_hosts").write_text(known)
        (ssh / "config").write_text(f"Host *\n  IdentityFile {pods[0].host.identity_file}\n  IdentitiesOnly yes\n")
        way = {"host": "127.0.0.1", "port": 2222, "proto": "TCP"}
        lease = {
            "services": {f"node-{index}": {"available": 1, "total": 1} for index in (1, 0)},
            "forwarded_ports": {
                f"node-{index}": [{**way, "externalPort": ports[index], "name": f"node-{index}"}] for index in (1, 0)
            },
            "ips": None,
        }
        yield lease, str(ssh.parent)


def test_lease_becomes_a_session(start_kernel: Any, make_testbed: MakeTestbed, tmp_path: Path) -> None:
    testbed = make_testbed(2)
    with _lease(testbed, tmp_path) as (lease, home):
        kernel = start_kernel(HOME=home, DETRAIN_NB_NOTEBOOK="/x/lease.ipynb")
        assert kernel.run(f"open('lease.json', 'w').write({json.dumps(lease)!r})").status == "ok"
        started = kernel.run("%distributed start --nodes lease.json")
        assert started.status == "ok", started.error
        add_up = (
            "import os; t = torch.ones(1) * (rank + 1); dist.all_reduce(t); rank and print(int(t), os.getcwd()[:12], "
        )
        outcome = kernel.run(f"%%distributed\n{add_up}os.environ['ODD'] == {_ODD!r}, 'HF_TOKEN' in os.environ)")
        assert outcome.text() == f"[node-1:1] 3 {HOME} True False\n", outcome.error
        assert kernel.run("%distributed stop").status == "ok"

        testbed.cut("h0", "h1")  # as two leases are, on two providers
        refused = kernel.run("%distributed start --nodes lease.json")
        assert refused.status == "error"
        assert "node-0 does not reach node-1 at" in refused.error
        assert "nodes of one lease or network, or start a session without a group (--no-init)" in refused.error
        started = kernel.run("%distributed start --nodes lease.json --no-init")
        assert started.status == "ok", started.error
        told = kernel.run("%%distributed\nprint(rank, world_size)").text()
        assert sorted(told.splitlines()) == ["[node-0:0] 0 2", "[node-1:1] 1 2"]
        alone = kernel.run("%%distributed\ndist.init_process_group()")
        assert "there is no process group: the nodes of this session do not reach each other" in alone.error
        assert kernel.run("%distributed stop").status == "ok"
