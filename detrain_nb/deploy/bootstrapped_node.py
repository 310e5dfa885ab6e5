"""A node on which commands can be run: a program there becomes the way to the agent; our code goes there by itself.

A short program is sent to the node's Python (node/ssh/bootstrap.py). It says what is there; what is missing is put
there, each archive once for every version of it; then it becomes the attach program.
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
    """A transport, see transport/transport.py; ``python``, ``address`` and so on are known once it was reached.

    A kind of them says how a connection is made (``_connect``), and may say which are refused (``_admit``).
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
        """Look at a connection before anything is said on it, which may be to set ``is_trusted``.

        Raises: TransportError where a later one is not as the first was.
        """

    def _find_place(self) -> object:
        """See `place`, as it is now. Raises: SpecError."""
        return self.node

    def ask_meanwhile(self, work: Collection[Future[Any]]) -> None:
        """Nothing."""

    @property
    def env(self) -> dict[str, str]:
        """Those variables of this process that the node is to have."""
        return {name: os.environ[name] for name in self.node.env if name in os.environ}

    @property
    def place(self) -> object:
        """The node as it was described, and the way to it when it was reached, else now. Raises: SpecError."""
        return self._place or self._find_place()

    @property
    def torch(self) -> str:
        """The version that is installed there; empty before that is known."""
        return self.facts.versions.get("torch", "") if self.facts else ""

    @property
    def account(self) -> object:
        """By what it says of itself."""
        return (self.facts.host, self.facts.cache, self.facts.addresses) if self.facts else None

    def start_agent(self, session: str) -> socket.socket:
        """Start the agent of ``session`` there. Raises: LaunchError, SessionError, TransportError."""
        return self._reach(session, "start")

    def connect_agent(self, session: str) -> socket.socket:
        """Connect to an agent that runs there, over a fresh connection. Raises as ``start_agent``."""
        return self._reach(session, "attach")

    def begin(self, session: str) -> AgentFolders:
        """Beside the folder of the last session, on the connection that there is. Raises: DetrainError."""
        assert self.facts is not None and self._connection is not None
        self.is_trusted = False
        self._admit(self._connection)
        self._choose_work_folder(self.facts, session)
        self.folder_state = ("", "")  # known when the files are compared
        code = [posixpath.join(self.facts.cache, digest) for digest in self._digests]
        return {"folder": "", "work_folder": self._work_folder, "uses": [*code, self._work_folder]}

    def offer(self, gpus: int) -> NodeOffer:
        """What the node has and the user wants of it."""
        return NodeOffer(self.name, tuple(range(gpus)), self.node.devices, self.node.ranks)

    def work_folder(self, folder: str) -> str:
        """In the node's ``workdir``, else in one of ours, where ``folder`` is in the project; empty before it was
        reached."""
        if not self._work_folder or not self.project:
            return self._work_folder
        within = os.path.relpath(folder, self.project).replace(os.sep, "/")
        return posixpath.normpath(posixpath.join(self._work_folder, within))

    @property
    def contact(self) -> object:
        """Another object each time that it was reached, None before."""
        return self.facts

    @property
    def cache(self) -> str:
        """Our folder there; empty before it was reached."""
        return self.facts.cache if self.facts else ""

    def wait_for_end(self, *, limit_s: float, is_ours: bool = True) -> None:
        """The agent hangs up as the last thing it does: there is no more to wait for."""
        self.leave()

    def leave(self) -> None:
        """Close the connection, one too that is being made; the agent goes on."""
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
                self._connection = connection  # who leaves from here on closes it
                if self._times_left > times_left:
                    sock.close()
                    raise TransportError("it was left while the connection was made")
            except OSError as exc:  # no descriptor is left here
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
        """Run copying/remote_program.py there; gives the byte stream to it.

        It is on the agent's connection, or, where that takes no further command, on one of its own, which ends
        with the block.
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
        """Run node/job/service.py there; gives the byte stream to it.

        The connection stays for the next one, until the node is left. Raises: LaunchError, TransportError.
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
            raise LaunchError(f"torch is missing in {facts.python}: {install}, or name another python")

    def _choose_work_folder(self, facts: NodeFacts, session: str) -> None:
        self._work_folder = _expand(self.node.workdir or f"{facts.cache}/work/{session}", facts.home)


def _go_on(facts: NodeFacts, talk: RemoteProgram, **order: object) -> list[str]:
    """Have the program go on as it is told, with our code, which is all there then; returns the digests of that."""
    archives = _choose_code(facts)
    digests = [archive.digest for archive in archives]
    lacking = [digest for digest in digests if digest not in facts.have]
    for _ in range(2):  # what is there may be broken: that is found out when it is to be used
        _send_code([archive for archive in archives if archive.digest in lacking], talk)
        talk.say(code=digests, **order)
        incomplete = talk.hear("code").get("incomplete")
        if not incomplete:
            return digests
        lacking = [digest for digest in digests if isinstance(incomplete, list) and digest in incomplete]
    raise LaunchError(f"our code was put into {facts.cache} and is not all there: is that disk in order?")


def _choose_code(facts: NodeFacts) -> list[CodeArchive]:
    """Our code, and IPython where the node has none. Raises: LaunchError."""
    from .code import ipython_code, own_code

    if facts.versions.get("ipython"):
        return [own_code()]
    if ipython := ipython_code(facts.python_version):
        return [own_code(), ipython]
    major, minor = facts.python_version
    missing = f"IPython is missing in {facts.python}, and the notebook's is not for Python {major}.{minor}"
    raise LaunchError(f"{missing}: install it there, {facts.python} -m pip install ipython")


def _send_code(archives: list[CodeArchive], talk: RemoteProgram) -> None:
    for archive in archives:
        limit_s = _UNPACK_LIMIT_S + len(archive.data) / SLOWEST_BYTES_PER_S
        talk.say(type="unpack", digest=archive.digest, size=len(archive.data))
        talk.send(archive.data, limit_s=limit_s)
        talk.hear("unpacked", limit_s=limit_s)


def _expand(path: str, home: str) -> str:
    """``~`` is the home of who logs in; that of others is not known here. Raises: LaunchError."""
    if path.startswith("~") and path[1:2] not in ("", "/"):
        raise LaunchError(f"workdir {path}: name a folder that begins with / or ~/")
    return posixpath.join(home, path[1:].lstrip("/")) if path.startswith("~") else path
