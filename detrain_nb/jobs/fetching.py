"""Fetching of artifacts from all nodes of a job: only below the given folder, only what matches, only whole files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ..copying.json_lines import FilesError, Talk, Untrue, as_size, reason_of
from ..copying.letter_case import Names, ignores_case
from ..deploy.files import OnProgress, Stop, label, on_every
from ..deploy.jobs import open_job_talk
from ..errors import DetrainError, JobError, SpecError
from ..node.job.terms import ENDED, FILES_OF_A_LINE, UNKNOWN, fits
from ..text import format_size, name_some, printable
from ..transport import Transport
from .asking import on_all, try_on_all
from .job_status import JobStatus, describe_state
from .places import HerePlace, make_place
from .report_checks import STATUS_BYTES, NodeFile, add_different, read_files, read_made, read_number

__all__ = ["Fetched", "MadeFile", "Place", "choose_places", "fetch", "list_made", "require_success"]

OnSize = Callable[[int], object]
_CHUNK_BYTES = 1 << 18
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_GLOB = re.compile(r"[*?[]")
_MOST_LEFT_OUT = 10_000_000
_MOST_FOLDERS, _MOST_NAME_CHARS = 10_000, 1 << 24  # of a node's files
_LIST_LIMIT_S = 30.0
_DIGEST_CHARS = 16  # in the name of a partly fetched file


@dataclass(frozen=True)
class Fetched:
    """Result of a fetch: ``files`` by their local paths; ``num_there`` of them were already here, with this content.

    ``replaced``: those that overwrote a file with other content.

    ``num_left_out`` more match but stay on the nodes: links, special or unreadable files, names that are not text.
    """

    folder: str
    files: tuple[str, ...]
    size_bytes: int
    num_there: int = 0
    num_left_out: int = 0
    silent: tuple[str, ...] = ()  # nodes from which nothing was fetched
    replaced: tuple[str, ...] = ()

    def __str__(self) -> str:
        there = f", {self.num_there} already here" if self.num_there else ""
        count = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        left_out, shown = _tell_left_out(self.num_left_out), printable(name_some(self.files))
        if self.replaced:
            left_out = f"; replaced {printable(name_some(self.replaced))}{left_out}"
        if self.silent:
            left_out += f"; nothing fetched from {name_some(self.silent)}"
        return f"{count}, {format_size(self.size_bytes)}{there}: {shown} in {self.folder}{left_out}"


@dataclass(frozen=True)
class MadeFile:
    """Artifact of a job, as its node reports it; ``written_at`` in seconds since the epoch, by the node's clock."""

    node: str
    name: str
    size_bytes: int
    written_at: float


@dataclass(frozen=True)
class Place:
    """A file of a node and its local path."""

    file: NodeFile
    path: str  # relative to the local folder


@dataclass(frozen=True)
class _Here:
    """Local folder ``root`` of a fetch, and which files were already there, kept or replaced."""

    root: Path
    before: dict[str, str]
    replace: bool
    there: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)

    def lacks(self, each: Place, place: HerePlace) -> bool:
        """Return whether a file must be fetched; if not, note that it is there, or that a differing one is kept."""
        found, full = place.digest(), str(self.root / each.path)
        if found == each.file.digest:
            self.there.append(each.path)
            self.before[full] = found
        elif found is not None and not self.replace and found != self.before.get(full):
            self.kept.append(each.path)
        else:
            self.replaced.extend([each.path] if found is not None else [])
            return True
        return False


def require_success(status: JobStatus) -> None:
    """Raise JobError when a job is not over, or did not succeed."""
    if status.state == ENDED and status.exit_code == 0:
        return
    is_going = not status.is_over and status.state != UNKNOWN
    how = f"is {status.state}" if is_going else f"did not succeed: {describe_state(status.state, status.exit_code)}"
    raise JobError(f"job {status.id} {how}", advice="{} fetches what exists", typed="--anyway")


