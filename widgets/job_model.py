"""The model that a job has made: which files it is, and how they are copied to the server's disk."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import JobError
from ..jobs import Fetched, Job, MadeFile
from ..plan.names import CHECKPOINT_FOLDER
from ..text import format_size, told_node
from .actions import Refused
from .downloads import MOST_DOWNLOAD_BYTES, require_small

_SUFFIXES = (".safetensors", ".pt", ".pth", ".onnx", ".gguf", ".bin", ".ckpt")
_SHARD = re.compile(r"-\d+-of-\d+\.")  # of a model of Hugging Face
_MOST_SHOWN = 20

OnBytes = Callable[[int, int], object]  # done, and in all


def choose_model(made: Sequence[MadeFile]) -> list[MadeFile]:
    """The files that are a model, the likeliest first, its shards in order; those of checkpoints are none."""
    found = [file for file in made if file.name.endswith(_SUFFIXES) and not _is_in_checkpoint(file.name)]

    def order(file: MadeFile) -> tuple[bool, bool, int, str]:
        name = PurePosixPath(file.name).name
        size = 0 if _SHARD.search(name) else -file.size_bytes
        return not name.startswith("model"), not name.endswith(".safetensors"), size, file.name

    return sorted(found, key=order)


def _is_in_checkpoint(name: str) -> bool:
    return any(CHECKPOINT_FOLDER.fullmatch(part) for part in name.split("/")[:-1])


def fetch_model(job: Job, files: Sequence[MadeFile], folder: str, on_bytes: OnBytes, *, num_nodes: int = 1) -> Fetched:
    """Copy them, of as many nodes as may have one of their names, into ``folder``, each whole by its SHA-256.

    Raises: DetrainError, Refused where nodes say that they are larger than they have said before.
    """
    told = sum(file.size_bytes for file in files)

    def note(done: int, total: int) -> None:
        if total > told * num_nodes:
            raise Refused(f"it has grown from {format_size(told)} to {format_size(total)}: show the job again")
        on_bytes(done, total)

    return _fetch(job, files, folder, note)


def _fetch(job: Job, files: Sequence[MadeFile], folder: str, on_bytes: OnBytes) -> Fetched:
    """What ``on_bytes`` raises ends it, before much has come."""
    names = [glob.escape(name) for name in dict.fromkeys(file.name for file in files)]
    try:
        return job.fetch(names, folder, anyway=True, on_progress=lambda _, done, total: on_bytes(done, total))
    except JobError as exc:
        exc.prog = "%job"
        raise


def fetch_for_browser(job: Job, file: MadeFile, folder: Path, on_bytes: OnBytes, *, num_nodes: int = 1) -> Path:
    """Fetch one, of as many nodes as have one of its name, into ``folder``; returns where it is.

    Raises: DetrainError, Refused for one too large, also where its node says so only now.
    """
    require_small(file.size_bytes)

    def note(done: int, total: int) -> None:
        require_small(total, MOST_DOWNLOAD_BYTES * num_nodes)
        on_bytes(done, total)

    fetched = _fetch(job, [file], str(folder), note)
    found = next((name for name in (f"{file.node}/{file.name}", file.name) if name in fetched.files), None)
    if found is None:
        raise Refused(f"{file.name} is not there any more")
    return folder / found


def tell_others(count: int, job: str) -> str:
    """Of artifacts that are no model, as a checkpoint that torch has cut into files; nothing where there are none."""
    files = "1 other file" if count == 1 else f"{count:,} other files"
    return f"; {files}: %job fetch {job} brings what it made" if count else ""


def describe_model(files: Sequence[MadeFile], *, has_many_nodes: bool) -> list[dict[str, Any]]:
    """The first of them as pages get them; their names are those of files, which `check_name` has let in."""
    return [
        {"node": told_node(file.node) if has_many_nodes else "", "name": file.name, "size": file.size_bytes}
        for file in files[:_MOST_SHOWN]
    ]
