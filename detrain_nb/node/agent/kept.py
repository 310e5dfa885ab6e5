"""The part of an agent that outlives a session, and its wait for the next session. Standard library only."""

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
    """The state that an agent process keeps across sessions.

    Create it after the agent has imported everything. ``users_umask``: the umask of the process that started the agent.
    """

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
        """Return what has changed since this agent started; empty if a new agent would be the same.

        ``starter``: what a new agent would inherit from the process that starts it; empty if unknown.
        """
        if path := self._imported.find_changed():
            return f"{path} changed"
        now = self._read_starter()
        for wanted in (starter, self._starter):
            if wanted and (names := find_difference(wanted, now)):
                return f"inherited process settings ({names}) changed"
        return ""

    def wait_for_next(self, link: Link, *, keep_s: float, beside: Path, make: _Make[_Session]) -> _Session | None:
        """Wait ``keep_s`` seconds for the notebook at ``link`` to start its next session; returns None if none starts.

        ``make`` takes the session's folder, by then the current folder, and the folder's lock. ``beside``: the folder
        of the previous session; the new one is created next to it.
        """
        if not self.launching.is_warm:
            return None
        gc.collect()  # garbage of the previous session
        with contextlib.suppress(AttributeError):  # musl lacks it, and returns memory by itself
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
        """Yield the next session once the notebook asks for it.

        Raises: WireError when the notebook has disconnected, or its session is refused.
        """
        for frame in link.receive():
            message = frame.message()
            if not isinstance(message, Begin):
                continue  # an Alive message, or a message sent before the previous session had ended
            if why_not := self.why_not_again(message.starter):
                link.send(Begun(why_not))
                raise WireError(why_not)
            try:
                following = self._make_next(message, beside, make)
            except SessionError as exc:  # the name is in use
                link.send(Begun(str(exc), is_taken=True))
                continue
            except (DetrainError, ValueError) as exc:
                link.send(Begun(f"the session cannot start: {exc}"))
                raise WireError(str(exc)) from exc
            link.send(Begun())
            yield following
            return

    def _make_next(self, message: Begin, beside: Path, make: _Make[_Session]) -> _Session:
        """Claim the folder of the next session and make the session.

        Raises: DetrainError; ValueError for text that the operating system does not accept.
        """
        folder = Path(message.folder) if message.folder else beside.parent / message.session
        if not message.folder and (folder.name != message.session or message.session == ".."):
            raise LaunchError(f"{message.session!r} is not a valid session name")
        try:
            require_private(folder.parent)  # it may differ from the one that was checked when this agent started
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
        """Make the user's work folder with the user's umask; everything else uses the agent's own umask.

        Raises: OSError, ValueError.
        """
        ours = os.umask(self._users_umask)
        try:
            make_users_folder(Path(path))
        finally:
            os.umask(ours)

    def take_end(self) -> LauncherEnded | None:
        """Return the launcher's end after a child has exited: see ``Launching.take_end``."""
        drain(self.child_ended)
        return self.launching.take_end()

    def _read_starter(self) -> dict[str, str]:
        return {**read_starter(), "umask": f"{self._users_umask:04o}"}
