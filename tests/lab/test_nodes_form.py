"""Nodes are created, tested, saved and started in a real JupyterLab, by typing and clicking alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, WebSocket, expect

from detrain_nb.spec.nodes_file import read_nodes

from ..testbed.testbed import Testbed
from .narrow import require_fits
from .notebook import Notebook
from .pictures import take_picture
from .window import Window, set_theme

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

OpenNotebook = Callable[..., Notebook]
CheckAccessibility = Callable[[Locator], None]

_LONG_MS = 90_000
_SECRET = "hush-7391-hush"
_LOAD = "%load_ext detrain_nb"


def _home_of(testbed: Testbed, home: Path) -> str:
    """Return a cell that lets the kernel's user reach the hosts of the testbed and no others."""
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "config").write_text(
        f"Include {testbed.inventory.ssh_config}\nHost <b>bold</b> plain\n  Port 2222\n"
    )
    return f"import os; os.environ['HOME'] = {str(home)!r}\n{_LOAD}"


def _row(view: Locator, label: str) -> Locator:
    return view.get_by_role("listitem").filter(has=view.page.get_by_role("button", name=re.compile(f"^{label}: ")))


def _form(view: Locator, label: str) -> Locator:
    return view.get_by_role("group", name=label, exact=True)


def _fill(view: Locator, label: str, **texts: str) -> None:
    for name, text in texts.items():
        _form(view, label).get_by_label(re.compile(f"^{name.replace('_', ' ')}")).fill(text)


def _look_at(window: Window, view: Locator, name: str, folder: Path, check: CheckAccessibility) -> None:
    """Take pictures in both themes and check accessibility in both; everything must fit a narrow page, too."""
    for theme in ("dark", "light"):
        set_theme(window, dark=theme == "dark")
        take_picture(view, f"{name}-{theme}", folder)
    require_fits(view)
    check(view)


def _focused(page: Page) -> str:
    """Return the accessible name of the focused element."""
    name: str = page.evaluate(
        "() => { const at = document.activeElement;"
        " return at.getAttribute('aria-label') || at.labels?.[0]?.textContent || at.textContent; }"
    )
    return name


def test_two_ranks_here_are_started_by_clicking_and_run_a_cell(
    window: Window, notebook: OpenNotebook, check_accessibility: CheckAccessibility, tmp_path: Path
) -> None:
    nb = notebook(_LOAD, "%distributed nodes", "%%distributed\nprint(rank, world_size)")
    nb.run(0)
    nb.run(1)
    view = nb.cell(1).locator(".dt")
    expect(view.get_by_text("No nodes yet")).to_be_visible()
    _look_at(window, view, "nodes-empty", tmp_path, check_accessibility)
    view.get_by_role("button", name="2 ranks on this machine").click()
    expect(_row(view, "localhost").get_by_text("auto, 2 ranks")).to_be_visible()
    view.get_by_role("button", name="Start session").click()
    expect(view.get_by_role("heading", name="Starting session")).to_be_visible()
    _wait_until_settled(nb, "2 ranks on 1 node")
    nb.run(2)
    assert nb.text(2) == "[localhost:0] 0 2\n[localhost:1] 1 2\n"


