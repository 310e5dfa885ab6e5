"""The guided tour: every notebook runs under nbval, and its output equals the stored output.

To store new output: ``DETRAIN_NB_OUTPUT=final detrain-nb run notebooks/NAME.ipynb --output notebooks/NAME.ipynb``.
A live view is stored in its plain form: remove the widget next to it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

from detrain_nb.plan.targets import TARGETS

from ..testbed.fixtures import MakeTestbed
from ..testbed.nodes import home_with_hosts

ROOT = Path(__file__).resolve().parent.parent.parent
SANITIZE = ROOT / "notebooks/sanitize.cfg"
TOUR = {
    path.name: path
    for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
    if not path.name.endswith(".executed.ipynb")
}
FASHION = ["dataset-fashion-mnist"]
WITH_IMAGES = ["01_quickstart", "04_pipeline_parallel", "05_tensor_and_fsdp", "06_pipeline_and_jobs"]
# Debian packages that the stored output requires.
PACKAGES = dict.fromkeys([f"{name}.ipynb" for name in WITH_IMAGES], FASHION)
WITH_HOSTS = {"03_remote_nodes.ipynb"}
# Files that 03 writes and removes at its end. If a killed kernel left them, 03 would print that it overwrites them.
WRITTEN = ["remote_model.py", "words.txt"]
MAX_PATTERNS = 7
MAX_LINES = 14
MAX_ERROR_LINES = 6
LIMIT_S = 600
WIDGET = "application/vnd.jupyter.widget-view+json"
# Tags, and comments in a cell, that keep nbval from comparing its output.
IGNORED = re.compile(r"(?:nbval|pytest-validate)-(?:ignore-output|skip)|skip-execution")


def _code_cells(path: Path) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


# ---- the source of the notebooks


@pytest.fixture(params=TOUR)
def notebook(request: pytest.FixtureRequest) -> Path:
    return TOUR[request.param]


def test_tour_has_its_notebooks() -> None:
    names = ["01_quickstart", "02_never_lost", "03_remote_nodes", "04_pipeline_parallel", "05_tensor_and_fsdp"]
    assert list(TOUR) == [f"{name}.ipynb" for name in [*names, "06_pipeline_and_jobs", "07_console", "08_anywhere"]]


def test_first_cell_says_what_it_shows_what_it_needs_and_how_long_it_takes(notebook: Path) -> None:
    first = nbformat.read(notebook, as_version=4).cells[0]
    assert first.cell_type == "markdown"
    for promise in ("What you will see", "What it needs", "How long it takes"):
        assert promise in first.source


def test_cells_are_short_and_were_all_run(notebook: Path) -> None:
    for cell in _code_cells(notebook):
        assert len(cell.source.splitlines()) <= MAX_LINES, cell.source
        assert cell.execution_count, cell.source


def test_nothing_is_installed_and_no_path_is_of_one_machine(notebook: Path) -> None:
    for cell in nbformat.read(notebook, as_version=4).cells:
        text = cell.source + str(cell.get("outputs", ""))
        assert not re.search(r"pip +install|conda +install", cell.source)
        assert not re.search(r"/(?:home|root|Users|tmp|work|mnt)/", text), cell.source


def test_output_that_is_not_compared_says_why(notebook: Path) -> None:
    for cell in _code_cells(notebook):
        comments = re.findall(r"^\s*#\s*(\w+)\s*$", cell.source, flags=re.MULTILINE)
        marks = [*cell.metadata.get("tags", []), *(comment.lower().replace("_", "-") for comment in comments)]
        if any(IGNORED.fullmatch(mark) for mark in marks):
            assert cell.metadata.get("reason"), f"give metadata.reason to the cell\n{cell.source}"


def test_few_patterns_replace_what_differs_and_each_is_used() -> None:
    patterns = re.findall(r"^regex: (.*)\nreplace: .*$", SANITIZE.read_text(), flags=re.MULTILINE)
    assert 0 < len(patterns) <= MAX_PATTERNS
    assert len(patterns) == SANITIZE.read_text().count("regex:")
    outputs = str([cell.outputs for path in TOUR.values() for cell in _code_cells(path)])
    unused = [pattern for pattern in patterns if not re.search(pattern, outputs)]
    assert not unused


def test_saved_views_are_plain_and_need_no_kernel(notebook: Path) -> None:
    """JupyterLab shows an error in place of a widget without a kernel."""
    assert "widgets" not in nbformat.read(notebook, as_version=4).metadata
    for cell in _code_cells(notebook):
        assert not any(WIDGET in output.get("data", {}) for output in cell.outputs), cell.source


def test_failure_is_shown_on_purpose_and_in_few_lines(notebook: Path) -> None:
    for cell in _code_cells(notebook):
        errors = [output for output in cell.outputs if output.output_type == "error"]
        assert bool(errors) == ("raises-exception" in cell.metadata.get("tags", [])), cell.source
        for error in errors:
            assert sum(len(text.splitlines()) for text in error.traceback) <= MAX_ERROR_LINES, error.traceback


def test_never_lost_shows_a_stop_and_a_death_and_ends_its_session() -> None:
    cells = _code_cells(TOUR["02_never_lost.ipynb"])
    errors = [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert [error.ename for error in errors] == ["CellTimeout", "RankLost"]
    assert "all ranks stopped and kept their variables" in errors[0].evalue
    assert "rank 0 kept its variables" in errors[1].evalue
    assert cells[-1].source == "%distributed stop"


def test_quickstart_ends_with_its_accuracy_and_stops_its_ranks() -> None:
    cells = _code_cells(TOUR["01_quickstart.ipynb"])
    summary = [cell.outputs[0].text for cell in cells if "summary" in cell.metadata.get("tags", [])]
    assert len(summary) == 1
    assert re.match(r"test accuracy 0\.[89]\d* on 10,000 images$", summary[0])
    assert cells[-1].source == "%distributed stop"


def test_model_of_the_job_is_as_good_here_as_it_was_there_and_no_job_is_left() -> None:
    cells = _code_cells(TOUR["06_pipeline_and_jobs.ipynb"])
    printed = "\n".join(str(output.get("text", "")) for cell in cells for output in cell.outputs)
    *_, there, here = re.findall(r"accuracy (0\.[89]\d*)", printed)
    assert here == there
    assert len(re.findall(r"^job \S+: succeeded$", printed, flags=re.MULTILINE)) == 2
    assert cells[-1].source == "%job rm fashion greeting"


def test_live_views_are_followed_by_what_is_asserted_of_them_and_nothing_is_left() -> None:
    cells = _code_cells(TOUR["07_console.ipynb"])
    live = [number for number, cell in enumerate(cells) if "nbval-ignore-output" in cell.metadata.get("tags", [])]
    shown = [cells[number].source.splitlines()[-1] for number in live]
    views = ["node_form", "%distributed board", "%distributed vars weights,share", "console"]
    assert shown == [*views, "view", "ended", "%pipeline", "picture"]
    for number in live:
        assert cells[number].outputs[0].data["text/html"], cells[number].source
        assert re.search(r"^ *assert ", cells[number + 1].source, flags=re.MULTILINE), cells[number + 1].source
    for number in (live[shown.index("view")], live[shown.index("ended")]):  # no page has shown the job
        kept = cells[number].outputs[0].data["text/plain"]
        assert re.search(r": succeeded, .*, step 250 of 250, loss \S+, model model\.safetensors\n", kept), kept
    sources = [cell.source for cell in cells]
    assert sources.count("%distributed stop") == 1 and sources[-2] == "%job rm two-copies"
    assert "folder.cleanup()" in sources[-1]


def test_every_target_is_shown_in_the_notebook_and_in_the_readme() -> None:
    shown = "\n".join(cell.source for cell in _code_cells(TOUR["08_anywhere.ipynb"]))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in TARGETS if f'show("{name}"' not in shown or f"`{name}`" not in readme] == []


# ---- running the notebooks


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment in which ranks use the CPU; everything that was started in it has exited after the test."""
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    left_out = {"PYTEST_ADDOPTS", "JPY_SESSION_NAME"}
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env |= {"DETRAIN_NB_RUNTIME_DIR": str(runtime), "DETRAIN_NB_OUTPUT": "final", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"DETRAIN_NB_LINGER": "2", "XDG_STATE_HOME": str(tmp_path / "state")}
    yield env
    _, alive = psutil.wait_procs(_processes_with("DETRAIN_NB_RUNTIME_DIR", str(runtime)), timeout=60)
    assert not alive, alive


