"""Private key files as readable without a passphrase: their type, their public key, and whether they are encrypted."""

from __future__ import annotations

import base64
import binascii
import io
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import TransportError
from ..guarded import open_file

__all__ = ["KeyFile"]

_MAGIC = b"openssh-key-v1\0"
_PEM_TYPES = {"RSA": "ssh-rsa", "EC": "ecdsa"}
_SIZE_LIMIT = 1 << 20


@dataclass(frozen=True)
class KeyFile:
    """File named by ``IdentityFile``: a private key, or a public one whose private half is in ssh-agent."""

    path: Path
    key_type: str
    public_blob: bytes | None
    is_encrypted: bool = False
    is_public: bool = False
    is_exposed: bool = False  # it is ours, and others can read or write it: ssh refuses such a private key
    stamp: tuple[int, int] = (0, 0)  # mtime and size; a change means that the file holds a different key

    @classmethod
    def read(cls, path: Path) -> KeyFile:
        """Read the public part. Raises: TransportError when the file is missing, unreadable or holds no SSH key."""
        try:
            data, state = _read_file(path)
        except FileNotFoundError as exc:
            raise TransportError(f"the key file {path} does not exist") from exc
        except OSError as exc:
            raise TransportError(f"the key file {path} cannot be read: {exc.strerror or exc}") from exc
        text = data.decode("ascii", errors="replace").strip()
        try:
            key = cls._parse(path, text)
        except (ValueError, IndexError, struct.error, binascii.Error) as exc:
            raise TransportError(f"the key file {path} holds no SSH key: {_advise(path, text)}") from exc
        is_ours = hasattr(os, "getuid") and state.st_uid == os.getuid()
        is_exposed = is_ours and bool(state.st_mode & 0o077)
        return replace(key, is_exposed=is_exposed, stamp=(state.st_mtime_ns, state.st_size))

    @classmethod
    def _parse(cls, path: Path, text: str) -> KeyFile:
        first, *rest = text.splitlines()
        if first == "-----BEGIN OPENSSH PRIVATE KEY-----":
            cipher, blob = _parse_openssh(base64.b64decode("".join(rest[:-1]), validate=True))
            return cls(path, _type_of(blob), blob, is_encrypted=cipher != b"none")
        for name, key_type in _PEM_TYPES.items():
            if first == f"-----BEGIN {name} PRIVATE KEY-----":
                is_encrypted = any("ENCRYPTED" in line for line in rest[:2])
                return cls(path, key_type, _read_public_beside(path), is_encrypted=is_encrypted)
        blob = _parse_public(first)
        return cls(path, _type_of(blob), blob, is_public=True)


def _read_file(path: Path) -> tuple[bytes, os.stat_result]:
    """Return the file's contents, empty if it is larger than any key, and its status. Raises: OSError."""
    with open_file(path) as file:
        data, state = file.read(_SIZE_LIMIT + 1), os.fstat(file.fileno())
    return data if len(data) <= _SIZE_LIMIT else b"", state


def _parse_openssh(data: bytes) -> tuple[bytes, bytes]:
    """Return cipher and public key from OpenSSH's own format (PROTOCOL.key); neither is in the encrypted part."""
    if not data.startswith(_MAGIC):
        raise ValueError("no OpenSSH key")
    said = io.BytesIO(data[len(_MAGIC) :])
    cipher, _derivation, _options = _take(said), _take(said), _take(said)
    said.read(4)  # the number of keys
    return cipher, _take(said)


def _take(said: io.BytesIO) -> bytes:
    (length,) = struct.unpack(">I", said.read(4))
    taken = said.read(length)
    if len(taken) < length:
        raise ValueError("cut short")
    return taken


def _parse_public(line: str) -> bytes:
    key_type, encoded = line.split()[:2]
    blob = base64.b64decode(encoded, validate=True)
    if _type_of(blob) != key_type:
        raise ValueError("no public key")
    return blob


def _type_of(blob: bytes) -> str:
    return _take(io.BytesIO(blob)).decode("ascii")


def _read_public_beside(path: Path) -> bytes | None:
    try:
        return _parse_public(_read_file(path.with_name(f"{path.name}.pub"))[0].decode("ascii", errors="replace"))
    except (OSError, ValueError, struct.error):
        return None


def _advise(path: Path, text: str) -> str:
    if text.startswith("PuTTY-User-Key-File"):
        return "it is a PuTTY key: export it in OpenSSH format with puttygen"
    if "PRIVATE KEY-----" in text:
        return f"convert it to OpenSSH format with 'ssh-keygen -p -f {path}'"
    return "name a key file that ssh-keygen wrote"