def test_nodes_over_ssh_are_typed_tested_saved_and_started(
    testbed: Testbed,
    window: Window,
    notebook: OpenNotebook,
    check_accessibility: CheckAccessibility,
    tmp_path: Path,
) -> None:
    frames: list[str] = []

    def listen(socket: WebSocket) -> None:
        socket.on("framereceived", lambda frame: frames.append(str(frame)))

    window.page.on("websocket", listen)
    nb = notebook(_home_of(testbed, tmp_path / "home"), "%distributed nodes", "%%distributed\nprint(rank, world_size)")
    window.page.remove_listener("websocket", listen)  # the kernel of the new notebook is connected
    nb.run(0)
    nb.run(1)
    view = nb.cell(1).locator(".dt")
    _import_first_host(view, window, tmp_path, check_accessibility)
    _fill(view, "h0", Python=sys.executable, Key_file=str(_lock_key(testbed, tmp_path, "first")))
    _form(view, "h0").get_by_role("radio", name="cpu").click()
    view.get_by_role("button", name="h0: close").click()

    view.get_by_role("button", name="Add node").click()
    expect(view.get_by_role("status").get_by_text("new node, Host: is missing: give a host name")).to_be_visible()
    window.page.keyboard.type("h1")  # the host field of a new node has the focus
    _fill(view, "h1", Python=sys.executable)
    _form(view, "h1").get_by_role("radio", name="cpu").click()
    testbed.cut("h0", "h1")
    view.get_by_role("button", name="Test all").click()
    passphrase = view.get_by_label(re.compile("^Passphrase of "))
    expect(passphrase).to_be_focused()
    expect(_row(view, "h1")).to_contain_text("waiting for your passphrase")
    passphrase.fill(_SECRET)
    passphrase.press("Enter")
    expect(_row(view, "h0").get_by_text("not h1: no answer in time")).to_be_visible(timeout=_LONG_MS)
    expect(_row(view, "h0").get_by_text("To do:")).to_be_visible()
    expect(_row(view, "h0").get_by_text("1 failed")).to_be_visible()
    expect(view.get_by_role("button", name="Test all")).to_be_focused()
    _check_wrong_port(view, window, tmp_path, check_accessibility)
    testbed.repair()

    view.get_by_role("button", name="Test all").click()
    for host in ("h0", "h1"):
        expect(_row(view, host).get_by_text("1 failed")).to_have_count(0, timeout=_LONG_MS)
        expect(_row(view, host).get_by_text(re.compile(r"\d+ checks passed|1 warning")).first).to_be_visible(
            timeout=_LONG_MS
        )
    _save_and_meet_another_writer(view, nb.path.parent / "nodes.toml")

    _fill(view, "h1", Key_file=str(_lock_key(testbed, tmp_path, "second")))
    _start_and_cancel(view, passphrase)
    window.page.keyboard.press("Enter")
    expect(view.get_by_role("heading", name="Starting session")).to_be_visible()
    expect(passphrase).to_be_focused()
    passphrase.fill(_SECRET)
    view.get_by_role("button", name="Use it").click()
    expect(view.get_by_role("table", name="Phases of the start")).to_contain_text("of 1", timeout=_LONG_MS)
    view.screenshot(path=tmp_path / "nodes-start-light.png")
    _wait_until_settled(nb, "2 ranks on 2 nodes")
    nb.run(2)
    assert nb.text(2) == "[h0:0] 0 2\n[h1:1] 1 2\n"
    nb.save()
    assert _SECRET not in nb.path.read_text()
    assert any("checks passed" in frame or "no answer in time" in frame for frame in frames)  # the frames were recorded
    assert not any(_SECRET in frame for frame in frames)


def _start_and_cancel(view: Locator, passphrase: Locator) -> None:
    """The focus moves along; the start asks for a passphrase and waits."""
    start = view.get_by_role("button", name="Start session")
    start.click()
    expect(passphrase).to_be_focused()
    passphrase.press("Shift+Tab")
    expect(view.get_by_role("button", name="Cancel")).to_be_focused()
    view.page.keyboard.press("Enter")
    expect(view.get_by_text("The start was cancelled")).to_be_visible()
    expect(start).to_be_focused()


def _wait_until_settled(nb: Notebook, ranks: str) -> None:
    """Wait until plain HTML replaces the view: that is what the notebook keeps."""
    expect(nb.cell(1).locator(".dt")).to_have_count(0, timeout=_LONG_MS)
    assert re.match(rf"Session \S+: {ranks}, ready after [\d.]+ s\n%distributed board shows its ranks", nb.text(1))


def _lock_key(testbed: Testbed, folder: Path, name: str) -> Path:
    """Return a key that logs into the hosts and needs a passphrase."""
    shutil.copy(testbed.hosts[0].identity_file, key := folder / name)
    change = ["ssh-keygen", "-q", "-p", "-N", _SECRET, "-f", str(key)]
    subprocess.run(change, check=True, capture_output=True, timeout=20)
    return key


