"""The cells of a notebook that a job runs: those with the tag ``job``, one after the other, as one script."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

from ..errors import SpecError
from ..storage import locate, named_errors

TAG = "job"
_MAGIC = re.compile(r"[%!?]|\w+ *= *[%!]|.*\?$")  # at the begin of a line, or its value, or help of IPython
MOST_BYTES = 50_000_000  # of a script, or a notebook, which holds its outputs


def read_notebook_script(path: str) -> str:
    """Return the script of the notebook at a path or URL. Raises: SpecError."""
    location = locate(path)
    with named_errors(location.name, "read", kind_of=lambda exc: SpecError):
        data = location.read(limit_bytes=MOST_BYTES)
    try:
        return script_of_notebook(data.decode("utf-8-sig"), where=location.name)
    except UnicodeDecodeError:
        raise SpecError(f"{location.name}: is no notebook: it is not UTF-8") from None


def script_of_notebook(text: str, *, where: str) -> str:
    """Return the script that the tagged cells of a saved notebook make. Raises: SpecError, which names the cell."""
    parts: list[str] = []
    for number, source in _tagged_cells(text, where):
        check_python(source, where=f"{where}, cell {number}")
        parts.append(f"# Cell {number}\n{source.rstrip()}\n")
    if not parts:
        raise SpecError(f"{where}: no code cell has the tag {TAG!r}: give the cells of the job that tag, and save")
    script = "\n\n".join(parts)
    check_python(script, where=f"{where}, its cells together")  # a second one may not begin with __future__
    return script


def check_python(source: str, *, where: str) -> None:
    """Raises: SpecError for what is not Python, with its line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, "script", "exec", dont_inherit=True)  # more than its grammar: return, break, await
    except SyntaxError as exc:
        line = (source.splitlines() or [""])[min(exc.lineno or 1, len(source.splitlines()) or 1) - 1].strip()
        why = "a script has no magics" if _MAGIC.match(line) else exc.msg
        raise SpecError(f"{where}, line {exc.lineno or 1}: is not Python: {why}") from None
    except (ValueError, RecursionError, MemoryError) as exc:  # a NUL; what is nested too deeply
        raise SpecError(f"{where}: is not Python: {exc or 'nested too deeply'}") from None


def _tagged_cells(text: str, where: str) -> list[tuple[int, str]]:
    if len(text) > MOST_BYTES:
        raise SpecError(f"{where}: larger than {MOST_BYTES // 1_000_000} MB: clear its outputs, and save")
    try:
        notebook = json.loads(text)
    except (ValueError, RecursionError):
        raise SpecError(f"{where}: is no notebook: save it from JupyterLab") from None
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
