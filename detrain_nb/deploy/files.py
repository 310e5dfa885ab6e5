"""Copying of files between this machine and the nodes; copying/remote_program.py is the other end.

A copy that is cut short leaves no incomplete file, on either side.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import selectors
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..copying.json_lines import Failed, FilesError, Talk, Untrue, as_size, check_name
from ..copying.receiver import TreeWriter, receive_tree
from ..copying.sender import MOST_NAMED, STAGING_NAME, Progress, Tree, list_tree, send_tree
from ..errors import DetrainError, SpecError, TransportError, WireError
from ..plan import NodePlan
from ..text import HERE
from ..transport import Transport
from .private import holds_homes, is_private

__all__ = ["PATIENCE", "Copied", "OnProgress", "Patience", "Stop", "get", "label", "on_every", "open_talk", "put"]

OnProgress = Callable[[int, int, int], object]  # files done, bytes done, bytes in total
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_BUFFER_BYTES = 1 << 18
_LOOK_GAP_S = 0.1
_STOP_LIMIT_S = 2.0  # for a copy to end in good order, before its connection is shut down
_SHUT_LIMIT_S = 1.0  # for a copy to end after that

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Copied:
    """Result of a copy. Links, devices and other non-files are not copied: ``skipped`` names some of them.

    ``kept`` names some of the files that were not sent, as they may hold keys. ``num_there`` counts files that were
    not copied because source and target are the same file.
    """

    files: int
    size_bytes: int
    num_skipped: int = 0
    skipped: tuple[str, ...] = ()
    num_kept: int = 0
    kept: tuple[str, ...] = ()
    num_there: int = 0


@dataclass(frozen=True)
class Patience:
    """Time limits for a node."""

    silence_s: float = 60.0  # the program reports every few seconds that it is still running
    answer_s: float = 1800.0  # listing a million files on a slow disk takes a while
    bring_s: float = 120.0  # cells wait this long; the node waits up to 60 s for another process to leave its folder


PATIENCE = Patience()


class Stop:
    """A way to stop the work of other threads: first by request, then by shutting down what they wait for."""

    def __init__(self) -> None:
        self._is_set = False
        self._shut: list[Callable[[], object]] = []

    @property
    def is_asked(self) -> bool:
        return self._is_set

    def ask(self) -> None:
        self._is_set = True

    def insist(self) -> None:
        for shut in list(self._shut):
            with contextlib.suppress(OSError, EOFError):
                shut()

    def check(self) -> None:
        """Raise TransportError when a stop was requested."""
        if self._is_set:
            raise TransportError("stopped")

    @contextlib.contextmanager
    def watch(self, shut: Callable[[], object]) -> Iterator[None]:
        self._shut.append(shut)  # before check(): a stop requested in between shuts it down too
        try:
            self.check()
            yield
        finally:
            self._shut.remove(shut)


def put(
    node: Transport,
    paths: Paths,
    target: str | None = None,
    on_progress: OnProgress | None = None,
    *,
    folder: str = "",
    stop: Stop | None = None,
) -> Copied:
    """Copy files and folders, with their contents, into the folder ``target`` of a node, which is created.

    A relative target is resolved in the folder where the ranks start (on this machine: ``folder``); None is that
    folder itself. Executable files stay executable. Links in a folder are not followed, and files in it that may hold
    keys are not sent (deploy/private.py), unless they are named in ``paths``.
    Raises: SpecError for paths that do not exist here, for home directories, and for a folder that would be copied
    into itself; DetrainError with the node and the path when the copy fails.
    """
    wanted, tree = _list_here(paths)
    target = _check_path(target or ".")
    num_there = 0
    if node.shares_paths:
        num_there = _leave_out_itself(tree, os.path.join(node.work_folder(folder), os.path.expanduser(target)))
    kept = _leave_out_keys(tree)
    progress = Progress(_stoppable(on_progress, stop))
    with open_talk(node, stop=stop) as talk:
        talk.say("put", base=node.work_folder(folder), target=target)
        _check_outside(wanted, tree, str(talk.hear("ready").get("staging")))
        with _here():
            send_tree(talk, tree, progress)
        done = talk.hear("done")
        if (as_size(done.get("files")), as_size(done.get("size"))) != (progress.files, progress.size):
            raise Untrue(
                f"the node reports {done.get('files')} files, {done.get('size')} bytes received; "
                f"{progress.files} files, {progress.size} bytes were sent"
            )
    skipped = tree.num_skipped, tuple(tree.skipped)
    return Copied(progress.files, progress.size, *skipped, len(kept), tuple(kept[:MOST_NAMED]), num_there)


def get(
    node: Transport,
    paths: Paths,
    folder: str | os.PathLike[str] = ".",
    on_progress: OnProgress | None = None,
    *,
    stop: Stop | None = None,
    work_folder: str = "",
    patience: Patience = PATIENCE,
) -> Copied:
    """Copy files and folders of a node into ``folder`` here, which is created; paths as in ``put``.

    Each keeps the last part of its path as its name, and nothing outside of that name is written; a path without one
    (``.``, ``~``) gets the node's name.
    Raises: the same errors as ``put``; WireError when the node sends invalid data.
    """
    wanted, folder = _as_list(paths), _check_path(os.fspath(folder) or ".")
    names = [posixpath.basename(posixpath.normpath(path)) for path in wanted]
    names = [node.name or HERE.replace(" ", "-") if name in ("", ".", "..", "~") else name for name in names]
    _check_different(names, wanted)
    progress = Progress(_stoppable(on_progress, stop))
    with open_talk(node, stop=stop, patience=patience) as talk:
        talk.say("get", base=node.work_folder(work_folder), paths=wanted, names=names)
        with _here(), TreeWriter(folder) as writer:
            skipped = receive_tree(talk, writer, progress, roots=names)
    return Copied(progress.files, progress.size, *skipped)


def on_every(
    nodes: Sequence[Transport],
    act: Callable[[Transport, Stop, OnProgress], _Result],
    on_progress: OnProgress | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> list[_Result]:
    """Call ``act`` for all nodes in parallel; ``on_progress`` gets the sums over all nodes, in the calling thread.

    ``on_progress`` is first called once every node has reported its total or has finished, so that the completed
    fraction never shrinks. ``meanwhile`` is called repeatedly. If one node fails, the others still finish; an
    interrupt, or an exception from ``on_progress`` or ``meanwhile``, stops all.
    Raises: DetrainError with a line for each node that failed.
    """
    stop = Stop()
    states: list[tuple[int, int, int]] = [(0, 0, 0)] * len(nodes)

    def run(index: int) -> _Result:
        def note(files: int, done: int, total: int) -> None:
            states[index] = (files, done, total)

        return act(nodes[index], stop, note)

    pool = ThreadPoolExecutor(max(1, len(nodes)), thread_name_prefix="detrain_nb files")
    work = [pool.submit(run, index) for index in range(len(nodes))]
    try:
        told = (0, 0, 0)
        while True:
            is_done = not wait(work, _LOOK_GAP_S).not_done
            has_begun = all(total or future.done() for (_, _, total), future in zip(states, work))
            if meanwhile:
                meanwhile()
            if on_progress and has_begun and told != (told := _add_up(states)):
                on_progress(*told)
            if is_done:
                break
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        stop.ask()
        if wait(work, _STOP_LIMIT_S).not_done:
            stop.insist()
        if not wait(work, _SHUT_LIMIT_S).not_done:  # else one is still connecting, and stops once it has connected
            pool.shutdown()
        raise
    pool.shutdown()
    results: list[_Result] = []
    failures: list[DetrainError] = []
    for future in work:
        try:
            results.append(future.result())
        except DetrainError as exc:  # anything else is a bug of ours
            failures.append(exc)
    if failures:
        kinds = {type(exc) for exc in failures}
        kind = kinds.pop() if len(kinds) == 1 else DetrainError
        raise kind("\n".join(dict.fromkeys(map(str, failures)))) from failures[0]  # a fault of this side is named once
    return results


def _add_up(states: Iterable[tuple[int, int, int]]) -> tuple[int, int, int]:
    files, done, total = zip(*states)
    return sum(files), sum(done), sum(total)


def label(node: Transport | NodePlan) -> str:
    """Return the name of a node as a key in reports and lists; `text.told_node` is for sentences."""
    return node.name or HERE


@contextlib.contextmanager
def open_talk(node: Transport, *, stop: Stop | None = None, patience: Patience = PATIENCE) -> Iterator[Talk]:
    """Run copying/remote_program.py on a node and yield the talk with it.

    Raises: DetrainError with the name of the node for failures in the block.
    """
    with open_stream(node, node.run_files(), stop=stop, patience=patience) as talk:
        yield talk


@contextlib.contextmanager
def open_stream(
    node: Transport,
    stream: AbstractContextManager[socket.socket],
    *,
    stop: Stop | None,
    patience: Patience,
    answers_while_told: bool = False,
) -> Iterator[Talk]:
    """Yield a talk over a byte stream with our program on a node.

    ``answers_while_told``: the program may answer while we send; otherwise such an answer can only be its failure.
    Raises: DetrainError with the name of the node.
    """
    host = label(node)
    with contextlib.ExitStack() as stack:
        try:
            sock = stack.enter_context(stream)
        except DetrainError as exc:
            raise type(exc)(f"{host}: {exc}") from exc
        if stop:
            stack.enter_context(stop.watch(lambda: sock.shutdown(socket.SHUT_RDWR)))
        sock.settimeout(patience.silence_s)
        reader = stack.enter_context(sock.makefile("rb"))
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(sock, selectors.EVENT_READ)
        try:
            has_come = lambda: not answers_while_told and bool(selector.select(0))  # noqa: E731
            yield Talk(reader, _Sender(sock), has_come=has_come, patience_s=patience.answer_s)
        except Untrue as exc:
            raise WireError(f"{host}: {exc}") from exc
        except FilesError as exc:
            raise DetrainError(f"{host}: {exc}") from exc


class _Sender:
    """Buffered sink over a socket; data still buffered when the talk ends is dropped."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._waiting = bytearray()

    def write(self, data: bytes) -> None:
        self._waiting += data
        if len(self._waiting) >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            data, self._waiting = self._waiting, bytearray()
            self._sock.sendall(data)


