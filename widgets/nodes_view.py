"""``widgets.nodes()``: nodes as a form, tested by the doctor, saved as a nodes file, and started as a session."""

from __future__ import annotations

import html
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from pydantic import SecretStr

from ..deploy.start_steps import StartStep, StartWatch
from ..doctor import examine
from ..errors import DetrainError, SessionError, count_ranks
from ..session.output.safe_output import one_line, show_hidden
from ..session.session import Session
from ..spec.node import Node
from ..text import count_of, html_cells, html_table, table_lines
from .actions import Check, Refused, action, describe_failure, flag, list_of, one_of, secret, text, whole
from .asking import PassphraseQuestion
from .live_view import LiveView, Settled
from .node_drafts import FIELDS, MOST_TEXT
from .node_form import MOST_NODES, NodeForm, as_nodes, two_ranks_here
from .node_start import StartTable
from .node_tests import NodeTests
from .ssh_hosts import count_hosts, describe_hosts, nodes_of_hosts

__all__ = ["NodesView", "Starter"]

Starter: TypeAlias = Callable[[list[Node], StartWatch], Session]
Given: TypeAlias = str | os.PathLike[str] | Sequence[Node] | None

_LARGEST = 1 << 53  # a whole number of JavaScript
_MOST_NOTES, _MOST_CHARS = 20, 2000
_BOARD = "%distributed board"
_row: Check = whole(1, _LARGEST)
_path: Check = text(most=1000)


class _Cancelled(DetrainError):
    """The user has cancelled what was under way."""


def start_session(nodes: list[Node], watch: StartWatch) -> Session:
    """Start a session that the view keeps; in a notebook with the magics, their holder does it instead."""
    session = Session.start(
        nodes=nodes, ask_passphrase=watch.ask_passphrase, on_progress=watch.on_progress, on_step=watch.on_step
    )
    for words in session.news.pop_notices():
        watch.say(words)
    return session


