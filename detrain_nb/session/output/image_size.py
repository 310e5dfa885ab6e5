"""How many pixels an image has, by its first bytes: a front end takes memory for each, however small the file is."""

from __future__ import annotations

import struct
from collections.abc import Callable

Size = tuple[int, int]

_NO_LENGTH = {0x00, 0x01, *range(0xD0, 0xDA)}  # markers of a JPEG with nothing behind them
_PIXELS_FOLLOW = 0xDA
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_EXTENSION, _FRAME = 0x21, 0x2C  # of a GIF


def read_size(mime: str, beginning: bytes) -> Size | None:
    """Width and height of a PNG, JPEG or GIF; None where ``beginning`` is that of no such image, or does not say."""
    try:
        size = _READERS[mime](beginning)
    except (IndexError, struct.error):
        return None
    return size if size and min(size) > 0 else None


def _read_png(data: bytes) -> Size | None:
    is_one = data[:8] == b"\x89PNG\r\n\x1a\n" and data[8:16] == b"\0\0\0\rIHDR"
    return struct.unpack_from("!II", data, 16) if is_one else None


def _read_gif(data: bytes) -> Size | None:
    """That of the screen, which browsers enlarge where the first frame does not fit."""
    if data[:6] not in (b"GIF87a", b"GIF89a"):
        return None
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    place = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)  # behind the colours
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
        place = data.find(0xFF, place)  # as readers do, whatever stands between two segments
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
