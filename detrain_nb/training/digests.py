"""CRC-32 of what a checkpoint has: of each MiB of a tensor, of the headers of its files, and of its JSON.

They find what a disk, a memory or a transfer has damaged, and files that were mixed up. They are no signature: who can
write there can make them fit. zlib's is in every Python, and about as fast as a disk (4 to 5 GB/s; xxhash and isal,
which a node would have to install, 10 to 12).
"""

from __future__ import annotations

import re
import zlib
from typing import Any

from ..errors import DetrainError

BLOCK_BYTES = 1 << 20  # who wants a part of a tensor reads little more than that, and can still compare it
_DIGITS = 8  # of one, in hexadecimal
_SEAL = re.compile(rb',\n "crc32": "([0-9a-f]{8})"\n}\Z')
_SEAL_BYTES = 24
_HEXADECIMAL = re.compile("[0-9a-f]*")


class Damaged(DetrainError):
    """What is there is not what was saved, or not all of it; a place that does not answer raises another error."""


def digest(data: bytes | memoryview) -> str:
    return f"{zlib.crc32(data):0{_DIGITS}x}"


def digests(data: bytes | memoryview) -> str:
    """Those of its blocks, one after the other."""
    return "".join(digest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES))


def is_digests(text: Any, size_bytes: int) -> bool:
    """Whether it may be what `digests` gives for so many bytes; what they are is compared when they are read."""
    is_as_long = isinstance(text, str) and len(text) == -(-size_bytes // BLOCK_BYTES) * _DIGITS
    return is_as_long and _HEXADECIMAL.fullmatch(text) is not None  # a message may show it


def require_digest(data: bytes | memoryview, expected: str, what: str) -> None:
    """Raises: Damaged, which says ``what`` is."""
    if (found := digest(data)) != expected:
        raise Damaged(f"{what} is damaged: its CRC-32 is {found}, and was {expected} when it was saved")


def require_digests(data: memoryview, expected: str, begin: int, what: str) -> None:
    """Compare the blocks of a tensor of which ``expected`` are all digests, from byte ``begin`` on: a block's first.

    Raises: Damaged, which says of ``what`` and at which bytes it is damaged.
    """
    for at in range(0, len(data), BLOCK_BYTES):
        block, number = data[at : at + BLOCK_BYTES], (begin + at) // BLOCK_BYTES
        where = f"{what}, bytes {begin + at} to {begin + at + len(block)},"
        require_digest(block, expected[number * _DIGITS : (number + 1) * _DIGITS], where)


# ---- a file of JSON that has its own


def seal(text: bytes) -> bytes:
    """Add its digest to an object that was written with ``indent=1``, as its last entry."""
    body = text.removesuffix(b"\n}")
    return body + f',\n "crc32": "{digest(body)}"\n}}'.encode()


def is_sealed(text: bytes, what: str) -> bool:
    """Whether it has its digest. Raises: Damaged where it has another one."""
    found = _SEAL.search(text, max(0, len(text) - _SEAL_BYTES))
    if found is not None:
        require_digest(text[: found.start()], found[1].decode(), what)
    return found is not None
