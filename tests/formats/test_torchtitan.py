"""The configurations of torchtitan: its own parser reads the TOML, and a stand-in runs the function in Python."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import tomllib
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from detrain_nb.documents import format_document
from detrain_nb.errors import SpecError
from detrain_nb.formats import export_spec, import_text
from detrain_nb.formats.torchtitan_options import CHOICES
from detrain_nb.spec import PipelineSpec

from .foreign_documents import TITAN_2024, TITAN_2025, TITAN_LAST

EIGHT = {"devices": [0, 1, 2, 3, 4, 5, 6, 7]}
# Llama 3 8B as torchtitan publishes it, on two nodes of 8 GPUs; OPTIONS has the rest.
LLAMA: dict[str, Any] = {
    "name": "llama3-8b",
    "source": {"module": "torchtitan.train"},
    "nodes": [{"host": "a", **EIGHT}, {"host": "b", **EIGHT}],
    "training": {"steps": 1000, "batch_size": 16, "learning_rate": 3e-4, "warmup_steps": 200, "clip": 1.0},
    "parallelism": {"activations": "selective"},
    "checkpoint": {"url": "checkpoint", "interval": 500, "keep": 10},
}
OPTIONS = {"flavor": "8B", "seq_len": "8192", "hf_assets": "./assets/hf/Llama-3.1-8B", "dataset": "c4"}
PIPELINE: dict[str, Any] = {
    "parallelism.pp": 4,
    "parallelism.tp": 2,
    "parallelism.schedule": "Interleaved1F1B",
    "parallelism.microbatches": 8,
    "parallelism.activations": "full",
    "parallelism.compile": True,
    "parallelism.precision": "fp32",
    "training.batch_size": 32,
    "training.scheduler": "cosine",
    "training.evaluate_every": 100,
    "training.seed": 3,
}
ADDED_UP = {"parallelism.microbatches": 4, "parallelism.dp_replicate": 2, "training.batch_size": 128}


def _spec(**values: Any) -> PipelineSpec:
    return PipelineSpec.from_dict(LLAMA).with_overrides(values)


# The TOML


@pytest.fixture
def read_toml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Yield the parser of torchtitan v0.2.2; its package's __init__ is not run, as that needs a compiler for GPUs."""
    before = set(sys.modules)
    found = importlib.util.find_spec("torchtitan")
    if found is None:  # as in a conda environment
        pytest.skip("torchtitan's parser is not installed: pip install --no-deps torchtitan==0.2.2")
    monkeypatch.setitem(sys.modules, "torchtitan", importlib.util.module_from_spec(found))
    from torchtitan.config import ConfigManager

    def read(text: str, words: Sequence[str] = ()) -> Any:
        path = tmp_path / "train.toml"
        path.write_text(text)
        config = ConfigManager().parse_args([*words] or [f"--job.config_file={path}"])
        config.job.config_file = None
        return config

    yield read
    for name in {name for name in sys.modules if name.startswith("torchtitan.")} - before:
        del sys.modules[name]


def _toml(**values: Any) -> str:
    return export_spec(_spec(**values), "torchtitan-toml", options=OPTIONS)


def test_llama_in_toml_has_the_published_numbers(read_toml: Callable[[str], Any]) -> None:
    config = read_toml(text := _toml())
    assert (config.model.name, config.model.flavor, config.model.hf_assets_path) == (
        "llama3",
        "8B",
        OPTIONS["hf_assets"],
    )
    assert (config.optimizer.name, config.optimizer.lr, config.lr_scheduler.warmup_steps) == ("AdamW", 3e-4, 200)
    how = config.training
    assert (how.local_batch_size, how.seq_len, how.steps, how.max_norm, how.dataset) == (1, 8192, 1000, 1.0, "c4")
    axes = config.parallelism
    assert (axes.data_parallel_replicate_degree, axes.data_parallel_shard_degree) == (1, -1)
    assert (axes.tensor_parallel_degree, axes.pipeline_parallel_degree) == (1, 1)
    assert (config.checkpoint.enable, config.checkpoint.folder, config.checkpoint.interval) == (True, "checkpoint", 500)
    assert config.activation_checkpoint.mode == "selective" and config.metrics.log_freq == 10
    assert "Left out" not in text
    with pytest.raises(ValueError, match="Invalid field names"):
        read_toml(text.replace("\nsteps = ", "\nstepz = "))


