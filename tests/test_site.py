"""The documentation site: what `make docs` refuses in its pages, and what the pages must name."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from detrain_nb.magics.job_options import job_parser
from detrain_nb.magics.options import LineParser, Settings, session_parser
from detrain_nb.magics.pipeline import pipeline_parser
from IPython.core.magic import Magics

from detrain_nb import magics
from detrain_nb.spec import Finding

from .checks.site import find_faults, main

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PUBLIC = ("doctor", "errors", "formats", "jobs", "parallel", "pipelines", "spec", "training", "widgets")
MAPPED = {"widgets": "widgets"}  # top-level folders
_CLASS = re.compile(r"^ *class (\w+)\(([^)]*)\):", re.MULTILINE)

SOUND = """<html><head><link rel="stylesheet" href="site.css"><link rel="canonical" href="https://example.org/"></head>
<body><h1 id="top">One</h1><a href="two.html#b%20c">two</a> <a href="#top">top</a> <a href="https://example.org/">out</a>
<img src="data:image/png;base64,AA"><a href="folder/">folder</a></body></html>"""
PAGES = {"two.html": '<a name="b c"></a>', "site.css": "a { color: red }", "folder/index.html": ""}
FAULTS = {
    "a script": ('<script src="https://cdn.example.org/a.js"></script>', "loads https://cdn.example.org/a.js"),
    "a picture": ('<img src="//example.org/a.png">', "loads //example.org/a.png"),
    "a picture of another size": ('<img srcset="two.html 1x, http://a.org/b.png 2x">', "loads http://a.org/b.png"),
    "a style sheet": ('<link href="http://a.org/a.css" rel="stylesheet">', "loads http://a.org/a.css"),
    "a font in a style": (
        "<style>@font-face { src: url('https://a.org/f.woff') }</style>",
        "loads https://a.org/f.woff",
    ),
    "a background": ('<p style="background: url(https://a.org/b.png)"></p>', "loads https://a.org/b.png"),
    "a link to no page": ('<a href="three.html">three</a>', "three.html: there is no such file"),
    "a link to no anchor": ('<a href="two.html#d">two</a>', "two.html#d: there is no such anchor"),
    "a link to no anchor here": ('<a href="#bottom">bottom</a>', "#bottom: there is no such anchor"),
    "a picture that is not there": ('<img src="pictures/a.png">', "pictures/a.png: there is no such file"),
}


def _lay_out(folder: Path, html: str) -> Path:
    for name, text in {**PAGES, "index.html": html}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_sound_site_has_no_fault(tmp_path: Path) -> None:
    assert list(find_faults(_lay_out(tmp_path, SOUND))) == []
    assert main(tmp_path) == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_a_page_is_named_and_fails(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, words = FAULTS[fault]
    assert main(_lay_out(tmp_path, f"{SOUND}{html}")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("index.html: ")
    assert words in line


def test_font_from_the_network_in_a_style_sheet_is_named(tmp_path: Path) -> None:
    _lay_out(tmp_path, SOUND)
    (tmp_path / "site.css").write_text("@import 'https://a.org/b.css';", encoding="utf-8")
    assert list(find_faults(tmp_path)) == ["site.css: loads https://a.org/b.css from the network"]


def test_folder_without_pages_is_a_fault(tmp_path: Path) -> None:
    assert main(tmp_path) == 1


LINKS = {
    "a file with a page": ("docs/a.md", "[x](../SECURITY.md#trust)", "[x](security.md#trust)"),
    "a page beside it": ("docs/a.md", "[x](jobs.md)", "[x](jobs.md)"),
    "a page of the API": ("docs/api/a.md", "[x](../jobs.md)", "[x](../jobs.md)"),
    "a picture": ("SECURITY.md", "![x](docs/pictures/cell.png)", "![x](pictures/cell.png)"),
    "a file of an included page": ("sdl/README.md", "[x](tensor.py)", "[x](../sdl/tensor.py)"),
    "a page of an included page": ("sdl/README.md", "[x](../docs/jobs.md#a)", "[x](jobs.md#a)"),
    "a folder": ("docs/a.md", "see [x](../sdl/container).", "see x."),
    "code": ("docs/a.md", "`[x](../SECURITY.md)`", "`[x](../SECURITY.md)`"),
    "a block of code": ("docs/a.md", "```\n[x](../SECURITY.md)\n```", "```\n[x](../SECURITY.md)\n```"),
    "a file that is not there": ("docs/a.md", "[x](../gone.md)", "[x](../gone.md)"),
    "the web": ("docs/a.md", "[x](https://a.org/b.md)", "[x](https://a.org/b.md)"),
    "an anchor": ("docs/a.md", "[x](#b)", "[x](#b)"),
}


@pytest.mark.parametrize("case", LINKS)
def test_link_of_the_repository_becomes_one_of_the_site(case: str) -> None:
    file, text, expected = LINKS[case]
    assert _load("repository_links").rewrite_links(text, file, ROOT) == expected


def test_file_that_a_page_includes_is_there() -> None:
    for file, page in _load("repository_links").PAGES.items():
        assert (ROOT / file).is_file()
        if page != "index":
            assert f"{{include}} ../{file}\n" in (DOCS / f"{page}.md").read_text(encoding="utf-8")


DOCSTRINGS = {
    "a label": ("A.\n\nRaises: SpecError.", "A.\n\n**Raises:** SpecError.\n"),
    "a label behind a sentence": ("Do it. Raises: SpecError.", "Do it.\n\n**Raises:** SpecError.\n"),
    "labels one after the other": ("A.\nShapes: b.\nSource: c.", "A.\n\n**Shapes:** b.\n\n**Source:** c.\n"),
    "code": ("A.\n\njob = f(1)\njob.g()", "A.\n\n.. code-block:: python\n\n   job = f(1)\n   job.g()\n"),
    "a tree": ("A.\n\nB\n├── C", "A.\n\n.. code-block:: text\n\n   B\n   ├── C\n"),
    "prose": ("A.\n\nTrue, or None: it waits.\n\nranks", "A.\n\nTrue, or None: it waits.\n\nranks\n"),
}


@pytest.mark.parametrize("case", DOCSTRINGS)
def test_docstring_is_marked_up(case: str) -> None:
    text, expected = DOCSTRINGS[case]
    lines = text.split("\n")
    _load("docstrings")._mark_up(None, "function", "f", None, None, lines)
    assert "\n".join(lines) == expected


def test_dataclass_without_signature_lists_its_fields() -> None:
    docstrings, names, lines = _load("docstrings"), set[str](), ["A."]
    docstrings._note_no_signature(names, None, "class", "Finding", Finding, None, "()", None)
    docstrings._list_fields(names, None, "class", "Finding", Finding, None, lines)
    assert lines == ["A.", ".. code-block:: python", "", "   field: str", "   text: str", "   severity: Severity", ""]


def test_every_magic_and_command_has_a_heading_and_an_example() -> None:
    page = (DOCS / "magics.md").read_text(encoding="utf-8")
    assert list(_list_unexplained(page)) == []
    assert len(list(_list_magics())) > 40


@pytest.mark.parametrize("name", ["%%rank", "%pull", "%distributed replay", "%job fetch", "%pipeline import"])
def test_magic_that_is_taken_out_of_its_page_is_named(name: str) -> None:
    page = (DOCS / "magics.md").read_text(encoding="utf-8")
    assert list(_list_unexplained(page.replace(f"### `{name}`\n", "", 1))) == [f"{name}: no heading"]
    without_example = re.sub(rf"(### `{name}`\n.*?)```python\n.*?```\n", r"\1", page, count=1, flags=re.DOTALL)
    assert list(_list_unexplained(without_example)) == [f"{name}: no example"]


def test_every_setting_has_a_row() -> None:
    page = (DOCS / "magics.md").read_text(encoding="utf-8")
    defaults = {f.name: f.default for f in fields(Settings)}
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", page, flags=re.MULTILINE))
    assert rows == {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in defaults.items()}


def _list_unexplained(page: str) -> Iterator[str]:
    """Yield each magic and command without its own heading in ``page``, or without an example below it."""
    sections = dict(re.findall(r"^### `([^`]+)`\n(.*?)(?=^##|\Z)", page, flags=re.DOTALL | re.MULTILINE))
    for name in _list_magics():
        if name not in sections:
            yield f"{name}: no heading"
        elif not re.search(rf"^```python\n(?:.*\n)*?{name}\b", sections[name], flags=re.MULTILINE):
            yield f"{name}: no example"


def _list_magics() -> Iterator[str]:
    """Yield the registered magics and their commands; a magic with commands is documented by these."""
    parsers = {"%distributed": session_parser, "%job": job_parser, "%pipeline": pipeline_parser}
    for registered in Magics.__subclasses__():
        if registered.__module__.startswith(magics.__name__):
            yield from (f"%%{name}" for name in registered.magics["cell"])
            for name in (f"%{name}" for name in registered.magics["line"]):
                yield from (
                    (f"{name} {command}" for command in _list_commands(parsers[name]())) if name in parsers else [name]
                )


def _list_commands(parser: LineParser) -> list[str]:
    assert parser._subparsers is not None
    return list(parser._subparsers._group_actions[0].choices or ())


def test_every_exception_has_an_entry() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    assert list(_list_without_entry(page)) == []
    assert {"DetrainError", "RankLost", "HostKeyError", "Damaged"} <= _list_exceptions()


@pytest.mark.parametrize("name", ["RankLost", "Damaged"])
def test_exception_whose_entry_is_taken_out_is_named(name: str) -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    assert list(_list_without_entry(page.replace(f"### {name}\n", ""))) == [f"{name}: no heading"]
    without_advice = re.sub(rf"(### {name}\n.*?)- \*\*Do\*\*.*?(?=\n###)", r"\1", page, count=1, flags=re.DOTALL)
    assert list(_list_without_entry(without_advice)) == [f"{name}: nothing says what to do"]


@pytest.mark.parametrize("module", ["", *PUBLIC])
def test_every_public_name_is_in_the_api(module: str) -> None:
    page = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "api").glob("*.md")))
    name = f"detrain_nb.{module}".rstrip(".")
    if f".. automodule:: {name}\n" in page:  # documented by its __all__
        return
    shown = set(re.findall(rf"^\.\. (?:auto|py:)\w+:: {name}\.(\w+)(?:\(\))?$", page, flags=re.MULTILINE))
    public = {each for each in _read_all(module) if not each.startswith("__")}
    assert shown & public == public


def _read_all(module: str) -> list[str]:
    """Return ``__all__`` of a module without importing it."""
    path = ROOT / MAPPED.get(module, f"detrain_nb/{module}")
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    found = re.search(r"^__all__ = (\[[^\]]*\])", text, flags=re.MULTILINE)
    assert found is not None
    names: list[str] = ast.literal_eval(found[1])
    return names


def _list_without_entry(page: str) -> Iterator[str]:
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", page, flags=re.DOTALL | re.MULTILINE))
    for name in sorted(_list_exceptions()):
        if name not in sections:
            yield f"{name}: no heading"
        elif name != "DetrainError" and not re.search(r"^- \*\*Do\*\*: \S", sections[name], flags=re.MULTILINE):
            yield f"{name}: nothing says what to do"
    yield from (f"{name}: there is no such class" for name in sorted(sections.keys() - _list_exceptions()))


@cache
def _list_exceptions() -> frozenset[str]:
    """Return every public subclass of DetrainError in the package, by name."""
    bases: dict[str, set[str]] = {}
    for folder in ("detrain_nb", "magics", "widgets"):
        for path in (ROOT / folder).rglob("*.py"):
            for name, of in _CLASS.findall(path.read_text(encoding="utf-8")):
                bases.setdefault(name, set()).update(re.split(r"\W+", of))
    found = {"DetrainError"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return frozenset(name for name in found if not name.startswith("_"))


def _load(name: str) -> ModuleType:
    """Load an extension of the site without Sphinx."""
    spec = importlib.util.spec_from_file_location(f"docs_ext_{name}", DOCS / "_ext" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(module.__name__, module)
    spec.loader.exec_module(module)
    return module
