"""The objects of a failed cell are freed with its error, without a garbage collection."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ..failing_cells import FAILING_CELLS

_RUN = """
import gc, json, sys
gc.disable()
from detrain_nb.node.cell.cellrunner import CellRunner
from detrain_nb.node.cell.rings import break_rings

runner = CellRunner.create(lambda *shown: None, lambda wait: None)
assert runner.run('''
import asyncio, bdb, contextlib, weakref
class Big: pass
def fail(error=ValueError):
    global known
    big = Big(); known = weakref.ref(big)
    raise error
class Shown:
    def _repr_html_(self): fail()
class NotShown:
    def __repr__(self): fail()
''', 1)[1] is None

def run(code):
    runner.user_ns.pop("known", None)
    held = [runner.run(code, 2)[1]]
    name = type(held[0]).__name__
    if held[0] is not None:
        break_rings(held[0])
    held.clear()
    return name, runner.user_ns["known"]() is None

found = {case: run(code) for case, code in json.loads(sys.argv[1]).items()}
open(sys.argv[2], "w").write(json.dumps(found))
"""
# Each cell, and the type of its error; NoneType if it has none.
_FAILS = {
    **FAILING_CELLS,
    "interrupt": ("fail(KeyboardInterrupt)", "KeyboardInterrupt"),
    "interrupt in await": ("async def wait(): fail(KeyboardInterrupt)\nawait wait()", "KeyboardInterrupt"),
    "debugger": ("fail(bdb.BdbQuit)", "BdbQuit"),
    "generator": ("def numbers():\n  yield 1\n  fail()\nlist(numbers())", "ValueError"),
    "context manager": ("@contextlib.contextmanager\ndef opened():\n  yield\nwith opened(): fail()", "ValueError"),
    "task": ("async def wait(): fail()\nawait asyncio.create_task(wait())", "ValueError"),
    "prun": ("%prun fail()", "ValueError"),
    "timeit": ("%timeit -n1 -r1 fail()", "ValueError"),
    "picture": ("Shown()", "NoneType"),
    "text": ("NotShown()", "NoneType"),
    "display": ("display(Shown())", "NoneType"),
    "capture": ("%%capture\nfail()", "NoneType"),
    "cell in a cell": ("get_ipython().run_cell('fail()')\nNone", "NoneType"),
}
if hasattr(asyncio, "TaskGroup"):  # Python 3.10, which a node may have, lacks it
    _FAILS["group"] = (
        "async def wait(): fail()\nasync with asyncio.TaskGroup() as group: group.create_task(wait())",
        "ExceptionGroup",
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """Return the error type of each cell, and whether its objects were freed."""
    path: Path = tmp_path_factory.mktemp("rings") / "found.json"
    cells = json.dumps({case: code for case, (code, _) in _FAILS.items()})
    done = subprocess.run([sys.executable, "-c", _RUN, cells, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(path.read_text()))


@pytest.mark.parametrize(("case", "error"), [(case, error) for case, (_, error) in _FAILS.items()], ids=list(_FAILS))
def test_what_a_failed_cell_held_goes_with_its_error(found: dict[str, list[object]], case: str, error: str) -> None:
    assert found[case] == [error, True]


_GOES_ON = """
from detrain_nb.node.cell.cellrunner import CellRunner
from detrain_nb.node.cell.rings import break_rings

runner = CellRunner.create(lambda *shown: None, lambda wait: None)
_, error = runner.run('''
def numbers():
    big = "big"
    try: 1 / 0
    except ZeroDivisionError as exc: yield exc
    yield big
going_on = numbers()
raise ValueError from next(going_on)
''', 1)
break_rings(error)
assert runner.run("assert next(going_on) == 'big'", 2)[1] is None
"""


def test_generator_of_the_user_that_an_error_went_through_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", _GOES_ON], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]


def test_frames_of_all_that_led_to_an_error_are_freed() -> None:
    """That includes the frames of an error's cause and of its context."""
    from detrain_nb.node.cell.failures import free_frames

    def hold() -> None:
        held = object()
        raise ValueError(id(held))

    error: BaseException
    try:
        try:
            hold()
        except ValueError:
            raise MemoryError from KeyError()
    except MemoryError as exc:
        error = exc
    before = error.__context__
    assert before is not None
    assert before.__traceback__ is not None
    frame = before.__traceback__.tb_next.tb_frame  # type: ignore[union-attr]
    assert "held" in frame.f_locals
    free_frames(error)
    assert "held" not in frame.f_locals
    assert before.__traceback__ is None
