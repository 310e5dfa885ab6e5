"""The example of a job: its spec, and the line of the README that runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from safetensors.torch import load_file

from detrain_nb.spec import PipelineSpec

EXAMPLES = Path(__file__).parents[2] / "examples"
LINE = "detrain-nb run fashion.toml"


def test_spec_of_the_example_has_nothing_wrong_and_cuts_the_model_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES / "jobs")
    spec = PipelineSpec.load("fashion.toml")
    assert spec.check() == []
    plan = spec.plan()
    assert plan.mesh is not None and plan.mesh.axes["pp"] == plan.world_size == 2
    assert plan.batch is not None and plan.batch.microbatches == 4


def test_editors_find_the_schema_that_the_example_names() -> None:
    file = EXAMPLES / "jobs/fashion.toml"
    schema = json.loads((file.parent / tomllib.loads(file.read_text())["$schema"]).read_text())
    assert tomllib.loads(file.read_text()).keys() - {"$schema"} <= schema["properties"].keys()


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_line_of_the_readme_runs_the_job_to_its_end(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the digits, which are there on every machine."""
    tmp_path = tmp_path_factory.mktemp("job")  # a short path: sockets are below it
    assert f"`{LINE}`" in (EXAMPLES / "README.md").read_text()
    places = {"XDG_STATE_HOME": "state", "XDG_CACHE_HOME": "cache", "DETRAIN_NB_RUNTIME_DIR": "run"}
    for name, folder in places.items():
        (tmp_path / folder).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / folder))
    shutil.copytree(EXAMPLES / "jobs", tmp_path / "jobs")
    program = [str(Path(sys.executable).with_name("detrain-nb")), *LINE.split()[1:]]
    options = ["--training.steps", "8", "--training.warmup_steps", "2", "--training.log_every", "4"]
    done = subprocess.run(
        [*program, *options, "--data.url", str(tmp_path / "nothing")],
        cwd=tmp_path / "jobs",
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 8 of 8: loss" in done.stdout and "saved model.safetensors" in done.stdout
    [saved] = (tmp_path / "state").rglob("model.safetensors")
    assert len(load_file(saved)) == 6
