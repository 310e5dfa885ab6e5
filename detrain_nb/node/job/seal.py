"""What the nodes of an elastic job write for each other, sealed with the job's key: nobody else's is believed.

A sealed text is a number that grows with every writing, an HMAC-SHA256 over the number and the text, and the text. Who
has read one believes no older one any more, and no other one of the same number.
"""

from __future__ import annotations

import hashlib
import hmac
import threading

KEY_BYTES = 32
MOST_BYTES = 1 << 20  # a state of some thousand nodes
_NUMBER_BYTES, _MAC_BYTES = 8, hashlib.sha256().digest_size


class SealBroken(ValueError):
    """A sealed text was written by somebody without the key, was changed, or is older than one that was read."""


class Seal:
    """One per process and per text; ``purpose`` keeps a text from being shown in the place of another one."""

    def __init__(self, key: bytes, purpose: str) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"the key of a job has {KEY_BYTES} bytes, not {len(key)}")
        self._key = hmac.digest(key, purpose.encode(), "sha256")
        self._newest = 0, b""
        self._lock = threading.Lock()

    @property
    def has_read(self) -> bool:
        """A text was there already: now there is one, or somebody has removed it."""
        return self._newest[0] > 0

    def close(self, text: bytes) -> bytes:
        """Seal a text that follows the newest one that was read."""
        number = (self._newest[0] + 1).to_bytes(_NUMBER_BYTES, "big")
        return number + self._sign(number, text) + text

    def open(self, sealed: bytes) -> bytes:
        """Return the text. Raises: SealBroken."""
        if len(sealed) > MOST_BYTES or len(sealed) < _NUMBER_BYTES + _MAC_BYTES:
            raise SealBroken(f"{len(sealed)} bytes cannot be a sealed text of this job")
        number, rest = sealed[:_NUMBER_BYTES], sealed[_NUMBER_BYTES:]
        mac, text = rest[:_MAC_BYTES], rest[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._sign(number, text)):
            raise SealBroken("it was not written by a node of this job")
        with self._lock:
            newest, its_mac = self._newest
            count = int.from_bytes(number, "big")
            if count < newest or (count == newest and mac != its_mac):
                raise SealBroken(f"writing {count} is shown again after writing {newest}")
            self._newest = count, mac
        return text

    def _sign(self, number: bytes, text: bytes) -> bytes:
        return hmac.digest(self._key, number + text, "sha256")
