"""A notebook behind a slow link: ranks print more than is kept for it, and the end of a cell is dropped too."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from detrain_nb import Session
from detrain_nb.errors import CellTimeout, RankError
from detrain_nb.session.state.cell_observer import CellObserver
from detrain_nb.wire import Message, Output

from .inside import link_of, state_of

pytestmark = pytest.mark.timeout(120)
_LIMIT_S = 30.0
# The end of the cell on rank 1 lies amid the kept output of rank 0, and is dropped when rank 0 prints more.
_CELL = """
import os, sys, time
def wait_for(name):
    deadline = time.monotonic() + 60
    while not os.path.exists(f"{folder}/{name}") and time.monotonic() < deadline:
        time.sleep(0.01)
def say(megabytes, name):
    for _ in range(megabytes):
        sys.stdout.write("x" * (1 << 20) + "\\n")
    open(f"{folder}/{name}", "w").close()
if rank == 0:
    print("first", flush=True)
    wait_for("behind")
    say(30, "half")
    time.sleep(0.5)
    say(60, "all")
else:
    wait_for("half")
"""


class Eyes(CellObserver):
    """An observer, so that the session watches the cell."""


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """Two ranks; from the first output on, the notebook takes no message until a rank has printed everything."""
    with Session.start(ranks=2, device="cpu", init=False, spool_limit_bytes=17 << 20) as started:
        take, behind = state_of(started).take, tmp_path / "behind"

        def take_late(message: Message, number: int = 0, node: int = 0) -> None:
            if isinstance(message, Output) and not behind.exists():
                behind.touch()
                deadline = time.monotonic() + _LIMIT_S
                while not (tmp_path / "all").exists() and time.monotonic() < deadline:
                    time.sleep(0.01)
            take(message, number, node)

        started.run_cell(f"folder = {str(tmp_path)!r}; kept = rank")
        monkeypatch.setattr(state_of(started), "take", take_late)
        yield started


def _assert_end_was_dropped(session: Session) -> None:
    assert any("bytes of output were lost" in text for text in session.news.notices), "the test shows nothing"
    assert session.run_cell("kept").values == {0: 0, 1: 1}


def test_cell_ends_though_the_end_of_a_rank_was_dropped(session: Session) -> None:
    with pytest.raises(RankError) as caught:
        session.run_cell(_CELL, observer=Eyes(), timeout_s=_LIMIT_S)
    assert list(caught.value.errors) == [1]
    assert "the outcome of the cell on this rank is unknown" in str(caught.value)
    _assert_end_was_dropped(session)


@pytest.mark.slow
def test_stop_lets_go_of_a_rank_whose_end_was_dropped(session: Session) -> None:
    """The cell has no observer, so only the stop checks where its ranks are."""
    with pytest.raises(CellTimeout, match="all ranks stopped and kept their variables"):
        session.run_cell(_CELL, timeout_s=_LIMIT_S / 3)
    _assert_end_was_dropped(session)


@pytest.mark.slow
def test_ends_that_come_are_not_taken_for_lost(tmp_path: Path) -> None:
    """The ranks are located all the time, including the moments in which cells begin and end."""
    with Session.start(ranks=2, device="cpu", init=False) as session:
        session.settings.limits.look_gap_s = 0.001
        is_over = threading.Event()

        def look() -> None:
            while not is_over.is_set():
                link_of(session).locate([0, 1], stack=False)

        looking = threading.Thread(target=look)
        looking.start()
        try:
            for number in range(50):
                code = f"import time; time.sleep(0.003 * (1 + {number} % 3) * (1 + rank)); {number}"
                result = session.run_cell(code, observer=Eyes())
                assert result.values == {0: number, 1: number}
        finally:
            is_over.set()
            looking.join()
