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

from detrain_nb.jobs import submit
from detrain_nb.spec import PipelineSpec

EXAMPLES = Path(__file__).parents[2] / "examples"
LINE = "detrain-nb run fashion.toml"


@pytest.fixture
def places(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders for the jobs of these tests and their records; the path is short because sockets are below it."""
    base = tmp_path_factory.mktemp("job")
    for name, folder in (("XDG_STATE_HOME", "state"), ("XDG_CACHE_HOME", "cache"), ("DETRAIN_NB_RUNTIME_DIR", "run")):
        (base / folder).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(base / folder))
    return base


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
def test_lines_of_the_readme_run_the_job_and_fetch_its_model(places: Path) -> None:
    """The lines are used as written, but with fewer steps, and with the digits, which every machine has."""
    shutil.copytree(EXAMPLES / "jobs", places / "examples/jobs")
    spec = places / "examples/jobs/fashion.toml"
    spec.write_text(spec.read_text().replace("/usr/share/datasets/fashion-mnist", str(places / "nothing")))
    readme = (EXAMPLES.parent / "README.md").read_text()
    [lines] = re.findall(r"^    cd examples/jobs\n(?:    .+\n)+", readme, flags=re.MULTILINE)
    assert len(lines.splitlines()) == 5
    done = subprocess.run(
        ["bash", "-ec", lines.replace("--training.steps 100", "--training.steps 8 --training.warmup_steps 2")],
        cwd=places,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=190,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 8 of 8: test accuracy" in done.stdout
    assert len(load_file(places / "examples/jobs/models/model.safetensors")) == 6


DIES = """
import os, signal
import fashion

class Report(fashion.Report):
    def on_step(self, trainer, record):
        if trainer.step == 6 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        super().on_step(trainer, record)

fashion.Report = Report
fashion.main()
"""


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_killed_rank_has_all_go_on_from_the_last_checkpoint(places: Path) -> None:
    folder = places / "source"
    shutil.copytree(EXAMPLES / "jobs", folder)
    (folder / "dies.py").write_text(DIES)
    spec = PipelineSpec.load(folder / "fashion.toml").to_dict()
    spec["source"] = {"path": str(folder), "entry": "dies.py"}
    spec["training"] |= {"steps": 10, "warmup_steps": 2}
    spec["checkpoint"]["interval"] = 4
    spec["data"]["url"] = str(places / "nothing")
    job = submit(PipelineSpec.from_dict(spec))
    job.wait(100).check()
    steps = [line["step"] for line in job.metrics(rank=0) if "loss" in line]
    assert [steps.count(step) for step in range(1, 11)] in ([1] * 4 + [2] + [1] * 5, [1] * 4 + [2, 2] + [1] * 4)
    assert "warning" not in str(job.logs()).lower()


def test_line_of_the_examples_is_that_of_the_readme() -> None:
    assert f"`{LINE}`" in (EXAMPLES / "README.md").read_text()
    assert f"    {LINE} " in (EXAMPLES.parent / "README.md").read_text()
