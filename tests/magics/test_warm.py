"""``%distributed restart`` keeps what the ranks have imported; ``--cold`` and ``config warm=0`` do not."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
from detrain_nb.magics.options import Settings

_PID = "%%distributed -r 0\nimport os\nprint(os.getpid())"


# Presses the stop button while the ranks are being stopped.
_PRESS = """
import os, signal, threading, time
def press():
    while not any(thread.name == "detrain_nb stop" for thread in threading.enumerate()):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press, daemon=True).start()
"""


def _warm_process(kernel: Any) -> psutil.Process:
    return psutil.Process(int(kernel.run(_PID).text().split()[-1])).parents()[2]


@pytest.fixture
def kernel(start_kernel: Any) -> Any:
    kernel = start_kernel()
    assert kernel.run("%distributed start -n 1 --no-init").status == "ok"
    return kernel


def test_restart_and_stop_then_start_are_warm_and_cold_says_no(kernel: Any) -> None:
    warm = _warm_process(kernel)
    assert kernel.run("%%distributed\nx = 1").status == "ok"
    assert "1 rank on cpu" in kernel.run("%distributed restart").text()
    assert _warm_process(kernel) == warm
    assert "NameError" in kernel.run("%%distributed\nx").error
    assert kernel.run("%distributed stop").status == "ok"
    listed = kernel.run("%distributed list").text()
    assert "torch stays imported for this notebook's next start for" in listed
    assert "cold" not in kernel.run("%distributed start -n 1 --no-init").text()
    assert _warm_process(kernel) == warm
    changed = kernel.run("import os; os.environ['NEW'] = '1'\n%distributed restart").text()
    assert changed.startswith("started cold: the environment (NEW) changed\n")
    warm = _warm_process(kernel)
    assert "started cold" not in kernel.run("%distributed restart --cold").text()
    assert _warm_process(kernel) != warm
    assert not warm.is_running()
    last = _warm_process(kernel)
    assert kernel.run("%distributed stop --cold").status == "ok"
    assert not last.is_running()
    assert "torch stays" not in kernel.run("%distributed list").text()


@pytest.mark.slow
def test_what_is_kept_ends_with_the_setting_and_with_the_kernel(kernel: Any) -> None:
    warm = _warm_process(kernel)
    assert kernel.run("%distributed stop").status == "ok"
    assert warm.is_running()
    assert "warm=600.0" in kernel.run("%distributed config").text()
    assert kernel.run("%distributed config warm=0").status == "ok"
    psutil.wait_procs([warm], timeout=10)
    assert not warm.is_running()
    assert kernel.run("%distributed start -n 1 --no-init").status == "ok"
    cold = _warm_process(kernel)
    assert kernel.run("%distributed stop").status == "ok"
    assert not cold.is_running()
    assert kernel.run("%distributed config warm=60").status == "ok"
    assert kernel.run("%distributed start -n 1 --no-init").status == "ok"
    soon_over = _warm_process(kernel)
    assert kernel.run("%distributed stop").status == "ok"
    assert kernel.run("%distributed config warm=1").status == "ok"
    psutil.wait_procs([soon_over], timeout=10)
    assert not soon_over.is_running()
    assert "at most 86400 seconds (one day)" in kernel.run("%distributed config warm=1e99").error
    for wrong in ("warm=-1", "warm=inf", "warm=nan", "warm=soon"):
        assert "warm must be a number, 0 or more" in kernel.run(f"%distributed config {wrong}").error
    assert kernel.run("%distributed config warm=60").status == "ok"
    assert kernel.run("%distributed start -n 1 --no-init").status == "ok"
    last = _warm_process(kernel)
    assert kernel.run("%distributed stop").status == "ok"
    assert last.is_running()
    kernel.close(now=True)
    psutil.wait_procs([last], timeout=10)
    assert not last.is_running()


def test_variable_that_is_wrong_is_named_and_takes_no_magic_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DETRAIN_NB_WARM", "soon")
    monkeypatch.setenv("DETRAIN_NB_OUTPUT", "final")
    assert Settings.from_env() == Settings(output="final")
    assert capsys.readouterr().err == (
        "DETRAIN_NB_WARM: warm must be a number, 0 or more, not 'soon'; warm=600.0 is used instead\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", ["restart", "stop"])
def test_interrupted_command_says_what_is_left_and_the_next_cell_starts_ranks(kernel: Any, command: str) -> None:
    warm = _warm_process(kernel)
    ended = kernel.run(f"{_PRESS}%distributed {command}")
    assert f"%distributed {command} was interrupted: " in ended.error
    assert kernel.run("%%distributed -n 1\nprint('up')").status == "ok"
    last = _warm_process(kernel)
    assert kernel.run("%distributed stop --cold").status == "ok"
    psutil.wait_procs([warm, last], timeout=10)
    assert not warm.is_running()
    assert not last.is_running()


def test_cold_is_for_all_ranks(kernel: Any) -> None:
    assert "--cold applies to all ranks: leave out -r" in kernel.run("%distributed restart -r 0 --cold").error
