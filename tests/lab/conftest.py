"""A real JupyterLab in Debian's Chromium, as a user has it.

All modules of this folder that a process runs in sequence share one server, `lab`, and one page with JupyterLab,
`window`. `notebook("x = 1", "x + 1")` opens a new notebook with these cells; `same_notebook` puts them into one that
the tests of a module share, with its kernel and its ranks. A test fails on an error in the page, and if a process
outlives the kernel. `check_accessibility(locator)` asserts that an element and its content are accessible;
`set_theme(window, dark=True)` of window.py changes the colours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import TypeVar, cast

import pytest
from playwright.sync_api import Browser, Error, Locator, expect

from .accessibility import AXE, require_accessible
from .notebook import Notebook, write_notebook
from .pictures import are_for_docs
from .server import Lab, end, running_lab
from .window import LOOK_LIMIT_S, Window, running_browser, set_theme

_Opened = TypeVar("_Opened")
_opened: dict[str, object] = {}  # what the modules of this folder share, by name
_to_close = contextlib.ExitStack()


def _shared(name: str, opening: Callable[[], AbstractContextManager[_Opened]]) -> _Opened:
    """Open it on the first request."""
    if name not in _opened:
        _opened[name] = _to_close.enter_context(opening())
    return cast("_Opened", _opened[name])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Stop the server and the browser after all else of the folder's last test.

    While Playwright runs, this thread has an event loop, and the tests of other rooms need one of their own.
    """
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path.parent != item.path.parent:
            _opened.clear()
            _to_close.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--kernel-python"):
        items[:] = [item for item in items if "kernel_python" not in getattr(item, "fixturenames", ())]


@pytest.fixture(scope="session")
def kernel_python(request: pytest.FixtureRequest) -> str:
    """The Python of the kernels; only `make test-kernels` runs the tests that request it."""
    return str(request.config.getoption("--kernel-python"))


@pytest.fixture(scope="module")
def lab(
    needs_debian: Callable[..., None], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Lab:
    needs_debian("chromium")
    python = request.config.getoption("--kernel-python")
    return _shared("lab", lambda: running_lab(tmp_path_factory.mktemp("lab"), kernel_python=python))


@pytest.fixture(scope="module")
def browser(needs_debian: Callable[..., None]) -> Browser:
    needs_debian("chromium")
    return _shared("browser", running_browser)


@pytest.fixture(scope="module")
def window(lab: Lab, browser: Browser) -> Window:
    return _shared("window", lambda: contextlib.closing(Window(browser, lab)))


@pytest.fixture
def sharp_window(lab: Lab, browser: Browser) -> Generator[Window]:
    """A narrow window without a sidebar, for pictures. Request it before `notebook`, so that it closes afterwards."""
    window = Window(browser, lab, width=880, height=1000, sharpness=2)
    try:
        window.show_sidebar(is_shown=False)
        yield window
        assert window.errors == [], "errors in the page"
    finally:
        window.close()


@pytest.fixture
def narrow_window(window: Window, request: pytest.FixtureRequest) -> Generator[Window]:
    """The sharp window for pictures that go into the docs; otherwise the open shared window, made narrow."""
    if are_for_docs():
        yield request.getfixturevalue("sharp_window")
        return
    before = window.page.viewport_size
    assert before
    window.page.set_viewport_size({"width": 880, "height": 1000})
    window.show_sidebar(is_shown=False)
    try:
        yield window
    finally:
        window.show_sidebar(is_shown=True)
        window.page.set_viewport_size(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Fail a test on an error that it raised in the page."""
    result = yield
    _require_no_errors()
    return result


@pytest.fixture(autouse=True)
def no_error_in_the_page(request: pytest.FixtureRequest) -> Generator[None]:
    """Check, after all else of a test, that closing what it opened raised no error in the shared page.

    After a failed test the page is reloaded: what the test has left open there would make other tests fail.
    """
    expect.set_options(timeout=LOOK_LIMIT_S * 1000)
    num_failed = request.session.testsfailed
    yield
    try:
        if request.session.testsfailed > num_failed and isinstance(window := _opened.get("window"), Window):
            window.load()
            set_theme(window, dark=False)
    finally:
        _require_no_errors()


def _require_no_errors() -> None:
    if isinstance(window := _opened.get("window"), Window):
        errors, window.errors[:] = window.errors[:], []
        assert errors == [], "errors in the page"


@pytest.fixture
def notebook(lab: Lab, window: Window, request: pytest.FixtureRequest) -> Generator[Callable[..., Notebook]]:
    """Return a function that opens a new notebook with the given cells, in a folder of its own."""
    before = lab.processes()
    opened: list[Notebook] = []

    def open_notebook(*sources: str, window: Window = window) -> Notebook:
        folder = lab.root / request.node.path.stem / f"{request.node.name}-{len(opened)}"
        folder.mkdir(parents=True)
        write_notebook(folder / "notebook.ipynb", sources)
        opened.append(Notebook(window, folder / "notebook.ipynb", folder=lab.root))
        return opened[-1]

    try:
        yield open_notebook
    finally:
        try:
            for nb in opened:
                _take_picture(nb)
                nb.close()
        finally:
            left = end(lab.processes() - before)
    assert left == [], "processes that outlive the notebook's kernel"


def _take_picture(nb: Notebook) -> None:
    """Take a picture of the page, for debugging a failed test."""
    with contextlib.suppress(Error):
        nb.page.screenshot(path=nb.path.with_name("page.png"))


@pytest.fixture(scope="module")
def kept_notebooks(lab: Lab, window: Window) -> Generator[list[Notebook]]:
    """The notebook of the module, once a test has opened it."""
    before, kept = lab.processes(), list[Notebook]()
    yield kept
    for nb in kept:
        nb.close()
    assert end(lab.processes() - before) == [], "processes that outlive the notebook's kernel"


@pytest.fixture
def same_notebook(
    lab: Lab, window: Window, kept_notebooks: list[Notebook], request: pytest.FixtureRequest
) -> Generator[Callable[..., Notebook]]:
    """Return a function like that of `notebook`, for tests that leave the kernel unchanged: they share one notebook.

    Its folder is emptied before each test. After a failed test the next one gets another notebook and kernel.
    """
    num_failed = request.session.testsfailed

    def open_notebook(*sources: str) -> Notebook:
        if kept_notebooks:
            (nb,) = kept_notebooks
            for file in nb.path.parent.iterdir():
                if file.is_file() and file != nb.path:
                    file.unlink()
            nb.show_again(*sources)
        else:
            folder = lab.root / request.node.path.stem / f"{request.node.name}-kept"
            folder.mkdir(parents=True)
            write_notebook(folder / "notebook.ipynb", sources)
            kept_notebooks.append(Notebook(window, folder / "notebook.ipynb", folder=lab.root))
        return kept_notebooks[0]

    yield open_notebook
    if request.session.testsfailed > num_failed and kept_notebooks:
        nb = kept_notebooks.pop()
        _take_picture(nb)
        nb.close()


@pytest.fixture
def check_accessibility(window: Window) -> Callable[[Locator], None]:
    """Return a function that asserts that an element is accessible, in the light and in the dark theme."""
    if not AXE.exists():
        pytest.skip(f"needs {AXE.name}: run 'make test-deps', and 'apt-get install npm' as root where there is no npm")
    return lambda element: require_accessible(window, element)
