"""Documents of other tools: each value is in the spec, or is named with the reason for leaving it out."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detrain_nb.documents import format_document
from detrain_nb.errors import SpecError
from detrain_nb.formats import Imported, import_text
from detrain_nb.formats.reading import Steps, write_steps

from .foreign_documents import (
    DOCUMENTS,
    RECORD,
    RFC,
    RFC_AS_WRITTEN,
    SCHEDULER,
    SDL,
    SDL_WITH_TORCHRUN,
    TENSOR_STATE,
    TITAN_2024,
    TITAN_LAST,
)

KINDS = {
    "record.json": "detrain",
    "state.json": "detrain",
    "agents.yaml": "akash",
    "train.yaml": "akash",
    "job.json": "hypha",
    "scheduler.toml": "hypha",
    "scheduler-docs.toml": "hypha",
    "llama3_8b_2024.toml": "torchtitan",
    "debug_2025.toml": "torchtitan",
    "llama3_8b.toml": "torchtitan",
    "lease.json": "lease",
    "node_configs.json": "ravnest",
    "node_0.json": "ravnest",
    "fsdp.yaml": "accelerate",
    "megatron.yaml": "accelerate",
}
ODD = [None, True, -1, 0, 2**62, 1e300, 0.5, "", " ", "x", "-x", "a" * 5000, [], {}, [[]], [{}], {"": ""}, {"x": {}}]
NESTED: Any = []
for _ in range(80):
    NESTED = [NESTED]


def _import(name: str, content: Any) -> Imported:
    suffix = f".{name.rpartition('.')[2]}"
    text = json.dumps(content) if isinstance(content, list) else format_document(content, suffix)
    return import_text(text, name=name)


def _leaves(value: Any, steps: Steps = ()) -> Iterator[Steps]:
    items: Any = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for step, item in items:
        yield from _leaves(item, (*steps, step))
    if not isinstance(value, list | dict) and value is not None:
        yield steps


def _changed(content: Any, steps: Steps, change: Any) -> Any:
    """Return a copy of a document that ``change`` has altered; it gets the innermost table or list and its key."""
    content = copy.deepcopy(content)
    *above, last = steps
    table = content
    for step in above:
        table = table[step]
    change(table, last)
    return content


def _alter(table: Any, key: Any) -> None:
    value = table[key]
    if isinstance(value, bool):
        table[key] = not value
    elif isinstance(value, str):
        table[key] = str(int(value) + 1) if value.isdigit() else f"{value}x"
    else:
        table[key] = value + 1 if isinstance(value, int) else value / 2


@pytest.mark.parametrize("name", DOCUMENTS)
def test_whatever_a_document_says_is_in_the_spec_or_named(name: str) -> None:
    """If a value is in neither, changing it has no effect, and the user would not notice."""
    found = _import(name, DOCUMENTS[name])
    assert found.kind == KINDS[name]
    named = [place for line in found.left_out for place in line.partition(": ")[0].split(", ")]
    for steps in _leaves(DOCUMENTS[name]):
        if any(write_steps(steps[:length]) in named for length in range(1, len(steps) + 1)):
            continue
        try:
            other = _import(name, _changed(DOCUMENTS[name], steps, _alter))
        except SpecError as exc:
            assert write_steps(steps) in str(exc), "it is read, so a fault names it"
        else:
            assert other.to_dict() != found.to_dict() or other.left_out != found.left_out, write_steps(steps)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_nothing_but_a_spec_error_comes_of_a_broken_document(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*DOCUMENTS]))
    content: Any = DOCUMENTS[name]
    for _ in range(data.draw(st.integers(1, 3))):
        places = [steps for leaf in _leaves(content) for steps in (leaf[:length] for length in range(1, len(leaf) + 1))]
        odd = data.draw(st.sampled_from([*ODD, NESTED, "delete", "beside"]))

        def break_it(table: Any, key: Any, odd: Any = odd) -> None:
            if odd == "delete":
                del table[key]
            elif odd == "beside" and isinstance(table, dict):
                table["x" * 70 + "\u2028.y"] = copy.deepcopy(table[key])
            else:
                table[key] = copy.deepcopy(odd)

        if places:
            content = _changed(content, data.draw(st.sampled_from(places)), break_it)
    try:
        found = _import(name, content)
    except SpecError as exc:
        assert str(exc).isprintable() or "\n" in str(exc)
    else:
        assert isinstance(found, Imported)


@pytest.mark.parametrize(
    ("name", "steps", "value", "said"),
    [
        ("record.json", ("state", "parallelForm", "nnodes"), 3, "state.parallelForm.nnodes: 3, but state.nodesForm"),
        ("record.json", ("state", "parallelForm", "nprocPerNode"), True, "state.parallelForm.nprocPerNode: True: give"),
        ("record.json", ("state", "parallelForm", "epochs"), "two", "state.parallelForm.epochs 'two': give a whole"),
        ("record.json", ("state", "parallelForm", "type"), "mixture", "state.parallelForm.type: give"),
        ("record.json", ("state", "nodesForm", "nodes", 1, "ip"), "a b", "state.nodesForm.nodes[1].ip 'a b': give"),
        ("record.json", ("state", "nodesForm"), [], "state.nodesForm: a list: give a table"),
        ("record.json", ("state", "trainingScriptForm", "filePath"), None, "trainingScriptForm.filePath: is missing"),
        ("record.json", ("state", "trainingScriptForm", "repo"), "https://a:b@c/d", "trainingScriptForm.repo: git url"),
        ("agents.yaml", ("version",), "3.0", "version: give one of 2.0, 2.1"),
        ("agents.yaml", ("deployment", "others", "anywhere", "profile"), "huge", "deployment.others.anywhere.profile:"),
        ("agents.yaml", ("deployment", "others", "anywhere", "count"), 10**9, "anywhere.count: 1000000000: give a"),
        (
            "agents.yaml",
            ("profiles", "compute", "large", "resources", "gpu", "units"),
            1.5,
            "resources.gpu.units: give",
        ),
        ("agents.yaml", ("profiles", "compute", "small", "resources", "memory", "size"), "4 Gi", "memory.size: give a"),
        ("agents.yaml", ("deployment", "first", "here"), {"profile": "small"}, "services: nodes 1 and 2 have the same"),
        ("job.json", ("driver",), "spark", "driver: give"),
        ("scheduler.toml", ("scheduler", "job", "type"), "gossip", "scheduler.job.type: give"),
        ("scheduler.toml", ("scheduler", "job", "rounds", "max_batch_size"), 0, "rounds.max_batch_size: 0: give a"),
        ("llama3_8b.toml", ("training", "steps"), 0, "training.steps 0: give a whole number"),
        ("llama3_8b.toml", ("training", "batch_size"), 4, "training.batch_size: is the same as training.local_batch"),
        ("llama3_8b.toml", ("compile", "enable"), "yes", "compile.enable 'yes': give true or false"),
    ],
)
def test_fault_is_told_with_its_place_in_the_file(name: str, steps: Steps, value: Any, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        _import(name, _changed(DOCUMENTS[name], steps, lambda table, key: table.__setitem__(key, value)))
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{name}: ")


# DeTrain


def test_pipeline_of_the_console_is_a_spec() -> None:
    found = _import("record.json", [RECORD])
    assert found.spec is not None
    assert found.spec.to_dict() == {
        "name": "digits_1",
        "parallelism": {"pp": -1, "dp_shard": 1},
        "training": {"epochs": 3, "batch_size": 64, "learning_rate": 0.01},
        "nodes": [
            {"host": "first.example.com", "devices": "cpu", "ranks": 2},
            {"host": "10.0.0.2", "ranks": 2},
        ],
        "source": {
            "git": {"url": "https://github.com/you/digits", "folder": "ppl/nn"},
            "entry": "main.py",
            "argument_style": "detrain",
        },
        "rendezvous": {"endpoint": "10.0.0.1", "port": 9999},
    }
    assert found.spec.plan(gpus={"10.0.0.2": 2}).world_size == 4
    assert "hunter2" not in str(found), "no password is carried, and none is shown"
    assert any("state.trainingScriptForm.password" in line and "source.git.token" in line for line in found.left_out)


def test_state_alone_is_read_and_meets_at_the_rendezvous() -> None:
    spec = _import("state.json", TENSOR_STATE).spec
    assert spec is not None
    assert (spec.name, spec.parallelism.tp, spec.nodes[0].ranks) == ("my-model", -1, 4)
    assert (spec.rendezvous.id, spec.rendezvous.endpoint, spec.rendezvous.port) == ("7", "10.0.0.1", 29400)


# Akash


def test_services_that_start_no_torchrun_are_nodes() -> None:
    found = _import("agents.yaml", SDL)
    assert found.spec is None
    assert found.to_dict() == {
        "nodes": [
            {"host": "first", "devices": "cpu", "memory_gb": 4.294967296},
            {"name": "others-0", "host": "others", "devices": [0, 1]},
            {"name": "others-1", "host": "others", "devices": [0, 1]},
        ]
    }


def test_services_that_start_torchrun_are_a_spec() -> None:
    found = _import("train.yaml", SDL_WITH_TORCHRUN)
    assert found.spec is not None
    assert found.spec.to_dict() == {
        "name": "train",
        "nodes": [
            {"host": "first", "devices": [0, 1]},
            {"host": "second", "devices": [0, 1]},
        ],
        "source": {"script": "train.py", "arguments": ["--lr", "$3"]},
        "env": {"MODE": "fast"},
        "secrets": ["HF_TOKEN", "PASSPORT"],
        "image": "ghcr.io/you/train:1",
        "rendezvous": {"port": 29501},
    }
    assert "hf_secret" not in str(found), "no secret is carried, and none is shown"
    for name, reason in {
        "HF_TOKEN": "secret",
        "RANK": "is set on every rank",
        "WORLD_SIZE": "is set",
        "OWN": "differs",
    }.items():
        assert any(".env" in line and f"{name}: " in line and reason in line for line in found.left_out), name
    named = "\n".join(found.left_out)
    assert "services.board, deployment.board: does not start torchrun" in named
    assert "services.first.args: nvidia-smi (line 1)" in named


def test_fault_of_a_variable_with_an_odd_name_is_told() -> None:
    content = copy.deepcopy(SDL_WITH_TORCHRUN)
    for service in ("first", "second"):
        content["services"][service]["env"] = ["A]]=x"]
    with pytest.raises(SpecError, match=r"^train\.yaml: services\.first\.env\.A\]\]: give"):
        _import("train.yaml", content)
    content["services"]["first"]["env"] = ["a secret without a name", "HF_TOKEN"]
    found = _import("train.yaml", content)
    assert "services.first.env: an entry has no variable name" in found.left_out
    assert "a secret" not in str(found) and "services.first.env: HF_TOKEN: differs" in str(found)


# Hypha


def test_job_of_the_rfc_is_read_as_json_and_as_the_rfc_writes_it() -> None:
    spec = _import("job.json", RFC).spec
    assert spec is not None
    assert (spec.name, spec.model and spec.model.url) == (RFC["job_id"], "s3://models/lenet")
    assert (spec.training.loss, spec.training.optimizer, spec.training.scheduler) == (
        "cross_entropy",
        "adamw",
        "cosine",
    )
    assert spec.data is not None and spec.data.chunks == ("00000", "00001")
    assert spec.parallelism.precision == "bf16"
    found = import_text(RFC_AS_WRITTEN, name="job.json")
    assert found.spec is not None and found.spec.data is not None
    assert (found.spec.name, found.spec.data.url, found.spec.training.loss) == (
        "job",
        "s3://data/digits",
        "cross_entropy",
    )
    named = {line.partition(":")[0] for line in found.left_out}
    assert named >= {
        "job_id",
        "model",
        "data.chunk",
        "training_definition.local_steps",
        "training_definition.optimizer",
    }
    assert "extra: a spec has no field for it" in str(_import("job.json", {**RFC, "extra": []}))
    assert named >= {"training_definition.accelerate_config", "training_definition"}, "what is left open"


def test_job_of_the_scheduler_has_as_many_samples_in_its_steps() -> None:
    found = _import("scheduler.toml", SCHEDULER)
    assert found.spec is not None
    assert found.spec.to_dict() == {
        "name": "scheduler",
        "parallelism": {"dp_replicate": 2, "dp_shard": 1},
        "training": {"steps": 200, "batch_size": 600, "learning_rate": 0.002},
        "source": {"script": "torch_training.py"},
        "data": {"url": "digits", "format": "safetensors"},
        "model": {"url": "hf://you/lenet@main", "chunks": ["config.json", "model.safetensors"]},
    }
    assert "hf_secret" not in str(found)
    outer = [line for line in found.left_out if "outer_optimizer" in line]
    assert len(outer) == 1 and "DiLoCo" in outer[0] and outer[0].count("outer_optimizer") == 2


# torchtitan


def test_configurations_of_torchtitan_start_the_same_training() -> None:
    spec = _import("llama3_8b_2024.toml", TITAN_2024).spec
    assert spec is not None
    assert spec.to_dict() == {
        "name": "llama3_8b_2024",
        "description": "Llama 3 8B",
        "parallelism": {
            "pp": 2,
            "dp_shard": 4,
            "tp": 2,
            "microbatches": 2,
            "activations": "full",
            "compile": True,
            "precision": "bf16",
        },
        "training": {
            "steps": 1000,
            "batch_size": 8,
            "learning_rate": 3e-4,
            "scheduler": "linear",
            "warmup_steps": 200,
            "clip": 0.5,
            "log_every": 5,
        },
        "checkpoint": {"url": "out/kept", "interval": 50, "keep": 10},
        "source": {
            "module": "torchtitan.train",
            "arguments": [
                "--job.dump_folder=./out",
                "--job.description=Llama 3 8B",
                "--profiling.enable_profiling",
                "--profiling.save_traces_folder=traces",
                "--profiling.profile_freq=100",
                "--metrics.log_freq=5",
                "--metrics.enable_tensorboard",
                "--model.name=llama3",
                "--model.flavor=8B",
                "--optimizer.name=AdamW",
                "--optimizer.lr=0.0003",
                "--training.local_batch_size=2",
                "--training.seq_len=4096",
                "--lr_scheduler.warmup_steps=200",
                "--training.max_norm=0.5",
                "--training.steps=1000",
                "--parallelism.data_parallel_shard_degree=4",
                "--parallelism.tensor_parallel_degree=2",
                "--compile.enable",
                "--training.dataset=c4",
                "--parallelism.pipeline_parallel_degree=2",
                "--checkpoint.enable",
                "--checkpoint.folder=kept",
                "--checkpoint.interval=50",
                "--activation_checkpoint.mode=full",
                "--activation_checkpoint.selective_ac_option=op",
            ],
        },
    }
    with_password = _import("a.toml", {"training": {"dataset": "c4", "dataset_path": "s3://me:abc@h/d"}})
    assert any(line.startswith("--training.dataset_path: its value may be") for line in with_password.left_out)
    last = _import("llama3_8b.toml", TITAN_LAST)
    assert last.spec is not None
    how, schedule = last.spec.parallelism, last.spec.parallelism.schedule
    assert (how.pp, how.dp_shard, schedule, how.microbatches) == (2, 2, "Interleaved1F1B", 2)
    assert (last.spec.training.batch_size, last.spec.training.scheduler, last.spec.training.seed) == (64, "wsd", 7)
    assert last.spec.checkpoint is not None and last.spec.checkpoint.keep == "all" and last.spec.checkpoint.asynchronous
    assert "--quantize.linear.float8.filter_fqns=output,router" in last.spec.source.arguments
    assert last.left_out == ("experimental.no_such_key, no_such_section.key: torchtitan 0.2.2 has no such option",)


def test_pasted_text_of_toml_is_read_as_such() -> None:
    text = format_document(TITAN_LAST, ".toml")
    assert import_text(text).to_dict()["training"] == _import("llama3_8b.toml", TITAN_LAST).to_dict()["training"]


def test_file_of_ours_is_sent_to_where_it_is_read() -> None:
    with pytest.raises(SpecError, match=r"^a\.toml: is already a spec: open it as it is"):
        _import("a.toml", {"name": "a", "source": {"script": "a.py"}})
    with pytest.raises(SpecError, match=r"^a\.toml: is already a nodes file: give it as it is: --nodes FILE"):
        _import("a.toml", {"nodes": [{"host": "gpu1"}]})
    with pytest.raises(SpecError, match=r"^a\.py: is a program, which an import does not run: make a spec with it"):
        import_text("import torch\nprint(1)\n", name="a.py")
    with pytest.raises(SpecError, match=r"^a\.ipynb: is a notebook, which an import does not run: make a spec with it"):
        import_text('{"cells": []}', name="a.ipynb")
    for name in ("a.json", "a.toml", "a", "a.ipynb"):
        with pytest.raises(SpecError, match=rf"^{name}: is empty$"):
            import_text(" \n", name=name)
