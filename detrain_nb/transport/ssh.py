"""An SSH connection: host keys checked before anything of ours is said, commands as sockets, files as fsspec.

The only module that imports paramiko, and inside functions: it takes 0.2 s that a notebook without hosts need not wait.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..errors import SpecError, TransportError
from .known_hosts import DEFAULT_PORT, KnownHosts, fingerprint
from .ssh_config import HostSettings, SshTarget, read_config
from .ssh_key_file import KeyFile
from .ssh_socket import dial, one_of_few
from .ssh_stream import Stream

if TYPE_CHECKING:
    import paramiko

__all__ = ["AskPassphrase", "SshConnection", "find_route", "resolve"]

AskPassphrase = Callable[[str], str | None]  # path of a key file -> its passphrase; None: do without this key

_LOG_NAME = "detrain_nb.ssh"
_LIMIT_S = 20.0
_KEEPALIVE_S = 5
_AGENT_LIMIT_S = 5.0
_CHANNEL_LIMIT_S = 15.0
_SFTP_SILENCE_S = 60.0
_SFTP_READ_BYTES = 32 << 10  # what every server gives at once
_SFTP_AHEAD_BYTES = 4 << 20  # of what is asked for before the first of it has come
_WINDOW_BYTES = 16 << 20
_PACKET_BYTES = 256 << 10
_JOIN_LIMIT_S = 2.0
_BANNER_ERROR = "Error reading SSH protocol banner"

# In order of preference; a paramiko that does not know one goes without. No CBC, no 3DES, no MD5, no SHA-1.
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
_MACS = ("hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com", "hmac-sha2-256", "hmac-sha2-512")
_RSA_HOST_KEYS = ("rsa-sha2-512", "rsa-sha2-256")
_HOST_KEYS = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    *_RSA_HOST_KEYS,
)
_DEFAULT_IDENTITIES = ("id_ed25519", "id_ecdsa", "id_rsa")

logging.getLogger(_LOG_NAME).addHandler(logging.NullHandler())  # else logging prints paramiko's errors on stderr


@dataclass(frozen=True)
class _Hop:
    settings: HostSettings
    transport: paramiko.Transport


class SshConnection:
    """An authenticated connection to one host, perhaps through others; used from any thread."""

    def __init__(self, hops: Sequence[_Hop]) -> None:
        """Made by `open`."""
        self._hops = tuple(hops)
        self._transport = hops[-1].transport
        self.settings = hops[-1].settings

    @classmethod
    def open(
        cls,
        target: SshTarget,
        *,
        ask_passphrase: AskPassphrase | None = None,
        limit_s: float = _LIMIT_S,
        config_path: Path | None = None,
    ) -> SshConnection:
        """Connect to ``target`` as ``ssh`` would, with keys only; ``config_path`` is ~/.ssh/config.

        Every hop has ``limit_s`` for network and authentication; what ``ask_passphrase`` takes does not count, and no
        connection to that host is open meanwhile. Without it, a key that needs a passphrase is left out.
        Raises: TransportError, SpecError when the target or the configuration cannot be; nothing is left open then.
        """
        path = config_path or Path.home() / ".ssh" / "config"
        route = find_route(target, read_config(path))
        if target.identity_file is not None:
            KeyFile.read(Path(route[-1].identity_files[0]))
        opening = _Opening(ask_passphrase, limit_s)
        hops: list[_Hop] = []
        try:
            for settings in route:
                hops.append(_Hop(settings, opening.open_hop(settings, via=hops[-1] if hops else None)))
        except BaseException:
            _shut(opening.transports)
            raise
        return cls(hops)

    @property
    def peer_address(self) -> str:
        """The IP address of the host; its name when it was reached through another host, which alone knows."""
        if len(self._hops) == 1:
            with contextlib.suppress(OSError):  # the connection is gone
                return str(self._transport.getpeername()[0])
        return self.settings.hostname

    @property
    def host_key_fingerprint(self) -> str:
        """``SHA256:...`` of the key that the host has shown."""
        assert self._transport.host_key is not None  # it was checked
        return fingerprint(self._transport.host_key.asbytes())

    @property
    def is_alive(self) -> bool:
        """The connection has not ended, as far as is known."""
        return all(hop.transport.is_active() for hop in self._hops)

    def open_stream(self, command: str) -> Stream:
        """Run a command, without a terminal, in the user's shell there. Raises: TransportError."""
        import paramiko

        channel = self._open_channel("a command", lambda opened: opened.exec_command(command))
        return Stream(channel, broken=(paramiko.SSHException,))

    def open_sftp_filesystem(self) -> Any:
        """Return an fsspec filesystem of the host over this connection, for absolute paths; its ``close()`` ends it.

        Raises: TransportError when the host offers no SFTP, or no further channel: files then have to go otherwise.
        """
        import paramiko

        opened: list[paramiko.SFTPClient] = []

        def begin(channel: paramiko.Channel) -> None:
            channel.settimeout(_SFTP_SILENCE_S)
            channel.invoke_subsystem("sftp")
            opened.append(paramiko.SFTPClient(channel))

        self._open_channel("SFTP", begin)
        return _filesystem_class()(opened[0], self.settings.hostname)

    def close(self) -> None:
        """Close the connection and those it goes through: streams end, files fail."""
        _shut([hop.transport for hop in self._hops])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _open_channel(self, what: str, begin: Callable[[paramiko.Channel], object]) -> paramiko.Channel:
        """Open a channel and begin ``what`` on it, within a limit."""
        import paramiko

        where = self.settings.where
        try:
            channel = self._transport.open_session(timeout=_CHANNEL_LIMIT_S)
            _hold_to_window(channel)
        except paramiko.ChannelException as exc:
            raise TransportError(
                f"{where}: sshd gives no further channel for {what}: raise MaxSessions there, or use fewer"
            ) from exc
        except (paramiko.SSHException, EOFError, OSError) as exc:
            raise TransportError(f"{where}: the connection broke: {_clean(exc)}") from exc

        def give_up() -> None:
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):  # it has just ended by itself
                channel.close()

        watch = threading.Timer(_CHANNEL_LIMIT_S, give_up)  # paramiko itself would wait for ever
        watch.daemon = True
        watch.start()
        try:
            begin(channel)
        except BaseException as exc:
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                channel.close()
            if isinstance(exc, (paramiko.SSHException, paramiko.SFTPError, EOFError, OSError)):
                reason = "does not offer" if self.is_alive else "hung up when asked for"
                raise TransportError(f"{where}: {reason} {what}: {_clean(exc)}") from exc
            raise
        finally:
            watch.cancel()
        return channel


