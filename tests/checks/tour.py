"""Run docs/tour.md as a notebook: its Python blocks are cells, and the text block after a cell is its output.

`python -m tests.checks.tour` runs the cells and rewrites the text blocks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

TOUR = Path(__file__).resolve().parents[2] / "docs" / "tour.md"
LIMIT_S = 120
_BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<shown>.*?)```\n)?", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_VARIES = ((re.compile(r"\(pid \d+\)"), "(pid 12345)"), (re.compile(r"read at [\d:]+"), "read at 12:00:00"))


def read_cells(text: str) -> Iterator[tuple[str, str]]:
    """Yield the code of each cell and the output that the page shows for it."""
    for found in _BLOCK.finditer(text):
        yield found["code"], found["shown"] or ""


def run_cells(codes: list[str], folder: Path) -> list[str]:
    """Run the cells in one kernel, in ``folder``; returns each output. A failing cell does not stop the others."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in codes])  # type: ignore[no-untyped-call]
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", allow_errors=True, resources=resources).execute()
    return ["".join(map(_read_output, cell.outputs)) for cell in notebook.cells]


def _read_output(output: Any) -> str:
    if output.output_type == "stream":
        text = output.text
    elif output.output_type == "error":
        text = "\n".join(output.traceback) + "\n"
    else:
        text = output.data.get("text/plain", "")
        text += "\n" if text else ""
    text = _COLOUR.sub("", text)
    for pattern, instead in _VARIES:
        text = pattern.sub(instead, text)
    return str(text)


def write_shown(text: str, shown: list[str]) -> str:
    """Replace the text block after each cell by the cell's output."""
    outputs = iter(shown)

    def replace(found: re.Match[str]) -> str:
        output = next(outputs)
        block = f"\n```text\n{output}```\n" if output else ""
        return f"```python\n{found['code']}```\n{block}"

    return _BLOCK.sub(replace, text)


def main(folder: Path) -> None:
    text = TOUR.read_text("utf-8")
    codes = [code for code, _ in read_cells(text)]
    TOUR.write_text(write_shown(text, run_cells(codes, folder)), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path.cwd())