def fetch(
    nodes: Sequence[Transport],
    job: str,
    patterns: Sequence[str],
    folder: str | os.PathLike[str],
    *,
    asked: Sequence[int] | None = None,
    fetched_before: dict[str, str] | None = None,
    replace: bool = False,
    on_progress: OnProgress | None = None,
    cancel: Stop | None = None,
) -> Fetched:
    """Fetch the artifacts that match one of ``patterns`` into ``folder``, which is created if missing.

    A file with equal content on several nodes is fetched once; files of one name with different content go into a
    folder with their node's name. A fetch that was cut off resumes: bytes that arrived are not sent again.

    ``nodes`` are all nodes of the job, ``asked`` the positions of those to fetch from. ``fetched_before`` maps the
    full path of each file that earlier fetches of the job wrote to its SHA-256, and gets those that this one writes:
    a local file that differs from both the artifact and that SHA-256 is kept, unless ``replace``.
    Raises: JobError when nothing matches, or, after everything else was fetched, when a file was kept; DetrainError.
    """
    if _URL.match(os.fspath(folder)):
        raise SpecError("the target is a URL: fetch into a folder of this machine")
    numbers = list(range(len(nodes)) if asked is None else asked)
    root = Path(os.path.abspath(os.path.expanduser(folder)))
    names = [label(node) for node in nodes]
    nodes = [nodes[number] for number in numbers]
    answers = on_all(nodes, lambda index: _list_files(nodes[index], numbers[index], job, patterns, cancel))
    listed, num_left_out = [files for files, _ in answers], sum(count for _, count in answers)
    wanted = choose_places([names[number] for number in numbers], listed, reserved=names)
    paths = sorted(each.path for of_node in wanted for each in of_node)
    if not paths:
        raise _nothing_matches(job, patterns, num_left_out)
    total = sum(each.file.size for of_node in wanted for each in of_node)
    above = _check_room(root, total)
    _check_case(root, above, paths)
    here = _Here(root, {} if fetched_before is None else fetched_before, replace)

    def act(node: Transport, stop: Stop, tell: OnProgress) -> None:
        index = nodes.index(node)
        _fetch_of_node(node, numbers[index], job, wanted[index], here, stop=stop, tell=tell)

    on_every(nodes, act, on_progress, cancel.check if cancel else None)
    if here.kept:
        raise _differs(job, here)
    replaced = tuple(sorted(here.replaced))
    return Fetched(str(root), tuple(paths), total, len(here.there), num_left_out, replaced=replaced)


def _nothing_matches(job: str, patterns: Sequence[str], num_left_out: int) -> JobError:
    which = printable(name_some(patterns))
    names = [each for each in patterns if not each.endswith("/") and not _GLOB.search(each)]
    hint = f"; for a whole folder write {printable(names[0])}/" if names else ""
    return JobError(f"job {job} has no artifact that matches {which}{hint}{_tell_left_out(num_left_out)}")


def _differs(job: str, here: _Here) -> JobError:
    which = printable(name_some(sorted(here.kept)))
    verbs = "differs and was" if len(here.kept) == 1 else "differ and were"
    told = f"job {job}: {which} in {here.root} {verbs} kept; everything else was fetched"
    return JobError(told, advice="{} overwrites what differs", typed="--replace")


def _tell_left_out(count: int) -> str:
    if not count:
        return ""
    which = "link, special file or odd name" if count == 1 else "links, special files or odd names"
    return f"; left out {count} {which}"


def _list_files(
    node: Transport, index: int, job: str, patterns: Sequence[str], cancel: Stop | None
) -> tuple[list[NodeFile], int]:
    """List the matching files of a node, and count those it leaves out."""
    with open_job_talk(node, stop=cancel) as talk:
        talk.say("artifacts", id=job, node_rank=index, patterns=list(patterns))
        files: dict[str, NodeFile] = {}
        folders: set[str] = set()
        num_chars, has_more = 0, True
        while has_more:
            said = talk.hear("files")
            more, has_more = read_files(said), said.get("more") is True
            if has_more and len(more) < FILES_OF_A_LINE:
                raise Untrue(f"it announced more files after a message with only {len(more)}")
            for file in more:
                if file.name.rpartition("/")[0] not in folders:  # else its parents are known, too
                    folders |= _folders_of(file.name)
                num_chars += len(file.name)
                if len(folders) > _MOST_FOLDERS or num_chars > _MOST_NAME_CHARS:
                    most = f"{_MOST_FOLDERS:,} folders, or {_MOST_NAME_CHARS:,} characters of names"
                    raise FilesError(f"the artifacts have more than {most}: narrow the pattern")
            add_different(files, more)
    unasked = next((name for name in files if not any(fits(name, each) for each in patterns)), None)
    if unasked is not None:
        raise DetrainError(f"{label(node)}: it listed {printable(unasked)}, which matches no requested pattern")
    return [*files.values()], read_number(said.get("left_out", 0), most=_MOST_LEFT_OUT)


def list_made(
    nodes: Sequence[Transport], job: str, patterns: Sequence[str], *, first: Sequence[str] = ()
) -> list[MadeFile]:
    """List the artifacts that match one of ``patterns``, without reading them: at most 500 of each node that answers.

    Those that match one of ``first`` are listed before all others. Raises: DetrainError when no node answers.
    """

    def ask(index: int) -> list[MadeFile]:
        with open_job_talk(nodes[index]) as talk:
            talk.say("artifacts", id=job, node_rank=index, patterns=list(patterns), first=list(first), digests=False)
            found = read_made(talk.hear("made", most_bytes=STATUS_BYTES))
        wanted = [each for each in found if any(fits(each[0], pattern) for pattern in patterns)]
        return [MadeFile(label(nodes[index]), *each) for each in wanted]

    answers = try_on_all(nodes, ask, limit_s=_LIST_LIMIT_S)
    failures = [each for each in answers if isinstance(each, DetrainError)]
    if len(failures) == len(answers):
        raise DetrainError("\n".join(dict.fromkeys(map(str, failures))))
    return [file for each in answers if not isinstance(each, DetrainError) for file in each]


