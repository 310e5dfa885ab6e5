"""The way to an open SSH connection, hop by hop: the host key checked before anything of ours is said, then keys."""

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
_KEY_EXCHANGE = range(20, 50)  # the kinds of its messages, RFC 4250
_KEY_EXCHANGE_BYTES = 35_000  # RFC 4253: what every implementation takes; a key of RSA with 16,384 bits has 2,068
_EXTENSIONS = 7
_LEAST_EXTENSION_BYTES = 8  # the lengths of its name and its value
_JOIN_LIMIT_S = 2.0
_LEAST_TRY_S = 0.5  # in less it may not be seen that the other side hangs up
_BANNER_ERROR = "Error reading SSH protocol banner"
_METHOD = re.compile(r"[a-z0-9@.-]{1,64}")
_MOST_METHODS = 8

# In order of preference; a paramiko that does not know one goes without. No CBC, no 3DES, no MD5, no SHA-1.
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
_MACS = ("hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com", "hmac-sha2-256", "hmac-sha2-512")
_RSA_HOST_KEYS = ("rsa-sha2-512", "rsa-sha2-256")
_HOST_KEYS = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", *_RSA_HOST_KEYS)

logging.getLogger(_LOG_NAME).addHandler(logging.NullHandler())  # else logging prints paramiko's errors on stderr


def _clean_record(record: logging.LogRecord) -> bool:
    """Paramiko logs what the other side says, at every level, and the user's handlers print it."""
    said = record.getMessage()
    record.msg, record.args = clean(said) if said else "", ()
    return True


for _name in (_LOG_NAME, f"{_LOG_NAME}.sftp"):  # filters of a logger are not asked for its children
    logging.getLogger(_name).addFilter(_clean_record)


@dataclass(frozen=True)
class Hop:
    settings: HostSettings
    transport: paramiko.Transport


class _HungUp(Exception):
    """The other side closed before it said that it speaks SSH: an sshd with too many at its door does so."""


