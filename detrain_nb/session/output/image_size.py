"""The size of an image in pixels, from its first bytes: front ends need memory per pixel, however small the file."""

from __future__ import annotations

import struct
from collections.abc import Callable

Size = tuple[int, int]

_NO_LENGTH = {0x00, 0x01, *range(0xD0, 0xDA)}  # markers of a JPEG without a segment after them
_PIXELS_FOLLOW = 0xDA
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_EXTENSION, _FRAME = 0x21, 0x2C  # of a GIF


def read_size(mime: str, beginning: bytes) -> Size | None:
    """Read width and height of a PNG, JPEG or GIF; None if ``beginning`` is not one, or does not reach the size."""
    try:
        size = _READERS[mime](beginning)
    except (IndexError, struct.error):
        return None
    return size if size and min(size) > 0 else None


def _read_png(data: bytes) -> Size | None:
    is_one = data[:8] == b"\x89PNG\r\n\x1a\n" and data[8:16] == b"\0\0\0\rIHDR"
    return struct.unpack_from("!II", data, 16) if is_one else None


def _read_gif(data: bytes) -> Size | None:
    """Return the logical screen, enlarged as browsers do if the first frame does not fit into it."""
    if data[:6] not in (b"GIF87a", b"GIF89a"):
        return None
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    place = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)  # after the colour table
    while data[place] == _EXTENSION:
        place += 2
        while data[place]:
            place += 1 + data[place]
        place += 1
    if data[place] != _FRAME:
        return None
    left, top, frame_width, frame_height = struct.unpack_from("<HHHH", data, place + 1)
    return max(width, left + frame_width), max(height, top + frame_height)


def _read_jpeg(data: bytes) -> Size | None:
    if data[:3] != b"\xff\xd8\xff":
        return None
    place = 2
    while True:
        place = data.find(0xFF, place)  # as decoders do, whatever is between two segments
        if place < 0:
            return None
        while data[place] == 0xFF:
            place += 1
        marker = data[place]
        if marker == _PIXELS_FOLLOW or marker in _NO_LENGTH:
            return None
        (length,) = struct.unpack_from("!H", data, place + 1)
        if marker in _FRAMES:
            height, width = struct.unpack_from("!HH", data, place + 4)
            return width, height
        place += 1 + max(2, length)


_READERS: dict[str, Callable[[bytes], Size | None]] = {
    "image/png": _read_png,
    "image/jpeg": _read_jpeg,
    "image/gif": _read_gif,
}
