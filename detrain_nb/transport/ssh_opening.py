"""Opening of an SSH connection, hop by hop: the host key is checked before we send anything, then keys are tried."""

from __future__ import annotations

import contextlib
import logging
import random
import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import HostKeyError, TransportError
from .known_hosts import DEFAULT_PORT, KnownHosts
from .ssh_config import HostSettings
from .ssh_identities import AskPassphrase, Identities, Offer
from .ssh_socket import Doors, StrangersSocket, clean, dial

if TYPE_CHECKING:
    import paramiko

__all__ = ["Hop", "Opening", "hold_to_window", "shut"]

_LOG_NAME = "detrain_nb.ssh"
_KEEPALIVE_S = 5
WINDOW_BYTES = 16 << 20
_PACKET_BYTES = 256 << 10
_KEY_EXCHANGE = range(20, 50)  # message numbers of the key exchange, RFC 4250
_KEY_EXCHANGE_BYTES = 35_000  # RFC 4253: all implementations accept as much; an RSA key of 16,384 bits has 2,068
_EXTENSIONS = 7
_LEAST_EXTENSION_BYTES = 8  # the length fields of its name and value
_JOIN_LIMIT_S = 2.0
_LEAST_TRY_S = 0.5  # in less time we might not notice that the other side hangs up
_BANNER_ERROR = "Error reading SSH protocol banner"
_METHOD = re.compile(r"[a-z0-9@.-]{1,64}")
_MOST_METHODS = 8

# In order of preference; those that paramiko does not know are left out. No CBC, no 3DES, no MD5, no SHA-1.
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
_MACS = ("hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com", "hmac-sha2-256", "hmac-sha2-512")
_RSA_HOST_KEYS = ("rsa-sha2-512", "rsa-sha2-256")
_HOST_KEYS = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", *_RSA_HOST_KEYS)

logging.getLogger(_LOG_NAME).addHandler(logging.NullHandler())  # else logging prints paramiko's errors to stderr


def _clean_record(record: logging.LogRecord) -> bool:
    """Clean a log record: paramiko logs the other side's text, at every level, and the user's handlers print it."""
    said = record.getMessage()
    record.msg, record.args = clean(said) if said else "", ()
    return True


for _name in (_LOG_NAME, f"{_LOG_NAME}.sftp"):  # filters of a logger do not apply to its children
    logging.getLogger(_name).addFilter(_clean_record)


@dataclass(frozen=True)
class Hop:
    settings: HostSettings
    transport: paramiko.Transport


class _HungUp(Exception):
    """The other side closed the connection before its SSH banner, as an sshd with too many connections does."""


class Opening:
    """Opening of one connection, hop by hop; ``transports`` are the currently open ones, also after an error."""

    def __init__(self, ask_passphrase: AskPassphrase | None, limit_s: float, *, doors: Doors) -> None:
        self.transports: list[paramiko.Transport] = []
        self._ask_passphrase = ask_passphrase
        self._limit_s = limit_s
        self._doors = doors

    def open_hop(self, settings: HostSettings, *, via: Hop | None) -> paramiko.Transport:
        """Connect, check the host key, and authenticate: first with usable keys, then with each key to be unlocked.

        Raises: TransportError, HostKeyError.
        """
        with contextlib.closing(Identities(settings)) as identities:
            for keys in identities.offer(self._ask_passphrase):
                with self._doors.place_at(settings, through=via.settings if via else None):
                    deadline = time.monotonic() + self._limit_s
                    transport = self._connect(settings, via, deadline)
                    if _authenticate(transport, settings, keys, deadline=deadline):
                        transport.set_keepalive(_KEEPALIVE_S)
                        return transport
                    self._drop(transport)
            raise TransportError(f"{settings.where}: {identities.describe_failure()}")

    def _connect(self, settings: HostSettings, via: Hop | None, deadline: float) -> paramiko.Transport:
        """Connect and check the host key; retry while sshd is too busy."""
        known = KnownHosts.read(settings.known_hosts_files)
        tries = 0
        while True:
            tries += 1
            sock = StrangersSocket(
                _dial_through(via, settings, deadline=deadline) if via else dial(settings, deadline=deadline)
            )
            transport = self._make_transport(sock)
            try:
                _negotiate(transport, sock, settings, known, deadline=deadline)
                sock.trust()
                return transport
            except _HungUp as exc:
                self._drop(transport)
                pause_s = min(2.0, 0.1 * 2**tries) * random.uniform(0.5, 1.5)
                if time.monotonic() + pause_s + _LEAST_TRY_S >= deadline:
                    raise TransportError(
                        f"{settings.where}: hangs up at once ({tries} tries): its sshd accepts no more connections "
                        f"(MaxStartups), or the server on port {settings.port} is not sshd"
                    ) from exc
                time.sleep(pause_s)

    def _make_transport(self, sock: StrangersSocket) -> paramiko.Transport:
        import paramiko

        transport = paramiko.Transport(
            sock,  # type: ignore[arg-type]  # it has all methods of a socket
            default_window_size=WINDOW_BYTES,
            default_max_packet_size=_PACKET_BYTES,
        )
        _hold_to_packets(transport)
        _raise_its_own(transport)
        self.transports.append(transport)
        return transport

    def _drop(self, transport: paramiko.Transport) -> None:
        shut([transport])
        self.transports.remove(transport)


