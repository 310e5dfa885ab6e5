"""Bytes <-> frames: a fixed prefix (sizes of header and body, the message's kind and number), a JSON header, the body.

The agent numbers what it spools for the notebook; 0 means "not spooled". A notebook on a link that can break numbers
what it sends, too. Sizes in a prefix are accepted only up to those of existing messages.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection
from typing import NamedTuple

from ..errors import SpecError, WireError
from .json_text import parse_json
from .messages import (
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    MAX_ORDER_HEADER_BYTES,
    NUMBERS,
    Message,
    check_sizes,
    find_kind,
    lay_out,
    make_message,
)

_PREFIX = struct.Struct("!IIB7s")
_NUMBER_BYTES = 7
_PLAIN = bytes(range(0x20, 0x7F))


class Frame(NamedTuple):
    """One message as encoded on the wire."""

    number: int
    kind: type[Message]
    header: bytes
    body: bytes

    @property
    def size_bytes(self) -> int:
        return _PREFIX.size + len(self.header) + len(self.body)

    def to_bytes(self, *, number: int | None = None) -> bytes:
        number = self.number if number is None else number
        numbered = number.to_bytes(_NUMBER_BYTES, "big")
        prefix = _PREFIX.pack(len(self.header), len(self.body), NUMBERS[self.kind], numbered)
        return b"".join((prefix, self.header, self.body))

    def message(self) -> Message:
        """Parse the message; sizes were checked on arrival. Raises: WireError when it is invalid."""
        if self.header.translate(None, _PLAIN):  # else it would grow when it is encoded again for a log
            raise WireError("a message header is not JSON in plain ASCII")
        values = parse_json(self.header)
        if not isinstance(values, dict):
            raise WireError("a message header is not a JSON object")
        return make_message(self.kind, values, self.body)


def to_frame(message: Message) -> Frame:
    """Encode a message; the frame has no number yet."""
    header, body = lay_out(message)
    return Frame(0, type(message), json.dumps(header, separators=(",", ":")).encode(), body)


def require_readable(order: Message) -> None:
    """Check that a node could parse ``order``, else it would end the connection and the session. Raises: SpecError."""
    try:
        frame = to_frame(order)
        if len(frame.header) > MAX_ORDER_HEADER_BYTES:
            raise WireError(f"it has {len(frame.header):,} bytes, more than {MAX_ORDER_HEADER_BYTES:,}")
        frame.message()
    except (RecursionError, TypeError, ValueError, WireError) as exc:
        raise SpecError(f"{type(order).__name__} cannot be sent: {exc}") from None


class FrameReader:
    """A reader that cuts a stream of bytes into frames."""

    def __init__(
        self, *, max_header_bytes: int = MAX_HEADER_BYTES, kinds: Collection[type[Message]] = NUMBERS.keys()
    ) -> None:
        self.max_header_bytes = max_header_bytes
        self._kinds = kinds  # that the other side may send
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Take the next bytes and return the frames that are now complete. Raises: WireError."""
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        position = 0
        while len(buffer) - position >= _PREFIX.size:
            header_bytes, body_bytes, kind_number, number = _PREFIX.unpack_from(buffer, position)
            kind = find_kind(kind_number, self._kinds)
            if header_bytes > self.max_header_bytes or body_bytes > MAX_BODY_BYTES:
                raise WireError(f"a frame announces {header_bytes} + {body_bytes} bytes, more than any message")
            check_sizes(kind, header_bytes, body_bytes)
            header_at = position + _PREFIX.size
            body_at = header_at + header_bytes
            if len(buffer) < body_at + body_bytes:
                break
            position = body_at + body_bytes
            with memoryview(buffer) as view:
                header, body = bytes(view[header_at:body_at]), bytes(view[body_at:position])
            frames.append(Frame(int.from_bytes(number, "big"), kind, header, body))
        del buffer[:position]
        return frames

    @property
    def is_empty(self) -> bool:
        """Whether no part of an unfinished frame is left."""
        return not self._buffer
