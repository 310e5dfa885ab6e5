"""Lists of hosts, ssh_config, Ravnest's pool and Accelerate's configuration: which nodes and fields they become."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detrain_nb.errors import SpecError
from detrain_nb.formats import Imported, import_text
from detrain_nb.formats.hosts_import import expand_hosts
from detrain_nb.spec import PipelineSpec

from .round_trips import come_back


def _nodes(imported: Imported) -> list[dict[str, Any]]:
    return [node.to_fields() for node in imported.nodes]


def test_hostfiles_of_slurm_and_mpi_are_nodes() -> None:
    imported = import_text(
        "# ours\ngpu[01-02,7] slots=8 max_slots=9\r\n\nlogin1:2 # two\nlogin1:2\nme@cpu\n", name="hosts"
    )
    assert _nodes(imported) == [
        *({"host": f"gpu{number}", "ranks": 8} for number in ("01", "02", "7")),
        {"host": "login1", "ranks": 4},
        {"host": "cpu", "user": "me"},
    ]
    assert imported.left_out == ("max_slots (line 2): a spec has no field for it",)
    with pytest.raises(SpecError, match=r"^job\.sbatch: is a script that starts neither torchrun nor "):
        import_text("#!/bin/bash\n#SBATCH --nodes=1\nhostname\n", name="job.sbatch")
    assert expand_hosts("r[1-2]n[09-10],x") == ["r1n09", "r1n10", "r2n09", "r2n10", "x"]


@pytest.mark.needs_debian("slurm-client")
def test_list_of_hosts_is_written_out_as_slurm_does_it(tmp_path: Path) -> None:
    (config := tmp_path / "slurm.conf").write_text("ClusterName=a\nSlurmctldHost=localhost\n")
    for text in ("gpu[01-04,07]", "r[1-2]n[09-10],x", "a[8-11],b", "a[098-101]", "a-[1-2]-b[3-4]"):
        command = ["scontrol", "show", "hostnames", text]
        env = {"PATH": os.environ["PATH"], "SLURM_CONF": str(config)}
        shown = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60).stdout
        assert expand_hosts(text) == shown.split()


@pytest.mark.parametrize(
    "text, fault",
    [
        ("a\ngpu[1-1000000000]", r"hosts: line 2: \[1-1000000000\]: has more than 10,000 hosts: give fewer"),
        ("a[1-100][1-100][1-100]", "more than 10,000 hosts"),
        ("a[3-1]", r"\[3-1\]: give numbers and ranges"),
        ("a:2222", "line 1: 2222 slots: give a number, 1 to 1,024; if it is a port, give it in a nodes file"),
        ("a b", "line 1: 'a b': give a host, as in gpu1"),
        ("all", "hosts: all: name 'all'"),
    ],
)
def test_fault_in_a_hostfile_has_its_line(text: str, fault: str) -> None:
    with pytest.raises(SpecError, match=fault):
        import_text(text, name="hosts", kind="hostfile")


def test_hostfile_with_a_bad_line_is_one() -> None:
    fault = "^hosts: line 2: 'b slots=8max_slots=8': give a host"
    with pytest.raises(SpecError, match=fault):
        import_text("a slots=8\nb slots=8max_slots=8\n", name="hosts")


CONFIG = """Host gpu1 gpu2
  HostName %h.example.org # where
  User alice
Host *.x !gpu3
  Port 23
Match exec "touch x"
  User mallory
Host gpu3 jump.x
  Port=2222
  ProxyCommand nc %h
  IdentityFile "~/.ssh/a b"
Host *
  User bob
  ProxyJump me@j:2