def hold_to_window(channel: paramiko.Channel) -> None:
    """End the connection to a host that sends more than the window allows: paramiko would buffer all of it."""
    import paramiko

    def hold(pipe: paramiko.buffered_pipe.BufferedPipe[bytes]) -> None:
        feed = pipe.feed

        def feed_at_most(data: bytes) -> None:
            if len(pipe) + len(data) > 2 * WINDOW_BYTES:
                raise paramiko.SSHException("the host sends more data than the window allows")
            feed(data)

        pipe.feed = feed_at_most  # type: ignore[method-assign]

    for pipe in (channel.in_buffer, channel.in_stderr_buffer):
        hold(pipe)


def _hold_to_packets(transport: paramiko.Transport) -> None:
    """End the connection to a host that sends oversized packets: paramiko waits for as many bytes as they announce.

    Paramiko also loops over any number of extensions that a host announces, and parses the numbers of a host key in
    quadratic time: half a minute for a packet.
    """
    import paramiko

    read_all, read_message = transport.packetizer.read_all, transport.packetizer.read_message

    def read_at_most(n: int, check_rekey: bool = False) -> bytes:
        if n > 2 * _PACKET_BYTES:
            raise paramiko.SSHException(f"the host sends a packet of {n} bytes")
        return read_all(n, check_rekey)

    def read_message_within() -> tuple[int, paramiko.Message]:
        kind, message = read_message()
        if kind in _KEY_EXCHANGE and len(message.get_remainder()) > _KEY_EXCHANGE_BYTES:
            raise paramiko.SSHException("the host sends more than a key exchange needs")
        if kind == _EXTENSIONS:
            said = message.get_remainder()
            if int.from_bytes(said[:4], "big") > len(said) // _LEAST_EXTENSION_BYTES:
                raise paramiko.SSHException("the host announces more extensions than it sends")
        return kind, message

    transport.packetizer.read_all = read_at_most  # type: ignore[method-assign]
    transport.packetizer.read_message = read_message_within  # type: ignore[method-assign]


def _raise_its_own(transport: paramiko.Transport) -> None:
    """Turn any exception of paramiko's thread into an SSHException; else we would re-raise arbitrary exceptions."""
    import paramiko

    get_exception = transport.get_exception

    def get_own() -> Exception | None:
        met = get_exception()
        if met is None or isinstance(met, (paramiko.SSHException, EOFError, OSError)):
            return met
        return paramiko.SSHException(f"the host sends invalid SSH data: {type(met).__name__}")

    transport.get_exception = get_own  # type: ignore[method-assign]


def _dial_through(via: Hop, settings: HostSettings, *, deadline: float) -> paramiko.Channel:
    import paramiko

    there = (settings.hostname, settings.port)
    limit_s = max(0.1, deadline - time.monotonic())
    try:
        channel = via.transport.open_channel("direct-tcpip", there, ("127.0.0.1", 0), timeout=limit_s)
    except paramiko.ChannelException as exc:
        reason = "forwards nothing (AllowTcpForwarding)" if exc.code == 1 else "cannot connect to it"
        raise TransportError(f"{settings.where}: its jump host {via.settings.where} {reason}") from exc
    except (paramiko.SSHException, EOFError, OSError) as exc:
        raise TransportError(f"{settings.where}: its jump host {via.settings.where} failed: {clean(exc)}") from exc
    hold_to_window(channel)
    return channel


def _negotiate(
    transport: paramiko.Transport, sock: StrangersSocket, settings: HostSettings, known: KnownHosts, *, deadline: float
) -> None:
    """Agree on algorithms and check the host key. Raises: TransportError, HostKeyError, _HungUp."""
    import paramiko

    name, port = settings.hostname, settings.port
    if settings.host_key_alias:
        name, port = settings.host_key_alias, DEFAULT_PORT  # as in ssh, an alias replaces the port too
    _choose_algorithms(transport, known.key_types(name, port))
    _wait_for_keys(transport, sock, settings, deadline=deadline)
    try:
        key = transport.get_remote_server_key()
    except paramiko.SSHException as exc:
        raise TransportError(f"{settings.where}: hung up after the handshake") from exc
    try:
        known.check(name, port, key.get_name(), key.asbytes())
    except HostKeyError as exc:
        raise HostKeyError(f"{settings.where}: {exc.fault}", advice=exc.advice, command=exc.command) from None


