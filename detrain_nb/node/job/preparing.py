"""Preparation of a job on a node: folder, source, port. All nodes are prepared before any of them launches."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ...agents import runtime_folder
from ...copying.json_lines import Talk, clean
from ...guarded import RUN_MODULE, make_private_folder
from ...locks import take_lock
from .folders import (
    ARTIFACTS_NAME,
    METRICS_NAME,
    ORDER_NAME,
    RUNNER_LOG,
    SOURCE_NAME,
    SPEC_NAME,
    job_folder,
    list_job_folders,
    remove_job_folder,
    write_whole,
)
from .launching import inherited_environment
from .order import JobOrder, JobRefused, check_env, check_id, check_number
from .scopes import outlives_logout
from .status import READY, Status, is_live, read_status

RUNNER_MODULE = "detrain_nb.node.job.runner"
_LOCK_NAME = ".jobs.lock"
_LOCK_LIMIT_S = 20.0
_START_LIMIT_S = 60.0


@dataclass
class _Prepared:
    order: JobOrder
    folder: Path
    secrets: Mapping[str, str] = field(repr=False)
    store: socket.socket | None


class Preparing:
    """The one job prepared over this connection, until it is launched."""

    def __init__(self) -> None:
        self._prepared: _Prepared | None = None
        self._runners: list[subprocess.Popen[bytes]] = []  # our child processes: they must be reaped

    def prepare(self, talk: Talk, said: dict[str, Any]) -> None:
        """Create the folder, write the source and bind the port; nothing runs yet. Raises: JobRefused, OSError."""
        self.close()
        order = JobOrder.from_dict(said.get("order"))
        secrets = check_env(said.get("secrets") or {})
        if missing := sorted(set(order.secret_names) - secrets.keys()):
            raise JobRefused(f"the secrets {', '.join(missing)} were not sent")
        with contextlib.ExitStack() as on_failure:
            folder = _make_folder(order)
            on_failure.callback(remove_job_folder, folder)
            pointers = _lay_out(said.get("source"), folder, talk)
            if said.get("before"):
                _take_over(check_id(said["before"]), order, folder)
            _check_script(order.argv[0], folder / SOURCE_NAME)
            store = _bind(order.address, order.rendezvous.port) if order.node_rank == 0 else None
            on_failure.pop_all()
        self._prepared = _Prepared(order, folder, secrets, store)
        talk.say("prepared", port=store.getsockname()[1] if store else 0, pointers=pointers)

    def launch(self, talk: Talk, said: dict[str, Any]) -> None:
        """Start the runner of the prepared job, detached from this process. Raises: JobRefused, OSError."""
        if self._prepared is None:
            raise JobRefused("no job was prepared over this connection")
        prepared = self._prepared
        address, port = _check_store(said.get("store"))
        key = said.get("key") or ""
        if not isinstance(key, str) or len(key) > 1024:
            raise JobRefused("the key is not a text of at most 1024 characters")
        given = {"secrets": prepared.secrets, "store": [address, port], "key": key}
        runner = _start_detached(prepared, json.dumps(given).encode())
        self._runners = [each for each in self._runners if each.poll() is None] + [runner]
        self._prepared = None
        if prepared.store:
            prepared.store.close()  # the runner has inherited it
        talk.say("launched", pid=runner.pid)

    def close(self) -> None:
        """Remove a job that was prepared but not launched."""
        prepared, self._prepared = self._prepared, None
        for runner in self._runners:
            runner.poll()
        if prepared:
            if prepared.store:
                prepared.store.close()
            with contextlib.suppress(OSError):
                remove_job_folder(prepared.folder)


def _make_folder(order: JobOrder) -> Path:
    """Create the folder of a job. Raises: JobRefused when a job of its name is already running; OSError."""
    with _alone():
        for other in list_job_folders(of=order.name):
            status = read_status(other)
            if status["name"] == order.name and is_live(status) and status["id"] != order.id:
                raise JobRefused(f"a job named {order.name} is already running on this node: {status['id']}")
        folder = job_folder(order.id, order.node_rank)
        with contextlib.ExitStack() as on_failure:
            with contextlib.suppress(FileExistsError):  # created by a different node that shares the home
                folder.parent.mkdir(mode=0o700)
            make_private_folder(folder.parent)
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError as exc:
                raise JobRefused(f"job {order.id} already exists on this node: submit it under a new id") from exc
            on_failure.callback(remove_job_folder, folder)
            for inner in (ARTIFACTS_NAME, METRICS_NAME):
                (folder / inner).mkdir(mode=0o700)
            write_whole(folder / ORDER_NAME, order.to_json())
            write_whole(folder / SPEC_NAME, json.dumps(order.spec))
            Status(order.id, order.name, order.node_rank, order.node, world_size=order.world_size).write(folder)
            on_failure.pop_all()
    return folder


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Prevent other services on this machine from creating a job meanwhile. Raises: JobRefused after 20 s."""
    path, deadline = runtime_folder() / _LOCK_NAME, time.monotonic() + _LOCK_LIMIT_S
    while (lock := take_lock(path, is_new=True)) is None:
        if time.monotonic() > deadline:
            raise JobRefused(f"another job has been in preparation on this node for more than {_LOCK_LIMIT_S:.0f} s")
        time.sleep(0.02)
    try:
        yield
    finally:
        os.close(lock)