def test_pipeline_in_toml_cuts_the_samples_of_a_replica(read_toml: Callable[[str], Any]) -> None:
    config = read_toml(_toml(**PIPELINE))
    axes = config.parallelism
    assert (axes.pipeline_parallel_degree, axes.tensor_parallel_degree) == (4, 2)
    assert axes.pipeline_parallel_schedule == "Interleaved1F1B"
    assert (config.training.local_batch_size, axes.pipeline_parallel_microbatch_size) == (16, 2)
    assert (config.compile.enable, config.activation_checkpoint.mode) == (True, "full")
    assert (config.training.mixed_precision_param, config.lr_scheduler.decay_type) == ("float32", "cosine")
    assert (config.validation.enable, config.validation.freq, config.debug.seed) == (True, 100, 3)


@pytest.mark.parametrize("content", [TITAN_2024, TITAN_2025, TITAN_LAST])
def test_options_that_are_imported_say_what_the_file_says(read_toml: Callable[..., Any], content: Any) -> None:
    imported = import_text(format_document(content, ".toml"), name="train.toml").spec
    assert imported
    config = read_toml("", words=imported.source.arguments)
    assert config.training.steps == content["training"]["steps"]
    if content is TITAN_LAST:  # the parser of v0.2.2 does not read the older ones
        known = {name: table for name, table in content.items() if name not in ("experimental", "no_such_section")}
        assert config == read_toml(format_document(known, ".toml"))


