"""``%distributed restart`` in a kernel that did not start the session keeps the options of its start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ..session.soon import each_below

_OPTIONS = "-n 2 --device cpu --backend gloo --no-init --no-sync --seed 7 --start exec --linger 30 --group-timeout 90"
_FEW = "-n 2 --no-init --seed 7"
_LOOK = "import os\nprint(torch.initial_seed() - rank, dist.is_initialized(), os.environ.get('TOKEN'))"
_ASKED = "{k: v for k, v in vars(get_ipython().detrain_nb_magics[0].holder._started_with).items() if v is not None}"
_KEPT_BY_ATTACH = (
    "to keep its variables, attach first: "
    "the next %%distributed cell or %distributed start stops its ranks, and all their variables are lost\n"
)
_ENDS = "kernel was restarted, is stopped: new ranks are started, and all variables of the old ones are lost\n"
_KEPT = {
    "count": 2, "device": "cpu", "backend": "gloo", "no_init": True, "no_sync": True,
    "seed": 7, "start": "exec", "linger": 30.0, "group_timeout": 90.0,
}  # fmt: skip


@pytest.fixture
def kernel(start_kernel: Any, request: pytest.FixtureRequest) -> Any:
    """A kernel with a notebook name, so that it finds its session after a restart."""
    return start_kernel(DETRAIN_NB_NOTEBOOK=f"/x/{request.node.name}.ipynb")


def _start(kernel: Any, options: str = _FEW) -> None:
    assert kernel.run(f"%distributed start {options} --env TOKEN=geheim --env DEBUG=1").status == "ok"
    assert kernel.run("%%distributed\n" + _LOOK).text() == "[0-1] 7 False geheim\n"


def _renew(kernel: Any) -> str:
    """Restart the kernel; returns what loading the extension prints."""
    kernel.manager.restart_kernel(now=False)
    kernel.client.wait_for_ready(timeout=60)
    said = str(kernel.run("%load_ext detrain_nb").text())
    assert "is still running" in said
    return said


def _asked(kernel: Any) -> dict[str, Any]:
    [shown] = kernel.run(_ASKED).rich()
    found: dict[str, Any] = eval(shown)
    return {name: found.get(name) for name in _KEPT}


@pytest.mark.slow
def test_restart_after_attach_has_the_options_of_the_start_and_says_what_was_not_kept(kernel: Any) -> None:
    _start(kernel, _OPTIONS)
    _renew(kernel)
    assert kernel.run("%distributed attach").status == "ok"
    again = kernel.run("%distributed restart").text()
    assert again.splitlines()[0] == (
        "values of --env are not stored; TOKEN, DEBUG not set: %distributed restart --env TOKEN=... --env DEBUG=..."
    )
    assert _asked(kernel) == _KEPT
    assert kernel.run("%%distributed\n" + _LOOK).text() == "[0-1] 7 False None\n"
    assert kernel.run("%distributed stop").status == "ok"


@pytest.mark.slow
def test_values_that_are_given_again_are_kept_from_then_on(kernel: Any) -> None:
    assert kernel.run("%distributed start -n 1 --no-init --seed 7 --env TOKEN=geheim --env DEBUG=1").status == "ok"
    _renew(kernel)
    again = kernel.run("%distributed restart --env TOKEN=new").text()
    assert "not stored; DEBUG not set: %distributed restart --env DEBUG=...\n" in again
    assert "not stored" not in kernel.run("%distributed restart --env DEBUG=1").text()
    assert kernel.run("%%distributed\n" + _LOOK).text() == "[0] 7 False new\n"
    assert kernel.run("%distributed stop").status == "ok"


def test_line_that_started_the_session_goes_on_with_it_after_an_attach(kernel: Any) -> None:
    line = "%distributed start -n 1 --no-init --env TOKEN=geheim"
    assert kernel.run(line).status == "ok"
    _renew(kernel)
    assert kernel.run("%distributed attach").status == "ok"
    again = kernel.run(line)
    assert again.text().endswith("is already running with 1 rank\n"), again.error
    assert "with another --env, --linger;" in kernel.run("%distributed start -n 1 --no-init --linger 7").error
    assert "with another --env;" in kernel.run(f"{line} --env DEBUG=1").error
    assert "not stored; TOKEN not set" in kernel.run("%distributed restart").text()
    assert "with another --env;" in kernel.run(line).error, "these ranks do not have it"
    assert kernel.run("%distributed stop").status == "ok"


def test_values_of_variables_are_in_no_file(kernel: Any, runtime_folder: Path) -> None:
    assert kernel.run("%distributed start -n 1 --no-init --env TOKEN=geheim").status == "ok"
    said = each_below(runtime_folder, lambda path: path.read_bytes() if path.is_file() else b"")
    assert any(b'"TOKEN"' in text for text in said)
    assert not any(b"geheim" in text for text in said)
    assert kernel.run("%distributed stop").status == "ok"


@pytest.mark.parametrize("line", ["%%distributed -n 2\nkept = 1", "%distributed start -n 2"])
def test_notebook_whose_kernel_was_restarted_runs_again_from_its_first_line(kernel: Any, line: str) -> None:
    """Restart and Run All: new ranks are started, just as the notebook's variables are recreated."""
    assert kernel.run(line).status == "ok"
    assert kernel.run("%%distributed\nkept = 1").status == "ok"
    said = _renew(kernel)
    assert said.count(_KEPT_BY_ATTACH) == 1, said
    assert _KEPT_BY_ATTACH in kernel.run("%distributed status").error, "it advised to start one with a cell"
    again = kernel.run(line)
    assert (again.status, again.text().count(_ENDS)) == ("ok", 1)
    assert kernel.run("%%distributed\n'kept' in globals()").rich() == [f"[0-1] {line.endswith('kept = 1')}"]
    assert kernel.run("%distributed stop").status == "ok"


