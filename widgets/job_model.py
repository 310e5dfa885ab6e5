"""The model that a job has made: which files it is, copied to the server's disk, or handed to a browser in pieces."""

from __future__ import annotations

import base64
import glob
import tempfile
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import JobError
from ..jobs import Fetched, Job, MadeFile
from ..plan.names import CHECKPOINT_FOLDER
from ..text import format_size
from .actions import Refused

MOST_DOWNLOAD_BYTES = 50_000_000  # what goes through messages, and a browser's memory
CHUNK_BYTES = 1 << 19
_SUFFIXES = (".safetensors", ".pt", ".pth", ".onnx", ".gguf", ".bin", ".ckpt")
_MOST_SHOWN = 20

OnBytes = Callable[[int, int], object]  # done, and in all


def choose_model(made: Sequence[MadeFile]) -> list[MadeFile]:
    """The files that are a model, the likeliest first; those of checkpoints are none."""
    found = [file for file in made if file.name.endswith(_SUFFIXES) and not _is_in_checkpoint(file.name)]

    def order(file: MadeFile) -> tuple[bool, bool, int, str]:
        name = PurePosixPath(file.name).name
        return not name.startswith("model"), not name.endswith(".safetensors"), -file.size_bytes, file.name

    return sorted(found, key=order)


def _is_in_checkpoint(name: str) -> bool:
    return any(CHECKPOINT_FOLDER.fullmatch(part) for part in name.split("/")[:-1])


def fetch_model(job: Job, files: Sequence[MadeFile], folder: str, on_bytes: OnBytes) -> Fetched:
    """Copy them into ``folder`` of this machine, each whole by its SHA-256. Raises: DetrainError."""
    names = [glob.escape(name) for name in dict.fromkeys(file.name for file in files)]
    try:
        return job.fetch(names, folder, anyway=True, on_progress=lambda _, done, total: on_bytes(done, total))
    except JobError as exc:
        exc.prog = "%job"
        raise


@dataclass(frozen=True)
class _Ready:
    id: str
    file: Path
    size_bytes: int


class Download:
    """One file for a browser: fetched into a folder of its own here, and read from there in pieces, once."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # it goes with the kernel at the latest
        self._ready: _Ready | None = None
        self._changing = threading.Lock()

    def prepare(self, job: Job, file: MadeFile, on_bytes: OnBytes, *, num_nodes: int = 1) -> dict[str, Any]:
        """Fetch it, of as many nodes as have one of its name; returns its id, name and size for the page.

        Raises: DetrainError, Refused for one too large, also where its node says so only now.
        """
        _require_small(file.size_bytes, MOST_DOWNLOAD_BYTES)
        folder = tempfile.TemporaryDirectory(prefix="detrain_nb-model-", ignore_cleanup_errors=True)
        self._replace(folder, None)
        try:
            return self._fetch(job, file, folder, on_bytes, most_bytes=MOST_DOWNLOAD_BYTES * num_nodes)
        except BaseException:
            self.clear()
            raise

    def _fetch(
        self,
        job: Job,
        file: MadeFile,
        folder: tempfile.TemporaryDirectory[str],
        on_bytes: OnBytes,
        *,
        most_bytes: int,
    ) -> dict[str, Any]:
        def note(done: int, total: int) -> None:
            _require_small(total, most_bytes)  # what it raises ends the fetch
            on_bytes(done, total)

        fetched = fetch_model(job, [file], folder.name, note)
        wanted = (f"{file.node}/{file.name}", file.name)
        found = next((name for name in wanted if name in fetched.files), None)
        if found is None:
            raise Refused(f"{file.name} is not there any more")
        path = Path(folder.name) / found
        ready = _Ready(uuid.uuid4().hex, path, path.stat().st_size)
        _require_small(ready.size_bytes, MOST_DOWNLOAD_BYTES)
        self._replace(folder, ready)
        return {"id": ready.id, "name": path.name, "size": ready.size_bytes, "chunk": CHUNK_BYTES}

    def read(self, id: str, offset: int) -> str:
        """A piece of the file, in base64. Raises: Refused."""
        ready = self._ready
        if ready is None or ready.id != id or not 0 <= offset < max(1, ready.size_bytes):
            raise Refused("that download is over: begin it again")
        with open(ready.file, "rb") as opened:
            opened.seek(offset)
            return base64.b64encode(opened.read(CHUNK_BYTES)).decode()

    def clear(self) -> None:
        """Remove what was fetched for it."""
        self._replace(None, None)

    def _replace(self, folder: tempfile.TemporaryDirectory[str] | None, ready: _Ready | None) -> None:
        with self._changing:
            before, self._folder, self._ready = self._folder, folder, ready
        if before is not None and before is not folder:
            before.cleanup()


def _require_small(size_bytes: int, most_bytes: int) -> None:
    """Raises: Refused."""
    if size_bytes > most_bytes:
        most = format_size(most_bytes)
        raise Refused(f"{format_size(size_bytes)} are more than the {most} that go through the notebook")


def describe_model(files: Sequence[MadeFile], *, has_many_nodes: bool) -> list[dict[str, Any]]:
    """The first of them as pages get them; their names are those of files, which `check_name` has let in."""
    return [
        {"node": file.node if has_many_nodes else "", "name": file.name, "size": file.size_bytes}
        for file in files[:_MOST_SHOWN]
    ]