def _processes_with(name: str, value: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _run_nbval(notebook: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run nbval in a pytest of its own: its plugin is off in this one, and warnings of its imports are not ours."""
    options = ["-p", "nbval", "--nbval", "--nbval-current-env", f"--nbval-sanitize-with={SANITIZE}", "--color=no"]
    settings = [f"--rootdir={notebook.parent}", "-c", os.devnull, f"--timeout={LIMIT_S}", "-p", "no:cacheprovider"]
    return subprocess.run(
        [Path(sys.executable).with_name("pytest"), *options, *settings, notebook],
        env=env,
        cwd=notebook.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    "name", [name if name.startswith("01") else pytest.param(name, marks=pytest.mark.slow) for name in TOUR]
)
def test_notebook_gives_the_stored_outputs(
    name: str, env: dict[str, str], needs_debian: Callable[..., None], make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    needs_debian(*PACKAGES.get(name, []))
    if name in WITH_HOSTS:
        env["HOME"] = str(home_with_hosts(make_testbed, tmp_path))
    try:
        done = _run_nbval(TOUR[name], env)
    finally:
        for left in WRITTEN:
            TOUR[name].with_name(left).unlink(missing_ok=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_other_output_is_found_and_the_killed_kernel_leaves_no_rank(tmp_path: Path, env: dict[str, str]) -> None:
    sources = [
        "%load_ext detrain_nb",
        "%%distributed -n 2\nimport subprocess\nsubprocess.Popen(['sleep', '300'])\n1 + 1",
    ]
    notebook = nbformat.v4.new_notebook()
    for count, source in enumerate(sources, 1):
        notebook.cells.append(nbformat.v4.new_code_cell(source, execution_count=count))
    notebook.cells[1].outputs = [nbformat.v4.new_output("display_data", {"text/plain": "[0-1] 3"})]
    nbformat.write(notebook, tmp_path / "wrong.ipynb")
    done = _run_nbval(tmp_path / "wrong.ipynb", env)
    assert done.returncode == 1, done.stdout
    assert "[0-1] 2" in done.stdout
    assert "1 failed, 1 passed" in done.stdout


@pytest.mark.thorough
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("name", ["04_pipeline_parallel.ipynb", "05_tensor_and_fsdp.ipynb"])
def test_what_comes_from_the_examples_runs_on_hosts_too(
    name: str, env: dict[str, str], make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    """The notebook names the line to use on hosts before each cell that starts ranks; the hosts share a folder."""
    shared = tmp_path / "shared"
    shared.mkdir()
    nodes = tmp_path / "nodes.toml"
    nodes.write_text(f'[defaults]\nworkdir = "{shared}/work"\n[[nodes]]\nhost = "gpu1"\n[[nodes]]\nhost = "gpu2"\n')
    notebook = nbformat.read(TOUR[name], as_version=4)
    cells = []
    for cell in notebook.cells:
        if found := re.match(r"%%distributed -n (\d)", cell.source):
            start = f"%distributed start --nodes {nodes} -n {int(found[1]) // 2} --project .. --env OMP_NUM_THREADS=1"
            cells.append(nbformat.v4.new_code_cell(start))
        cells.append(cell)
    notebook.cells = cells
    project = tmp_path / "project"
    shutil.copytree(ROOT / "examples", project / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (project / "notebooks").mkdir()
    nbformat.write(notebook, project / "notebooks" / name)
    env["HOME"] = str(home_with_hosts(make_testbed, tmp_path, share=[shared]))
    options = ["--timeout", "120", "--output", str(tmp_path / "executed.ipynb")]
    command = [sys.executable, "-m", "detrain_nb", "run", name, *options]
    done = subprocess.run(
        command, env=env, cwd=project / "notebooks", stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "2 ranks on cpu of gpu1, gpu2" in done.stdout