def find_route(target: SshTarget, config_text: str) -> tuple[HostSettings, ...]:
    """Resolve a target and the hosts before it, in the order of connecting. Raises: SpecError.

    As with ssh, what the target overrides is not meant for the others; a host that leads to itself is passed over.
    """
    route = [resolve(target, config_text)]
    while hops := route[0].proxy_jump:
        met = {(settings.hostname, settings.port) for settings in route}
        before = [resolve(SshTarget.parse(hop), config_text) for hop in hops]
        before = [settings for settings in before if (settings.hostname, settings.port) not in met]
        if not before:
            break
        route = before + route
    return tuple(route)


def resolve(target: SshTarget, config_text: str) -> HostSettings:
    """Decide how a host is reached, by the text of an ssh_config. Raises: SpecError."""
    import paramiko

    try:
        options: Mapping[str, Any] = paramiko.SSHConfig.from_text(config_text).lookup(target.name)
    except (paramiko.SSHException, KeyError, ValueError, ImportError) as exc:
        raise SpecError(f"the SSH configuration for {target.name} cannot be used: {_clean(exc)}") from exc
    return HostSettings.decide(target, options)


class _HungUp(Exception):
    """The other side closed before it said that it speaks SSH: an sshd with too many at its door does so."""


class _Opening:
    """Opens one connection, hop by hop; ``transports`` are those that are open, whatever happens."""

    def __init__(self, ask_passphrase: AskPassphrase | None, limit_s: float) -> None:
        self.transports: list[paramiko.Transport] = []
        self._ask_passphrase = ask_passphrase
        self._limit_s = limit_s

    def open_hop(self, settings: HostSettings, *, via: _Hop | None) -> paramiko.Transport:
        """Connect, check the host key, authenticate: with the keys at hand, then with each that has to be unlocked."""
        with contextlib.closing(_Identities(settings)) as identities:
            for keys in identities.offer(self._ask_passphrase):
                with one_of_few(settings, through=via.settings if via else None):
                    deadline = time.monotonic() + self._limit_s
                    transport = self._connect(settings, via, deadline)
                    if _authenticate(transport, settings, keys, deadline=deadline):
                        transport.set_keepalive(_KEEPALIVE_S)
                        return transport
                    self._drop(transport)
            raise TransportError(f"{settings.where}: {identities.describe_failure()}")

    def _connect(self, settings: HostSettings, via: _Hop | None, deadline: float) -> paramiko.Transport:
        """Connect and check the host key; an sshd that is busy is asked again."""
        known = KnownHosts.read(settings.known_hosts_files)
        tries = 0
        while True:
            tries += 1
            sock = _dial_through(via, settings, deadline=deadline) if via else dial(settings, deadline=deadline)
            transport = self._make_transport(sock)
            try:
                _negotiate(transport, settings, known, is_direct=via is None, deadline=deadline)
                return transport
            except _HungUp as exc:
                self._drop(transport)
                pause_s = min(2.0, 0.1 * 2**tries) * random.uniform(0.5, 1.5)
                if time.monotonic() + pause_s >= deadline:
                    raise TransportError(
                        f"{settings.where}: hangs up at once ({tries} tries): its sshd takes no more connections "
                        f"(MaxStartups), or what listens on port {settings.port} is not SSH"
                    ) from exc
                time.sleep(pause_s)

    def _make_transport(self, sock: socket.socket | paramiko.Channel) -> paramiko.Transport:
        import paramiko

        transport = paramiko.Transport(sock, default_window_size=_WINDOW_BYTES, default_max_packet_size=_PACKET_BYTES)
        self.transports.append(transport)
        return transport

    def _drop(self, transport: paramiko.Transport) -> None:
        _shut([transport])
        self.transports.remove(transport)