@pytest.mark.parametrize("line", ["%distributed attach", "%%distributed -n 1\n1"])
def test_notebook_that_was_renamed_finds_its_ranks_after_a_restart(kernel: Any, line: str) -> None:
    """After a rename, a front end passes the new name to the kernel that it restarts."""
    assert kernel.run("%distributed start -n 1 --no-init").status == "ok"
    env = kernel.manager._launch_args["env"]
    before, env["DETRAIN_NB_NOTEBOOK"] = env["DETRAIN_NB_NOTEBOOK"], "/x/another.ipynb"
    try:
        kernel.manager.restart_kernel(now=False)
        kernel.client.wait_for_ready(timeout=60)
        assert "of this notebook is still running" in kernel.run("%load_ext detrain_nb").text()
        assert kernel.run(line).status == "ok"
        listed = kernel.run("%distributed list").text()
        assert listed.count("agent pid") == 1 and "another" not in listed
        assert kernel.run("%distributed stop").status == "ok"
    finally:
        env["DETRAIN_NB_NOTEBOOK"] = before


def test_every_session_that_waits_is_told_of_by_its_name(kernel: Any, request: pytest.FixtureRequest) -> None:
    names = [f"{request.node.name[:12]}-{which}" for which in "ab"]
    assert kernel.run(f"%distributed start -n 1 --no-init --name {names[0]}").status == "ok"
    said = _renew(kernel)
    assert re.search(
        rf"^session {names[0]} of this notebook is still running \(agent pid \d+\): "
        rf"%distributed attach {names[0]} reconnects to it and shows missed output, "
        rf"%distributed stop {names[0]} stops it; "
        rf"it ends 10 minutes after its notebook leaves\n"
        rf"to keep its variables, attach first: "
        rf"%distributed start --name {names[0]} stops its ranks, and all their variables are lost\n"
        rf"unless you attach, the next %%distributed cell starts another session next to it\n",
        said,
    ), said
    beside = kernel.run(f"%distributed start -n 1 --no-init --name {names[1]}")
    assert f"session {names[0]} of this notebook stays" in beside.text(), "whoever starts one is told"
    said = _renew(kernel)
    assert all(f"session {name} of this notebook is still running" in said for name in names), said
    assert said.endswith("starts another session next to them\n")
    assert kernel.run("%distributed start -n 1 --no-init").status == "ok"
    said = _renew(kernel)
    assert said.count("of this notebook is still running") == 3
    assert _KEPT_BY_ATTACH in said and "beside" not in said, "the next cell ends the one of the notebook's own name"
    for name in names:
        assert kernel.run(f"%distributed stop {name}").status == "ok"
    assert kernel.run("%distributed stop").status == "ok"


