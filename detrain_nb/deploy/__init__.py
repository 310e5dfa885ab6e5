"""Our code, the user's code and an agent, brought up on nodes; used by session."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, Union

from ..copying.json_lines import clean
from ..errors import DetrainError, LaunchError, SessionError, SpecError, TransportError, behind_ours
from ..plan import split_names
from ..transport import Transport
from ..transport.local import LocalTransport
from ..wire import Attach, EndSession, FrameReader, Refused, to_frame
from .kept import begin_on_kept
from .questions import Questions

if TYPE_CHECKING:
    from ..spec.node import Node
    from ..transport.ssh import AskPassphrase

__all__ = [
    "End",
    "Nodes",
    "attach_to_agents",
    "bring_up_agents",
    "check_session_name",
    "end_agents",
    "find_nodes",
    "give_up_agents",
    "leave_agents",
    "nodes_of",
    "transports_to",
]

_END_LIMIT_S = 5.0
_ARRIVAL_LIMIT_S = 3.0
_MOST_HOSTS = 8  # are named
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")

Nodes: TypeAlias = str | os.PathLike[str] | Sequence[Union["Node", Transport]] | None


@dataclass(frozen=True)
class End:
    """A byte stream to the agent of a node; one that has ended where the agent is ``absent``, which says why.

    ``why_cold``: why what was kept from the last session could not be used, where something was.
    """

    transport: Transport
    sock: socket.socket
    absent: str = ""
    why_cold: str = ""


def check_session_name(name: str) -> str:
    """Return ``name``. Raises: SpecError when it cannot be the name of a session, and so of a folder."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SpecError(
            f"session name {name!r}: use letters, digits, '.', '_' and '-', at most 80, starting with a letter or digit"
        )
    return name


def transports_to(nodes: Nodes, *, ask_passphrase: AskPassphrase | None = None) -> list[Transport]:
    """How ``nodes`` are reached: a nodes file, hosts as in ``alice@gpu1,gpu2:2222``, nodes; None is this machine.

    Raises: SpecError.
    """
    if nodes is None:
        return [LocalTransport()]
    if isinstance(nodes, (str, os.PathLike)):
        from ..spec.nodes_file import parse_nodes, read_nodes

        nodes = parse_nodes(nodes) if isinstance(nodes, str) else read_nodes(nodes)
    if not isinstance(nodes, Iterable):
        raise SpecError(f"nodes {nodes!r}: give a nodes file, hosts as in alice@gpu1,gpu2:2222, or a list of nodes")
    nodes = list(nodes)
    if not nodes:
        raise SpecError("no node was given: name a nodes file, or hosts")
    questions = Questions(ask_passphrase) if ask_passphrase else None
    transports = [_transport_to(node, questions) for node in nodes]
    names = [transport.name for transport in transports]
    if twice := [name for name in names if names.count(name) > 1]:
        raise SpecError(f"nodes have the same name {twice[0]!r}: give each a name of its own")
    return transports


def _transport_to(node: Node | Transport, questions: Questions | None) -> Transport:
    from ..spec.node import Node
    from .ssh_node import SshNode

    if isinstance(node, Node):
        return SshNode(node, questions=questions)
    if not isinstance(node, Transport):
        raise SpecError(f"node {node!r}: give a detrain_nb.spec.Node, or all of them as one text")
    return node


def nodes_of(transports: Sequence[Transport]) -> tuple[Node, ...]:
    """The nodes that transports reach, of those that were given as one."""
    return tuple(transport.node for transport in transports if transport.node is not None)


def find_nodes(session: str, *, ask_passphrase: AskPassphrase | None = None) -> list[Transport]:
    """How the nodes are reached on which ``session`` was started; this machine where it is not known."""
    from .known import known_sessions

    known = known_sessions().get(session)
    return transports_to(known.nodes if known and known.nodes else None, ask_passphrase=ask_passphrase)


def bring_up_agents(transports: Sequence[Transport], session: str) -> list[End]:
    """Start the agent of ``session`` on every node, all at once; return the byte streams to them.

    Raises: LaunchError with a line for every node where it failed, SessionError where such a session runs. None is
    left running then.
    """
    check_session_name(session)
    ends = _on_all(transports, lambda transport: _start_agent(transport, session), give_up=_end_agent)
    try:
        reached = [end.transport for end in ends]
        _check_same_torch(reached)
        _check_addresses(reached)
    except BaseException:
        give_up_agents(ends)
        raise
    return ends