def _hold_to_window(channel: paramiko.Channel) -> None:
    """End the connection to a host that sends more than it was allowed to: paramiko keeps what comes, all of it."""
    import paramiko

    def hold(pipe: paramiko.buffered_pipe.BufferedPipe[bytes]) -> None:
        feed = pipe.feed

        def feed_at_most(data: bytes) -> None:
            if len(pipe) + len(data) > 2 * _WINDOW_BYTES:
                raise paramiko.SSHException("it sends more than it was allowed to")
            feed(data)

        pipe.feed = feed_at_most  # type: ignore[method-assign]

    for pipe in (channel.in_buffer, channel.in_stderr_buffer):
        hold(pipe)


def _dial_through(via: _Hop, settings: HostSettings, *, deadline: float) -> paramiko.Channel:
    import paramiko

    there = (settings.hostname, settings.port)
    limit_s = max(0.1, deadline - time.monotonic())
    try:
        channel = via.transport.open_channel("direct-tcpip", there, ("127.0.0.1", 0), timeout=limit_s)
    except paramiko.ChannelException as exc:
        reason = "forwards nothing (AllowTcpForwarding)" if exc.code == 1 else "cannot connect to it"
        raise TransportError(f"{settings.where}: {via.settings.where}, which leads to it, {reason}") from exc
    except (paramiko.SSHException, EOFError, OSError) as exc:
        raise TransportError(f"{settings.where}: {via.settings.where}, which leads to it: {_clean(exc)}") from exc
    _hold_to_window(channel)
    return channel


def _negotiate(
    transport: paramiko.Transport, settings: HostSettings, known: KnownHosts, *, is_direct: bool, deadline: float
) -> None:
    """Agree on algorithms and check the host key. Raises: TransportError, _HungUp."""
    import paramiko

    name, port = settings.hostname, settings.port
    if settings.host_key_alias:
        name, port = settings.host_key_alias, DEFAULT_PORT  # as with ssh, it stands for the port too
    _choose_algorithms(transport, known.key_types(name, port))
    _wait_for_keys(transport, settings, deadline=deadline)
    try:
        key = transport.get_remote_server_key()
    except paramiko.SSHException as exc:
        raise TransportError(f"{settings.where}: hung up after the handshake") from exc
    can_be_scanned = is_direct and not settings.host_key_alias
    try:
        known.check(name, port, key.get_name(), key.asbytes(), can_be_scanned=can_be_scanned)
    except TransportError as exc:
        raise TransportError(f"{settings.where}: {exc}") from None


