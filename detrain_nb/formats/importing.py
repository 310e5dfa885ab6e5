"""Files of other people as a spec, or as nodes: which kind one is, and what it says."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..documents import parse_content, read_text
from ..documents.content import check_size, put_place
from ..errors import SpecError
from ..storage import locate
from .accelerate_import import ACCELERATE_CONFIG
from .akash_import import AKASH
from .detrain_import import DETRAIN
from .hosts_import import HOSTFILE
from .hypha_import import HYPHA
from .imported import Foreign, Imported, Importer
from .lease_import import LEASE
from .ravnest_import import RAVNEST
from .script_import import COMMAND
from .ssh_config_import import SSH_CONFIG
from .torchtitan_import import TORCHTITAN

__all__ = ["IMPORTERS", "find_kind", "import_file", "import_text"]

IMPORTERS: Mapping[str, Importer] = {  # a file is of the first kind that says so
    "detrain": DETRAIN,
    "akash": AKASH,
    "lease": LEASE,
    "hypha": HYPHA,
    "torchtitan": TORCHTITAN,
    "ravnest": RAVNEST,
    "accelerate": ACCELERATE_CONFIG,
    "command": COMMAND,
    "ssh_config": SSH_CONFIG,
    "hostfile": HOSTFILE,
}


def import_file(where: str | os.PathLike[str], *, kind: str = "") -> Imported:
    """Read a file of another tool at a path or an fsspec URL; ``kind``: one of `IMPORTERS`, by default found out.

    Raises: SpecError with the place in the file.
    """
    location = locate(where)
    return import_text(read_text(location), name=location.name, kind=kind)


def import_text(text: str, *, name: str = "", kind: str = "") -> Imported:
    """Read the text of such a file; ``name`` is the file's, with which errors begin. Raises: SpecError."""
    try:
        check_size(text)
    except SpecError as exc:
        raise SpecError(put_place(name, str(exc))) from None
    if kind and kind not in IMPORTERS:
        raise SpecError(f"{kind!r} is no kind of file to import: give one of {', '.join(IMPORTERS)}")
    foreign = Foreign(text, name)
    found = kind or _find_kind(foreign)
    if not found:
        if foreign.suffix and foreign.document is None:
            parse_content(text, foreign.suffix, where=name)
        if isinstance(foreign.document, dict) and {"name", "source"} <= foreign.document.keys():
            raise SpecError(put_place(name, "is a spec already: open it as it is, as %pipeline plan FILE does"))
        raise SpecError(put_place(name, f"is of no kind that can be imported: {', '.join(IMPORTERS)}"))
    return IMPORTERS[found].read(foreign)


def find_kind(text: str, *, name: str = "") -> str:
    """Return which kind of file a text of that name is; empty where it is none that can be imported."""
    return _find_kind(Foreign(text, name))


def _find_kind(foreign: Foreign) -> str:
    return next((kind for kind, importer in IMPORTERS.items() if importer.is_one(foreign)), "")