class Opening:
    """Opens one connection, hop by hop; ``transports`` are those that are open, whatever happens."""

    def __init__(self, ask_passphrase: AskPassphrase | None, limit_s: float, *, doors: Doors) -> None:
        self.transports: list[paramiko.Transport] = []
        self._ask_passphrase = ask_passphrase
        self._limit_s = limit_s
        self._doors = doors

    def open_hop(self, settings: HostSettings, *, via: Hop | None) -> paramiko.Transport:
        """Connect, check the host key, authenticate: with the keys at hand, then with each that has to be unlocked."""
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
        """Connect and check the host key; an sshd that is busy is asked again."""
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
                        f"{settings.where}: hangs up at once ({tries} tries): its sshd takes no more connections "
                        f"(MaxStartups), or what listens on port {settings.port} is not SSH"
                    ) from exc
                time.sleep(pause_s)

    def _make_transport(self, sock: StrangersSocket) -> paramiko.Transport:
        import paramiko

        transport = paramiko.Transport(
            sock,  # type: ignore[arg-type]  # it has all that a socket has
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
    """End the connection to a host that sends more than it was allowed to: paramiko keeps what comes, all of it."""
    import paramiko

    def hold(pipe: paramiko.buffered_pipe.BufferedPipe[bytes]) -> None:
        feed = pipe.feed

        def feed_at_most(data: bytes) -> None:
            if len(pipe) + len(data) > 2 * WINDOW_BYTES:
                raise paramiko.SSHException("it sends more than it was allowed to")
            feed(data)

        pipe.feed = feed_at_most  # type: ignore[method-assign]

    for pipe in (channel.in_buffer, channel.in_stderr_buffer):
        hold(pipe)


def _hold_to_packets(transport: paramiko.Transport) -> None:
    """End the connection to a host that sends larger packets than it may: paramiko waits for all that they announce.

    It also counts to any number of extensions that a host announces, and puts a number of a host key together in a time
    that grows with the square of its length: half a minute for a packet.
    """
    import paramiko

    read_all, read_message = transport.packetizer.read_all, transport.packetizer.read_message

    def read_at_most(n: int, check_rekey: bool = False) -> bytes:
        if n > 2 * _PACKET_BYTES:
            raise paramiko.SSHException(f"it sends a packet of {n} bytes")
        return read_all(n, check_rekey)

    def read_message_within() -> tuple[int, paramiko.Message]:
        kind, message = read_message()
        if kind in _KEY_EXCHANGE and len(message.get_remainder()) > _KEY_EXCHANGE_BYTES:
            raise paramiko.SSHException("it sends more than a key exchange needs")
        if kind == _EXTENSIONS:
            said = message.get_remainder()
            if int.from_bytes(said[:4], "big") > len(said) // _LEAST_EXTENSION_BYTES:
                raise paramiko.SSHException("it announces more extensions than it sends")
        return kind, message

    transport.packetizer.read_all = read_at_most  # type: ignore[method-assign]
    transport.packetizer.read_message = read_message_within  # type: ignore[method-assign]


def _raise_its_own(transport: paramiko.Transport) -> None:
    """What paramiko could not read is an error of SSH: else whatever its thread met is raised where we wait for it."""
    import paramiko

    get_exception = transport.get_exception

    def get_own() -> Exception | None:
        met = get_exception()
        if met is None or isinstance(met, (paramiko.SSHException, EOFError, OSError)):
            return met
        return paramiko.SSHException(f"what it sends is no SSH: {type(met).__name__}")

    transport.get_exception = get_own  # type: ignore[method-assign]


def _dial_through(via: Hop, settings: HostSettings, *, deadline: float) -> paramiko.Channel:
    import paramiko

    there = (settings.hostname, settings.port)
    limit_s = max(0.1, deadline - time.monotonic())
    try:
        channel = via.transport.open_channel("direct-tcpip", there, ("127.0.0.1", 0), timeout=limit_s)
    except paramiko.ChannelException as exc:
        reason = "forwards nothing (AllowTcpForwarding)" if exc.code == 1 else "cannot connect to it"
        raise TransportError(f"{settings.where}: {via.settings.where}, which leads to it, {reason}") from exc
    except (paramiko.SSHException, EOFError, OSError) as exc:
        raise TransportError(f"{settings.where}: {via.settings.where}, which leads to it: {clean(exc)}") from exc
    hold_to_window(channel)
    return channel


def _negotiate(
    transport: paramiko.Transport, sock: StrangersSocket, settings: HostSettings, known: KnownHosts, *, deadline: float
) -> None:
    """Agree on algorithms and check the host key. Raises: TransportError, HostKeyError, _HungUp."""
    import paramiko

    name, port = settings.hostname, settings.port
    if settings.host_key_alias:
        name, port = settings.host_key_alias, DEFAULT_PORT  # as with ssh, it stands for the port too
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
    """Offer what is safe, host keys of the known types first."""
    preferred = known_types + (_RSA_HOST_KEYS if "ssh-rsa" in known_types else ())
    options = transport.get_security_options()
    options.ciphers = tuple(name for name in _CIPHERS if name in options.ciphers)
    options.digests = tuple(name for name in _MACS if name in options.digests)
    # Paramiko computes Diffie-Hellman in Python, which holds every thread for as long as the host's prime is long.
    options.kex = tuple(name for name in options.kex if not name.startswith("diffie-hellman"))
    options.key_types = tuple(sorted(_HOST_KEYS, key=lambda name: name not in preferred))
    transport.disabled_algorithms = {"pubkeys": ["ssh-rsa"]}
    transport.set_log_channel(_LOG_NAME)


def _wait_for_keys(
    transport: paramiko.Transport, sock: StrangersSocket, settings: HostSettings, *, deadline: float
) -> None:
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
    if sock.has_said_too_much:
        raise TransportError(
            f"{settings.where}: sends more than a handshake before it has shown its host key: is port {settings.port} "
            "that of sshd?"
        )
    error = transport.get_exception() or EOFError()
    if not says_ssh and (str(error).startswith(_BANNER_ERROR) or isinstance(error, (EOFError, OSError))):
        raise _HungUp(str(error)) from error
    reason = "hung up during the handshake" if isinstance(error, EOFError) else f"the handshake failed: {clean(error)}"
    if not says_ssh:  # the error has what it says instead, which may be a sentence for the user
        reason = f"what it says first is not SSH: is port {settings.port} that of sshd?"
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        reason = f"offers nothing that is still safe, its sshd is too old: {clean(error)}"
    raise TransportError(f"{settings.where}: {reason}") from error


def _authenticate(
    transport: paramiko.Transport, settings: HostSettings, offers: list[Offer], *, deadline: float
) -> bool:
    """Try keys in turn; False when each was refused. Raises: TransportError when something else is wrong."""
    import paramiko

    for number, offer in enumerate(offers, 1):
        transport.auth_timeout = max(0.1, deadline - time.monotonic())
        try:
            further = transport.auth_publickey(settings.user, offer.key)
        except paramiko.BadAuthenticationType as exc:
            raise TransportError(
                f"{settings.where}: takes no keys, only {_list_methods(exc.allowed_types)}: "
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
                f"{settings.where}: takes {offer.name}, but wants {_list_methods(further)} too, which is not supported"
            )
        return True
    return False


def _list_methods(said: Iterable[str]) -> str:
    """The ways to authenticate that a host wants, as far as they are names: it may write a sentence instead."""
    names = [name for name in said if _METHOD.fullmatch(name)]
    return ", ".join(names[:_MOST_METHODS]) or "something that it does not name"


def _describe_break(transport: paramiko.Transport, offer: Offer, number: int) -> str:
    if transport.is_active():
        return f"gave no answer to {offer.name} in time"
    return (
        f"hung up after {number} keys, the last was {offer.name}: when those are too many for it (MaxAuthTries), name "
        "the right one (identity_file, or IdentityFile and IdentitiesOnly in ~/.ssh/config)"
    )


def shut(transports: Sequence[paramiko.Transport]) -> None:
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
