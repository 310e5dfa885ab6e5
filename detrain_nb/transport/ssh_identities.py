"""Keys offered to a host: files that were named, keys in ssh-agent, and keys that a passphrase unlocks."""

from __future__ import annotations

import contextlib
import copy
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import TransportError
from .known_hosts import fingerprint
from .ssh_config import HostSettings
from .ssh_key_file import KeyFile
from .ssh_socket import clean

if TYPE_CHECKING:
    import paramiko

__all__ = ["AskPassphrase", "Identities", "Offer"]

AskPassphrase = Callable[[str], str | None]  # path of a key file -> its passphrase; None: skip this key

_AGENT_LIMIT_S = 5.0
_DEFAULT_IDENTITIES = ("id_ed25519", "id_ecdsa", "id_rsa")


@dataclass(frozen=True)
class Offer:
    """Key to try, with its name for messages."""

    name: str
    key: paramiko.PKey


class Identities:
    """Keys for one host, in the order in which they are offered.

    The order is named files, keys in ssh-agent, ssh's default files; keys that need a passphrase come last. A key held
    by ssh-agent is used through the agent, even if its file is encrypted.
    """

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._agent: paramiko.Agent | None = None
        self._tried: list[str] = []
        self._left_out: list[str] = []

    def offer(self, ask_passphrase: AskPassphrase | None) -> Iterator[list[Offer]]:
        """Yield the keys for one connection at a time: first all usable keys, possibly none, then each unlocked key."""
        held = self._list_agent_keys()
        of_files: list[Offer] = []
        locked: list[KeyFile] = []
        for file in self._read_files():
            if in_agent := held.pop(file.public_blob or b"", None):
                of_files.append(Offer(f"{file.path} (in ssh-agent)", in_agent))
            elif file.is_public:
                self._left_out.append(f"{file.path} is a public key, and ssh-agent does not hold its private half")
            elif file.is_exposed:
                self._left_out.append(
                    f"{file.path} is open to others, and ssh refuses such a key: chmod 600 {file.path}"
                )
            elif key := self._try_loading(file):
                of_files += _with_certificate(file, key)
            else:
                locked += [file] if file.is_encrypted else []
        others = [] if self._settings.identities_only else [_name_agent_key(key) for key in held.values()]
        yield self._note(of_files + others if self._settings.identity_files else others + of_files)
        for file in locked:
            if ask_passphrase is None:
                self._left_out.append(f"{file.path} needs a passphrase (add it to ssh-agent: ssh-add {file.path})")
            elif key := _UNLOCKED.unlock(file, ask_passphrase):
                yield self._note(_with_certificate(file, key))
            else:
                self._left_out.append(f"{file.path} needs a passphrase, and none was given")

    def describe_failure(self) -> str:
        left_out = "".join(f"; {reason}" for reason in self._left_out)
        advice = "name the right key (identity_file, or IdentityFile in ~/.ssh/config), or add one there (ssh-copy-id)"
        if not self._tried:
            return f"there is no key to offer{left_out}: {advice}"
        return f"none of these keys lets user {self._settings.user} in: {', '.join(self._tried)}{left_out}: {advice}"

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()

    def _note(self, offers: list[Offer]) -> list[Offer]:
        self._tried += [offer.name for offer in offers]
        return offers

    def _list_agent_keys(self) -> dict[bytes, paramiko.AgentKey]:
        if not self._settings.use_agent:
            return {}
        try:
            self._agent = _ask_agent()
        except TransportError as exc:
            self._left_out.append(str(exc))
            return {}
        return {key.blob: key for key in self._agent.get_keys()}

    def _read_files(self) -> Iterator[KeyFile]:
        named = [Path(file) for file in self._settings.identity_files]
        defaults = [Path.home() / ".ssh" / name for name in _DEFAULT_IDENTITIES]
        for path in named or [path for path in defaults if path.exists()]:
            try:
                yield KeyFile.read(path)
            except TransportError as exc:
                self._left_out.append(str(exc))

    def _try_loading(self, file: KeyFile) -> paramiko.PKey | None:
        try:
            return _UNLOCKED.find(file) if file.is_encrypted else _load(file, None)
        except TransportError as exc:
            self._left_out.append(str(exc))
        return None


def _ask_agent() -> paramiko.Agent:
    """Return ssh-agent's keys. Raises: TransportError, also when it is silent: a forwarded agent may be asleep."""
    import paramiko

    answers: queue.SimpleQueue[paramiko.Agent | str] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(paramiko.Agent())
        except (paramiko.SSHException, OSError, ValueError) as exc:  # ValueError: a key's comment may not be UTF-8
            answers.put(clean(exc))

    threading.Thread(target=ask, name="detrain_nb ssh agent", daemon=True).start()
    try:
        answer = answers.get(timeout=_AGENT_LIMIT_S)
    except queue.Empty:
        raise TransportError(f"ssh-agent does not answer within {_AGENT_LIMIT_S:.0f} s") from None
    if isinstance(answer, str):
        raise TransportError(f"ssh-agent does not answer: {answer}")
    return answer


class _UnlockedKeys:
    """Keys unlocked in this process; the passphrases are not stored."""

    def __init__(self) -> None:
        self._keys: dict[KeyFile, paramiko.PKey] = {}
        self._asking = threading.RLock()  # hosts are connected to in parallel, and questions are asked one at a time

    def find(self, file: KeyFile) -> paramiko.PKey | None:
        return self._keys.get(file)

    def unlock(self, file: KeyFile, ask_passphrase: AskPassphrase) -> paramiko.PKey | None:
        """Ask for the passphrase unless another thread just did; None if none was given.

        Raises: TransportError when the passphrase is wrong.
        """
        with self._asking:
            if key := self.find(file):
                return key
            passphrase = ask_passphrase(str(file.path))
            if passphrase is None:
                return None
            key = self._keys[file] = _load(file, passphrase)
            return key


_UNLOCKED = _UnlockedKeys()


def _load(file: KeyFile, passphrase: str | None) -> paramiko.PKey:
    import paramiko

    kinds: dict[str, type[paramiko.PKey]] = {"ssh-ed25519": paramiko.Ed25519Key, "ssh-rsa": paramiko.RSAKey}
    kind = paramiko.ECDSAKey if file.key_type.startswith("ecdsa") else kinds.get(file.key_type)
    if kind is None:
        raise TransportError(
            f"the key file {file.path} has type {file.key_type}, supported only through ssh-agent: ssh-add {file.path}"
        )
    try:
        return kind.from_private_key_file(str(file.path), passphrase)
    except (paramiko.SSHException, ValueError, OSError) as exc:
        if passphrase is not None:
            raise TransportError(f"the passphrase of {file.path} is wrong") from exc
        raise TransportError(f"the key file {file.path} cannot be read: {clean(exc)}") from exc


def _with_certificate(file: KeyFile, key: paramiko.PKey) -> list[Offer]:
    """Return offers of the key: first with the certificate next to its file, if there is one, then without."""
    import paramiko

    offers = [Offer(str(file.path), key)]
    path = file.path.with_name(f"{file.path.name}-cert.pub")
    with contextlib.suppress(OSError, ValueError, paramiko.SSHException):
        certified = copy.copy(key)
        certified.load_certificate(str(path))
        offers.insert(0, Offer(str(path), certified))
    return offers


def _name_agent_key(key: paramiko.AgentKey) -> Offer:
    return Offer(f"{key.get_name()} {fingerprint(key.blob)} (in ssh-agent)", key)
