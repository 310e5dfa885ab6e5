"""SSH targets as a user names them, and their settings after ~/.ssh/config; no connection is made here."""

from __future__ import annotations

import functools
import glob
import itertools
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..guarded import can_others_write, describe, open_file
from ..text import USER, USER_RULE, split_target
from .known_hosts import DEFAULT_PORT
from .ssh_words import in_home, local_user, read_sign, split_words

__all__ = ["HostSettings", "SshTarget", "default_config", "list_hosts", "read_config", "without_questions"]

_NESTING_LIMIT = 16
_MOST_BYTES, _LEAST_BYTES = 1 << 20, 1 << 9  # of all files together; the least that each file counts
_LINE = re.compile(r"\s*(\w+)(?:\s*=\s*|\s+)(.*\S)\s*")
_CRITERIA = {"host", "originalhost", "user", "localuser", "exec"}  # of Match: those that paramiko evaluates
_NEVER = "Host !*"
_OF_SEVERAL_WORDS = {"userknownhostsfile", "globalknownhostsfile"}
_TO_THE_END = {"proxycommand", "localcommand", "remotecommand", "knownhostscommand"}  # the rest is a shell command
_ADDRESS_AT = r"[0-9A-Fa-f.]*:[0-9A-Fa-f.:]*%[A-Za-z0-9._-]+"  # an IPv6 address with its interface
_HOST_NAME = re.compile(rf"[A-Za-z0-9._:-]+|{_ADDRESS_AT}")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def default_config() -> Path:
    """Return the path of the user's own ssh_config."""
    return Path.home() / ".ssh" / "config"


@dataclass(frozen=True)
class SshTarget:
    """Host as a user names it: ``name`` is looked up in ~/.ssh/config, and fields other than None override that file.

    ``proxy_jump`` is a comma-separated list of ``[user@]host[:port]``, or "none". Raises: SpecError for invalid fields.
    """

    name: str
    host: str | None = None
    port: int | None = None
    user: str | None = None
    identity_file: str | None = None
    proxy_jump: str | None = None

    def __post_init__(self) -> None:
        _check_host("name of an SSH host", self.name)
        if self.host is not None:
            _check_host(f"address of {self.name}", self.host)
        if self.port is not None:
            _check_port(self.name, self.port)
        if self.user is not None:
            _check_user(self.name, self.user)
        if self.identity_file is not None:
            _check_path(self.name, self.identity_file)
        if self.proxy_jump is not None:
            read_hops(self.proxy_jump)

    @classmethod
    def parse(cls, text: str) -> SshTarget:
        """Read ``[user@]host[:port]``, with brackets around an IPv6 address that has a port. Raises: SpecError."""
        user, host, port, _ = split_target(text.strip().removeprefix("ssh://"))
        return cls(host, port=int(port) if port else None, user=user)  # refuses an invalid host with a reason


@dataclass(frozen=True)
class HostSettings:
    """Resolved settings for one host. Raises: SpecError for invalid fields."""

    hostname: str
    port: int
    user: str
    identity_files: tuple[str, ...] = ()  # named by the user or ssh_config; empty: ssh's default files
    proxy_jump: tuple[SshTarget, ...] = ()
    identities_only: bool = False
    use_agent: bool = True
    known_hosts_files: tuple[Path, ...] = ()
    host_key_alias: str | None = None

    def __post_init__(self) -> None:
        _check_host("address of an SSH host", self.hostname)
        _check_port(self.hostname, self.port)
        _check_user(self.hostname, self.user)
        for file in self.identity_files:
            _check_path(self.hostname, file)
        if self.host_key_alias is not None:
            _check_host(f"HostKeyAlias of {self.hostname}", self.host_key_alias)

    @classmethod
    def decide(cls, target: SshTarget, options: Mapping[str, Any]) -> HostSettings:
        """Return the target's values, else those of ssh_config, else ssh's defaults.

        ``options`` are those of ssh_config, with names in lower case, in their order in the file. Raises: SpecError.
        """
        user = options.get("user", "").replace("\\\\", "\\")  # ssh reads a double backslash as one
        host = cls(
            hostname=target.host or options.get("hostname", target.name).replace("%%", "%"),
            port=target.port or _read_port(target.name, options.get("port", "")),
            user=target.user or user or local_user(target.name),
            proxy_jump=_read_jump(target, options),
            identities_only=target.identity_file is not None or options.get("identitiesonly", "no").lower() == "yes",
            use_agent=options.get("identityagent", "").lower() != "none",
            host_key_alias=options.get("hostkeyalias"),
        )
        read = functools.partial(
            read_sign,
            name=target.name,
            hostname=host.hostname,
            port=host.port,
            user=host.user,
            key_name=host.host_key_alias or target.name,
        )
        named = [file for file in options.get("identityfile", []) if file.lower() != "none"]
        keys = [in_home(target.identity_file)] if target.identity_file else [in_home(file, read) for file in named]
        return replace(host, identity_files=tuple(map(str, keys)), known_hosts_files=_find_known_hosts(options, read))

    @property
    def where(self) -> str:
        """Host for a message: ``user@host:port``."""
        host = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        return f"{self.user}@{host}:{self.port}"


