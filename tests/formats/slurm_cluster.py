"""A Slurm cluster on this machine: a controller and two nodes, in a temporary folder and on ports of loopback."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..conftest import FOR_ADMINISTRATORS
from ..testbed.machine import free_ports

PATH = f"{os.environ['PATH']}:{FOR_ADMINISTRATORS}"
NODES = ("n0", "n1")
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


class SlurmCluster:
    """A running cluster; jobs are submitted from ``folder``."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self._env = env

    def run(self, *command: str, env: dict[str, str] | None = None) -> str:
        """Run a command of Slurm and return its output."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**self._env, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, script: str, *, env: dict[str, str] | None = None) -> int:
        (self.folder / "job.sbatch").write_text(script)
        return int(self.run("sbatch", "--parsable", "job.sbatch", env=env))

    def state(self, job: int) -> str:
        found = dict(field.split("=", 1) for field in self.run("scontrol", "show", "job", "-o", str(job)).split())
        return found["JobState"]

    def wait(self, job: int, *, limit_s: float) -> str:
        """Return the state in which a job ended; sbatch's own --wait polls too seldom."""
        until = time.monotonic() + limit_s
        while (state := self.state(job)) not in OVER:
            assert time.monotonic() < until, f"job {job} is {state}: {self.output(job)}"
            time.sleep(0.1)
        return state

    def output(self, job: int) -> str:
        return "".join(path.read_text() for path in self.folder.glob(f"*-{job}.out"))


def _configuration(folder: Path) -> str:
    controller, *ports = free_ports(1 + len(NODES))
    user = getpass.getuser()
    lines = {
        "ClusterName": "tests",
        "FirstJobId": 1 + secrets.randbelow(100_000),  # a job's port depends on its id
        "SlurmctldHost": "localhost(127.0.0.1)",
        "SlurmctldPort": controller,
        "CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny",  # loopback only
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder}/munge/socket",
        "CredType": "cred/munge",
        "SlurmUser": user,
        "SlurmdUser": user,
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool-%n",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd-%n.pid",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "SchedulerParameters": "sched_interval=1,sched_min_interval=0",
        "ReturnToService": 2,
        "SlurmdParameters": "config_overrides",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "KillWait": 5,
        "MailProg": "/bin/true",
    }
    nodes = [
        f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=1000 State=UNKNOWN"
        for name, port in zip(NODES, ports)
    ]
    partition = f"PartitionName=tests Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP"
    return "\n".join([*(f"{key}={value}" for key, value in lines.items()), *nodes, partition]) + "\n"


@contextlib.contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Start the programs, yield the cluster once both nodes accept jobs, and stop all programs in the end."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short, as the length of a socket's path is limited
    started: list[subprocess.Popen[bytes]] = []
    for name in ("munge", "state", "jobs", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir(mode=0o755)
    folder.chmod(0o755)
    (folder / "munge" / "key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge" / "key").chmod(0o400)
    (folder / "slurm.conf").write_text(_configuration(folder))
    env = {"PATH": PATH, "HOME": str(folder), "SLURM_CONF": str(folder / "slurm.conf"), "LC_ALL": "C.UTF-8"}

    def start(*command: str) -> None:
        with (folder / "log").open("ab") as log:
            started.append(
                subprocess.Popen(command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    try:
        munge = [f"--{option}-file={folder}/munge/{option}" for option in ("key", "pid", "log", "seed")]
        start("munged", "--foreground", "--force", *munge, f"--socket={folder}/munge/socket")
        _wait_until((folder / "munge" / "socket").exists, folder)
        start("slurmctld", "-D")
        for node in NODES:
            start("slurmd", "-D", "-N", node)
        cluster = SlurmCluster(folder / "jobs", env)
        _wait_until(lambda: _are_idle(env), folder)
        yield cluster
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _are_idle(env: dict[str, str]) -> bool:
    said = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], env=env, capture_output=True, text=True, timeout=30).stdout
    return said.split() == ["idle"] * len(NODES)


def _wait_until(is_done: object, folder: Path) -> None:
    until = time.monotonic() + 30
    while not is_done():  # type: ignore[operator]
        assert time.monotonic() < until, (folder / "log").read_text(errors="replace")[-3000:]
        time.sleep(0.05)
