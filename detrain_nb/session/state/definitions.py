"""The imports and definitions of a cell: a rank can rerun them without the other ranks."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator

_DEFINING = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IPYTHON_LINE = re.compile(r"[ \t]*[%!]|[\w, \t]+=\s*[%!]|[^#]*\?[ \t]*$")
_SETTING_UP = re.compile(r"%(load_ext|reload_ext|autoreload|matplotlib|env|set_env)\b")
_FSTRING = re.compile(r"[fF][rR]?['\"]")
_AROUND_PYTHON = re.compile(r"%%(time|timeit|capture|prun)\b")
_MOST_DOTS = 1000  # in the name of a module: Python's parser takes time quadratic in their number
# Characters of a cell, which a node may have made up: a syntax tree takes about 500 times as much memory, and an
# f-string with many fields takes time quadratic in its length.
_MOST_CHARS, _MOST_FSTRING_CHARS = 1 << 18, 1 << 15


def definitions_of(code: str) -> str:
    """Return the imports and definitions of a cell's top level, on their original lines; empty when there are none.

    Included are IPython lines that later cells depend on (``%load_ext``), and a ``try`` around imports. Code in
    another language has none, and neither has code that is not searched: more than 256 K characters, or 32 K with
    f-strings.
    """
    code = code.replace("\r\n", "\n").replace("\r", "\n")  # as Python does before it counts lines
    parsed = _parse(code) if len(code) <= _MOST_CHARS else None
    if parsed is None:
        return ""
    lines = code.split("\n")
    encoded = [line.encode(errors="surrogatepass") for line in lines]  # columns count bytes
    kept: list[list[str]] = [[] for _ in lines]
    for node in parsed.body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        if isinstance(node, ast.Pass) and _SETTING_UP.match(lines[first - 1]):
            kept[first - 1].append(lines[first - 1])
        elif _defines(node):
            for number, text in _text_of(node, encoded, first):
                kept[number].append(text)
    return "\n".join(map("; ".join, kept)) if any(kept) else ""


def _parse(code: str) -> ast.Module | None:
    """Parse code with ``pass`` in place of IPython lines; None when it is not Python, or too costly to parse."""
    if code.lstrip().startswith("%%") and not _AROUND_PYTHON.match(code.lstrip()):
        return None
    if any("import" in line and line.count(".") > _MOST_DOTS for line in code.replace("\\\n", "").split("\n")):
        return None
    if len(code) > _MOST_FSTRING_CHARS and _FSTRING.search(code):
        return None
    with_passes = [
        f"{line[: len(line) - len(line.lstrip())]}pass" if _IPYTHON_LINE.match(line) else line
        for line in code.split("\n")
    ]
    for text in (code, "\n".join(with_passes)):
        try:
            with warnings.catch_warnings(action="ignore"):  # the ranks have shown these warnings
                return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None


def _defines(node: ast.stmt) -> bool:
    if isinstance(node, ast.Try):
        return all(isinstance(each, (ast.Import, ast.ImportFrom)) for each in node.body)
    return isinstance(node, _DEFINING)


def _text_of(node: ast.stmt, encoded: list[bytes], first: int) -> Iterator[tuple[int, str]]:
    """Yield the lines of a statement with their index in the cell, without other statements on the same line."""
    last = node.end_lineno or first
    for number in range(first, last + 1):
        start = node.col_offset if number == node.lineno else 0
        end = node.end_col_offset if number == last else None
        yield number - 1, encoded[number - 1][start:end].decode()