@contextlib.contextmanager
def _here() -> Iterator[None]:
    """Attribute failures on this side to this machine, not to the node."""
    try:
        yield
    except (Failed, Untrue):
        raise
    except FilesError as exc:
        raise DetrainError(f"{HERE}: {exc}") from exc


def _list_here(paths: Paths) -> tuple[list[str], Tree]:
    """Return the absolute paths and the tree of their files.

    Raises: SpecError, also for a home directory, which is never meant as a whole.
    """
    wanted = [os.path.abspath(os.path.expanduser(path)) for path in _as_list(paths)]
    for path in wanted:
        if holds_homes(path):
            raise SpecError(f"{path} is a home directory or contains one: name the files or folders in it to copy")
    names = [os.path.basename(path) for path in wanted]
    try:
        for name in names:
            check_name(name)
        _check_different(names, wanted)
        return wanted, list_tree(zip(names, wanted))
    except FilesError as exc:
        raise SpecError(str(exc)) from exc


def _check_outside(wanted: Sequence[str], tree: Tree, staging: str) -> None:
    """Raise SpecError when a folder would be copied into itself: each such copy makes the next one larger.

    The staging folder that the node has just created has a unique name. If it exists below one of ``wanted``, the node
    is this machine or shares its disk. Only the name that a node reports is used, not its path.
    """
    name = posixpath.basename(staging)
    if not STAGING_NAME.fullmatch(name):
        return
    for path in wanted:
        root = os.path.basename(path)
        below = [folder.removeprefix(root).strip("/") for folder in tree.folders if folder.partition("/")[0] == root]
        places = [os.path.join(path, folder, name) for folder in below]
        if staging.startswith(os.path.join(os.path.realpath(path), "")):  # in a folder created after the listing
            places.append(staging)
        if found := next(filter(os.path.isdir, places), ""):
            raise SpecError(
                f"{path} would be copied into itself, and its files are already there: the target "
                f"{os.path.dirname(os.path.realpath(found))} is inside it; choose a target outside (--to), or name the "
                "files to copy"
            )


