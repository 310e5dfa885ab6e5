"""The processes that run while a host of the testbed is up, started as ``hostproc.py init|relay FOLDER``.

``init`` is pid 1 of the host. ``relay`` is its cable if the link has a delay, a rate or a loss. FOLDER is the host's
folder; inventory.json is in its parent. Both write FOLDER/<role>.pid when they are ready.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import random
import re
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from pathlib import Path

# From <sys/mount.h>, <linux/if_tun.h>
_MS_NOSUID, _MS_BIND, _MS_REC = 2, 4096, 16384
_TUNSETIFF, _IFF_TAP_NO_PI = 0x400454CA, 0x1002

_BUFFER_S = 0.2  # a frame that would wait longer is dropped
_FRAMES_PER_TURN = 64
_MAX_FRAME_BYTES = 65536


def run_init(folder: Path) -> None:
    """Be pid 1 of a host: mount, set the host name, then only wait. Its exit kills all processes of the host."""
    stat = Path("/proc/self/stat").read_text()  # the outer /proc, which shows the outer pid
    inventory = json.loads((folder.parent / "inventory.json").read_text())
    home = Path(inventory["user_home"])
    covered = [home, Path("/tmp"), Path("/run"), Path("/dev/shm")]
    shared = [path for path in inventory["share"] if any(Path(path).is_relative_to(cover) for cover in covered)]
    opened = {path: os.open(path, os.O_PATH) for path in shared}  # before other mounts cover them
    authorized_keys = (folder / "home/.ssh/authorized_keys").read_bytes()

    _mount("proc", "/proc", kind="proc")
    for source, target, mode in [(folder / "home", home, 0o700), (folder / "tmp", Path("/tmp"), 0o1777)]:
        if inventory["disk"]:
            _mount("tmpfs", target, kind="tmpfs", flags=_MS_NOSUID, data=f"size={inventory['disk']}")
        else:
            _mount(source, target, flags=_MS_BIND)
        target.chmod(mode)
    (home / ".ssh").mkdir(mode=0o700, exist_ok=True)
    (home / ".ssh/authorized_keys").write_bytes(authorized_keys)
    for target in (Path("/dev/shm"), Path("/run")):
        _mount("tmpfs", target, kind="tmpfs", flags=_MS_NOSUID)
    Path("/run/sshd").mkdir(mode=0o755)  # the empty folder that sshd needs for privilege separation
    _mount(folder / "hosts", "/etc/hosts", flags=_MS_BIND)
    _look_up_names_in_hosts_only(folder)
    _let_in(inventory["hosts"][0]["user"], folder)
    for path, descriptor in opened.items():
        Path(path).mkdir(parents=True, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", path, flags=_MS_BIND | _MS_REC)
        os.close(descriptor)
    socket.sethostname(f"{inventory['prefix']}-{folder.name}")

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans leave no zombies
    _write_at_once(folder / "init.pid", stat)
    while True:
        signal.pause()


def _look_up_names_in_hosts_only(folder: Path) -> None:
    """Use only the hosts file, so that DNS and other name services do not resolve the host's own name."""
    system = Path("/etc/nsswitch.conf")
    if system.exists():
        own = folder / "nsswitch.conf"
        own.write_text(re.sub(r"(?m)^hosts:.*$", "hosts: files", system.read_text()))
        _mount(own, system, flags=_MS_BIND)


def _let_in(user: str, folder: Path) -> None:
    """Unlock the account: sshd refuses even keys if the password is locked with "!", as root's may be."""
    system = Path("/etc/shadow")
    if system.exists():
        own = folder / "shadow"
        own.touch(mode=0o600)
        own.write_text(f"{user}:*:::::::\n")
        _mount(own, system, flags=_MS_BIND)


def _mount(source: Path | str, target: Path | str, *, kind: str = "", flags: int = 0, data: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(os.fsencode(source), os.fsencode(target), kind.encode(), flags, data.encode()):
        code = ctypes.get_errno()
        raise OSError(code, f"mount {source} on {target}: {os.strerror(code)}")


def _write_at_once(path: Path, text: str) -> None:
    """Write a file atomically: no reader sees a part of it."""
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.rename(path)


class _End:
    """One end of the cable: a TAP device, and the frames in transit to it."""

    def __init__(self, device: str) -> None:
        self.fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self.fd, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TAP_NO_PI))
        self._free_at = 0.0  # when the last accepted frame will have left the cable
        self._arriving: deque[tuple[float, bytes]] = deque()

    def accept(self, frame: bytes, link: dict[str, float]) -> None:
        """Accept a frame from the other end, unless it is lost or the buffer is full."""
        now = time.monotonic()
        start = max(now, self._free_at)
        if random.random() < link["loss"] or start - now > _BUFFER_S:
            return
        rate = link["rate_bits_per_s"]
        self._free_at = start + (len(frame) * 8 / rate if rate else 0)
        self._arriving.append((self._free_at + link["delay_s"], frame))

    def deliver(self) -> float | None:
        """Deliver the frames that are due; return when the next one is due."""
        while self._arriving and self._arriving[0][0] <= time.monotonic():
            _, frame = self._arriving.popleft()
            try:
                os.write(self.fd, frame)
            except OSError as exc:
                if exc.errno not in (errno.EIO, errno.EAGAIN):  # EIO: the device is not up yet
                    raise
        return self._arriving[0][0] if self._arriving else None

    def receive(self) -> list[bytes]:
        """Read some of the frames that the device has sent."""
        frames: list[bytes] = []
        while len(frames) < _FRAMES_PER_TURN:
            try:
                frames.append(os.read(self.fd, _MAX_FRAME_BYTES))
            except BlockingIOError:
                break
        return frames


def run_relay(folder: Path) -> None:
    """Be a host's cable: carry frames between two TAP devices until one is removed. SIGHUP: read link.json again."""
    port = f"{folder.parent.name}-{folder.name}"
    near, far = _End(port), _End(f"{port}x")
    ways = {near.fd: (near, far), far.fd: (far, near)}
    link: dict[str, float] = {}

    def load_link(*_: object) -> None:
        link.update(json.loads((folder / "link.json").read_text()))

    load_link()
    signal.signal(signal.SIGHUP, load_link)
    poll = select.epoll()
    for fd in ways:
        poll.register(fd, select.EPOLLIN)
    _write_at_once(folder / "relay.pid", Path("/proc/self/stat").read_text())
    try:
        while True:
            due = [at for end in (near, far) if (at := end.deliver()) is not None]
            wait_s = max(0.0, min(due) - time.monotonic()) if due else None
            for fd, _ in poll.poll(wait_s):
                source, target = ways[fd]
                for frame in source.receive():
                    target.accept(frame, link)
    except OSError as exc:  # the host has exited, and its device was removed
        print(f"relay of {port} ends: {exc}", file=sys.stderr)


if __name__ == "__main__":
    {"init": run_init, "relay": run_relay}[sys.argv[1]](Path(sys.argv[2]))