def _lay_out(source: object, folder: Path, talk: Talk) -> list[str]:
    """Write the job's source, or create an empty folder without one; return the LFS pointers that `lay_out` finds.

    Raises: FilesError, OSError.
    """
    if source:
        from .sources import lay_out

        return lay_out(source, folder / SOURCE_NAME, talk)
    (folder / SOURCE_NAME).mkdir(mode=0o700)
    return []


def _take_over(before: str, order: JobOrder, folder: Path) -> None:
    """Link the checkpoints in the folder of job ``before`` into this one; files of the source are kept.

    The two jobs share these files until one of them replaces a file. Raises: JobRefused, OSError.
    """
    url = (order.spec.get("checkpoint") or {}).get("url")
    if order.workdir or not isinstance(url, str) or "://" in url or url.startswith(("/", "~")):
        return  # not in the folder of a job
    name = PurePosixPath(url)
    tops = [(top / SOURCE_NAME).resolve() for top in (job_folder(before, order.node_rank), folder)]
    there, here = (top / name for top in tops)
    if not name.parts or there.resolve() != there or here.resolve() != here:
        return  # it leads out of the folder
    if there.is_dir():
        shutil.copytree(there, here, symlinks=True, dirs_exist_ok=True, copy_function=_link)


def _link(source: str, target: str) -> None:
    if not os.path.lexists(target):
        try:
            os.link(source, target)
        except OSError:  # a file system without hard links
            shutil.copy2(source, target)


def _check_script(first: str, source: Path) -> None:
    """Check that the source has the script, which for a repository is known only now. Raises: JobRefused."""
    if not first.startswith("-") and not (source / first).is_file():
        raise JobRefused(f"{clean(first)[:200]!r} is not in the source: check its name and folder")


def _bind(address: str, port: int) -> socket.socket:
    """Bind the socket of the store to one address; for port 0 the system chooses one. Raises: JobRefused."""
    try:
        return socket.create_server(
            (address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=128
        )
    except OSError as exc:
        raise JobRefused(
            f"cannot listen on {address} port {port}: {exc.strerror or exc}: choose another port, or another address"
        ) from exc


def _check_store(said: object) -> tuple[str, int]:
    if not isinstance(said, list) or len(said) != 2 or not isinstance(said[0], str):
        raise JobRefused("store must be an address and a port")
    return said[0], check_number(said[1], most=65535)


def _start_detached(prepared: _Prepared, given: bytes) -> subprocess.Popen[bytes]:
    """Start the runner, if possible so that it survives a logout. Raises: JobRefused, OSError."""
    if scope := outlives_logout(prepared.order.id):
        with contextlib.suppress(JobRefused):  # the user's systemd does not answer
            return _start_runner(prepared, given, scope)
    return _start_runner(prepared, given, [])


def _start_runner(prepared: _Prepared, given: bytes, scope: list[str]) -> subprocess.Popen[bytes]:
    """Start the runner and wait until it is ready. Raises: JobRefused, OSError."""
    folder, store = prepared.folder, prepared.store
    handed = [store.fileno()] if store else []
    argv = [sys.executable, "-X", "utf8", "-c", RUN_MODULE, RUNNER_MODULE, str(folder), *map(str, handed)]
    with open(folder / RUNNER_LOG, "ab") as log:
        runner = subprocess.Popen(
            [*scope, *argv],
            cwd="/",
            env=inherited_environment(prepared.order),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            pass_fds=handed,
            start_new_session=True,
        )
    assert runner.stdin is not None and runner.stdout is not None
    try:
        with runner.stdin, contextlib.suppress(BrokenPipeError):
            runner.stdin.write(given)
        with runner.stdout:
            is_said = bool(select.select([runner.stdout], [], [], _START_LIMIT_S)[0])
            if not is_said or runner.stdout.readline(len(READY)) != READY:
                said = (folder / RUNNER_LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise JobRefused(f"the runner did not start: {said[-1] if said else 'it printed nothing'}")
    except BaseException:
        runner.kill()
        runner.wait()
        raise
    return runner