def _import_first_host(view: Locator, window: Window, folder: Path, check: CheckAccessibility) -> None:
    view.get_by_role("button", name=re.compile(r"^Import from .+ \(\d+ hosts\)$")).click()
    view.get_by_label("Filter hosts").fill("h")
    expect(view.get_by_role("button", name="Add 0 nodes")).to_have_attribute("aria-disabled", "true")
    view.get_by_role("checkbox", name="h0").check()
    _look_at(window, view, "nodes-import", folder, check)
    view.get_by_role("button", name="Add 1 node").click()
    expect(_row(view, "h0")).to_be_visible()
    expect(view.get_by_label("Filter hosts")).to_have_count(0)
    window.page.keyboard.press("Enter")  # the line of the new node has the focus
    expect(_form(view, "h0")).to_be_visible()


def _check_wrong_port(view: Locator, window: Window, folder: Path, check: CheckAccessibility) -> None:
    port = _form(view, "h1").get_by_label(re.compile("^Port"))
    port.fill("70000")
    expect(port).to_have_attribute("aria-invalid", "true")
    expect(_form(view, "h1").get_by_text("give a number from 1 to 65535")).to_be_visible()
    expect(_row(view, "h1").get_by_text("1 invalid field")).to_be_visible()
    start = view.get_by_role("button", name="Start session")
    expect(start).to_have_attribute("aria-disabled", "true")
    expect(start).to_have_attribute("title", "Correct 1 field first")
    python = _form(view, "h1").get_by_label(re.compile("^Python"))
    python.fill("/opt/venv/bin/python")  # pictures must not show a path of this machine
    port.focus()
    _look_at(window, view, "nodes-form", folder, check)
    python.fill(sys.executable)
    view.get_by_role("button", name="h1: close").click()
    view.get_by_role("button", name="Go there").click()
    expect(port).to_be_focused()
    expect(port).to_have_value("70000")
    port.fill("")
    expect(view.get_by_text("invalid field")).to_have_count(0)


def _save_and_meet_another_writer(view: Locator, path: Path) -> None:
    view.get_by_role("button", name="Save", exact=True).click()
    view.get_by_label("Save as").press("Enter")
    expect(view.get_by_text("nodes.toml has 2 nodes")).to_be_visible()
    assert [node.host for node in read_nodes(path)] == ["h0", "h1"]
    assert {node.python for node in read_nodes(path)} == {sys.executable}
    path.write_text(f"# mine\n{path.read_text()}")
    view.get_by_role("button", name="Save", exact=True).click()
    expect(view.get_by_text("nodes.toml has changed since it was read")).to_be_visible()
    assert "# mine" in path.read_text()
    view.get_by_role("button", name="Overwrite").click()
    expect(view.get_by_text("the previous file is nodes.toml.before")).to_be_visible()
    assert "# mine" not in path.read_text()
    view.get_by_role("button", name="Close", exact=True).click()


def test_form_is_used_by_keyboard_alone_and_two_pages_lose_nothing(
    window: Window, notebook: OpenNotebook, tmp_path: Path
) -> None:
    nb = notebook(
        "from detrain_nb import widgets\nfrom detrain_nb.spec import Node\n"
        "form = widgets.nodes([Node(host='a'), Node(host='b', port=23)]); form",
        "form",
        "form.nodes",
    )
    nb.run(0)
    view, page = nb.cell(0).locator(".dt"), window.page
    view.get_by_role("button", name="a: open").focus()
    _walk_rows(view, page)
    _type_in_two_pages(nb, view)
    _open_lease(view, tmp_path / "lease.json")