def _choose_algorithms(transport: paramiko.Transport, known_types: tuple[str, ...]) -> None:
    """Offer what is safe, host keys of the known types first."""
    preferred = known_types + (_RSA_HOST_KEYS if "ssh-rsa" in known_types else ())
    options = transport.get_security_options()
    options.ciphers = tuple(name for name in _CIPHERS if name in options.ciphers)
    options.digests = tuple(name for name in _MACS if name in options.digests)
    options.kex = tuple(name for name in options.kex if "sha1" not in name)
    options.key_types = tuple(sorted(_HOST_KEYS, key=lambda name: name not in preferred))
    transport.disabled_algorithms = {"pubkeys": ["ssh-rsa"]}
    transport.set_log_channel(_LOG_NAME)


def _wait_for_keys(transport: paramiko.Transport, settings: HostSettings, *, deadline: float) -> None:
    """Start the transport and wait until it has the host's key, which has signed the exchange."""
    import paramiko

    limit_s = max(0.1, deadline - time.monotonic())
    transport.banner_timeout = transport.handshake_timeout = limit_s + _JOIN_LIMIT_S  # ours comes first
    done = threading.Event()
    transport.start_client(event=done)
    is_done = done.wait(limit_s)
    if is_done and transport.is_active():
        return
    says_ssh = bool(transport.remote_version)
    if not is_done:
        what = "does not finish the handshake" if says_ssh else "takes the connection but does not speak SSH"
        raise TransportError(f"{settings.where}: {what} within {limit_s:.0f} s: is port {settings.port} that of sshd?")
    error = transport.get_exception() or EOFError()
    if not says_ssh and (str(error).startswith(_BANNER_ERROR) or isinstance(error, (EOFError, OSError))):
        raise _HungUp(str(error)) from error
    reason = "hung up during the handshake" if isinstance(error, EOFError) else f"the handshake failed: {_clean(error)}"
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        reason = f"offers nothing that is still safe, its sshd is too old: {_clean(error)}"
    raise TransportError(f"{settings.where}: {reason}") from error


@dataclass(frozen=True)
class _Offer:
    """A key to try, and what it is called in a message."""

    name: str
    key: paramiko.PKey


def _authenticate(
    transport: paramiko.Transport, settings: HostSettings, offers: list[_Offer], *, deadline: float
) -> bool:
    """Try keys in turn; False when each was refused. Raises: TransportError when something else is wrong."""
    import paramiko

    for number, offer in enumerate(offers, 1):
        transport.auth_timeout = max(0.1, deadline - time.monotonic())
        try:
            further = transport.auth_publickey(settings.user, offer.key)
        except paramiko.BadAuthenticationType as exc:
            raise TransportError(
                f"{settings.where}: takes no keys, only {_clean(', '.join(exc.allowed_types))}: "
                "allow PubkeyAuthentication in its sshd"
            ) from exc
        except paramiko.AuthenticationException as exc:
            if transport.is_active() and time.monotonic() < deadline:
                continue
            raise TransportError(f"{settings.where}: {_describe_break(transport, offer, number)}") from exc
        except (paramiko.SSHException, EOFError, OSError) as exc:
            raise TransportError(f"{settings.where}: trying {offer.name} broke the connection: {_clean(exc)}") from exc
        if further:
            raise TransportError(
                f"{settings.where}: takes {offer.name}, but wants {_clean(', '.join(further))} too, which is not "
                "supported"
            )
        return True
    return False


def _describe_break(transport: paramiko.Transport, offer: _Offer, number: int) -> str:
    if transport.is_active():
        return f"gave no answer to {offer.name} in time"
    return (
        f"hung up after {number} keys, the last was {offer.name}: when those are too many for it (MaxAuthTries), name "
        "the right one (identity_file, or IdentityFile and IdentitiesOnly in ~/.ssh/config)"
    )