def _leave_out_itself(tree: Tree, target: str) -> int:
    """Remove files from the tree that would be copied onto themselves; returns their number."""
    real = os.path.realpath
    others = [file for file in tree.files if real(os.path.join(target, file.name)) != real(file.path)]
    count, tree.files = len(tree.files) - len(others), others
    return count


def _leave_out_keys(tree: Tree) -> list[str]:
    """Remove files with the name of a key from the tree and return their names; the given paths themselves stay."""

    def stays(path: str, name: str) -> bool:
        root = path.removesuffix(name.partition("/")[2])
        return is_private(path) and not is_private(root.rstrip("/"))

    kept = [file.name for file in tree.files if stays(Path(file.path).as_posix(), file.name)]
    named = set(kept)
    tree.files = [file for file in tree.files if file.name not in named]
    tree.folders = [folder for folder in tree.folders if not stays(folder, folder)]
    return kept


def _as_list(paths: Paths) -> list[str]:
    found = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not found:
        raise SpecError("no path was given: name the files or folders to copy")
    return [_check_path(os.fspath(path)) for path in found]


def _check_path(path: str) -> str:
    """Return ``path``. Raises: SpecError when it is empty or contains a null byte."""
    if not path or "\0" in path:
        raise SpecError(f"{path!r} is not a valid path: name files or folders")
    return path


def _check_different(names: Sequence[str], paths: Sequence[str]) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        wrong = ", ".join(path for name, path in zip(names, paths) if name in twice)
        raise SpecError(f"{wrong} would get the same name at the target: copy them one by one, into separate folders")


def _stoppable(on_progress: OnProgress | None, stop: Stop | None) -> OnProgress:
    def tell(files: int, done: int, total: int) -> None:
        if stop:
            stop.check()
        if on_progress:
            on_progress(files, done, total)

    return tell
