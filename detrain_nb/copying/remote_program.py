"""The program that serves one order of the notebook about a node's files or its connections to other nodes.

It runs as a separate process next to the agent, or in a thread (served_here.py).
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from ..guarded import refuse_squatted
from .folder_sync_remote import sync
from .json_lines import FilesError, Talk, reason_of
from .receiver import TreeWriter, receive_tree
from .sender import File, Progress, list_tree, open_listed, send_tree
from .serving import Handler, serve_order
from .ways import meet

MAGIC = b"\ndetrain-nb files 1\n"
SAMPLE_FILES = 64
STATE_BYTES = 1 << 20  # the limit of the line with their names
SAMPLE_BYTES = 1 << 20  # from the beginning of each file, and from its end


def main() -> None:
    """Serve one order, and exit."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, lambda *_: sys.exit(1))
    sys.stdout.buffer.write(MAGIC)
    talk = Talk(cast(BufferedReader, sys.stdin.buffer), sys.stdout.buffer)
    if not serve(talk, {**_HANDLERS, "sync": _sync}):
        sys.exit(1)


def serve(talk: Talk, handlers: Mapping[str, Handler] | None = None) -> bool:
    """Serve one order, by default one that needs no separate process; returns False if it fails."""
    return serve_order(talk, handlers or _HANDLERS) is None


def _expand(order: dict[str, Any], path: str) -> str:
    """Resolve a path; relative paths start in the folder that the ranks start in. Raises: FilesError."""
    if order["base"]:
        try:  # the folder was made for the session; others may have replaced it
            refuse_squatted(Path(os.path.expanduser(order["base"])))
        except PermissionError as exc:
            raise FilesError(f"the work folder cannot be used: {exc}") from exc
        except OSError:
            pass  # the next access reports it
    return os.path.abspath(os.path.join(os.path.expanduser(order["base"] or "~"), os.path.expanduser(path)))


def _put(talk: Talk, order: dict[str, Any]) -> None:
    with TreeWriter(_expand(order, order["target"])) as writer:
        talk.say("ready", staging=writer.staging)
        progress = Progress()
        receive_tree(talk, writer, progress)
    talk.say("done", files=progress.files, size=progress.size)  # by now the staging folder is removed
    talk.flush()


def _get(talk: Talk, order: dict[str, Any]) -> None:
    sources = [(name, _expand(order, path)) for name, path in zip(order["names"], order["paths"])]
    send_tree(talk, list_tree(sources, tick=talk.tick), Progress())


def _sync(talk: Talk, order: dict[str, Any]) -> None:
    sync(talk, order, _expand(order, "."))


def _check(talk: Talk, order: dict[str, Any]) -> None:
    """Report what is under a path: its size, a digest of all names and sizes, and digests of some files."""
    path = _expand(order, order["path"])
    if not os.path.exists(path):
        talk.say("state", exists=False)
        return
    tree = list_tree([("it", path)], as_read=True, tick=talk.tick)
    names = hashlib.sha256()
    for file in tree.files:
        names.update(f"{file.size} {file.name!a}\n".encode())
    sample = {}
    for file in _choose_sample(tree.files):
        talk.tick()
        name = file.name.partition("/")[2] or os.path.basename(path)
        sample[name if name.isprintable() else ascii(name)] = [file.size, _digest_ends(file)]
    size = sum(file.size for file in tree.files)
    talk.say(
        "state",
        exists=True,
        files=len(tree.files),
        folders=len(tree.folders),
        size=size,
        skipped=tree.num_skipped,
        names=names.hexdigest(),
        sample=sample,
    )


def _choose_sample(files: list[File]) -> list[File]:
    """Choose the largest files for one half, and for the other half files by a hash of their name.

    Equal sets of names thus give equal samples on every machine.
    """
    by_size = sorted(files, key=lambda file: (-file.size, file.name))
    largest, others = by_size[: SAMPLE_FILES // 2], by_size[SAMPLE_FILES // 2 :]
    others.sort(key=lambda file: hashlib.sha256(ascii(file.name).encode()).digest())
    return sorted(largest + others[: SAMPLE_FILES - len(largest)], key=lambda file: file.name)


def _digest_ends(file: File) -> str:
    digest = hashlib.sha256()
    try:
        with open_listed(file) as opened:
            digest.update(opened.read(SAMPLE_BYTES))
            if file.size > SAMPLE_BYTES:
                opened.seek(max(SAMPLE_BYTES, file.size - SAMPLE_BYTES))
                digest.update(opened.read(SAMPLE_BYTES))
    except OSError as exc:
        raise FilesError(f"{file.path} cannot be read: {reason_of(exc)}") from exc
    return digest.hexdigest()


_HANDLERS: Mapping[str, Handler] = {"put": _put, "get": _get, "check": _check, "meet": meet}
