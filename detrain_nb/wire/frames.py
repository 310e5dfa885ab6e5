"""Bytes <-> frames: a fixed prefix (sizes of header and body, the message's number), a JSON header, the body.

A number is given by the agent to what it spools for the notebook; 0 means "not spooled". A notebook on a link that can
break numbers what it sends, too. Nothing that is announced is waited for where no message is as large.
"""

from __future__ import annotations

import json
import struct
from typing import NamedTuple

from ..errors import WireError
from .messages import KINDS, MAX_BODY_BYTES, MAX_HEADER_BYTES, MOST_HEADER_BYTES, Message, lay_out, make_message
from .text import parse_json

_PREFIX = struct.Struct("!IIQ")
_PLAIN = bytes(range(0x20, 0x7F))


class Frame(NamedTuple):
    """One message as it lies on the wire."""

    number: int
    header: bytes
    body: bytes

    def to_bytes(self, *, number: int | None = None) -> bytes:
        number = self.number if number is None else number
        return b"".join((_PREFIX.pack(len(self.header), len(self.body), number), self.header, self.body))

    def message(self) -> Message:
        """The message. Raises: WireError when it is not one."""
        return _decode(self.header, self.body)


def to_frame(message: Message) -> Frame:
    """Lay a message out; the frame has no number yet."""
    header, body = lay_out(message)
    header["type"] = type(message).__name__
    return Frame(0, json.dumps(header, separators=(",", ":")).encode(), body)


class FrameReader:
    """Cut a stream of bytes into frames."""

    def __init__(self, *, max_header_bytes: int = MAX_HEADER_BYTES) -> None:
        self.max_header_bytes = max_header_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Take the next bytes; return the frames that are now complete. Raises: WireError."""
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        position = 0
        while len(buffer) - position >= _PREFIX.size:
            header_bytes, body_bytes, number = _PREFIX.unpack_from(buffer, position)
            if header_bytes > self.max_header_bytes or body_bytes > MAX_BODY_BYTES:
                raise WireError(f"a frame announces {header_bytes} + {body_bytes} bytes, more than any message has")
            header_at = position + _PREFIX.size
            body_at = header_at + header_bytes
            if len(buffer) < body_at + body_bytes:
                break
            position = body_at + body_bytes
            with memoryview(buffer) as view:
                frames.append(Frame(number, bytes(view[header_at:body_at]), bytes(view[body_at:position])))
        del buffer[:position]
        return frames

    @property
    def is_empty(self) -> bool:
        """Nothing is left of an unfinished frame."""
        return not self._buffer


def _decode(header: bytes, body: bytes) -> Message:
    if header.translate(None, _PLAIN):  # else it would be longer when it is written again, to a log
        raise WireError("a header is not JSON in plain ASCII")
    values = parse_json(header)
    if not isinstance(values, dict):
        raise WireError("a header is not a JSON object")
    name = values.pop("type", "")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise WireError("a header names no known type of message")
    if len(header) > MOST_HEADER_BYTES.get(kind, len(header)):
        raise WireError(f"{kind.__name__} has a header of {len(header):,} bytes, more than any has")
    return make_message(kind, values, body)
