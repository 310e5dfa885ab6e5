"""Source of a spec: the files that are sent to the nodes of a job, and the program that its ranks run."""

from __future__ import annotations

import hashlib
import io
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ..copying.json_lines import FilesError, Untrue, check_name, clean
from ..copying.sender import open_regular
from ..deploy.folder import NEVER_TRAVELS, list_folder
from ..deploy.ignoring import OWN_FILE
from ..deploy.private import is_private, why_kept
from ..errors import DetrainError, SpecError
from ..node.job.blobs import PART, Blobs, remove_unused, sources_folder
from ..node.job.git_program import GitAccess, GitLimits
from ..node.job.git_source import fetch_parts, find_pointers, lay_out_part
from ..plan.git_urls import parse_git_url
from ..spec.notebook import MOST_BYTES, read_notebook_script
from ..storage import Location, locate, named_errors
from ..text import HERE, format_size, name_some
from .url_folder import open_folder, walk_files

if TYPE_CHECKING:
    from ..spec import PipelineSpec
    from ..spec.source import Git, Source

__all__ = [
    "GitSource",
    "ShippedSource",
    "SourceFile",
    "describe_token",
    "fetch_bundle",
    "fetch_here",
    "plan_source",
    "read_token",
    "tell_pointers",
]

_LIMIT_BYTES = 500_000_000
_MOST_FILES = 50_000
_MOST_NAMED = 3
_CHUNK_BYTES = 1 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_AGAIN = "was changed while it was being sent: submit the job again"


@dataclass(frozen=True)
class SourceFile:
    """A file to send. ``open`` returns it for reading, and raises SpecError when it has changed since it was listed."""

    name: str
    size: int
    sha256: str
    is_executable: bool
    open: Callable[[], IO[bytes]] = field(repr=False, compare=False)


@dataclass(frozen=True)
class GitSource:
    """A repository; ``token`` is the name of an environment variable of this process. ``how`` is as in a spec."""

    url: str
    ref: str
    folder: str
    token: str
    ssh_key: str
    how: str = "auto"


@dataclass
class ShippedSource:
    """Source to send: ``files``, or a repository. ``program`` runs in the folder with it.

    ``commit`` is the ref, if that is a commit; else the first node that fetches reports it, ``said_by`` is that node's
    name, and all others must find the same commit. The first node that does not reach the host sets ``unreached``:
    then no further node is asked to fetch. Threads that send the source share it, and hold ``lock`` for steps that only
    one of them may take.
    """

    program: tuple[str, ...]
    files: tuple[SourceFile, ...] = ()
    git: GitSource | None = None
    notices: tuple[str, ...] = ()
    commit: str = ""
    said_by: str = ""
    unreached: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """Digest that is equal for equal files; for a repository its commit. Empty if unknown."""
        if self.commit or not self.files:
            return self.commit
        listed = sorted((file.name, file.sha256, file.is_executable) for file in self.files)
        return hashlib.sha256(repr(listed).encode()).hexdigest()

    def __str__(self) -> str:
        if self.git:
            ref = self.commit or self.git.ref or "its default branch"
            return f"{self.git.url} at {ref}" + (f", folder {self.git.folder}" if self.git.folder else "")
        return f"{len(self.files)} file{'s' if len(self.files) != 1 else ''}, {format_size(self.size_bytes)}"


def plan_source(spec: PipelineSpec) -> ShippedSource:
    """Find what to send of ``spec.source``. The host of a repository is not asked.

    Raises: SpecError for what is missing, too large, or holds keys; DetrainError for a store that does not answer.
    """
    source = spec.source
    if source.module is not None:
        return ShippedSource(("-m", source.module))
    if source.script is not None:
        data = locate(Path(source.script)).read(limit_bytes=MOST_BYTES)
        return _one_script(os.path.basename(source.script), data, spec)
    if source.script_text is not None:
        return _one_script("script.py", source.script_text.encode(), spec)
    if source.notebook is not None:
        name = os.path.splitext(os.path.basename(source.notebook))[0]
        return _one_script(f"{name}.py", read_notebook_script(source.notebook).encode(), spec)
    if source.git is not None:
        return _of_git(source, source.git)
    assert source.path is not None
    found = _of_url(source.path) if "://" in source.path else _of_folder(source.path)
    return _with_entry(source, *found)


def fetch_bundle(source: ShippedSource, given: Mapping[str, str] | None = None) -> ShippedSource:
    """Fetch a repository that is sent from here (bundle), as `fetch_here` does; return any other source unchanged.

    ``given`` may have its token, as may the environment of this process.
    """
    is_bundle = source.git is not None and source.git.how == "bundle"
    return fetch_here(source, {**os.environ, **(given or {})}) if is_bundle else source


def describe_token(git: GitSource) -> str:
    """Describe who gets the token of a repository; empty if it needs none."""
    if not git.token:
        return ""
    nodes = "" if git.how == "bundle" else "every node and to "
    return f"the value of {git.token} here is sent to {nodes}{parse_git_url(git.url).host}"