class _Identities:
    """The keys for one host, in the order in which they are offered.

    Files that were named, then ssh-agent, then ssh's default files; those that need a passphrase last. A key that
    ssh-agent holds is used there, also when its file is encrypted.
    """

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._agent: paramiko.Agent | None = None
        self._tried: list[str] = []
        self._left_out: list[str] = []

    def offer(self, ask_passphrase: AskPassphrase | None) -> Iterator[list[_Offer]]:
        """Yield keys for one connection each: those at hand, perhaps none, then each that was unlocked."""
        held = self._list_agent_keys()
        of_files: list[_Offer] = []
        locked: list[KeyFile] = []
        for file in self._read_files():
            if in_agent := held.pop(file.public_blob or b"", None):
                of_files.append(_Offer(f"{file.path} (in ssh-agent)", in_agent))
            elif file.is_public:
                self._left_out.append(f"{file.path} is a public key, and ssh-agent does not hold its private half")
            elif key := self._try_loading(file):
                of_files += _with_certificate(file, key)
            else:
                locked += [file] if file.is_encrypted else []
        others = [] if self._settings.identities_only else [_name_agent_key(key) for key in held.values()]
        yield self._note(of_files + others if self._settings.identity_files else others + of_files)
        for file in locked:
            if ask_passphrase is None:
                self._left_out.append(f"{file.path} needs a passphrase (ssh-add {file.path} keeps it in ssh-agent)")
            elif key := _UNLOCKED.unlock(file, ask_passphrase):
                yield self._note(_with_certificate(file, key))
            else:
                self._left_out.append(f"{file.path} needs a passphrase, and none was given")

    def describe_failure(self) -> str:
        left_out = "".join(f"; {reason}" for reason in self._left_out)
        advice = "name the right one (identity_file, or IdentityFile in ~/.ssh/config), or add one there (ssh-copy-id)"
        if not self._tried:
            return f"there is no key to offer{left_out}: {advice}"
        return (
            f"user {self._settings.user} gets in with none of these keys: {', '.join(self._tried)}{left_out}: {advice}"
        )

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()

    def _note(self, offers: list[_Offer]) -> list[_Offer]:
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
    """What ssh-agent has. Raises: TransportError, also when it is silent: a forwarded one's machine may be asleep."""
    import paramiko

    answers: queue.SimpleQueue[paramiko.Agent | str] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(paramiko.Agent())
        except (paramiko.SSHException, OSError, ValueError) as exc:  # a comment may be no text
            answers.put(_clean(exc))

    threading.Thread(target=ask, name="detrain_nb ssh agent", daemon=True).start()
    try:
        answer = answers.get(timeout=_AGENT_LIMIT_S)
    except queue.Empty:
        raise TransportError(f"ssh-agent does not answer within {_AGENT_LIMIT_S:.0f} s") from None
    if isinstance(answer, str):
        raise TransportError(f"ssh-agent does not answer: {answer}")
    return answer


class _UnlockedKeys:
    """The keys whose passphrase was given to this process: the keys, never the passphrase."""

    def __init__(self) -> None:
        self._keys: dict[KeyFile, paramiko.PKey] = {}
        self._asking = threading.RLock()  # hosts are connected to at the same time: one question at a time

    def find(self, file: KeyFile) -> paramiko.PKey | None:
        return self._keys.get(file)

    def unlock(self, file: KeyFile, ask_passphrase: AskPassphrase) -> paramiko.PKey | None:
        """Ask, unless somebody else just has; None when none was given. Raises: TransportError when it is wrong."""
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
        raise TransportError(f"the key file {file.path} is of type {file.key_type}: it can be used from ssh-agent only")
    try:
        return kind.from_private_key_file(str(file.path), passphrase)
    except (paramiko.SSHException, ValueError, OSError) as exc:
        if passphrase is not None:
            raise TransportError(f"the passphrase of {file.path} is wrong") from exc
        raise TransportError(f"the key file {file.path} cannot be read: {_clean(exc)}") from exc


