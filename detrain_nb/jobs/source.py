"""What of a spec's source travels to the nodes of a job, and what its ranks run of it."""

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
_AGAIN = "was changed while it was sent: submit the job again"


@dataclass(frozen=True)
class SourceFile:
    """A file that travels. ``open`` gives it to read, and raises SpecError where it is not what it was any more."""

    name: str
    size: int
    sha256: str
    is_executable: bool
    open: Callable[[], IO[bytes]] = field(repr=False, compare=False)


@dataclass(frozen=True)
class GitSource:
    """A repository; ``token`` is the name of a variable of the environment here. ``how`` is that of a spec."""

    url: str
    ref: str
    folder: str
    token: str
    ssh_key: str
    how: str = "auto"


@dataclass
class ShippedSource:
    """What travels: ``files``, or a repository. ``program`` is what runs, in the folder that has them.

    ``commit`` is its ref, where that is one; else the first node that fetches says it, by its name ``said_by``, and the
    others have to find the same one. ``unreached`` is said by the first that does not reach the host: then none has to.
    It is shared by the threads that send it, which hold ``lock`` for what only one of them is to do.
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
        """The same where the same files travel; of a repository its commit. Empty where that is not known."""
        if self.commit or not self.files:
            return self.commit
        listed = sorted((file.name, file.sha256, file.is_executable) for file in self.files)
        return hashlib.sha256(repr(listed).encode()).hexdigest()

    def __str__(self) -> str:
        if self.git:
            ref = self.commit or self.git.ref or "its own branch"
            return f"{self.git.url} at {ref}" + (f", folder {self.git.folder}" if self.git.folder else "")
        return f"{len(self.files)} file{'s' if len(self.files) != 1 else ''}, {format_size(self.size_bytes)}"


def plan_source(spec: PipelineSpec) -> ShippedSource:
    """Find what of ``spec.source`` travels. The host of a repository is not asked.

    Raises: SpecError for what is missing, is too much, or holds keys; DetrainError for a store that does not answer.
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
    """Fetch a repository that is to be sent from here (bundle), as `fetch_here` does; any other source stays as it is.

    ``given`` may have its token, beside the environment of this process.
    """
    is_bundle = source.git is not None and source.git.how == "bundle"
    return fetch_here(source, {**os.environ, **(given or {})}) if is_bundle else source


def describe_token(git: GitSource) -> str:
    """Who gets the token of a repository; empty where it needs none."""
    if not git.token:
        return ""
    nodes = "" if git.how == "bundle" else "every node and to "
    return f"the value that {git.token} has here goes to {nodes}{parse_git_url(git.url).host}"


def read_token(git: GitSource, environment: Mapping[str, str]) -> str:
    """The token of a repository; empty where it needs none. Raises: SpecError where the variable is not set."""
    if not git.token:
        return ""
    if not (token := environment.get(git.token)):
        raise SpecError(f"source.git.token: {git.token} is not set here: set it to a token that may read {git.url}")
    return token.strip()


# ---- one script


def _one_script(name: str, data: bytes, spec: PipelineSpec) -> ShippedSource:
    """With the file of its schedule, which it reads by the same relative path."""
    files, schedule = [_of_bytes(_check(name), data)], spec.parallelism.schedule
    if schedule.endswith(".csv") and not schedule.startswith(("/", "~")):
        written = locate(Path(schedule)).read(limit_bytes=MOST_BYTES)
        files.append(_of_bytes(_check(os.path.normpath(schedule).replace(os.sep, "/")), written))
    return ShippedSource((name,), tuple(files))


# ---- a folder


def _with_entry(source: Source, files: list[SourceFile], kept: list[str], skipped: list[str]) -> ShippedSource:
    entry = _check(source.entry or "")
    if entry not in {file.name for file in files}:
        why = "it stays here, as it may hold keys" if entry in kept else f"it is not there, or left out by {OWN_FILE}"
        why = "it is a link out of the folder, or no file" if entry in skipped else why
        raise SpecError(f"source.entry {entry!r} does not travel with {source.path}: {why}")
    notices = []
    if kept:
        notices.append(
            f"these stay here, as they may hold keys: {_name_all(kept)}: "
            f"a line !NAME in {OWN_FILE} sends one that does not"
        )
    if skipped:
        notices.append(
            f"these do not travel, as they are links out of the folder or no files: {_name_all(skipped)}: "
            "copy there what the ranks need of them"
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
    """What was listed, and nothing that others have put in its place: it is read before any of it is sent."""
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
    """Each file is read here once: its digest is not known before."""
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
        raise SpecError(f"{top.name}: no such folder, or nothing is in it")
    return files, kept, []


def _slashes(name: str) -> Iterator[int]:
    return (index for index, char in enumerate(name) if char == "/")


# ---- a repository


def _of_git(source: Source, git: Git) -> ShippedSource:
    wanted = GitSource(git.url, git.ref or "", git.folder or "", git.token or "", git.ssh_key or "", git.how)
    commit = wanted.ref.lower() if _COMMIT.fullmatch(wanted.ref.lower()) else ""
    return ShippedSource((_check(source.entry or ""),), git=wanted, commit=commit)


def fetch_here(source: ShippedSource, environment: Mapping[str, str]) -> ShippedSource:
    """Fetch a repository, and have it travel as files; which commit is asked of its host, whatever nodes have said.

    Raises: SpecError where the token is not set or the entry is not in it, DetrainError.
    """
    wanted, (entry,) = source.git, source.program
    assert wanted is not None
    access = GitAccess(read_token(wanted, environment), wanted.ssh_key)
    limits = GitLimits(
        laid_out_bytes=_LIMIT_BYTES, files=_MOST_FILES, memory_bytes=2 << 30
    )  # those of a folder that is sent from here
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
    notices = [f"links that do not travel: {name_some(skipped)}"] if skipped else []
    if pointers:
        notices.append(tell_pointers(pointers))
    return ShippedSource((entry,), tuple(files), notices=tuple(notices), commit=parts[0].commit)


def tell_pointers(names: Sequence[str]) -> str:
    """What the ranks find in the place of files that git LFS has, and how they get those."""
    named = ", ".join(map(clean, names[:_MOST_NAMED])) + (" and others" if len(names) > _MOST_NAMED else "")
    return (
        f"git LFS has the contents of {named}: the ranks find a few lines that say where; to have them, clone the "
        "repository with git-lfs here and give the folder as source.path, or fetch them by a line of source.setup"
    )


def _gather(folder: Path) -> tuple[list[SourceFile], list[str]]:
    """All files below ``folder``; a link travels as the file that it leads to in there, as no other does.

    Raises: SpecError where it is too much so.
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
                    raise SpecError(f"the repository has more than {limit}, with what its links lead to: name a folder")
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
    """Keep a file by its digest here, until it is sent."""
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
