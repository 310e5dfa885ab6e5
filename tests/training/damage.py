"""Damage to the files of a checkpoint, and its repair: bits, sizes, whole files; and where a file has its tensors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def changed(file: Path, change: Callable[[bytes], bytes | None]) -> Iterator[None]:
    """Change a file until the block ends; it is removed if ``change`` returns None."""
    whole = file.read_bytes()
    found = change(whole)
    file.unlink() if found is None else file.write_bytes(found)
    try:
        yield
    finally:
        file.write_bytes(whole)


def flip(place: int, *, bit: int = 3) -> Callable[[bytes], bytes]:
    def change(whole: bytes) -> bytes:
        data = bytearray(whole)
        data[place] ^= 1 << bit
        return bytes(data)

    return change


def the_file(folder: Path, step: int, pattern: str) -> Path:
    return next((folder / f"step-{step:08d}").glob(pattern))


def pieces_of(file: Path, kind: str) -> list[tuple[str, int, int]]:
    """Return name, begin and end of each piece of this kind in ``file``, except the head, which is tied."""
    index = json.loads(next(file.parent.glob("index-*")).read_text())
    return [
        (name, begin, end)
        for name, (_, _, chunks) in index["tensors"].items()
        for _, _, number, begin, end, _ in chunks
        if name.startswith(kind) and "head." not in name and index["files"][number] == file.name and end > begin
    ]
