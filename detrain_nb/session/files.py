"""The files of a session: copied to its nodes and back, compared there, and the notebook's folder kept in sync."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..deploy.start_steps import OnStep, ignore_step
from ..errors import DetrainError, SessionError, SpecError
from ..plan import split_names
from ..transport import Transport
from .running.asked import check_paths, check_text, names_of
from .running.settings import SlotsOnly

if TYPE_CHECKING:
    from ..deploy.files import Copied, OnProgress, Paths, Stop
    from ..deploy.sync import DataCheck, FolderSync

__all__ = ["SessionFiles"]


def current_folder() -> str:
    """Return the current folder. Raises: SpecError when it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise SpecError("the current folder was removed: change to another one") from None


def find_project(project: str, folder: str) -> str:
    """Return the full path of ``project``, which contains ``folder``, a full path. Raises: SpecError if it does not."""
    there = os.path.abspath(os.path.expanduser(project))
    if not Path(folder).is_relative_to(there):
        raise SpecError(f"project {there} does not contain {folder}, where the ranks start: give a folder that does")
    if not os.path.isdir(there):
        raise SpecError(f"project {there} does not exist")
    return there


class SessionFiles(SlotsOnly):
    """The files of a session's nodes: copied there and back, compared, and those of ``project`` kept in sync."""

    __slots__ = {
        **dict.fromkeys(("_elsewhere", "_sync", "_transports")),
        "folder": "The local folder in which the ranks start, or whose counterpart on a node they start in.",
        "project": "The local folder whose files are copied to the nodes: ``folder``, or one that contains it.",
        "notices": "Reasons why changes in the folder are not copied to the nodes.",
    }

    def __init__(
        self,
        transports: Sequence[Transport],
        folder: str,
        *,
        project: str = "",
        is_synced: bool = False,
        takes_over: bool = True,
    ) -> None:
        """Create the files of a session; with ``is_synced``, remote nodes get the changes in ``project``.

        ``notices`` has the reason if they do not. ``takes_over`` is as in FolderSync, False for a session that goes on.
        Raises: SpecError when the folder of a session that begins has too many files or bytes, or cannot be read.
        """
        self.folder, self.project = folder, project or folder
        self.notices: list[str] = []
        self.reach_by(transports)
        self._sync = self._begin_sync(takes_over=takes_over) if is_synced and self._elsewhere else None

    def _begin_sync(self, *, takes_over: bool) -> FolderSync | None:
        from ..deploy.folder import list_folder
        from ..deploy.private import why_kept
        from ..deploy.sync import FolderSync

        top = os.path.realpath(self.project)
        if why := why_kept(top):
            self.notices.append(why)
            return None
        try:
            list_folder(self.project, top=top)
        except SpecError as exc:
            if takes_over:
                raise
            self.notices.append(f"changes here are not copied to the nodes until the next attach: {exc}")
            return None
        return FolderSync(self.project, top=top, takes_over=takes_over)

    def reach_by(self, transports: Sequence[Transport]) -> None:
        """Set the transports that reach the nodes from now on."""
        self._transports = list(transports)
        self._elsewhere = [transport for transport in transports if not transport.shares_paths]
        for transport in self._elsewhere:
            transport.project = self.project

    @property
    def is_synced(self) -> bool:
        """Changes in the folder are copied to the nodes before each cell."""
        return self._sync is not None

    def bring(
        self,
        names: Container[str] | None = None,
        *,
        on_step: OnStep = ignore_step,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[str]:
        """Copy what has changed in the folder to the nodes in ``names``, by default to all.

        ``on_step`` is called in the threads of the nodes, ``meanwhile`` repeatedly in the calling thread.
        Returns notices for the user. Raises: DetrainError.
        """
        if self._sync is None:
            return []
        chosen = [node for node in self._elsewhere if names is None or node.name in names]
        self._sync.bring(chosen, on_step=on_step, meanwhile=meanwhile)
        told, self._sync.notices[:] = list(self._sync.notices), []
        return told

    def put(
        self,
        paths: Paths,
        target: str | None = None,
        *,
        nodes: str | Iterable[str] | None = None,
        on_progress: OnProgress | None = None,
    ) -> dict[str, Copied]:
        """Copy local files and folders into the folder ``target`` of ``nodes`` (all): ``{node: what was copied}``.

        session.files.put(["data", "vocab.txt"], nodes="gpu1,gpu2")

        A relative target is resolved against the folder that the ranks start in, which is the default.
        ``on_progress`` receives the files done, the bytes done and the total bytes, of all nodes together.
        Raises: SpecError for a missing local path; DetrainError with the node and the path, when all nodes are done.
        """
        from ..deploy.files import label, on_every, put

        paths = check_paths(paths)
        check_text("target", target or "")
        chosen = self._choose(nodes)
        copied = on_every(
            chosen,
            lambda node, stop, note: put(node, paths, target, note, folder=self.folder, stop=stop),
            on_progress,
        )
        return dict(zip(map(label, chosen), copied))

    def get(
        self,
        remote: Paths,
        folder: str | os.PathLike[str] = ".",
        *,
        nodes: str | Iterable[str] | None = None,
        on_progress: OnProgress | None = None,
    ) -> dict[str, Copied]:
        """Copy files and folders of ``nodes`` (all) into the local ``folder``; with several nodes, one subfolder each.

        session.files.get("checkpoints", "results", nodes="gpu1")

        Paths and ``on_progress`` are as in ``put``. Links and devices are not copied. Raises: as ``put``.
        """
        from ..deploy.files import get, label, on_every

        paths = check_paths(remote)
        check_paths(folder, "folder")
        chosen = self._choose(nodes)
        here = os.path.expanduser(os.fspath(folder))
        folders = {label(node): os.path.join(here, label(node)) if len(chosen) > 1 else here for node in chosen}
        done: dict[str, Copied] = {}

        def act(node: Transport, stop: Stop, note: OnProgress) -> None:
            done[label(node)] = get(node, paths, folders[label(node)], note, work_folder=self.folder, stop=stop)

        try:
            on_every(chosen, act, on_progress)
        except DetrainError as exc:
            got = [name for name in map(label, chosen) if name in done]
            if not got:
                raise
            failed = ", ".join(name for name in map(label, chosen) if name not in done)
            words = f"fetched from {', '.join(got)}; not from {failed}: use --nodes {','.join(got)}"
            raise type(exc)(f"{exc}\n{words}") from exc
        return {name: done[name] for name in map(label, chosen)}

    def check_data(self, path: str) -> DataCheck:
        """Compare the files under ``path`` on all nodes, by names, sizes and samples. Raises: as ``put``.

        ``is_same`` of the result is True if no node differs; ``differences`` has the differences by node.
        """
        from ..deploy.sync import check

        check_text("path", path)
        return check(self._choose(None), path, folder=self.folder)

    def _choose(self, nodes: str | Iterable[str] | None) -> list[Transport]:
        """Return nodes by name, several separated by commas. Raises: SpecError; SessionError after its end."""
        if not self._transports:
            raise SessionError("the session has ended: start another one")
        if nodes is None:
            return self._transports
        wanted = split_names(nodes) if isinstance(nodes, str) else names_of(nodes, "nodes")
        known = {transport.name: transport for transport in self._transports}
        unknown = [name for name in wanted if name not in known]
        if unknown or not wanted:
            there = ", ".join(name for name in known if name) or "only this machine, without a name"
            raise SpecError(
                f"{', '.join(map(repr, unknown)) or 'nothing'} is not a node of this session; its nodes: {there}"
            )
        return [known[name] for name in dict.fromkeys(wanted)]