def read_hops(text: str) -> tuple[SshTarget, ...]:
    """Parse the value of ProxyJump: the hops in order, empty for "none". Raises: SpecError."""
    if text.strip().lower() == "none":
        return ()
    return tuple(map(SshTarget.parse, text.split(",")))


def read_config(path: Path | None = None) -> str:
    """Return the text of an ssh_config (default: the user's) with every Include expanded, as paramiko knows no Include.

    A Host or Match line in an included file applies only if the block around the Include applies. A Match by a
    criterion that cannot be evaluated here never applies. A missing file is empty.
    Raises: SpecError when a file cannot be read or others can write it, the text has more than 1 MB with all included
    files, or Includes are nested deeper than 16.
    """
    return "\n".join(_expand(path or default_config(), within=_Block("Host *", ()), depth=0, room=_Room()))


def list_hosts(path: Path) -> tuple[str, ...]:
    """Return the hosts that an ssh_config and its included files name, each once and in order, without patterns.

    Raises: SpecError as in `read_config`.
    """
    found: dict[str, None] = {}
    for line in read_config(path).splitlines():
        match = _LINE.fullmatch(line.strip())
        key = match[1].lower() if match else ""
        if match and key in {"host", "match"}:
            words = split_words(path, key, match[2])
            if key == "match":  # read_config turns a Host line of an included file into a Match
                named = [word for before, word in itertools.pairwise(words) if before == "originalhost"]
                words = ",".join(named).split(",")
            comment = next((number for number, word in enumerate(words) if word.startswith("#")), len(words))
            found.update(dict.fromkeys(name for name in words[:comment] if _PLAIN_NAME.fullmatch(name)))
    return tuple(found)


def without_questions(config: str) -> str:
    """Return a text of `read_config` without Match lines that run a command, and without DNS lookups.

    A list of hosts can then be resolved without running a command or a query for each of them.
    """
    return "\n".join(map(_without_question, config.splitlines()))


def _without_question(line: str) -> str:
    match = _LINE.fullmatch(line.strip())
    key = match[1].lower() if match else ""
    if match and key == "match" and "exec" in match[2].lower().replace("!", " ").split():
        return _NEVER
    return "" if key == "canonicalizehostname" else line


@dataclass(frozen=True)
class _Block:
    """First line of a block, and its criteria in the words of Match: None when the block never applies."""

    line: str
    criteria: tuple[str, ...] | None


@dataclass
class _Room:
    """Bytes left for a configuration, since files that include each other repeatedly could grow without bound."""

    left: int = _MOST_BYTES

    def take(self, size: int, path: Path) -> None:
        """Subtract ``size`` bytes. Raises: SpecError when none are left."""
        self.left -= size
        if self.left < 0:
            raise SpecError(f"{path}: the SSH configuration has more than 1 MB with all included files: include less")


def _expand(path: Path, *, within: _Block, depth: int, room: _Room) -> Iterator[str]:
    """Yield the lines of a file that is included ``within`` a block. Raises: SpecError."""
    if depth > _NESTING_LIMIT:
        raise SpecError(f"{path}: Include is nested deeper than {_NESTING_LIMIT}: check that no file includes itself")
    try:
        with open_file(path) as opened:
            state, data = os.fstat(opened.fileno()), opened.read(room.left + 1)
            is_open_to_others = can_others_write(state, opened.fileno())
    except FileNotFoundError:
        return
    except OSError as exc:
        if os.path.realpath(path) == os.devnull:
            return
        raise SpecError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    room.take(max(len(data), _LEAST_BYTES), path)
    if is_open_to_others:
        file_itself = Path(os.path.realpath(path))
        raise SpecError(
            f"others can write {describe(file_itself)}, which decides how hosts are reached; ssh refuses it too: "
            f"chmod go-w {shlex.quote(str(file_itself))}, and chown it to yourself if another user owns it"
        )
    block = within
    for line in data.decode("utf-8", errors="replace").splitlines():
        match = _LINE.fullmatch(line.strip())  # stripped, as matching takes quadratic time in trailing blanks
        key = match[1].lower() if match else ""
        if match and key == "include":
            for file in _find_included(path, _without_comment(match[2])):
                yield from _expand(file, within=block, depth=depth + 1, room=room)
                room.take(len(block.line), path)
                yield block.line
        elif match and key in {"host", "match"}:
            block = _read_block(path, key, _without_comment(match[2]), within=within)
            yield block.line
        elif match and key not in _TO_THE_END:
            yield _as_paramiko_reads(key, line, match[2])
        else:
            yield line


def _as_paramiko_reads(key: str, line: str, value: str) -> str:
    """Return the line without a trailing comment, and with quotes in the form that paramiko understands.

    Paramiko removes a quote from both ends of a value, even if the two belong to different words.
    """
    plain = _without_comment(value)
    if key in _OF_SEVERAL_WORDS:
        plain = f'"{plain}"'
    elif plain[:1] == plain[-1:] == "'" and plain.count("'") == 2 and '"' not in plain:
        plain = f'"{plain[1:-1]}"'
    return line if plain == value else line[: line.rindex(value)] + plain


