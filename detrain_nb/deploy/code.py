"""Code sent to a node, so that torch is all that must be installed there: our own code and IPython, each as one zip.

A zip with the same contents is the same byte for byte, so a node recognises by its digest what it already has.
"""

from __future__ import annotations

import hashlib
import io
import stat
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePath

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from ..launch import RENDEZVOUS_HANDLERS

__all__ = ["ON_NODE", "CodeArchive", "ipython_code", "own_code", "pack_files"]

# The rooms that run on a node, as in docs/design.md; some do not exist yet.
ON_NODE = (
    "errors",
    "text",
    "wire",
    "values",
    "plan",
    "launch",
    "agents",
    "locks",
    "guarded",
    "at_exit",
    "storage",
    "metrics",
    "copying",
    "node",
    "parallel",
    "training",
    "wide_area",
)

_NOT_SENT = {"psutil"}  # useless without its compiled part, which is platform-specific; IPython works without psutil
_COMPILED = {".so", ".pyd", ".dll", ".dylib", ".pyc"}  # wcwidth has a compiled part too, and works without it
_NO_CODE = {"__pycache__", "tests"}
# Stubs of third-party libraries, most of jedi's size: without stubs, jedi reads the libraries themselves.
_STUBS = ("jedi/third_party/typeshed/stubs/", "jedi/third_party/django-stubs/")
_OF_METADATA = {"METADATA", "entry_points.txt"}
_LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip can hold


@dataclass(frozen=True)
class CodeArchive:
    """Zip to unpack into a folder of ``sys.path``; ``digest`` is the first 32 digits of the SHA-256 of ``data``."""

    digest: str
    data: bytes = field(repr=False)

    @classmethod
    def of(cls, files: Mapping[str, bytes]) -> CodeArchive:
        """Pack ``files``, a mapping from relative POSIX path to contents."""
        data = pack_files(files)
        return cls(hashlib.sha256(data).hexdigest()[:32], data)


@cache
def own_code() -> CodeArchive:
    """Pack the rooms of this installation that run on a node, with metadata that marks them as installed."""
    root = Path(__file__).parent.parent
    paths = [root / "__init__.py"]
    for room in ON_NODE:
        paths += [root / f"{room}.py", *(root / room).rglob("*.py")]
    files = {path.relative_to(root.parent).as_posix(): path.read_bytes() for path in paths if path.exists()}
    return CodeArchive.of({**files, **_write_own_metadata()})


@lru_cache(maxsize=4)  # few, as an untrusted host may report a new Python each time, and each entry takes 4 MB
def ipython_code(python_version: tuple[int, int]) -> CodeArchive | None:
    """Pack the pure-Python part of this installation's IPython and of its requirements on Linux with that Python.

    Returns None when IPython cannot run there: it or a requirement does not support that Python, or is missing here.
    """
    distributions = _collect("ipython", python_version)
    files: dict[str, bytes] = {}
    for found in distributions:
        sources = _read_files(found)
        if not any(name.endswith(".py") for name in sources):
            return None  # an editable installation, or a distribution's package without a list of its files
        files |= sources
    return CodeArchive.of(files) if files else None


def pack_files(files: Mapping[str, bytes], *, executable: Collection[str] = (), private: Collection[str] = ()) -> bytes:
    """Pack ``files``, a mapping from relative POSIX path to contents, into a reproducible zip.

    The zip records modes: 0o755 for ``executable`` files, 0o644 for others; of those, ``private`` files get the owner's
    bits alone.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, _LONG_AGO)
            info.create_system = 3  # Unix, even on Windows: it defines how the mode is read
            mode = 0o755 if name in executable else 0o644
            info.external_attr = (stat.S_IFREG | (mode & 0o700 if name in private else mode)) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, files[name])
    return buffer.getvalue()


def _write_own_metadata() -> dict[str, bytes]:
    """Return the metadata that pip would write for us: plain torchrun finds the rendezvous by its entry point."""
    try:
        version = distribution("detrain_nb").version
    except PackageNotFoundError:  # a checkout on sys.path that is not installed
        version = "0"
    handlers = [f"{backend} = {handler}" for backend, handler in RENDEZVOUS_HANDLERS.items()]
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: detrain_nb\nVersion: {version}\n",
        "entry_points.txt": "\n".join(["[torchrun.handlers]", *handlers, ""]),
    }
    return {f"detrain_nb-{version}.dist-info/{name}": text.encode() for name, text in texts.items()}


def _collect(name: str, python_version: tuple[int, int]) -> list[Distribution]:
    """List the installed distribution ``name`` and its requirements on a node; empty when one is missing."""
    environment = _describe_node(python_version)
    found: dict[str, Distribution] = {}
    wanted = [name]
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in found or name in _NOT_SENT:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            return []
        versions = found[name].metadata.get_all("Requires-Python", [])
        if not SpecifierSet(",".join(versions)).contains(environment["python_full_version"]):
            return []
        requirements = map(Requirement, found[name].requires or [])
        wanted += [each.name for each in requirements if each.marker is None or each.marker.evaluate(environment)]
    return list(found.values())


def _describe_node(python_version: tuple[int, int]) -> dict[str, str]:
    """Return the marker environment of a node; ``extra`` is empty: requirements of extras are not sent."""
    version = f"{python_version[0]}.{python_version[1]}"
    full_version = f"{version}.99"  # the patch number is unknown: assume a recent one
    return {
        **{name: str(value) for name, value in default_environment().items()},
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "implementation_version": full_version,
        "python_version": version,
        "python_full_version": full_version,
        "extra": "",
    }


def _read_files(found: Distribution) -> dict[str, bytes]:
    """Return the files of a distribution that are sent, by their path in site-packages."""
    paths = {file.as_posix(): Path(str(file.locate())) for file in found.files or [] if _travels(file)}
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}


def _travels(file: PurePath) -> bool:
    parts = file.parts
    if file.is_absolute() or ".." in parts:  # commands and manual pages
        return False
    if parts[0].endswith(".dist-info"):
        return file.name in _OF_METADATA or "LICENSE" in file.name.upper() or "licenses" in parts
    is_code = file.suffix not in _COMPILED and not _NO_CODE.intersection(parts)
    return is_code and not file.as_posix().startswith(_STUBS)
