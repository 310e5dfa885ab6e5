"""What a notebook stores is the same at every run, however the ranks race."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

CELLS = [
    "%load_ext detrain_nb",
    "%%distributed -n 2\nimport sys, time, logging\nfor step in range(200): print('step', step, 'loss', step * rank)",
    "%%distributed\nprint('out')\nprint('err', rank, file=sys.stderr)\nlogging.warning('same')\nprint('out again')",
    "%%distributed\nimport matplotlib.pyplot as plt\nprint('before')\nplt.plot([0, 1])\nplt.show()\nprint('after')\n1",
    "%%distributed\nfor i in range(5):\n    print(f'\\r{i}', end='')\n    time.sleep(0.05)\nprint()",
    "%%distributed --merge all\n!echo from a command\n{'rank': 0}",
    "%%distributed --max-lines 500\nfor i in range(3000): print(i, 'x' * (i % 50))",
    "%%distributed\nassert rank == 0, 'only rank 0'",
    "%distributed stop",
]


@pytest.fixture
def load() -> Iterator[None]:
    """Other processes want every core: the order in which ranks get theirs changes from run to run."""
    command = [sys.executable, "-c", "while True: sum(range(100_000))"]
    busy = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    yield
    for process in busy:
        process.kill()
        process.wait(10)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("load")
@pytest.mark.parametrize("mode", ["live", "final"])
def test_twenty_runs_under_load_store_the_same(
    mode: str, tmp_path: Path, runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DETRAIN_NB_OUTPUT", mode)
    monkeypatch.setenv("DETRAIN_NB_RUNTIME_DIR", str(runtime_folder))
    first = _stored_outputs(tmp_path)
    assert "[0] step 199 loss 0\n[1] step 1 loss 1\n" in first[1][0]["text"]
    assert first[2][0]["text"] == "[0-1] out\n[0-1] out again\n"
    assert first[7][0]["output_type"] == "error"
    for _ in range(19):
        assert _stored_outputs(tmp_path) == first


def _stored_outputs(folder: Path) -> list[list[dict[str, Any]]]:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(folder)}}
    ).execute()
    return [[dict(output) for output in cell.outputs] for cell in notebook.cells]
