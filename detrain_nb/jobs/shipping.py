"""The source of a job, sent to a node: what is there already stays, and a repository is fetched there.

node/job/sources.py is the other end. What goes through a store (``s3://``, ``file://``) is put there once for all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping

from ..copying.json_lines import LINE_BYTES, FilesError, Talk, Untrue, as_size, clean
from ..copying.sender import Progress
from ..deploy.files import OnProgress
from ..node.job.sources import FORMAT
from ..storage import Location, locate
from .source import GitSource, ShippedSource, SourceFile, read_token

__all__ = ["ship"]

_CHUNK_BYTES = 1 << 18
_INDEX_BYTES = 8  # of a file, in a list
_REASON_CHARS = 300
_DIGITS = frozenset("0123456789abcdef")
_STORE_PREFIXES = ("AWS_", "FSSPEC_", "GOOGLE_", "AZURE_", "HF_")  # of variables that let a program into a store


def ship(
    talk: Talk,
    source: ShippedSource,
    *,
    node: str = "",
    storage: str | None = None,
    environment: Mapping[str, str] | None = None,
    on_progress: OnProgress | None = None,
) -> str:
    """Have a source on the node that ``talk`` leads to; returns its id there, which "prepare" names.

    It is empty for a repository where ``source.unreached`` says of a node, by its name ``node``, that it does not reach
    the host: what `fetch_here` makes of it is to be shipped instead.
    ``storage``: the URL of a folder that this machine can write and the nodes can read. ``environment`` are secrets:
    the token of a repository, and what lets a node into the store; a token may also stand in this process' own.
    ``on_progress`` is told the files that are sent, the bytes, and the bytes in all; what the store has counts as sent.
    It may run for several nodes at once. Raises: SpecError, DetrainError; FilesError with what the node says.
    """
    given = environment or {}
    if source.git is not None:
        return _ship_git(talk, source, source.git, {**os.environ, **given}, node)
    return _ship_files(talk, source, storage, given, Progress(on_progress))


def _ship_files(
    talk: Talk, source: ShippedSource, storage: str | None, given: Mapping[str, str], progress: Progress
) -> str:
    listed = [[file.name, file.size, file.sha256, file.is_executable] for file in source.files]
    text = json.dumps({"format": FORMAT, "files": listed}).encode()
    by_store: dict[str, object] = {}
    if storage:
        lets_in = {name: value for name, value in given.items() if name.startswith(_STORE_PREFIXES)}
        by_store = {"storage": storage, "environment": lets_in}
    talk.say("source", of="files", size=len(text), **by_store)
    talk.send(text)
    said = talk.hear("need", most_bytes=LINE_BYTES + _INDEX_BYTES * len(listed))
    wanted = _choose(source.files, said.get("indices"))
    progress.begin(sum(file.size for file in wanted))
    if storage:
        with source.lock:
            _put_into_store(talk, storage, wanted, progress)
        talk.say("stored")
    else:
        for file in wanted:
            _send(talk, file, progress)
    ready = talk.hear("ready").get("source")
    if ready != hashlib.sha256(text).hexdigest():
        raise Untrue("it has another source than was sent")
    return str(ready)


def _choose(files: tuple[SourceFile, ...], indices: object) -> list[SourceFile]:
    """What the node wants, of what it was told of. Raises: Untrue."""
    if not isinstance(indices, list) or len(indices) > len(files):
        raise Untrue("it does not say which files it wants")
    if any(as_size(index) >= len(files) for index in indices) or len(set(indices)) != len(indices):
        raise Untrue("it wants a file that does not travel")
    return [files[index] for index in indices]


def _send(talk: Talk, file: SourceFile, progress: Progress) -> None:
    with file.open() as opened:
        left = file.size
        while left and (data := opened.read(min(left, _CHUNK_BYTES))):
            talk.send(data)
            left -= len(data)
            progress.advance(len(data))
    if left:
        raise Untrue(f"{file.name} became shorter while it was sent: submit the job again")
    progress.end_file()


def _put_into_store(talk: Talk, storage: str, wanted: list[SourceFile], progress: Progress) -> None:
    """Put there what is not there yet."""
    folder = locate(storage)
    for file in wanted:
        _put(file, folder / file.sha256, progress)
        talk.tick()


def _put(file: SourceFile, there: Location, progress: Progress) -> None:
    """What was opened goes there, by a copy: whatever stands at its path by then does not."""
    before = progress.size
    if not there.exists():
        with tempfile.TemporaryDirectory(prefix="detrain-nb-") as folder:
            path = os.path.join(folder, "copy")
            with file.open() as opened, open(path, "wb") as copy:
                shutil.copyfileobj(opened, copy)
            there.put(path, on_progress=lambda done, _: progress.advance(before + done - progress.size))
    progress.advance(before + file.size - progress.size)
    progress.end_file()


def _ship_git(talk: Talk, source: ShippedSource, git: GitSource, environment: Mapping[str, str], node: str) -> str:
    """Each node finds out by itself which commit a branch is at: none of them chooses what the others run."""
    token = read_token(git, environment)
    if source.unreached:
        return ""
    talk.say("source", of="git", url=git.url, ref=git.ref, folder=git.folder, ssh_key=git.ssh_key, token=token)
    said = talk.hear("ready", "unreached")
    if said["type"] == "unreached":
        why = clean(said.get("text"))[:_REASON_CHARS]
        if git.how == "clone":
            raise FilesError(f'{why}; source.git.how = "auto" has it fetched where you are, and sent')
        source.unreached = f"{node}: {why}"
        return ""
    commit = _as_digits(said.get("commit"), (40, 64))
    with source.lock:
        if not source.commit:
            source.commit, source.said_by = commit, node
    if commit != source.commit:
        raise Untrue(_tell_apart(commit, source, git))
    return _as_digits(said.get("source"), (64,))


def _tell_apart(commit: str, source: ShippedSource, git: GitSource) -> str:
    if not source.said_by:
        return f"it has commit {commit[:12]}, and {source.commit[:12]} was asked for"
    return (
        f"{git.ref or 'its own branch'} is commit {commit[:12]} here, and {source.commit[:12]} on {source.said_by}: "
        "submit again if it has gone on meanwhile, or give the whole commit as source.git.ref"
    )


def _as_digits(said: object, lengths: tuple[int, ...]) -> str:
    if not isinstance(said, str) or len(said) not in lengths or not _DIGITS.issuperset(said):
        raise Untrue("what it says of the source is none")
    return said
