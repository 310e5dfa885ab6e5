"""Output of cells on a terminal or in a file: each line is printed once, as soon as it is shown."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from ..errors import short_ranks
from .notebook_file import plain_text

__all__ = ["Foot", "Terminal"]


class Terminal:
    """Printer of the output of cells, live: stdout to ``out``, stderr and errors to ``err``.

    A cell of %%distributed shows its output while it runs; when it ends, it clears and shows all of it in a different
    order. The printed lines stay, and after the clear only new ones are printed. An output that is redrawn (progress)
    is drawn at the bottom of a terminal; a file gets only its last state, when the cell has ended.
    """

    def __init__(self, out: TextIO, err: TextIO, *, on_gone: Callable[[], None]) -> None:
        self._streams = {"stdout": out, "stderr": err}
        self._on_gone = on_gone
        self._is_gone = False  # the reader has exited
        self._mid_line = ""  # the stream whose last line has no line end yet
        self._foot = Foot(out) if out.isatty() else None
        self._begin()

    def _begin(self) -> None:
        self._seen = _Seen()
        self._is_cleared = False
        self._unfinished = {"stdout": "", "stderr": ""}
        self._label = ""  # the line above a rich output: both are printed, or neither
        self._redrawn: dict[str, str] = {}  # by display id

    def say(self, text: str, *, is_error: bool = False) -> None:
        """Print a line of detrain-nb itself."""
        if text:
            self._end_line()
            self._write("stderr" if is_error else "stdout", f"{text}\n")

    def begin_cell(self, title: str) -> None:
        """Begin a cell with its title."""
        self._begin()
        self.say(title)

    def take(self, kind: str, content: dict[str, Any]) -> None:
        """Show a message of the cell, given its type and content as in Jupyter's messaging protocol."""
        if kind == "stream":
            self._take_text(content["name"], content["text"])
        elif kind in ("display_data", "execute_result", "update_display_data"):
            self._take_display(kind, content)
        elif kind == "clear_output":
            self._clear()
        elif kind == "error":
            lines = content.get("traceback") or [f"{content['ename']}: {content['evalue']}"]
            self._end_line()
            self._write("stderr", "\n".join(lines) + "\n")

    def end_cell(self) -> None:
        """Show the output that was held back: unfinished lines and the last state of redrawn outputs."""
        self._show_label()
        for stream, text in self._unfinished.items():
            if text and self._is_cleared:
                self._show_new(stream, text)
        redrawn, self._redrawn = self._redrawn, {}
        for text in redrawn.values():
            if text:
                self._end_line()
                self._show_new("stdout", text)
        self._draw_foot()
        self._end_line()

    def leave(self) -> None:
        """Finish; if the reader has exited, redirect the streams, as Python's flush at exit must not fail."""
        if self._is_gone:
            for stream in self._streams.values():
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    def _take_text(self, stream: str, text: str) -> None:
        *lines, self._unfinished[stream] = (self._unfinished[stream] + text).split("\n")
        if self._is_cleared:
            for line in lines:
                self._show_label()
                if _RICH_LABEL.fullmatch(line):
                    self._label = line
                else:
                    self._show_new(stream, line)
        else:
            for line in lines:
                self._seen.add(line)
            self._write(stream, text)

    def _take_display(self, kind: str, content: dict[str, Any]) -> None:
        text = plain_text(content)
        display_id = (content.get("transient") or {}).get("display_id")
        if display_id in self._redrawn or (display_id and kind != "update_display_data"):
            self._redrawn[display_id] = text
            self._draw_foot()
        elif text and kind != "update_display_data":
            self._end_line()
            label, self._label = self._label, ""
            if not label:
                self._show_new("stdout", text)
            elif new := self._seen.take_new(label):
                self._write("stdout", f"{new.rstrip()}\n{text}\n")

    def _show_label(self) -> None:
        """Show a line that was taken for a label but has no output below it."""
        label, self._label = self._label, ""
        if label:
            self._show_new("stdout", label)

    def _clear(self) -> None:
        self._show_label()
        for stream, text in self._unfinished.items():
            if text and self._is_cleared:
                self._show_new(stream, text)
            elif text:
                self._seen.add(text)
            self._unfinished[stream] = ""
        self._seen.begin_again()
        self._is_cleared = True
        self._redrawn.clear()
        self._draw_foot()
        self._end_line()

    def _show_new(self, stream: str, text: str) -> None:
        new = self._seen.take_new(text)
        if new is not None:
            self._write(stream, f"{new}\n")

    def _end_line(self) -> None:
        if self._mid_line:
            self._write(self._mid_line, "\n")

    def _write(self, stream: str, text: str) -> None:
        if self._is_gone or not text:
            return
        with self._while_read():
            if self._foot:
                self._foot.erase()
            self._streams[stream].write(text if self._streams[stream].isatty() else _COLOURS.sub("", text))
            self._streams[stream].flush()
            self._mid_line = "" if text.endswith("\n") else stream
        self._draw_foot()

    def _draw_foot(self) -> None:
        if self._foot is None or self._is_gone:
            return
        with self._while_read():
            self._foot.erase()
            if not self._mid_line:
                self._foot.draw("\n".join(text for text in self._redrawn.values() if text))

    @contextlib.contextmanager
    def _while_read(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # a closed pipe, a terminal that hung up, a full disk
            self._is_gone = True
            self._on_gone()


_COLOURS = re.compile(r"(\x1b\[[0-9;:]*m)")


class Foot:
    """Last lines of a terminal, redrawn in place; the cursor stays at their end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._height = 0

    def draw(self, text: str) -> None:
        """Draw the last lines of ``text`` that fit on the terminal, cut to its width."""
        columns, rows = shutil.get_terminal_size()
        lines = [_cut(line, columns - 1) for line in text.splitlines()[1 - rows :]]
        self._stream.write("\n".join(lines))
        self._stream.flush()
        self._height = len(lines)

    def erase(self) -> None:
        """Erase what `draw` has drawn."""
        if self._height:
            self._stream.write("\r" + "\x1b[A" * (self._height - 1) + "\x1b[J")
            self._height = 0


def _cut(line: str, columns: int) -> str:
    """Cut a line to ``columns`` characters, but keep all colour codes, as the last one resets the colour."""
    parts = _COLOURS.split(line)
    for index in range(0, len(parts), 2):
        parts[index] = parts[index][: max(0, columns)]
        columns -= len(parts[index])
    return "".join(parts)


_RANKS = r"\d{1,9}(?:-\d{1,9})?"
_LABEL = re.compile(rf"\[({_RANKS}(?:,{_RANKS})*)\](?: |$)")  # at the start of a line: the ranks that printed it
_RICH_LABEL = re.compile(rf"\[{_RANKS}(?:,{_RANKS})*\]")  # the label of an empty line of a rank ends with a space
_MAX_RANKS = 10_000


class _Seen:
    """Lines that a cell has shown, counted by rank: ``[0-1] x`` is not new after ``[1] x`` and ``[0] x``."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, str]] = Counter()
        self._repeatable: Counter[tuple[int, str]] = Counter()

    def add(self, text: str) -> None:
        """Note a text as shown."""
        ranks, body = _split_label(text)
        self._counts.update((rank, body) for rank in ranks)

    def begin_again(self) -> None:
        """Expect everything shown so far once more."""
        self._repeatable = self._counts.copy()

    def take_new(self, text: str) -> str | None:
        """Return ``text`` labelled with the ranks for which it is new; None when it is new for none of them."""
        ranks, body = _split_label(text)
        new = [rank for rank in ranks if not self._repeatable[rank, body]]
        self._repeatable.subtract((rank, body) for rank in ranks if rank not in new)
        self._counts.update((rank, body) for rank in new)
        if len(new) == len(ranks):
            return text
        return _with_label(new, body) if new else None


def _split_label(text: str) -> tuple[list[int], str]:
    """Return the ranks that printed ``text``, or [-1] for the notebook, and the text without label and indentation."""
    match = _LABEL.match(text)
    if match is None:
        return [-1], text
    spans = [
        (int(first), int(last or first)) for first, _, last in (part.partition("-") for part in match[1].split(","))
    ]
    if sum(abs(last - first) for first, last in spans) > _MAX_RANKS:
        return [-1], text
    ranks = [rank for first, last in spans for rank in range(first, last + 1)]
    return ranks, text[match.end() :].replace("\n" + " " * match.end(), "\n")


def _with_label(ranks: list[int], body: str) -> str:
    label = f"[{short_ranks(ranks)}] "
    return label + body.replace("\n", "\n" + " " * len(label))
