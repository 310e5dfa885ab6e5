"""A whole session through each transport (conftest.py): the user's actions, and the processes that are left."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from detrain_nb import Session
from detrain_nb.agents import AGENT_MODULE
from detrain_nb.errors import CellInterrupted, DetrainError, SessionError
from detrain_nb.session.state.cell_observer import CellObserver

from .conftest import MakeTransport

_LIMIT_S = 20.0


class Nodes:
    """A session to start and attach to; its name is in the argv or the environment of all its processes."""

    def __init__(self, make_transport: MakeTransport) -> None:
        self.name = f"contract-{uuid.uuid4().hex[:8]}"
        self._make = make_transport
        self.opened: list[Session] = []

    def start(self) -> Session:
        options = self._options()
        env = {"OF_SESSION": self.name}
        return self._note(Session.start(2, device="cpu", name=self.name, env=env, sync=False, **options))

    def attach(self) -> Session:
        return self._note(Session.attach(self.name, sync=False, **self._options()))

    def processes(self) -> dict[int, bytes]:
        """Return the argv of each process of the session by its pid, as seen from this machine."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                argv = (folder / "cmdline").read_bytes()
                is_ours = self.name.encode() in argv + (folder / "environ").read_bytes()
            except OSError:  # the process has exited
                continue
            if is_ours and int(folder.name) != os.getpid():
                found[int(folder.name)] = argv
        return found

    def wait_until_gone(self) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while left := self.processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def _note(self, session: Session) -> Session:
        self.opened.append(session)
        return session

    def _options(self) -> dict[str, Any]:
        transport = self._make()
        return {} if transport.is_this_machine else {"nodes": [transport]}


@pytest.fixture
def nodes(cold_starts: None, make_transport: MakeTransport) -> Iterator[Nodes]:
    used = Nodes(make_transport)
    try:
        yield used
    finally:
        for session in used.opened:
            session.stop(cold=True)
    used.wait_until_gone()


class Shown(CellObserver):
    """The output that a front end would show, as it arrives."""

    def __init__(self, on_output: Callable[[str], object] = lambda text: None) -> None:
        self.text = ""
        self._on_output = on_output

    def output(self, rank: int, stream: str, text: str) -> None:
        self.text += text
        self._on_output(text)

    def display(self, rank: int, bundle: object, display_id: str, is_update: bool) -> None: ...
    def clear(self, rank: int, wait: bool) -> None: ...


def test_cells_run_and_what_they_print_comes_while_they_run(nodes: Nodes, tmp_path: Path) -> None:
    session, sent = nodes.start(), threading.Event()
    assert session.run_cell("t = torch.ones(1) * rank\ndist.all_reduce(t)\nt.item()").values == {0: 1.0, 1: 1.0}
    gate = f"contract-{uuid.uuid4().hex[:8]}"

    def answer(text: str) -> None:
        """Send the file that ends the cell: the cell still runs while its output is shown."""
        if "waiting" in text and not sent.is_set():
            sent.set()
            threading.Thread(target=session.files.put, args=(tmp_path / gate,)).start()

    (tmp_path / gate).write_text("go")
    code = f"import os, time\nprint('waiting', flush=True)\nwhile not os.path.exists('{gate}'): time.sleep(0.01)\nrank"
    shown = Shown(answer)
    try:
        assert session.run_cell(code, observer=shown, timeout_s=_LIMIT_S).values == {0: 0, 1: 1}
    finally:
        session.run_cell(f"if rank == 0 and os.path.exists('{gate}'): os.unlink('{gate}')")
    assert sent.is_set() and shown.text.count("waiting") == 2


