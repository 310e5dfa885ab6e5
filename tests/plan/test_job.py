"""A job's script reads its spec: as it was written, with overrides of the command line, on an old Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import detrain_nb
from detrain_nb.errors import SpecError
from detrain_nb.plan import Batch
from detrain_nb.plan.fields import build, dataclass_fields
from detrain_nb.plan.job import (
    JOB_SPEC_VARIABLE,
    JobCheckpoint,
    JobData,
    JobModel,
    JobNode,
    JobParallelism,
    JobSpec,
    JobTraining,
    job_spec,
)
from detrain_nb.spec import Checkpoint, Data, Model, Parallelism, PipelineSpec, Training

FULL = JobSpec(
    "mnist",
    description="zwei\nZeilen \u2603",
    world_size=3,
    nodes=(JobNode("a", (0, 1)), JobNode("b", (2,))),
    parallelism=JobParallelism(pp=3, microbatches=6, precision="bf16"),
    training=JobTraining(epochs=3, batch_size=12, clip=1.0, seed=(1 << 32) - 1),
    batch=Batch(1, 6, 2),
    data=JobData("s3://bucket/x", "parquet", ("a", "b")),
    model=JobModel("hf://x"),
    checkpoint=JobCheckpoint("runs", interval=5, keep=None),
    artifacts=("*.pt",),
)
# Prints the Python version, and the spec with the command line's overrides.
SCRIPT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from detrain_nb import job_spec
job = job_spec()
print(sys.version_info[:2], job.name, job.training.epochs, job.checkpoint.url, job.nodes[1].ranks, job.batch.micro_size)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"pydantic", "torch", "tomllib", "yaml", "IPython"}))
"""


