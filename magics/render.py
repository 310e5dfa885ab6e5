"""A %%distributed cell as the notebook shows it: live while it runs, in its canonical form when it ends."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .rank_terminal import Fed, RankTerminal
from .screen import Head, Screen
from .transcript import (
    FURTHER,
    Bundle,
    Effort,
    Item,
    Nodes,
    Rich,
    Text,
    Transcript,
    beginning_of,
    by_stream,
    canonical,
    counted_more,
    joined,
    label,
    prefixed_lines,
    rich_items,
    shown_stream,
)

_STANDING_S = 0.2
_DRAWN_LINES = 120  # of all ranks together
_DRAWN_CHARS = 500  # of a line
_STREAMS = ("stdout", "stderr")
_MOST_NOTICES = 1000  # in one cell
_MOST_DISPLAYS = 10_000  # with an id, in one cell
_MOST_SHOWN_CHARS = 64 << 20  # of shown items that are remembered
_TOO_MUCH = Text("stderr", "\0")  # equal to no item


@dataclass(frozen=True)
class RenderOptions:
    """How a cell is shown; a limit of 0 means no limit."""

    merge: str = "same"
    is_live: bool = True
    is_quiet: bool = False
    max_lines: int = 5_000
    max_chars: int = 200_000
    is_kept: bool = True  # in memory, for the canonical form; else output stays as it arrived
    redraws: bool = True  # unfinished lines, and the notice about waiting ranks


class LiveCell:
    """A `CellObserver` (session/state/cell_observer.py): observes a cell and draws it on a screen.

    Each stream of a rank has a terminal of its own: a bar on stderr stays below what is printed meanwhile.
    """

    draws = True

    def __init__(
        self,
        screen: Screen,
        ranks: tuple[int, ...],
        number: int,
        options: RenderOptions,
        *,
        nodes: Nodes | None = None,
        how_to_read: str | None = None,
    ) -> None:
        """Create the view. ``nodes``: the names of the ranks' nodes, if they have names.

        ``how_to_read``: the line that shows all output again, with ``--rank`` that of one rank.
        """
        self._screen = screen
        self._nodes = {} if nodes is None else nodes
        self._options = options
        self._number = number
        self._how_to_read_of = how_to_read
        self.has_begun = False  # it was sent to its ranks
        self._lock = threading.Lock()
        self._share_lines = -(-options.max_lines // len(ranks))
        self._share_chars = -(-options.max_chars // len(ranks))
        self._transcripts: dict[int, Transcript] = {}
        self._terminals: dict[tuple[int, str], RankTerminal] = {}
        self._turns: dict[int, tuple[int, str]] = {}  # by rank: the number of stream changes, and the present stream
        self._blocks: dict[tuple[int, str], list[str]] = {}  # the lines that are drawn
        self._displays: dict[int, dict[str, tuple[str, Rich]]] = {}
        self._to_be_cleared: set[int] = set()  # when these ranks show the next output
        self._num_displays = 0
        self._standing: dict[str, int] = {}  # by id, displays that can be redrawn alone: 2 items with a label, else 1
        self._notices: list[Item] = []  # shown above all output of ranks
        self._shown: list[Item] = []
        self._shown_chars = 0
        self._is_redrawn = False  # some of what was shown has changed
        self._is_outdated = False  # the lines shown are wrong: the screen will ask for all of them
        self._effort_live = Effort()  # of all redraws together: a rank can ask for one with a few bytes
        self._room_lines, self._room_chars = options.max_lines, options.max_chars
        self._lines_not_shown = 0
        self._room_notices = _MOST_NOTICES
        self._waiting = ""
        self._is_transient = False  # transient lines are shown
        self._fed_at: dict[tuple[int, str], float] = {}
        self._is_finished = False
        self._is_shown = False  # all of it, after the end
        for rank in ranks:
            self.admit(rank)

    @property
    def can_have_head(self) -> bool:
        """Whether something can be put above the output while the cell runs."""
        with self._lock:
            return self._can_clear

    def set_head(self, head: Head) -> None:
        """Show ``head`` above all output of ranks, from now on."""
        with self._lock:
            if self._can_clear:
                self._screen.set_head(head)
                self._invalidate()

    def admit(self, rank: int) -> None:
        """Admit output of one more rank, which may be known already."""
        with self._lock:
            if rank not in self._transcripts:
                self._transcripts[rank] = Transcript(max_lines=self._share_lines, max_chars=self._share_chars)
                self._terminals |= {(rank, stream): RankTerminal() for stream in _STREAMS}
                self._displays[rank] = {}

    # ---- while it runs, in the session's thread

    def begin(self, number: int) -> None:
        with self._lock:
            self._number, self.has_begun = number, True

    def output(self, rank: int, stream: str, text: str) -> None:
        with self._lock:
            if rank not in self._transcripts:
                return
            self._clear_now(rank)
            terminal = self._terminals[rank, stream]
            fed = terminal.feed(text, turn=self._turn_of(rank, stream))
            self._fed_at[rank, stream] = time.monotonic()
            if block := terminal.block:
                self._blocks[rank, stream] = block
            else:
                self._blocks.pop((rank, stream), None)
            self._keep(rank, stream, fed)
            if fed.is_taken_back and self._can_clear:
                self._invalidate()
            else:
                self._show_lines(rank, stream, fed.new)
            self._draw_transient()

    def display(self, rank: int, bundle: Bundle, display_id: str, is_update: bool) -> None:
        with self._lock:
            if rank not in self._transcripts:
                return
            rich = Rich(bundle)
            if is_update and display_id in self._displays[rank]:
                self._redraw(rank, display_id, rich)
                return  # an unknown display, of an earlier cell or kernel, is shown here
            self._clear_now(rank)
            for stream in _STREAMS:
                self._keep(rank, stream, self._terminals[rank, stream].settle())
            if self._options.is_kept and not self._transcripts[rank].add_rich(rich):
                return
            has_id = bool(display_id) and self._num_displays < _MOST_DISPLAYS
            own_id = uuid.uuid4().hex if has_id else ""
            if has_id:
                self._num_displays += display_id not in self._displays[rank]
                self._displays[rank][display_id] = (own_id, rich if self._options.is_kept else Rich({}))
            self._show_display(rank, rich, own_id)

    def _redraw(self, rank: int, display_id: str, rich: Rich) -> None:
        """Replace the output that was displayed under this id."""
        own_id, before = self._displays[rank][display_id]
        if self._options.is_kept:
            if not self._transcripts[rank].replace_rich(before, rich):
                return
            self._displays[rank][display_id] = (own_id, rich)
            self._is_redrawn = True
        items = self._labelled(rank, rich)
        if self._standing.get(own_id) == len(items):  # with the label in the same place
            last = items[-1]
            assert isinstance(last, Rich)
            if self._is_drawing:
                self._screen.update(last, own_id)
        elif self._can_clear:
            self._invalidate()
        else:
            self._show_display(rank, rich, own_id)

    def _show_display(self, rank: int, rich: Rich, own_id: str) -> None:
        items = self._labelled(rank, rich)
        is_shown = [self._show_live(item, own_id if isinstance(item, Rich) else "") for item in items]
        if own_id and all(is_shown):
            self._standing[own_id] = len(items)

    def _labelled(self, rank: int, rich: Rich) -> list[Item]:
        return rich_items({rank: rich.bundle}, is_merging=False, nodes=self._nodes)

    def clear(self, rank: int, wait: bool) -> None:
        """Clear the rank's output; with ``wait``, when it shows the next: the last frame of a loop stays."""
        with self._lock:
            if rank not in self._transcripts or not self._options.is_kept:
                return
            self._to_be_cleared.add(rank)
            if not wait:
                self._clear_now(rank)

    def _clear_now(self, rank: int) -> None:
        """Clear the rank's output, if the rank has asked for that."""
        if rank not in self._to_be_cleared:
            return
        self._to_be_cleared.discard(rank)
        self._transcripts[rank].clear()
        self._num_displays -= len(self._displays[rank])
        for own_id, _ in self._displays[rank].values():
            self._standing.pop(own_id, None)
        self._displays[rank].clear()
        for stream in _STREAMS:
            self._terminals[rank, stream].end()
            self._blocks.pop((rank, stream), None)
        if self._can_clear:
            self._invalidate()

    def waiting(self, text: str) -> None:
        with self._lock:
            self._waiting = text
            self._draw_transient()

    def notice(self, text: str, *, stream: str = "stderr") -> None:
        with self._lock:
            self._room_notices -= 1
            if self._room_notices < 0:
                return
            notice = Text(stream, f"{text}\n")
            self._notices.append(notice)
            if self._is_outdated:
                return
            self._shown.append(notice)
            self._screen.show(notice)

    def retell(self, notices: Iterable[str]) -> None:
        """Replace the notices so far in the final form, where these are shown on stdout."""
        with self._lock:
            self._notices = [Text("stdout", f"{text}\n") for text in notices]
            self._is_redrawn = True

    def shown_so_far(self) -> Callable[[], bool]:
        """Return a function that returns True once all output so far has been shown; some is shown only at the end."""
        if self._is_shown or self._is_drawing and not self._lines_not_shown:
            return self._screen.shown_so_far()
        return lambda: self._is_shown

    # ---- when it has ended, in the caller's thread

    def finish(self, values: dict[int, Bundle]) -> None:
        """Bring the cell into its canonical form, with the values of its last expression by rank."""
        with self._lock:
            for rank in values.keys() & self._to_be_cleared:
                self._clear_now(rank)
            self._end_terminals()
            items = self._canonical(self._transcripts)
            shown = sorted(values)[:1] if self._options.merge == "rank0" else sorted(values)
            bundles = {rank: values[rank] for rank in shown}
            is_merging = self._options.merge == "same"
            values_shown = rich_items(bundles, is_merging=is_merging, nodes=self._nodes)
            items = joined([*self._notices, *items, *values_shown])
            if not self._options.is_quiet:
                if self._is_drawing and self._lines_not_shown and not self._screen.can_clear:
                    more = counted_more(self._lines_not_shown, "line")
                    self._show_live(Text("stdout", f"... {more}, read them with {self._how_to_read()} ...\n"))
                has_changed = self._is_outdated or self._is_redrawn and bool(self._shown)
                rest = None if has_changed else _rest(joined(self._shown), items)
                if self._screen.settle(items, rest):
                    self._standing.clear()
            self._is_outdated = False
            self._is_finished = True
        self._screen.close()
        self._is_shown = True

    def end(self, values: dict[int, Bundle]) -> None:
        """End the cell: keep the output as it arrived, and show the remaining lines and values."""
        with self._lock:
            self._end_terminals()
            if self._is_outdated:
                self._is_outdated = False
                self._show_so_far()
            for item in rich_items(values, is_merging=False, nodes=self._nodes):
                self._show_live(item)
            self._screen.set_transient("")
            self._is_finished = self._is_shown = True

    def leave(self) -> None:
        """Return when all output given has been shown; later output is shown below it."""
        self._screen.close()

    @property
    def _is_drawing(self) -> bool:
        return self._options.is_live and not self._options.is_quiet

    @property
    def _can_clear(self) -> bool:
        return self._is_drawing and self._options.is_kept and self._screen.can_clear and not self._is_finished

    def _end_terminals(self) -> None:
        for (rank, stream), terminal in self._terminals.items():
            fed = terminal.end()
            self._keep(rank, stream, fed)
            self._show_lines(rank, stream, fed.new)
        self._blocks.clear()

    def _turn_of(self, rank: int, stream: str) -> int:
        """Count how often the rank has changed from one stream to the other."""
        turn, before = self._turns.get(rank, (0, stream))
        self._turns[rank] = (turn + (stream != before), stream)
        return self._turns[rank][0]

    def _keep(self, rank: int, stream: str, fed: Fed) -> None:
        """Keep final lines for the canonical form."""
        if self._options.is_kept:
            _add(self._transcripts[rank], stream, fed)

    def _show_lines(self, rank: int, stream: str, lines: list[str]) -> None:
        if not lines or self._options.merge == "rank0" and rank != min(self._transcripts):
            return
        count = self._fitting(lines)
        if count < len(lines) and self._is_finished and not self._lines_not_shown:
            self._show_live(
                Text("stdout", f"... later output is not shown: read it with {self._how_to_read(rank)} ...\n")
            )
        for kind, some in by_stream(stream, lines[:count]):
            self._show_live(Text(shown_stream(kind), prefixed_lines(rank, some, self._nodes)))
        self._lines_not_shown += len(lines) - count

    def _invalidate(self) -> None:
        """Have all output shown again before the next message: a rank can ask for it thousands of times a second."""
        if not self._is_outdated:
            self._is_outdated = True
            self._screen.invalidate(self._show_anew)

    def _show_anew(self) -> None:
        with self._lock:
            if self._is_outdated:
                self._is_outdated = False
                self._show_so_far()
                self._draw_transient()

    def _show_so_far(self) -> None:
        """Show all output so far in canonical form."""
        so_far = {rank: transcript.copy() for rank, transcript in self._transcripts.items()}
        for (rank, stream), terminal in self._terminals.items():
            _add(so_far[rank], stream, terminal.shown)
        said = self._canonical(so_far, self._effort_live)
        self._shown, self._shown_chars = [*self._notices, *said], 0
        self._screen.replace(self._shown)
        self._standing.clear()
        self._is_redrawn = False
        texts = [item.text for item in said if isinstance(item, Text)]
        self._room_lines = self._options.max_lines - sum(text.count("\n") for text in texts)
        self._room_chars = self._options.max_chars - sum(map(len, texts))
        self._lines_not_shown = 0

    def _fitting(self, lines: list[str]) -> int:
        """Return how many of ``lines`` fit into the live view, and use up their room."""
        count = len(lines)
        if self._options.max_lines:
            count = min(count, self._room_lines)
            self._room_lines -= count
        if self._options.max_chars:
            for index in range(count):
                self._room_chars -= len(lines[index]) + 1
                if self._room_chars < 0:
                    self._room_lines = 0
                    return index
        return count

    def _show_live(self, item: Item, display_id: str = "") -> bool:
        """Show an item live; returns False if it is not shown now."""
        if self._is_outdated:
            return False  # it will be shown with all the others
        if self._is_drawing or self._is_finished and not self._options.is_quiet:  # late output is always shown
            self._screen.show(item, display_id=display_id)
            if self._options.is_kept:
                self._note_shown(item)
            return True
        return False

    def _note_shown(self, item: Item) -> None:
        """Remember an item to compare it with the final form; above the limit, all is shown again at the end."""
        self._shown_chars += len(item.text) if isinstance(item, Text) else item.num_chars
        if self._shown_chars > _MOST_SHOWN_CHARS:
            self._shown = [_TOO_MUCH]
        else:
            self._shown.append(item)

    def _draw_transient(self) -> None:
        """Draw the unfinished lines of ranks, and the notice about waiting ranks."""
        if not self._is_drawing or self._is_finished or not self._options.redraws:
            return
        lines = [line for source, block in sorted(self._blocks.items()) for line in self._drawn(source, block)]
        del lines[_DRAWN_LINES:]
        if self._lines_not_shown:
            more = counted_more(self._lines_not_shown, "line")
            lines.append(f"... {more} not shown while the cell runs")
        if self._waiting:
            lines.append(self._waiting)
        if lines or self._is_transient:
            self._screen.set_transient("\n".join(lines))
        self._is_transient = bool(lines)

    def _drawn(self, source: tuple[int, str], block: list[str]) -> list[str]:
        """Return drawn lines, or a line that has been unfinished for 0.2 s; not one whose rest is on its way."""
        is_standing = self._terminals[source].is_drawn or time.monotonic() - self._fed_at[source] > _STANDING_S
        if not block or not is_standing or self._options.merge == "rank0" and source[0] != min(self._transcripts):
            return []
        prefix = label([source[0]], self._nodes)
        return [f"{prefix} {beginning_of(line, _DRAWN_CHARS)}" for line in block]

    def _how_to_read(self, rank: int | None = None) -> str:
        read = self._how_to_read_of or f"%distributed log --cell {self._number}"
        return read if rank is None else f"{read} --rank {rank % FURTHER}"

    def _canonical(self, transcripts: dict[int, Transcript], effort: Effort | None = None) -> list[Item]:
        how_to_read = {rank: self._how_to_read(rank) for rank in self._transcripts}
        return canonical(
            transcripts, merge=self._options.merge, how_to_read=how_to_read, nodes=self._nodes, effort=effort
        )


def _add(transcript: Transcript, stream: str, fed: Fed) -> None:
    """Add the final lines of a stream."""
    start = 0
    for kind, lines in by_stream(stream, fed.final):
        transcript.add_lines(kind, lines, fed.turns[start : start + len(lines)])
        start += len(lines)


def _rest(shown: list[Item], items: list[Item]) -> list[Item] | None:
    """Return what is left to show of ``items`` after ``shown``; None if ``items`` begin differently."""
    if not shown:
        return items
    *before, last = shown
    count = len(before)
    if len(items) <= count or items[:count] != before:
        return None
    if items[count] == last:
        return items[count + 1 :]
    there = items[count]
    if not isinstance(last, Text) or not isinstance(there, Text) or last.stream != there.stream:
        return None
    if there.text.startswith(last.text):
        return [Text(there.stream, there.text[len(last.text) :]), *items[count + 1 :]]
    return None
