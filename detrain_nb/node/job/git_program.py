"""Runs git safely on untrusted repositories: no hooks, no filters, no prompts, only our configuration.

A token is only in the environment of git; a credential helper in its configuration passes it to the one host that it
is for.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO

from ...copying.json_lines import FilesError, clean
from ...plan.git_urls import GitUrl

__all__ = ["GitAccess", "GitFailed", "GitLimits", "GitUnreached", "explain", "run_git"]

_TOKEN = "DETRAIN_NB_GIT_TOKEN"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "GIT_SSL_CAINFO")
_KEPT = ("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "TEMP", "SYSTEMROOT", "SSH_AUTH_SOCK", *_PROXIES, *_CERTIFICATES)
_OURS = {
    "LC_ALL": "C",  # its messages are parsed
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "",
    "SSH_ASKPASS_REQUIRE": "never",
    "GIT_LFS_SKIP_SMUDGE": "1",
    "GIT_SSH_VARIANT": "ssh",
}
_SETTINGS = (
    f"core.hooksPath={os.devnull}",
    f"core.attributesFile={os.devnull}",
    "core.fsmonitor=false",
    "core.protectHFS=true",
    "core.protectNTFS=true",
    "core.autocrlf=false",
    "credential.helper=",
    "gc.auto=0",
    "maintenance.auto=false",
    "fetch.unpackLimit=1",  # index even small packs: unpacking needs large files in memory
    "pack.threads=4",  # the memory that each thread reserves counts towards the limit
    "core.packedGitWindowSize=32m",
    "core.packedGitLimit=256m",
    "submodule.recurse=false",
    "fetch.recurseSubmodules=false",
    "protocol.ext.allow=never",
    "filter.lfs.smudge=",
    "filter.lfs.process=",
    "filter.lfs.required=false",
    "http.lowSpeedLimit=1000",
    "http.lowSpeedTime=60",
)
_BOUNDED = 'ulimit -v "$1" 2>/dev/null; shift; exec git "$@"'
_HELPER = '!f() { test "$1" = get && printf "username=%s\\npassword=%s\\n" {user} "$' + _TOKEN + '"; }; f'
_SSH = "ssh -o BatchMode=yes -o StrictHostKeyChecking=yes -o ForwardAgent=no -o ConnectTimeout=30"
_CHUNK_BYTES = 1 << 16
_WORDS_BYTES = 1 << 14
_LOOK_GAP_S = 0.2
_END_LIMIT_S = 5.0
_CONNECT_LIMIT_S = 10.0  # git itself would wait for more than two minutes

_NOT_THERE = re.compile(r"couldn't find remote ref|not our ref|unadvertised object|no such remote ref", re.IGNORECASE)
_NO_MEMORY = re.compile("out of memory|cannot allocate memory|unable to create thread", re.IGNORECASE)
_NOT_LET_IN = re.compile(
    r"could not read Username|Authentication failed|terminal prompts disabled|returned error: 40[13]|HTTP 40[13]|"
    r"Permission denied|repository .* not found|returned error: 404|could not read Password|"
    r"does not appear to be a git",
    re.IGNORECASE,
)
_NOT_REACHED = re.compile(
    r"Could not resolve|Failed to connect|Couldn't connect|Connection (?:timed out|refused|reset)|"
    r"Network is unreachable|No route to host|Operation (?:timed out|too slow)|CONNECT tunnel failed|"
    r"from proxy after CONNECT|cannot run ssh",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class GitLimits:
    """Limits for a repository."""

    fetch_s: float = 1800.0
    local_s: float = 300.0
    output_bytes: int = 1 << 26
    fetched_bytes: int = 8 << 30
    laid_out_bytes: int = 32 << 30
    files: int = 200_000
    memory_bytes: int = 3 << 30  # of each process: git makes no deltas of files over 512 MB, and holds a file twice
    submodules: int = 64
    depth: int = 4  # of nested submodules


@dataclass(frozen=True)
class GitAccess:
    """Credentials for git: a token, hidden from repr, or the path of a private key on the machine that runs git."""

    token: str = field(default="", repr=False)
    ssh_key: str = ""


class GitFailed(FilesError):
    """Failure of git; ``said`` is its error output."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.said = said

    @property
    def is_unknown_ref(self) -> bool:
        """Whether the ref does not exist in the repository."""
        return _NOT_THERE.search(self.said) is not None


class GitUnreached(FilesError):
    """Failure to reach the host from this machine, with any credentials; a different machine may reach it."""


def run_git(
    args: Sequence[str],
    *,
    cwd: str,
    limits: GitLimits,
    limit_s: float = 0.0,
    url: GitUrl | None = None,
    access: GitAccess | None = None,
    may_redirect: bool = False,
    env: dict[str, str] | None = None,
    tick: Callable[[], object] = lambda: None,
) -> bytes:
    """Run git and return its output. ``tick`` is called meanwhile; if it raises, git is killed.

    ``url`` is the only place that git may connect to; without it, none. Raises: GitFailed; GitUnreached when git is not
    installed or the host does not answer; FilesError when git takes too long or prints too much.
    """
    access = access or GitAccess()
    if url and url.scheme in ("http", "https") and not any(map(os.environ.get, _PROXIES)):
        _knock(url)
    settings = [*_SETTINGS, f"http.followRedirects={'initial' if may_redirect else 'false'}"]
    words = [word for each in (*settings, *_credentials(url, access)) for word in ("-c", each)]
    process = _start([*words, *args], limits.memory_bytes, cwd=cwd, env={**_environment(url, access), **(env or {})})
    with _ended(process):
        out, err = _Reader(process.stdout, limits.output_bytes), _Reader(process.stderr, _WORDS_BYTES, is_tail=True)
        limit_s = limit_s or limits.local_s
        deadline = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_GAP_S)
                break
            tick()
            out.check(args[0])
            if time.monotonic() > deadline:
                raise FilesError(f"git {args[0]} did not finish within {limit_s:.0f} s")
        out.join()
        err.join()
        out.check(args[0])
        if process.returncode:
            said = bytes(err.data).decode(errors="replace")
            raise GitFailed(said.replace(access.token, "***") if access.token else said)
        return bytes(out.data)


