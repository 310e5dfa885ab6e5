"""Sources of jobs on a node: files by digest, or a commit of a git repository.

An order "source" transfers one into our cache; `lay_out` writes it to the job's folder. Its id is the digest of the
list of its files, or of its commits, so equal sources have equal ids on all nodes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

from ...copying.json_lines import Failed, FilesError, Talk, Untrue, as_size, check_name, clean
from ...copying.receiver import TreeWriter
from ...plan.names import VARIABLE
from .blobs import PART, Blobs, remove_unused, sources_folder, touch
from .git_program import GitAccess, GitLimits, GitUnreached
from .git_source import GitPart, fetch_parts, find_pointers, lay_out_part
from .stored_blobs import read_stored

__all__ = ["FORMAT", "LISTED_BYTES", "MOST_FILES", "handle_source", "lay_out"]

FORMAT = 1
MOST_FILES = 100_000
LISTED_BYTES = 1 << 25  # the list of all files
_ID = re.compile(r"[0-9a-f]{64}")
_TEXT_CHARS = 4096
_MOST_VARIABLES = 64
_Listed = list[tuple[str, int, str, bool]]  # name, size, digest, whether it can be executed


def handle_source(
    talk: Talk, order: dict[str, Any], *, cache: Path | None = None, limits: GitLimits | None = None
) -> None:
    """Serve the order "source"; the answer is "ready" with the id. Raises: FilesError, Failed, Untrue.

    If a repository's host cannot be reached from here, the answer is "unreached" with the reason.
    """
    kind = order.get("of")
    if kind not in ("files", "git"):
        raise Untrue(f"{clean(kind)[:40]!r} is not a kind of source: give files or git")
    text = _read_list(talk, order) if kind == "files" else b""
    cache = cache or sources_folder()
    if kind == "files":
        _take_files(talk, order, text, cache)
    else:
        _take_git(talk, order, cache, limits)
    remove_unused(cache, tick=talk.tick)


def lay_out(source: object, target: Path, talk: Talk | None = None, *, cache: Path | None = None) -> list[str]:
    """Write all files of a source into the folder ``target``, which is created; ``talk`` gets signs of progress.

    Returns some of the files that are pointers of git LFS, without their contents. Raises: FilesError.
    """
    tick = talk.tick if talk else _no_tick
    cache = cache or sources_folder()
    noted = _read_note(cache, source)
    if "parts" in noted:
        parts = list(map(GitPart.read, noted["parts"]))
        for part in parts:
            lay_out_part(cache, part, target, tick=tick)
        return find_pointers(cache, parts, target, tick=tick)
    blobs = Blobs(cache / "blobs")
    with TreeWriter(str(target)) as writer:
        for name, size, sha256, is_executable in _check_list(noted):
            tick()
            writer.add_file(name, size, 0o755 if is_executable else 0o644, blobs.read(sha256, size))
    return []


def _no_tick() -> None:
    """Do nothing: no notebook waits for progress."""


# ---- files by their digest


def _read_list(talk: Talk, order: dict[str, Any]) -> bytes:
    size = as_size(order.get("size"))
    if size > LISTED_BYTES:
        raise Untrue(f"the list of files has {size} bytes, more than {LISTED_BYTES}")
    return b"".join(talk.read(size))


def _take_files(talk: Talk, order: dict[str, Any], text: bytes, cache: Path) -> None:
    files = _check_list(_parse(text))
    blobs = Blobs(cache / "blobs")
    wanted: dict[str, int] = {}  # the first index of each file that is missing here
    seen: set[str] = set()
    for index, (_, length, sha256, _) in enumerate(files):
        talk.tick()
        if sha256 not in seen and not blobs.has(sha256, length):
            wanted[sha256] = index
        seen.add(sha256)
    where = order.get("storage")
    missing = [files[index] for index in wanted.values()]
    if where:  # first check that the store can be read from here
        reader = read_stored(_text(where), _read_variables(order), tick=talk.tick)
        with reader:
            talk.say("need", indices=list(wanted.values()))
            talk.hear("stored")
            reader.fetch([(sha256, length) for _, length, sha256, _ in missing], blobs, tick=talk.tick)
    else:
        talk.say("need", indices=list(wanted.values()))
        talk.flush()
        try:
            for _, length, sha256, _ in missing:
                blobs.add(sha256, length, talk.read(length))
        except FilesError as exc:
            if isinstance(exc, Failed):
                raise
            # the remaining bytes on the connection are files and must not be read as orders
            raise Untrue(str(exc)) from exc
    talk.say("ready", source=_write_note(cache, text))
    talk.flush()


def _check_list(noted: dict[str, Any]) -> _Listed:
    """Check and return a list of files. Raises: Untrue when it is invalid or has two files at one path."""
    files = noted.get("files")
    if noted.get("format") != FORMAT or not isinstance(files, list):
        raise Untrue("the list of files is not of the format of this release")
    if len(files) > MOST_FILES:
        raise Untrue(f"the source has {len(files)} files; the limit is {MOST_FILES}")
    checked: _Listed = []
    folders: set[str] = set()
    for entry in files:
        if not isinstance(entry, list) or len(entry) != 4 or not isinstance(entry[2], str):
            raise Untrue("the list of files is invalid")
        name = check_name(entry[0])
        checked.append((name, as_size(entry[1]), entry[2], entry[3] is True))
        if not _ID.fullmatch(entry[2]):
            raise Untrue(f"{clean(name)[:80]!r} has no SHA-256")
        while (name := name.rpartition("/")[0]) and name not in folders:
            folders.add(name)
    names = {name for name, *_ in checked}
    if len(names) != len(checked) or names & folders:
        raise Untrue("two files have the same path, or a file has the path of a folder")
    return checked


# ---- a commit


def _take_git(talk: Talk, order: dict[str, Any], cache: Path, limits: GitLimits | None) -> None:
    url, ref, folder, token, ssh_key = (
        _text(order.get(key, "")) for key in ("url", "ref", "folder", "token", "ssh_key")
    )
    access = GitAccess(token, ssh_key)
    try:
        parts = fetch_parts(cache, url, ref, folder=folder, access=access, limits=limits, tick=talk.tick)
        listed = [[part.mirror, part.commit, part.folder, part.place] for part in parts]
        text = json.dumps({"format": FORMAT, "parts": listed}).encode()
        talk.say("ready", source=_write_note(cache, text), commit=parts[0].commit)
    except GitUnreached as exc:
        talk.say("unreached", text=str(exc))
    talk.flush()


# ---- the record of a source


def _write_note(cache: Path, text: bytes) -> str:
    source = hashlib.sha256(text).hexdigest()
    folder = cache / "listed"
    part = folder / f"{PART}{secrets.token_hex(8)}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        part.write_bytes(text)
        os.replace(part, folder / source)
    except OSError as exc:
        raise FilesError(f"{folder} cannot be written to: {exc.strerror or exc}") from exc
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return source


def _read_note(cache: Path, source: object) -> dict[str, Any]:
    """Read the record of a source. Raises: FilesError when it is missing or damaged; Untrue for an invalid id."""
    if not isinstance(source, str) or not _ID.fullmatch(source):
        raise Untrue("the id of the source is not a SHA-256")
    path = cache / "listed" / source
    try:
        text = path.read_bytes()
    except OSError as exc:
        raise FilesError(f"the job's source is no longer on this node: {exc.strerror}: submit the job again") from exc
    if hashlib.sha256(text).hexdigest() != source:
        raise FilesError(f"{path} has changed since it was received: submit the job again")
    touch(path)
    return _parse(text)


def _parse(text: bytes) -> dict[str, Any]:
    try:
        noted = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise Untrue("the list of files is invalid") from exc
    if not isinstance(noted, dict):
        raise Untrue("the list of files is invalid")
    return noted


def _text(said: object) -> str:
    if not isinstance(said, str) or len(said) > _TEXT_CHARS or "\0" in said:
        raise Untrue(f"a text of at most {_TEXT_CHARS} characters was expected")
    return said


def _read_variables(order: dict[str, Any]) -> dict[str, str]:
    """Return the environment of the program that reads a store, with its credentials. Raises: Untrue."""
    said = order.get("environment") or {}
    if not isinstance(said, dict) or len(said) > _MOST_VARIABLES or not all(map(VARIABLE.fullmatch, said)):
        raise Untrue("the variables for the store are invalid")
    return {name: _text(value) for name, value in said.items()}
