"""Files of a session: copied to its nodes and back, compared there, and the notebook's folder kept the same on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..deploy.start_steps import OnStep, ignore_step
from ..errors import SessionError, SpecError
from ..plan import split_names
from ..transport import Transport
from .running.asked import check_paths, check_text, names_of
from .running.settings import SlotsOnly

if TYPE_CHECKING:
    from ..deploy.files import Copied, OnProgress, Paths
    from ..deploy.sync import DataCheck, FolderSync

__all__ = ["SessionFiles"]


def current_folder() -> str:
    """Raises: SpecError where it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise SpecError("the current folder was removed: change to another one") from None


def find_project(project: str, folder: str) -> str:
    """Give the full path of ``project``, which ``folder``, a full path, is in. Raises: SpecError where it is not."""
    there = os.path.abspath(os.path.expanduser(project))
    if not Path(folder).is_relative_to(there):
        raise SpecError(f"project {there} is not above {folder}, where the ranks start: name one that is")
    if not os.path.isdir(there):
        raise SpecError(f"project {there} is not there")
    return there


class SessionFiles(SlotsOnly):
    """The files of a session's nodes: copied there and back, compared, and those of ``project`` kept the same."""

    __slots__ = {
        **dict.fromkeys(("_elsewhere", "_sync", "_transports")),
        "folder": "The folder here in which, or in the like of which, the ranks start.",
        "project": "The folder here whose files the nodes have: ``folder``, or one above it.",
        "notices": "Why changes in the folder do not go to the nodes.",
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
        """With ``is_synced`` the nodes elsewhere get what changes in ``project``; ``notices`` say where they do not.

        Not ``takes_over``: of a session that goes on, as FolderSync has it. Raises: SpecError when the folder is too
        much for one that begins.
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
            self.notices.append(f"until the next attach no changes here go to the nodes: {exc}")
            return None
        return FolderSync(self.project, top=top, takes_over=takes_over)

    def reach_by(self, transports: Sequence[Transport]) -> None:
        """Reach the nodes by these from now on."""
        self._transports = list(transports)
        self._elsewhere = [transport for transport in transports if not transport.shares_paths]
        for transport in self._elsewhere:
            transport.project = self.project

    @property
    def is_synced(self) -> bool:
        """Changes in the folder go to the nodes before each cell."""
        return self._sync is not None

    def bring(
        self,
        names: Container[str] | None = None,
        *,
        on_step: OnStep = ignore_step,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[str]:
        """Have what has changed in the folder on the nodes of these names, by default on all.

        ``on_step`` is told in the threads of the nodes; ``meanwhile`` is called in this one, again and again.
        Returns what the user should know. Raises: DetrainError.
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
        """Copy files and folders from here into the folder ``target`` of ``nodes`` (all): ``{node: what was copied}``.

        A target that is not given in full is below the folder that the ranks start in, which is the default.
        ``on_progress`` gets the files done, the bytes done and the bytes in all, of all nodes together.
        Raises: SpecError for what is not here, DetrainError with the node and the path, when all have come to an end.
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
        """Copy files and folders of ``nodes`` (all) into ``folder`` here, of several nodes each into one of its name.

        Paths and ``on_progress`` as with ``put``. Links there, and devices, stay where they are. Raises as ``put``.
        """
        from ..deploy.files import get, label, on_every

        paths = check_paths(remote)
        check_paths(folder, "folder")
        chosen = self._choose(nodes)
        here = os.path.expanduser(os.fspath(folder))
        folders = {label(node): os.path.join(here, label(node)) if len(chosen) > 1 else here for node in chosen}
        copied = on_every(
            chosen,
            lambda node, stop, note: get(node, paths, folders[label(node)], note, work_folder=self.folder, stop=stop),
            on_progress,
        )
        return dict(zip(map(label, chosen), copied))

    def check_data(self, path: str) -> DataCheck:
        """Whether the same files are under ``path`` on every node, by names, sizes and samples. Raises as ``put``."""
        from ..deploy.sync import check

        check_text("path", path)
        return check(self._choose(None), path, folder=self.folder)

    def _choose(self, nodes: str | Iterable[str] | None) -> list[Transport]:
        """Nodes by their names, several with commas. Raises: SpecError; SessionError where all have ended."""
        if not self._transports:
            raise SessionError("the session has ended: start another one")
        if nodes is None:
            return self._transports
        wanted = split_names(nodes) if isinstance(nodes, str) else names_of(nodes, "nodes")
        known = {transport.name: transport for transport in self._transports}
        unknown = [name for name in wanted if name not in known]
        if unknown or not wanted:
            there = ", ".join(name for name in known if name) or "this machine only, without a name"
            raise SpecError(
                f"{', '.join(map(repr, unknown)) or 'nothing'} is no node of this session: there are {there}"
            )
        return [known[name] for name in dict.fromkeys(wanted)]