def read_token(git: GitSource, environment: Mapping[str, str]) -> str:
    """Return the token of a repository; empty if it needs none. Raises: SpecError when its variable is not set."""
    if not git.token:
        return ""
    if not (token := environment.get(git.token)):
        raise SpecError(f"source.git.token: {git.token} is not set here: set it to a token that may read {git.url}")
    return token.strip()


# ---- one script


def _one_script(name: str, data: bytes, spec: PipelineSpec) -> ShippedSource:
    """Return a script as source, with the file of its schedule, if any, which it reads by the same relative path."""
    files, schedule = [_of_bytes(_check(name), data)], spec.parallelism.schedule
    if schedule.endswith(".csv") and not schedule.startswith(("/", "~")):
        written = locate(Path(schedule)).read(limit_bytes=MOST_BYTES)
        files.append(_of_bytes(_check(os.path.normpath(schedule).replace(os.sep, "/")), written))
    return ShippedSource((name,), tuple(files))


# ---- a folder


def _with_entry(source: Source, files: list[SourceFile], kept: list[str], skipped: list[str]) -> ShippedSource:
    entry = _check(source.entry or "")
    if entry not in {file.name for file in files}:
        why = "it may hold keys" if entry in kept else f"it does not exist, or {OWN_FILE} leaves it out"
        why = "it is a link out of the folder, or not a file" if entry in skipped else why
        raise SpecError(f"source.entry {entry!r} is not sent with {source.path}: {why}")
    notices = []
    if kept:
        notices.append(
            f"not sent, as they may hold keys: {_name_all(kept)}: "
            f"to send a file that holds none, add a line !NAME to {OWN_FILE}"
        )
    if skipped:
        notices.append(
            f"not sent, as they are links out of the folder or not files: {_name_all(skipped)}: "
            "copy into the folder what the ranks need of them"
        )
    return ShippedSource((entry,), tuple(files), notices=tuple(notices))


def _name_all(names: Sequence[str]) -> str:
    return name_some([clean(name)[:80] for name in names], most=10)


def _of_folder(path: str) -> tuple[list[SourceFile], list[str], list[str]]:
    folder = os.path.abspath(os.path.expanduser(path))
    if os.path.isdir(folder) and (reason := why_kept(folder)):
        raise SpecError(reason)
    top, kept, skipped = os.path.realpath(folder), list[str](), list[str]()
    listed = list_folder(
        folder,
        top=top,
        limit_bytes=_LIMIT_BYTES,
        most_entries=_MOST_FILES,
        kept=kept,
        skipped=skipped,
        way_out="",
    )

    def opener(name: str, size: int, sha256: str) -> Callable[[], IO[bytes]]:
        return lambda: _open_unchanged(os.path.join(top, name), name, size, sha256)

    return (
        [
            SourceFile(name, state.size, state.sha256, state.is_executable, opener(name, state.size, state.sha256))
            for name, state in listed.items()
        ],
        kept,
        sorted(skipped),
    )


def _open_unchanged(path: str, name: str, size: int, sha256: str) -> IO[bytes]:
    """Open a file as it was listed, not a replacement: its digest is checked before any of it is sent."""
    try:
        file = open_regular(os.path.realpath(path))
    except OSError as exc:
        raise SpecError(f"{name} {_AGAIN}") from exc
    try:
        digest = hashlib.sha256()
        while data := file.read(_CHUNK_BYTES):
            digest.update(data)
        if file.tell() != size or digest.hexdigest() != sha256:
            raise SpecError(f"{name} {_AGAIN}")
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _of_url(url: str) -> tuple[list[SourceFile], list[str], list[str]]:
    """Read each file at a URL once, to learn its digest, and keep it here."""
    blobs, files, kept = _blobs_here(), list[SourceFile](), list[str]()
    left = _LIMIT_BYTES
    with open_folder(url) as top, named_errors(top.name, "listed"):
        for path in walk_files(top, most_folders=_MOST_FILES):
            name = _check(path[len(top.path.rstrip("/")) + 1 :])
            if not NEVER_TRAVELS.isdisjoint(name.lower().split("/")):
                continue
            if any(is_private(name[:end]) for end in (*_slashes(name), len(name))):
                kept.append(name)
                continue
            if len(files) >= _MOST_FILES:
                raise SpecError(f"{top.name} has more than {_MOST_FILES} files: name a smaller folder")
            data = Location(f"{top.name.rstrip('/')}/{clean(name)}", path, top.files).read(limit_bytes=left)
            left -= len(data)
            files.append(_in_blobs(blobs, name, io.BytesIO(data), is_executable=False))
    if not files and not kept:
        raise SpecError(f"{top.name}: no such folder, or it is empty")
    return files, kept, []


def _slashes(name: str) -> Iterator[int]:
    return (index for index, char in enumerate(name) if char == "/")


# ---- a repository


