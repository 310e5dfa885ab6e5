"""What an agent has for all of its sessions, and what it does between two of them. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ...agents import claim_folder, remove_dead_agent, require_private
from ...errors import DetrainError, LaunchError, SessionError, WireError
from ...guarded import make_users_folder
from ...wire import Begin, Begun, Kept, LauncherEnded, Link
from ..system.gpus import list_gpus
from ..system.imported import ImportedFiles
from ..system.loop import Loop
from ..system.processes import adopt_orphans, drain, watch_children
from ..system.surroundings import ImportedEnvironment, find_difference, read_starter
from .launching import Launching

_libc = ctypes.CDLL(None)

_Session = TypeVar("_Session")
_Make = Callable[[Path, int], _Session]


class AgentProcess:
    """Made when the agent has imported all it needs, by the umask of who started it."""

    def __init__(self, *, users_umask: int) -> None:
        self.launching = Launching(users_umask)
        self.child_ended = watch_children()
        self._users_umask = users_umask
        self._starter = self._read_starter()
        self._imported = ImportedFiles()
        self._environment = ImportedEnvironment()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        adopt_orphans()

    def why_not_again(self, starter: dict[str, str]) -> str:
        """Empty when an agent that is started now, by ``starter`` where that is known, would be as this one is."""
        if path := self._imported.find_changed():
            return f"{path} changed"
        now = self._read_starter()
        for wanted in (starter, self._starter):
            if wanted and (names := find_difference(wanted, now)):
                return f"what a process inherits ({names}) changed"
        return ""

    def wait_for_next(self, link: Link, *, keep_s: float, beside: Path, make: _Make[_Session]) -> _Session | None:
        """Stay for ``keep_s`` for the session that the notebook at ``link`` begins next; None when there is none.

        ``make`` takes its folder, which is the current one then, and the folder's lock. ``beside``: the last one's.
        """
        if not self.launching.is_warm:
            return None
        gc.collect()  # the last session's
        with contextlib.suppress(AttributeError):  # musl has none, and gives memory back by itself
            _libc.malloc_trim(0)
        following: list[_Session] = []
        loop, deadline = Loop(), time.monotonic() + keep_s
        with contextlib.suppress(WireError), contextlib.closing(loop):
            link.send(Kept())
            loop.add(self.child_ended, self.take_end)
            loop.add(link, lambda: following.extend(self._begin_next(link, beside, make)))
            while not following and self.launching.is_warm and time.monotonic() < deadline:
                loop.once(deadline)
        return following[0] if following else None

    def _begin_next(self, link: Link, beside: Path, make: _Make[_Session]) -> Iterator[_Session]:
        """The next session, when the notebook asks for one. Raises: WireError when it has gone, or is refused."""
        for frame in link.receive():
            message = frame.message()
            if not isinstance(message, Begin):
                continue  # a sign of life, or what was on its way at the end of the last session
            if why_not := self.why_not_again(message.starter):
                link.send(Begun(why_not))
                raise WireError(why_not)
            try:
                following = self._make_next(message, beside, make)
            except SessionError as exc:  # of that name
                link.send(Begun(str(exc), is_taken=True))
                continue
            except (DetrainError, ValueError) as exc:
                link.send(Begun(f"the session cannot begin: {exc}"))
                raise WireError(str(exc)) from exc
            link.send(Begun())
            yield following
            return

    def _make_next(self, message: Begin, beside: Path, make: _Make[_Session]) -> _Session:
        """Raises: DetrainError, ValueError for text that the system does not take."""
        folder = Path(message.folder) if message.folder else beside.parent / message.session
        if not message.folder and (folder.name != message.session or message.session == ".."):
            raise LaunchError(f"{message.session!r} is no name of a session")
        try:
            require_private(folder.parent)  # it may be another one than when this agent was started
        except OSError as exc:
            raise LaunchError(f"the folder of sessions cannot be used: {exc}") from exc
        if message.env is not None:
            os.environ.clear()
            os.environ.update(self._environment.applied_to(message.env))
        list_gpus.cache_clear()
        lock = claim_folder(folder, uses=message.uses)
        os.set_inheritable(lock, False)
        try:
            if message.work_folder:
                self._make_users_folder(message.work_folder)
            os.chdir(folder)
            return make(folder, lock)
        except (OSError, ValueError) as exc:
            os.chdir("/")
            os.close(lock)
            remove_dead_agent(folder)
            raise LaunchError(f"the session's folder cannot be used: {exc}") from exc

    def _make_users_folder(self, path: str) -> None:
        """All else that an agent makes is ours alone. Raises: OSError, ValueError."""
        ours = os.umask(self._users_umask)
        try:
            make_users_folder(Path(path))
        finally:
            os.umask(ours)

    def take_end(self) -> LauncherEnded | None:
        """After a child has ended: see ``Launching.take_end``."""
        drain(self.child_ended)
        return self.launching.take_end()

    def _read_starter(self) -> dict[str, str]:
        return {**read_starter(), "umask": f"{self._users_umask:04o}"}