def test_value_that_torchtitan_does_not_take_is_named(read_toml: Callable[..., Any]) -> None:
    def list_choices(kind: Any, above: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
        for name, hint in get_type_hints(kind).items():
            plain = [each for each in get_args(hint) if get_origin(each) is Literal]
            found = hint if get_origin(hint) is Literal else plain[0] if plain else None
            if dataclasses.is_dataclass(hint):
                yield from list_choices(hint, f"{above}{name}.")
            elif found:
                yield f"{above}{name}", get_args(found)

    config = read_toml("[training]\nsteps = 1\n")
    assert dict(list_choices(type(config))) == CHOICES
    text = '[training]\nsteps = 1\nseq_len = 8\nmixed_precision_reduce = "bfloat16"\n'
    imported = import_text(text, name="train.toml")
    assert imported.left_out == ("training.mixed_precision_reduce: torchtitan 0.2.2 only accepts float32",)
    assert imported.spec and read_toml("", words=imported.spec.source.arguments).training.steps == 1


def test_gradients_in_toml_are_added_up_to_the_batch(read_toml: Callable[[str], Any]) -> None:
    training = read_toml(_toml(**ADDED_UP)).training
    assert (training.local_batch_size, training.global_batch_size) == (2, 128)


@pytest.mark.parametrize(
    "scheduler, wanted",
    [
        (None, {}),
        ("constant", {"decay_ratio": 0.0}),
        ("linear", {"decay_type": "linear"}),
        ("wsd", {"decay_type": "linear", "decay_ratio": 0.2}),
    ],
)
def test_learning_rate_goes_as_the_scheduler_says(scheduler: str | None, wanted: dict[str, Any]) -> None:
    values = {"training.scheduler": scheduler} if scheduler else {}
    assert tomllib.loads(_toml(**values))["lr_scheduler"] == {"warmup_steps": 200, **wanted}


def test_imported_options_are_exported_where_no_other_is_given(read_toml: Callable[..., Any]) -> None:
    spec = import_text(format_document(TITAN_2024, ".toml"), name="train.toml").spec
    assert spec
    config = read_toml(text := export_spec(spec, "torchtitan-toml", gpus=16))
    assert (config.model.name, config.model.flavor) == ("llama3", "8B")
    assert (config.training.dataset, config.training.seq_len) == ("c4", 4096)
    assert "\n# Taken from source.arguments, unless an option of the export overrides it: --model." in text
    unsized = spec.with_overrides({"parallelism.pp": 1, "training.batch_size": None})
    assert read_toml(export_spec(unsized, "torchtitan-toml", gpus=8)).training.local_batch_size == 2
    added = spec.with_overrides({"parallelism.pp": 1, "parallelism.microbatches": None, "training.batch_size": 128})
    how = read_toml(export_spec(added, "torchtitan-toml", gpus=8)).training
    assert (how.local_batch_size, how.global_batch_size) == (2, 128), "gradients are added up"
    options = {"flavor": "70B"}
    assert read_toml(export_spec(spec, "torchtitan-toml", gpus=16, options=options)).model.flavor == "70B"
    words = ["--model.flavor", "8B", "--training.seq_len=16", "--training.seq_len", "32"]
    two_words = export_spec(_spec(**{"source.arguments": words}), "torchtitan")
    assert 'model_registry("8B")' in two_words and "seq_len=32" in two_words
    other = _spec(source={"module": "mine", "arguments": words})
    assert 'model_registry("debugmodel")' in export_spec(other, "torchtitan")


def test_axes_and_decay_that_are_imported_are_exported(
    read_toml: Callable[..., Any], run_python: Callable[..., Any]
) -> None:
    text = (
        '[training]\nsteps = 20\n[model]\nflavor = "8B"\n[lr_scheduler]\ndecay_ratio = 0.8\ndecay_type = "cosine"\n'
        "min_lr_factor = 0.1\n[optimizer]\nbeta1 = 0.8\neps = 1e-15\nweight_decay = 0\n"
        "[parallelism]\ndata_parallel_shard_degree = 4\ncontext_parallel_degree = 2\nexpert_parallel_degree = 4\n"
    )
    spec = import_text(text, name="train.toml").spec
    assert spec
    config = read_toml(export_spec(spec, "torchtitan-toml", gpus=8))
    assert (config.lr_scheduler.decay_ratio, config.lr_scheduler.decay_type) == (0.8, "cosine")
    assert (config.parallelism.context_parallel_degree, config.parallelism.expert_parallel_degree) == (2, 4)
    optimizer = config.optimizer
    assert (config.lr_scheduler.min_lr_factor, optimizer.weight_decay) == (0.1, 0)
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.8, 0.95, 1e-15)
    python = export_spec(spec, "torchtitan", gpus=8)
    made = run_python(python, "train")
    assert (made.lr_scheduler.min_lr_factor, made.optimizer.weight_decay) == (0.1, 0)
    assert (made.optimizer.betas, made.optimizer.eps) == ((0.8, 0.95), 1e-15)
    assert (
        "decay_ratio=0.8" in python and "context_parallel_degree=2" in python and "expert_parallel_degree=4" in python
    )
    linear = export_spec(spec.with_overrides({"training.scheduler": "linear"}), "torchtitan", gpus=8)
    assert "decay_ratio" not in linear and "min_lr_factor=0.1" in linear


def test_checkpoints_are_those_of_the_spec() -> None:
    def saved(**values: Any) -> dict[str, Any]:
        return dict(tomllib.loads(_toml(**values))["checkpoint"])

    assert saved(**{"checkpoint.keep": "all", "checkpoint.asynchronous": True}) == {
        "enable": True,
        "folder": "checkpoint",
        "interval": 500,
        "keep_latest_k": 0,
        "async_mode": "async",
    }
    assert saved(checkpoint={"url": "/data/c"})["interval"] == 1000, "one at the end"
    assert saved(**{"training.dev": True}) == {"enable": False}


# The function


