"""A file of another tool, and what is imported from it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..documents import SUFFIXES, format_document, parse_content
from ..errors import SpecError
from ..spec import Node, PipelineSpec
from ..text import ShownAsText, printable

MOST_NODES = 10_000  # in one file
_PASSWORD = re.compile(r"://[^\s/'\"]*@")


@dataclass(frozen=True)
class Foreign:
    """A file: its text, of bounded size, and its name, which begins each error."""

    text: str
    name: str = ""

    @property
    def suffix(self) -> str:
        """The suffix of the name if it is one of a document, else empty."""
        return next((suffix for suffix in SUFFIXES if self.name.lower().endswith(suffix)), "")

    @property
    def stem(self) -> str:
        """The file name up to its first dot."""
        return self.name.replace("\\", "/").rpartition("/")[2].lstrip(".").partition(".")[0]

    @cached_property
    def document(self) -> Any:
        """The content of the document, or None if the text is not a document, as some kinds of files are not."""
        return None if isinstance(self._read, SpecError) else self._read

    @property
    def content(self) -> Any:
        """The content, parsed by the suffix, else as YAML or TOML. Raises: SpecError with the place."""
        if isinstance(self._read, SpecError):
            raise self._read
        return self._read

    @cached_property
    def _read(self) -> Any:
        """The content, or the error: cached, as a long document takes a second to parse."""
        try:
            return parse_content(self.text, self.suffix or ".yaml", where=self.name)
        except SpecError as exc:
            if not self.suffix:
                with contextlib.suppress(SpecError):
                    return parse_content(self.text, ".toml")
            return exc


@dataclass(frozen=True)
class Imported(ShownAsText):
    """What was imported: ``spec``, or only ``nodes``; and what was left out, each by its name, with the reason.

    ``kind`` is the kind of file that was recognized, one of ``IMPORTERS``. It prints as YAML.
    """

    kind: str
    spec: PipelineSpec | None = None
    nodes: tuple[Node, ...] = ()  # if the file has nothing else
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Clean ``left_out``, which quotes the file: no control characters, line breaks or passwords of URLs."""
        left_out = tuple(_PASSWORD.sub("://***@", printable(line)) for line in self.left_out)
        object.__setattr__(self, "left_out", left_out)

    def __str__(self) -> str:
        return format_document(self.to_dict(), ".yaml") + "".join(f"# left out: {line}\n" for line in self.left_out)

    def to_dict(self) -> dict[str, Any]:
        """Return the document of the spec, or of the nodes, as in a nodes file."""
        if self.spec is not None:
            return self.spec.to_dict()
        return {"nodes": [node.to_fields() for node in self.nodes]}


@dataclass(frozen=True)
class Importer:
    """One kind of file: how it is recognized and read."""

    is_one: Callable[[Foreign], bool]
    read: Callable[[Foreign], Imported]  # Raises: SpecError with the place in the file
    about: str
