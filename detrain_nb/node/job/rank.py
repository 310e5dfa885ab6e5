"""The process between torchrun and a rank of a job: hands the rank's output to the runner, reports its exit code.

torchrun sees this process as the rank. The user's program is its child in the same process group, so signals of
torchrun reach both; this process waits, and exits as the program did.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time

from ...agents import is_same_user
from ...launch import JOB_KEY_VARIABLE, STORE_FD_VARIABLE
from ..system.processes import die_with_parent

SOCKET_VARIABLE = "DETRAIN_NB_JOB_SOCKET"
MOST_SAID_BYTES = 4096
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Run the command in our arguments."""
    die_with_parent(os.getppid())
    early: list[int] = []  # signals received before the program was started
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: early.append(number))  # not SIG_IGN, which the program would inherit
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as runner:
        runner.connect(f"\0{os.environ.pop(SOCKET_VARIABLE)}")
        if not is_same_user(runner):  # the runner has exited, and another user has taken its name
            sys.exit("the runner of this job has exited")
        for name in (JOB_KEY_VARIABLE, STORE_FD_VARIABLE):
            os.environ.pop(name, None)
        _hand_over_output(runner)
        ours = os.getpid()
        try:
            program = subprocess.Popen(
                sys.argv[1:],
                stdin=subprocess.DEVNULL,
                preexec_fn=lambda: die_with_parent(ours),  # noqa: PLW1509  there is one thread
            )
        except OSError as exc:
            print(f"{sys.argv[1]} cannot be started: {exc.strerror}", file=sys.stderr, flush=True)
            _say(runner, ended=127, at=time.monotonic())
            sys.exit(127)
        for missed in early:
            program.send_signal(missed)
        code = program.wait()
        _say(runner, ended=code, at=time.monotonic())
    _end_as(code)


def _hand_over_output(runner: socket.socket) -> None:
    """Redirect the output of this process and its children to the runner, with the rank's numbers."""
    read, write = os.pipe()
    env = os.environ
    said = {
        "rank": int(env["RANK"]),
        "local_rank": int(env["LOCAL_RANK"]),
        "restart": int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "pid": os.getpid(),
    }
    socket.send_fds(runner, [json.dumps(said).encode()], [read])
    os.close(read)
    os.dup2(write, 1)
    os.dup2(write, 2)
    os.close(write)


def _say(runner: socket.socket, **said: object) -> None:
    try:
        runner.send(json.dumps(said).encode())
    except OSError:  # the runner has exited: no process needs the report
        pass


def _end_as(code: int) -> None:
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has already dumped its core
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