# The fields that the export sets in each class: of release 0.3.0, and of the main branch of 2026-08 if they differ.
_CALLED = {
    "Trainer.Config": "loss hf_assets_path model_spec optimizer lr_scheduler training dataloader parallelism "
    "checkpoint activation_checkpoint compile metrics debug validator",
    "ChunkedLossWrapper.Config": "loss_fn",
    "CrossEntropyLoss.Config": "global_vocab_size",
    "LRSchedulersContainer.Config": "warmup_steps decay_ratio decay_type min_lr_factor",
    "CheckpointManager.Config": "enable folder interval keep_latest_k async_mode",
    "CompileConfig": "enable",
    "MetricsProcessor.Config": "log_freq",
    "DebugConfig": "seed",
    "Validator.Config": "enable freq",
    "SelectiveAC.Config": "",
    "FullAC.Config": "",
    "default_adamw": "lr betas eps weight_decay",
}
_TRAINING = "max_norm steps mixed_precision_param disable_cuda_graphs "
_DEGREES = (
    "data_parallel_replicate_degree data_parallel_shard_degree tensor_parallel_degree pipeline_parallel_degree "
    "pipeline_parallel_schedule pipeline_parallel_schedule_csv context_parallel_degree expert_parallel_degree "
)
_OF_RELEASE = {
    "0.3": {
        "TrainingConfig": _TRAINING + "local_batch_size global_batch_size seq_len",
        "ParallelismConfig": _DEGREES + "pipeline_parallel_microbatch_size",
        "HuggingFaceTextDataLoader.Config": "dataset",
    },
    "main": {
        "TrainingConfig": _TRAINING
        + "num_tokens_per_microbatch_per_dp_rank num_tokens_per_train_step max_context_length",
        "ParallelismConfig": _DEGREES + "num_pp_microbatches",
        "GrainDataLoader.Config": "dataset",
        "ConcatThenSplitPackingConfig": "dataset",
    },
}
_HOMES = {
    "components.checkpointer": ["CheckpointManager"],
    "components.data": ["ConcatThenSplitPackingConfig", "GrainDataLoader"],
    "components.loss": ["ChunkedLossWrapper", "CrossEntropyLoss"],
    "components.metrics": ["MetricsProcessor"],
    "components.optimizer": ["LRSchedulersContainer", "default_adamw"],
    "components.validate": ["Validator"],
    "config": ["CompileConfig", "DebugConfig", "ParallelismConfig", "TrainingConfig"],
    "distributed.activation_checkpoint": ["FullAC", "SelectiveAC"],
    "hf_datasets.text_datasets": ["HuggingFaceTextDataLoader"],
    "trainer": ["Trainer"],
}


def _stand_in(called: str, fields: str) -> Callable[..., types.SimpleNamespace]:
    def make(**given: Any) -> types.SimpleNamespace:
        assert given.keys() <= set(fields.split()), f"{called} has no {given.keys() - set(fields.split())}"
        return types.SimpleNamespace(called=called, **given)

    return make