def _start_agent(transport: Transport, session: str) -> End:
    """On an agent that was kept from the last session there, if it is as good as a fresh one."""
    begun = begin_on_kept(transport, session)
    if isinstance(begun, str):
        return End(transport, transport.start_agent(session), why_cold=begun)
    return End(*begun)


def give_up_agents(ends: Sequence[End]) -> None:
    """End agents that have been brought up and have no session yet."""
    _let_go(ends, _end_agent)


def leave_agents(ends: Sequence[End]) -> None:
    """Let go of agents that have been connected to; they stay for the next notebook."""
    _let_go(ends, socket.socket.close)


def _let_go(ends: Sequence[End], give_up: Callable[[socket.socket], None]) -> None:
    arrivals = _Arrivals(give_up)
    for end in ends:
        arrivals.add(end.transport, end.sock)
    arrivals.give_up()


def attach_to_agents(transports: Sequence[Transport], session: str, *, without: str | Iterable[str] = ()) -> list[End]:
    """Connect to the agents of ``session``, which run already; return the byte streams to them. Raises as above.

    The first has to be there; another one that is not any more is said to be absent, as are those that are left out.
    """
    check_session_name(session)
    others = [transport.name for transport in transports[1:]]
    left_out = split_names(without) if without else []
    if unknown := [name for name in left_out if name not in others]:
        raise SpecError(
            f"attach without {unknown[0]!r}: {unknown[0]!r} is not one of the nodes that can be left out: "
            f"{', '.join(others[:_MOST_HOSTS]) or 'none, this session has one node'}"
        )

    def connect(transport: Transport) -> End:
        if transport.name in left_out:
            return End(transport, _ended_socket(), absent="it was left out")
        return End(transport, transport.connect_agent(session))

    return _on_all(transports, connect, give_up=socket.socket.close, attached_to=session)


def end_agents(transports: Sequence[Transport], session: str, *, holder: str) -> dict[str, DetrainError]:
    """End ``session`` on every node that can be reached; returns why it cannot be on others, by node: SessionError
    where it does not run.

    Raises: SessionError when another notebook holds it.
    """
    check_session_name(session)
    failures: dict[str, DetrainError] = {}
    for transport in transports:
        try:
            sock = transport.connect_agent(session)
        except DetrainError as exc:
            failures[transport.name] = exc
            continue
        try:
            _end_held_agent(sock, session, holder)
        except TransportError as exc:
            failures[transport.name] = exc
        except SessionError as exc:
            if transport.is_this_machine:
                raise
            raise SessionError(f"{transport.name}: {behind_ours(str(exc))}") from exc
        finally:
            transport.wait_for_end(limit_s=_END_LIMIT_S)
    return failures


def _end_held_agent(sock: socket.socket, session: str, holder: str) -> None:
    """Raises: SessionError when the agent refuses."""
    reader, deadline = FrameReader(), time.monotonic() + _END_LIMIT_S
    try:
        sock.sendall(to_frame(Attach(session, holder)).to_bytes() + to_frame(EndSession()).to_bytes())
        while (left := deadline - time.monotonic()) > 0:
            sock.settimeout(left)
            data = sock.recv(1 << 16)
            if not data:
                return
            for frame in reader.feed(data):
                message = frame.message()
                if isinstance(message, Refused):
                    raise SessionError(clean(message.reason))
    except OSError as exc:
        raise TransportError(f"it was not told to end: {exc}") from exc
    finally:
        sock.close()
    raise TransportError(f"it has not ended within {_END_LIMIT_S:g} s")


def _end_agent(sock: socket.socket) -> None:
    with contextlib.closing(sock), contextlib.suppress(OSError):  # else it ends by itself, when nobody attaches
        for message in (Attach("", "nobody"), EndSession()):
            sock.sendall(to_frame(message).to_bytes())
        deadline = time.monotonic() + _END_LIMIT_S
        while (left := deadline - time.monotonic()) > 0:
            sock.settimeout(left)
            if not sock.recv(1 << 16):
                break