def _of_git(source: Source, git: Git) -> ShippedSource:
    wanted = GitSource(git.url, git.ref or "", git.folder or "", git.token or "", git.ssh_key or "", git.how)
    commit = wanted.ref.lower() if _COMMIT.fullmatch(wanted.ref.lower()) else ""
    return ShippedSource((_check(source.entry or ""),), git=wanted, commit=commit)


def fetch_here(source: ShippedSource, environment: Mapping[str, str]) -> ShippedSource:
    """Fetch a repository here, to send it as files; its host names the commit, whatever nodes have reported.

    Raises: SpecError when the token is not set, or the entry is not in the repository; DetrainError.
    """
    wanted, (entry,) = source.git, source.program
    assert wanted is not None
    access = GitAccess(read_token(wanted, environment), wanted.ssh_key)
    limits = GitLimits(
        laid_out_bytes=_LIMIT_BYTES, files=_MOST_FILES, memory_bytes=2 << 30
    )  # as for a folder that is sent from here
    try:
        cache = sources_folder()
        parts = fetch_parts(cache, wanted.url, wanted.ref, folder=wanted.folder, access=access, limits=limits)
        (cache / "bundles").mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=PART, dir=cache / "bundles") as folder:
            for part in parts:
                lay_out_part(cache, part, Path(folder))
            pointers = find_pointers(cache, parts, Path(folder))
            files, skipped = _gather(Path(folder))
    except FilesError as exc:
        raise DetrainError(f"{HERE}: {exc}") from exc
    if entry not in {file.name for file in files}:
        raise SpecError(f"source.entry {entry!r} is not in {wanted.url} at commit {parts[0].commit[:12]}")
    notices = [f"links that are not sent: {name_some(skipped)}"] if skipped else []
    if pointers:
        notices.append(tell_pointers(pointers))
    return ShippedSource((entry,), tuple(files), notices=tuple(notices), commit=parts[0].commit)


def tell_pointers(names: Sequence[str]) -> str:
    """Describe what ranks find in place of files that git LFS has, and how to get those files."""
    named = ", ".join(map(clean, names[:_MOST_NAMED])) + (" and others" if len(names) > _MOST_NAMED else "")
    return (
        f"git LFS has the contents of {named}: the ranks find only pointers to them; to get the contents, clone the "
        "repository with git-lfs here and give the folder as source.path, or fetch them in a line of source.setup"
    )


def _gather(folder: Path) -> tuple[list[SourceFile], list[str]]:
    """List all files below ``folder``; a link counts as the file it leads to, or is skipped if that is outside.

    Raises: SpecError when they are too large, with the targets of links.
    """
    blobs, files, skipped = _blobs_here(), list[SourceFile](), list[str]()
    left = _LIMIT_BYTES
    top = os.path.join(os.path.realpath(folder), "")
    for above, folders, names in os.walk(top):
        skipped += [os.path.relpath(os.path.join(above, name), top) for name in folders if _is_link(above, name)]
        for name in sorted(names):
            path = os.path.realpath(os.path.join(above, name))
            shown = os.path.relpath(os.path.join(above, name), top).replace(os.sep, "/")
            if not path.startswith(top) or not os.path.isfile(path):
                skipped.append(shown)
                continue
            with open_regular(path) as file:
                left -= os.fstat(file.fileno()).st_size
                if left < 0:
                    limit = format_size(_LIMIT_BYTES)
                    raise SpecError(f"the repository has more than {limit}, including link targets: name a folder")
                is_executable = bool(os.fstat(file.fileno()).st_mode & 0o100)
                files.append(_in_blobs(blobs, _check(shown), file, is_executable=is_executable))
    return sorted(files, key=lambda file: file.name), [clean(name) for name in skipped]


def _is_link(folder: str, name: str) -> bool:
    return os.path.islink(os.path.join(folder, name))


# ---- files


def _check(name: str) -> str:
    try:
        return check_name(name)
    except Untrue as exc:
        raise SpecError(str(exc)) from exc


def _of_bytes(name: str, data: bytes) -> SourceFile:
    return SourceFile(name, len(data), hashlib.sha256(data).hexdigest(), False, lambda: io.BytesIO(data))


def _blobs_here() -> Blobs:
    try:
        cache = sources_folder()
        remove_unused(cache)
        return Blobs(cache / "blobs")
    except FilesError as exc:
        raise DetrainError(f"{HERE}: {exc}") from exc


def _in_blobs(blobs: Blobs, name: str, file: IO[bytes], *, is_executable: bool) -> SourceFile:
    """Keep a file here by its digest, until it is sent."""
    digest = hashlib.sha256()
    while data := file.read(_CHUNK_BYTES):
        digest.update(data)
    size, sha256 = file.tell(), digest.hexdigest()
    file.seek(0)
    try:
        if not blobs.has(sha256, size):
            blobs.add(sha256, size, iter(lambda: file.read(_CHUNK_BYTES), b""))
    except FilesError as exc:
        raise DetrainError(f"{HERE}: {exc}") from exc
    path = str(blobs.path(sha256))
    return SourceFile(name, size, sha256, is_executable, lambda: _open_unchanged(path, name, size, sha256))
