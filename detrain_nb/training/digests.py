"""CRC-32 digests of a checkpoint: of each MiB of a tensor, of the headers of its files, and of its JSON.

They detect damage by a disk, memory or a transfer, and files that were mixed up. They are not signatures: whoever can
write there can forge them. zlib's CRC is in every Python, and about as fast as a disk (4 to 5 GB/s; xxhash and isal,
which a node would have to install, reach 10 to 12).
"""

from __future__ import annotations

import re
import zlib
from typing import Any

from ..errors import DetrainError

BLOCK_BYTES = 1 << 20  # reading part of a tensor reads little more, and can still compare it
_DIGITS = 8  # of one, in hexadecimal
_SEAL = re.compile(rb',\n "crc32": "([0-9a-f]{8})"\n}\Z')
_SEAL_BYTES = 24
_HEXADECIMAL = re.compile("[0-9a-f]*")


class Damaged(DetrainError):
    """A file that differs from what was saved, or is incomplete; storage that does not answer raises another error."""


def digest(data: bytes | memoryview) -> str:
    return f"{zlib.crc32(data):0{_DIGITS}x}"


def digests(data: bytes | memoryview) -> str:
    """Return the digests of the blocks, concatenated."""
    return "".join(digest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES))


def is_digests(text: Any, size_bytes: int) -> bool:
    """Return whether ``text`` has the form of `digests` for ``size_bytes`` bytes, which are compared when read."""
    is_as_long = isinstance(text, str) and len(text) == -(-size_bytes // BLOCK_BYTES) * _DIGITS
    return is_as_long and _HEXADECIMAL.fullmatch(text) is not None  # as a message may show it


def require_digest(data: bytes | memoryview, expected: str, what: str) -> None:
    """Compare ``data`` with its digest. Raises: Damaged that names ``what``."""
    if (found := digest(data)) != expected:
        raise Damaged(f"{what} is damaged: its CRC-32 is {found}, and was {expected} when it was saved")


def require_digests(data: memoryview, expected: str, begin: int, what: str) -> None:
    """Compare blocks of a tensor, from byte ``begin`` on, where a block starts; ``expected`` has all its digests.

    Raises: Damaged that names ``what`` and the damaged bytes.
    """
    for at in range(0, len(data), BLOCK_BYTES):
        block, number = data[at : at + BLOCK_BYTES], (begin + at) // BLOCK_BYTES
        where = f"{what}, bytes {begin + at} to {begin + at + len(block)},"
        require_digest(block, expected[number * _DIGITS : (number + 1) * _DIGITS], where)


# ---- a JSON file that holds its own digest


def seal(text: bytes) -> bytes:
    """Append the digest, as the last entry, to a JSON object that was written with ``indent=1``."""
    body = text.removesuffix(b"\n}")
    return body + f',\n "crc32": "{digest(body)}"\n}}'.encode()


def is_sealed(text: bytes, what: str) -> bool:
    """Return whether a JSON file has its digest. Raises: Damaged when the digest differs."""
    found = _SEAL.search(text, max(0, len(text) - _SEAL_BYTES))
    if found is not None:
        require_digest(text[: found.start()], found[1].decode(), what)
    return found is not None
