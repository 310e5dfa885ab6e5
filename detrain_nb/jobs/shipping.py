"""Source of a job, sent to a node: only files that it lacks are sent, and a repository is fetched there.

node/job/sources.py is the other end. Through a store (``s3://``, ``file://``), files are uploaded once for all nodes.
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
_INDEX_BYTES = 8  # for each file, in the list of those that a node needs
_REASON_CHARS = 300
_DIGITS = frozenset("0123456789abcdef")
_STORE_PREFIXES = ("AWS_", "FSSPEC_", "GOOGLE_", "AZURE_", "HF_")  # of variables with the credentials of a store


def ship(
    talk: Talk,
    source: ShippedSource,
    *,
    node: str = "",
    storage: str | None = None,
    environment: Mapping[str, str] | None = None,
    on_progress: OnProgress | None = None,
) -> str:
    """Put a source on the node of ``talk``; return its id there, for "prepare".

    The id is empty if a node does not reach the host of a repository: ``source.unreached`` then names that node, as
    its ``node``, and the reason; ship the result of `fetch_here` instead.

    ``storage``: the URL of a folder that this machine can write and the nodes can read. ``environment``: secrets,
    namely the token of a repository and the credentials of the store; a token may also be in the environment of this
    process. ``on_progress`` gets the files sent, the bytes sent, and the total bytes; files that the store already has
    count as sent. Several threads may call it for several nodes.
    Raises: SpecError, DetrainError; FilesError with the reason that the node gives.
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
        raise Untrue("its source differs from what was sent")
    return str(ready)


def _choose(files: tuple[SourceFile, ...], indices: object) -> list[SourceFile]:
    """Return the listed files that the node needs. Raises: Untrue."""
    if not isinstance(indices, list) or len(indices) > len(files):
        raise Untrue("it sent no valid list of the files it needs")
    if any(as_size(index) >= len(files) for index in indices) or len(set(indices)) != len(indices):
        raise Untrue("it asked for a file that is not in the source, or asked twice")
    return [files[index] for index in indices]


def _send(talk: Talk, file: SourceFile, progress: Progress) -> None:
    with file.open() as opened:
        left = file.size
        while left and (data := opened.read(min(left, _CHUNK_BYTES))):
            talk.send(data)
            left -= len(data)
            progress.advance(len(data))
    if left:
        raise Untrue(f"{file.name} shrank while it was being sent: submit the job again")
    progress.end_file()


def _put_into_store(talk: Talk, storage: str, wanted: list[SourceFile], progress: Progress) -> None:
    """Upload the files that the store lacks."""
    folder = locate(storage)
    for file in wanted:
        _put(file, folder / file.sha256, progress)
        talk.tick()


def _put(file: SourceFile, there: Location, progress: Progress) -> None:
    """Upload a copy of the opened file, which was checked; the file at its path may have changed by now."""
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
    """Have a node fetch the repository; each resolves the branch itself, so none chooses what the others run."""
    token = read_token(git, environment)
    if source.unreached:
        return ""
    talk.say("source", of="git", url=git.url, ref=git.ref, folder=git.folder, ssh_key=git.ssh_key, token=token)
    said = talk.hear("ready", "unreached")
    if said["type"] == "unreached":
        why = clean(said.get("text"))[:_REASON_CHARS]
        if git.how == "clone":
            raise FilesError(f'{why}; source.git.how = "auto" fetches it where you submit, and sends it')
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
        return f"it fetched commit {commit[:12]}, but {source.commit[:12]} was requested"
    return (
        f"{git.ref or 'the default branch'} is commit {commit[:12]} on this node, but {source.commit[:12]} "
        f"on {source.said_by}: submit again if the branch has moved, or set source.git.ref to a full commit"
    )


def _as_digits(said: object, lengths: tuple[int, ...]) -> str:
    if not isinstance(said, str) or len(said) not in lengths or not _DIGITS.issuperset(said):
        raise Untrue("it sent no valid commit or id of the source")
    return said
