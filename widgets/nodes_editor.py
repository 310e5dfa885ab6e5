"""A view whose form edits nodes: they are typed, imported and tested by the doctor, with results beside each row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import SecretStr

from ..doctor import examine
from ..errors import DetrainError
from ..pipelines.draft_form import MOST_NODES, DraftForm
from ..session.output.safe_output import one_line
from ..spec.node import THIS_MACHINE, Node
from ..text import count_of
from .actions import Check, Refused, action, describe_failure, flag, list_of, one_of, secret, text, whole
from .asking import PassphraseQuestion
from .given_nodes import GivenNodes, read_given_nodes
from .live_view import LiveView
from .node_tests import NodeTests
from .ssh_hosts import count_hosts, describe_hosts, nodes_of_hosts

__all__ = ["Cancelled", "NodesEditor", "given_path", "path_text"]

_LARGEST = 1 << 53  # exact as a number in JavaScript
_MOST_TYPED = 200_000
_MOST_CHARS = 2000
_MOST_LEFT_OUT = 50  # lines shown of what an import left out
_FIELD, _EDITOR, _KEY = text(most=300), text(most=64), text(most=20)
path_text: Check = text(most=1000)


class Cancelled(DetrainError):
    """The user has cancelled the work."""


def _typed(value: object) -> str | bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or len(value) > _MOST_TYPED:
        raise ValueError(f"a string of at most {_MOST_TYPED:,} characters, or true or false")
    return value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")  # a lone surrogate cannot be encoded


class NodesEditor(LiveView):
    """A view with nodes. A subclass defines `form` and `describe_form`, and adds `describe_tests` to its state."""

    def __init__(self) -> None:
        self._guard = threading.RLock()  # also held while the form is sent: no older state may follow a newer one
        self._tests = NodeTests()
        self._testing = ""
        self._cancel = threading.Event()
        self._question = PassphraseQuestion(lambda asked: self.publish("question", asked), self._look)
        super().__init__()

    @property
    def form(self) -> DraftForm | None:
        """The open form."""
        raise NotImplementedError

    def describe_form(self) -> dict[str, Any] | None:
        """Return what pages show of the form, as plain JSON."""
        raise NotImplementedError

    def describe_tests(self) -> dict[str, Any]:
        """Return the parts of the state about tests and imports."""
        return {
            "tests": self._told_tests(),
            "testing": self._testing,
            "question": self._question.asked,
            "num_hosts": count_hosts(),
        }

    def _told_tests(self) -> dict[str, Any]:
        form = self.form
        return self._tests.told(form.nodes_by_key()) if form else {}

    def _the_form(self) -> DraftForm:
        form = self.form
        if form is None:
            raise Refused("no pipeline is open: it was closed in another tab")
        return form

    def _tell_form(self) -> None:
        with self._guard:
            self.publish("form", self.describe_form())
            self._tell_tests()

    def _tell_tests(self) -> None:
        with self._guard:
            self.publish("tests", self._told_tests())

    # ---- what is typed

    @action(path=_FIELD, typed=_typed, revision=whole(0, _LARGEST), editor=_EDITOR)
    def edit(self, path: str, typed: str | bool, revision: int, editor: str) -> int | None:
        """Return the revision that contains the edit; a page ignores older ones. None: a conflict."""
        form = self._the_form()
        return form.revision if form.edit(path, typed, revision=revision, editor=editor) else None

    @action(path=_FIELD, keep=one_of("mine", "theirs"), editor=_EDITOR)
    def resolve(self, path: str, keep: str, editor: str) -> None:
        self._the_form().resolve(path, keep=keep, editor=editor)

    @action(do=one_of("add", "add_here", "copy", "remove", "up", "down", "undo"), key=_KEY)
    def change_nodes(self, do: str, key: str) -> str:
        """Return the key of the node to focus."""
        form = self._the_form()
        acts: Mapping[str, Callable[[], Any]] = {
            "add": form.add_node,
            "add_here": lambda: form.add_nodes([Node(host=THIS_MACHINE, ranks=2)])[0],
            "copy": lambda: form.copy_node(key),
            "remove": lambda: form.remove_node(key),
            "up": lambda: form.move_node(key, -1),
            "down": lambda: form.move_node(key, 1),
            "undo": form.undo,
        }
        return str(acts[do]() or "")

    # ---- hosts and files

    @action()
    def list_hosts(self) -> dict[str, Any]:
        return describe_hosts({node.host for node in self._the_form().nodes_by_key().values() if node})

    @action(names=list_of(text(most=200), most=MOST_NODES))
    def import_hosts(self, names: list[str]) -> list[str]:
        return self._the_form().add_nodes(nodes_of_hosts(names))

    @action(path=path_text, is_added=flag)
    def open_nodes(self, path: str, is_added: bool) -> dict[str, Any]:
        """Read nodes from a file; they replace the present ones, or with ``is_added`` join them. Raises: SpecError."""
        form, given = self._the_form(), read_given_nodes(given_path(path))
        if is_added:
            form.add_nodes(given.nodes)
        else:
            self._replace(given, f"{count_of(len(form.rows), 'node')} replaced by those of {one_line(given.path)}.")
        left_out = [one_line(line, most_chars=_MOST_CHARS) for line in given.left_out[:_MOST_LEFT_OUT]]
        return {"nodes": len(given.nodes), "left_out": left_out, "more": len(given.left_out) - len(left_out)}

    def _replace(self, given: GivenNodes, words: str) -> None:
        self._the_form().replace_nodes(given.nodes, words=words)

    # ---- tests

    @action(keys=list_of(_KEY, most=MOST_NODES))
    def test(self, keys: list[str]) -> None:
        found = self._the_form().nodes_by_key()
        chosen = {key: node for key, node in found.items() if key in keys and node is not None}
        if not chosen:
            raise Refused("correct the fields of this node first")
        self._begin("the test", lambda: self._examine(chosen), is_told=False)

    def _examine(self, chosen: dict[str, Node]) -> None:
        self._tests.begin(chosen)
        self._tell_tests()
        try:
            report = examine(
                list(chosen.values()),
                on_progress=self._tell_testing,
                ask_passphrase=self._question.ask,
                meanwhile=self._look,
            )
            self._tests.end(chosen, report)
        except Cancelled:
            self._tests.fail(chosen, "", cancelled=True)
        except Exception as exc:  # noqa: BLE001  it is shown beside each node
            self._tests.fail(chosen, describe_failure(exc))
        finally:
            self._tell_testing("")
            self._tell_tests()

    def _tell_testing(self, line: str) -> None:
        self._testing = one_line(line, most_chars=_MOST_CHARS)
        self.publish("testing", self._testing)

    # ---- work that is running

    def _begin(self, what: str, do: Callable[[], None], *, is_told: bool = True) -> None:
        def run() -> None:
            self._cancel.clear()
            do()

        self.work(what, run, is_told=is_told)

    def _look(self) -> None:
        """Check for a cancellation. Raises: Cancelled."""
        if self._cancel.is_set() or self._closing.is_set():
            raise Cancelled("cancelled")

    @action()
    def cancel(self) -> None:
        self._cancel.set()

    @action(number=whole(1, _LARGEST), passphrase=secret)
    def answer(self, number: int, passphrase: SecretStr) -> None:
        self._question.answer(number, passphrase)

    def close(self) -> None:
        if hasattr(self, "_cancel"):  # its construction has failed: ipywidgets closes it all the same
            self._cancel.set()
        super().close()


def given_path(path: str) -> str:
    """Return the path without spaces around it. Raises: Refused when it is empty."""
    if not path.strip():
        raise Refused("give a file name")
    return path.strip()
