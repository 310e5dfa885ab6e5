"""Long messages of a rank arrive, cut to the size limit if necessary, and the rank keeps running."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from detrain_nb import Session
from detrain_nb.errors import RankError, RankLost
from detrain_nb.wire import MAX_HEADER_BYTES


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """One rank that the module's tests share."""
    folder = tmp_path_factory.mktemp("run")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DETRAIN_NB_RUNTIME_DIR", str(folder))
        with Session.start(ranks=1, device="cpu", init=False) as started:
            yield started


@pytest.fixture(autouse=True)
def goes_on(session: Session) -> Iterator[None]:
    pid = session.status().ranks[0].pid
    yield
    assert session.run_cell("1 + 1").values == {0: 2}
    assert session.status().ranks[0].pid == pid


LONG = 2 * MAX_HEADER_BYTES
WIDE = "\N{GRINNING FACE}" * 20_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "said"),
    [
        (f"raise ValueError('\\N{{GRINNING FACE}}' * {LONG})", "characters"),
        (f"raise type('E' * {LONG}, (Exception,), {{}})('short')", "short"),
        ("\n".join(f"def f{n}(): f{n + 1}()  # {WIDE}" for n in range(10)) + "\nf0()", "lines ..."),
    ],
    ids=["text", "name", "traceback"],
)
def test_error_that_is_long_is_told_in_part(session: Session, code: str, said: str) -> None:
    with pytest.raises(RankError) as caught:
        session.run_cell(code)
    assert said in "\n".join(caught.value._render_traceback_())


@pytest.mark.slow
def test_many_completions_are_told_in_part(session: Session) -> None:
    names = f"[f'name_{{i:0150}}' for i in range({LONG // 150})]"
    session.run_cell(f"class Many:\n    def __dir__(self): return {names}\nmany = Many()")
    found = session.ranks.complete("many.name", 9, limit_s=60)
    assert found and 50 < len(found.matches) < LONG // 150


def test_long_help_is_told(session: Session) -> None:
    session.run_cell("def f(): pass\nf.__doc__ = 'word ' * 30_000 + 'the end'")
    assert "the end" in (session.ranks.inspect("f", limit_s=30) or "")


def test_long_name_of_a_display_is_cut(session: Session) -> None:
    result = session.run_cell(f"from IPython.display import display\ndisplay('shown', display_id='x' * {LONG})")
    assert result.ranks == (0,)


@pytest.mark.slow
def test_description_of_a_value_may_be_long(session: Session) -> None:
    session.run_cell("nested = [[i, 'a string', {'a': None}] for i in range(40_000)]")
    assert session.pull("nested", ranks=0) == {0: [[i, "a string", {"a": None}] for i in range(40_000)]}
    session.push({"back": [[i, "a string", {"a": None}] for i in range(40_000)]})
    assert session.run_cell("back == nested").values == {0: True}


@pytest.mark.slow
def test_place_of_a_rank_is_told_where_names_are_long(session: Session, tmp_path: Path) -> None:
    inside, done = tmp_path / "inside", tmp_path / "done"
    code = f"""
import pathlib, time
inside, done = pathlib.Path({str(inside)!r}), pathlib.Path({str(done)!r})
def f(n):
    if n:
        return f(n - 1)
    inside.touch()
    while not done.exists():
        time.sleep(0.01)
long = "\\N{{GRINNING FACE}}" * 500
f.__code__ = f.__code__.replace(co_filename=long, co_name=long)
f(150)
"""
    runs = threading.Thread(target=session.run_cell, args=(code,))
    runs.start()
    try:
        deadline = time.monotonic() + 30
        while not inside.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        said = str(session.ranks.where())
    finally:
        done.touch()
        runs.join(30)
    assert "\N{GRINNING FACE}" in said


@pytest.mark.slow
def test_group_with_a_long_name_and_many_variables_that_hold_one(session: Session) -> None:
    with Session.start(ranks=2, device="cpu") as pair:
        pair.run_cell(
            f"group = dist.new_group(group_desc='g' * {LONG})\nt = torch.ones(1)\ndist.all_reduce(t, group=group)\n"
            "globals().update({f'held_{i}_' + 'x' * 5000: dist.group.WORLD for i in range(400)})"
        )
        pid = pair.status().ranks[0].pid
        waits = "import os, time\nif rank == 1:\n    time.sleep(2)\n    os._exit(1)\ndist.all_reduce(t, group=group)"

        def run() -> None:
            with contextlib.suppress(RankLost):
                pair.run_cell(waits)

        runs = threading.Thread(target=run)
        runs.start()
        time.sleep(1)
        pair.ranks.where()
        runs.join(30)
        assert pair.run_cell("rank").values == {0: 0, 1: 1}
        assert pair.status().ranks[0].pid == pid


def test_long_cell_is_remembered_for_a_later_notebook(session: Session, tmp_path: Path) -> None:
    code = f"text = '{'x[{,' * (LONG // 4)}'\nlen(text)"
    with Session.start(ranks=1, device="cpu", init=False, name="long") as first:
        assert first.run_cell(code).values == {0: LONG}
        first.detach()
        with Session.attach("long") as again:
            assert again.log.replay(0, cells=[1]) == {1: None}
