"""Docstrings as they are written here, made readable as pages.

A label such as ``Raises:`` begins a paragraph in bold; Python, and a tree of lines, that stand in a docstring as they
are become blocks of code; a default that was made by a factory is three dots in a signature. A dataclass on a page
without a signature, as users do not construct it, has its fields as a block of code.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from functools import partial
from typing import Any

_LABELS = ("Collective", "Raises", "Returns", "Shapes", "Source", "Units")
_LINE = re.compile(rf"^(?P<label>{'|'.join(_LABELS)}): (?P<rest>.*)$")
_WITHIN = re.compile(r"^(?P<before>\S.*\.)\s+(?P<label>Collective|Raises|Returns): (?P<rest>.*)$")
_CODE = (ast.Assign, ast.AugAssign, ast.For, ast.Import, ast.ImportFrom, ast.With)
_TREE = "├──"


def setup(app: Any) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", _mark_up)
    app.connect("autodoc-process-signature", _shorten_signature)
    without_signature: set[str] = set()  # names of classes: a signature is processed before its docstring
    app.connect("autodoc-process-signature", partial(_note_no_signature, without_signature))
    app.connect("autodoc-process-docstring", partial(_list_fields, without_signature))
    return {"parallel_read_safe": True, "version": "1"}


def _mark_up(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Sphinx takes what ``lines`` has afterwards."""
    text = "\n".join(lines)
    parts = re.split(r"\n{2,}", text.strip("\n"))
    lines[:] = "\n\n".join(_mark_part(part, is_first=number == 0) for number, part in enumerate(parts)).split("\n")
    lines.append("")


def _mark_part(part: str, *, is_first: bool) -> str:
    if _TREE in part:
        return _as_block(part, "text")
    if not is_first and _is_code(part):
        return _as_block(part, "python")
    marked: list[str] = []
    for line in part.split("\n"):
        if found := _LINE.match(line):
            marked += ["", f"**{found['label']}:** {found['rest']}"]
        elif found := _WITHIN.match(line):
            marked += [found["before"], "", f"**{found['label']}:** {found['rest']}"]
        else:
            marked.append(line)
    return "\n".join(marked).lstrip("\n")


def _is_code(part: str) -> bool:
    """Prose is no Python, or at most a name; a call alone follows code, as in ``job.attach()``."""
    try:
        statements = ast.parse(part).body
    except SyntaxError:
        return False
    calls = [each for each in statements if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)]
    return bool(calls) or any(isinstance(each, _CODE) for each in statements)


def _as_block(part: str, language: str) -> str:
    return f".. code-block:: {language}\n\n" + "\n".join(f"   {line}" for line in part.split("\n"))


def _shorten_signature(
    app: Any, what: str, name: str, obj: object, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    return signature and signature.replace("<factory>", "..."), returned


def _note_no_signature(
    without_signature: set[str],
    app: Any,
    what: str,
    name: str,
    obj: object,
    options: Any,
    signature: str | None,
    returned: str | None,
) -> None:
    if what == "class" and signature == "()":
        without_signature.add(name)


def _list_fields(
    without_signature: set[str], app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    if what == "class" and name in without_signature and dataclasses.is_dataclass(obj):
        shown = [f"{each.name}: {each.type}" for each in dataclasses.fields(obj) if not each.name.startswith("_")]
        lines += [*_as_block("\n".join(shown), "python").split("\n"), ""]
