"""Files of other tools as a spec, or as nodes: the kind of a file is detected, and its importer reads it."""

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
IMPORTERS: Mapping[str, Importer] = {  # a file is of the first kind that recognizes it
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
_OF_NODES = ("lease", "ravnest", "ssh_config", "hostfile")  # files with nodes only


def import_file(where: str | os.PathLike[str], *, kind: str = "") -> Imported:
    """Import a file of another tool from a path or an fsspec URL; ``kind`` is one of `IMPORTERS`, detected by default.

    Raises: SpecError with the place in the file, or when its kind is not recognized.
    """
    location = locate(where)
    return import_text(read_text(location), name=location.name, kind=kind)


def import_text(text: str, *, name: str = "", kind: str = "") -> Imported:
    """Import the text of such a file; ``name``, that of the file, begins each error. Raises: SpecError."""
    try:
        check_size(text)
    except SpecError as exc:
        raise SpecError(put_place(name, str(exc))) from None
    if kind and kind not in IMPORTERS:
        raise SpecError(f"{kind!r} is not a kind of file to import: give one of {', '.join(IMPORTERS)}")
    foreign = Foreign(text, name)
    found = kind or _find_kind(foreign)
    if not found:
        if foreign.suffix and foreign.document is None and text.strip():
            _ = foreign.content  # raises the error of its syntax
        raise SpecError(put_place(name, _say_what_it_is(foreign)))
    return IMPORTERS[found].read(foreign)


def _say_what_it_is(foreign: Foreign) -> str:
    """Return why a file is not imported, and how to use it if it is one of ours."""
    known = foreign.document if isinstance(foreign.document, dict) else {}
    if {"name", "source"} <= known.keys():
        return "is already a spec: open it as it is: %pipeline plan FILE"
    if "nodes" in known:
        return "is already a nodes file: give it as it is: --nodes FILE"
    if not foreign.text.strip():
        return "is empty"
    if foreign.name.lower().endswith(".ipynb"):
        return "is a notebook, which an import does not run: make a spec with it as source.notebook"
    if foreign.name.lower().endswith(".py"):
        return "is a program, which an import does not run: make a spec with it as source.script"
    if _NAMES_SCRIPT.search(foreign.name) or _BEGINS_SCRIPT.match(foreign.text):
        return "is a script that starts neither torchrun nor accelerate launch: other scripts cannot be imported"
    return f"is not of a kind that can be imported: {', '.join(IMPORTERS)}"


def find_kind(text: str, *, name: str = "") -> str:
    """Return the kind of a file by its text and name; empty if it cannot be imported."""
    return _find_kind(Foreign(text, name))


def explain_no_spec(where: str | os.PathLike[str]) -> str:
    """Return how to import a file that is not a spec but one of another tool; empty for any other file."""
    with contextlib.suppress(SpecError, OSError):
        location = locate(where)
        foreign = Foreign(read_text(location), location.name)
        is_program = location.name.lower().endswith((".py", ".ipynb"))
        is_one = "name" not in foreign.document if isinstance(foreign.document, dict) else not foreign.suffix
        if is_one and not is_program and (kind := _find_kind(foreign)):
            to, target = ("it a spec first", "SPEC")
            if kind in _OF_NODES:
                to, target = ("a nodes file of it, for --nodes nodes.toml", "nodes.toml")
            said = f"is not a spec, but of the kind {kind}: make {to}: import {location.name} -o {target}"
            return put_place(location.name, said)
    return ""


def explain_no_host(host: str) -> str:
    """Return how to import a host list whose file name is given as a ``host``; empty if it is not one."""
    with contextlib.suppress(SpecError):
        if os.path.isfile(host) and (kind := find_kind(read_text(locate(host)), name=host)) in (
            "hostfile",
            "ssh_config",
        ):
            return f"{host} is also a file of the kind {kind}: to use its hosts, first import {host} -o nodes.toml"
    return ""


def _find_kind(foreign: Foreign) -> str:
    return next((kind for kind, importer in IMPORTERS.items() if importer.is_one(foreign)), "")
