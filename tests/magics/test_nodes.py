"""Two hosts over SSH in a real kernel: their status, Tab on their names, a restart after an attach."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..testbed.testbed import Testbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

_LOOK = "%%distributed\nimport os, socket\n"
_LOOK += "print(socket.gethostname()[-2:], torch.initial_seed() - rank, os.environ.get('TOKEN'))"
_OPTIONS = "-n 1 --no-sync --seed 7 --group-timeout 90 --env TOKEN=geheim"


@pytest.fixture
def kernel(start_kernel: Any, testbed: Testbed, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """A kernel with a session on the two hosts, which are in ~/.ssh/config and a nodes file; no session is left."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(f"Include {testbed.inventory.ssh_config}\n")
    nodes = [{"name": "left", "host": "h0"}, {"name": "right", "host": "h1"}]
    file = tmp_path / "nodes.json"
    file.write_text(json.dumps({"defaults": {"python": sys.executable, "devices": "cpu"}, "nodes": nodes}))
    kernel = start_kernel(HOME=str(tmp_path), DETRAIN_NB_NOTEBOOK=f"/x/{request.node.name}.ipynb")
    kernel.start_line = f"%distributed start --nodes {file} {_OPTIONS}"
    started = kernel.run(kernel.start_line)
    assert started.status == "ok", started.error
    yield kernel
    assert kernel.run("%distributed stop").status == "ok"


def _eventually(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_status_shows_which_host_is_reached(kernel: Any, testbed: Testbed) -> None:
    def status() -> str:
        text: str = kernel.run("%distributed status").rich()[0]
        return text

    lines = status().splitlines()
    assert re.fullmatch(r"session \S+: 2 ranks on 2 nodes", lines[0])
    assert lines[1] == "collectives time out after 90 s (--group-timeout)"
    assert [line for line in lines[3:] if not line.startswith(" ")] == [
        "left (h0): connected; rank 0: idle",
        "right (h1): connected; rank 1: idle",
    ]
    testbed.stop_sshd("h1", sessions=True)
    _eventually(
        lambda: re.search(r"^right \(h1\): no connection for \d+ s, trying again; rank 1", status(), re.MULTILINE)
    )
    assert "1 of 2 nodes cannot be reached: right" in status()
    assert "left (h0): connected" in status()
    testbed.start_sshd("h1")
    _eventually(lambda: "right (h1): connected; rank 1: idle" in status())


def test_tab_knows_the_nodes_and_the_hosts(kernel: Any) -> None:
    def tab(code: str) -> list[str]:
        found: list[str] = []
        deadline = time.monotonic() + 20  # a busy machine may need several tries
        while not found and time.monotonic() < deadline:
            found = kernel.client.complete(code, len(code), reply=True, timeout=20)["content"]["matches"]
        return found

    assert tab("%%distributed -r ") == ["left", "right"]
    assert tab("%distributed put x --nodes left,") == ["left,right"]
    assert {"h0", "h1"} <= set(tab("%distributed doctor --nodes h"))
    assert (
        [name for name in tab("%distributed attach ") if not name.startswith("-")]
        == [name for name in tab("%distributed stop ") if not name.startswith("-")]
        != []
    )


def test_restart_after_attach_is_on_the_same_hosts_with_the_same_options(kernel: Any) -> None:
    assert kernel.run(_LOOK).text() == "[left:0] h0 7 geheim\n[right:1] h1 7 geheim\n"
    kernel.manager.restart_kernel(now=False)
    kernel.client.wait_for_ready(timeout=60)
    assert "was left running (on left, right)" in kernel.run("%load_ext detrain_nb").text()
    assert kernel.run("from detrain_nb import current_session\n%distributed attach").status == "ok"
    assert "time out after 90 s" in kernel.run("%distributed status").rich()[0]
    assert kernel.run("current_session().files.is_synced").rich() == ["False"]
    assert "is already running with 2 ranks" in kernel.run(kernel.start_line).text()
    again = kernel.run("%distributed restart --env TOKEN=new")
    assert again.status == "ok", again.error
    assert "not stored" not in again.text()
    assert kernel.run(_LOOK).text() == "[left:0] h0 7 new\n[right:1] h1 7 new\n"
    assert "time out after 90 s" in kernel.run("%distributed status").rich()[0]


def test_cell_after_a_restart_is_on_the_hosts_again(kernel: Any) -> None:
    """The cell used to run on this machine instead, and the session on the hosts was lost."""
    kernel.manager.restart_kernel(now=False)
    kernel.client.wait_for_ready(timeout=60)
    kernel.run("%load_ext detrain_nb")
    outcome = kernel.run("%%distributed\nimport socket\nsocket.gethostname()[-2:]")
    assert "new ranks are started" in outcome.text() and "values of --env are not stored" in outcome.text()
    assert outcome.rich() == ["[left:0] 'h0'", "[right:1] 'h1'"]


def test_cell_is_refused_where_the_session_on_the_hosts_was_left(kernel: Any) -> None:
    assert kernel.run("%%distributed\nkept = rank").status == "ok"
    kernel.run("%distributed detach")
    error = kernel.run("%%distributed\nrank").error
    assert re.search(
        r"session '\S+' is already running, on left, right: %distributed attach \S+ reconnects to it", error
    ), error
    assert kernel.run("%distributed attach").status == "ok"
    assert kernel.run("%%distributed\nkept").rich() == ["[left:0] 0", "[right:1] 1"]