def _choose_algorithms(transport: paramiko.Transport, known_types: tuple[str, ...]) -> None:
    """Offer safe algorithms only, host keys of the known types first."""
    preferred = known_types + (_RSA_HOST_KEYS if "ssh-rsa" in known_types else ())
    options = transport.get_security_options()
    options.ciphers = tuple(name for name in _CIPHERS if name in options.ciphers)
    options.digests = tuple(name for name in _MACS if name in options.digests)
    # Paramiko computes Diffie-Hellman in Python, which blocks all threads, for longer the larger the host's prime.
    options.kex = tuple(name for name in options.kex if not name.startswith("diffie-hellman"))
    options.key_types = tuple(sorted(_HOST_KEYS, key=lambda name: name not in preferred))
    transport.disabled_algorithms = {"pubkeys": ["ssh-rsa"]}
    transport.set_log_channel(_LOG_NAME)


def _wait_for_keys(
    transport: paramiko.Transport, sock: StrangersSocket, settings: HostSettings, *, deadline: float
) -> None:
    """Start the transport and wait for the host's key, which has signed the key exchange. Raises: TransportError."""
    import paramiko

    limit_s = max(0.1, deadline - time.monotonic())
    transport.banner_timeout = transport.handshake_timeout = limit_s + _JOIN_LIMIT_S  # our own limit expires first
    done = threading.Event()
    transport.start_client(event=done)
    is_done = done.wait(limit_s)
    if is_done and transport.is_active():
        return
    says_ssh = bool(transport.remote_version)
    if not is_done:
        what = "does not finish the handshake" if says_ssh else "accepts the connection but does not speak SSH"
        raise TransportError(f"{settings.where}: {what} within {limit_s:.0f} s: is sshd on port {settings.port}?")
    if sock.has_said_too_much:
        raise TransportError(
            f"{settings.where}: sends more than a handshake before its host key: is sshd on port {settings.port}?"
        )
    error = transport.get_exception() or EOFError()
    if not says_ssh and (str(error).startswith(_BANNER_ERROR) or isinstance(error, (EOFError, OSError))):
        raise _HungUp(str(error)) from error
    reason = "hung up during the handshake" if isinstance(error, EOFError) else f"the handshake failed: {clean(error)}"
    if not says_ssh:  # the error quotes the other side's text, which may be made to look like advice to the user
        reason = f"its first bytes are not SSH: is sshd on port {settings.port}?"
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        reason = f"offers only unsafe algorithms, its sshd is too old: {clean(error)}"
    raise TransportError(f"{settings.where}: {reason}") from error


def _authenticate(
    transport: paramiko.Transport, settings: HostSettings, offers: list[Offer], *, deadline: float
) -> bool:
    """Try keys in turn; False when all were refused. Raises: TransportError for any other failure."""
    import paramiko

    for number, offer in enumerate(offers, 1):
        transport.auth_timeout = max(0.1, deadline - time.monotonic())
        try:
            further = transport.auth_publickey(settings.user, offer.key)
        except paramiko.BadAuthenticationType as exc:
            raise TransportError(
                f"{settings.where}: accepts no keys, only {_list_methods(exc.allowed_types)}: "
                "allow PubkeyAuthentication in its sshd"
            ) from exc
        except paramiko.AuthenticationException as exc:
            if transport.is_active() and time.monotonic() < deadline:
                continue
            raise TransportError(f"{settings.where}: {_describe_break(transport, offer, number)}") from exc
        except (paramiko.SSHException, EOFError, OSError) as exc:
            raise TransportError(f"{settings.where}: trying {offer.name} broke the connection: {clean(exc)}") from exc
        if further:
            raise TransportError(
                f"{settings.where}: accepts {offer.name}, but also requires {_list_methods(further)}, which is not "
                "supported"
            )
        return True
    return False


def _list_methods(said: Iterable[str]) -> str:
    """Return the authentication methods that a host names, without text that is no name, such as a sentence."""
    names = [name for name in said if _METHOD.fullmatch(name)]
    return ", ".join(names[:_MOST_METHODS]) or "an unnamed method"


def _describe_break(transport: paramiko.Transport, offer: Offer, number: int) -> str:
    if transport.is_active():
        return f"did not answer in time when offered {offer.name}"
    return (
        f"hung up after {number} keys, the last was {offer.name}: if its MaxAuthTries allows no more keys, name the "
        "right one (identity_file, or IdentityFile and IdentitiesOnly in ~/.ssh/config)"
    )


def shut(transports: Sequence[paramiko.Transport]) -> None:
    """Close transports, the innermost first, with their sockets and threads."""
    import paramiko

    for transport in reversed(transports):
        end_timer = transport.packetizer.complete_handshake  # ends the handshake timer, which has its own thread
        for end in (end_timer, transport.close, transport.sock.close):
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):  # its underlying connection is closed
                end()
    for transport in transports:
        if transport.is_alive():
            transport.join(_JOIN_LIMIT_S)
