"""This machine as a node: its agent is a detached process, connected to directly by its socket."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..agents import (
    JOBS_MAGIC,
    JOBS_MODULE,
    connect,
    live_agent,
    remove_dead_agent,
    remove_dead_agents,
    running_sessions,
    runtime_folder,
    start_agent,
    wait_for_pid,
)
from ..errors import LaunchError, SessionError
from ..guarded import RUN_MODULE, make_users_folder
from ..plan import NodeOffer
from ..text import HERE, printable
from .here import HereConnection
from .transport import AgentFolders

if TYPE_CHECKING:
    from ..spec.node import Node
    from .connection import CommandStream

_LOOK_LIMIT_S = 60.0
_FIND_VERSIONS = """
import importlib.util, json, sys
from importlib import metadata
there = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
known = {name: metadata.version(name) for name in there if [*metadata.distributions(name=name)]}
print(json.dumps({**dict.fromkeys(there, "unknown"), **known}))
"""
_SERVICE_LIMIT_S = 10.0


def own_python(node: Node | None) -> str:
    """Return the Python of the ranks on this machine: that of this process, unless ``node`` sets another one."""
    is_usual = node is None or node.python == type(node).model_fields["python"].default
    return sys.executable if is_usual or node is None else os.path.expanduser(node.python)


class LocalTransport:
    """Transport to an agent on this machine.

    ``node`` is the user's description of this machine, as ``localhost``; without one it has no name and is the only
    node of its session. Among hosts, ``address`` is not the loopback address, see deploy/ways.py.
    """

    is_this_machine = True
    is_trusted = False  # unused: this machine may show active HTML in any case
    can_resume = False
    shares_paths = True
    address = "127.0.0.1"
    interface = "lo"
    reached_from = ""
    is_forwarded = False
    account: object = None
    contact: object = None
    folder_state: tuple[object, object] = ("", "")
    cache = ""
    project = ""

    def __init__(self, node: Node | None = None) -> None:
        self.node = node
        self.name = node.name if node else ""
        self.place: object = (HERE, node)
        self.python = own_python(node)
        self._versions: dict[str, str] | None = None  # of packages in another Python than ours, once it was queried
        self._agent: subprocess.Popen[bytes] | None = None
        self._pid = 0  # pid of an agent that another process started
        self._folder = Path()

    @property
    def env(self) -> dict[str, str]:
        """Variables that the node's description lists, with current values; the agent inherited the others."""
        return {name: os.environ[name] for name in self.node.env if name in os.environ} if self.node else {}

    @property
    def torch(self) -> str:
        """Version of torch in the ranks' Python; empty until another Python than ours has been queried."""
        with contextlib.suppress(PackageNotFoundError):
            return version("torch") if self.python == sys.executable else (self._versions or {}).get("torch", "")
        return ""

    def _look_at_python(self) -> None:
        """Check the ranks' Python if it is not ours. Raises: LaunchError when it lacks torch or this detrain_nb."""
        if self.python == sys.executable or self._versions is not None:
            return
        found = _find_versions(self.python, ["torch", "detrain_nb"])
        for name in ("torch", "detrain_nb"):
            if name not in found:
                install = f"install it there ({self.python} -m pip install {name})"
                another = 'set python = "/path/to/python" in a nodes file'
                raise LaunchError(f"{name} is missing in {self.python}: {install}, or {another}")
        if (theirs := found["detrain_nb"]) != __version__:
            raise LaunchError(
                f"{self.python} has detrain_nb {theirs}, this process has {__version__}: install the same version"
            )
        self._versions = found

    def start_agent(self, session: str) -> socket.socket:
        """Start the agent of ``session`` and return a connected socket.

        Raises: LaunchError when it does not start, SessionError when a session of that name is already running.
        """
        self._look_at_python()
        self._make_workdir()
        self._folder = runtime_folder() / session
        self._agent, sock = start_agent(self._folder)
        return sock

    def connect_agent(self, session: str) -> socket.socket:
        """Connect to the running agent of ``session``. Raises: SessionError when none of that name is running."""
        self._folder = runtime_folder() / session
        self._pid = running_sessions().get(session, 0)
        if not self._pid:
            remove_dead_agent(self._folder)
            known = ", ".join(running_sessions()) or "none"
            raise SessionError(f"no session {session!r} is running on this machine; running sessions: {known}")
        return connect(self._folder)

    def begin(self, session: str) -> AgentFolders:
        """Return the folder that a fresh agent of ``session`` would use."""
        self._make_workdir()
        self._folder = runtime_folder() / session
        return {"folder": str(self._folder), "work_folder": "", "uses": []}

    def _make_workdir(self) -> None:
        if self.node and self.node.workdir:
            try:
                make_users_folder(Path(self.work_folder("")))
            except OSError as exc:
                raise LaunchError(f"the workdir {self.node.workdir} cannot be used: {exc}") from exc

    def ask_meanwhile(self, work: Collection[Future[Any]]) -> None:
        """Do nothing: this machine has no questions."""

    def offer(self, gpus: int) -> NodeOffer:
        """Return all GPUs of this machine, and the devices and number of ranks that the user chose."""
        wanted = (self.node.devices, self.node.ranks) if self.node else ()
        return NodeOffer(self.name, tuple(range(gpus)), *wanted)

    def work_folder(self, folder: str) -> str:
        """Return the node's ``workdir``, into which nothing is copied; else ``folder`` itself."""
        return os.path.expanduser(self.node.workdir) if self.node and self.node.workdir else folder

    def run_files(self) -> AbstractContextManager[socket.socket]:
        """Serve one order in a thread of this process."""
        from ..copying.served_here import served_here

        return served_here()

    @contextlib.contextmanager
    def run_jobs(self) -> Iterator[socket.socket]:
        """Run the service in the ranks' Python, as a child of this process; jobs are not, and outlive it."""
        if sys.platform != "linux":
            raise LaunchError(
                f"jobs on this machine need Linux, this is {sys.platform}: run the job on other nodes from here"
            )
        self._look_at_python()
        service = shlex.join([self.python, "-X", "utf8", "-c", RUN_MODULE, JOBS_MODULE])
        with contextlib.closing(HereConnection().open_stream(f"cd / && exec {service}")) as stream:
            _skip_to(stream, JOBS_MAGIC)
            yield stream.sock

    def wait_for_end(self, *, limit_s: float, is_ours: bool = True) -> None:
        """Wait until the agent has exited, at most ``limit_s``; then kill it if this process started it.

        With ``is_ours`` False, the agent has finished our session; if it is alive, it serves another notebook and is
        left alone.
        """
        if not is_ours and live_agent(self._folder):
            self.leave()
            return
        if self._agent is None:
            wait_for_pid(self._pid, limit_s=limit_s)
        else:
            try:
                self._agent.wait(limit_s)
            except subprocess.TimeoutExpired:
                self._agent.kill()
                self._agent.wait()
        remove_dead_agents(self._folder.parent)  # a killed agent could not remove its own files

    def leave(self) -> None:
        """Leave the agent running; as its parent, reap it in a thread whenever it exits."""
        if self._agent is not None:
            with contextlib.suppress(RuntimeError):  # this process is itself exiting
                threading.Thread(target=self._agent.wait, name="detrain_nb agent", daemon=True).start()


