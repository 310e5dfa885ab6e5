"""A spec is checked against the current state of its nodes, and nothing is started on them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from detrain_nb.errors import SpecError
from detrain_nb.jobs import check_here, check_nodes, submit
from detrain_nb.spec import PipelineSpec

from ..node.git_host import commit, git_host
from ..testbed.fixtures import MakeTestbed
from ..testbed.nodes import home_with_hosts


def faults(**fields: object) -> list[str]:
    spec = PipelineSpec.from_dict({"name": "checked", "source": {"script_text": "1"}, **fields})
    return [str(each) for each in check_nodes(spec) if each.severity == "error"]


def test_spec_that_can_run_has_no_fault(home: Path) -> None:
    assert faults() == []


def test_spec_is_checked_with_its_nodes(home: Path) -> None:
    spec = PipelineSpec.from_dict({"name": "checked", "source": {"script_text": "1"}, "secrets": ["NOT_SET_ANYWHERE"]})
    assert spec.check() == []
    assert [each.field for each in spec.check(nodes=True)] == ["secrets"]


def test_who_has_imported_a_spec_alone_can_check_it_with_its_nodes(home: Path) -> None:
    code = """
from detrain_nb.spec import PipelineSpec
spec = PipelineSpec.from_dict({"name": "checked", "source": {"script_text": "1"}, "secrets": ["NOT_SET_ANYWHERE"]})
print([each.field for each in spec.check(nodes=True)])
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=home, capture_output=True, text=True, timeout=100)
    assert done.stdout == "['secrets']\n", done.stderr


def test_port_that_is_taken_is_said(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (fault,) = faults(rendezvous={"port": port})
    assert fault.startswith(f"rendezvous.port: this machine cannot listen on 127.0.0.1 port {port}: ")
    assert "in use" in fault


def test_secret_source_and_mesh_are_looked_at(home: Path) -> None:
    found = faults(
        secrets=["NOT_SET_ANYWHERE"], source={"script": "/nowhere/train.py"}, parallelism={"pp": 4}, env={"A": "1"}
    )
    assert [fault.partition(":")[0] for fault in found] == ["source.script", "secrets", "parallelism"]


def test_all_names_of_a_folder_that_no_node_takes_are_said(home: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("1")
    for name in (b"a\x1b[2Jb", b"c\td", b"e\xff", b"fine"):
        (Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name)))).touch()
    source = {"path": str(tmp_path), "entry": "train.py"}
    spec = PipelineSpec.from_dict({"name": "checked", "source": source})
    said = [
        "source: 'a?[2Jb' has control or invisible characters: rename it, or list it in .detrainignore",
        "source: 'c?d' has control or invisible characters: rename it, or list it in .detrainignore",
        "source: 'e\\xff': its name is not UTF-8: rename it, or list it in .detrainignore",
    ]
    assert list(map(str, check_here(spec))) == said == faults(source=source)
    with pytest.raises(SpecError, match=r"(?s)a\?\[2Jb.*c\?d.*not UTF-8"):
        submit(spec, dry_run=True)
    for path in tmp_path.iterdir():
        if path.name not in ("train.py", "fine"):
            path.unlink()
    assert check_here(spec) == []


def test_library_that_a_node_lacks_is_said(home: Path) -> None:
    spec = PipelineSpec.from_dict(
        {"name": "checked", "source": {"script_text": "1"}, "checkpoint": {"url": "oci://bucket/runs"}}
    )
    said = [str(each) for each in check_nodes(spec, storage="oci://bucket/sources")]
    missing = "this machine lacks ocifs, which this URL needs: install it there"
    assert f"warning: checkpoint.url: {missing}" in said
    assert f"storage: {missing}" in said


def test_repository_is_fetched_as_the_job_would(home: Path, tmp_path: Path) -> None:
    commit(tmp_path / "work", {"train.py": "1"})

    def check(**git: str) -> list[str]:
        source = {"git": git, "entry": "train.py"}
        spec = PipelineSpec.from_dict({"name": "checked", "source": source})
        return [str(each) for each in check_nodes(spec)]

    with git_host(tmp_path / "host") as host:
        url = host.publish(tmp_path / "work", "x.git")
        assert check(url=url) == []
        (fault,) = check(url=url, ref="gone")
        assert fault.startswith(f"source.git: this machine: git {url}: there is no branch, tag or commit 'gone'")
    warning, fault = check(url=url)
    assert warning.startswith(f"warning: source.git: this machine: git {url} cannot be reached: ")
    assert warning.endswith(": it will be fetched where you submit, and sent")
    assert fault.startswith(f"source.git: this machine: git {url} cannot be reached: ")
    (fault,) = check(url=url, how="clone")
    assert fault.startswith(f"source.git: this machine: git {url} cannot be reached: ")


def test_python_of_this_machine_that_lacks_torch_is_told_once(home: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    (fault,) = faults(nodes=[{"host": "localhost", "python": str(python)}])
    assert fault.startswith("nodes.localhost: torch: missing in ")


def test_python_of_this_machine_that_cannot_be_started_is_told(home: Path) -> None:
    (fault,) = faults(nodes=[{"host": "localhost", "python": "/nowhere/python"}])
    assert fault.startswith("nodes.localhost: ") and "/nowhere/python" in fault


def test_port_is_tried_where_the_other_nodes_reach_this_machine(
    home: Path, tmp_path: Path, make_testbed: MakeTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(home_with_hosts(make_testbed, tmp_path)))
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        (fault,) = faults(nodes=[{"host": "localhost"}, {"host": "gpu1"}], rendezvous={"port": port})
    assert fault.startswith("rendezvous.port: localhost cannot listen on ") and "in use" in fault
    assert f"127.0.0.1 port {port}" not in fault


@pytest.mark.parametrize("how", ["auto", "bundle"])
def test_who_gets_a_token_is_said_before(how: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(tmp_path / "work", {"train.py": "1"})
    monkeypatch.setenv("A_TOKEN", "t0ken")
    with git_host(tmp_path / "host", token="t0ken") as host:
        of = {"url": host.publish(tmp_path / "work", "x.git"), "token": "A_TOKEN", "how": how}
        spec = PipelineSpec.from_dict({"name": "checked", "source": {"git": of, "entry": "train.py"}})
        said: list[tuple[str, int]] = []
        assert check_nodes(spec, on_progress=lambda text: said.append((text, len(host.asked)))) == []
        to = "127.0.0.1" if how == "bundle" else "every node and to 127.0.0.1"
        assert said == [(f"the value of A_TOKEN here is sent to {to}", 0)]
        assert any("t0ken" in who for _, who in host.asked)


def test_host_that_cannot_be_reached_is_named_once(home: Path) -> None:
    (fault,) = faults(nodes=[{"host": "nohost.invalid"}])
    assert fault.startswith("nodes.nohost.invalid: ")
