"""Akash's data about leases, read as nodes: every invalid part is a SpecError that names its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from detrain_nb.errors import SpecError
from detrain_nb.formats import import_text, nodes_from_lease
from detrain_nb.spec import Node, parse_nodes, read_nodes, write_nodes

_IP = {"IP": "203.0.113.7", "Port": 2222, "ExternalPort": 22, "Protocol": "TCP"}


def _way(outside: int = 31022, **fields: Any) -> dict[str, Any]:
    return {"host": "provider.example.org", "port": 2222, "externalPort": outside, "proto": "TCP", "name": "", **fields}


def _lease(**services: Any) -> dict[str, Any]:
    names = [name.replace("_", "-") for name in services]
    ready = {name: {"name": name, "available": 1, "total": 1, "uris": None, "replicas": 1} for name in names}
    return {"services": ready, "forwarded_ports": dict(zip(names, services.values())), "ips": None}


def test_services_are_nodes_in_their_natural_order() -> None:
    lease = _lease(node_10=[_way(3)], node_2=[_way(80, port=80), _way(2)], node_0=[_way(1)], head=[_way(4)])
    nodes = nodes_from_lease(lease)
    assert [(node.name, node.port) for node in nodes] == [("head", 4), ("node-0", 1), ("node-2", 2), ("node-10", 3)]
    assert nodes[0] == Node(name="head", host="provider.example.org", port=4, user="trainer")
    assert nodes_from_lease(json.dumps(lease)) == nodes


def test_address_of_its_own_comes_before_a_forwarded_port() -> None:
    lease = {**_lease(a=[_way()]), "ips": {"a": [_IP]}}
    (node,) = nodes_from_lease(lease)
    assert (node.host, node.port) == ("203.0.113.7", 22)


def test_several_leases_have_nodes_of_different_names(tmp_path: Path) -> None:
    leases = [_lease(node_0=[_way(1)], node_1=[_way(2)]), _lease(node_0=[_way(3, host="other.example.org")])]
    nodes = nodes_from_lease(leases)
    assert [node.name for node in nodes] == ["node-0", "node-1", "node-0-lease2"]
    for name, content in [("a.json", leases[0]), ("b.json", leases[1]), ("both.json", leases), ("a,b.json", leases[1])]:
        (tmp_path / name).write_text(json.dumps(content))
    assert parse_nodes(f"{tmp_path}/both.json") == nodes
    assert parse_nodes(f"{tmp_path}/a.json, {tmp_path}/b.json") == nodes
    assert len(parse_nodes(f"{tmp_path}/a,b.json")) == 1, "a comma in the name of a file"
    write_nodes(tmp_path / "own.toml", [Node(host="gpu1")])
    assert [node.name for node in parse_nodes(f"{tmp_path}/own.toml,{tmp_path}/b.json")] == ["gpu1", "node-0"]
    with pytest.raises(SpecError, match="nodes 1 and 2 have the same name 'gpu1'"):
        parse_nodes(f"{tmp_path}/own.toml,{tmp_path}/own.toml")
    with pytest.raises(SpecError, match=f"^{'a' * 63}: several leases have this service: shorten its name"):
        nodes_from_lease([_lease(**{"a" * 63: [_way(1)]})] * 2)


@pytest.mark.parametrize(
    ("lease", "fault"),
    [
        (
            _lease(a=[_way(port=8080)]),
            r"forwarded_ports\.a: sshd's port 2222 is not forwarded: .* global: true, or leave",
        ),
        (_lease(a=None), r"forwarded_ports\.a: sshd's port 2222 is not forwarded"),
        (_lease(a={}), r"forwarded_ports\.a: sshd's port 2222 is not forwarded"),
        (_lease(a="x"), r"forwarded_ports\.a: give a list of ports"),
        (_lease(a=["x"]), r"forwarded_ports\.a\[0\]: give a table with host, port, externalPort"),
        (_lease(a=[_way(host="")]), r"forwarded_ports\.a\[0\]\.host: give a host"),
        (_lease(a=[_way(host="a b;c")]), r"forwarded_ports\.a\[0\]: .*host"),
        (_lease(a=[_way(10**30)]), r"forwarded_ports\.a\[0\]\.externalPort: give a port from 1 to 65535"),
        (_lease(a=[_way(True)]), r"forwarded_ports\.a\[0\]\.externalPort: give a port"),
        (
            {**_lease(a=[_way()]), "services": {"a": {"available": 0}}},
            r"services\.a: is not available yet: run lease-status",
        ),
        ({**_lease(a=[_way()]), "services": {"a": {"available": "1"}}}, r"services\.a\.available: give a whole number"),
        ({**_lease(a=[_way()]), "ips": {"a": [{**_IP, "IP": 7}]}}, r"ips\.a\[0\]\.IP: give a host"),
        (_lease(a=[_way(port=1), _way(proto="UDP")]), r"forwarded_ports\.a\[1\]\.proto: sshd needs TCP: expose"),
        ({**_lease(a=[]), "ips": {"a": [{**_IP, "Protocol": 7}]}}, r"ips\.a\[0\]\.Protocol: sshd needs TCP"),
        ({**_lease(a=[_way()]), "ips": [1]}, r"ips: give a table of services"),
        ([_lease(a=[_way()]), 7], r"\[1\]: give the output of lease-status"),
        ([_lease(a=[_way()]), _lease(b=[])], r"\[1\]\.forwarded_ports\.b: sshd's port 2222 is not forwarded"),
        (_lease(**{"0-3": [_way()]}), r"services\.0-3: is not a valid name of a node"),
        (_lease(**{"\x1b[2J": [_way()]}), r"is not a valid name of a node"),
        (_lease(), "no service has one: is this the output of lease-status"),
        (7, "give the output of lease-status"),
        ([], "no service has one"),
        ("{", "line 1"),
        (
            _lease(**{f"n{number}": [] for number in range(10_000)}),
            r"services: 10,000 of them: give at most 1,000",
        ),
    ],
)
def test_odd_lease_is_refused_with_the_place(lease: Any, fault: str) -> None:
    with pytest.raises(SpecError, match=f"^lease.json: .*{fault}") as caught:
        nodes_from_lease(lease, where="lease.json")
    assert "\x1b" not in str(caught.value)


def test_lease_that_is_imported_names_its_other_ports() -> None:
    lease = _lease(a=[_way(80, port=80), _way(), _way(81, port=None)], b=[_way()])
    imported = import_text(json.dumps([lease]), name="lease.json")
    assert imported.kind == "lease" and imported.nodes == nodes_from_lease(lease)
    assert imported.left_out == ("[0].forwarded_ports.a: a node has only one port, that of sshd; not used: 80, None",)
    state = {"name": "a", "available": 2, "total": 2, "uris": ["a.org"], "observed_generation": 3, "replicas": 1}
    odd = {"leases": 1, "services": {"a": state, "b": "x"}, "ips": {"b": [{**_IP, "Name": "c"}]}}
    imported = import_text(json.dumps({**_lease(a=[_way(new=1)], b=[_way()]), **odd}))
    assert imported.left_out == (
        "leases, services.a.uris, services.a.observed_generation, services.b, forwarded_ports.a[0].new, ips.b[0].Name: "
        "a spec has no field for it",
        "services.a.available, services.a.total: a node is one container: set the count of its service to 1 in the SDL",
        "forwarded_ports.b: is not used, as the service has its own address",
    )


def test_sshd_is_reached_by_tcp() -> None:
    (node,) = nodes_from_lease(_lease(a=[_way(1, proto="UDP"), _way(2, proto="tcp")]))
    assert node.port == 2


def test_faults_of_a_lease_name_its_file(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    path.write_text(json.dumps(_lease(a=[_way(0)])))
    with pytest.raises(SpecError, match=rf"^{path}: forwarded_ports\.a\[0\]\.externalPort: give a port"):
        read_nodes(path)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_ANY_WAY = st.builds(dict, port=st.just(2222), host=_JSON | st.just("a.org"), externalPort=_JSON | st.just(31022))
_ANY_SERVICES = st.dictionaries(st.sampled_from(["a", "n-1", "x" * 99]), st.lists(_JSON | _ANY_WAY, max_size=2) | _JSON)
_ANY_LEASE = st.dictionaries(st.sampled_from(["services", "forwarded_ports", "ips"]), _ANY_SERVICES | _JSON)


@settings(deadline=None)
@given(_ANY_LEASE | _JSON | st.lists(_ANY_LEASE, max_size=3))
@example({"forwarded_ports": {"9" * 5000: [_way()]}})
def test_whatever_a_provider_says_is_nodes_or_an_error(content: Any) -> None:
    try:
        nodes = nodes_from_lease(content)
    except SpecError:
        return
    assert nodes and len({node.name for node in nodes}) == len(nodes)
