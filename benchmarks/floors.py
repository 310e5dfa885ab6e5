"""Floors for figures without a peer: the same ranks started by torchrun, the same bytes over one socket."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_START_LIMIT_S = 180.0
_END_LIMIT_S = 30.0
_SOCKET_LIMIT_S = 60.0

# One all_reduce; the time at which it finished is written to a file in the given folder.
RANK = """
import sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
with open(f"{sys.argv[1]}/{dist.get_rank()}", "w") as file:
    file.write(repr(time.time()))
dist.destroy_process_group()
"""

_SENDER = """
import socket, sys

sock, size = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
data = bytearray(b"x") * size
sock.sendall(b"r")
while sock.recv(1):
    sock.sendall(data)
"""


def time_torchrun(ranks: int, *, program: str = RANK) -> float:
    """Return the seconds from starting ``torchrun`` until the last of its ranks has done one all_reduce."""
    with tempfile.TemporaryDirectory() as folder:
        ended, script, log_path = Path(folder, "ended"), Path(folder, "rank.py"), Path(folder, "log")
        ended.mkdir()
        script.write_text(program, encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command.append("--local-addr=127.0.0.1")  # otherwise it uses this machine's name, which may not resolve
        with open(log_path, "wb") as log:
            started_at = time.time()
            torchrun = subprocess.Popen(
                [*command, str(script), str(ended)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                torchrun.wait(_START_LIMIT_S)
            finally:
                _end(torchrun)
        times = [float(path.read_text()) for path in ended.iterdir()]
        if torchrun.returncode or len(times) != ranks:
            raise RuntimeError(f"torchrun of {ranks} ranks failed: {log_path.read_text(errors='replace')[-2000:]}")
        return max(times) - started_at


class OneSocket:
    """A second process that sends ``size_bytes`` over one Unix socket on request; close it."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_SOCKET_LIMIT_S)
        with theirs:
            command = [sys.executable, "-c", _SENDER, str(theirs.fileno()), str(size_bytes)]
            self._sender = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        try:
            self._socket.recv(1)
        except BaseException:
            self.close()
            raise

    def time(self) -> float:
        """Return the seconds from the request until all bytes are in this process's memory."""
        started = time.perf_counter()
        self._socket.sendall(b"g")
        rest = memoryview(bytearray(self._size_bytes))
        while rest:
            received = self._socket.recv_into(rest)
            if not received:
                raise RuntimeError("the sender hung up")
            rest = rest[received:]
        return time.perf_counter() - started

    def close(self) -> None:
        self._socket.close()  # the sender reads the end of the stream and exits
        try:
            self._sender.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._sender.kill()
            self._sender.wait()


def _end(started: subprocess.Popen[bytes]) -> None:
    """Stop torchrun, if it is still running; it stops its ranks."""
    if started.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        started.terminate()
        try:
            started.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
