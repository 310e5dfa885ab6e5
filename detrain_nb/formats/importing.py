"""Files of other people as a spec, or as nodes: which kind one is, and what it says."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping

from ..documents import read_text
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

__all__ = ["IMPORTERS", "explain_no_host", "explain_no_spec", "find_kind", "import_file", "import_text"]

_NAMES_SCRIPT = re.compile(r"\.(?:sh|bash|sbatch|slurm)$", re.IGNORECASE)
_BEGINS_SCRIPT = re.compile(r"#!.*sh\b")
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
_OF_NODES = ("lease", "ravnest", "ssh_config", "hostfile")  # no more stands in them


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
        if foreign.suffix and foreign.document is None and text.strip():
            _ = foreign.content  # which says what is wrong there
        raise SpecError(put_place(name, _say_what_it_is(foreign)))
    return IMPORTERS[found].read(foreign)


def _say_what_it_is(foreign: Foreign) -> str:
    """Say why it is not imported: of what is ours, how it is read."""
    known = foreign.document if isinstance(foreign.document, dict) else {}
    if {"name", "source"} <= known.keys():
        return "is a spec already: open it as it is, as %pipeline plan FILE does"
    if "nodes" in known:
        return "is a nodes file already: give it as it is, as --nodes FILE"
    if not foreign.text.strip():
        return "is empty"
    if foreign.name.lower().endswith(".ipynb"):
        return "is a notebook, and none is run to be read: make a spec with it as source.notebook"
    if foreign.name.lower().endswith(".py"):
        return "is a program, and none is run to be read: make a spec with it as source.script"
    if _NAMES_SCRIPT.search(foreign.name) or _BEGINS_SCRIPT.match(foreign.text):
        return "is a script that starts neither torchrun nor accelerate launch: no other is imported"
    return f"is of no kind that can be imported: {', '.join(IMPORTERS)}"


def find_kind(text: str, *, name: str = "") -> str:
    """Return which kind of file a text of that name is; empty where it is none that can be imported."""
    return _find_kind(Foreign(text, name))


def explain_no_spec(where: str | os.PathLike[str]) -> str:
    """Say of a file that is no spec, but one of another tool, how it is imported; empty of any other."""
    with contextlib.suppress(SpecError, OSError):
        location = locate(where)
        foreign = Foreign(read_text(location), location.name)
        is_program = location.name.lower().endswith((".py", ".ipynb"))
        is_one = "name" not in foreign.document if isinstance(foreign.document, dict) else not foreign.suffix
        if is_one and not is_program and (kind := _find_kind(foreign)):
            to, target = ("one of it first", "SPEC")
            if kind in _OF_NODES:
                to, target = ("its nodes those of a spec, by --nodes nodes.toml", "nodes.toml")
            said = f"is no spec, but of the kind {kind}: make {to}: import {location.name} -o {target}"
            return put_place(location.name, said)
    return ""


def explain_no_host(host: str) -> str:
    """Say of a host that a file here has its name and lists hosts, how that is imported; else empty."""
    with contextlib.suppress(SpecError):
        if os.path.isfile(host) and (kind := find_kind(read_text(locate(host)), name=host)) in (
            "hostfile",
            "ssh_config",
        ):
            return f"{host} is a file, too, of the kind {kind}: for its hosts, import {host} -o nodes.toml first"
    return ""


def _find_kind(foreign: Foreign) -> str:
    return next((kind for kind, importer in IMPORTERS.items() if importer.is_one(foreign)), "")
