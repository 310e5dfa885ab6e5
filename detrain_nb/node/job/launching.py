"""Commands that the runner of a job starts, setup lines and then torchrun, and their environment."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ... import at_exit
from ...guarded import RUN_MODULE
from ...launch import (
    ELASTIC_BACKEND,
    JOB_BACKEND,
    Program,
    Rendezvous,
    launch_job,
    threads_per_rank,
    usable_cpus,
)
from ...metrics import FOLDER_VARIABLE
from ...plan.job import ARTIFACTS_VARIABLE, JOB_SPEC_VARIABLE, JOB_VARIABLE
from ..system.gpus import list_gpus, name_gpus
from ..system.processes import open_memory_file
from ..system.surroundings import PER_SESSION_VARIABLES
from .folders import ARTIFACTS_NAME, END_NAME, METRICS_NAME, SOURCE_NAME, SPEC_NAME
from .order import JobOrder, JobRefused

RANK_MODULE = "detrain_nb.node.job.rank"
_LAST_WORD_MODULE = "detrain_nb.node.job.last_word"

_SETUP_NAME, _TORCHRUN_FOLDER, _SITE_FOLDER = "setup.sh", "torchelastic", "site"
_OUR_VARIABLES = "DETRAIN_NB_"
_OF_THE_SHELL = ("_", "SHLVL", "PWD", "OLDPWD")
_OF_A_KERNEL = {"MPLBACKEND", "JPY_PARENT_PID", "JPY_SESSION_NAME"}  # a rank plots into files
_READ_BYTES = 1 << 22


def mark_of(order: JobOrder) -> str:
    """Return the value of JOB_VARIABLE in all processes of this part of a job."""
    return f"{order.id}/{order.node_rank}"


def inherited_environment(order: JobOrder) -> dict[str, str]:
    """Return the environment of this process, possibly the user's own, without the order's withheld variables."""
    return {name: value for name, value in os.environ.items() if name not in order.withheld}


def first_environment(order: JobOrder, folder: Path, secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the setup lines; torchrun gets it with their changes."""
    dropped = PER_SESSION_VARIABLES - {"CUDA_VISIBLE_DEVICES"} | _OF_A_KERNEL
    env = {name: value for name, value in inherited_environment(order).items() if name not in dropped}
    own_path = env.get("PYTHONPATH", "")  # may be the path of our code
    env.update(order.env)
    if order.device == "cpu":
        env.setdefault("CUDA_VISIBLE_DEVICES", "")
    elif order.gpus is not None and "CUDA_VISIBLE_DEVICES" not in order.env:
        env["CUDA_VISIBLE_DEVICES"] = name_gpus(",".join(map(str, order.gpus)), list_gpus())
    beside, there = os.path.dirname(order.python or sys.executable), env.get("PATH", os.defpath)
    if os.path.isabs(beside) and beside not in there.split(os.pathsep):  # so python and pip are those of the ranks
        env["PATH"] = os.pathsep.join([beside, there])
    source = str(folder / SOURCE_NAME) if order.workdir else ""  # without workdir, ranks start in the source
    paths = [own_path, env.get("PYTHONPATH", "") if "PYTHONPATH" in order.env else "", source]
    if path := os.pathsep.join(filter(None, paths)):
        env["PYTHONPATH"] = path
    return {
        **env,
        **secrets,
        JOB_VARIABLE: mark_of(order),
        JOB_SPEC_VARIABLE: str(folder / SPEC_NAME),
        FOLDER_VARIABLE: str(folder / METRICS_NAME),
        ARTIFACTS_VARIABLE: str(folder / ARTIFACTS_NAME),
    }


def torchrun_command(
    order: JobOrder, folder: Path, env: Mapping[str, str], *, store: tuple[str, int], key: str
) -> tuple[list[str], dict[str, str]]:
    """Return torchrun's command line for this node, and its environment.

    Its ranks hand their output to the runner. ``env`` overrides our defaults for torch. Raises: JobRefused, OSError.
    """
    python, is_elastic = order.python or sys.executable, order.rendezvous.kind == "elastic"
    threads = threads_per_rank(len(order.ranks), cpus=usable_cpus()) if order.device == "cpu" else 1
    first, *arguments = order.argv
    if not first.startswith("-") and order.workdir:  # the script is in the source, wherever the ranks start
        first = str(folder / SOURCE_NAME / first)
    try:
        launch = launch_job(
            _rendezvous_at(store, order),
            Program("command", (python, "-c", RUN_MODULE, RANK_MODULE, python, first, *arguments)),
            nodes=(order.rendezvous.min_nodes, order.rendezvous.max_nodes) if is_elastic else len(order.nodes),
            ranks=len(order.ranks),
            node_rank=order.node_rank,
            python=python,
            interface=order.interface,
            local_address=order.address,
            node_names=order.nodes,
            key=key,
            end_file=str(folder / END_NAME),
            options=(f"--log-dir={folder / _TORCHRUN_FOLDER}",),
            extra_env={"OMP_NUM_THREADS": str(threads)},
        )
    except ValueError as exc:
        raise JobRefused(str(exc)) from exc
    ours = {name: value for name, value in launch.env.items() if name.startswith(_OUR_VARIABLES)}
    path = os.pathsep.join(filter(None, [_make_site(folder), env.get("PYTHONPATH", "")]))
    return launch.argv, {**launch.env, **env, **ours, "PYTHONPATH": path}


def _make_site(folder: Path) -> str:
    """Create a folder with code that Python runs before the user's program, in its process. Raises: OSError."""
    site = folder / _SITE_FOLDER
    site.mkdir(exist_ok=True)
    shutil.copyfile(at_exit.__file__, site / f"{at_exit.SITE_MODULE}.py")
    return str(site)


def _rendezvous_at(store: tuple[str, int], order: JobOrder) -> Rendezvous:
    asked = order.rendezvous
    is_elastic = asked.kind == "elastic"
    return Rendezvous(
        ELASTIC_BACKEND if is_elastic else JOB_BACKEND,
        asked.run_id or order.id,
        store,
        timeout_s=asked.timeout_s,
        max_restarts=asked.max_restarts if is_elastic else 0,
        silence_s=order.silence_s,
    )


def last_word_command(order: JobOrder, store: tuple[str, int], reason: str) -> list[str]:
    """Return the command that reports to the other nodes why this one failed."""
    address, port = store
    said = f"node {order.node} failed: {reason}"
    return [order.python or sys.executable, "-c", RUN_MODULE, _LAST_WORD_MODULE, address, str(port), said]


@dataclass
class SetupCommand:
    """A shell that runs the setup lines and then writes its environment to the file descriptor ``told``."""

    argv: list[str]
    told: int

    def read_environment(self) -> dict[str, str]:
        """Return the environment after the lines; empty if they did not reach their end, as with ``exit 0``."""
        data = os.pread(self.told, _READ_BYTES, 0)
        pairs = (os.fsdecode(line).partition("=") for line in data.split(b"\0") if b"=" in line)
        return {name: value for name, _, value in pairs if name and name not in _OF_THE_SHELL}


@contextlib.contextmanager
def setup_command(lines: tuple[str, ...], folder: Path) -> Iterator[SetupCommand]:
    """Write the lines as a script, which exits at the first that fails. Raises: OSError."""
    path, told = folder / _SETUP_NAME, open_memory_file("environment")  # in memory, as it contains secrets
    try:
        path.write_text("\n".join(["set -e", *lines, f"env -0 >/proc/self/fd/{told}", ""]), encoding="utf-8")
        yield SetupCommand([shutil.which("bash") or "sh", str(path)], told)
    finally:
        os.close(told)
