"""Agents kept between two sessions of this process, with the modules their ranks have imported, for a quick next start.

At most one agent is kept per node. It lives as long as its connection, which is closed when this process exits, after
the requested time, or when the agent sends more bytes than replies to keep-alive messages need.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import threading
import time

from ..errors import DetrainError, SessionError, SpecError, TransportError, WireError
from ..node.system.surroundings import read_starter
from ..transport import Transport
from ..wire import ALIVE_GAP_S, FROM_NODE, Alive, Begin, Begun, FrameReader, to_frame
from .remote_program import as_text

__all__ = ["begin_on_kept", "check_warm", "drop_kept", "keep", "seconds_kept", "shorten_kept"]

LONGEST_WARM_S = 86_400.0  # a day
_ANSWER_LIMIT_S = 10.0
_END_LIMIT_S = 5.0
_READ_BYTES = 1 << 16
_MOST_BYTES = 1 << 20  # of replies to keep-alive messages

_TAKE, _LOOK = b"t", b"l"  # reasons to wake the thread of a kept agent

# One list for the whole process: a kept agent outlives its session, serves the next one, whichever code starts it, and
# ends with the process.
_changing = threading.Lock()
_there: list[_KeptAgent] = []


class _KeptAgent:
    """One kept agent, and the thread that keeps its connection alive."""

    def __init__(self, transport: Transport, sock: socket.socket, keep_s: float) -> None:
        self.transport = transport
        self.sock = sock
        self.until = time.monotonic() + keep_s
        self.claimed_by: threading.Thread | None = None  # the thread that begins a session on it, or ends it
        self._wake, self._woken = socket.socketpair()
        self._is_taken = False
        self._ended = threading.Event()  # not join(): after an interrupted join, Python considers the thread ended
        threading.Thread(target=self._stay, name="detrain_nb kept agent", daemon=True).start()

    @property
    def is_claimed(self) -> bool:
        """True while a running thread has claimed this agent."""
        return self.claimed_by in threading.enumerate()  # is_alive() is wrong after an interrupted join

    def take(self) -> bool:
        """Take over the connection for the caller alone; False when it is already closed."""
        self._say(_TAKE)
        self._ended.wait(_END_LIMIT_S + _ANSWER_LIMIT_S)
        return self._is_taken

    def shorten(self, limit_s: float) -> None:
        """Stay no longer than ``limit_s`` from now on."""
        self.until = min(self.until, time.monotonic() + limit_s)
        self._say(_LOOK)

    def _say(self, what: bytes) -> None:
        with contextlib.suppress(OSError):  # the thread has ended and closed the socket
            self._wake.send(what)

    def forget(self) -> None:
        """Close the descriptors in a forked process, which does not have the thread."""
        for sock in (self.sock, self._wake, self._woken):
            sock.close()

    def _stay(self) -> None:
        """Send keep-alive messages, without which the agent would disconnect us, until the connection is taken over."""
        try:
            with contextlib.suppress(OSError):
                self._is_taken = self._wait()
        finally:
            self._wake.close()
            self._woken.close()
            if not self._is_taken:
                _unlist(self)
                self._hang_up()
            self._ended.set()

    def _wait(self) -> bool:
        """Wait to be taken; False when the time is over or the agent hung up. Raises: OSError when the link breaks."""
        alive_at, left_bytes = time.monotonic(), _MOST_BYTES
        self.sock.setblocking(False)
        while (now := time.monotonic()) < self.until and left_bytes > 0:
            if now >= alive_at:
                alive_at = now + ALIVE_GAP_S
                if self.transport.can_resume:
                    self.sock.send(to_frame(Alive()).to_bytes())
            ready, _, _ = select.select([self._woken, self.sock], [], [], min(alive_at, self.until) - now)
            if self._woken in ready and self._woken.recv(1) == _TAKE:
                return True
            if self.sock in ready:
                data = self.sock.recv(_READ_BYTES)
                left_bytes -= len(data)
                if not data:
                    return False
        return False

    def end(self) -> None:
        """End the agent, whatever it is doing."""
        if self.take():
            self._hang_up()
        _unlist(self)

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # takes effect even if a forked process also holds the socket
        self.sock.close()
        with contextlib.suppress(DetrainError, OSError):
            self.transport.wait_for_end(limit_s=_END_LIMIT_S)


def check_warm(warm_s: float) -> None:
    """Raise SpecError unless ``warm_s`` is a number of seconds from 0 to a day."""
    if isinstance(warm_s, bool) or not isinstance(warm_s, (int, float)) or not 0 <= warm_s <= LONGEST_WARM_S:
        raise SpecError(f"warm_s {warm_s}: give a number of seconds, 0 to {LONGEST_WARM_S:.0f} (a day)")


def keep(transport: Transport, sock: socket.socket, *, keep_s: float) -> None:
    """Keep the agent at the other end of ``sock``, which has sent ``Kept``, for the next session on its node.

    It is kept for ``keep_s`` seconds at most, and replaces an agent kept for the same node.
    """
    with _changing:
        before = [kept for kept in _there if kept.transport.place == transport.place and not kept.is_claimed]
        for kept in before:
            kept.claimed_by = threading.current_thread()
        _there.append(_KeptAgent(transport, sock, keep_s))
    for kept in before:
        kept.end()


def begin_on_kept(transport: Transport, session: str) -> tuple[Transport, socket.socket] | str:
    """Begin ``session`` on the agent kept on the node of ``transport``, if it equals a freshly started one.

    Returns the agent's transport and the byte stream to it, or the reason why the agent cannot be reused, which is
    empty when none is kept.
    Raises: SessionError when a session of that name is running on the node.
    """
    kept = _claim(transport)
    if kept is None:
        return ""
    is_here = kept.transport.is_this_machine
    env, starter = (dict(os.environ), read_starter()) if is_here else (None, {})
    try:
        begun = _ask(kept.sock, Begin(session, **kept.transport.begin(session), starter=starter, env=env))
    except (OSError, WireError, ValueError, TransportError) as exc:
        kept.end()
        return f"the kept agent failed: {exc}"
    except BaseException:  # an interrupt
        kept.end()
        raise
    if not begun.error:
        _unlist(kept)  # only now: after an interrupt it must still be listed, to be ended
        kept.sock.settimeout(None)
        return kept.transport, kept.sock
    if begun.is_taken:
        _unlist(kept)
        keep(kept.transport, kept.sock, keep_s=max(0.0, kept.until - time.monotonic()))
        raise SessionError(begun.error)
    kept.end()
    return begun.error


def drop_kept() -> int:
    """End all kept agents, except those that another thread is starting a session on; returns how many ended."""
    dropped = 0
    this_thread = threading.current_thread()
    while True:
        with _changing:
            free = (kept for kept in _there if kept.claimed_by is this_thread or not kept.is_claimed)
            found = next(free, None)
            if found is None:
                return dropped
            found.claimed_by = this_thread
        found.end()
        dropped += 1


def shorten_kept(limit_s: float) -> None:
    """Keep the currently kept agents no longer than ``limit_s`` from now."""
    with _changing:
        for kept in _there:
            kept.shorten(limit_s)


def seconds_kept() -> float:
    """Return for how many seconds an agent will still be kept; 0 when none is kept."""
    with _changing:
        return max((kept.until - time.monotonic() for kept in _there), default=0.0)


def _claim(transport: Transport) -> _KeptAgent | None:
    """Claim the agent kept on the node of ``transport`` for this thread; it stays listed. None when none is kept."""
    found = None
    try:
        while True:
            with _changing:
                free = (kept for kept in _there if not kept.is_claimed and kept.transport.place == transport.place)
                found = next(free, None)
                if found is not None:
                    found.claimed_by = threading.current_thread()
            if found is None or found.take():
                return found
    except BaseException:  # an interrupt: leave the agent to the next start
        if found is not None:
            found.claimed_by = None
        raise


def _unlist(kept: _KeptAgent) -> None:
    with _changing:
        if kept in _there:
            _there.remove(kept)


def _ask(sock: socket.socket, message: Begin) -> Begun:
    """Send ``message`` and return the answer. Raises: OSError, WireError, ValueError when no valid answer arrives."""
    reader, deadline, left_bytes = FrameReader(kinds=FROM_NODE), time.monotonic() + _ANSWER_LIMIT_S, _MOST_BYTES
    sock.settimeout(_ANSWER_LIMIT_S)
    sock.sendall(to_frame(message).to_bytes())
    while left_bytes > 0 and (left_s := deadline - time.monotonic()) > 0:
        sock.settimeout(left_s)
        data = sock.recv(_READ_BYTES)
        if not data:
            break
        left_bytes -= len(data)
        for frame in reader.feed(data):
            answer = frame.message()
            if isinstance(answer, Begun):
                return Begun(as_text(answer.error.replace("\n", " ")), answer.is_taken)
    raise OSError("it does not answer")


def _forget_after_fork() -> None:
    """Forget kept agents in a forked process: they belong to the parent, and end with it."""
    global _changing
    _changing = threading.Lock()  # another thread of the parent may have held it
    while _there:
        _there.pop().forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(drop_kept)
