"""Where the jobs of this user are on this node: a folder each, whose files are a job's interface.

Nodes may share the home: a folder names its machine and the job's node rank. Nothing here depends on locks of files.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...guarded import make_private_folder, refuse_squatted, state_folder
from ..system.proc_files import read
from ..system.processes import start_ticks
from .order import JOB_ID, JobOrder, JobRefused, check_id

ORDER_NAME = "order.json"
SPEC_NAME = "spec.json"
SOURCE_NAME = "source"
ARTIFACTS_NAME = "artifacts"
METRICS_NAME = "metrics"
SETUP_LOG, TORCHRUN_LOG, RUNNER_LOG = "setup.log", "torchrun.log", "runner.log"
END_NAME = "end.json"  # why the nodes have ended each other
_MACHINE_FILES = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_MOST_BYTES = 1 << 20  # of a file that is read whole


def jobs_folder() -> Path:
    """The folder of this user's jobs, made if need be; nobody else can enter it. Raises: JobRefused."""
    try:
        return make_private_folder(state_folder() / "jobs")
    except OSError as exc:
        why = f"{exc.filename}: {exc.strerror}: let it be a folder to write in" if exc.filename else exc
        raise JobRefused(
            f"the folder of jobs cannot be made: {why}, or set XDG_STATE_HOME to a folder of your own"
        ) from exc


def machine_id() -> str:
    """A name for this machine among those that share the home, without telling what the system calls it."""
    known = next((text.strip() for path in _MACHINE_FILES if (text := read(path))), "")
    return hashlib.sha256(f"{known}\n{platform.node()}".encode()).hexdigest()[:12]


def read_boot() -> str:
    """What is another one after this machine, or this container, was started anew."""
    return f"{(read('/proc/sys/kernel/random/boot_id') or '').strip()}/{start_ticks(1)}"


def job_folder(job: str, node_rank: int) -> Path:
    """Where one node's part of a job is, or would be. Raises: JobRefused."""
    return jobs_folder() / check_id(job) / f"{machine_id()}-{node_rank}"


def find_job_folder(job: str, node_rank: int) -> Path:
    """Raises: JobRefused when this node has no such job."""
    folder = job_folder(job, node_rank)
    if not folder.is_dir():
        raise JobRefused(
            f"no job {job} with node rank {node_rank} is on this node: it was removed, or is on another one"
        )
    return folder


def read_order(folder: Path) -> JobOrder:
    """What the job in that folder is to do. Raises: JobRefused where it is not there any more."""
    try:
        return JobOrder.from_json(read_bounded(folder / ORDER_NAME))
    except FileNotFoundError:
        raise JobRefused(f"{folder} is no whole job any more: something has removed its {ORDER_NAME}") from None


def work_folder(order: JobOrder, folder: Path) -> Path:
    """Where the ranks start. Raises: JobRefused for one that another user has made, in a folder that is everybody's."""
    if not order.workdir:
        return folder / SOURCE_NAME
    place = Path(os.path.expanduser(order.workdir))
    try:
        refuse_squatted(place)
    except OSError as exc:
        raise JobRefused(str(exc)) from exc
    return place


def list_job_folders(*, of: str = "") -> Iterator[Path]:
    """The parts of jobs on this machine, the newest job first; ``of``: what the ids begin with."""
    ours = re.compile(rf"{machine_id()}-\d{{1,6}}")
    base = jobs_folder()
    names = [name for name in os.listdir(base) if name.startswith(of) and JOB_ID.fullmatch(name)]
    for name in sorted(names, key=_moment, reverse=True):
        try:
            parts = sorted(part for part in os.listdir(base / name) if ours.fullmatch(part))
        except OSError:  # it is being removed
            continue
        yield from (base / name / part for part in parts)


def list_parts(job: str) -> list[Path]:
    """The parts of one job on this machine. Raises: JobRefused when there are none."""
    if folders := [folder for folder in list_job_folders(of=check_id(job)) if folder.parent.name == job]:
        return folders
    raise JobRefused(f"no job {job} is on this node: it was removed, or is on another one")


def _moment(job: str) -> str:
    """An id ends with the time at which it was made, and four digits that nobody guesses."""
    return "-".join(job.rsplit("-", 3)[1:])


def remove_job_folder(folder: Path) -> None:
    """Remove a part of a job, at once for whoever looks, and the job with its last part. Raises: OSError."""
    aside = Path(tempfile.mkdtemp(prefix=".removed-", dir=folder.parent.parent))
    try:
        os.rename(folder, aside / folder.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    try:
        folder.parent.rmdir()
    except OSError:  # other nodes have their parts there
        pass


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all. Raises: OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(draft, "w", encoding="utf-8", opener=_open_private) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a machine that goes down may leave an empty file there
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def read_bounded(path: Path) -> str:
    """Raises: OSError, JobRefused for one that is larger, or no file."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(opened, "rb") as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise JobRefused(f"{path} is no file")
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise JobRefused(f"{path} has more than {_MOST_BYTES} bytes")
    return data.decode("utf-8", errors="replace")


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
