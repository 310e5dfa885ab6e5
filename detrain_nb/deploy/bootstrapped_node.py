"""A node on which commands can be run: a program on it connects us to the agent, and our code is installed there.

A short program is sent to the node's Python (node/ssh/bootstrap.py). It reports which code the node has; missing
archives are sent, each version once. Then it turns into the attach program.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..agents import JOBS_MAGIC
from ..copying.json_lines import SLOWEST_BYTES_PER_S
from ..copying.remote_program import MAGIC as FILES_MAGIC
from ..errors import LaunchError, TransportError
from ..plan import NodeOffer
from ..spec.node import Node
from ..text import HERE
from ..transport import AgentFolders
from ..transport.connection import Connection
from ..wire import SILENCE_LIMIT_S
from .node_facts import NodeFacts, choose_address, is_address
from .remote_program import RemoteProgram, read_program

if TYPE_CHECKING:
    from .code import CodeArchive

__all__ = ["RUN_FILES", "RUN_JOBS", "BootstrappedNode"]

_MAGIC = b"\ndetrain-nb bootstrap 1\n"
RUN_FILES = """\
import sys
sys.path[:0] = [{code!r}]
from detrain_nb.copying.remote_program import main
main()
"""
RUN_JOBS = """\
import os, sys
sys.path[:0] = [{code!r}]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [{code!r}, os.environ.get("PYTHONPATH")]))
from detrain_nb.node.job.service import main
main()
"""
_UNPACK_LIMIT_S = 60.0

_Connection = TypeVar("_Connection", bound=Connection)


class BootstrappedNode(ABC, Generic[_Connection]):
    """A transport (transport/transport.py) over connections; ``python``, ``address`` etc. are set once it was reached.

    A subclass defines how a connection is made (``_connect``) and can refuse connections (``_admit``).
    """

    is_this_machine = False
    is_trusted = is_forwarded = False
    can_resume = True
    shares_paths = False

    def __init__(self, node: Node) -> None:
        self.node = node
        self.name = node.name
        self.python = self.address = self.interface = self.reached_from = self._work_folder = ""
        self.facts: NodeFacts | None = None
        self.project = ""
        self.folder_state: tuple[object, object] = ("", "")  # see deploy/sync.py
        self._digests: list[str] = []  # of our code there, in the order of sys.path
        self._place: object = None
        self._connection: _Connection | None = None
        self._times_left = 0
        self._connecting = threading.Lock()

    @abstractmethod
    def _connect(self) -> _Connection:
        """Make a fresh connection. Raises: TransportError, SpecError."""

    def _admit(self, connection: _Connection) -> None:
        """Check a connection before anything is sent on it; a subclass sets ``is_trusted`` here.

        Raises: TransportError when a later connection must be refused because it differs from the first one.
        """

    def _find_place(self) -> object:
        """Return the current value for `place`. Raises: SpecError."""
        return self.node

    def ask_meanwhile(self, work: Collection[Future[Any]]) -> None:
        """Do nothing: this kind of node has no questions."""

    @property
    def env(self) -> dict[str, str]:
        """Variables of this process that are passed to the node."""
        return {name: os.environ[name] for name in self.node.env if name in os.environ}

    @property
    def place(self) -> object:
        """The node's description and route, as of the time it was reached, else as of now. Raises: SpecError."""
        return self._place or self._find_place()

    @property
    def torch(self) -> str:
        """Version of torch on the node; empty until it is known."""
        return self.facts.versions.get("torch", "") if self.facts else ""

    @property
    def account(self) -> object:
        """Identity of machine and account by the node's own report: host name, cache folder, addresses."""
        return (self.facts.host, self.facts.cache, self.facts.addresses) if self.facts else None

    def start_agent(self, session: str) -> socket.socket:
        """Start the agent of ``session`` on the node. Raises: LaunchError, SessionError, TransportError."""
        return self._reach(session, "start")

    def connect_agent(self, session: str) -> socket.socket:
        """Connect to a running agent over a fresh connection. Raises the same errors as ``start_agent``."""
        return self._reach(session, "attach")

    def begin(self, session: str) -> AgentFolders:
        """Prepare ``session`` on a kept agent, over the existing connection; returns its folders.

        The new work folder is next to that of the previous session. Raises: DetrainError.
        """
        assert self.facts is not None and self._connection is not None
        self.is_trusted = False
        self._admit(self._connection)
        self._choose_work_folder(self.facts, session)
        self.folder_state = ("", "")  # known when the files are compared
        code = [posixpath.join(self.facts.cache, digest) for digest in self._digests]
        return {"folder": "", "work_folder": self._work_folder, "uses": [*code, self._work_folder]}

    def offer(self, gpus: int) -> NodeOffer:
        """Return the node's GPUs, and the devices and number of ranks that the user chose."""
        return NodeOffer(self.name, tuple(range(gpus)), self.node.devices, self.node.ranks)

    def work_folder(self, folder: str) -> str:
        """Return the folder on the node that mirrors ``folder``; empty until the node was reached.

        It is in the node's ``workdir``, else in our cache, at the path that ``folder`` has within the project.
        """
        if not self._work_folder or not self.project:
            return self._work_folder
        within = os.path.relpath(folder, self.project).replace(os.sep, "/")
        return posixpath.normpath(posixpath.join(self._work_folder, within))

    @property
    def contact(self) -> object:
        """Identity of the latest contact: a new object each time the node is reached, None before the first."""
        return self.facts

    @property
    def cache(self) -> str:
        """Our cache folder on the node; empty until the node was reached."""
        return self.facts.cache if self.facts else ""

    def wait_for_end(self, *, limit_s: float, is_ours: bool = True) -> None:
        """Close the connection: the agent hangs up as its last act, so nothing is left to wait for."""
        self.leave()

    def leave(self) -> None:
        """Close the connection, including one that is being opened; the agent keeps running."""
        self._times_left += 1
        self._hang_up()

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _reach(self, session: str, action: str) -> socket.socket:
        with self._connecting:
            times_left = self._times_left
            self._hang_up()
            self._place = self._find_place()
            connection = self._connect()
            try:
                self._admit(connection)
                sock = self._bootstrap(connection, session, action)
                self._connection = connection  # from here on, leave() closes it
                if self._times_left > times_left:
                    sock.close()
                    raise TransportError("the connection was closed while it was being opened")
            except OSError as exc:  # this process has run out of file descriptors
                connection.close()
                raise TransportError(f"{HERE}: {exc}") from exc
            except BaseException:
                connection.close()
                raise
            return sock

    def _bootstrap(self, connection: _Connection, session: str, action: str) -> socket.socket:
        talk = self._start_bootstrap(connection)
        try:
            facts = self.facts = NodeFacts.read(talk.hear("facts"))
            self._settle(facts, connection, session)
            order = {"session": session, "action": action, "work_folder": self._work_folder}
            self._digests = _go_on(facts, talk, type="go", silence_s=SILENCE_LIMIT_S, **order)
            ready = talk.hear("ready")
            self.folder_state = (ready.get("root"), ready.get("digest"))
        except BaseException:
            talk.close()
            raise
        return talk.take_socket()

    def _start_bootstrap(self, connection: _Connection) -> RemoteProgram:
        return RemoteProgram.start(read_program("bootstrap"), magic=_MAGIC, node=self.node, connection=connection)

    @contextlib.contextmanager
    def run_files(self) -> Iterator[socket.socket]:
        """Run copying/remote_program.py on the node and yield the byte stream to it.

        It uses the agent's connection, or, if that accepts no further command, a connection of its own, which is
        closed at the end of the block.
        Raises: LaunchError, TransportError.
        """
        with contextlib.ExitStack() as stack:
            program, connection = None, self._connection
            if connection is not None and connection.is_alive:
                source = RUN_FILES.format(code=posixpath.join(self.cache, self._digests[0]))
                with contextlib.suppress(TransportError):
                    program = RemoteProgram.start(source, magic=FILES_MAGIC, node=self.node, connection=connection)
            if program is None:
                connection = self._connect()
                stack.callback(connection.close)
                program = self._start_bootstrap(connection)
                stack.callback(program.close)
                facts = NodeFacts.read(program.hear("facts"))
                _go_on(facts, program, type="files")
                program.skip_to(FILES_MAGIC)
            stack.callback(program.close)
            yield program.take_socket()

    @contextlib.contextmanager
    def run_jobs(self) -> Iterator[socket.socket]:
        """Run node/job/service.py on the node and yield the byte stream to it.

        The connection stays open for the next call, until ``leave``. Raises: LaunchError, TransportError.
        """
        with self._connecting:
            program = self._start_jobs()
        try:
            yield program.take_socket()
        finally:
            program.close()

    def _start_jobs(self) -> RemoteProgram:
        connection = self._connection
        if connection is not None and connection.is_alive:
            source = RUN_JOBS.format(code=posixpath.join(self.cache, self._digests[0]))
            with contextlib.suppress(TransportError):
                return RemoteProgram.start(source, magic=JOBS_MAGIC, node=self.node, connection=connection)
        self._hang_up()
        connection = self._connect()
        try:
            self._admit(connection)
            program = self._start_bootstrap(connection)
            facts = self.facts = NodeFacts.read(program.hear("facts"))
            self._settle(facts, connection, "jobs")
            self._digests = _go_on(facts, program, type="jobs")
            program.skip_to(JOBS_MAGIC)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return program

    def _settle(self, facts: NodeFacts, connection: _Connection, session: str) -> None:
        self.python = facts.python
        self._choose_work_folder(facts, session)
        self.address, self.interface = choose_address(
            self.node, facts.addresses, reached_at=facts.reached_at, peer_address=connection.peer_address
        )
        self.reached_from = "" if self.node.address else connection.local_address
        peer = connection.peer_address
        self.is_forwarded = not self.node.address and is_address(peer) and peer != self.address
        if not facts.versions.get("torch"):
            install = f"install it there ({facts.python} -m pip install torch)"
            another = 'set python = "/path/to/python" in a nodes file'
            raise LaunchError(f"torch is missing in {facts.python}: {install}, or {another}")

    def _choose_work_folder(self, facts: NodeFacts, session: str) -> None:
        self._work_folder = _expand(self.node.workdir or f"{facts.cache}/work/{session}", facts.home)


