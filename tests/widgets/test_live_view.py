"""Messages between a view and its pages; what it would send is collected. tests/lab tests the same in a browser."""

from __future__ import annotations

import gc
import html
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from detrain_nb.widgets import Refused, Settled, action, live_view
from ipywidgets.widgets.widget import _instances
from jupyter_client.session import Session
from nbconvert import HTMLExporter

from .page import LIMIT_S, WithPage


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> type[Any]:
    """A class of views whose script and style sheet are in a folder of their own, next to a module."""
    folder = tmp_path_factory.mktemp("views")
    (folder / "small.js").write_text("function mount(view) {}", encoding="utf-8")
    (folder / "small.css").write_text("", encoding="utf-8")
    module = ModuleType("small_views")
    module.__file__ = str(folder / "small_views.py")
    sys.modules["small_views"] = module
    return type("SmallView", (_Small,), {"name": "small", "__module__": "small_views"})


class _Small(WithPage):
    def __init__(self) -> None:
        self.there: list[bool] = []
        super().__init__()

    def state(self) -> dict[str, Any]:
        return {"a": 1}

    def settled(self) -> Settled:
        return Settled("<text>")

    def on_pages(self, *, are_there: bool) -> None:
        self.there.append(are_there)

    @action()
    def go(self) -> int:
        return 3


@pytest.fixture
def view(kind: type[Any]) -> Iterator[Any]:
    view = kind()
    yield view
    view.close()


def told(view: Any, count: int) -> list[dict[str, Any]]:
    """Return the next messages to pages."""
    return [view.take() for _ in range(count)]


def test_page_that_says_hello_gets_the_state_and_nothing_is_sent_without_one(view: Any) -> None:
    view.publish("a", 2)
    view.append("lines", ["x"])
    view.hears("hello")
    state = {"tell": "state", "page": "p", "late": True, "state": {"a": 1}}
    assert told(view, 1) == [state]
    assert view.there == [True] and view.sent.empty()


def test_page_that_was_taken_for_gone_is_asked_to_say_hello_again_and_what_it_asks_is_done(view: Any) -> None:
    view.hears("hello")
    told(view, 1)
    view.hears("beat")
    view.hears("bye")
    view.hears("beat")
    assert told(view, 2) == [{"tell": "beat", "page": "p"}, {"tell": "again", "page": "p"}]
    assert view.there == [True, False]
    view.hears("call", call="1", action="go", arguments={})
    again, state, answer = told(view, 3)
    assert (again["tell"], state["tell"]) == ("again", "state"), "before it says hello, as it is to miss nothing"
    assert answer == {"tell": "answer", "page": "p", "call": "1", "value": 3}, "what was pressed is done"
    assert view.there == [True, False, True]


def test_latest_value_wins_and_an_equal_one_is_not_sent_again(view: Any) -> None:
    view.hears("hello")
    told(view, 1)
    began_at = time.monotonic()
    for number in range(1000):
        view.publish("a", number)
    found = [told(view, 1)[0]]
    while found[-1]["parts"] != {"a": 999}:
        found += told(view, 1)
    assert len(found) <= 2 + (time.monotonic() - began_at) / live_view._TURN_S, "one a turn at most"
    view.publish("a", 999)
    view.publish("b", 1)
    assert told(view, 1)[0]["parts"] == {"b": 1}


def test_what_is_appended_comes_once_in_order_and_of_very_much_the_end(view: Any) -> None:
    view.hears("hello")
    told(view, 1)
    view.append("lines", [*range(20_000)])
    assert told(view, 1)[0]["added"]["lines"] == [*range(15_000, 20_000)]
    view.append("lines", [1])
    view.append("lines", [2])
    assert told(view, 1)[0]["added"]["lines"] in ([1], [1, 2])


def test_value_that_is_no_json_is_refused_where_it_is_published(view: Any) -> None:
    view.hears("hello")
    with pytest.raises(ValueError):
        view.publish("a", float("nan"))
    with pytest.raises(TypeError):
        view.publish("a", {1, 2})