def _walk_rows(view: Locator, page: Page) -> None:
    press = page.keyboard.press
    press("Enter")
    expect(view.get_by_role("button", name="a: close")).to_be_focused()
    press("Space")
    expect(view.get_by_role("button", name="a: open")).to_be_focused()
    for _ in range(3):  # Test, Move up, Move down
        press("Tab")
    expect(view.get_by_role("button", name="Move a down")).to_be_focused()
    press("Enter")
    expect(view.get_by_role("listitem").first).to_contain_text("b:23")
    expect(view.get_by_role("button", name="Move a down")).to_be_focused()
    press("Tab")
    press("Enter")  # Duplicate: the copy is open, its host field has the focus
    expect(view.get_by_role("group", name="a").get_by_label("Host", exact=True)).to_be_focused()
    press("Control+A")
    page.keyboard.type("c<b>d")
    expect(view.get_by_role("button", name="c<b>d: close")).to_be_visible()
    press("Backspace")
    press("Backspace")
    press("Backspace")
    press("Backspace")
    expect(view.get_by_role("button", name="c: close")).to_be_visible()
    for _ in range(2):
        press("Tab")
    assert "User" in _focused(page)
    view.get_by_role("button", name="Remove a").focus()
    press("Enter")
    expect(view.get_by_role("button", name="c: close")).to_be_focused()
    expect(view.get_by_text("a was removed.")).to_be_visible()
    view.get_by_role("button", name="Undo").focus()
    press("Space")
    expect(view.get_by_role("button", name="a: open")).to_be_focused()
    view.get_by_role("button", name="Remove a").press("Enter")
    undo, other = view.get_by_role("button", name="Undo"), view.get_by_role("button", name="Test all")
    undo.evaluate("(undo, other) => { undo.focus(); undo.click(); other.focus(); }", other.element_handle())
    expect(undo).to_have_count(0)
    expect(view.get_by_role("button", name="a: open")).to_be_visible()
    expect(other).to_be_focused()  # a user who has moved on keeps the focus


def _type_in_two_pages(nb: Notebook, view: Locator) -> None:
    nb.run(1)
    other = nb.cell(1).locator(".dt")
    other.get_by_role("button", name="a: open").click()
    view.get_by_role("button", name="a: open").click()
    mine, theirs = (each.get_by_role("group", name="a").get_by_label("User optional") for each in (view, other))
    mine.fill("alice")
    expect(theirs).to_have_value("alice")
    # both pages are typed into before either receives the other's text
    nb.js(
        "() => { const inputs = [...document.querySelectorAll('.dt .node .form input')].filter(e =>"
        " e.labels[0]?.textContent.startsWith('User') && e.value === 'alice');"
        " inputs.forEach((e, i) => { e.value = ['anna', 'bert'][i];"
        " e.dispatchEvent(new Event('input')); e.dispatchEvent(new Event('blur')); }); }"
    )
    note = other.get_by_text("Another tab changed this form.")
    expect(note).to_be_visible()
    expect(mine).to_have_value("anna")
    expect(theirs).to_have_value("bert")
    other.get_by_role("button", name="Apply mine").click()
    expect(mine).to_have_value("bert")
    expect(note).to_have_count(0)
    nb.run(2)
    assert "user='bert'" in nb.text(2)


def _open_lease(view: Locator, path: Path) -> None:
    """The nodes of a lease share an address, which may be long: only the port at its end distinguishes them."""
    host = f"provider.{'of-a-lease.' * 9}example.org"
    ports = {"node-0": 31022, "node-1": 31023}
    ways = {name: [{"host": host, "port": 2222, "externalPort": port}] for name, port in ports.items()}
    path.write_text(json.dumps({"forwarded_ports": ways}))
    view.get_by_role("button", name="Open nodes file…").click()
    view.get_by_label("Open nodes file", exact=True).fill(str(path))
    view.get_by_role("button", name="Open", exact=True).click()
    expect(view.get_by_text(f"{path}: 2 nodes")).to_be_visible()
    expect(view.get_by_role("listitem")).to_have_count(2)
    for name, number in ports.items():
        where = _row(view, name).get_by_title(f"{host}:{number}")
        expect(where).to_contain_text(host)
        expect(port := where.get_by_text(f":{number}", exact=True)).to_be_visible()
        inner, outer = port.bounding_box(), where.bounding_box()
        assert inner and outer and inner["width"] > 0
        assert inner["x"] + inner["width"] <= outer["x"] + outer["width"] + 0.5, "the port is cut off"
