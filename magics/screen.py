"""Where the output of a cell appears: in the notebook cell that caused it, or in a terminal.

In a kernel, one thread sends stream messages in batches, with the cell's own parent header: a print from a thread would
land in the cell that ran last, and a front end cannot take one message per line.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import textwrap
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from IPython.core.displaypub import CapturingDisplayPublisher

from ..wire import SIZES
from .transcript import Bundle, Item, Rich, Text

_GAP_S = 0.05  # 20 batches a second: a Jupyter server drops what exceeds 1,000 messages a second
_REDRAW_S = 0.1
_FRAME_S = 0.01  # after that time a frame drawn in several writes is complete
_LONGEST_FRAME_S = 0.3
_MOVED_CHARS = 200_000  # longer output is not sent again to keep redrawn lines below it
_MOVED_CHARS_PER_S = 100_000
_ANEW_CHARS_PER_S = 5_000_000  # of cells that are shown again repeatedly, with their pictures
_MOST_KEPT_CHARS = 64 << 20  # of output that a terminal has shown, or that is captured
_INDENT = "    "  # of text in place of a picture: no text of a node begins a line
_MOST_UPDATES = 25  # of displays per batch; the others wait, and are redrawn once in their latest form
_IDLE_S = 2.0
_DRAW_LIMIT_S = 1.0
_CLOSE_LIMIT_S = 600.0  # hundreds of megabytes at a server's rate
_CLEAR: tuple[str, dict[str, Any]] = ("clear_output", {"wait": True})  # when the next output arrives
_STORED = ("stream", "display_data")
Head = Callable[[], list[dict[str, Any]]]  # the contents of display messages, each with an id
_RESENT_CHARS = 250_000
_SERVER_BYTES_PER_S = 700_000  # a Jupyter server drops stream output above 1 MB/s
_BATCH_CHARS = 1 << 20
_SERVED_BATCH_CHARS = 200_000


class Screen(ABC):
    """A sink for output in order, from any thread. One that redraws nothing needs only the abstract methods."""

    can_clear = False

    @abstractmethod
    def show(self, item: Item, *, display_id: str = "") -> None:
        """Show an item below the earlier ones."""

    @abstractmethod
    def update(self, rich: Rich, display_id: str) -> None:
        """Redraw a rich output that was shown under ``display_id``."""

    def set_transient(self, text: str) -> None:  # noqa: B027
        """Show lines that are being redrawn; an empty ``text`` removes them."""

    def draw_now(self, text: str) -> None:
        """Set the transient lines and return when they have been sent, as they may be removed right after."""
        self.set_transient(text)

    def invalidate(self, show_anew: Callable[[], None]) -> None:  # noqa: B027
        """Mark the output as out of date: the screen's thread calls ``show_anew`` before it sends anything else."""

    def set_head(self, head: Head) -> None:  # noqa: B027
        """Set ``head``: it returns what comes above all else whenever all is shown again."""

    def replace(self, items: list[Item]) -> None:  # noqa: B027
        """Show ``items`` in place of all earlier output."""

    @abstractmethod
    def settle(self, items: list[Item], rest: list[Item] | None) -> bool:
        """Show the final form, ``items``; ``rest`` is the part not shown yet, None if other output was shown instead.

        Returns True if everything was shown again: earlier displays then have no id under which they could be updated.
        """

    def shown_so_far(self) -> Callable[[], bool]:
        """Return a function that tells whether all output given so far has been shown."""
        return lambda: True

    @abstractmethod
    def close(self) -> None:
        """Return when all output given has been shown; later output is shown at once."""


