"""Prefixes of frames, built by hand: with unknown kinds, and with sizes that no message has."""

from __future__ import annotations

import struct

from detrain_nb.wire import Message
from detrain_nb.wire.messages import NUMBERS

KIND_AT = 8  # offset of the byte with the kind
_PREFIX = struct.Struct("!IIB7s")  # the sizes of header and body, the kind, the number


def prefix(kind: type[Message] | int, header_bytes: int, body_bytes: int, *, number: int = 0) -> bytes:
    kind_number = kind if isinstance(kind, int) else NUMBERS[kind]
    return _PREFIX.pack(header_bytes, body_bytes, kind_number, number.to_bytes(7, "big"))