def test_cell_that_starts_a_session_beside_one_that_waits_says_so(kernel: Any) -> None:
    assert kernel.run("%distributed start -n 1 --no-init --name waits --linger 120").status == "ok"
    assert kernel.run("%%distributed\nkept = 1").status == "ok"
    _renew(kernel)
    beside = kernel.run("%%distributed -n 1\n'kept' in globals()")
    assert re.fullmatch(
        r"session waits of this notebook stays next to the new one \(agent pid \d+\): %distributed detach, then "
        r"%distributed attach waits reconnects to it; %distributed stop waits stops it; "
        r"it ends 2 minutes after its notebook leaves\n",
        beside.text(),
    ), beside.text()
    assert beside.rich() == ["[0] False"]
    assert kernel.run("%%distributed\n1").text() == "", "it is told once"
    assert kernel.run("%distributed detach\n%distributed attach waits").status == "ok"
    assert kernel.run("%%distributed\nkept").rich() == ["[0] 1"]
    again = kernel.run("%distributed restart").text()
    assert "of this notebook stays next to" in again, "the one that was left for it"
    assert kernel.run("%distributed stop").status == "ok"
    assert kernel.run("%distributed stop").status == "ok"


def test_ranks_that_ran_a_cell_when_the_kernel_was_restarted_are_not_ended_by_a_start(kernel: Any) -> None:
    assert kernel.run("%distributed start -n 1 --no-init").status == "ok"
    kernel.client.execute("%%distributed\nimport time\nfor step in range(1000): print(step); time.sleep(0.1)")
    while kernel.client.get_iopub_msg(timeout=20)["msg_type"] != "stream":
        pass
    _renew(kernel)
    assert "is already running" in kernel.run("%distributed start -n 1 --no-init").error
    assert kernel.run("%distributed stop").status == "ok"


def test_ranks_of_a_kernel_that_died_are_not_ended_by_a_start(kernel: Any) -> None:
    """A start also keeps ranks left by a kernel restart once a kernel has attached to them."""
    assert kernel.run("%distributed start -n 1 --no-init").status == "ok"
    _renew(kernel)
    assert kernel.run("%distributed attach").status == "ok"
    kernel.manager.restart_kernel(now=True)
    kernel.client.wait_for_ready(timeout=60)
    said = kernel.run("%load_ext detrain_nb").text()
    assert "is still running" in said and "are lost" not in said
    assert "is already running" in kernel.run("%distributed start -n 1 --no-init").error
    assert kernel.run("%distributed stop").status == "ok"


def test_log_says_that_what_was_shown_before_an_attach_is_not_kept(kernel: Any) -> None:
    assert kernel.run("%distributed start -n 1 --no-init").status == "ok"
    assert kernel.run("%%distributed\nprint('shown')").text() == "[0] shown\n"
    assert kernel.run("%distributed detach").status == "ok"
    assert kernel.run("%distributed attach").status == "ok"
    listed = kernel.run("%distributed log --list").text()
    assert listed == "cell 3: print('shown') (ran before the attach: output not kept)\n"
    assert "was shown before this notebook attached" in kernel.run("%distributed log").error
    assert kernel.run("%distributed stop").status == "ok"


@pytest.mark.slow
def test_other_number_of_ranks_goes_before_that_of_the_start(kernel: Any) -> None:
    _start(kernel)
    _renew(kernel)
    assert kernel.run("%distributed attach").status == "ok"
    assert kernel.run("%distributed restart -n 1").status == "ok"
    assert kernel.run("%%distributed\n" + _LOOK).text() == "[0] 7 False None\n"
    assert kernel.run("%distributed stop").status == "ok"


@pytest.mark.slow
def test_restart_of_what_nobody_knows_says_so_once(kernel: Any, runtime_folder: Path) -> None:
    _start(kernel)
    for record in runtime_folder.glob("*/started.json"):
        record.unlink()
    _renew(kernel)
    assert kernel.run("%distributed attach").status == "ok"
    assert kernel.run("%distributed restart").text().startswith("there is no record of the original start options")
    assert "not known" not in kernel.run("%distributed restart").text()
    assert kernel.run("%%distributed\nrank").rich() == ["[0] 0", "[1] 1"]
    assert kernel.run("%distributed stop").status == "ok"


@pytest.mark.slow
def test_env_is_for_all_ranks(kernel: Any) -> None:
    assert kernel.run("%distributed start -n 1 --no-init").status == "ok"
    said = kernel.run("%distributed restart -r 0 --env A=1").error
    assert said.strip() == "UsageError: %distributed restart: --env applies to all ranks: leave out -r"
    assert kernel.run("%distributed stop").status == "ok"
