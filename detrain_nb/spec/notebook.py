"""The cells of a notebook that a job runs: those with the tag ``job``, in order, as one script."""

from __future__ import annotations

import json
from typing import Any

from ..errors import DetrainError, SpecError
from ..storage import locate
from .grammar import check_python

TAG = "job"
MOST_BYTES = 50_000_000  # of a notebook, which holds its outputs


def read_notebook_script(path: str) -> str:
    """Return the script of the notebook at a path or URL. Raises: SpecError."""
    location = locate(path)
    try:
        data = location.read(limit_bytes=MOST_BYTES)
    except DetrainError as exc:
        raise SpecError(str(exc)) from exc
    try:
        return script_of_notebook(data.decode("utf-8-sig"), where=location.name)
    except UnicodeDecodeError:
        raise SpecError(f"{location.name}: is not a notebook: it is not UTF-8") from None


def script_of_notebook(text: str, *, where: str) -> str:
    """Return the tagged cells of a saved notebook as one script. Raises: SpecError that names the cell."""
    cells = _tagged_cells(text, where)
    if not cells:
        raise SpecError(f"{where}: no code cell has the tag {TAG!r}: tag the cells of the job, and save")
    script = "\n\n".join(f"# Cell {number}\n{source.rstrip()}\n" for number, source in cells)
    each = ((source, f"{where}, cell {number}") for number, source in cells)
    check_python(*each, (script, f"{where}, its cells together"))  # only the first one may import from __future__
    return script


def _tagged_cells(text: str, where: str) -> list[tuple[int, str]]:
    if len(text) > MOST_BYTES:
        raise SpecError(f"{where}: larger than {MOST_BYTES // 1_000_000} MB: clear its outputs, and save")
    try:
        notebook = json.loads(text)
    except (ValueError, RecursionError):
        raise SpecError(f"{where}: is not a notebook: save it from JupyterLab") from None
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        raise SpecError(f"{where}: has no cells: save it from JupyterLab, in version 4 of the format")
    return [(number, _source_of(cell)) for number, cell in enumerate(cells, 1) if _is_tagged(cell)]


def _is_tagged(cell: Any) -> bool:
    if not isinstance(cell, dict) or cell.get("cell_type") != "code":
        return False
    metadata = cell.get("metadata")
    tags = metadata.get("tags") if isinstance(metadata, dict) else None
    return isinstance(tags, list) and TAG in tags


def _source_of(cell: dict[str, Any]) -> str:
    source = cell.get("source", "")
    return "".join(map(str, source)) if isinstance(source, list) else str(source)