def _knock(url: GitUrl) -> None:
    """Check that the host accepts connections; ssh has its own timeout. Raises: GitUnreached."""
    try:
        socket.create_connection((url.host.strip("[]"), url.port or 0), timeout=_CONNECT_LIMIT_S).close()
    except OSError as exc:
        raise GitUnreached(f"git {clean(url.text)} cannot be reached: {exc.strerror or exc}") from exc


def _start(args: Sequence[str], memory_bytes: int, *, cwd: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start git with limited memory, as a few bytes can unpack to many GB. Raises: GitUnreached without git."""
    if not shutil.which("git", path=env.get("PATH")):
        raise GitUnreached("git is not installed")
    bounded = ["/bin/sh", "-c", _BOUNDED, "sh", str(memory_bytes >> 10)] if os.name == "posix" else ["git"]
    return subprocess.Popen(
        [*bounded, *args],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _environment(url: GitUrl | None, access: GitAccess) -> dict[str, str]:
    env = {name: os.environ[name] for name in _KEPT if name in os.environ} | _OURS
    key = f" -o IdentitiesOnly=yes -i {shlex.quote(os.path.expanduser(access.ssh_key))}" if access.ssh_key else ""
    env["GIT_SSH_COMMAND"] = _SSH + key
    env["GIT_ALLOW_PROTOCOL"] = url.scheme if url else "none"  # no such protocol exists
    if access.token:
        env[_TOKEN] = access.token
    return env


def _credentials(url: GitUrl | None, access: GitAccess) -> list[str]:
    if url is None or not access.token:
        return []
    return [f"credential.{url.base}.helper={_HELPER.replace('{user}', url.token_user)}"]


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Stop git and its children after the block: first by SIGTERM, at which git removes its locks, then by SIGKILL."""
    try:
        yield
    finally:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
            deadline = time.monotonic() + _END_LIMIT_S
            while hasattr(os, "waitid") and time.monotonic() < deadline:
                if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    break  # not reaped yet: no other process can have its group id
                time.sleep(0.01)
            _signal(process, getattr(signal, "SIGKILL", signal.SIGTERM))
            process.wait(_END_LIMIT_S)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the whole process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)


class _Reader:
    """A thread that reads a pipe to its end, and keeps at most ``most`` bytes, the first or the last ones."""

    def __init__(self, pipe: IO[bytes] | None, most: int, *, is_tail: bool = False) -> None:
        self.data = bytearray()
        self._is_too_much = False
        self._pipe, self._most, self._is_tail = pipe, most, is_tail
        self._thread = threading.Thread(target=self._read, name="detrain_nb git", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the pipe."""
        self._thread.join(_END_LIMIT_S)

    def check(self, command: str) -> None:
        """Raise FilesError when there was more output than is kept."""
        if self._is_too_much:
            raise FilesError(f"git {command} printed more than {self._most} bytes: the repository is too large")

    def _read(self) -> None:
        assert self._pipe is not None
        with self._pipe as pipe, contextlib.suppress(OSError, ValueError):
            while data := os.read(pipe.fileno(), _CHUNK_BYTES):
                if self._is_tail:
                    self.data += data
                    del self.data[: -self._most]
                elif len(self.data) + len(data) > self._most:
                    self._is_too_much = True
                else:
                    self.data += data


def explain(exc: GitFailed, url: GitUrl, *, ref: str, access: GitAccess) -> FilesError:
    """Translate a failure of git into an error that says what is wrong with the repository, and what to do."""
    where = f"git {clean(url.text)}"
    if match := _NO_MEMORY.search(exc.said):
        return FilesError(f"{where}: git ran out of memory: {_last_line(exc.said, match[0])}")
    if exc.is_unknown_ref and not ref:
        return FilesError(f"{where}: its default branch has no commit: push one, or set ref to a different branch")
    if exc.is_unknown_ref:
        todo = "leave out origin/" if ref.startswith("origin/") else "check its name"
        return FilesError(
            f"{where}: there is no branch, tag or commit {clean(ref)!r}: {todo}, and check that it was pushed"
        )
    if match := _NOT_REACHED.search(exc.said):
        return GitUnreached(f"{where} cannot be reached: {_last_line(exc.said, match[0])}")
    if "Host key verification failed" in exc.said:
        return FilesError(
            f"{where}: the key of {url.host} is not in known_hosts: add it there, or use https and a token"
        )
    if _NOT_LET_IN.search(exc.said):
        if access.token:
            return FilesError(f"{where} does not accept the token, or does not exist: check that the token may read it")
        if url.scheme == "file":
            return FilesError(f"{where} is not a repository that can be read here: check its path and owner")
        if url.scheme == "ssh":
            return FilesError(
                f"{where} accepts no SSH key of this machine: name one (ssh_key), or use https and a token"
            )
        return FilesError(
            f"{where} is private, or does not exist: name the environment variable that holds a token for it (token)"
        )
    return FilesError(f"{where}: {_last_line(exc.said)}")


def _last_line(said: str, words: str = "") -> str:
    """Return the line of git's errors that gives the reason and contains ``words``."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and words in line]
    fatal = [line for line in lines if line.startswith(("fatal:", "error:"))]
    return clean((fatal or lines or ["git printed no error"])[0][:300])
