"""The objects of a failed cell are freed at whatever moment an interrupt arrives."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

_STORM = """
import mmap, os, signal, subprocess, sys
from detrain_nb.node.cell.interrupts import Interrupts

interrupts = Interrupts(mmap.mmap(-1, 8))
interrupts.install()
strike = f"import os, time\\nwhile True: os.kill({os.getpid()}, 2); time.sleep(0.00002)"
storm = subprocess.Popen([sys.executable, "-c", strike])
for count in range(20_000):
    held = [object()]
    interrupts.let_go_by(held.clear)
    assert not held
storm.kill()
storm.wait()
print("lived")
"""


@pytest.mark.slow
def test_interrupts_that_come_while_a_failed_cell_is_let_go_of_end_nobody() -> None:
    done = subprocess.run([sys.executable, "-c", _STORM], capture_output=True, text=True, timeout=60)
    assert done.stdout == "lived\n", done.stderr[-2000:]


# Python delivers a signal when a function starts, after a call, or when a loop jumps back. The test interrupts at each
# of these places in turn.
_STRIKES = """
import dis, mmap, sys
from detrain_nb.node.cell.cellrunner import CellRunner
from detrain_nb.node.cell.tracebacks import user_traceback
from detrain_nb.node.cell.interrupts import Interrupts

interrupts = Interrupts(mmap.mmap(-1, 8))
runner = CellRunner.create(lambda *shown: None, lambda wait: None)
runner.events.trigger = interrupts.raised_after(runner.events.trigger)
DELIVERED_AFTER = ("RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD")
sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for this when settrace is called

def trace(frame, event, argument):
    global left, has_raised
    frame.f_trace_opcodes = True
    if event == "exception" and frame.f_code.co_filename == "<cell 1>":
        has_raised = True
    if event == "opcode" and has_raised and left >= 0:
        before = last.get(frame)
        last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        left -= before in DELIVERED_AFTER
        if left < 0:
            raise KeyboardInterrupt
    return trace

at, lost = 0, []
while True:
    left, has_raised, last = at, False, {}
    sys.settrace(trace)
    try:
        _, error = runner.run("x = 1\\nraise RuntimeError('freed')", 1)
    except KeyboardInterrupt as exc:
        error = exc
    finally:
        sys.settrace(None)
    if "cell 1, line 2" not in str(user_traceback(error, is_own_code_enough=True)):
        lost.append(at)
    if left >= 0:
        break
    at += 1
print(f"{at} places, lost at {lost}")
"""


def test_what_a_cell_raised_is_known_wherever_an_interrupt_comes_after_it() -> None:
    code = f"import detrain_nb.node.cell.interrupts as ours\nexec(compile({_STRIKES!r}, ours.__file__, 'exec'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    found = re.search(r"^(\d+) places, lost at \[\]$", done.stdout, re.MULTILINE)  # IPython prints a line, too
    assert found, done.stdout + done.stderr[-2000:]
    assert int(found[1]) > 40