Include more/*
"""


def test_hosts_of_an_ssh_config_are_nodes_as_ssh_reaches_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    imported = import_text(CONFIG, name="/a/config")
    both = {"user": "bob", "proxy_jump": "me@j:2", "identity_file": "~/.ssh/a b"}
    assert _nodes(imported) == [
        {"name": "gpu1", "host": "gpu1.example.org", "user": "alice", "proxy_jump": "me@j:2"},
        {"name": "gpu2", "host": "gpu2.example.org", "user": "alice", "proxy_jump": "me@j:2"},
        {"host": "gpu3", "port": 2222, **both},
        {"host": "jump.x", "port": 23, **both},
    ]
    assert [line.partition(":")[0] for line in imported.left_out] == [
        'Match exec "touch x"',
        "Include more/*",
        "proxycommand",
    ]
    own = import_text(CONFIG, name=str(tmp_path / ".ssh" / "config"))
    assert _nodes(own) == [{"host": host} for host in ("gpu1", "gpu2", "gpu3", "jump.x")]


def test_keys_that_a_node_has_no_place_for_are_named_and_a_jump_by_command_is_one() -> None:
    text = (
        "Host a\n  IdentityFile k1\n  IdentityFile k2\n  ProxyCommand ssh -q -W %h:%p me@j\n  ProxyJump other\n"
        'Host "two words" b\n  ProxyCommand ssh -i k -W %h:%p j\nHost *\n  IdentityFile k3\n'
    )
    imported = import_text(text, name="config")
    assert _nodes(imported) == [
        {"host": "a", "identity_file": "k1", "proxy_jump": "me@j"},
        {"host": "b", "identity_file": "k3"},
    ]
    assert [line.partition(":")[0] for line in imported.left_out] == [
        *("identityfile k2", "identityfile k3", "proxycommand", "Host two words")
    ]


def test_blocks_of_an_ssh_config_that_hold_for_no_host_are_named() -> None:
    text = (
        "Host a,b\n  User x\nHost pi-* a*\n  User pi\nMatch originalhost a\n  User no\nMatch all\n  Port 7\nHost a1\n"
    )
    imported = import_text(text, name="config")
    assert _nodes(imported) == [{"host": "a1", "user": "pi", "port": 7}]
    assert [line.partition(":")[0] for line in imported.left_out] == ["Match originalhost a", "Host a,b", "Host pi-*"]


@pytest.mark.needs_debian("openssh-server")
def test_ssh_itself_reaches_the_hosts_of_an_ssh_config_so(tmp_path: Path) -> None:
    lines = CONFIG.replace("ProxyCommand", "#").replace("Include", "#").splitlines()
    lines = [line for line in lines if line not in ('Match exec "touch x"', "  User mallory")]
    (config := tmp_path / "config").write_text("\n".join(lines) + "\n")
    for node in import_text(config.read_text(), name="config").nodes:
        command = ["ssh", "-G", "-F", str(config), node.name]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, check=True, capture_output=True, text=True, timeout=60)
        said = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
        assert (node.host, str(node.port or 22), node.user) == (said["hostname"], said["port"], said["user"])
        assert node.proxy_jump == said["proxyjump"]
        assert node.identity_file in (None, said["identityfile"])


def test_pool_of_ravnest_is_nodes() -> None:
    text = '// a pool\n{"0": {"IP": "10.0.0.1:8080", "benchmarks": {"ram": 8, "bandwidth": 20, "x": 1}},'
    text += '"1": {"IP": "a:1"}, "2": {"IP": "a:2"}}'
    imported = import_text(text, name="node_configs.json")
    assert _nodes(imported) == [
        {"host": "10.0.0.1", "bandwidth_mbit_s": 20.0, "memory_gb": 8.0},
        {"host": "a", "name": "node-1"},
        {"host": "a", "name": "node-2"},
    ]
    assert [line.partition(":")[0] for line in imported.left_out] == ["0.IP", "1.IP", "2.IP", "0.benchmarks.x"]
    assert "gRPC" in imported.left_out[0]
    with pytest.raises(SpecError, match=r"^n\.json: 0\.benchmarks\.ram 'x': give gigabytes"):
        import_text('{"0": {"IP": "a:1", "benchmarks": {"ram": "x"}}}', name="n.json")
    one = '{"node_id": 0, "local_host": "10.0.0.1", "local_port": 18080, "node_type": "root", "rank": 1}'
    assert _nodes(found := import_text(one, name="node_0.json")) == [{"host": "10.0.0.1"}]
    assert [line.partition(":")[0] for line in found.left_out] == ["node_id, node_type, rank", "local_port"]


def test_configuration_of_accelerate_is_a_spec() -> None:
    text = (
        "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: FSDP\ndowncast_bf16: 'no'\ngpu_ids: 0,1\n"
        "machine_rank: 1\nmain_process_ip: 10.0.0.1\nmain_process_port: 29500\nmixed_precision: fp16\nnum_machines: 2\n"
        "num_processes: 4\nsame_network: false\nfsdp_config: {fsdp_offload_params: true}\n"
        "dynamo_config: {dynamo_backend: INDUCTOR}\n"
    )
    imported = import_text(text, name="config.yaml")
    assert imported.spec and imported.spec.to_dict() == {
        "name": "config",
        "parallelism": {"compile": True},
        "nodes": [{"host": "10.0.0.1", "ranks": 2}, {"host": "node-1", "devices": [0, 1]}],
        "source": {"script": "train.py"},
        "rendezvous": {"port": 29500},
    }
    assert [line.partition(":")[0] for line in imported.left_out] == [
        *("source", "nodes", "mixed_precision", "same_network, fsdp_config.fsdp_offload_params"),
    ]
    for few in ("", "num_processes: -1\nmain_process_port: '7'\n"):  # one rank for each available GPU
        spec = import_text(f"compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\n{few}", name="a").spec
        assert spec and spec.to_dict()["nodes"] == [{"host": "localhost"}]
    assert spec.rendezvous.port == 7
    alone = import_text("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 8\n", name="a")
    assert alone.to_dict()["nodes"] == [{"host": "localhost", "ranks": 1}], "accelerate starts one process then"
    assert alone.left_out[-1].startswith("num_processes: ")
    for nothing in ("dynamo_backend: 'NO'\n", "dynamo_config: {dynamo_backend: no}\nfsdp_config: {}\ntpu_env: []\n"):
        plain = f"compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\n{nothing}"
        assert [line.partition(":")[0] for line in import_text(plain, name="a").left_out] == ["source"]
    older = import_text(text.replace("dynamo_config: {dynamo_backend: INDUCTOR}", "dynamo_backend: INDUCTOR"), name="a")
    assert older.spec and older.spec.parallelism and older.spec.parallelism.compile
    sizes = "{parallelism_config_dp_shard_size: 2, parallelism_config_cp_size: 2}"
    split = import_text(f"{text}parallelism_config: {sizes}\n", name="a")
    assert split.spec and split.spec.parallelism and split.spec.parallelism.dp_shard == -1, "all four ranks hold shards"
    assert "parallelism_config.parallelism_config_cp_size: a spec has no such axis" in split.left_out[-1]
    for change, fault in [
        ("num_processes: 3", "config.yaml: num_processes: 3: give a multiple of num_machines, which is 2"),
        ("num_processes: x", "config.yaml: num_processes: a text: give a whole number"),
        ("distributed_type: XLA", "config.yaml: distributed_type: XLA has no counterpart in a spec: give one of NO, "),
        ("machine_rank: 2", "config.yaml: machine_rank: 2: num_machines is 2: give 0 to 1"),
    ]:
        lines = [line for line in text.splitlines() if not line.startswith(change.partition(":")[0])]
        with pytest.raises(SpecError, match=fault):
            import_text("\n".join([*lines, change]), name="config.yaml")


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_configuration_for_accelerate_brings_back_what_it_holds(data: st.DataObject) -> None:
    """All comes back but the program, and the names of hosts after the first one."""
    ranks, gpus = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    hosts = data.draw(st.sampled_from([("h0",), ("h0", "node-1"), ("h0", "node-1", "node-2")]))
    has = {"devices": list(range(ranks))} if gpus else {"devices": "cpu", "ranks": ranks}
    how = data.draw(st.sampled_from(["sharded", "replicated", "both"])) if gpus else "replicated"
    replicas = data.draw(st.sampled_from([count for count in range(1, 5) if ranks * len(hosts) % count == 0]))
    axes = {"sharded": {}, "both": {"dp_replicate": replicas}, "replicated": {"dp_replicate": -1, "dp_shard": 1}}[how]
    spec = PipelineSpec.from_dict(
        {
            "name": data.draw(st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,10}", fullmatch=True)),
            "source": {"script_text": "print()"},
            "nodes": [{"host": host, **has} for host in hosts],
            "parallelism": {
                **axes,
                "precision": data.draw(st.sampled_from([None, "bf16"])),
                "compile": data.draw(st.booleans()),
                "activations": data.draw(st.sampled_from(["none", "full"]))
                if how == "sharded" and ranks > 1
                else "none",
            },
            "rendezvous": {"port": data.draw(st.integers(1, 65535))},
        }
    )
    held = ["name", "parallelism.dp_replicate", "parallelism.dp_shard", "parallelism.tp", "parallelism.precision"]
    held += ["parallelism.compile", "parallelism.activations", "rendezvous.port"]
    held += ["nodes.host"] if len(hosts) > 1 else []
    held += ["nodes.devices"] if not gpus or len(hosts) == 1 else []
    imported = come_back(spec, "accelerate", held=held, gpus=ranks if gpus else 0)
    assert imported.spec and len(imported.spec.nodes) == len(hosts)
    assert all((node.ranks or len(node.devices)) == ranks for node in imported.spec.nodes)
