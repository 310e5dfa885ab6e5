"""Folders of this user's jobs on this node, one per job; their files are a job's interface.

Nodes may share a home, so a folder's name has its machine and the job's node rank. Nothing here relies on file locks.
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
END_NAME = "end.json"  # why the nodes of the job stopped each other
_MACHINE_FILES = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_MOST_BYTES = 1 << 20  # of a file that is read at once


def jobs_folder() -> Path:
    """Return the folder of this user's jobs, created when missing; no other user can enter it. Raises: JobRefused."""
    try:
        return make_private_folder(state_folder() / "jobs")
    except OSError as exc:
        why = f"{exc.filename}: {exc.strerror}: make it a writable folder" if exc.filename else exc
        raise JobRefused(
            f"the folder of jobs cannot be created: {why}, or set XDG_STATE_HOME to a folder of your own"
        ) from exc


def machine_id() -> str:
    """Return a name for this machine among those that share the home; it hides the system's own id."""
    known = next((text.strip() for path in _MACHINE_FILES if (text := read(path))), "")
    return hashlib.sha256(f"{known}\n{platform.node()}".encode()).hexdigest()[:12]


def read_boot() -> str:
    """Return an id that changes when this machine, or this container, restarts."""
    return f"{(read('/proc/sys/kernel/random/boot_id') or '').strip()}/{start_ticks(1)}"


def job_folder(job: str, node_rank: int) -> Path:
    """Return the folder of one node's part of a job, whether it exists or not. Raises: JobRefused."""
    return jobs_folder() / check_id(job) / f"{machine_id()}-{node_rank}"


def find_job_folder(job: str, node_rank: int) -> Path:
    """Return the folder of one node's part of a job. Raises: JobRefused when this node has none."""
    folder = job_folder(job, node_rank)
    if not folder.is_dir():
        raise JobRefused(
            f"this node has no job {job} with node rank {node_rank}: it was removed, or is on another node"
        )
    return folder


def read_order(folder: Path) -> JobOrder:
    """Read the order of the job in a folder. Raises: JobRefused when its file is missing or invalid."""
    try:
        return JobOrder.from_json(read_bounded(folder / ORDER_NAME))
    except FileNotFoundError:
        raise JobRefused(f"the job in {folder} is incomplete: its {ORDER_NAME} was removed") from None


def work_folder(order: JobOrder, folder: Path) -> Path:
    """Return the folder in which ranks start. Raises: JobRefused when another user created it in a shared folder."""
    if not order.workdir:
        return folder / SOURCE_NAME
    place = Path(os.path.expanduser(order.workdir))
    try:
        refuse_squatted(place)
    except OSError as exc:
        raise JobRefused(str(exc)) from exc
    return place


def list_job_folders(*, of: str = "") -> Iterator[Path]:
    """Yield the folders of job parts on this machine, newest job first; ``of`` is a prefix of their ids."""
    ours = re.compile(rf"{machine_id()}-\d{{1,6}}")
    base = jobs_folder()
    names = [name for name in os.listdir(base) if name.startswith(of) and JOB_ID.fullmatch(name)]
    for name in sorted(names, key=_moment, reverse=True):
        try:
            parts = sorted(part for part in os.listdir(base / name) if ours.fullmatch(part))
        except OSError:  # the job is being removed
            continue
        yield from (base / name / part for part in parts)


def list_parts(job: str) -> list[Path]:
    """List the folders of a job's parts on this machine. Raises: JobRefused when there are none."""
    if folders := [folder for folder in list_job_folders(of=check_id(job)) if folder.parent.name == job]:
        return folders
    raise JobRefused(f"this node has no job {job}: it was removed, or is on another node")


def _moment(job: str) -> str:
    """Return the end of an id: its time of creation and four random digits."""
    return "-".join(job.rsplit("-", 3)[1:])


def remove_job_folder(folder: Path) -> None:
    """Remove a part of a job atomically, and the job's folder with its last part. Raises: OSError."""
    aside = Path(tempfile.mkdtemp(prefix=".removed-", dir=folder.parent.parent))
    try:
        os.rename(folder, aside / folder.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    try:
        folder.parent.rmdir()
    except OSError:  # other nodes still have parts there
        pass


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically. Raises: OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(draft, "w", encoding="utf-8", opener=_open_private) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine may leave an empty file
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def read_bounded(path: Path) -> str:
    """Read a text file of at most 1 MiB. Raises: OSError; JobRefused for a larger file or one that is not regular."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(opened, "rb") as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise JobRefused(f"{path} is not a regular file")
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise JobRefused(f"{path} has more than {_MOST_BYTES} bytes")
    return data.decode("utf-8", errors="replace")


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