def choose_places(
    names: Sequence[str], listed: Sequence[Sequence[NodeFile]], *, reserved: Sequence[str] = ()
) -> list[list[Place]]:
    """Choose the local path of each file: below the node's name if nodes have files of one name that differ.

    With several nodes, counting ``reserved`` names, a file in a folder called like a node also goes below the name of
    its own node: it must not pass for a file of the other node.
    """
    taken_names = {name.casefold() for name in (*names, *reserved)}
    digests: dict[str, set[str]] = {}
    folders: set[str] = set()
    for files in listed:
        for file in files:
            digests.setdefault(file.name, set()).add(file.digest)
            folders |= _folders_of(file.name)
    taken: set[str] = set()
    chosen: list[list[Place]] = []
    for name, files in zip(names, listed):
        of_node: list[Place] = []
        for file in files:
            is_of_node = len(taken_names) > 1 and file.name.partition("/")[0].casefold() in taken_names
            is_disputed = is_of_node or len(digests[file.name]) > 1 or file.name in folders
            path = f"{name}/{file.name}" if is_disputed else file.name
            if path not in taken:
                taken.add(path)
                of_node.append(Place(file, path))
        chosen.append(of_node)
    return chosen


def _folders_of(name: str) -> set[str]:
    parts = name.split("/")
    return {"/".join(parts[:depth]) for depth in range(1, len(parts))}


def _check_room(root: Path, total: int) -> Path:
    """Return the nearest existing folder: ``root`` or one above it.

    Raises: SpecError when the files do not fit on the disk, or a file is where a folder should be.
    """
    above = next(folder for folder in (root, *root.parents) if folder.exists())
    if not above.is_dir():
        raise SpecError(f"{above} is not a folder: fetch into another one")
    free = shutil.disk_usage(above).free
    if total > free:
        raise SpecError(
            f"{format_size(total)} do not fit, {above} has {format_size(free)} free: fetch into another folder"
        )
    return above


def _check_case(root: Path, above: Path, paths: Sequence[str]) -> None:
    """Raise SpecError when two paths would be one file, since the file system of ``above`` ignores case."""
    names = Names(str(root))
    try:
        for path in paths:
            names.take(path)
    except FilesError as exc:
        with (
            contextlib.suppress(OSError),  # a folder that cannot be written: the fetch reports that next
            tempfile.TemporaryDirectory(prefix=".detrain_nb-", dir=above) as made,
        ):
            if ignores_case(made):
                raise SpecError(str(exc)) from exc


def _fetch_of_node(
    node: Transport,
    index: int,
    job: str,
    wanted: Sequence[Place],
    here: _Here,
    *,
    stop: Stop,
    tell: OnProgress,
) -> None:
    total, done = sum(each.file.size for each in wanted), 0
    if not wanted:
        return
    tell(0, 0, total)
    with open_job_talk(node, stop=stop) as talk:
        for number, each in enumerate(wanted, 1):
            stop.check()
            full = here.root / each.path
            with _explained(full), make_place(here.root, each.path) as place:
                if here.lacks(each, place):
                    before = done

                    def note(size: int, number: int = number, before: int = before) -> None:
                        stop.check()
                        tell(number - 1, before + size, total)

                    _fetch_file(talk, job, index, each.file, place, note)
                    here.before[str(full)] = each.file.digest
            done += each.file.size
            tell(number, done, total)


def _fetch_file(talk: Talk, job: str, index: int, file: NodeFile, place: HerePlace, note: OnSize) -> None:
    found = place.digest()
    part, opened, is_kept = place.open_part(file.digest[:_DIGEST_CHARS])
    try:
        with open(opened, "r+b") as written:
            digest = _fill(talk, job, index, file, written, note)
            if digest != file.digest:
                is_kept = False
                raise Untrue(f"{printable(file.name)}: its content does not match its SHA-256; fetch it again")
            if place.digest() not in (found, digest):
                raise FilesError(f"{printable(file.name)} was changed here during the fetch: fetch it again")
            if place.opened is not None:  # before closing the part unlocks it
                place.put(part)
        if place.opened is None:  # Windows cannot rename an open file
            place.put(part)
    except BaseException:
        if not is_kept:
            place.remove(part)
        raise


def _fill(talk: Talk, job: str, index: int, file: NodeFile, written: BinaryIO, note: OnSize) -> str:
    """Write the missing bytes of a file; return the SHA-256 of the whole file."""
    digest, have = hashlib.sha256(), 0
    if os.fstat(written.fileno()).st_size > file.size:
        written.truncate(0)
    while data := written.read(_CHUNK_BYTES):
        digest.update(data)
        have += len(data)
    talk.say("read", id=job, node_rank=index, name=file.name, offset=have)
    said = talk.hear("file")
    size = as_size(said.get("size"))
    if said.get("private") is True and os.name == "posix":  # on the node, no other user can read it
        os.fchmod(written.fileno(), 0o600)
    if have + size != file.size:
        raise Untrue(f"{printable(file.name)} changed on the node during the fetch: fetch it again")
    for data in talk.read(size):
        written.write(data)
        digest.update(data)
        have += len(data)
        note(have)
    written.flush()
    return digest.hexdigest()


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Name the local ``path`` in an OSError of the block, since the node is not at fault."""
    try:
        yield
    except OSError as exc:
        raise FilesError(f"{printable(str(path))}: {reason_of(exc)}") from exc