class KernelScreen(Screen):
    """The output of the running notebook cell: create it in the main thread, inside the cell."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._parent = kernel.get_parent("shell")
        code = self._parent.get("content", {}).get("code", "%%")
        # other cells may have shown something before, as with %run or in a loop
        is_job = code.lstrip().startswith("%job") and "\n" not in code.strip()
        self.can_clear = code.lstrip().startswith(("%%", "%distributed")) or is_job
        if not self.can_clear:
            with contextlib.suppress(Exception):  # the cell may have replaced the streams by anything
                sys.stdout.flush()
                sys.stderr.flush()
        self._is_served = "JPY_SESSION_NAME" in os.environ
        self._changed = threading.Condition()
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        self._updates: dict[str, tuple[int, dict[str, Any]]] = {}  # waiting, with their count, by display id
        self._outdated: tuple[int, Callable[[], None]] | None = None  # its count, and what shows the cell again
        self._anew_from = 0.0  # earliest time to show the cell again
        self._head: Head | None = None
        self._head_ids: set[str] = set()
        self._transient = ""
        self._transient_shown = ""
        self._transient_id = ""
        self._redrawn_at = self._drawn_at = self._moved_at = 0.0
        self._outline: list[str] = []  # the stream or kind of each message in the cell
        self._texts: list[tuple[str, dict[str, Any]]] | None = []  # the messages, while they are short texts only
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._given = self._sent = 0  # counts of items received and sent

    def shown_so_far(self) -> Callable[[], bool]:
        with self._changed:
            wanted = self._given
        return lambda: self._sent >= wanted

    def show(self, item: Item, *, display_id: str = "") -> None:
        self._put(*_message(item, display_id))

    def update(self, rich: Rich, display_id: str) -> None:
        with self._changed:
            if display_id in self._updates:  # the one before was never shown
                self._updates[display_id] = (self._updates[display_id][0], _display(rich.bundle, display_id))
                return
            self._given += 1
            self._updates[display_id] = (self._given, _display(rich.bundle, display_id))
        self._start()

    def set_transient(self, text: str) -> None:
        with self._changed:
            self._transient, self._drawn_at = text, time.monotonic()
        self._start()

    def draw_now(self, text: str) -> None:
        with self._changed:
            self._redrawn_at = 0.0
        self.set_transient(text)
        with self._changed:
            self._changed.wait_for(lambda: not self._has_redrawn(), _DRAW_LIMIT_S)

    def invalidate(self, show_anew: Callable[[], None]) -> None:
        with self._changed:
            self._given += 1
            self._outdated = (self._given, show_anew)
        self._start()

    def set_head(self, head: Head) -> None:
        with self._changed:
            self._head = head

    def _heads(self) -> list[tuple[str, dict[str, Any]]]:
        heads = [] if self._head is None else self._head()
        self._head_ids.update(content["transient"]["display_id"] for content in heads)
        return [("display_data", content) for content in heads]

    def _is_head(self, content: dict[str, Any]) -> bool:
        return content.get("transient", {}).get("display_id") in self._head_ids

    def replace(self, items: list[Item]) -> None:
        chars = sum(len(item.text) if isinstance(item, Text) else item.num_chars for item in items)
        with self._changed:
            self._replace(items)
            self._anew_from = time.monotonic() + chars / _ANEW_CHARS_PER_S
        self._start()

    def settle(self, items: list[Item], rest: list[Item] | None) -> bool:
        if not self.can_clear:
            for item in rest or ():
                self.show(item)
            return False
        with self._changed:
            is_anew = rest is None or bool(self._transient_id) or self._would_be_stored_otherwise(items, rest)
            if is_anew:
                self._replace(items)
            else:
                self._waiting += [_message(item) for item in rest or ()]
            has_waiting = bool(self._waiting)
        if has_waiting:
            self._start()
        return is_anew

    def _replace(self, items: list[Item]) -> None:
        self._transient = self._transient_shown = self._transient_id = ""
        shown = [*self._heads(), *map(_message, items)]
        self._waiting = [("clear_output", {"wait": bool(shown)}), *shown]
        self._updates.clear()
        self._outdated = None
        self._outline.clear()

    def _would_be_stored_otherwise(self, items: list[Item], rest: list[Item]) -> bool:
        """Return whether the text would be stored in other pieces, which not all front ends join as JupyterLab does."""
        if sum(len(item.text) for item in items if isinstance(item, Text)) > _RESENT_CHARS:
            return False
        waiting = [each for each in self._waiting if not self._is_head(each[1])]
        to_come = _merged([*waiting, *map(_message, rest)])
        outline = self._outline + [content.get("name", kind) for kind, content in to_come]
        return outline != [item.stream if isinstance(item, Text) else "display_data" for item in items]

    def close(self) -> None:
        thread = self._thread
        if thread is None:
            return
        with self._changed:
            self._transient = ""
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._thread is not thread, _CLOSE_LIMIT_S)

    def _put(self, kind: str, content: dict[str, Any]) -> None:
        with self._changed:
            self._waiting.append((kind, content))
            self._given += 1
        self._start()

    def _start(self) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="detrain_nb cell output", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_waiting or self._has_redrawn() or self._is_closed, _IDLE_S)
                outdated = self._take_outdated()
            if outdated:
                outdated()
            with self._changed:
                batch, given = self._take_waiting()
                is_closed = self._is_closed
                if not batch and not self._has_waiting and not self._has_redrawn() and not is_closed:
                    self._thread = None  # a later line starts another one
                    return
            unpaced_bytes = self._send_batch(batch)
            self._sent = given
            self._redraw(now=is_closed or batch[:1] == [_CLEAR])
            with self._changed:
                self._changed.notify_all()
                if is_closed and not self._has_waiting:
                    self._thread, self._is_closed = None, False  # a later line starts another one
                    return
            if self._is_served and unpaced_bytes > _SERVED_BATCH_CHARS // 2:
                time.sleep(unpaced_bytes / _SERVER_BYTES_PER_S)
            with self._changed:  # output after silence is sent at once, the rest waits for its batch
                self._changed.wait_for(lambda: self._is_closed, _GAP_S)

    def _take_outdated(self) -> Callable[[], None] | None:
        """Return what shows the cell again, if that is due: a large cell is not sent many times a second."""
        if not self._outdated or time.monotonic() < self._anew_from and not self._is_closed:
            return None
        (_, show_anew), self._outdated = self._outdated, None
        return show_anew

    def _take_waiting(self) -> tuple[list[tuple[str, dict[str, Any]]], int]:
        """Return what to send now, and the count of items sent with it; redrawn lines stay below all others."""
        batch, above = _merged(self._waiting), self._texts if self.can_clear else None
        if batch and self._transient_id and above is not None and _are_texts(batch) and not self._is_closed:
            gap_s = _LONGEST_FRAME_S + _count_chars(above) / _MOVED_CHARS_PER_S
            if time.monotonic() - self._moved_at < gap_s:
                return [], self._sent
            batch = [_CLEAR, *self._heads(), *_merged([*above, *batch])]
            self._transient_shown = self._transient_id = ""
            self._moved_at = time.monotonic()
        self._waiting = []
        for kind, content in batch:
            if kind == "clear_output":
                self._outline, self._texts = [], []
            elif kind in _STORED and not self._is_head(content):
                self._outline.append(content.get("name", kind))
                if self._texts is not None:
                    self._texts.append((kind, content))
        if self._texts and not (_are_texts(self._texts) and _count_chars(self._texts) <= _MOVED_CHARS):
            self._texts = None
        for display_id in [*itertools.islice(self._updates, None if self._is_closed else _MOST_UPDATES)]:
            batch.append(("update_display_data", self._updates.pop(display_id)[1]))
        left = [count for count, _ in itertools.islice(self._updates.values(), 1)]
        if self._outdated:
            left.append(self._outdated[0])
        return batch, min(left, default=self._given + 1) - 1

    def _send_batch(self, batch: list[tuple[str, dict[str, Any]]]) -> int:
        """Send what waits; returns the bytes of stream output that the server has not had time for yet."""
        limit = _SERVED_BATCH_CHARS if self._is_served else _BATCH_CHARS
        unpaced_bytes = 0
        for kind, content in batch:
            if kind != "stream":
                self._send(kind, content)
                continue
            text = content["text"]
            for start in range(0, len(text), limit):
                if self._is_served and unpaced_bytes > _SERVED_BATCH_CHARS:
                    time.sleep(unpaced_bytes / _SERVER_BYTES_PER_S)
                    unpaced_bytes = 0
                piece = text[start : start + limit]
                self._send("stream", {"name": content["name"], "text": piece})
                unpaced_bytes += len(piece.encode("utf-8", "replace"))
        return unpaced_bytes

    @property
    def _has_waiting(self) -> bool:
        return bool(self._waiting or self._updates or self._outdated)

    def _has_redrawn(self) -> bool:
        return self._transient != self._transient_shown

    def _redraw(self, *, now: bool) -> None:
        since_s = time.monotonic() - self._redrawn_at
        is_whole = since_s >= _LONGEST_FRAME_S or time.monotonic() - self._drawn_at >= _FRAME_S
        if not self._has_redrawn() or not now and (since_s < _REDRAW_S or not is_whole):
            return
        self._transient_shown, self._redrawn_at = self._transient, time.monotonic()
        kind = "update_display_data" if self._transient_id else "display_data"
        self._transient_id = self._transient_id or uuid.uuid4().hex
        shown = self._transient_shown  # front ends show an empty bundle as nothing, an empty text as a blank line
        self._send(kind, _display({"text/plain": shown} if shown else {}, self._transient_id))

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        """Send an IOPub message of this cell, from any thread: ipykernel's socket hands it to its own thread."""
        with contextlib.suppress(OSError):  # the kernel is going down
            self._kernel.session.send(
                self._kernel.iopub_socket, kind, content, parent=self._parent, ident=kind.encode()
            )


