"""Jobs on two nodes, each with its own home on this machine and reached as over SSH; and a node that cannot prepare."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from detrain_nb.errors import DetrainError
from detrain_nb.jobs import LogLine, submit
from detrain_nb.jobs.record import Record
from detrain_nb.spec import PipelineSpec

from ..testbed.machine import wait_until
from ..transport.pipe_transport import PipeTransport

LIMIT_S = 120.0
TOGETHER = """
import os, pathlib, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
print("total", total.item())
pathlib.Path("same.pt").write_text("same")
pathlib.Path("own.pt").write_text(str(dist.get_rank()))
dist.destroy_process_group()  # a thread of gloo that lets go of a tensor while Python ends can abort the rank
"""


@pytest.fixture
def nodes(home: Path) -> Iterator[list[PipeTransport]]:
    folders = [Path(tempfile.mkdtemp(prefix="j-")) for _ in range(2)]
    made = [PipeTransport(name, folder) for name, folder in zip("ab", folders)]
    try:
        yield made
    finally:
        for node in made:
            node.leave()
        for folder in folders:
            wait_until(lambda: is_removed(folder), f"the end of what writes to {folder}")  # noqa: B023


def is_removed(folder: Path) -> bool:
    """Remove a folder and return whether it is gone; processes that are exiting may still create files in it."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def spec_of(script: str, name: str) -> PipelineSpec:
    return PipelineSpec.from_dict({"name": name, "source": {"script_text": script}})


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_job_on_two_nodes(nodes: list[PipeTransport], tmp_path: Path) -> None:
    lines: list[LogLine] = []
    job = submit(spec_of(TOGETHER, "two"), nodes=nodes)
    status = job.attach(lines.append)
    assert (status.state, status.exit_code) == ("ended", 0), status
    assert sorted(map(str, lines)) == ["[a:0] total 1.0", "[b:1] total 1.0"]
    fetched = job.fetch(to=tmp_path)
    assert fetched.files == ("a/own.pt", "b/own.pt", "same.pt")
    assert [(tmp_path / name).read_text() for name in fetched.files] == ["0", "1", "same"]
    assert job.execute("pwd; exit $(basename $HOME | wc -c)", on_line=lines.append).status > 1
    assert {line.node for line in lines[2:]} == {"a", "b"}
    assert len({line.text for line in lines[2:]}) == 2


@pytest.mark.timeout(LIMIT_S)
def test_node_that_cannot_prepare_undoes_all(nodes: list[PipeTransport]) -> None:
    state = nodes[1].home / ".local/state/detrain_nb"
    state.parent.mkdir(parents=True)
    state.write_text("no folder")
    with pytest.raises(DetrainError, match=r"^b: "):
        submit(spec_of("pass", "undone"), nodes=nodes)
    assert not list((nodes[0].home / ".local/state/detrain_nb/jobs").glob("undone-*/*"))
    assert Record().summaries(name="undone") == [], "nor in the list"
