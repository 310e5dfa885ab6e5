"""The example of a job: its spec, and the line of the README that runs it."""

from __future__ import annotations

import json
import os
import re
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
@pytest.mark.timeout(200)
def test_lines_of_the_readme_run_the_job_and_fetch_its_model(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are pasted, but for the number of steps, and on the digits, which are there on every machine."""
    tmp_path = tmp_path_factory.mktemp("job")  # a short path: sockets are below it
    places = {"XDG_STATE_HOME": "state", "XDG_CACHE_HOME": "cache", "DETRAIN_NB_RUNTIME_DIR": "run"}
    for name, folder in places.items():
        (tmp_path / folder).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / folder))
    shutil.copytree(EXAMPLES / "jobs", tmp_path / "examples/jobs")
    spec = tmp_path / "examples/jobs/fashion.toml"
    spec.write_text(spec.read_text().replace("/usr/share/datasets/fashion-mnist", str(tmp_path / "nothing")))
    readme = (EXAMPLES.parent / "README.md").read_text()
    [lines] = re.findall(r"^    cd examples/jobs\n(?:    .+\n)+", readme, flags=re.MULTILINE)
    assert len(lines.splitlines()) == 5
    done = subprocess.run(
        ["bash", "-ec", lines.replace("--training.steps 100", "--training.steps 8 --training.warmup_steps 2")],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=190,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 8 of 8: test accuracy" in done.stdout
    assert len(load_file(tmp_path / "examples/jobs/models/model.safetensors")) == 6


def test_line_of_the_examples_is_that_of_the_readme() -> None:
    assert f"`{LINE}`" in (EXAMPLES / "README.md").read_text()
    assert f"    {LINE} " in (EXAMPLES.parent / "README.md").read_text()
