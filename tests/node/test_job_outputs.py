"""The socket between a job's runner and its ranks: each side checks which user the other one belongs to."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from detrain_nb.guarded import RUN_MODULE
from detrain_nb.node.job.launching import RANK_MODULE
from detrain_nb.node.job.outputs import Outputs
from detrain_nb.node.job.rank import SOCKET_VARIABLE

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

_LIMIT_S = 30.0
_AS_ANOTHER = """
import json, os, socket, sys
os.setgroups([]); os.setgid(12345); os.setuid(12345)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
"""
_CLAIMS_TO_BE_A_RANK = f"""{_AS_ANOTHER}
sock.connect("\\0" + sys.argv[1])
said = json.dumps(dict(rank=0, local_rank=0, restart=0, pid=os.getpid()))
try:
    socket.send_fds(sock, [said.encode()], [0])
    print(sock.recv(1))
except OSError as exc:
    print(exc)
"""
_CLAIMS_TO_BE_THE_RUNNER = f"""{_AS_ANOTHER}
sock.bind("\\0" + sys.argv[1])
sock.listen()
print("listens", flush=True)
print(sock.accept()[0].recv(1000))
"""


def test_another_user_is_no_rank(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path)
    name = outputs.environment()[SOCKET_VARIABLE]
    deadline = time.monotonic() + _LIMIT_S
    with subprocess.Popen([sys.executable, "-c", _CLAIMS_TO_BE_A_RANK, name], stdin=subprocess.PIPE) as other:
        try:
            while other.poll() is None and not outputs.outcomes and time.monotonic() < deadline:
                outputs.loop.once(time.monotonic() + 0.05)
        finally:
            other.kill()
    assert outputs.outcomes == []
    outputs.close()


def test_another_user_gets_nothing_of_a_rank() -> None:
    name = f"detrain_nb-test-{secrets.token_hex(8)}"
    with subprocess.Popen([sys.executable, "-c", _CLAIMS_TO_BE_THE_RUNNER, name], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == b"listens\n"
            rank = subprocess.run(
                [sys.executable, "-c", RUN_MODULE, RANK_MODULE, sys.executable, "-c", "print('ran')"],
                env={**os.environ, SOCKET_VARIABLE: name, "RANK": "0", "LOCAL_RANK": "0"},
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
            )
            assert (rank.returncode, rank.stdout, rank.stderr) == (1, "", "the runner of this job has exited\n")
            assert other.stdout.read() == b"b''\n"
        finally:
            other.kill()
