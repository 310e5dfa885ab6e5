"""SSH connections: commands as sockets, files through fsspec; an open connection has a verified host key.

Only the modules ssh*.py import paramiko, and inside functions: the import takes 0.2 s, which a notebook without hosts
does not pay.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..errors import SpecError, TransportError
from .known_hosts import fingerprint
from .ssh_config import HostSettings, SshTarget, read_config
from .ssh_files import MOST_NAMES, client_class, filesystem_class
from .ssh_identities import AskPassphrase
from .ssh_key_file import KeyFile
from .ssh_opening import Hop, Opening, hold_to_window, shut
from .ssh_socket import OUR_DOORS, clean
from .ssh_stream import Stream

if TYPE_CHECKING:
    import paramiko

__all__ = ["CONNECT_LIMIT_S", "AskPassphrase", "SshConnection", "find_route", "resolve"]

CONNECT_LIMIT_S = 20.0
_CHANNEL_LIMIT_S = 15.0
_SFTP_SILENCE_S = 60.0


class SshConnection:
    """Authenticated connection to one host, possibly through jump hosts; usable from any thread."""

    def __init__(self, hops: Sequence[Hop]) -> None:
        """Use `open` instead."""
        self._hops = tuple(hops)
        self._transport = hops[-1].transport
        self.settings = hops[-1].settings
        self.channel_limit_s = _CHANNEL_LIMIT_S

    @classmethod
    def open(
        cls,
        target: SshTarget,
        *,
        ask_passphrase: AskPassphrase | None = None,
        limit_s: float = CONNECT_LIMIT_S,
        config_path: Path | None = None,
    ) -> SshConnection:
        """Connect to ``target`` as ``ssh`` would, with keys only; ``config_path`` defaults to ~/.ssh/config.

        Every hop has ``limit_s`` for network and authentication. Time in ``ask_passphrase`` does not count, and no
        connection to that host is open meanwhile. Without ``ask_passphrase``, keys with a passphrase are skipped.
        Raises: TransportError; SpecError when the target or the configuration is invalid. Nothing is left open then.
        """
        route = find_route(target, read_config(config_path))
        if target.identity_file is not None:
            KeyFile.read(Path(route[-1].identity_files[0]))
        opening = Opening(ask_passphrase, limit_s, doors=OUR_DOORS)
        hops: list[Hop] = []
        try:
            for settings in route:
                hops.append(Hop(settings, opening.open_hop(settings, via=hops[-1] if hops else None)))
        except BaseException:
            shut(opening.transports)
            raise
        return cls(hops)

    @property
    def peer_address(self) -> str:
        """IP address of the host; its name if it was reached through a jump host, which alone knows the address."""
        if len(self._hops) == 1:
            with contextlib.suppress(OSError):  # the connection is closed
                return str(self._transport.getpeername()[0])
        return self.settings.hostname

    @property
    def local_address(self) -> str:
        """Address of this machine on the connection to the first hop; empty once that connection is closed."""
        sock: Any = self._hops[0].transport.sock  # a real socket; further hops use a channel of another connection
        with contextlib.suppress(OSError):
            return str(sock.getsockname()[0])
        return ""

    @property
    def host_key_fingerprint(self) -> str:
        """``SHA256:...`` fingerprint of the host's key."""
        assert self._transport.host_key is not None  # checked when the connection was opened
        return fingerprint(self._transport.host_key.asbytes())

    @property
    def is_alive(self) -> bool:
        """True while the connection is open, as far as is known."""
        return all(hop.transport.is_active() for hop in self._hops)

    def open_stream(self, command: str) -> Stream:
        """Run a command, without a terminal, in the user's shell on the host. Raises: TransportError."""
        import paramiko

        channel = self._open_channel("a command", lambda opened: opened.exec_command(command))
        return Stream(channel, broken=(paramiko.SSHException,))

    def open_sftp_filesystem(self, *, silence_limit_s: float = _SFTP_SILENCE_S, most_names: int = MOST_NAMES) -> Any:
        """Return an fsspec filesystem of the host over this connection, for absolute paths; end it with ``close()``.

        Listing a folder with more than ``most_names`` names is an error.

        Raises: TransportError when the host offers no SFTP, or no further channel: copy files another way then.
        """
        opened: list[paramiko.SFTPClient] = []

        def begin(channel: paramiko.Channel) -> None:
            channel.settimeout(silence_limit_s)
            channel.invoke_subsystem("sftp")
            opened.append(client_class()(channel, self.settings.where))

        self._open_channel("SFTP", begin)
        return filesystem_class()(opened[0], self.settings.hostname, most_names)

    def close(self) -> None:
        """Close the connection and those to its jump hosts: streams end, file operations fail."""
        shut([hop.transport for hop in self._hops])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _open_channel(self, what: str, begin: Callable[[paramiko.Channel], object]) -> paramiko.Channel:
        """Open a channel and begin ``what`` on it, within ``channel_limit_s``."""
        import paramiko

        where = self.settings.where
        try:
            channel = self._transport.open_session(timeout=self.channel_limit_s)
            hold_to_window(channel)
        except paramiko.ChannelException as exc:
            raise TransportError(
                f"{where}: sshd refuses a further channel for {what}: raise MaxSessions there, or use fewer at a time"
            ) from exc
        except (paramiko.SSHException, EOFError, OSError) as exc:
            raise TransportError(f"{where}: the connection broke: {clean(exc)}") from exc

        def give_up() -> None:
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):  # it has just been closed
                channel.close()

        watch = threading.Timer(self.channel_limit_s, give_up)  # paramiko itself would wait forever
        watch.daemon = True
        watch.start()
        try:
            begin(channel)
        except BaseException as exc:
            give_up()
            if isinstance(exc, (paramiko.SSHException, paramiko.SFTPError, EOFError, OSError)):
                reason = "does not offer" if self.is_alive else "hung up when asked for"
                raise TransportError(f"{where}: {reason} {what}: {clean(exc)}") from exc
            raise
        finally:
            watch.cancel()
        return channel


def find_route(target: SshTarget, config_text: str) -> tuple[HostSettings, ...]:
    """Resolve a target and its jump hosts, in the order of connecting. Raises: SpecError.

    As in ssh, overrides of the target do not apply to its jump hosts, and a jump host that refers to itself is skipped.
    """
    route = [resolve(target, config_text)]
    while hops := route[0].proxy_jump:
        met = {(settings.hostname, settings.port) for settings in route}
        before = [resolve(hop, config_text) for hop in hops]
        before = [settings for settings in before if (settings.hostname, settings.port) not in met]
        if not before:
            break
        route = before + route
    return tuple(route)


def resolve(target: SshTarget, config_text: str) -> HostSettings:
    """Return the settings for a host, from the target and the text of an ssh_config. Raises: SpecError."""
    import paramiko

    try:
        options: Mapping[str, Any] = _parse(config_text).lookup(target.name)
    except (paramiko.SSHException, KeyError, ValueError, ImportError) as exc:
        raise SpecError(f"the SSH configuration for {target.name} is invalid: {clean(exc)}") from exc
    return HostSettings.decide(target, options)


@lru_cache(maxsize=2)
def _parse(config_text: str) -> paramiko.SSHConfig:
    """Parse an ssh_config; cached, as parsing takes longer than a lookup and many hosts are looked up in one text."""
    import paramiko

    config = paramiko.SSHConfig.from_text(config_text)
    config.TOKENS_BY_CONFIG_KEY = {**config.TOKENS_BY_CONFIG_KEY, "identityfile": []}  # HostSettings reads them
    return config
