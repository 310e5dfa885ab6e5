"""Notebook files: read without outputs, saved atomically, and their summary."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DetrainError, SpecError
from ..storage import replace_file

if TYPE_CHECKING:  # a second's import, which only `run` needs
    from nbformat import NotebookNode

__all__ = ["code_cells", "plain_text", "read_notebook", "save", "summary"]


def read_notebook(path: Path, *, is_any_kernel: bool) -> NotebookNode:
    """Read a notebook of any version, without its outputs. Raises: SpecError when it is invalid or not in Python."""
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)
    except OSError as exc:
        raise SpecError(f"{path}: {(exc.strerror or str(exc)).lower()}") from exc
    except ValueError as exc:
        raise SpecError(f"{path}: is not a notebook: it is not JSON") from exc
    if (
        not isinstance(found, dict)
        or not isinstance(found.get("nbformat"), int)
        or not {"cells", "worksheets"} & set(found)
    ):
        raise SpecError(f"{path}: is not a notebook: it has no nbformat or no cells")
    import nbformat

    with warnings.catch_warnings(action="ignore"):  # missing cell ids are supplied
        try:
            notebook: NotebookNode = nbformat.reads(text, as_version=4)  # type: ignore[no-untyped-call]
            nbformat.validate(notebook)
        except (nbformat.ValidationError, AttributeError, KeyError, TypeError, ValueError) as exc:
            raise SpecError(f"{path}: is not a valid notebook: {str(exc).splitlines()[0]}") from exc
    language = notebook.metadata.get("kernelspec", {}).get("language", "python")
    if language != "python" and not is_any_kernel:
        raise SpecError(f"{path}: is written in {language}: name its kernel with --kernel")
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    return notebook


def save(notebook: NotebookNode, output: Path, *, mode: int) -> None:
    """Save the executed notebook with ``mode``, that of its original: a private notebook keeps its outputs private.

    Raises: DetrainError when it cannot be written there; it names the temporary file that has the notebook instead.
    """
    import nbformat

    text = nbformat.writes(_joined_streams(notebook))  # type: ignore[no-untyped-call]
    text = text if text.endswith("\n") else f"{text}\n"
    try:
        replace_file(output, text, mode=mode)
    except OSError as exc:
        wrong = f"{output}: the executed notebook cannot be written: {exc.strerror}"
        raise DetrainError(f"{wrong}{_keep_elsewhere(text, output.stem)}") from exc


def _keep_elsewhere(text: str, stem: str) -> str:
    """Save the text to a temporary file, as the cells may have run for hours; return a clause that names it."""
    try:
        handle, path = tempfile.mkstemp(prefix=f"{stem[:100]}-", suffix=".ipynb")
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        return ""
    return f"; it was saved as {path} instead"


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """Return the code cells, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _joined_streams(notebook: NotebookNode) -> NotebookNode:
    """Join consecutive outputs of one stream, as Jupyter does: where they were split depends on timing."""
    for cell in code_cells(notebook):
        joined: list[NotebookNode] = []
        for output in cell.outputs:
            last = joined[-1] if joined else None
            if last and output.output_type == last.output_type == "stream" and output.name == last.name:
                last.text += output.text
            else:
                joined.append(output)
        cell.outputs = joined
    return notebook


def summary(notebook: NotebookNode) -> str:
    """Return the text of the outputs of cells tagged ``summary``."""
    cells = [cell for cell in code_cells(notebook) if "summary" in cell.metadata.get("tags", [])]
    outputs = [output for cell in cells for output in cell.outputs]
    texts = [output.text if output.output_type == "stream" else plain_text(output) for output in outputs]
    return "\n".join(text.rstrip("\n") for text in texts if text)


def plain_text(content: Any) -> str:
    """Return the ``text/plain`` form of an output; empty if it has none."""
    text: str = content.get("data", {}).get("text/plain", "")
    return text
