"""The session's end of the byte stream to one node: any thread queues, one background thread sends and receives.

It acknowledges to the agent, with some delay, what has been shown: if a notebook is killed in between, the next one
shows that part again, and misses nothing. If the connection can break while the agent goes on, the link reconnects:
both sides count their messages, and send again those that have not arrived. It also sends regular signs of life: a
node that receives none hangs up, and another notebook may take the session. The agent answers each, as nothing else
would reveal a node that fell silent behind a jump host.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from ...errors import DetrainError, SessionError, TransportError, WireError
from ...wire import (
    FROM_NODE,
    Acknowledge,
    Alive,
    Attach,
    Attached,
    ClearOutput,
    Display,
    EndSession,
    Frame,
    Kept,
    Link,
    LinkClosed,
    Measure,
    Measured,
    Message,
    Notice,
    Output,
    Piece,
    RanCell,
    Received,
    Refused,
    Unfinished,
    require_readable,
    to_frame,
)
from ..output.safe_output import one_line
from ..output.shown_mark import ShownMark
from ..state.limits import Limits
from ..state.session_state import SessionState

_REST_LIMIT_S = 2.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 5.0
_LONGEST_REASON = 300
_MOST_UNFINISHED_BYTES_PER_S = 1 << 20
_SETTLED_S = 5.0  # a connection that ends earlier counts as a failed attempt
_MOST_UNANSWERED = 6  # signs of life; files sent over the same connection may be queued before them
_SLOW_BYTES_PER_S = 10_000  # unreceived bytes give the node more time to answer on a slow connection
_LONGEST_UNDER_WAY_S = 120.0  # at most: each piece of 1 MB is answered
_PIECE_BYTES = 1 << 16  # of output, handled at once
_ANSWER_BYTES = 1 << 19  # of headers that a rank may send in answer to a message
_WITHOUT_END = (Output, Display, ClearOutput, Piece, Received, Measured)  # unlimited in number, quick to parse
_SHORT_BYTES = 1 << 12
_REMEMBERED = (RanCell, Unfinished)  # MessageChecks limits these
_GIVE_WAY_S = 0.001  # between two pieces: waiting threads get the locks


class NodeLink:
    """The link to one node, by its position; ``state`` takes its messages, and notes when the link breaks or ends.

    ``connect`` makes another connection to its agent; None if a broken connection means that the agent has exited. It
    raises SessionError when the agent has exited for good, another DetrainError when it cannot be reached now.
    """

    def __init__(
        self,
        sock: socket.socket,
        state: SessionState,
        node: int,
        *,
        connect: Callable[[], socket.socket] | None,
        limits: Limits,
    ) -> None:
        self._limits = limits
        self._link = Link(sock, kinds=FROM_NODE)
        self._state = state
        self._node = node
        self._connect = connect
        self._counts = connect is not None
        self._sending = threading.Lock()
        self._moved = threading.Condition(self._sending)  # signalled when the node takes data, or the link closes
        self._unread_bytes: int = limits.unasked_bytes  # of headers that the node may still send
        self._sent = 0  # the number of the last message, if they are counted
        self._unreceived: deque[tuple[int, bytes]] = deque()
        self._unreceived_bytes = 0
        self._attach: Attach | None = None
        self._incarnation = ""
        self._is_resuming = False  # reconnected, but the agent has not yet reported what it had received
        self.broken_at: float | None = None  # when the connection was lost; None while connected
        self._connected_at, self._gap_s = time.monotonic(), _FIRST_RETRY_S  # the pause before the next attempt
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)  # if its buffer is full, the thread wakes too
        self._woken.setblocking(False)
        self.is_closed = False
        self._is_ending = False
        self._wants_to_keep = False
        self.is_kept = False  # the agent has ended the session, and stays for the next
        self._is_seen = True
        self.is_hung_up_on = False  # the other end has closed the connection
        self.is_taken = False  # it serves another notebook
        self._last_number: int | None = None  # None before the first: an earlier notebook showed those before
        self._acknowledged = 0
        self._to_acknowledge: ShownMark | None = None
        self._acknowledge_at = 0.0
        self.why_broken = ""  # why the last attempt to reconnect failed
        self._alive_at = 0.0  # when the next sign of life is due
        self._unanswered = 0  # signs of life since the last message of the node
        self._ended = threading.Event()  # not join(): if interrupted, Python takes the thread for ended
        self._thread = threading.Thread(target=self._run, name="detrain_nb node link", daemon=True)
        _links.add(self)
        self._thread.start()

    def end(self, *, keep_s: float = 0.0) -> None:
        """Ask the agent to end the session. Once it has received that, its hang-up starts no reconnection.

        With ``keep_s`` it may stay for another session, which gets the connection from ``take_socket``.
        Raises: TransportError when the link is closed.
        """
        self._is_ending, self._wants_to_keep = True, keep_s > 0
        self.send(EndSession(keep_s))

    def take_socket(self) -> socket.socket:
        """Return the connection to an agent that ``is_kept``, after this link has ended."""
        return self._link.sock

    def send(self, message: Message) -> None:
        """Have the background thread send ``message``.

        Not in the caller's thread: after an interrupt it would be unknown whether the node has received it.
        Raises: TransportError when the link is closed; SpecError when no node could read the message.
        """
        require_readable(message)
        with self._sending:
            if self.is_closed:
                raise TransportError("no more messages can be sent to the node")
            self._add(message)
        with contextlib.suppress(OSError):
            self._wake.send(b"w")

    def _add(self, message: Message) -> None:
        """Queue a message; ``_sending`` is held."""
        if isinstance(message, Attach):
            self._attach = message
            self._link.add_bytes(to_frame(message).to_bytes())
            return
        asked = 1 if isinstance(message, Measure) else len(getattr(message, "ranks", ()))
        answers_bytes = _ANSWER_BYTES * asked
        self._unread_bytes = min(self._unread_bytes, self._limits.unasked_bytes) + answers_bytes
        number = 0
        if self._counts:
            self._sent = number = self._sent + 1
        data = to_frame(message).to_bytes(number=number)
        if self._counts:
            self._unreceived.append((number, data))
            self._unreceived_bytes += len(data)
        if self.broken_at is None and not self._is_resuming:  # else it is sent with all that was not received
            self._link.add_bytes(data)

    def wait_for_room(self, limit_s: float) -> bool:
        """Wait until the node has taken most of the messages, or is lost; False if it takes none for ``limit_s``."""
        with self._moved:
            while (waiting_bytes := self._waiting_bytes) > self._limits.full_bytes and not self.is_closed:
                is_taken = lambda: self.is_closed or self._waiting_bytes < waiting_bytes  # noqa: E731
                if not self._moved.wait_for(is_taken, limit_s):
                    return False
        return True

    @property
    def _waiting_bytes(self) -> int:
        return self._unreceived_bytes if self._counts else self._link.waiting_bytes

    @property
    def last_number(self) -> int:
        """The number of the last numbered message that was handled."""
        return self._last_number or 0

    def wait_for_end(self, *, limit_s: float) -> bool:
        """Wait until either side has hung up; False after ``limit_s``."""
        return self._ended.wait(limit_s)

    def begin_to_close(self, *, is_seen: bool) -> None:
        """Start to hang up, without waiting for it."""
        self._is_seen = is_seen
        self.is_closed = True
        with contextlib.suppress(OSError):
            self._wake.send(b"w")

    def close(self, *, is_seen: bool = True) -> None:
        """Hang up. Without ``is_seen``, messages shown last may not have reached the user: do not acknowledge them."""
        self.begin_to_close(is_seen=is_seen)
        if threading.current_thread() is not self._thread:
            self._ended.wait(5.0)

    def forget(self) -> None:
        """Drop the link in a forked process, which has its descriptors but not its thread: the parent uses it."""
        self.is_closed = True
        self._sending, self._ended = threading.Lock(), threading.Event()  # a parent's thread may hold the old ones
        self._moved = threading.Condition(self._sending)
        self._ended.set()
        for sock in (self._link.sock, self._wake, self._woken):
            sock.close()

    # ---- the background thread

    def _run(self) -> None:
        reason = "closed"
        try:
            while True:
                try:
                    self._serve_connection()
                    break
                except LinkClosed as exc:
                    has_heard_the_end = self._is_ending and not self._unreceived
                    if self._connect is None or self.is_closed or has_heard_the_end:
                        raise
                    self._note_break()
                    self._make_connection(str(exc))
        except LinkClosed as exc:
            reason, self.is_hung_up_on = str(exc), True
        except WireError as exc:
            reason = str(exc)
        except Exception as exc:
            reason = f"handling a message failed: {exc!r}"
            raise
        finally:
            try:
                self._end(reason)
            finally:
                self._ended.set()

    def _serve_connection(self) -> None:
        """Send and receive until we hang up. Raises: LinkClosed when the other end does; WireError."""
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(self._link, selectors.EVENT_READ)
            except ValueError as exc:  # an interrupted start has closed it before this thread ran
                self.is_closed = True
                raise LinkClosed("the start was interrupted") from exc
            selector.register(self._woken, selectors.EVENT_READ)
            events = selectors.EVENT_READ
            while not self.is_closed and not self.is_kept:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._link.waiting_bytes else 0)
                if wanted != events:
                    selector.modify(self._link, wanted)
                    events = wanted
                for key, ready in selector.select(self._until_due()):
                    if key.fileobj is self._woken:
                        self._woken.recv(4096)
                        self._flush()
                    else:
                        self._serve(ready)
                if time.monotonic() >= self._acknowledge_at:
                    self._look_what_was_shown()
                if self._connect is not None and time.monotonic() >= self._alive_at:
                    self._give_sign_of_life()
            self._send_the_rest()
            if not self.is_kept:
                self._acknowledge_the_last()
                self._send_the_rest()
                self._wait_until_received()

    def _end(self, reason: str) -> None:
        with self._sending:
            self.is_closed = True
            self._moved.notify_all()
            if not self.is_kept:
                self._link.close()
        for sock in (self._wake, self._woken):
            sock.close()
        self._state.close(reason, self._node)

    def _until_due(self) -> float | None:
        moments = [] if self._connect is None else [self._alive_at]
        if self._to_acknowledge is not None or self._last_number not in (None, self._acknowledged):
            moments.append(self._acknowledge_at)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _give_sign_of_life(self) -> None:
        """Send a sign of life, unless data waits to be sent; never before the first message, which identifies us.

        Raises: LinkClosed when none is answered. They are counted, not timed: a notebook that slept just sends another.
        """
        self._alive_at = time.monotonic() + self._limits.alive_gap_s
        with self._sending:
            if self._attach is None:
                return
            under_way_s = min(_LONGEST_UNDER_WAY_S, self._unreceived_bytes / _SLOW_BYTES_PER_S)
            if self._unanswered >= _MOST_UNANSWERED + under_way_s / self._limits.alive_gap_s:
                silent_s = self._unanswered * self._limits.alive_gap_s
                raise LinkClosed(f"the node is silent: it has not answered for {silent_s:.0f} s")
            self._unanswered += 1
            if not self._link.waiting_bytes:
                with contextlib.suppress(LinkClosed):  # the reader notices the end
                    self._link.send(Alive())

    def _serve(self, ready: int) -> None:
        if ready & selectors.EVENT_WRITE:
            self._flush()
        if ready & selectors.EVENT_READ:
            frames = self._link.receive()
            self._unanswered = 0
            for frame in frames:
                if self._is_resuming:
                    self._resume(frame)
                elif not frame.number or self._last_number is None or frame.number > self._last_number:
                    self._take(frame)  # a message sent again after a reconnection was already taken

    def _take(self, frame: Frame) -> None:
        size_bytes = len(frame.header)
        if frame.kind not in _REMEMBERED and (frame.kind not in _WITHOUT_END or size_bytes > _SHORT_BYTES):
            with self._sending:
                self._unread_bytes -= size_bytes
            if self._unread_bytes < 0:
                raise WireError("it sent more than was requested")
        message = frame.message()
        if isinstance(message, Received):
            self._forget_up_to(message.number)
            return
        if isinstance(message, Kept):
            if not self._wants_to_keep:
                raise WireError("its agent stays without having been asked to")
            self.is_kept = True
            return
        if isinstance(message, Attached):
            self._incarnation = message.incarnation
        elif isinstance(message, Refused):
            self._connect, self.is_taken = None, message.is_taken  # it will not serve us
        for index, piece in enumerate(_pieces(message)):
            if index:
                time.sleep(_GIVE_WAY_S)
            if self.is_closed:
                return  # incompletely handled messages are not acknowledged: the next notebook shows them
            self._state.take(piece, frame.number, self._node)
        if frame.number:
            self._check_number(frame.number, is_explained=isinstance(message, Notice))

    def _send_the_rest(self) -> None:
        """Send what was queued before we hung up."""
        deadline = time.monotonic() + _REST_LIMIT_S
        with self._sending:
            while not self._link.flush() and (left := deadline - time.monotonic()) > 0:
                select.select([], [self._link], [], left)

    def _wait_until_received(self) -> None:
        """Wait until the node has received everything, if the connection would be cut at once."""
        deadline = time.monotonic() + _REST_LIMIT_S
        while self._unreceived and (left := deadline - time.monotonic()) > 0:
            if select.select([self._link], [], [], left)[0]:
                for frame in self._link.receive():
                    if isinstance(message := frame.message(), Received):
                        self._forget_up_to(message.number)

    def _flush(self) -> None:
        with self._sending, contextlib.suppress(LinkClosed):  # the reader notices the end, after the last messages
            self._link.flush()
            self._moved.notify_all()

    def _note_break(self) -> None:
        with self._sending:
            self.broken_at = self.broken_at or time.monotonic()
            self._is_resuming = False
            self._link.close()
        self._state.break_off(self._node)

    def _make_connection(self, reason: str) -> None:
        """Retry until there is a connection. Raises: LinkClosed when the agent has exited, or we hang up meanwhile."""
        if time.monotonic() - self._connected_at > _SETTLED_S:
            self._gap_s = _FIRST_RETRY_S
        else:  # it broke right after it was made: wait before the next attempt
            self._wait_before_retry()
        while not self.is_closed and (connect := self._connect):
            try:
                sock = connect()
            except SessionError as exc:
                raise LinkClosed(str(exc)) from exc
            except (DetrainError, OSError) as exc:
                reason = str(exc)
                self.why_broken = one_line(next(iter(reason.splitlines()), ""), most_chars=_LONGEST_REASON)
                self._wait_before_retry()
                continue
            if self.is_closed:  # meanwhile: attaching would take the session from its present notebook
                sock.close()
                break
            self._connected_at = time.monotonic()
            self._begin_again(sock)
            return
        raise LinkClosed(reason)

    def _wait_before_retry(self) -> None:
        select.select([self._woken], [], [], self._gap_s * random.uniform(0.75, 1.25))
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        self._gap_s = min(_LONGEST_RETRY_S, 1.5 * self._gap_s)

    def _begin_again(self, sock: socket.socket) -> None:
        with self._sending:
            self._link, self._unanswered, self.why_broken = Link(sock, kinds=FROM_NODE), 0, ""
            if self._attach is None:
                self.broken_at = None
                return
            self._is_resuming = bool(self._incarnation)
            attach = replace(
                self._attach, resumes=self._is_resuming, steal=self._attach.steal and not self._is_resuming
            )
            self._link.add_bytes(to_frame(attach).to_bytes())
            if not self._is_resuming:  # the agent may not even have received the first one
                self.broken_at = None
                for _, data in self._unreceived:
                    self._link.add_bytes(data)

    def _resume(self, frame: Frame) -> None:
        """Wait for the agent to report what it has received; the state of ranks and cells is already known."""
        if frame.kind is Refused:
            self._take(frame)
        if frame.kind is not Attached:
            return
        message = frame.message()
        assert isinstance(message, Attached)
        if message.incarnation != self._incarnation:
            raise LinkClosed("its agent was restarted, and its ranks are lost")
        with self._sending:
            self._is_resuming, self.broken_at = False, None
            self._drop_received(message.received)
            for _, data in self._unreceived:
                self._link.add_bytes(data)
        self._state.note_connection()

    def _forget_up_to(self, number: int) -> None:
        with self._sending:
            self._drop_received(number)

    def _drop_received(self, number: int) -> None:
        while self._unreceived and self._unreceived[0][0] <= number:
            self._unreceived_bytes -= len(self._unreceived.popleft()[1])
        self._moved.notify_all()

    def _look_what_was_shown(self) -> None:
        """Acknowledge from time to time what has been shown, one look later: the display may still be in progress."""
        is_taking = self._waiting_bytes <= self._limits.full_bytes  # else unsent acknowledgements would pile up here
        if is_taking and self._to_acknowledge is not None:
            if self._to_acknowledge.was_shown:
                self._acknowledge(self._to_acknowledge)
                self._to_acknowledge = None
            else:
                self._to_acknowledge.was_shown = self._to_acknowledge.is_shown()
        if is_taking and self._to_acknowledge is None:
            self._to_acknowledge = self._next_mark()
        self._acknowledge_at = max(self._acknowledge_at, time.monotonic() + self._limits.acknowledge_gap_s)

    def _acknowledge_the_last(self) -> None:
        """Acknowledge what has been shown before an orderly exit, so that it is not shown again."""
        last = self._next_mark() if self._is_seen else None
        for mark in (self._to_acknowledge, last):
            if mark is not None and (mark.is_shown() if self._is_seen else mark.was_shown):
                self._acknowledge(mark)

    def _next_mark(self) -> ShownMark | None:
        if self._last_number is None or self._last_number <= self._acknowledged:
            return None
        mark = self._state.mark_shown(self._node)
        mark.number = self._last_number
        return mark

    def _acknowledge(self, mark: ShownMark) -> None:
        self._acknowledged = mark.number
        size_bytes = sum(len(line.body) for line in mark.unfinished)  # they are sent each time
        self._acknowledge_at = time.monotonic() + size_bytes / _MOST_UNFINISHED_BYTES_PER_S
        with self._sending, contextlib.suppress(LinkClosed):  # the reader notices the end as well
            for message in (*mark.unfinished, Acknowledge(mark.number)):
                self._add(message)
            if self.broken_at is None:
                self._link.flush()

    def _check_number(self, number: int, *, is_explained: bool) -> None:
        """Count missing messages: the agent numbers what it keeps for us without gaps, or explains one in a notice."""
        missing = 0 if self._last_number is None else number - self._last_number - 1
        self._last_number = number
        self._state.note_handled(0 if is_explained else missing, self._node)


def _pieces(message: Message) -> Iterator[Message]:
    """Split large output into pieces: handling takes time, and other nodes and a stop must get through in between."""
    if not isinstance(message, Output) or len(message.body) <= _PIECE_BYTES:
        yield message
        return
    for start in range(0, len(message.body), _PIECE_BYTES):
        yield replace(message, body=message.body[start : start + _PIECE_BYTES])


_links: weakref.WeakSet[NodeLink] = weakref.WeakSet()


def _forget_after_fork() -> None:
    """Drop all links in a forked process: it must not keep the session, or what follows it, from ending."""
    for link in list(_links):
        link.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