class NodesView(LiveView):
    """The form. ``nodes`` is the list as it is now; ``session`` is what was started from it, if anything."""

    name = "nodes_view"

    def __init__(self, nodes: Given = None, *, start: Starter = start_session) -> None:
        self.session: Session | None = None
        self._form = NodeForm()
        self._tests = NodeTests()
        self._starter = start
        self._testing = ""
        self._cancel = threading.Event()
        self._question = PassphraseQuestion(self._publish_question, self._look)
        self._start: dict[str, Any] = {"is": "none"}
        self._table: StartTable | None = None
        self._notes: list[str] = []
        given, file = as_nodes(nodes) if nodes is not None else ([], None)
        self._form.replace(given, file=file)
        super().__init__()

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the form, as they stand there now.

        Raises: SpecError with a line for each fault, where one of them cannot be or two have one name: what is left
        would be another cluster than the one that is shown.
        """
        return self._form.nodes()

    @nodes.setter
    def nodes(self, given: str | os.PathLike[str] | Sequence[Node]) -> None:
        nodes, file = as_nodes(given)
        self._form.replace(nodes, words="The nodes were replaced from a cell.", file=file)
        self._publish_form()

    # ---- what pages show

    def state(self) -> dict[str, Any]:
        return {
            "fields": [asdict(field) for field in FIELDS.values()],
            "form": self._form.told(),
            "tests": self._tests.told(self._form.by_row()),
            "testing": self._testing,
            "question": self._question.asked,
            "start": self._start,
            "num_hosts": count_hosts(),
            "board": _BOARD,
        }

    def settled(self) -> Settled:
        if self._start["is"] == "done":
            lines = [self._start["line"], *self._start["notes"], f"{_BOARD} shows its ranks"]
            return Settled("\n".join(lines), f"<p>{'<br>'.join(map(html.escape, lines))}</p>")
        told = self._form.told()
        if not told["rows"]:
            return Settled("Nodes: none yet")
        rows = [(row["label"], row["where"], row["offers"], self._tests.words(row["id"])) for row in told["rows"]]
        head = ("name", "where", "ranks", "last test")
        title = f"Nodes: {len(rows)}" + (f", {told['file']}" if told["file"] else "")
        body = "".join(f"<tr>{html_cells(row)}</tr>" for row in rows)
        page = html_table(html_cells(head, tag="th"), body, caption=[title])
        return Settled("\n".join([title, *table_lines([head, *rows])]), page)

    def _publish_form(self) -> None:
        by_row = self._form.by_row()
        self._tests.forget(list(by_row))
        self.publish("form", self._form.told())
        self._publish_tests()

    def _publish_tests(self) -> None:
        self.publish("tests", self._tests.told(self._form.by_row()))

    def _publish_question(self, asked: dict[str, Any] | None) -> None:
        self.publish("question", asked)

    def _publish_start(self, state: str, **more: Any) -> None:
        self._start = {"is": state, **more}
        self.publish("start", self._start)

    # ---- the list

    @action(kind=one_of("empty", "here"))
    def add(self, kind: str) -> int:
        row = self._form.add() if kind == "empty" else self._form.append([two_ranks_here()])[0]
        self._publish_form()
        return row

    @action(row=_row)
    def duplicate(self, row: int) -> int:
        copy = self._form.duplicate(row)
        self._publish_form()
        return copy

    @action(row=_row)
    def remove(self, row: int) -> None:
        self._form.remove(row)
        self._publish_form()

    @action(row=_row, by=whole(-1, 1))
    def move(self, row: int, by: int) -> None:
        self._form.move(row, by)
        self._publish_form()

    @action()
    def undo(self) -> int | None:
        row = self._form.undo()
        self._publish_form()
        return row

    @action(row=_row, field=one_of(*FIELDS), text=text(most=MOST_TEXT), seen=whole(0, _LARGEST))
    def edit(self, row: int, field: str, text: str, seen: int) -> dict[str, int]:
        """Returns what the page has seen of the field now, and the revision that has it."""
        whole_text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")  # half a character cannot be sent
        try:
            seen = self._form.edit(row, field, whole_text, seen=seen)
            return {"seen": seen, "revision": self._form.revision}
        finally:
            self._publish_form()

    @action(row=_row, field=one_of(*FIELDS), takes_other=flag)
    def choose(self, row: int, field: str, takes_other: bool) -> int:
        seen = self._form.choose(row, field, takes_other=takes_other)
        self._publish_form()
        return seen

    # ---- hosts and files

    @action()
    def list_hosts(self) -> dict[str, Any]:
        there = {row["texts"]["host"].strip() for row in self._form.told()["rows"]}
        return describe_hosts(there)

    @action(names=list_of(text(most=200), most=MOST_NODES))
    def import_hosts(self, names: list[str]) -> list[int]:
        rows = self._form.append(nodes_of_hosts(names))
        self._publish_form()
        return rows

    @action(path=_path, is_added=flag)
    def open_file(self, path: str, is_added: bool) -> int:
        count = self._form.open(_given(path), is_added=is_added)
        self._publish_form()
        return count

    @action(path=_path, over=text(most=100))
    def save(self, path: str, over: str) -> dict[str, str]:
        saved = self._form.save(_given(path), over=over)
        self._publish_form()
        return saved

    # ---- tests

    @action(rows=list_of(_row, most=MOST_NODES))
    def test(self, rows: list[int]) -> None:
        by_row = self._form.by_row()
        chosen = {row: node for row in by_row if row in rows and (node := by_row[row]) is not None}
        if not chosen:
            raise Refused("correct the fields of this node first")
        self._begin("the test", lambda: self._examine(chosen))

    def _examine(self, chosen: dict[int, Node]) -> None:
        self._tests.begin(chosen)
        self._publish_tests()
        try:
            report = examine(
                list(chosen.values()),
                on_progress=self._tell_testing,
                ask_passphrase=self._question.ask,
                meanwhile=self._look,
            )
            self._tests.end(chosen, report)
        except _Cancelled:
            self._tests.fail(chosen, "", cancelled=True)
        except Exception as exc:
            self._tests.fail(chosen, describe_failure(exc))
            raise
        finally:
            self._tell_testing("")
            self._publish_tests()

    def _tell_testing(self, line: str) -> None:
        self._testing = one_line(line, most_chars=_MOST_CHARS)
        self.publish("testing", self._testing)

    # ---- a session

    @action()
    def start(self) -> None:
        nodes = self.nodes
        if not nodes:
            raise Refused("add a node first")
        if self.session is not None and self.session.is_alive:
            raise SessionError(f"session {self.session.name!r} runs already: stop it first")
        self._begin("the start", lambda: self._bring_up(nodes))

    def _bring_up(self, nodes: list[Node]) -> None:
        rows = {node.name: row for row, node in self._form.by_row().items() if node is not None}
        self._table, self._notes = StartTable([node.name for node in nodes]), []
        begun = time.monotonic()
        watch = StartWatch(
            lambda line: self._tell_start(line, begun), self._take_step, self._notes.append, self._question.ask
        )
        self._tell_start("connecting", begun)
        try:
            session = self._starter(nodes, watch)
        except _Cancelled:
            self._publish_start("cancelled")
            return
        except Exception as exc:  # noqa: BLE001  nothing else would show it: the page does
            errors = {str(rows[node]): error for node, error in self._table.errors.items() if node in rows}
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
        assert self._table is not None  # it begins with one
        seconds = int(time.monotonic() - begun)
        shown = one_line(line, most_chars=_MOST_CHARS)
        self._publish_start("running", line=shown, seconds=seconds, table=self._table.told())

    def _take_step(self, step: StartStep) -> None:
        if self._table is not None:
            self._table.take(step)

    # ---- what is under way

    def _begin(self, what: str, do: Callable[[], None]) -> None:
        def run() -> None:
            self._cancel.clear()
            do()

        self.work(what, run)

    def _look(self) -> None:
        """Raises: _Cancelled."""
        if self._cancel.is_set() or self._closing.is_set():
            raise _Cancelled("cancelled")

    @action()
    def cancel(self) -> None:
        self._cancel.set()

    @action(number=whole(1, _LARGEST), passphrase=secret)
    def answer(self, number: int, passphrase: SecretStr) -> None:
        self._question.answer(number, passphrase)

    def close(self) -> None:
        self._cancel.set()
        super().close()


def _given(path: str) -> str:
    if not path.strip():
        raise Refused("name a file: its name ends in .toml, .json or .yaml")
    return path.strip()
