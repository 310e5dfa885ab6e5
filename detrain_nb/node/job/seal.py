"""Messages between the nodes of an elastic job, sealed with the job's key: texts without a valid seal are rejected.

A sealed text is a number that grows with every write, an HMAC-SHA256 over number and text, and the text. After reading
one, a node rejects older ones, and different ones with the same number.
"""

from __future__ import annotations

import hashlib
import hmac
import threading

KEY_BYTES = 32
MOST_BYTES = 1 << 20  # a state of some thousand nodes
_NUMBER_BYTES, _MAC_BYTES = 8, hashlib.sha256().digest_size


class SealBroken(ValueError):
    """Invalid seal: written without the key, changed, or older than a text that was read before."""


class Seal:
    """Seal for one kind of text in one process; ``purpose`` prevents replay of a text as one of a different kind."""

    def __init__(self, key: bytes, purpose: str) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a job's key has {KEY_BYTES} bytes, not {len(key)}")
        self._key = hmac.digest(key, purpose.encode(), "sha256")
        self._newest = 0, b""
        self._lock = threading.Lock()

    @property
    def has_read(self) -> bool:
        """Whether a text was read before: if none exists now, it was removed."""
        return self._newest[0] > 0

    def close(self, text: bytes) -> bytes:
        """Seal a text as the successor of the newest one that was read."""
        number = (self._newest[0] + 1).to_bytes(_NUMBER_BYTES, "big")
        return number + self._sign(number, text) + text

    def open(self, sealed: bytes) -> bytes:
        """Check the seal and return the text. Raises: SealBroken."""
        if len(sealed) > MOST_BYTES or len(sealed) < _NUMBER_BYTES + _MAC_BYTES:
            raise SealBroken(f"{len(sealed)} bytes are not a sealed text of this job")
        number, rest = sealed[:_NUMBER_BYTES], sealed[_NUMBER_BYTES:]
        mac, text = rest[:_MAC_BYTES], rest[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._sign(number, text)):
            raise SealBroken("it was not written by a node of this job")
        with self._lock:
            newest, its_mac = self._newest
            count = int.from_bytes(number, "big")
            if count < newest or (count == newest and mac != its_mac):
                raise SealBroken(f"text {count} was replayed after text {newest}")
            self._newest = count, mac
        return text

    def _sign(self, number: bytes, text: bytes) -> bytes:
        return hmac.digest(self._key, number + text, "sha256")
