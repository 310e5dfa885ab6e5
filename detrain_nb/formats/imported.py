"""A file of another tool, and what of it a spec can hold."""

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

MOST_NODES = 10_000  # that one file names
_PASSWORD = re.compile(r"://[^\s/'\"]*@")


@dataclass(frozen=True)
class Foreign:
    """What a file says: its text, of bounded size, and its name, with which errors begin."""

    text: str
    name: str = ""

    @property
    def suffix(self) -> str:
        """That of the name where it is one of a document; else empty."""
        return next((suffix for suffix in SUFFIXES if self.name.lower().endswith(suffix)), "")

    @property
    def stem(self) -> str:
        """Its name without what stands behind the first dot."""
        return self.name.replace("\\", "/").rpartition("/")[2].lstrip(".").partition(".")[0]

    @cached_property
    def document(self) -> Any:
        """What it holds; None where it can be read as no document: it may be of a kind that is none."""
        return None if isinstance(self._read, SpecError) else self._read

    @property
    def content(self) -> Any:
        """What the document holds, read by its suffix, else as YAML or as TOML. Raises: SpecError with the place."""
        if isinstance(self._read, SpecError):
            raise self._read
        return self._read

    @cached_property
    def _read(self) -> Any:
        """What it holds, or the fault: it takes a second to read a long one, so it is done once."""
        try:
            return parse_content(self.text, self.suffix or ".yaml", where=self.name)
        except SpecError as exc:
            if not self.suffix:
                with contextlib.suppress(SpecError):
                    return parse_content(self.text, ".toml")
            return exc


@dataclass(frozen=True)
class Imported(ShownAsText):
    """What was read: a pipeline, or nodes alone; and each thing that neither can hold, by its name, with the reason."""

    kind: str
    spec: PipelineSpec | None = None
    nodes: tuple[Node, ...] = ()  # where the file has nothing else
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Parts of the file stand there: none of them controls a terminal, begins a line of the document above, or is
        the password of a URL.
        """
        left_out = tuple(_PASSWORD.sub("://***@", printable(line)) for line in self.left_out)
        object.__setattr__(self, "left_out", left_out)

    def __str__(self) -> str:
        return format_document(self.to_dict(), ".yaml") + "".join(f"# left out: {line}\n" for line in self.left_out)

    def to_dict(self) -> dict[str, Any]:
        """Return the document of its spec, or of its nodes, as a nodes file has them."""
        if self.spec is not None:
            return self.spec.to_dict()
        return {"nodes": [node.to_fields() for node in self.nodes]}


@dataclass(frozen=True)
class Importer:
    """One kind of file: is it one, and what does it say?"""

    is_one: Callable[[Foreign], bool]
    read: Callable[[Foreign], Imported]  # Raises: SpecError with the place in the file
    about: str