def test_values_and_files_go_there_and_back(nodes: Nodes, tmp_path: Path) -> None:
    session = nodes.start()
    tensor = torch.arange(1 << 20)
    session.push({"pushed": tensor, "words": ["a", 1]})
    session.run_cell("twice = 2 * pushed")
    assert all(torch.equal(value, 2 * tensor) for value in session.pull("twice").values())
    assert session.pull("words") == {0: ["a", 1], 1: ["a", 1]}
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    (tmp_path / "tree" / "inner" / "file").write_bytes(os.urandom(2 << 20))
    target = f"/var/tmp/{nodes.name}"
    try:
        (put,) = session.files.put(tmp_path / "tree", target).values()
        assert (put.files, put.size_bytes) == (1, 2 << 20)
        assert session.run_cell(f"import os; os.path.getsize('{target}/tree/inner/file')", ranks=0).values == {
            0: 2 << 20
        }
        session.files.get(f"{target}/tree", tmp_path / "back")
    finally:
        session.run_cell(f"import shutil; shutil.rmtree('{target}')", ranks=0)
    there, back = (folder / "inner" / "file" for folder in (tmp_path / "tree", tmp_path / "back" / "tree"))
    assert back.read_bytes() == there.read_bytes()


def test_stop_button_frees_ranks_that_keep_their_variables(nodes: Nodes) -> None:
    session = nodes.start()
    session.run_cell("kept = rank")
    pressed = threading.Event()

    def press(text: str) -> None:
        if not pressed.is_set():
            pressed.set()
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

    code = "import time\nprint('begun', flush=True)\nif rank == 0: dist.barrier()\nelse: time.sleep(60)"
    with pytest.raises(CellInterrupted):
        session.run_cell(code, observer=Shown(press))
    assert pressed.is_set()
    assert session.run_cell("kept").values == {0: 0, 1: 1}


def test_notebook_that_left_comes_back_and_is_shown_what_it_missed(nodes: Nodes) -> None:
    session = nodes.start()
    session.run_cell("import os, time\nkept = os.getpid()")
    kept = session.pull("kept")
    running = threading.Thread(target=_run_until_left, args=(session,))
    running.start()
    deadline = time.monotonic() + _LIMIT_S
    while not (cells := list(session.log.running_cells)) or not session.log.text(cells[0], 0):
        assert time.monotonic() < deadline  # wait until the cell prints: it has then been sent
        time.sleep(0.01)
    session.detach()
    running.join(_LIMIT_S)
    seen = {rank: session.log.text(cells[0], rank) for rank in (0, 1)}
    # The cell prints some six lines while no notebook is attached: these are missed, those after the attach are not.
    time.sleep(1.0)
    again = nodes.attach()
    while again.log.running_cells:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert again.pull("kept") == kept
    (cell,) = again.log.missed
    whole = "".join(f"{n}\n" for n in range(20))
    for rank, shown in seen.items():
        missed = again.log.text(cell, rank)  # output shown live may have been acknowledged before the detach
        assert whole.startswith(shown) and whole.endswith(missed), (shown, missed)
        assert len(shown) + len(missed) >= len(whole), (shown, missed)


def _run_until_left(session: Session) -> None:
    with pytest.raises(DetrainError):
        session.run_cell("for n in range(20):\n    print(n)\n    time.sleep(0.15)")


def test_killed_agent_ends_the_session_and_leaves_no_process(nodes: Nodes) -> None:
    session = nodes.start()
    session.run_cell("1")
    (agent,) = [pid for pid, argv in nodes.processes().items() if AGENT_MODULE.encode() in argv]
    os.kill(agent, signal.SIGKILL)
    with pytest.raises(DetrainError, match=r"agent|ended|start another"):
        session.run_cell("import time; time.sleep(30)")
    nodes.wait_until_gone()
    with pytest.raises(SessionError, match=nodes.name):
        nodes.attach()


def test_session_that_was_stopped_leaves_no_process(nodes: Nodes) -> None:
    session = nodes.start()
    session.run_cell("1")
    assert len(nodes.processes()) > 4, "agent, launcher, workers, interpreters"
    session.stop()
    nodes.wait_until_gone()
    with pytest.raises(SessionError, match=nodes.name):
        nodes.attach()
