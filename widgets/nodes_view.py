"""``widgets.nodes()``: nodes as a form, tested by the doctor, saved as a nodes file, and started as a session."""

from __future__ import annotations

import html
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ..deploy.start_steps import StartStep, StartWatch
from ..errors import SessionError, count_ranks
from ..session.output.safe_output import one_line, show_hidden
from ..session.session import Session
from ..spec.node import Node
from ..text import count_of, html_cells, html_table, table_lines
from .actions import Refused, action, describe_failure, text
from .displays import Settled
from .draft_facts import describe_fields
from .given_nodes import GivenNodes
from .node_form import NodeForm
from .node_start import StartTable
from .nodes_editor import Cancelled, NodesEditor, given_path, path_text

__all__ = ["NodesView", "Starter"]

Starter: TypeAlias = Callable[[list[Node], StartWatch], Session]
Given: TypeAlias = str | os.PathLike[str] | Sequence[Node] | None

_MOST_NOTES, _MOST_CHARS = 20, 2000
_BOARD = "%distributed board"
_COLUMNS = ("label", "where", "offers")


def start_session(nodes: list[Node], watch: StartWatch) -> Session:
    """Start a session that the view keeps; in a notebook with the magics loaded, the magics start and keep it."""
    session = Session.start(
        nodes=nodes, ask_passphrase=watch.ask_passphrase, on_progress=watch.on_progress, on_step=watch.on_step
    )
    for words in session.news.pop_notices():
        watch.say(words)
    return session


class NodesView(NodesEditor):
    """A form of nodes. ``nodes`` is the present list; ``session`` is the session started from it, if any."""

    name = "nodes_view"
    more = ("fields", "node_list")

    def __init__(self, nodes: Given = None, *, start: Starter = start_session) -> None:
        self.session: Session | None = None
        self._form = NodeForm()
        self._starter = start
        self._start: dict[str, Any] = {"is": "none"}
        self._table: StartTable | None = None
        self._notes: list[str] = []
        if nodes is not None:
            self._form.replace(nodes)
        super().__init__()
        self._form.on_change(self._tell_form)  # a cell can edit it, too

    @property
    def form(self) -> NodeForm:
        """The form of its nodes."""
        return self._form

    @property
    def nodes(self) -> list[Node]:
        """The present nodes of the form.

        Raises: SpecError with a line for each error, when a node is invalid or two share a name: the valid nodes alone
        would be a different cluster from the one on display.
        """
        return self._form.nodes()

    @nodes.setter
    def nodes(self, given: str | os.PathLike[str] | Sequence[Node]) -> None:
        self._form.replace(given, words="A cell replaced the nodes.")

    # ---- what pages show

    def describe_form(self) -> dict[str, Any]:
        return self._form.told()

    def state(self) -> dict[str, Any]:
        return {
            "fields": describe_fields(),
            "form": self._form.told(),
            **self.describe_tests(),
            "start": self._start,
            "board": _BOARD,
        }

    def settled(self) -> Settled:
        if self._start["is"] == "done":
            lines = [self._start["line"], *self._start["notes"], f"{_BOARD} shows its ranks"]
            return Settled("\n".join(lines), f"<p>{'<br>'.join(map(html.escape, lines))}</p>")
        told = self._form.told()
        if not told["rows"]:
            return Settled("Nodes: none yet")
        rows = [(*(node[name] for name in _COLUMNS), self._tests.words(key)) for key, node in told["nodes"].items()]
        head = ("name", "where", "ranks", "last test")
        title = f"Nodes: {len(rows)}" + (f", {told['file']}" if told["file"] else "")
        body = "".join(f"<tr>{html_cells(row)}</tr>" for row in rows)
        page = html_table(html_cells(head, tag="th"), body, caption=[title])
        return Settled("\n".join([title, *table_lines([head, *rows])]), page)

    def _publish_start(self, state: str, **more: Any) -> None:
        self._start = {"is": state, **more}
        self.publish("start", self._start)

    # ---- files

    @action(path=path_text, over=text(most=100))
    def save(self, path: str, over: str) -> dict[str, str]:
        return self._form.save(given_path(path), over=over)

    def _replace(self, given: GivenNodes, words: str) -> None:
        self._form.replace(given, words=words)

    # ---- a session

    @action()
    def start(self) -> None:
        nodes = self.nodes
        if not nodes:
            raise Refused("add a node first")
        if self.session is not None and self.session.is_alive:
            raise SessionError(f"session {self.session.name!r} is already running: stop it first")
        self._begin("the start", lambda: self._bring_up(nodes))

    def _bring_up(self, nodes: list[Node]) -> None:
        rows = {node.name: key for key, node in self._form.nodes_by_key().items() if node is not None}
        self._table, self._notes = StartTable([node.name for node in nodes]), []
        begun = time.monotonic()
        watch = StartWatch(
            lambda line: self._tell_start(line, begun), self._take_step, self._notes.append, self._question.ask
        )
        self._tell_start("connecting", begun)
        try:
            session = self._starter(nodes, watch)
        except Cancelled:
            self._publish_start("cancelled")
            return
        except Exception as exc:  # noqa: BLE001  nothing else would show it: the page does
            errors = {rows[node]: error for node, error in self._table.errors.items() if node in rows}
            self._table.stop()
            table = self._table.told()
            shown = show_hidden(describe_failure(exc))[:_MOST_CHARS]
            self._publish_start("failed", error=shown, errors=errors, table=table)
            return
        self.session = session
        on = count_of(len(nodes), "node")
        ready = f"ready after {time.monotonic() - begun:.1f} s"
        line = f"Session {session.name}: {count_ranks(len(session.ranks))} on {on}, {ready}"
        notes = [one_line(words, most_chars=_MOST_CHARS) for words in self._notes[:_MOST_NOTES]]
        self._publish_start("done", line=line, notes=notes)
        self.settle()

    def _tell_start(self, line: str, begun: float) -> None:
        self._look()
        assert self._table is not None  # _bring_up makes it first
        seconds = int(time.monotonic() - begun)
        shown = one_line(line, most_chars=_MOST_CHARS)
        self._publish_start("running", line=shown, seconds=seconds, table=self._table.told())

    def _take_step(self, step: StartStep) -> None:
        if self._table is not None:
            self._table.take(step)
