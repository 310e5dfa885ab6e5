"""What every form and view is: a widget that is told from any thread, answers while a cell runs, and leaves plain HTML.

Nothing of a view is in the widget's state but its program: what it shows travels as messages, and a page that opens
(first display, reload, second view) says hello and gets all of it. So no saved state holds a secret.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

import anywidget
from IPython.display import display

from ..session.output.safe_output import one_line
from .actions import Action, Refused, actions_of, describe_failure
from .beside_cells import serve_beside_cells
from .displays import Display, Displays, Settled

_TURN_S = 0.1  # at most so often is a page told something
_PAGE_SILENT_S = 30.0  # three beats of a page
_LOOK_S = 5.0  # how often somebody looks whether pages are left, while some are
_MOST_PAGES = 20
_GREET_S = 1.0  # for so long no more hellos are answered than there may be pages: who gets no answer says it again
_MOST_APPENDED = 5000  # items of a list between two turns: a page shows a window of a log, not the log
_SHARED = Path(__file__).with_name("shared")
_ROOT = re.compile(r"\.dt(?![\w-])")  # a style sheet is one of the whole page: a view's own reaches no other view
_PROGRAM_END = "\nexport default { render };\n"


class LiveView(anywidget.AnyWidget):
    """A view: a subclass gives `name`, `state`, `settled` and actions; beside it lie ``NAME.js`` and ``NAME.css``."""

    name: ClassVar[str] = ""
    more: ClassVar[tuple[str, ...]] = ()  # of a large one: further files beside it, which come before its own
    _actions: ClassVar[dict[str, Action]] = {}
    _all: ClassVar[weakref.WeakSet[LiveView]] = weakref.WeakSet()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "name" in cls.__dict__:
            here = Path(str(sys.modules[cls.__module__].__file__))
            own = [here.with_name(name) for name in (*cls.more, cls.name)]
            scripts = [_read(file.with_suffix(".js")) for file in (_SHARED, *own)]
            cls._esm = "".join([f"const VIEW = {json.dumps(cls.name)};\n", *scripts, _PROGRAM_END])
            styles = "".join(_read(file.with_suffix(".css")) for file in own)
            cls._css = _read(_SHARED.with_suffix(".css")) + _ROOT.sub(f".dt:where(.{cls.name})", styles)
        cls._actions = actions_of(cls)
        super().__init_subclass__(**kwargs)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sending = threading.RLock()  # what is told of a change comes behind the state that a page begins with
        self._wake, self._closing, self._has_page = threading.Event(), threading.Event(), threading.Event()
        self._pump: threading.Thread | None = None
        self._workers: dict[bool, threading.Thread] = {}  # by whether they are beside others
        self.work_told: dict[str, Any] | None = None  # what is under way, or has failed last: for pages that open
        self._is_settled = False
        self._pages: dict[str, float] = {}  # when each was heard last
        self._greeted: deque[float] = deque(maxlen=_MOST_PAGES)  # when states were told
        self._is_late = False  # its messages wait for the running cell
        self._pending: dict[str, tuple[str, Any]] = {}  # as JSON, and the value
        self._appended: dict[str, list[Any]] = {}
        self._told: dict[str, str] = {}  # what each part was, as JSON, when pages were told last
        self._displays = Displays()
        super().__init__()
        self.on_msg(self._hear)
        LiveView._all.add(self)

    # ---- what a view gives

    def state(self) -> dict[str, Any]:
        """Everything that a page shows, as plain JSON: a page that opens gets it."""
        raise NotImplementedError

    def settled(self) -> Settled:
        """The view as it stays when the kernel is gone."""
        raise NotImplementedError

    def on_pages(self, *, are_there: bool) -> None:
        """The first page has come, or the last one is gone: sampling begins or ends here."""

    # ---- what a view does

    def publish(self, part: str, value: Any) -> None:
        """Tell all pages what ``part`` is now; the latest value wins, and an equal one is not sent again.

        Raises: ValueError, TypeError when it is no plain JSON.
        """
        written = json.dumps(value, allow_nan=False)
        with self._lock:
            if self._pages and not self._closing.is_set():
                self._pending[part] = (written, value)
                self._start_pump()
        self._wake.set()

    def append(self, part: str, items: list[Any]) -> None:
        """Tell all pages what has come to the list ``part``; of very many, the last ones."""
        with self._lock:
            if self._pages and not self._closing.is_set():
                waiting = self._appended.setdefault(part, [])
                waiting += items
                del waiting[:-_MOST_APPENDED]
                self._start_pump()
        self._wake.set()

    def work(
        self, what: str, do: Callable[[], Mapping[str, Any] | None], *, is_told: bool = True, is_beside: bool = False
    ) -> None:
        """Do one thing that takes a while, in a thread of the view; the part ``work`` tells pages how it goes.

        They are told what ``do`` returns, too.
        Where it is not to be told, ``do`` itself says all, and raises nothing. What ``is_beside`` others waits for none
        of them.
        Raises: Refused while another one is under way.
        """
        with self._lock:
            before = self._workers.get(is_beside)
            if before is not None and before.is_alive():
                raise Refused(f"{before.name} is still under way")
            run = partial(self._work, what, do) if is_told else do
            self._workers[is_beside] = threading.Thread(target=run, name=what, daemon=True)
            self._workers[is_beside].start()

    def _work(self, what: str, do: Callable[[], Mapping[str, Any] | None]) -> None:
        self.tell_work({"what": what, "is": "running"})
        try:
            made = do() or {}
        except Exception as exc:  # noqa: BLE001  nothing else would show it: the page does
            self.tell_work({"what": what, "is": "failed", **self.describe_error(exc)})
        else:
            self.tell_work({"what": what, "is": "done", **made})

    def describe_error(self, exc: Exception) -> dict[str, Any]:
        """What pages are told of why work has failed: the line ``error``, and what a view's page can do about it."""
        return {"error": one_line(describe_failure(exc))}

    def tell_work(self, told: dict[str, Any] | None) -> None:
        """Tell all pages how the work goes; None: nothing more of it."""
        self.work_told = told if told and told["is"] != "done" else None
        self.publish("work", told)

    def wait_for_page(self, limit_s: float) -> bool:
        """Wait until a page shows the view; False where none does in time."""
        return self._has_page.wait(limit_s)

    def settle(self) -> None:
        """Put plain HTML in the place of every display of the view, in the saved notebook too; once."""
        with self._lock:
            if self._is_settled:
                return
            self._is_settled = True
        self._tell_news()  # pages that keep the picture have the last one
        self._put_settled()
        self.close()

    def _put_settled(self) -> None:
        self._displays.settle(self.settled)

    @staticmethod
    def settle_all() -> None:
        """Settle every view of this process, for a notebook whose kernel ends.

        One that has settled is put there once more: `detrain-nb run` hears of nothing that came between two cells.
        """
        with contextlib.ExitStack() as each_in_turn:  # whatever one of them raises
            for view in list(LiveView._all):
                each_in_turn.callback(view._put_settled if view._is_settled else view.settle)

    def close(self) -> None:
        """End its threads. Pages lose the view; those that do not show its settled form keep the last picture."""
        if not hasattr(self, "_closing"):  # its making has failed: ipywidgets closes it all the same
            return
        is_again = self._closing.is_set()
        self._closing.set()
        with self._lock:
            was_shown = bool(self._pages)
            self._pages.clear()
        self._wake.set()
        if was_shown:
            self.on_pages(are_there=False)
        if is_again or not self._is_settled:  # a page that was reloaded does not know where to put the settled form
            if self.layout is not None:
                self.layout.close()  # a widget of its own, which the kernel and the saved notebook would keep
            super().close()

    # ---- how it is displayed

    def _ipython_display_(self, **_: Any) -> None:
        for shown in self.new_display()():
            display(shown["data"], metadata=shown["metadata"], raw=True, **shown["transient"])

    def new_display(self) -> Callable[[], list[dict[str, Any]]]:
        """Make one more display of the view, which settles as the others do; it gives the contents of its messages."""
        return partial(self._outputs, self._displays.add())

    def _outputs(self, place: Display) -> list[dict[str, Any]]:
        if self._is_settled:
            return [place.settled(self.settled())]
        widget = super()._repr_mimebundle_()
        data, metadata = widget if isinstance(widget, tuple) else (widget or {}, {})
        return place.live(data, metadata, self.settled())

    def __repr__(self) -> str:
        return self.settled().text

    # ---- what pages say

    def _handle_msg(self, message: dict[str, Any]) -> None:
        """Hear what a page says, and nothing else that ipywidgets would do: it has no say in the view's program.

        Its own `update` of a trait would go to all pages, and into the saved notebook.
        """
        data = message["content"].get("data")
        if isinstance(data, dict) and data.get("method") == "custom":
            self._handle_custom_msg(data.get("content"), message.get("buffers"))
        elif isinstance(data, dict) and data.get("method") == "request_state":
            self.send_state()

    def _hear(self, _widget: object, content: object, _buffers: object) -> None:
        if not isinstance(content, dict) or not _is_short(page := content.get("page")):
            return
        match content.get("do"):
            case "hello":
                self._welcome(page)
            case "beat" if page in self._pages:
                self._pages[page] = time.monotonic()
                self._tell({"tell": "beat", "page": page})
            case "beat":  # it was taken for gone, and has missed what came
                self._tell({"tell": "again", "page": page})
            case "bye":
                self._forget(page)
            case "call" if _is_short(call := content.get("call")):
                if page not in self._pages and not self._is_settled:  # it was taken for gone: what it asks is done
                    self._tell({"tell": "again", "page": page})
                    self._welcome(page)
                self._answer(page, call, content)

    def _welcome(self, page: str) -> None:
        with self._lock:
            if len(self._greeted) == _MOST_PAGES and time.monotonic() - self._greeted[0] < _GREET_S:
                return
            is_over = self._closing.is_set()
            if is_over and not self._is_settled or (len(self._pages) >= _MOST_PAGES and page not in self._pages):
                return
            self._greeted.append(time.monotonic())
            is_first = not self._pages and not is_over
            if page not in self._pages:  # else it was heard beside the cell already
                self._is_late = threading.current_thread() is threading.main_thread()
            if not is_over:
                self._pages[page] = time.monotonic()
                self._has_page.set()
                self._told.clear()
                self._start_pump()
        said: dict[str, Any] = {"tell": "state", "page": page, "late": self._is_late}
        with self._sending:
            try:
                if is_first:
                    self.on_pages(are_there=True)
                self._send_pending()  # else what was appended would come behind a state that has it already
                said["state"] = self.state()
            except Exception as exc:  # noqa: BLE001  nothing else would show it: the page does
                said["error"] = one_line(describe_failure(exc))
            self._tell(said)

    def _forget(self, page: str) -> None:
        with self._lock:
            was_there = self._pages.pop(page, None) is not None
            is_last = was_there and not self._pages
        if is_last:
            self.on_pages(are_there=False)
            with self._lock:
                is_back = bool(self._pages)
            if is_back:  # a page has opened meanwhile, and what it began may have been ended
                self.on_pages(are_there=True)

    def _answer(self, page: str, call: str, content: Mapping[str, Any]) -> None:
        name = content.get("action")
        said: dict[str, Any] = {"tell": "answer", "page": page, "call": call}
        try:
            if self._is_settled:
                raise Refused("this view has ended: run its cell again")
            if page not in self._pages:
                raise Refused(f"{_MOST_PAGES} other pages show this view: close some, and reload this one")
            wanted = self._actions.get(name) if isinstance(name, str) else None
            if wanted is None:
                raise Refused("this view has no such action: reload the page")
            said["value"] = wanted.call(self, content.get("arguments"))
        except Exception as exc:  # noqa: BLE001  nothing else would show it: the page does
            said["error"] = one_line(describe_failure(exc))
        self._tell(said)

    # ---- how they are told

    def _start_pump(self) -> None:
        """The lock is held."""
        if self._pump is None:
            self._pump = threading.Thread(target=self._run_pump, name=f"detrain_nb {self.name}", daemon=True)
            self._pump.start()

    def _run_pump(self) -> None:
        while self._tell_news():
            self._wake.wait(_LOOK_S)
            self._wake.clear()
            self._look_for_pages()

    def _tell_news(self) -> bool:
        """Send what is pending, and leave the others time; returns whether to go on."""
        with self._sending:
            is_shown, is_sent = self._send_pending()
        if is_sent:
            self._closing.wait(_TURN_S)
        return is_shown

    def _send_pending(self) -> tuple[bool, bool]:
        """Are pages there, and was there something to send?"""
        with self._lock:
            parts, self._pending = self._pending, {}
            added, self._appended = self._appended, {}
            if self._closing.is_set() or not self._pages:
                self._pump = None
                return False, False
            changed = {part: value for part, (written, value) in parts.items() if self._told.get(part) != written}
            self._told.update((part, written) for part, (written, _) in parts.items())
        if changed or added:
            self._tell({"tell": "news", "parts": changed, "added": added})
        return True, bool(changed or added)

    def _look_for_pages(self) -> None:
        if self._is_late:  # a page's beats wait for the running cell
            return
        now = time.monotonic()
        for page, heard in [*self._pages.items()]:
            if now - heard > _PAGE_SILENT_S:
                self._forget(page)

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(AttributeError):  # closed in the meantime: there is no comm
            try:
                self.send(message)
            except UnicodeEncodeError:  # a page can say half a character, and no message can
                self.send(json.loads(json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")))

    def open(self) -> None:
        super().open()
        if self.comm is not None:
            serve_beside_cells(self.comm.comm_id)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _is_short(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= 64
