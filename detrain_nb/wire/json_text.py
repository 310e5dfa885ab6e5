"""JSON and text from another process, parsed at bounded cost, whatever it contains."""

from __future__ import annotations

import codecs
import contextlib
import gc
import json
import math
from collections.abc import Iterator
from typing import Any

from ..errors import WireError

MAX_BUNDLE_BYTES = 32 << 20  # of a rich output
MAX_BUNDLE_VALUES = 1 << 16  # in it: strings, numbers, lists; each takes up to 300 bytes once parsed, and is kept
SIZES = "application/vnd.detrain_nb.sizes+json"  # in a rich output: {mime type: {"width": .., "height": ..}}
_TEXT_BYTES = 1 << 18  # of surrogates alone, these take 25 ms

Json = Any


def json_body(value: Json) -> bytes:
    """Encode a JSON value as the body of a message."""
    return json.dumps(value, separators=(",", ":")).encode()


def parse_json(data: bytes) -> Json:
    """Parse JSON from the other side. Raises: WireError, also on NaN, extreme nesting, and repeated keys."""
    try:
        return _DECODER.decode(data.decode())
    except (ValueError, RecursionError) as exc:
        raise WireError(f"not JSON: {exc}") from exc


def parse_bundle(data: bytes) -> dict[str, Json]:
    """Parse a rich output, {mime type: data}. Raises: WireError, also for more than ``MAX_BUNDLE_VALUES`` values."""
    if len(data) > MAX_BUNDLE_VALUES and count_values(data) > MAX_BUNDLE_VALUES:
        raise WireError(f"a rich output has more than {MAX_BUNDLE_VALUES:,} values")
    bundle = parse_json(data)
    if not isinstance(bundle, dict):
        raise WireError("a rich output is not a JSON object by mime type")
    return bundle


def count_values(data: bytes, *, most: int = MAX_BUNDLE_VALUES) -> int:
    """Return an upper bound on the values in a JSON text without parsing it; stops counting soon after ``most``."""
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")
    strings = plain.count(b'"') // 2
    if strings <= most:
        outside = b"".join(plain.split(b'"')[::2])
        return strings + sum(outside.count(mark) for mark in (b",", b"[", b"{"))
    return strings


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Switch off garbage collection while JSON is parsed: it would take ten times as long, and find nothing."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _refuse_repeats(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key is repeated")
    return made


def read_text(data: bytes | memoryview) -> str:
    """Decode text from the other side, which may contain lone surrogates, as Python's may. Raises: WireError.

    These are slow to decode: between two pieces, other threads can run.
    """
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        pass
    reader = codecs.getincrementaldecoder("utf-8")("surrogatepass")
    pieces = (data[start : start + _TEXT_BYTES] for start in range(0, len(data), _TEXT_BYTES))
    try:
        return "".join([*(reader.decode(piece) for piece in pieces), reader.decode(b"", final=True)])
    except UnicodeDecodeError as exc:
        raise WireError(f"not text: {exc.reason}") from exc


def _read_whole(digits: str) -> int:
    """Parse an int, in Python: other threads can run between two numbers, which may have thousands of digits."""
    return int(digits)


def _read_float(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits[:40]} is too large")
    return number


_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant,
    parse_int=_read_whole,
    parse_float=_read_float,
    object_pairs_hook=_refuse_repeats,
)