def _go_on(facts: NodeFacts, talk: RemoteProgram, **order: object) -> list[str]:
    """Give the bootstrap program its order, after completing our code on the node; returns the code's digests."""
    archives = _choose_code(facts)
    digests = [archive.digest for archive in archives]
    lacking = [digest for digest in digests if digest not in facts.have]
    for _ in range(2):  # code that is already there can be damaged, which the node notices when it uses it
        _send_code([archive for archive in archives if archive.digest in lacking], talk)
        talk.say(code=digests, **order)
        incomplete = talk.hear("code").get("incomplete")
        if not incomplete:
            return digests
        lacking = [digest for digest in digests if isinstance(incomplete, list) and digest in incomplete]
    raise LaunchError(f"detrain_nb's code was written to {facts.cache} twice and is still incomplete: check that disk")


def _choose_code(facts: NodeFacts) -> list[CodeArchive]:
    """Return our code, and IPython if the node has none. Raises: LaunchError."""
    from .code import ipython_code, own_code

    if facts.versions.get("ipython"):
        return [own_code()]
    if ipython := ipython_code(facts.python_version):
        return [own_code(), ipython]
    major, minor = facts.python_version
    missing = f"IPython is missing in {facts.python}, and the notebook's does not run on Python {major}.{minor}"
    raise LaunchError(f"{missing}: install it there: {facts.python} -m pip install ipython")


def _send_code(archives: list[CodeArchive], talk: RemoteProgram) -> None:
    for archive in archives:
        limit_s = _UNPACK_LIMIT_S + len(archive.data) / SLOWEST_BYTES_PER_S
        talk.say(type="unpack", digest=archive.digest, size=len(archive.data))
        talk.send(archive.data, limit_s=limit_s)
        talk.hear("unpacked", limit_s=limit_s)


def _expand(path: str, home: str) -> str:
    """Expand ``~``, the home of the login user; ``~other`` is unknown here. Raises: LaunchError."""
    if path.startswith("~") and path[1:2] not in ("", "/"):
        raise LaunchError(f"workdir {path} is invalid: give a path that begins with / or ~/")
    return posixpath.join(home, path[1:].lstrip("/")) if path.startswith("~") else path
