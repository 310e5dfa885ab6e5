"""A kind of file that can be imported, of these tests alone: a host a line, and what no node can hold."""

from __future__ import annotations

from typing import Any, cast

import pytest

from detrain_nb.errors import SpecError
from detrain_nb.formats import IMPORTERS, Imported
from detrain_nb.formats.imported import Foreign, Importer
from detrain_nb.spec import Node


def _read(foreign: Foreign) -> Imported:
    nodes, left_out = [], list[str]()
    for number, line in enumerate(foreign.text.splitlines()[1:], 2):
        host, *more = line.split()
        try:
            nodes.append(Node(host=host))
        except SpecError as exc:
            raise SpecError(f"{foreign.name}: line {number}: {exc}") from None
        left_out += [f"{word}: no field of a node" for word in more]
    return Imported("hosts", nodes=tuple(nodes), left_out=tuple(left_out))


@pytest.fixture
def host_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that begin with ``= hosts`` are of the kind hosts."""
    kind = Importer(lambda foreign: foreign.text.startswith("= hosts"), _read, "a host a line")
    monkeypatch.setitem(cast(dict[str, Any], IMPORTERS), "hosts", kind)
