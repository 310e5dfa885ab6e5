"""docs/jobs.md and the README match the code: specs, commands, job states and spec fields."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from detrain_nb.magics.job_options import job_parser

from detrain_nb.cli.commands import main
from detrain_nb.jobs.job_status import OVER
from detrain_nb.node.job.terms import LIVE, SUBMITTING, UNKNOWN
from detrain_nb.spec import PipelineSpec

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/jobs.md").read_text(encoding="utf-8")
TEXTS = GUIDE + (ROOT / "README.md").read_text(encoding="utf-8")


def test_specs_of_the_guide_are_some() -> None:
    texts = re.findall(r"```toml\n(.*?)```", GUIDE, flags=re.DOTALL)
    assert texts
    for text in texts:
        spec = PipelineSpec.from_dict(tomllib.loads(text))
        assert spec.plan(gpus={node.name: 1 for node in spec.nodes}).world_size == spec.parallelism.pp


def test_python_of_the_guide_is_python() -> None:
    texts = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
    assert texts
    for text in texts:
        compile(text, "docs/jobs.md", "exec")


def test_every_field_of_a_spec_is_in_the_guide() -> None:
    table = " ".join(re.findall(r"^\| (`.*?) \|", GUIDE, flags=re.MULTILINE))
    assert set(PipelineSpec.model_fields) - set(re.findall(r"`(\w+)`", table)) == set()


def test_every_state_of_a_job_is_in_the_guide() -> None:
    rows = re.findall(r"^\| (`[a-z ,`]+`) \|", GUIDE, flags=re.MULTILINE)
    told = {state for row in rows for state in re.findall(r"`([a-z ]+)`", row)}
    assert {*LIVE, *OVER, SUBMITTING, UNKNOWN} - told == set()


def test_commands_that_are_named_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["jobs", "--help"])
    in_shells = set(re.findall(r"^ {4}(\w+)\b", capsys.readouterr().out, flags=re.MULTILINE))
    assert set(re.findall(r"detrain-nb jobs (\w+)", TEXTS)) - in_shells == set()
    in_notebooks = re.findall(r"^ {4}(\w+)\b", job_parser().format_help(), flags=re.MULTILINE)
    assert set(re.findall(r"%job (\w+)", TEXTS)) - set(in_notebooks) == set()