def _on_all(
    transports: Sequence[Transport],
    act: Callable[[Transport], End],
    *,
    give_up: Callable[[socket.socket], None],
    attached_to: str = "",
) -> list[End]:
    """Every node's end, or none: where one fails, the others are given up.

    The agents of a session that is ``attached_to`` can have ended, but for the first.
    """
    if len(transports) == 1 and not transports[0].name:
        return [act(transports[0])]
    arrivals = _Arrivals(give_up)

    def arrive(transport: Transport) -> End:
        end = act(transport)
        arrivals.add(end.transport, end.sock)
        return end

    pool = ThreadPoolExecutor(len(transports), thread_name_prefix="detrain_nb connect")
    work: dict[Future[End], Transport] = {}
    try:
        for transport in transports:
            work[pool.submit(arrive, transport)] = transport
        for transport in transports:
            transport.ask_meanwhile(work)
        wait(work)
        pool.shutdown()
        return _ends_of(work, attached_to=attached_to)
    except BaseException:  # an interrupt too, after which nothing is left; who takes too long is given up on arrival
        pool.shutdown(wait=False, cancel_futures=True)
        try:
            wait(work, _ARRIVAL_LIMIT_S)
        finally:
            arrivals.give_up()
        raise


class _Arrivals:
    """The byte streams that have come to be. Once they are given up, others are as soon as they come."""

    def __init__(self, give_up: Callable[[socket.socket], None]) -> None:
        self._give_up = give_up
        self._there: list[tuple[Transport, socket.socket]] = []
        self._is_given_up = False
        self._changing = threading.Lock()

    def add(self, transport: Transport, sock: socket.socket) -> None:
        with self._changing:
            self._there.append((transport, sock))
            is_late = self._is_given_up
        if is_late:
            self.give_up()

    def give_up(self) -> None:
        """An interrupt meanwhile spares none of them."""
        interrupt: KeyboardInterrupt | None = None
        while (next_one := self._take()) is not None:
            transport, sock = next_one
            try:
                try:
                    self._give_up(sock)
                finally:
                    transport.leave()
            except KeyboardInterrupt as exc:
                interrupt = exc
        if interrupt:
            raise interrupt

    def _take(self) -> tuple[Transport, socket.socket] | None:
        with self._changing:
            self._is_given_up = True
            return self._there.pop() if self._there else None


def _ends_of(work: Mapping[Future[End], Transport], *, attached_to: str) -> list[End]:
    """Raises: what it has failed with, of all nodes; our own faults as they are."""
    others = list(work)[1:] if attached_to else []
    absent = {future for future in others if isinstance(future.exception(), SessionError)}
    failures: list[tuple[Transport, DetrainError]] = []
    for future, transport in work.items():
        error = future.exception()
        if isinstance(error, DetrainError) and future not in absent:
            failures.append((transport, error))
    if failures:
        if not attached_to:
            _refuse_twins(list(work.values()))
        kinds = {type(exc) for _, exc in failures}
        words = "\n".join(f"{transport.name}: {exc}" for transport, exc in failures)
        if not {transport for transport, _ in failures} - {work[future] for future in others}:
            names = ",".join(transport.name for transport, _ in failures)
            words += f"\nto go on without their ranks: %distributed attach {attached_to} --without {names}"
        raise (kinds.pop() if len(kinds) == 1 else LaunchError)(words)
    return [
        End(transport, _ended_socket(), absent=str(future.exception())) if future in absent else future.result()
        for future, transport in work.items()
    ]


def _refuse_twins(transports: Sequence[Transport]) -> None:
    """Raises: SpecError where two nodes have turned out to be one: the second found the agent of the first there."""
    seen: dict[object, str] = {}
    for transport in transports:
        account = transport.account
        if account is None:
            continue
        if account in seen:
            raise SpecError(
                f"{seen[account]} and {transport.name} are one machine: name it once, with ranks = N for several ranks"
            )
        seen[account] = transport.name


def _ended_socket() -> socket.socket:
    ours, theirs = socket.socketpair()
    theirs.close()
    return ours


def _check_addresses(transports: Sequence[Transport]) -> None:
    """Raises: LaunchError when some nodes would be reached at an address that means another machine elsewhere."""
    local = [transport.name for transport in transports if transport.address.startswith("127.")]
    if local and len(local) < len(transports):
        raise LaunchError(f"the other nodes cannot reach {local[0]} at a loopback address: name an address of its own")


def _check_same_torch(transports: Sequence[Transport]) -> None:
    """Raises: LaunchError when nodes have versions of torch that do not work together."""
    versions = {transport.name: transport.torch for transport in transports if transport.torch[:1].isdigit()}
    if len({tuple(version.split(".")[:2]) for version in versions.values()}) > 1:
        found = ", ".join(f"{name} {version}" for name, version in versions.items())
        raise LaunchError(f"the nodes have different versions of torch ({found}): install the same one on all")
