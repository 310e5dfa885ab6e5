"""A notebook stores the same output at every run, however the ranks race."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

START = ["%load_ext detrain_nb", "%distributed start -n 2"]
CELLS = [
    "%%distributed\nimport sys, time, logging\nfor step in range(200): print('step', step, 'loss', step * rank)",
    "%%distributed\nprint('out')\nprint('err', rank, file=sys.stderr)\nlogging.warning('same')\nprint('out again')",
    "%%distributed\nimport matplotlib.pyplot as plt\nprint('before')\nplt.plot([0, 1])\nplt.show()\nprint('after')\n1",
    "%%distributed\nfor i in range(5):\n    print(f'\\r{i}', end='')\n    time.sleep(0.05)\nprint()",
    "%%distributed --merge all\n!echo from a command\n{'rank': 0}",
    "%%distributed --max-lines 500\nfor i in range(3000): print(i, 'x' * (i % 50))",
    "%%distributed\nassert rank == 0, 'only rank 0'",
    "%%distributed\nfrom tqdm import tqdm, trange\nform = {'bar_format': '{n}/{total}', 'mininterval': 0}\n"
    "for _ in trange(3, **form):\n    for step in trange(9, leave=False, **form): tqdm.write(str(step))\nprint(rank)",
]
SESSIONS, TURNS = 2, 10


@pytest.fixture
def load() -> Iterator[None]:
    """Load every core with other processes, so that the order in which ranks run changes from run to run."""
    command = [sys.executable, "-c", "while True: sum(range(100_000))"]
    busy = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    yield
    for process in busy:
        process.kill()
        process.wait(60)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("load")
@pytest.mark.parametrize(
    "mode", [pytest.param("live", marks=pytest.mark.slow), pytest.param("final", marks=pytest.mark.thorough)]
)
def test_twenty_runs_under_load_store_the_same(
    mode: str, tmp_path: Path, runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DETRAIN_NB_OUTPUT", mode)
    monkeypatch.setenv("DETRAIN_NB_RUNTIME_DIR", str(runtime_folder))
    first, *others = [_without_numbers(turn) for _ in range(SESSIONS) for turn in _stored_outputs(tmp_path)]
    assert "[0] step 199 loss 0\n[1] step 1 loss 1\n" in first[0][0]["text"]
    assert [output["name"] for output in first[1]] == ["stdout", "stderr", "stdout"]
    assert first[1][2]["text"] == "[0-1] out again\n"
    assert first[6][0]["output_type"] == "error"
    assert first[7][0]["text"].endswith("[0-1] 8\n[0-1] 3/3\n[0] 0\n[1] 1\n")
    assert len(others) == 19
    for other in others:
        assert other == first


def _stored_outputs(folder: Path) -> list[list[list[dict[str, Any]]]]:
    """Run a notebook with the same cells several times over; returns the stored outputs of each turn."""
    sources = [*START, *CELLS * TURNS, "%distributed stop"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(folder)}}
    ).execute()
    stored = [[dict(output) for output in cell.outputs] for cell in notebook.cells[len(START) : -1]]
    return [stored[begin : begin + len(CELLS)] for begin in range(0, len(stored), len(CELLS))]


def _without_numbers(turn: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The outputs without cell numbers, which continue from turn to turn."""
    said = re.sub(r"(%distributed log --cell|  cell) \d+", r"\1 *", json.dumps(turn))
    return json.loads(said)  # type: ignore[no-any-return]