def _find_versions(python: str, names: list[str]) -> dict[str, str]:
    """Return the installed versions of ``names`` in another Python, without importing them. Raises: LaunchError."""
    command = [python, "-c", _FIND_VERSIONS, *names]
    try:
        asked = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=_LOOK_LIMIT_S)
        found: dict[str, str] = json.loads(asked.stdout)
    except OSError as exc:
        raise LaunchError(f"cannot start python {python}: {exc.strerror}") from exc
    except subprocess.TimeoutExpired as exc:
        raise LaunchError(f"python {python} did not report its packages within {_LOOK_LIMIT_S:.0f} s") from exc
    except ValueError as exc:
        raise LaunchError(f"python {python} failed to report its packages: {_last_line(asked.stderr)}") from exc
    return found


def _skip_to(service: CommandStream, magic: bytes) -> None:
    """Read the service's first bytes, which must be ``magic``. Raises: LaunchError otherwise."""
    sock = service.sock
    sock.settimeout(_SERVICE_LIMIT_S)
    said = b""
    try:
        while not said.endswith(magic):
            data = sock.recv(1)
            if not data or len(said) > len(magic):
                service.exit_status(limit_s=_SERVICE_LIMIT_S)  # once it has exited, its stderr has the reason
                raise LaunchError(f"the job service exited at once: {_last_line(service.stderr_tail())}")
            said += data
    except TimeoutError as exc:
        raise LaunchError(f"the job service did not start within {_SERVICE_LIMIT_S:.0f} s") from exc
    sock.settimeout(None)


def _last_line(said: str) -> str:
    return printable(([line for line in said.splitlines() if line.strip()] or ["no output"])[-1][:500])
