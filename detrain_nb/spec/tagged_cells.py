"""The cells of a saved notebook that are a job's script: those with the tag ``job``, in their order."""

from __future__ import annotations

import ast
import json
import os
from typing import Any

from ..errors import SpecError
from ..storage import locate, named_errors
from ..text import printable

__all__ = ["TAG", "read_tagged_cells"]

TAG = "job"
_LIMIT_BYTES = 100_000_000  # its outputs are in it


def read_tagged_cells(path: str | os.PathLike[str]) -> str:
    """Return the text of a script that is the tagged cells of the notebook at ``path``. Raises: SpecError."""
    location = locate(path)
    with named_errors(location.name, "read", kind_of=lambda exc: SpecError):
        data = location.read(limit_bytes=_LIMIT_BYTES)
    try:
        notebook = json.loads(data)
    except (ValueError, RecursionError):
        raise SpecError(f"{location.name}: is no notebook: save it in Jupyter, as .ipynb") from None
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        raise SpecError(f"{location.name}: is no notebook of format 4: save it in Jupyter, as .ipynb")
    parts = [(number, _text_of(cell)) for number, cell in enumerate(cells, 1) if _is_tagged(cell)]
    if not parts:
        raise SpecError(
            f"{location.name}: none of its {len(cells)} cells is code with the tag {TAG!r}: tag those to run"
        )
    for number, text in parts:
        try:
            ast.parse(text)
        except (SyntaxError, ValueError) as exc:
            line = f"line {exc.lineno}: {exc.msg}" if isinstance(exc, SyntaxError) else str(exc)
            raise SpecError(
                f"{location.name}: cell {number} is no plain Python: {printable(line)}: a script has no magics"
            ) from None
    return "\n\n".join(text.rstrip("\n") for _, text in parts) + "\n"


def _is_tagged(cell: Any) -> bool:
    if not isinstance(cell, dict) or cell.get("cell_type") != "code":
        return False
    metadata = cell.get("metadata")
    tags = metadata.get("tags") if isinstance(metadata, dict) else None
    return isinstance(tags, list) and TAG in tags


def _text_of(cell: dict[str, Any]) -> str:
    source = cell.get("source", "")
    return "".join(map(str, source)) if isinstance(source, list) else str(source)
