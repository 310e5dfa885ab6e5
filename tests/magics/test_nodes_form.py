"""``%distributed nodes`` in a real kernel: who may start the session of a notebook, and when."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)

_HOLDER = """
from detrain_nb.deploy.start_steps import StartWatch, ignore_step
from detrain_nb.spec import Node
holder = get_ipython().detrain_nb_magics[0].holder
said = []
watch = StartWatch(lambda line: None, ignore_step, said.append, lambda path: None)
def start():
    return holder.start_from_form([Node(host="localhost", ranks=2, setup=())], watch)
"""


def test_one_start_at_a_time_and_none_beside_a_session_that_runs(start_kernel: Any) -> None:
    kernel = start_kernel()
    assert kernel.run(_HOLDER).status == "ok"
    kernel.run("is_free = holder._starting.acquire()")
    while_starting = kernel.run("%%distributed\n1")
    assert "a session of this notebook is already being started" in while_starting.error
    kernel.run("holder._starting.release()")
    started = kernel.run(
        "import threading; made = []; thread = threading.Thread(target=lambda: made.append(start()))\n"
        "thread.start(); thread.join(60); len(made)"
    )
    assert started.rich() == ["1"], started.error
    assert kernel.run("%%distributed\nprint(rank)").text() == "[localhost:0] 0\n[localhost:1] 1\n"
    again = kernel.run("start()")
    assert "is already running with 2 ranks: %distributed stop first" in again.error
    [text] = kernel.run("%distributed nodes").rich()
    assert text.startswith("Nodes: 1\n") and "auto, 2 ranks" in text, "what was typed is not lost by a start"
    assert kernel.run("%distributed stop").status == "ok"


def test_form_is_shown_with_the_nodes_of_a_file(start_kernel: Any, tmp_path: Any) -> None:
    kernel = start_kernel()
    (tmp_path / "nodes.toml").write_text('[[nodes]]\nhost = "gpu1"\nranks = 4\n')
    kernel.run(f"import os; os.chdir({str(tmp_path)!r})")
    shown = kernel.run("%distributed nodes nodes.toml")
    [text] = shown.rich()
    assert text.startswith("Nodes: 1, nodes.toml\n") and "auto, 4 ranks" in text and "not tested" in text
    assert "application/vnd.jupyter.widget-view+json" in shown.live[-2][1]["data"]
    assert "none.toml" in kernel.run("%distributed nodes none.toml").error
