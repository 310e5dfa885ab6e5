"""Hosts of a testbed as the pods of a lease: each runs the entrypoint of sdl/container, as a user other than root.

From outside, a pod is reached only through a forwarded port of this machine; the pods reach each other directly.
"""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .testbed import Testbed

ENTRYPOINT = Path(__file__).parents[2] / "sdl/container/entrypoint.sh"
SSH_PORT, USER, HOME = 2222, "trainer", "/run/trainer"
_LIMIT_S = 120.0
# /run is private to the host. So is the host's home, which may hide this Python from other users.
_PREPARE = f"""
chmod 711 "$HOME" && chmod 755 /run && mkdir {HOME} && chown 12345:12345 {HOME} || exit
cp /etc/passwd /run/passwd && echo '{USER}:x:12345:12345::{HOME}:/bin/bash' >>/run/passwd || exit
mount --bind /run/passwd /etc/passwd && cat >/run/entrypoint.sh && chmod 755 /run/entrypoint.sh
"""


class Pod:
    """A host as a pod; ``output`` is what its container has printed."""

    def __init__(self, testbed: Testbed, host: str, folder: Path) -> None:
        self.host, self._testbed, self._log = testbed.host(host), testbed, folder / f"{host}.log"
        testbed.exec(host, _PREPARE, input=ENTRYPOINT.read_bytes(), check=True)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def public_key(self) -> str:
        """The user's public key."""
        return Path(f"{self.host.identity_file}.pub").read_text()

    def start(self, *command: str, **env: str) -> None:
        """Start or restart the container."""
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        given = [f"{name}={value}" for name, value in {"PATH": path, "HOME": HOME, "LANG": "C.UTF-8", **env}.items()]
        as_user = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", "env", "-i", *given]
        argv = [*self._testbed.enter(self.host.name), *as_user, "sh", "-c", 'cd && exec "$@"', "sh"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*argv, "/run/entrypoint.sh", *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def wait_for(self, text: str) -> None:
        """Wait until the container has printed ``text``."""
        _wait_until(lambda: text in self.output, lambda: f"no {text!r} in:\n{self.output}")

    def stop(self) -> int:
        """Stop the container as its runtime does; returns its exit status."""
        assert self._process is not None
        running = self._testbed.processes(self.host.name)
        first = min(pid for pid, argv in running.items() if "/run/entrypoint.sh" in argv[:2])
        self._testbed.exec(self.host.name, "kill", str(first), check=True)
        return self._process.wait(_LIMIT_S)

    def run(self, *command: str) -> str:
        """Run a command over SSH with the host's key; returns its output."""
        done = self.ask(*command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask(
        self, *command: str, identity_file: str | Path | None = None, methods: str = "publickey"
    ) -> subprocess.CompletedProcess[str]:
        """Run a command over SSH with the given key, by default the host's key."""
        known_hosts = self._log.with_suffix(".known")
        known_hosts.write_text(self.known_host(self.host.ip, SSH_PORT))
        options = [
            "StrictHostKeyChecking=yes",
            f"UserKnownHostsFile={known_hosts}",
            "IdentitiesOnly=yes",
            "BatchMode=yes",
            f"PreferredAuthentications={methods}",
        ]
        key = ["-i", str(identity_file or self.host.identity_file)]
        way = [*key, "-p", str(SSH_PORT), *(word for each in options for word in ("-o", each))]
        argv = ["ssh", "-F", "none", *way, f"{USER}@{self.host.ip}", *command]
        return subprocess.run(argv, capture_output=True, text=True, timeout=_LIMIT_S)

    def known_host(self, host: str, port: int) -> str:
        """Return the pod's line of known_hosts for this address and port."""
        kind, key, *_ = self._testbed.output(self.host.name, f"cat {HOME}/.detrain_nb/host_key.pub").split()
        return f"[{host}]:{port} {kind} {key}\n"


@contextlib.contextmanager
def forwarded(pod: Pod, port: int) -> Iterator[int]:
    """Yield a port of this machine's loopback that is forwarded to ``port`` of the pod."""
    end = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_forward, args=(listener, (pod.host.ip, port), end), daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            end.set()
            thread.join(_LIMIT_S)


def _forward(listener: socket.socket, target: tuple[str, int], end: threading.Event) -> None:
    """Forward the bytes of every connection until ``end`` is set."""
    other: dict[socket.socket, socket.socket] = {}
    with contextlib.ExitStack() as opened:
        while not end.is_set():
            readable, _, _ = select.select([listener, *other], [], [], 0.1)
            for sock in readable:
                if sock is listener:
                    ours = opened.enter_context(listener.accept()[0])
                    theirs = opened.enter_context(socket.create_connection(target, 10))
                    other.update({ours: theirs, theirs: ours})
                elif sock in other and not _pass_on(sock, other[sock]):
                    for each in (sock, other[sock]):
                        del other[each]
                        each.close()


def _pass_on(source: socket.socket, target: socket.socket) -> bool:
    """Forward one chunk; returns False if one of the two connections is closed."""
    with contextlib.suppress(OSError):
        if data := source.recv(1 << 16):
            target.sendall(data)
            return True
    return False


def _wait_until(holds: Callable[[], bool], describe: Callable[[], str]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.05)
