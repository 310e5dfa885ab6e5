"""Known host keys of a user, from known_hosts files in the format of sshd(8).

Invalid lines are skipped. ``@revoked`` is honoured in any file; ``@cert-authority`` is skipped, as host certificates
are not supported. Nothing is written: an unknown key is refused with the command that adds it.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
import shlex
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import HostKeyError, TransportError
from ..guarded import can_others_write, describe, open_file

__all__ = ["KnownHosts", "fingerprint"]

DEFAULT_PORT = 22
_HASHED = "|1|"


@dataclass(frozen=True)
class KnownHosts:
    """Contents of a set of known_hosts files."""

    lines: tuple[_Line, ...]
    files: tuple[Path, ...] = ()

    @classmethod
    def read(cls, paths: Iterable[Path]) -> KnownHosts:
        """Read the files that exist. Raises: TransportError when one of them cannot be read."""
        files = tuple(paths)
        return cls(tuple(line for path in files for line in _read_lines(path)), files)

    def key_types(self, host: str, port: int) -> tuple[str, ...]:
        """Return the types of the keys known for a host, to be preferred in the negotiation."""
        revoked = {line.blob for line in self._find_revoked(host, port)}
        return tuple(dict.fromkeys(line.key_type for line in self._find(host, port) if line.blob not in revoked))

    def check(self, host: str, port: int, key_type: str, key_blob: bytes) -> None:
        """Check that the key is known for the host.

        Raises: HostKeyError when the key is revoked, unknown, or differs from the known key.
        """
        name, shown = _look_up_name(host, port), fingerprint(key_blob)
        for line in self._find_revoked(host, port):
            if line.blob == key_blob:
                raise HostKeyError(
                    f"the host key of {name} is revoked ({line.where}): {key_type} {shown}",
                    advice="do not connect; ask the host's owner for its new key",
                )
        known = self._find(host, port)
        if any(line.blob == key_blob for line in known):
            return
        on_same_port = [line for line in known if line.names(name)]
        if on_same_port:
            raise _complain_of_change(on_same_port, name, key_type, shown)
        shown_key = f"{name} {key_type} {base64.b64encode(key_blob).decode()}"  # ssh-keyscan could reach another host
        users_file = self.files[0] if self.files else Path.home() / ".ssh" / "known_hosts"
        raise HostKeyError(
            f"the host key of {name} is not known: {key_type} {shown}",
            advice="compare this fingerprint with the one that the host's owner gives you, then add the key",
            command=f"echo {shlex.quote(shown_key)} >> {_quote_path(users_file)}",
        )

    def _find(self, host: str, port: int) -> list[_Line]:
        """Return the lines with a key for the host; as in ssh, a key known without a port is valid for any port."""
        names = dict.fromkeys([_look_up_name(host, port), _look_up_name(host, DEFAULT_PORT)])
        return [line for name in names for line in self.lines if line.marker == "" and line.names(name)]

    def _find_revoked(self, host: str, port: int) -> list[_Line]:
        names = {_look_up_name(host, port), _look_up_name(host, DEFAULT_PORT)}
        return [line for line in self.lines if line.marker == "@revoked" and any(map(line.names, names))]


def fingerprint(key_blob: bytes) -> str:
    """Write a public key as ``ssh-keygen -l`` does: ``SHA256:`` and base64 without padding."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key_blob).digest()).decode().rstrip("=")


@dataclass(frozen=True)
class _Line:
    path: Path
    number: int
    marker: str
    patterns: str
    key_type: str
    blob: bytes

    @property
    def where(self) -> str:
        return f"{self.path}, line {self.number}"

    def names(self, name: str) -> bool:
        """Return True when the line is for ``name``: ``host`` or ``[host]:port``, in lower case."""
        if self.patterns.startswith(_HASHED):
            return _is_hash_of(name, self.patterns)
        found = False
        for pattern in self.patterns.lower().split(","):
            if _matches(name, pattern.removeprefix("!")):
                if pattern.startswith("!"):
                    return False
                found = True
        return found


def _read_lines(path: Path) -> Iterator[_Line]:
    try:
        with open_file(path) as file:
            is_theirs = can_others_write(os.fstat(file.fileno()), file.fileno())
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return
    except OSError as exc:
        if os.path.realpath(path) == os.devnull:
            return
        raise TransportError(f"the known host keys in {path} cannot be read: {exc.strerror or exc}") from exc
    if is_theirs and path.parent == Path.home() / ".ssh":  # files elsewhere were named by the user
        raise TransportError(
            f"others can write {describe(path)}, which lists trusted host keys: chmod go-w {_quote_path(path)}, and "
            "chown it to yourself if another user owns it, or set HOME to your home directory"
        )
    for number, written in enumerate(text.split("\n"), 1):
        if line := _parse_line(path, number, written):
            yield line


def _parse_line(path: Path, number: int, written: str) -> _Line | None:
    """Parse a line with a key and a supported marker; None for comments and invalid lines."""
    words = written.split(maxsplit=4)
    marker = words.pop(0) if words and words[0].startswith("@") else ""
    if marker not in {"", "@revoked"} or len(words) < 3 or words[0].startswith("#"):
        return None
    patterns, key_type, encoded = words[:3]
    try:
        blob = base64.b64decode(encoded, validate=True)
        (length,) = struct.unpack_from(">I", blob)
    except (binascii.Error, ValueError, struct.error):
        return None
    if blob[4 : 4 + length] != key_type.encode(errors="replace"):
        return None
    return _Line(path, number, marker, patterns, key_type, blob)


def _matches(name: str, pattern: str) -> bool:
    """Match ``*`` and ``?``; brackets are literal, as in ``[host]:port``."""
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def _is_hash_of(name: str, written: str) -> bool:
    """Compare ``|1|salt|hash`` with the HMAC-SHA1 of a name."""
    salt, _, expected = written.removeprefix(_HASHED).partition("|")
    try:
        digest = hmac.digest(base64.b64decode(salt, validate=True), name.encode(), "sha1")
        return hmac.compare_digest(digest, base64.b64decode(expected, validate=True))
    except (binascii.Error, ValueError):
        return False


def _look_up_name(host: str, port: int) -> str:
    return host.lower() if port == DEFAULT_PORT else f"[{host.lower()}]:{port}"


def _complain_of_change(known: list[_Line], name: str, key_type: str, shown: str) -> HostKeyError:
    first = next((line for line in known if line.key_type == key_type), known[0])
    lines = ", ".join(f"{line.key_type} {fingerprint(line.blob)} ({line.where})" for line in known)
    return HostKeyError(
        f"the host key of {name} has changed: the host presents {key_type} {shown}, known_hosts has {lines}: "
        "someone may be intercepting the connection",
        advice="if the host's owner confirms the new key, remove the old one and connect again",
        command=f"ssh-keygen -R {shlex.quote(name)} -f {_quote_path(first.path)}",
    )


def _quote_path(path: Path) -> str:
    """Quote a path for a shell, with ``~/`` for the user's home."""
    try:
        return "~/" + shlex.quote(path.relative_to(Path.home()).as_posix())
    except (ValueError, RuntimeError):  # elsewhere; no home
        return shlex.quote(str(path))
