"""Links between files of the repository, as links of the site.

The Markdown files link to each other, and to code, by relative paths: this works on a code host. On the site a link to
a file that has a page leads to the page, a link to any other file is a download, and of a link to a folder only the
text is left.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

# Files outside of docs/ that a page includes: from the root of the repository -> docname.
PAGES = {
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "README.md": "index",
    "SECURITY.md": "security",
    "benchmarks/README.md": "benchmarks",
    "examples/README.md": "examples",
    "sdl/README.md": "sdl",
    "sdl/container/README.md": "container",
}
_DOCS = "docs"
_LINK = re.compile(r"(?P<bang>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()\s]+)\)")
_FENCE = re.compile(r"^\s*(?:```|~~~)")
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", _on_source)
    app.connect("include-read", _on_include)
    return {"parallel_read_safe": True, "version": "1"}


def _on_source(app: Any, docname: str, source: list[str]) -> None:
    source[0] = rewrite_links(source[0], f"{_DOCS}/{docname}.md", Path(app.srcdir).parent)


def _on_include(app: Any, path: Path, docname: str, source: list[str]) -> None:
    root = Path(app.srcdir).parent
    source[0] = rewrite_links(source[0], os.path.relpath(Path(app.srcdir) / path, root), root)


def rewrite_links(text: str, file: str, root: Path) -> str:
    """Rewrite relative links of ``file``, a path from ``root``, for a page that stands in docs/."""
    lines, is_code = [], False
    for line in text.split("\n"):
        is_fence = bool(_FENCE.match(line))
        lines.append(line if is_code or is_fence or line.startswith("    ") else _rewrite_line(line, file, root))
        is_code ^= is_fence
    return "\n".join(lines)


def _rewrite_line(line: str, file: str, root: Path) -> str:
    code = [found.span() for found in _CODE.finditer(line)]

    def replace(found: re.Match[str]) -> str:
        if any(start <= found.start() and found.end() <= end for start, end in code):
            return found[0]
        return _rewrite(found, file, root)

    return _LINK.sub(replace, line)


def _rewrite(found: re.Match[str], file: str, root: Path) -> str:
    target, hash_, anchor = found["target"].partition("#")
    if not target or re.match(r"[a-z]+:", target):
        return found[0]
    folder = PurePosixPath(file).parent
    path = os.path.normpath(folder / target)
    if not (root / path).exists():
        return found[0]  # the strict build says that it leads nowhere
    if (root / path).is_dir():
        return found["text"]
    page = f"{PAGES[path]}.md" if path in PAGES else os.path.relpath(path, _page_folder(file))
    return f"{found['bang']}[{found['text']}]({page}{hash_}{anchor})"


def _page_folder(file: str) -> str:
    """The folder of the page that shows a file."""
    return os.path.dirname(file) if file.startswith(f"{_DOCS}/") else _DOCS
