"""The base of all forms and views: a widget updated from any thread, usable while a cell runs, saved as plain HTML.

The widget's state holds the view's program alone. The content travels as messages: a page that opens (first display,
reload, second view) sends hello and receives the whole content. So no saved state holds a secret.
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

_TURN_S = 0.1  # least time between two messages to pages
_PAGE_SILENT_S = 30.0  # three beats of a page
_LOOK_S = 5.0  # how often silent pages are looked for, while there are pages
_MOST_PAGES = 20
_GREET_S = 1.0  # time in which at most _MOST_PAGES hellos are answered; a page without an answer repeats its hello
_MOST_APPENDED = 5000  # items of a list per message: a page shows a window of a log, not the whole log
_SHARED = Path(__file__).with_name("shared")
_ROOT = re.compile(r"\.dt(?![\w-])")  # style sheets apply to the whole page: this limits a view's own one to the view
_PROGRAM_END = "\nexport default { render };\n"


class LiveView(anywidget.AnyWidget):
    """A view. A subclass defines `name`, `state`, `settled` and actions; ``NAME.js`` and ``NAME.css`` are its page.

    The two files are next to the module of the subclass, and NAME is its class attribute ``name``. board_view.py and
    board_view.js in detrain_nb.widgets are an example. `publish` and `append` may be called in any thread.
    """

    name: ClassVar[str] = ""
    more: ClassVar[tuple[str, ...]] = ()  # further files of a large view, loaded before its own
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
        self._sending = threading.RLock()  # a change is sent after the state that a page begins with
        self._wake, self._closing, self._has_page = threading.Event(), threading.Event(), threading.Event()
        self._pump: threading.Thread | None = None
        self._workers: dict[bool, threading.Thread] = {}  # by is_beside
        self.work_told: dict[str, Any] | None = None  # work that is running or has failed last, for pages that open
        self._is_settled = False
        self._pages: dict[str, float] = {}  # when each was last heard from
        self._greeted: deque[float] = deque(maxlen=_MOST_PAGES)  # when states were sent
        self._is_late = False  # its messages wait for the running cell
        self._pending: dict[str, tuple[str, Any]] = {}  # as JSON, and the value
        self._appended: dict[str, list[Any]] = {}
        self._told: dict[str, str] = {}  # the JSON of each part that was sent last
        self._displays = Displays()
        super().__init__()
        self.on_msg(self._hear)
        LiveView._all.add(self)

    # ---- what a view gives

    def state(self) -> dict[str, Any]:
        """Return everything that a page shows, as plain JSON, for a page that opens."""
        raise NotImplementedError

    def settled(self) -> Settled:
        """Return the form of the view that a saved notebook keeps, for readers without a kernel."""
        raise NotImplementedError

    def on_pages(self, *, are_there: bool) -> None:
        """Start sampling when the first page opens (``are_there``), or stop it after the last page has closed.

        By default it does nothing.
        """

    # ---- what a view does

    def publish(self, part: str, value: Any) -> None:
        """Send the new value of ``part`` to all pages; the latest value wins, and an equal value is not sent again.

        Raises: ValueError, TypeError when the value is not plain JSON.
        """
        written = json.dumps(value, allow_nan=False)
        with self._lock:
            if self._pages and not self._closing.is_set():
                self._pending[part] = (written, value)
                self._start_pump()
        self._wake.set()

    def append(self, part: str, items: list[Any]) -> None:
        """Send new items of the list ``part`` to all pages; of very many, the last ones."""
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
        """Run ``do`` in a thread of the view; pages see its progress and its result in the part ``work``.

        ``is_told`` False: ``do`` itself informs the pages, and raises nothing. ``is_beside``: it may run at the same
        time as other work. Raises: Refused while other work of this kind is running.
        """
        with self._lock:
            before = self._workers.get(is_beside)
            if before is not None and before.is_alive():
                raise Refused(f"{before.name} is still running")
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
        """Describe failed work for pages: the line ``error``, and what the page can do about it."""
        return {"error": one_line(describe_failure(exc))}

    def tell_work(self, told: dict[str, Any] | None) -> None:
        """Send the progress of the work to all pages; None removes it."""
        self.work_told = told if told and told["is"] != "done" else None
        self.publish("work", told)

    def wait_for_page(self, limit_s: float) -> bool:
        """Wait until a page shows the view; returns False when none does within ``limit_s`` seconds."""
        return self._has_page.wait(limit_s)

    def settle(self) -> None:
        """Replace every display of the view with plain HTML, once, in the saved notebook too."""
        with self._lock:
            if self._is_settled:
                return
            self._is_settled = True
        self._tell_news()  # pages that keep the live display have the latest state
        self._put_settled()
        self.close()

    def _put_settled(self) -> None:
        self._displays.settle(self.settled)

    @staticmethod
    def settle_all() -> None:
        """Settle every view of this process, for a notebook whose kernel ends.

        Views that have settled are displayed again: `detrain-nb run` misses displays that arrive between two cells.
        """
        with contextlib.ExitStack() as each_in_turn:  # even if one of them raises
            for view in list(LiveView._all):
                each_in_turn.callback(view._put_settled if view._is_settled else view.settle)

    def close(self) -> None:
        """End the view's threads. Pages lose the view; those without its settled form keep showing the last state."""
        if not hasattr(self, "_closing"):  # its construction has failed: ipywidgets closes it all the same
            return
        is_again = self._closing.is_set()
        self._closing.set()
        with self._lock:
            was_shown = bool(self._pages)
            self._pages.clear()
        self._wake.set()
        if was_shown:
            self.on_pages(are_there=False)
        if is_again or not self._is_settled:  # a settled view stays: a reloaded page needs it to place the settled form
            if self.layout is not None:
                self.layout.close()  # a separate widget, which would stay in the kernel and the saved notebook
            super().close()

    # ---- how it is displayed

    def _ipython_display_(self, **_: Any) -> None:
        for shown in self.new_display()():
            display(shown["data"], metadata=shown["metadata"], raw=True, **shown["transient"])

    def new_display(self) -> Callable[[], list[dict[str, Any]]]:
        """Add a display of the view, which settles as the others do; returns a function of its message contents."""
        return partial(self._outputs, self._displays.add())

    def _outputs(self, place: Display) -> list[dict[str, Any]]:
        if self._is_settled:
            return [place.settled(self.settled())]
        widget = super()._repr_mimebundle_()
        data, metadata = widget if isinstance(widget, tuple) else (widget or {}, {})
        return place.live(data, metadata, self.settled())

    def __repr__(self) -> str:
        return self.settled().text

    # ---- messages from pages

    def _handle_msg(self, message: dict[str, Any]) -> None:
        """Handle messages of our own and requests for the state; ignore all others that ipywidgets would handle.

        A page could otherwise `update` the view's program, for all pages and in the saved notebook.
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
            case "beat":  # it was dropped as silent, and has missed messages
                self._tell({"tell": "again", "page": page})
            case "bye":
                self._forget(page)
            case "call" if _is_short(call := content.get("call")):
                if page not in self._pages and not self._is_settled:  # it was dropped as silent: do what it asks
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
            if page not in self._pages:  # else messages already arrive beside the cell
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
                self._send_pending()  # else appended items would follow a state that already contains them
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
            if is_back:  # a page has opened meanwhile, and its sampling may have been stopped
                self.on_pages(are_there=True)

    def _answer(self, page: str, call: str, content: Mapping[str, Any]) -> None:
        name = content.get("action")
        said: dict[str, Any] = {"tell": "answer", "page": page, "call": call}
        try:
            if self._is_settled:
                raise Refused("this view is closed: run its cell again")
            if page not in self._pages:
                raise Refused(f"{_MOST_PAGES} other pages show this view: close some and reload this page")
            wanted = self._actions.get(name) if isinstance(name, str) else None
            if wanted is None:
                raise Refused("this view has no such action: reload the page")
            said["value"] = wanted.call(self, content.get("arguments"))
        except Exception as exc:  # noqa: BLE001  nothing else would show it: the page does
            said["error"] = one_line(describe_failure(exc))
        self._tell(said)

    # ---- messages to pages

    def _start_pump(self) -> None:
        """Start the thread that sends messages. The caller holds the lock."""
        if self._pump is None:
            self._pump = threading.Thread(target=self._run_pump, name=f"detrain_nb {self.name}", daemon=True)
            self._pump.start()

    def _run_pump(self) -> None:
        while self._tell_news():
            self._wake.wait(_LOOK_S)
            self._wake.clear()
            self._look_for_pages()

    def _tell_news(self) -> bool:
        """Send pending messages, then pause for other threads; returns whether pages are left."""
        with self._sending:
            is_shown, is_sent = self._send_pending()
        if is_sent:
            self._closing.wait(_TURN_S)
        return is_shown

    def _send_pending(self) -> tuple[bool, bool]:
        """Send pending messages; returns whether pages are there, and whether something was sent."""
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
        if self._is_late:  # a page's beats are held up by the running cell
            return
        now = time.monotonic()
        for page, heard in [*self._pages.items()]:
            if now - heard > _PAGE_SILENT_S:
                self._forget(page)

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(AttributeError):  # closed meanwhile: the comm is gone
            try:
                self.send(message)
            except UnicodeEncodeError:  # a lone surrogate from a page cannot be encoded
                self.send(json.loads(json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")))

    def open(self) -> None:
        super().open()
        if self.comm is not None:
            serve_beside_cells(self.comm.comm_id)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _is_short(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= 64
