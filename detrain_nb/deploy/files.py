"""Files between this machine and the nodes, where copying/remote_program.py is the other end.

A copy that ends early leaves nothing that is not whole, on either side.
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

OnProgress = Callable[[int, int, int], object]  # files done, bytes done, bytes in all
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_BUFFER_BYTES = 1 << 18
_LOOK_GAP_S = 0.1
_STOP_LIMIT_S = 2.0  # for a copy to leave in good order, before its connection is shut
_SHUT_LIMIT_S = 1.0  # for what was shut to end

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Copied:
    """What was copied. Links, devices and what else is no file or folder were not: ``skipped`` names some of them.

    ``kept`` names some of the files that stay here as they may hold keys. ``num_there``: files that are the ones there.
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
    """How long a node is waited for."""

    silence_s: float = 60.0  # the program says every few seconds that it is still at it
    answer_s: float = 1800.0  # a million files on a slow disk take a while to list
    bring_s: float = 120.0  # what a cell waits for; the node waits up to 60 s for another that writes to its folder


PATIENCE = Patience()


class Stop:
    """Ends what other threads are at: first they are asked to, then what they wait for is shut."""

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
        """Raises: TransportError when it was asked for."""
        if self._is_set:
            raise TransportError("stopped")

    @contextlib.contextmanager
    def watch(self, shut: Callable[[], object]) -> Iterator[None]:
        self._shut.append(shut)  # first: who asks in between shuts it, too
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
    """Copy files and folders, with what is in them, into the folder ``target`` of a node, which is made.

    A target that is not given in full is one of the folder where the ranks start (that of this machine is ``folder``),
    as is none. Executable files stay so; links in a folder are not followed, nor does what may hold keys go with it
    (deploy/private.py): it does when it is named itself.
    Raises: SpecError for paths that are not here, for homes, and for a folder that would be copied into itself,
    DetrainError with the node and the path when it cannot be done.
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
            raise Untrue("what it says has arrived is not what was sent")
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
    """Copy files and folders of a node into ``folder`` here, which is made; paths as with ``put``.

    Each keeps its last name, and nothing is written but that and what is below it; one without (``.``, ``~``) gets the
    node's name. Raises as ``put``; WireError when what the node sends cannot be believed.
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
    """Do something with all nodes at once; ``on_progress`` gets the sums over them, in this thread.

    It gets them once all nodes have said how much there is, or have ended: what is done of it never becomes less.
    All come to their end, also where one fails. Raises: DetrainError with a line for each that failed. An interrupt,
    or what ``on_progress`` or ``meanwhile`` raises, which is called again and again, ends the others.
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
        if not wait(work, _SHUT_LIMIT_S).not_done:  # else one is connecting, and finds out when it has
            pool.shutdown()
        raise
    pool.shutdown()
    results: list[_Result] = []
    failures: list[DetrainError] = []
    for future in work:
        try:
            results.append(future.result())
        except DetrainError as exc:  # anything else is our own fault
            failures.append(exc)
    if failures:
        kinds = {type(exc) for exc in failures}
        kind = kinds.pop() if len(kinds) == 1 else DetrainError
        raise kind("\n".join(dict.fromkeys(map(str, failures)))) from failures[0]  # what is wrong here is said once
    return results


def _add_up(states: Iterable[tuple[int, int, int]]) -> tuple[int, int, int]:
    files, done, total = zip(*states)
    return sum(files), sum(done), sum(total)


def label(node: Transport | NodePlan) -> str:
    """Return the name by which a node is looked up in reports and listed; `text.told_node` is for people alone."""
    return node.name or HERE


@contextlib.contextmanager
def open_talk(node: Transport, *, stop: Stop | None = None, patience: Patience = PATIENCE) -> Iterator[Talk]:
    """Run copying/remote_program.py on a node. What goes wrong in the block raises DetrainError with its name."""
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
    """Speak on a byte stream to a program of ours on a node. Raises: DetrainError with the name of the node.

    ``answers_while_told``: what comes while something is sent is not only its failure.
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
    """What is said is gathered; what has not been sent when the talk ends never is."""

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
    """What goes wrong on this side is not the node's fault."""
    try:
        yield
    except (Failed, Untrue):
        raise
    except FilesError as exc:
        raise DetrainError(f"{HERE}: {exc}") from exc


def _list_here(paths: Paths) -> tuple[list[str], Tree]:
    """The full paths, and what is there. Raises: SpecError, also for a home: nobody means all that is in it."""
    wanted = [os.path.abspath(os.path.expanduser(path)) for path in _as_list(paths)]
    for path in wanted:
        if holds_homes(path):
            raise SpecError(f"{path} is a home, or holds homes: name the files or folders in it that are meant")
    names = [os.path.basename(path) for path in wanted]
    try:
        for name in names:
            check_name(name)
        _check_different(names, wanted)
        return wanted, list_tree(zip(names, wanted))
    except FilesError as exc:
        raise SpecError(str(exc)) from exc


def _check_outside(wanted: Sequence[str], tree: Tree, staging: str) -> None:
    """Raises: SpecError when a folder would be copied into itself: each such copy makes the next one larger.

    What the node has just made has a name of its own: where it stands below one of ``wanted``, the node is this
    machine, or has its disk. It is looked for there alone, whatever path a node says.
    """
    name = posixpath.basename(staging)
    if not STAGING_NAME.fullmatch(name):
        return
    for path in wanted:
        root = os.path.basename(path)
        below = [folder.removeprefix(root).strip("/") for folder in tree.folders if folder.partition("/")[0] == root]
        places = [os.path.join(path, folder, name) for folder in below]
        if staging.startswith(os.path.join(os.path.realpath(path), "")):  # in a folder that was made just now
            places.append(staging)
        if found := next(filter(os.path.isdir, places), ""):
            raise SpecError(
                f"{path} would be copied into itself, its files are there already: the target "
                f"{os.path.dirname(os.path.realpath(found))} is in it; name a target elsewhere (--to), or the files "
                "that are meant"
            )


def _leave_out_itself(tree: Tree, target: str) -> int:
    """Take out what would be copied to where it is, and count it."""
    real = os.path.realpath
    others = [file for file in tree.files if real(os.path.join(target, file.name)) != real(file.path)]
    count, tree.files = len(tree.files) - len(others), others
    return count


def _leave_out_keys(tree: Tree) -> list[str]:
    """Take out what of a folder has the name of a key, and name it; a folder that was named so itself is meant."""

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
        raise SpecError("no path was given: name files or folders")
    return [_check_path(os.fspath(path)) for path in found]


def _check_path(path: str) -> str:
    """Raises: SpecError."""
    if not path or "\0" in path:
        raise SpecError(f"{path!r} is no path: name files or folders")
    return path


def _check_different(names: Sequence[str], paths: Sequence[str]) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        wrong = ", ".join(path for name, path in zip(names, paths) if name in twice)
        raise SpecError(f"{wrong}: they would have the same name: copy them one by one, into folders of their own")


def _stoppable(on_progress: OnProgress | None, stop: Stop | None) -> OnProgress:
    def tell(files: int, done: int, total: int) -> None:
        if stop:
            stop.check()
        if on_progress:
            on_progress(files, done, total)

    return tell
