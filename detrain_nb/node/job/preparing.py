"""A job is prepared on all nodes before it is launched on any: a folder is made, its source laid out, a port bound."""

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
from .order import JobError, JobOrder, check_env, check_id, check_number
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
    """The one job that the notebook has had prepared on this stream, until it is launched."""

    def __init__(self) -> None:
        self._prepared: _Prepared | None = None
        self._runners: list[subprocess.Popen[bytes]] = []  # of which we are the parents: their ends are noted

    def prepare(self, talk: Talk, said: dict[str, Any]) -> None:
        """Make all ready; nothing runs yet. Raises: JobError, OSError."""
        self.close()
        order = JobOrder.from_dict(said.get("order"))
        secrets = check_env(said.get("secrets") or {})
        if missing := sorted(set(order.secret_names) - secrets.keys()):
            raise JobError(f"the secrets {', '.join(missing)} did not come")
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
        """Start what was prepared, as a process that goes on without us. Raises: JobError, OSError."""
        if self._prepared is None:
            raise JobError("nothing was prepared here")
        prepared = self._prepared
        address, port = _check_store(said.get("store"))
        key = said.get("key") or ""
        if not isinstance(key, str) or len(key) > 1024:
            raise JobError("the key is no text")
        given = {"secrets": prepared.secrets, "store": [address, port], "key": key}
        runner = _start_detached(prepared, json.dumps(given).encode())
        self._runners = [each for each in self._runners if each.poll() is None] + [runner]
        self._prepared = None
        if prepared.store:
            prepared.store.close()  # the runner has it
        talk.say("launched", pid=runner.pid)

    def close(self) -> None:
        """Leave nothing of what was prepared and not launched."""
        prepared, self._prepared = self._prepared, None
        for runner in self._runners:
            runner.poll()
        if prepared:
            if prepared.store:
                prepared.store.close()
            with contextlib.suppress(OSError):
                remove_job_folder(prepared.folder)


def _make_folder(order: JobOrder) -> Path:
    """Raises: JobError where a job of that name runs already, OSError."""
    with _alone():
        for other in list_job_folders(of=order.name):
            status = read_status(other)
            if status["name"] == order.name and is_live(status) and status["id"] != order.id:
                raise JobError(f"a job named {order.name} runs already on this node: {status['id']}")
        folder = job_folder(order.id, order.node_rank)
        with contextlib.ExitStack() as on_failure:
            with contextlib.suppress(FileExistsError):  # another node that shares the home has made it
                folder.parent.mkdir(mode=0o700)
            make_private_folder(folder.parent)
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError as exc:
                raise JobError(f"the job {order.id} is on this node already: submit it under a new id") from exc
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
    """No other service of this machine makes a job meanwhile. Raises: JobError."""
    path, deadline = runtime_folder() / _LOCK_NAME, time.monotonic() + _LOCK_LIMIT_S
    while (lock := take_lock(path, is_new=True)) is None:
        if time.monotonic() > deadline:
            raise JobError(f"another job is being prepared on this node, for more than {_LOCK_LIMIT_S:.0f} s")
        time.sleep(0.02)
    try:
        yield
    finally:
        os.close(lock)


def _lay_out(source: object, folder: Path, talk: Talk) -> list[str]:
    """Put the job's source in its place; without one that is an empty folder. Returns: as `lay_out`.

    Raises: FilesError, OSError.
    """
    if source:
        from .sources import lay_out

        return lay_out(source, folder / SOURCE_NAME, talk)
    (folder / SOURCE_NAME).mkdir(mode=0o700)
    return []


def _take_over(before: str, order: JobOrder, folder: Path) -> None:
    """Have the checkpoints of the job that is restarted, where they are in its folder; what the source has stays.

    Both have the same files, until one of them puts another in the place of one. Raises: JobError, OSError.
    """
    url = (order.spec.get("checkpoint") or {}).get("url")
    if order.workdir or not isinstance(url, str) or "://" in url or url.startswith(("/", "~")):
        return  # it is no place in the folder of a job
    name = PurePosixPath(url)
    tops = [(top / SOURCE_NAME).resolve() for top in (job_folder(before, order.node_rank), folder)]
    there, here = (top / name for top in tops)
    if not name.parts or there.resolve() != there or here.resolve() != here:
        return  # it leads out of there
    if there.is_dir():
        shutil.copytree(there, here, symlinks=True, dirs_exist_ok=True, copy_function=_link)


def _link(source: str, target: str) -> None:
    if not os.path.lexists(target):
        try:
            os.link(source, target)
        except OSError:  # a file system that has no such links
            shutil.copy2(source, target)


def _check_script(first: str, source: Path) -> None:
    """What a repository has is not known before it is here. Raises: JobError."""
    if not first.startswith("-") and not (source / first).is_file():
        raise JobError(f"{clean(first)[:200]!r} is not in the source: look at its name, and at the folder it is in")


def _bind(address: str, port: int) -> socket.socket:
    """Where the store is going to listen: on that address alone; for 0 the system chooses the port."""
    try:
        return socket.create_server(
            (address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=128
        )
    except OSError as exc:
        raise JobError(f"no socket can be bound on {address} port {port}: {exc.strerror or exc}: name another") from exc


def _check_store(said: object) -> tuple[str, int]:
    if not isinstance(said, list) or len(said) != 2 or not isinstance(said[0], str):
        raise JobError("the store has an address and a port")
    return said[0], check_number(said[1], most=65535)


def _start_detached(prepared: _Prepared, given: bytes) -> subprocess.Popen[bytes]:
    """Start the runner, where it can be so that it outlives a logout. Raises: JobError, OSError."""
    if scope := outlives_logout(prepared.order.id):
        with contextlib.suppress(JobError):  # the user's manager does not answer
            return _start_runner(prepared, given, scope)
    return _start_runner(prepared, given, [])


def _start_runner(prepared: _Prepared, given: bytes, scope: list[str]) -> subprocess.Popen[bytes]:
    """Wait until it says that it is there. Raises: JobError, OSError."""
    folder, store = prepared.folder, prepared.store
    handed = [store.fileno()] if store else []
    argv = [sys.executable, "-X", "utf8", "-c", RUN_MODULE, RUNNER_MODULE, str(folder), *map(str, handed)]
    with open(folder / RUNNER_LOG, "ab") as log:
        runner = subprocess.Popen(
            [*scope, *argv],
            cwd="/",
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
                raise JobError(f"the runner did not start: {said[-1] if said else 'it said nothing'}")
    except BaseException:
        runner.kill()
        runner.wait()
        raise
    return runner
