"""``%distributed restart`` in a kernel that did not start the session: it starts as it was started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

_OPTIONS = "-n 2 --device cpu --backend gloo --no-init --no-sync --seed 7 --start exec --linger 30 --group-timeout 90"
_FEW = "-n 2 --no-init --seed 7"
_LOOK = "import os\nprint(torch.initial_seed() - rank, dist.is_initialized(), os.environ.get('TOKEN'))"
_ASKED = "{k: v for k, v in vars(get_ipython().detrain_nb_magics[0].holder._started_with).items() if v is not None}"
_KEPT = {
    "count": 2, "device": "cpu", "backend": "gloo", "no_init": True, "no_sync": True,
    "seed": 7, "start": "exec", "linger": 30.0, "group_timeout": 90.0,
}  # fmt: skip


@pytest.fixture
def kernel(start_kernel: Any, request: pytest.FixtureRequest) -> Any:
    """A kernel of a notebook that finds its session again."""
    return start_kernel(DETRAIN_NB_NOTEBOOK=f"/x/{request.node.name}.ipynb")


def _start(kernel: Any, options: str = _FEW) -> None:
    assert kernel.run(f"%distributed start {options} --env TOKEN=geheim --env DEBUG=1").status == "ok"
    assert kernel.run("%%distributed\n" + _LOOK).text() == "[0-1] 7 False geheim\n"


def _renew(kernel: Any) -> None:
    kernel.manager.restart_kernel(now=False)
    kernel.client.wait_for_ready(timeout=60)
    assert "is there" in kernel.run("%load_ext detrain_nb").text()


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
        "values of --env are not kept, TOKEN, DEBUG not set: %distributed restart --env TOKEN=... --env DEBUG=..."
    )
    assert _asked(kernel) == _KEPT
    assert kernel.run("%%distributed\n" + _LOOK).text() == "[0-1] 7 False None\n"
    assert kernel.run("%distributed stop").status == "ok"


@pytest.mark.slow
def test_values_that_are_given_again_are_kept_from_then_on(kernel: Any) -> None:
    assert kernel.run("%distributed start -n 1 --no-init --seed 7 --env TOKEN=geheim --env DEBUG=1").status == "ok"
    _renew(kernel)
    again = kernel.run("%distributed restart --env TOKEN=new").text()
    assert "not kept, DEBUG not set: %distributed restart --env DEBUG=...\n" in again
    assert "not kept" not in kernel.run("%distributed restart --env DEBUG=1").text()
    assert kernel.run("%%distributed\n" + _LOOK).text() == "[0] 7 False new\n"
    assert kernel.run("%distributed stop").status == "ok"


def test_line_that_started_the_session_goes_on_with_it_after_an_attach(kernel: Any) -> None:
    line = "%distributed start -n 1 --no-init --env TOKEN=geheim"
    assert kernel.run(line).status == "ok"
    _renew(kernel)
    assert kernel.run("%distributed attach").status == "ok"
    again = kernel.run(line)
    assert again.text().endswith("runs already, with 1 ranks: go on\n"), again.error
    assert "with another --env, --linger;" in kernel.run("%distributed start -n 1 --no-init --linger 7").error
    assert "with another --env;" in kernel.run(f"{line} --env DEBUG=1").error
    assert "not kept, TOKEN not set" in kernel.run("%distributed restart").text()
    assert "with another --env;" in kernel.run(line).error, "these ranks do not have it"
    assert kernel.run("%distributed stop").status == "ok"


def test_values_of_variables_are_in_no_file(kernel: Any, runtime_folder: Path) -> None:
    assert kernel.run("%distributed start -n 1 --no-init --env TOKEN=geheim").status == "ok"
    said = [path.read_bytes() for path in runtime_folder.rglob("*") if path.is_file()]
    assert any(b'"TOKEN"' in text for text in said)
    assert not any(b"geheim" in text for text in said)
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
    assert kernel.run("%distributed restart").text().startswith("how it was started is not known here")
    assert "not known" not in kernel.run("%distributed restart").text()
    assert kernel.run("%%distributed\nrank").rich() == ["[0] 0", "[1] 1"]
    assert kernel.run("%distributed stop").status == "ok"


@pytest.mark.slow
def test_env_is_for_all_ranks(kernel: Any) -> None:
    assert kernel.run("%distributed start -n 1 --no-init").status == "ok"
    said = kernel.run("%distributed restart -r 0 --env A=1").error
    assert said.strip() == "UsageError: %distributed restart: --env is for all ranks: leave out -r"
    assert kernel.run("%distributed stop").status == "ok"