@pytest.fixture
def spec_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of FULL, to which the environment variable points."""
    path = tmp_path / "spec.json"
    path.write_text(FULL.to_json(), encoding="utf-8")
    monkeypatch.setenv(JOB_SPEC_VARIABLE, str(path))
    return path


def _find_pythons() -> list[str]:
    """Return this Python, and the oldest version for nodes if pyenv has it; a shim on PATH may not be active."""
    versions = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    return [sys.executable, *(str(each) for each in sorted(versions.glob("3.10.*/bin/python3.10"))[:1])]


@pytest.mark.parametrize("python", _find_pythons())
def test_script_reads_its_spec_with_nothing_installed(python: str, spec_file: Path, tmp_path: Path) -> None:
    version = "(3, 10)" if "3.10" in python else str(sys.version_info[:2])
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    root = Path(detrain_nb.__file__).parents[1]
    done = subprocess.run(
        [python, "-I", "-S", str(script), str(root), "--mine", "--training.epochs", "7", "--checkpoint.url=x"],
        env={JOB_SPEC_VARIABLE: str(spec_file)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == (f"{version} mnist 7 x (2,) 2\n[]\n", "")


def test_spec_is_read_as_it_was_written(spec_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--samples", "10", "data.csv"])
    assert detrain_nb.job_spec() == FULL


def test_command_line_wins_and_leaves_the_scripts_own_words_alone(spec_file: Path) -> None:
    words = [
        "--training.steps",
        "9",
        "--lr",
        "1",
        "--my.option",
        "2",
        "--parallelism.compile",
        "--",
        "--training.seed=1",
    ]
    job = job_spec(words)
    assert (job.training.steps, job.training.epochs, job.parallelism.compile) == (9, None, True)
    assert job.training.seed == FULL.training.seed, "behind -- nothing is ours"
    assert job_spec(["--data.chunks=x,y", "--training.clip", "none"]).data == JobData(
        "s3://bucket/x", "parquet", ("x", "y")
    )
    assert job_spec(["--training.clip", "none"]).training.clip is None


def test_try_of_a_script_is_a_few_steps_without_a_checkpoint(spec_file: Path) -> None:
    tried = job_spec(["--training.dev"])
    assert (tried.training.epochs, tried.training.steps, tried.training.log_every) == (None, 3, 1)
    assert tried.checkpoint is None
    longer = job_spec(["--training.dev", "--training.steps", "9", "--checkpoint.url", "x"])
    assert (longer.training.steps, longer.checkpoint) == (9, JobCheckpoint("x")), "what is said wins"
    how = JobTraining(steps=2, warmup_steps=2, evaluate_every=100, dev=True)
    assert JobSpec("x", training=how).for_dev().training == JobTraining(
        steps=2, warmup_steps=2, log_every=1, evaluate_every=2, dev=True
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--training.epoch 2", "'--training.epoch' is not a field: did you mean '--training.epochs'?"),
        ("--training.epochs two", "--training.epochs 'two': give a whole number or none"),
        ("--training.epochs", "--training.epochs: no value"),
        (
            "--training.scheduler sine",
            "--training.scheduler 'sine': give 'constant', 'linear', 'cosine'",
        ),
        ("--training.dev maybe", "--training.dev 'maybe': give true or false"),
    ],
)
def test_word_that_cannot_be_is_refused(words: str, complaint: str, spec_file: Path) -> None:
    with pytest.raises(SpecError) as caught:
        job_spec(words.split())
    assert str(caught.value).startswith(complaint)


def test_axes_and_batch_of_a_command_line_are_resolved() -> None:
    job = JobSpec("x", world_size=4, training=JobTraining(batch_size=8), batch=Batch(1, 1, 8))
    words = "--training.batch_size 32 --parallelism.pp 2 --parallelism.dp_shard -1"
    changed = job.with_overrides(words.split())
    assert changed.batch == Batch(replicas=2, microbatches=4, micro_size=4)
    assert (changed.parallelism.dp_shard, changed.parallelism.microbatches) == (2, 4)
    with pytest.raises(SpecError, match="mesh pp=3 x dp_shard=2 needs 6 ranks"):
        changed.with_overrides(["--parallelism.pp", "3"])
    with pytest.raises(SpecError, match="batch size 30 is not divisible by 2 replicas x 4 microbatches"):
        changed.with_overrides(["--training.batch_size", "30"])


def test_axes_and_batch_are_those_of_the_round_where_nodes_vary(
    spec_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = JobParallelism(tp=2, dp_shard=-1)
    job = JobSpec("x", world_size=8, training=JobTraining(batch_size=8), parallelism=given, nodes_vary=True)
    spec_file.write_text(job.to_json())
    for world_size, shards in ((8, 4), (4, 2), (2, 1)):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        found = job_spec([])
        assert (found.world_size, found.parallelism.tp, found.parallelism.dp_shard) == (world_size, 2, shards)
        assert found.batch and found.batch.global_size == 8 == shards * found.batch.replica_size
    monkeypatch.setenv("WORLD_SIZE", "6")
    complaint = "with the 6 ranks of this round: batch size 8 is not divisible by 3 replicas: give 6 or 9"
    with pytest.raises(SpecError, match=complaint):
        job_spec([])
    assert job_spec(["--training.batch_size", "9"]).batch == Batch(3, 1, 3)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SpecError, match="with the 1 rank of this round: mesh tp=2 needs 2 ranks, but there is 1"):
        job_spec([])


def test_override_of_what_was_not_given_asks_for_the_rest() -> None:
    with pytest.raises(SpecError, match="data: url is missing"):
        JobSpec("x").with_overrides(["--data.format", "csv"])
    assert JobSpec("x").with_overrides(["--data.url", "y"]).data == JobData("y")


def test_process_without_a_spec_says_how_it_gets_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(JOB_SPEC_VARIABLE, raising=False)
    with pytest.raises(SpecError, match="DETRAIN_NB_JOB_SPEC is not set, so this process has no spec: submit"):
        job_spec([])
    monkeypatch.setenv(JOB_SPEC_VARIABLE, str(tmp_path / "gone.json"))
    with pytest.raises(SpecError, match=r"gone\.json' cannot be read"):
        job_spec([])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "job spec: Expecting value"),
        ("[" * 100_000, "job spec: nested too deeply"),
        ('{"format": 1, "name": "x", "training": {"clip": NaN}}', "job spec: NaN is not a number"),
        ('{"format": 1, "name": "x", "training": {"clip": 1e999}}', r"job spec\.training\.clip inf: give a number"),
        ('{"format": 1, "name": "x", "world_size": ' + "9" * 5000 + "}", "job spec: "),
        (" " * 1_000_001, "job spec: larger than 1 MB"),
        ("[]", "job spec: has format 'list', this release reads 1"),
        ('{"format": 2, "name": "x"}', "job spec: has format 2, this release reads 1: submit the job again"),
        ('{"format": 1}', "job spec: name is missing"),
        ('{"format": 1, "name": 3}', "job spec.name 3: give a text"),
        ('{"format": 1, "name": "x", "training": {"dev": 1}}', "job spec.training.dev 1: give true or false"),
        ('{"format": 1, "name": "x", "nodes": [{"name": "a"}]}', r"job spec.nodes\[0\]: ranks is missing"),
        (
            '{"format": 1, "name": "x", "nodes": [{"name": "a", "ranks": [true]}]}',
            r"\.ranks\[0\] True: give a",
        ),
    ],
)
def test_text_that_is_no_spec_is_refused_with_its_place(text: str, complaint: str) -> None:
    with pytest.raises(SpecError, match=f"^{complaint}" if complaint.startswith("job") else complaint):
        JobSpec.from_json(text)


def test_what_a_later_release_adds_is_left_out() -> None:
    data = json.loads(FULL.to_json())
    data["later"] = {"x": 1}
    data["training"]["later"] = 1
    data["nodes"][0]["later"] = 1
    assert JobSpec.from_json(json.dumps(data)) == FULL


@pytest.mark.parametrize(
    ("job", "spec"),
    [
        (JobParallelism, Parallelism),
        (JobTraining, Training),
        (JobData, Data),
        (JobModel, Model),
        (JobCheckpoint, Checkpoint),
    ],
)
def test_fields_of_a_job_are_those_of_the_spec_with_its_defaults(job: type[Any], spec: type[Any]) -> None:
    defaults = {each.name: each.default for each in fields(job)}
    assert list(defaults) == list(spec.model_fields)
    for name, field in spec.model_fields.items():
        if not field.is_required() and (job, name) != (JobParallelism, "dp_shard"):  # by default the remaining ranks
            assert defaults[name] == field.default, name


def test_artifacts_are_by_default_those_of_the_spec() -> None:
    assert JobSpec("x").artifacts == PipelineSpec(name="x", source={"module": "a"}).artifacts


def _values(hint: Any) -> st.SearchStrategy[Any]:
    inner = dataclass_fields(hint)
    if inner is not None:
        return st.builds(hint, **{name: _values(each) for name, each in inner.items()})
    if hint is float:
        return st.floats(-1e200, 1e200)
    if hint is str:
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
    arguments = getattr(hint, "__args__", ())
    if getattr(hint, "__origin__", None) is tuple:
        return st.lists(_values(arguments[0]), max_size=3).map(tuple)
    if arguments and not any(isinstance(each, str) for each in arguments):
        return st.one_of([_values(each) for each in arguments])
    return st.from_type(hint)


@given(_values(JobSpec))
def test_every_spec_is_read_as_it_was_written(job: JobSpec) -> None:
    assert is_dataclass(job)
    assert JobSpec.from_json(job.to_json()) == job


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([each.name for each in fields(JobSpec)]), JSON))
def test_whatever_json_holds_is_a_spec_or_one_fault(data: dict[str, Any]) -> None:
    try:
        build(JobSpec, data, where="spec")
    except SpecError as exc:
        assert str(exc).startswith("spec") and len(str(exc).splitlines()) == 1