def _without_comment(value: str) -> str:
    """Remove a comment, which begins with a ``#`` at the start of a word, as in ssh since 8.7."""
    quote = ""
    for place, char in enumerate(value):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "#" and value[place - 1 : place] in ("", " ", "\t"):
            return value[:place].rstrip()
    return value


def _read_block(path: Path, key: str, value: str, *, within: _Block) -> _Block:
    words = split_words(path, key, value)
    own = ("originalhost", ",".join(words)) if key == "host" else _read_criteria(words)
    if own is None or within.criteria is None:
        return _Block(_NEVER, None)
    criteria = within.criteria + own
    if key == "host" and not within.criteria:
        return _Block(f"Host {value}", criteria)
    return _Block(f"Match {shlex.join(criteria)}" if criteria else "Host *", criteria)


def _read_criteria(words: list[str]) -> tuple[str, ...] | None:
    """Parse the criteria of a Match line; None when one of them cannot be evaluated here."""
    criteria: list[str] = []
    while words:
        word, equals, wanted = words.pop(0).partition("=")
        word = word.lower()
        if equals:
            words.insert(0, wanted)
        if word in {"canonical", "final"}:
            criteria.append(word)
        elif word.removeprefix("!") in _CRITERIA and words:
            criteria += [word, words.pop(0)]
        elif word != "all":
            return None
    return tuple(criteria)


def _find_included(path: Path, value: str) -> Iterator[Path]:
    for pattern in split_words(path, "Include", value):
        below = Path.home() / ".ssh" / in_home(pattern)  # an absolute path stays itself
        yield from (Path(found) for found in sorted(glob.glob(str(below))) if not os.path.isdir(found))


def _read_port(name: str, text: str) -> int:
    if text.isascii() and text.isdecimal():
        return int(text)
    try:
        return socket.getservbyname(text, "tcp") if text else DEFAULT_PORT
    except (OSError, ValueError):
        raise SpecError(f"the SSH configuration of {name} has Port {text!r}: give a number, 1 to 65535") from None


def _read_jump(target: SshTarget, options: Mapping[str, Any]) -> tuple[SshTarget, ...]:
    """Return the jump hosts; as in ssh, the first of ProxyJump and ProxyCommand applies. Raises: SpecError.

    ProxyCommand is not supported.
    """
    if target.proxy_jump is not None:
        return read_hops(target.proxy_jump)
    for key, value in options.items():
        if key == "proxyjump":
            return read_hops(value)
        if key == "proxycommand":
            if value is None:  # "none"
                return ()
            raise SpecError(
                f"the SSH configuration of {target.name} has a ProxyCommand, which is not supported: use ProxyJump"
            )
    return ()


def _find_known_hosts(options: Mapping[str, Any], read: Callable[[str], str]) -> tuple[Path, ...]:
    """Return the known_hosts files of the user, then the machine's; "none" and /dev/null count as not given."""
    folder = Path.home() / ".ssh"
    system = Path("C:/ProgramData/ssh") if sys.platform == "win32" else Path("/etc/ssh")
    of_user = [in_home(word, read) for word in _read_paths(options, "UserKnownHostsFile")]
    of_all = [in_home(word) for word in _read_paths(options, "GlobalKnownHostsFile")]
    return (
        *(of_user or (folder / "known_hosts", folder / "known_hosts2")),
        *(of_all or (system / "ssh_known_hosts", system / "ssh_known_hosts2")),
    )


def _read_paths(options: Mapping[str, Any], key: str) -> list[str]:
    words = split_words("ssh_config", key, options.get(key.lower()) or "")
    return [word for word in words if word.lower() not in {"none", "/dev/null"}]


def _check_host(what: str, value: str) -> None:
    if not _HOST_NAME.fullmatch(value) or value.startswith("-"):
        raise SpecError(f"{what} {value!r}: {_find_fault(value)}")


def _check_user(host: str, value: str) -> None:
    if not USER.fullmatch(value):
        raise SpecError(f"user {value!r} of {host}: give {USER_RULE}")


def _find_fault(value: str) -> str:
    if not value:
        return "is empty: give one"
    if value.startswith("-"):
        return "starts with '-', like an option"
    wrong = next(char for char in value if not (char.isascii() and char.isalnum()) and char not in "._:-")
    if wrong.isalpha():
        return f"{wrong!a} is not an ASCII letter: give the name's DNS form (xn--...)"
    return f"{wrong!r} is not allowed: use letters, digits and . _ : -"


def _check_port(host: str, port: int) -> None:
    if not 1 <= port <= 65535:
        raise SpecError(f"port {port} of {host} is not between 1 and 65535")


def _check_path(host: str, path: str) -> None:
    if not path.strip() or not path.isprintable():
        raise SpecError(f"identity file {path!r} of {host} is not a valid path")