def _with_certificate(file: KeyFile, key: paramiko.PKey) -> list[_Offer]:
    """The key, before it the same with the certificate that lies beside it."""
    import paramiko

    offers = [_Offer(str(file.path), key)]
    path = file.path.with_name(f"{file.path.name}-cert.pub")
    with contextlib.suppress(OSError, ValueError, paramiko.SSHException):
        certified = copy.copy(key)
        certified.load_certificate(str(path))
        offers.insert(0, _Offer(str(path), certified))
    return offers


def _name_agent_key(key: paramiko.AgentKey) -> _Offer:
    return _Offer(f"{key.get_name()} {fingerprint(key.blob)} (in ssh-agent)", key)


def _shut(transports: Sequence[paramiko.Transport]) -> None:
    """Close transports, the innermost first, with their sockets and threads."""
    import paramiko

    for transport in reversed(transports):
        end_timer = transport.packetizer.complete_handshake  # which is a thread of its own
        for end in (end_timer, transport.close, transport.sock.close):
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):  # what it goes through has ended
                end()
    for transport in transports:
        if transport.is_alive():
            transport.join(_JOIN_LIMIT_S)


@functools.cache
def _filesystem_class() -> type[Any]:
    from fsspec.implementations.sftp import SFTPFileSystem

    class SshFileSystem(SFTPFileSystem):  # type: ignore[misc]  # fsspec is untyped
        """Files over a connection that is open already; never one of fsspec's own, which checks no host key."""

        cachable = False

        def __init__(self, sftp: paramiko.SFTPClient, host: str) -> None:
            self._sftp = sftp
            super().__init__(host)

        def _connect(self) -> None:
            self.ftp = self._sftp

        def put_file(self, lpath: str, rpath: str, callback: Any = None, **kwargs: Any) -> None:
            """fsspec's own tells no callback, and looks at every folder on the way. Raises: OSError."""
            with _sftp_errors():
                try:
                    self.ftp.put(lpath, rpath, _told(callback))
                except FileNotFoundError:
                    self.makedirs(self._parent(rpath), exist_ok=True)
                    self.ftp.put(lpath, rpath, _told(callback))

        def get_file(self, rpath: str, lpath: str, callback: Any = None, **kwargs: Any) -> None:
            """paramiko's own leaves a thread behind that asks for the rest when a copy is given up. Raises: OSError."""
            tell = _told(callback)
            with _sftp_errors(), self.ftp.open(rpath, "rb") as there, open(lpath, "wb") as here:
                size = there.stat().st_size or 0
                for start in range(0, size, _SFTP_AHEAD_BYTES):
                    if tell:
                        tell(start, size)
                    end = min(size, start + _SFTP_AHEAD_BYTES)
                    offsets = range(start, end, _SFTP_READ_BYTES)
                    here.writelines(there.readv([(at, min(_SFTP_READ_BYTES, end - at)) for at in offsets]))
                if here.tell() != size:
                    raise OSError(f"{rpath}: {here.tell()} of {size} bytes came")
                if tell:
                    tell(size, size)

        def info(self, path: str) -> Any:
            with _sftp_errors():
                return super().info(path)

        def rm_file(self, path: str) -> None:
            with _sftp_errors():
                self.ftp.remove(path)

        def close(self) -> None:
            with _sftp_errors():
                self.ftp.close()

    return SshFileSystem


def _told(callback: Any) -> Callable[[int, int], object] | None:
    """What paramiko calls with the bytes that are done, and those in all, for a callback of fsspec."""

    def tell(done: int, size: int) -> None:
        if callback.size != size:
            callback.set_size(size)
        callback.absolute_update(done)

    return tell if callback is not None else None


@contextlib.contextmanager
def _sftp_errors() -> Iterator[None]:
    """Whatever goes wrong is an OSError, as with other files."""
    import paramiko

    try:
        yield
    except (paramiko.SSHException, paramiko.SFTPError, EOFError) as exc:
        raise OSError(_clean(exc)) from exc


def _clean(said: object) -> str:
    """What the other side may have said, fit for one line."""
    text = str(said) or type(said).__name__
    return "".join(char if char.isprintable() else " " for char in text)[:200]
