"""How pages look: Python with magics in colours, and of a picture the one for a light or a dark page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexer import bygroups, inherit
from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword, Text, Whitespace
from sphinx.transforms import SphinxTransform

_LIGHT, _DARK = "-light.png", "-dark.png"


def setup(app: Any) -> dict[str, Any]:
    app.add_lexer("python", CellLexer)
    app.add_transform(BothPictures)
    return {"parallel_read_safe": True, "version": "1"}


class CellLexer(PythonLexer):
    """Python whose lines may be magics: ``%%distributed -n 2  # a comment``."""

    name = "Python with magics"
    aliases = ("cell",)
    tokens = {  # noqa: RUF012 (as Pygments reads it)
        "root": [
            (r"^(%%?[a-z_]+)([^#\n]*)(#[^\n]*)?(\n)", bygroups(Keyword, Text, Comment, Whitespace)),
            inherit,
        ]
    }


class BothPictures(SphinxTransform):
    """A picture for light pages that has another one for dark pages, ``x-light.png`` and ``x-dark.png``, is both."""

    default_priority = 200

    def apply(self, **options: Any) -> None:
        for image in list(self.document.findall(nodes.image)):
            uri = image["uri"]
            if not uri.endswith(_LIGHT):
                continue
            dark = f"{uri.removesuffix(_LIGHT)}{_DARK}"
            if (Path(self.env.doc2path(self.env.docname)).parent / dark).exists():
                image["classes"].append("only-light")
                other = image.copy()
                other["uri"], other["classes"] = dark, ["only-dark"]
                image.parent.insert(image.parent.index(image) + 1, other)
