"""Where ranks are, queried while the kernel runs their cell: from a sub-shell, as JupyterLab opens one."""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

DEADLINE_S = 40.0
HANGING = """%%distributed
def load_data():
    time.sleep(60)
if rank == 0:
    dist.all_reduce(torch.ones(1))
else:
    load_data()
"""


@pytest.fixture
def subshell(kernel: Any) -> Iterator[str]:
    """The id of a sub-shell of the kernel."""
    created = _ask_control(kernel, "create_subshell_request", {})
    yield created["subshell_id"]
    _ask_control(kernel, "delete_subshell_request", created)


def test_where_answers_in_a_subshell_while_the_kernel_is_busy(kernel: Any, subshell: str) -> None:
    busy = kernel.client.execute(HANGING, stop_on_error=False)
    deadline = time.monotonic() + DEADLINE_S
    found: dict[str, Any] = {}
    words = r"rank 0 waits in all_reduce #\d+ \(line 5\); rank 1 is in load_data \(line 3\)"
    while not re.search(words, found.get("text/plain", "")):
        assert time.monotonic() < deadline, found
        found = _run_beside(kernel, "%distributed where", subshell)
    kernel.manager.interrupt_kernel()
    assert kernel.reply_to(busy)["status"] == "error"
    assert re.search(words, found["text/html"])
    assert re.search(r"&lt;cell \d+&gt;:3 load_data", found["text/html"])
    assert kernel.run("%%distributed\nx").rich() == ["[0] 1", "[1] 2"]


def test_where_answers_in_a_thread_of_the_kernel(kernel: Any) -> None:
    asked = """
import re, threading
from IPython import get_ipython
magics = get_ipython().magics_manager.registry["DistributedMagics"]
seen = []
def look():
    while not any(re.search(r"waits in all_reduce #\\d+ .* is in load_data", text) for text in seen):
        seen.append(repr(magics.session.ranks.where()))
looking = threading.Thread(target=look)
looking.start()
"""
    assert kernel.run(asked).status == "ok"
    assert kernel.run("%distributed config hang=1").status == "ok"
    assert "load_data" in kernel.run(HANGING, interrupt_when="rank 1 is in load_data (line 3)").error
    found = kernel.run("looking.join(10)\nprint(looking.is_alive(), seen[-1].splitlines()[0])").text()
    assert re.match(r"False session .*: rank 0 waits in all_reduce #\d+ \(line 5\); rank 1 is in load_data", found)


def _ask_control(kernel: Any, kind: str, content: dict[str, Any]) -> dict[str, Any]:
    asked = kernel.client.session.msg(kind, content)
    kernel.client.control_channel.send(asked)
    while True:
        reply = kernel.client.get_control_msg(timeout=DEADLINE_S)
        if reply["parent_header"].get("msg_id") == asked["header"]["msg_id"]:
            answer: dict[str, Any] = reply["content"]
            assert answer["status"] == "ok", answer
            return {name: value for name, value in answer.items() if name != "status"}


def _run_beside(kernel: Any, code: str, subshell: str) -> dict[str, Any]:
    """Run a line in a sub-shell; returns the rich output that it shows."""
    content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False}
    asked = kernel.client.session.msg("execute_request", content)
    asked["header"]["subshell_id"] = subshell
    kernel.client.shell_channel.send(asked)
    found: dict[str, Any] = {}
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            message = kernel.client.get_iopub_msg(timeout=0.5)
        except queue.Empty:
            continue
        if message["parent_header"].get("msg_id") != asked["header"]["msg_id"]:
            continue
        if message["msg_type"] == "display_data":
            found = message["content"]["data"]
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return found
    raise AssertionError(f"{code} did not end in its sub-shell")