@pytest.fixture
def run_python(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def run(text: str, function: str, *, release: str = "0.3") -> Any:
        makers = {name: _stand_in(name, fields) for name, fields in (_CALLED | _OF_RELEASE[release]).items()}
        for home, names in _HOMES.items():
            module = types.ModuleType(f"torchtitan.{home}")
            for name in names:
                inner = makers.get(f"{name}.Config")
                setattr(module, name, types.SimpleNamespace(Config=inner) if inner else makers.get(name))
            if home == "hf_datasets.text_datasets":
                setattr(module, "DATASETS", {"c4": "the text of c4"})  # noqa: B010
            monkeypatch.setitem(sys.modules, module.__name__, module)
        for home, name in (("models.common.config_utils", "decoder_vocab_size"), ("models.llama3", "model_registry")):
            module = types.ModuleType(f"torchtitan.{home}")
            setattr(module, name, lambda given: given)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        names: dict[str, Any] = {}
        exec(compile(text, "exported.py", "exec"), names)
        return names[function]()

    return run


def _python(*, release: str = "0.3", **values: Any) -> str:
    return export_spec(_spec(**values), "torchtitan", options={**OPTIONS, "release": release})


def test_llama_in_python_has_the_published_numbers(run_python: Callable[..., Any]) -> None:
    for release in ("0.3", "main"):
        config = run_python(_python(release=release), "llama3_8b", release=release)
        assert (config.model_spec, config.hf_assets_path) == ("8B", OPTIONS["hf_assets"])
        assert (config.optimizer.lr, config.lr_scheduler.warmup_steps, config.training.steps) == (3e-4, 200, 1000)
        assert (config.checkpoint.interval, config.activation_checkpoint.called) == (500, "SelectiveAC.Config")
        assert config.parallelism.data_parallel_shard_degree == -1
        how, data = config.training, config.dataloader
        if release == "main":
            assert (how.num_tokens_per_microbatch_per_dp_rank, how.max_context_length) == (1 * 8192, 8192)
            assert (data.called, data.dataset.dataset) == ("GrainDataLoader.Config", "the text of c4")
        else:
            assert (how.local_batch_size, how.seq_len, data.dataset) == (1, 8192, "c4")


def test_pipeline_in_python_cuts_the_samples_of_a_replica(run_python: Callable[..., Any]) -> None:
    config = run_python(_python(**PIPELINE), "llama3_8b")
    assert (config.training.local_batch_size, config.parallelism.pipeline_parallel_microbatch_size) == (16, 2)
    assert config.training.disable_cuda_graphs, "torchtitan refuses them beside a pipeline"
    assert (config.validator.enable, config.validator.freq, config.compile.enable) == (True, 100, True)
    config = run_python(_python(release="main", **PIPELINE), "llama3_8b", release="main")
    assert config.training.num_tokens_per_microbatch_per_dp_rank == 2 * 8192
    assert config.parallelism.num_pp_microbatches == 8


def test_gradients_in_python_are_added_up_to_the_batch(run_python: Callable[..., Any]) -> None:
    training = run_python(_python(**ADDED_UP), "llama3_8b").training
    assert (training.local_batch_size, training.global_batch_size) == (2, 128)
    training = run_python(_python(release="main", **ADDED_UP), "llama3_8b", release="main").training
    assert training.num_tokens_per_train_step == 128 * 8192


@pytest.mark.parametrize("name", ["class", "1b", "Trainer", "model_registry", "a.b-c"])
def test_any_name_becomes_that_of_a_function(name: str, run_python: Callable[..., Any]) -> None:
    text = _python(name=name)
    function = name.replace(".", "_").replace("-", "_") if name == "a.b-c" else f"config_{name}"
    assert run_python(text, function).model_spec == "8B"


# Both


def test_what_torchtitan_has_no_place_for_stands_in_a_comment() -> None:
    values = {"source.arguments": ["--x"], "env": {"A": "b"}, "checkpoint.resume": False, "rendezvous.port": 77}
    for target in ("torchtitan", "torchtitan-toml"):
        (line,) = (each for each in export_spec(_spec(**values), target).splitlines() if each.startswith("# Left out"))
        assert line.endswith(": source.arguments, checkpoint.resume, env, rendezvous.port.")
        dev = _spec(**{"training": {"dev": True, "steps": 9}, "checkpoint.url": "/kept"})
        (line,) = (each for each in export_spec(dev, target).splitlines() if each.startswith("# Left out"))
        assert {"training.steps", "checkpoint.url"} <= {*line.rstrip(".").partition(": ")[2].split(", ")}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "epochs": ({"training.epochs": 2}, "^training.epochs 2: torchtitan counts steps: give training.steps"),
    "an optimizer": (
        {"training.optimizer": "sgd"},
        "^training.optimizer 'sgd': this torchtitan format does not support it: give adamw",
    ),
    "a loss": ({"training.loss": "mse"}, "^training.loss 'mse': torchtitan has only cross_entropy"),
    "a scheduler without an end": (
        {"training": {"scheduler": "linear"}},
        "^training.scheduler 'linear': needs the number of steps: give training.steps",
    ),
    "a bucket": ({"checkpoint.url": "s3://a/b"}, "^checkpoint.url s3://a/b: torchtitan writes to a folder"),
    "a folder of somebody": ({"checkpoint.url": "~/c"}, "^checkpoint.url ~/c: .*: give its absolute path"),
    "one checkpoint": ({"checkpoint.keep": 1}, "^checkpoint.keep 1: torchtitan keeps two or more"),
    "fewer nodes": (
        {"rendezvous.min_nodes": 1},
        "^rendezvous.min_nodes: torchtitan fixes its axes and batch",
    ),
}


@pytest.mark.parametrize("target", ["torchtitan", "torchtitan-toml"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_torchtitan_cannot_do_is_refused_with_one_line(target: str, case: str) -> None:
    values, message = REFUSED[case]
    with pytest.raises(SpecError, match=message) as caught:
        export_spec(_spec(**values), target)
    assert "\n" not in str(caught.value)