def test_half_a_character_does_not_end_what_pages_are_told(view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page may send a lone surrogate, as JSON can; a kernel cannot send one, and the sending thread would die."""
    pack = Session().pack
    monkeypatch.setattr(view, "send", lambda content: (pack(content), view.sent.put(content)))
    view.hears("hello")
    view.publish("a", ["x\ud83d"])
    view.publish("b", 1)
    view.hears("call", call="1", action="\ud83d", arguments={})
    parts: dict[str, Any] = {}
    answer = ""
    while not answer or parts.keys() != {"a", "b"}:
        [said] = told(view, 1)
        parts |= said.get("parts", {})
        answer = said.get("error", answer)
    assert parts == {"a": ["x?"], "b": 1} and "no such action" in answer


def test_page_that_falls_silent_is_gone_and_threads_end(view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "_PAGE_SILENT_S", 0.5)
    monkeypatch.setattr(live_view, "_LOOK_S", 0.05)
    asking = threading.Thread(target=view.hears, args=("hello",))  # like a sub-shell: not the main thread
    asking.start()
    asking.join(LIMIT_S)
    assert told(view, 1)[0]["late"] is False
    wait_until(lambda: view.there == [True, False])
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "detrain_nb small"])


def test_bye_of_the_last_page_ends_it_and_the_next_hello_begins_anew(view: Any) -> None:
    view.hears("hello", "p")
    view.hears("hello", "q")
    view.hears("bye", "p")
    view.hears("bye", "p")
    assert view.there == [True]
    view.hears("bye", "q")
    view.hears("hello", "r")
    assert view.there == [True, False, True]


def test_page_that_opens_while_the_last_one_is_taken_for_gone_is_told_of_what_changes(kind: type[Any]) -> None:
    class Late(kind):  # type: ignore[misc]
        def on_pages(self, *, are_there: bool) -> None:
            if not are_there and len(self.there) == 1:
                self.hears("hello", "q")
            super().on_pages(are_there=are_there)

    view = Late()
    view.hears("hello")
    view.hears("bye")
    assert view.there == [True, True, False, True]
    view.close()


@pytest.mark.parametrize(
    "message",
    [
        {"do": "call", "page": "p", "call": 1, "action": "go", "arguments": {}},
        {"do": "call", "page": "p", "call": "1" * 65, "action": "go", "arguments": {}},
        {"do": "hello", "page": "p" * 65},
        {"do": "hello", "page": ["p"]},
        {"do": ["hello"], "page": "q"},
        {"page": "p"},
    ],
)
def test_message_of_another_form_is_not_answered(view: Any, message: dict[str, object]) -> None:
    view.hears("hello")
    told(view, 1)
    view._handle_custom_msg(message, [])
    view.hears("call", call="2", action="go", arguments={})
    assert told(view, 1) == [{"tell": "answer", "page": "p", "call": "2", "value": 3}]


@pytest.mark.parametrize(
    "data",
    [
        {"method": "update", "state": {"_esm": "evil"}, "buffer_paths": []},
        {"method": "update", "state": {"_css": "evil", "_dom_classes": ["evil"]}},
        {"method": "update", "state": 5},
        {"method": ["custom"]},
        {"method": "custom"},
        "custom",
        None,
    ],
)
def test_page_rewrites_nothing_of_a_view(view: Any, data: object) -> None:
    """A value that a page sets would be sent to all other pages and saved with the notebook."""
    view.hears("hello")
    before = view.get_state()
    view._handle_msg({"content": {"data": data}, "buffers": []})
    view._handle_msg({"content": {"data": {"method": "custom", "content": {"do": "hello", "page": "q"}}}})
    assert [each["page"] for each in told(view, 2)] == ["p", "q"]
    assert view.get_state() == before


def test_what_changes_while_a_page_gets_its_state_is_told_behind_it(kind: type[Any]) -> None:
    class Slow(kind):  # type: ignore[misc]
        def state(self) -> dict[str, Any]:
            before = {"a": 1}
            self.publish("a", 2)
            self.sent.put({"tell": "others had time"})
            self._closing.wait(0.3)
            return before

    view = Slow()
    view.hears("hello")
    said = told(view, 3)
    assert [each["tell"] for each in said] == ["others had time", "state", "news"]
    assert said[2]["parts"] == {"a": 2}
    view.close()


def test_settled_view_still_shows_its_last_picture_and_does_nothing_more(view: Any) -> None:
    view.hears("hello")
    told(view, 1)
    view.publish("a", 2)
    view.settle()
    assert view.there == [True, False]
    while "state" not in (said := view.sent.get(timeout=LIMIT_S)):
        view.hears("hello")
    assert said["state"] == {"a": 1} and view.there == [True, False]
    view.hears("call", call="1", action="go", arguments={})
    while "error" not in (said := view.sent.get(timeout=LIMIT_S)):
        pass
    assert said["error"] == "this view is closed: run its cell again"
    assert view.comm is not None
    view.close()
    assert view.comm is None


@pytest.mark.parametrize("name", ["close", "_go", "settle", "__init__", "state", None, ["go"]])
def test_only_actions_can_be_called(view: Any, name: object) -> None:
    view.hears("hello")
    told(view, 1)
    view.hears("call", call="1", action=name, arguments={})
    assert told(view, 1)[0]["error"] == "this view has no such action: reload the page"


def test_closed_view_leaves_no_widget_behind(kind: type[Any]) -> None:
    before = set(_instances)
    view = kind()
    assert len(set(_instances) - before) == 2, "the view and its layout"
    view.close()
    view.close()
    assert set(_instances) == before


def test_pages_are_bounded(view: Any) -> None:
    for number in range(100):
        view.hears("hello", f"p{number}")
    assert len(told(view, 20)) == 20 and view.sent.empty()
    with pytest.raises(RuntimeError, match="20 other pages show this view: close some"):
        view.asks("go", "p99")


def test_page_that_says_hello_without_end_is_told_the_state_a_few_times_a_second(kind: type[Any]) -> None:
    class Counted(kind):  # type: ignore[misc]
        count = 0

        def state(self) -> dict[str, Any]:
            self.count += 1
            return {"a": 1}

    view, began_at = Counted(), time.monotonic()
    for _ in range(500):
        view.hears("hello")
        view.hears("hello")
        view.hears("bye")
    assert view.count <= 20 * (1 + time.monotonic() - began_at) and len(view.there) <= 2 * view.count
    told(view, view.count)
    while view.sent.empty():
        assert time.monotonic() - began_at < LIMIT_S
        view.hears("hello")
    assert told(view, 1)[0]["tell"] == "state"
    view.close()


def test_view_whose_making_fails_ends_with_that_error_alone(kind: type[Any]) -> None:
    class Failing(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Failing()
    gc.collect()


def test_one_thing_is_done_at_a_time_and_its_failure_is_told(view: Any) -> None:
    view.hears("hello")
    told(view, 1)
    hold = threading.Event()

    def fail() -> None:
        hold.wait(LIMIT_S)
        raise OSError("disk full")

    view.work("saving", fail)
    assert told(view, 1)[0]["parts"] == {"work": {"what": "saving", "is": "running"}}
    with pytest.raises(Refused, match="saving is still running"):
        view.work("testing", fail)
    hold.set()
    assert told(view, 1)[0]["parts"] == {"work": {"what": "saving", "is": "failed", "error": "disk full"}}


@pytest.mark.parametrize("text", ["x" * 100_000, '"' * 100_000, "\N{SNOWMAN}" * 50_000])
def test_settled_is_bounded_and_says_what_is_missing(text: str) -> None:
    bundle = Settled(text, "<p>" + "y" * 100_000).bundle(end="live")
    assert sum(len(value.encode()) for value in bundle.values()) < 50_000
    assert all("bytes not kept" in value for value in bundle.values()) and "yy" not in bundle["text/html"]


def test_settled_text_is_escaped_where_there_is_no_html() -> None:
    assert Settled("<b>").bundle(end="live")["text/html"].endswith("&lt;b&gt;</pre><p><em>live</em></p>")


@pytest.mark.filterwarnings("ignore:Your element with mimetype")  # the mimetype of the live view
@pytest.mark.parametrize("has_state", [True, False])
def test_saved_notebook_as_html_has_the_plain_form_of_live_and_settled_views(kind: type[Any], has_state: bool) -> None:
    live, settled = kind(), kind()
    settled.settle()
    shown = [*live.new_display()(), *settled.new_display()()]
    outputs = [nbformat.v4.new_output("display_data", data=one["data"]) for one in shown]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("views", outputs=outputs)])
    if has_state:  # as front ends save it if configured
        book.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": live.get_manager_state()}
    live.close()
    page = HTMLExporter().from_notebook_node(book)[0]
    read = re.sub(r"(?s)<(script|style).*?</\1>", "", page[page.index("<body") :])
    text = html.unescape(re.sub("<[^>]*>", " ", read))
    assert text.count("<text>") == 2 and text.count("run it again for the live view") == 1
    assert "widget" not in text.lower(), text


def wait_until(is_so: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


def test_no_script_of_a_view_makes_html_or_code_of_a_text() -> None:
    """Text of nodes, files and users is inserted only through textContent and attributes."""
    unsafe = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|createContextualFragment|DOMParser|document\.write|srcdoc"
        r"|\beval\(|new Function|javascript:"
    )
    scripts = sorted(Path(live_view.__file__).parent.glob("*.js"))
    assert len(scripts) >= 7
    assert [(script.name, found[0]) for script in scripts for found in unsafe.finditer(script.read_text("utf-8"))] == []
