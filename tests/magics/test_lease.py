"""From an Akash SDL to a cell in a real kernel: pods run the SDL's commands, behind the ports that leases forward."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from detrain_nb.formats import export_spec
from detrain_nb.spec import PipelineSpec

from ..formats.on_nodes import container_of
from ..testbed.fixtures import MakeTestbed
from ..testbed.pods import HOME, Pod, forwarded
from ..testbed.testbed import Testbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_ODD = "a \"b\" 'c' \\ \\\\ $HOME #d "


def _services(public_key: str) -> dict[str, Any]:
    """The services in the SDL of two nodes that wait for a session."""
    nodes = [{"host": f"node-{index}"} for index in range(2)]
    fields = {"name": "train", "image": "ghcr.io/you/train:1", "source": {"script_text": "print()"}, "nodes": nodes}
    spec = PipelineSpec.from_dict({**fields, "env": {"ODD": _ODD}})
    text = export_spec(spec, "akash", options={"start": "session", "ssh_key": public_key.strip()})
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    return services


@contextlib.contextmanager
def _lease(testbed: Testbed, folder: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Start two pods; yields their lease-status and a home with their keys. The status lists the second pod first."""
    pods = [Pod(testbed, host.name, folder) for host in testbed.hosts]
    services = _services(pods[0].public_key)
    with contextlib.ExitStack() as stack:
        for pod, service in zip(pods, services.values(), strict=True):
            container = container_of(service)
            pod.start(*container.argv, **container.env, HF_TOKEN="very-secret")
            stack.callback(pod.stop)
        for pod in pods:
            pod.wait_for("Server listening on 0.0.0.0 port 2222")
        ways = {
            name: [
                {
                    "host": "127.0.0.1",
                    "port": each["port"],
                    "externalPort": stack.enter_context(forwarded(pod, each["port"])),
                    "proto": each["proto"].upper(),
                    "name": name,
                }
                for each in service["expose"]
                if {"global": True} in each["to"]
            ]
            for pod, (name, service) in zip(pods, services.items())
        }
        (ssh := folder / "home/.ssh").mkdir(mode=0o700, parents=True)
        known = [pod.known_host(way["host"], way["externalPort"]) for pod, (way,) in zip(pods, ways.values())]
        (ssh / "known_hosts").write_text("".join(known))
        (ssh / "config").write_text(f"Host *\n  IdentityFile {pods[0].host.identity_file}\n  IdentitiesOnly yes\n")
        yield _status_of(dict(reversed(ways.items()))), str(ssh.parent)


def _status_of(ways: dict[str, Any]) -> dict[str, Any]:
    """The lease-status of a lease with these services."""
    return {"services": {name: {"available": 1, "total": 1} for name in ways}, "forwarded_ports": ways, "ips": None}


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

        testbed.cut("h0", "h1")  # like two leases on two providers
        for file, node in (("first.json", "node-0"), ("others.json", "node-1")):
            part = json.dumps(_status_of({node: lease["forwarded_ports"][node]}))
            assert kernel.run(f"open({file!r}, 'w').write({part!r})").status == "ok"
        refused = kernel.run("%distributed start --nodes first.json,others.json")
        assert refused.status == "error"
        assert "node-0 does not reach node-1 at" in refused.error
        assert "nodes of one lease or network, or start a session without a group (--no-init)" in refused.error
        started = kernel.run("%distributed start --nodes first.json,others.json --no-init")
        assert started.status == "ok", started.error
        told = kernel.run("%%distributed\nprint(rank, world_size)").text()
        assert sorted(told.splitlines()) == ["[node-0:0] 0 2", "[node-1:1] 1 2"]
        alone = kernel.run("%%distributed\ndist.init_process_group()")
        assert "there is no process group: the nodes of this session do not reach each other" in alone.error
        assert kernel.run("%distributed stop").status == "ok"
