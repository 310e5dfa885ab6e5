"""A git host on loopback: `git http-backend` behind HTTP, optionally with a token; and repositories to publish."""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_GIT = (
    "-c",
    "user.name=t",
    "-c",
    "user.email=t@t",
    "-c",
    "init.defaultBranch=main",
    "-c",
    "protocol.file.allow=always",
)


def git(*args: str, at: Path, given: str = "") -> str:
    """Run git as a user would, with ``given`` as its standard input; return its output."""
    env = {"PATH": os.environ["PATH"], "HOME": str(at), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(
        ["git", *_GIT, *args], cwd=at, env=env, input=given, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(work: Path, files: Mapping[str, str | bytes], *, message: str = "x") -> str:
    """Commit ``files`` and all other changes in the repository ``work``, created if missing; return the commit id."""
    work.mkdir(parents=True, exist_ok=True)
    if not (work / ".git").exists():
        git("init", "--quiet", at=work)
    for name, text in files.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    git("add", "--all", at=work)
    git("commit", "--quiet", "--allow-empty", "--message", message, at=work)
    return git("rev-parse", "HEAD", at=work)


@dataclass
class GitHost:
    """A server of the bare repositories in ``root``; with a ``token``, only requests that carry it are served."""

    root: Path
    port: int
    token: str = ""
    leads_to: str = ""  # the base URL to which all requests are redirected
    before_asked: dict[str, Callable[[], object]] = field(default_factory=dict)  # by path
    asked: list[tuple[str, str]] = field(default_factory=list)  # path and user:password of each request

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{name}"

    def publish(self, work: Path, name: str) -> str:
        """Push the repository ``work`` to the host as ``name``; return its URL."""
        if (self.root / name).exists():
            git("push", "--quiet", "--mirror", str(self.root / name), at=work)
        else:
            git("clone", "--quiet", "--bare", str(work), str(self.root / name), at=work)
        return self.url(name)


@contextlib.contextmanager
def git_host(root: Path, *, token: str = "") -> Iterator[GitHost]:
    root.mkdir(parents=True, exist_ok=True)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._serve(b"")

        def do_POST(self) -> None:
            if self.headers.get("Transfer-Encoding") == "chunked":
                data = b""
                while size := int(self.rfile.readline(), 16):
                    data += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                data = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            self._serve(data)

        def _serve(self, data: bytes) -> None:
            path, _, query = self.path.partition("?")
            user, _, given = base64.b64decode(self.headers.get("Authorization", "Basic ")[6:]).decode().partition(":")
            host.before_asked.get(path, list)()
            host.asked.append((path, f"{user}:{given}"))
            if host.leads_to:
                self.send_response(302)
                self.send_header("Location", host.leads_to + self.path)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if host.token and given != host.token:
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="git"')
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            env = {
                "PATH": os.environ["PATH"],
                "GIT_PROJECT_ROOT": str(root),
                "GIT_HTTP_EXPORT_ALL": "1",
                "GIT_CONFIG_NOSYSTEM": "1",
                "GIT_CONFIG_COUNT": "1",
                "GIT_CONFIG_KEY_0": "safe.directory",
                "GIT_CONFIG_VALUE_0": "*",
                "PATH_INFO": path,
                "QUERY_STRING": query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "CONTENT_LENGTH": str(len(data)),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            }
            done = subprocess.run(["git", "http-backend"], input=data, env=env, capture_output=True, timeout=30)
            head, _, body = done.stdout.partition(b"\r\n\r\n")
            lines = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
            self.send_response(int(lines.pop("Status", "200").split()[0]))
            for name, value in lines.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        host = GitHost(root, server.server_address[1], token)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield host
        finally:
            server.shutdown()
            thread.join()
