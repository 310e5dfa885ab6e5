"""``%distributed put``, ``get``, ``data``, ``doctor``, ``nodes``: files on hosts, their faults, a form of nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.display import display

from ..deploy.private import is_same
from ..documents import SUFFIXES
from ..errors import SpecError
from ..text import CopyProgress, format_size
from .holder import SessionHolder, ask_passphrase
from .progress import redrawn_line
from .stops import told_when_interrupted

if TYPE_CHECKING:
    from ..deploy.files import Copied

_SOME_FILES = "some of the files may have been copied"


class HostCommands:
    """The commands of one notebook for hosts and their files."""

    def __init__(self, ipython: Any, holder: SessionHolder) -> None:
        self._ipython = ipython
        self._holder = holder

    def put(self, args: Any) -> None:
        """Copy files and folders of this machine to the nodes."""
        session = self._holder.running()
        is_all_here = session.ranks.nodes is None and args.to is args.nodes is None
        if is_all_here and all(
            is_same(Path(os.path.expanduser(path)), Path(session.files.folder)) for path in args.paths
        ):
            print("nothing to copy: the ranks run on this machine and use the folder itself")
            return
        with told_when_interrupted("%distributed put", _SOME_FILES), self._progress("put") as bar:
            copied = session.files.put(args.paths, args.to, nodes=args.nodes, on_progress=bar)
        _say_copied(copied)

    def get(self, args: Any) -> None:
        """Copy files and folders of the nodes to this machine."""
        session = self._holder.running()
        with told_when_interrupted("%distributed get", _SOME_FILES), self._progress("get") as bar:
            copied = session.files.get(args.paths, args.to or ".", nodes=args.nodes, on_progress=bar)
        _say_copied(copied)
        to = Path(os.path.expanduser(args.to or ".")).absolute()
        print(f"in {to}" if len(copied) == 1 else f"in {to}, each node's in a folder of its name")

    def data(self, args: Any) -> None:
        """Check that every node has the same files. Raises: SpecError when no node has any."""
        check = self._holder.running().files.check_data(args.path)
        if not check.is_anywhere:
            raise SpecError(f"{args.path}: no node has it")
        display(check)

    def doctor(self, args: Any) -> None:
        """Examine hosts: those of the session, or any."""
        from ..doctor import examine, fix
        from ..spec.nodes_file import write_nodes

        nodes = args.nodes or (self._holder.session.ranks.nodes if self._holder.session else None)
        if nodes is None:
            raise UsageError("%distributed doctor: no session is running on other machines: name hosts with --nodes")
        if args.save and not str(args.nodes).endswith(SUFFIXES):
            raise UsageError("%distributed doctor: --save writes to a nodes file: give one with --nodes")
        wanted = {name: getattr(args, name) or args.save for name in ("bandwidth", "speed")}
        with self._lines() as note:
            report = examine(nodes, **wanted, on_progress=note, ask_passphrase=ask_passphrase)
        display(report)
        if args.fix:
            print(fix(report))
        if args.save:
            path = Path(os.path.expanduser(args.nodes))
            before = f"{path}.before"
            is_kept = write_nodes(path, report.measured_nodes(), before=before)
            print(f"the measurements are in {path}" + f"; its earlier version is {before}" * is_kept)

    def nodes(self, args: Any) -> None:
        """Show nodes as a form, from which the session of this notebook can be started."""
        from detrain_nb import widgets

        display(widgets.nodes(args.file or self._holder.listed_nodes, start=self._holder.start_from_form))

    def _lines(self) -> AbstractContextManager[Callable[[str], None]]:
        return redrawn_line(self._ipython, is_live=self._holder.settings.output == "live")

    @contextmanager
    def _progress(self, what: str) -> Iterator[CopyProgress]:
        with self._lines() as draw:
            yield CopyProgress(what, draw)


def _say_copied(copied: dict[str, Copied]) -> None:
    for name, done in copied.items():
        files = "1 file" if done.files == 1 else f"{done.files:,} files"
        print(f"{name or Path.cwd().name}: {files}, {format_size(done.size_bytes)}")
        if done.num_there:
            print(f"  already there and identical: {done.num_there:,}")
        if done.num_skipped:
            shown = ", ".join(done.skipped[:3])
            print(f"  skipped, neither file nor folder: {done.num_skipped:,} ({shown})")
        if done.num_kept:
            shown = ", ".join(done.kept[:3])
            print(f"  not sent, as they may hold keys: {done.num_kept:,} ({shown}); to send a file, name it itself")