class TextScreen(Screen):
    """A terminal, or any text stream: live, in order of arrival, nothing is taken back but the line at its foot."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: list[Rich] = []
        self._shown_chars = 0
        self._foot = ""  # what a terminal shows where the next line will appear
        self._updates: dict[str, Rich] = {}  # waiting, by display id
        self._updated_at = 0.0

    def show(self, item: Item, *, display_id: str = "") -> None:
        with self._lock:
            self._draw_foot("")
            if isinstance(item, Text):
                stream = sys.stderr if item.stream == "stderr" else sys.stdout
                stream.write(item.text)
            else:
                self._note_shown(item)
                stream = sys.stdout
                text = item.bundle.get("text/plain", "")
                is_labelled = set(item.bundle) == {"text/plain"}
                stream.write((text if is_labelled else textwrap.indent(text, _INDENT, lambda line: True)) + "\n")
            stream.flush()

    def _note_shown(self, item: Rich) -> None:
        """Remember an item as shown; one that was forgotten may be shown once more at the end."""
        self._shown_chars += item.num_chars
        if self._shown_chars > _MOST_KEPT_CHARS:
            self._shown, self._shown_chars = [], item.num_chars
        self._shown.append(item)

    def update(self, rich: Rich, display_id: str) -> None:
        """Show a redrawn output below, a few at a time; the final form of the others at the end."""
        self._updates[display_id] = rich
        if time.monotonic() - self._updated_at >= _REDRAW_S:
            self._show_updates(_MOST_UPDATES)

    def _show_updates(self, most: int | None = None) -> None:
        self._updated_at = time.monotonic()
        for display_id in [*itertools.islice(self._updates, most)]:
            self.show(self._updates.pop(display_id))

    def set_transient(self, text: str) -> None:
        """Draw the last of the lines on a terminal, again when it changes, below what was shown since."""
        if not text:
            self._show_updates()
        with self._lock:
            self._draw_foot(text.rpartition("\n")[2])

    def _draw_foot(self, text: str) -> None:
        end = "\x1b[0m" if "\x1b" in text else ""  # resets its colours, if it is cut off
        text = text[: shutil.get_terminal_size().columns - 1] + end
        if text != self._foot and sys.stdout.isatty():
            sys.stdout.write(f"\r\x1b[K{text}")
            sys.stdout.flush()
            self._foot = text

    def settle(self, items: list[Item], rest: list[Item] | None) -> bool:
        """Show the values, which are new; lines that would be merged now stay as they arrived."""
        if rest is None:
            rest = [item for item in items if isinstance(item, Rich) and item not in self._shown]
        for item in rest:
            self.show(item)
        return False

    def close(self) -> None:
        self.set_transient("")


class CapturedScreen(Screen):
    """A screen for captured output, as under ``%%capture``: hands over the final form when the cell has ended."""

    def __init__(self, ipython: Any) -> None:
        self._publisher = ipython.display_pub
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._items: list[Item] = []
        self._kept_chars = 0
        self._places: dict[str, int] = {}  # of displays in the items, by their ids
        self._is_closed = False

    def show(self, item: Item, *, display_id: str = "") -> None:
        """Keep an item while there is room; the final form has limits of its own."""
        chars = len(item.text) if isinstance(item, Text) else item.num_chars
        if self._kept_chars + chars <= _MOST_KEPT_CHARS:
            self._kept_chars += chars
            if display_id:
                self._places[display_id] = len(self._items)
            self._items.append(item)
        if self._is_closed:
            self._hand_over()

    def update(self, rich: Rich, display_id: str) -> None:
        place = self._places.get(display_id, -1)
        before = self._items[place] if 0 <= place < len(self._items) else None
        if not isinstance(before, Rich):
            self.show(rich)
        elif self._kept_chars + rich.num_chars - before.num_chars <= _MOST_KEPT_CHARS:
            self._kept_chars += rich.num_chars - before.num_chars
            self._items[place] = rich

    def replace(self, items: list[Item]) -> None:
        self._items = list(items)
        self._places.clear()

    def settle(self, items: list[Item], rest: list[Item] | None) -> bool:
        self.replace(items)
        return True

    def close(self) -> None:
        self._is_closed = True
        self._hand_over()

    def _hand_over(self) -> None:
        items, self._items, self._kept_chars = self._items, [], 0
        self._places.clear()
        with contextlib.suppress(ValueError):  # the output is late, and the capturing file is closed
            for item in items:
                if isinstance(item, Text):
                    self._streams[item.stream].write(item.text)
                else:
                    data, metadata = _with_sizes(item.bundle)
                    self._publisher.publish(data=data, metadata=metadata)


def screen_for(ipython: Any) -> Screen:
    """Return the screen of the running cell."""
    kernel = getattr(ipython, "kernel", None)
    if isinstance(getattr(ipython, "display_pub", None), CapturingDisplayPublisher) or (
        kernel and not _are_own_streams()
    ):
        return CapturedScreen(ipython)
    return KernelScreen(kernel) if kernel is not None else TextScreen()


def _are_own_streams() -> bool:
    """Return whether neither stream of the kernel is redirected."""
    from ipykernel.iostream import OutStream  # not needed in a terminal

    return isinstance(sys.stdout, OutStream) and isinstance(sys.stderr, OutStream)


def _are_texts(batch: list[tuple[str, dict[str, Any]]]) -> bool:
    return all(kind == "stream" for kind, _ in batch)


def _count_chars(texts: list[tuple[str, dict[str, Any]]]) -> int:
    return sum(len(content["text"]) for _, content in texts)


def _message(item: Item, display_id: str = "") -> tuple[str, dict[str, Any]]:
    if isinstance(item, Text):
        return "stream", {"name": item.stream, "text": item.text}
    return "display_data", _display(item.bundle, display_id)


def _display(bundle: Bundle, display_id: str) -> dict[str, Any]:
    data, metadata = _with_sizes(bundle)
    return {"data": data, "metadata": metadata, "transient": {"display_id": display_id} if display_id else {}}


def _with_sizes(bundle: Bundle) -> tuple[Bundle, Bundle]:
    """Return the data of a message, and its metadata: the sizes of images."""
    return {mime: data for mime, data in bundle.items() if mime != SIZES}, bundle.get(SIZES, {})


def _merged(batch: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Merge neighbouring texts of one stream into one message."""
    merged: list[tuple[str, dict[str, Any], list[str]]] = []
    for kind, content in batch:
        last = merged[-1] if merged else None
        if kind == "stream" and last and last[0] == "stream" and last[1]["name"] == content["name"]:
            last[2].append(content["text"])
        else:
            merged.append((kind, content, [content.get("text", "")]))
    return [
        (kind, {**content, "text": "".join(texts)} if kind == "stream" else content) for kind, content, texts in merged
    ]
