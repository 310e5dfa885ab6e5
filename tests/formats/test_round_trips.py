"""A spec that is exported to another tool's document and imported again has every field that the document can hold."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from detrain_nb.formats import export_spec
from detrain_nb.formats.job_script import DEFAULT_PORT
from detrain_nb.spec import PipelineSpec

from .drawn_specs import LINES, NAMES, RATES, SOURCES, TEXTS, VARIABLES, draw_axes, draw_job, draw_node, draw_training
from .round_trips import come_back

HOSTS = st.lists(st.from_regex(r"[a-z][a-z0-9]{0,6}", fullmatch=True), min_size=1, max_size=3, unique=True)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_sdl_that_was_exported_comes_back(data: st.DataObject) -> None:
    def draw(strategy: st.SearchStrategy[Any]) -> Any:
        return data.draw(strategy)

    ranks, hosts = draw(st.integers(1, 4)), draw(HOSTS)
    memory = draw(st.none() | st.integers(1, 1000).map(lambda size: size * (1 << 30) / 1e9))  # SDLs have whole Gi
    has = draw(st.sampled_from([{"devices": list(range(ranks))}, {"devices": "cpu", "memory_gb": memory}]))
    given = {
        **draw_job(draw, ranks=ranks * len(hosts), checkpoints=("/kept", "s3://bucket/kept")),
        "name": "train-1",
        "image": "ghcr.io/you/train:1",
        "source": {**draw(SOURCES), "arguments": draw(st.lists(TEXTS, max_size=3)), "setup": ["echo '$$ $(a)'"]},
        "nodes": [
            {"host": f"{host}.example.org", "name": host, "ranks": ranks, **has, **draw_node(draw), "setup": []}
            for host in hosts
        ],
        "env": draw(st.dictionaries(VARIABLES, TEXTS, max_size=2)),
        "secrets": draw(st.lists(st.sampled_from(["HF_TOKEN", "GIT_TOKEN", "B"]), unique=True)),
        "rendezvous": {
            "id": draw(st.none() | NAMES | st.just("12")),
            "port": draw(st.sampled_from([0, 1234])),
            "timeout_s": 77,
            "max_restarts": draw(st.integers(0, 2)),
        },
    }
    spec = PipelineSpec.from_dict(given)
    held = [
        *("job", "image", "env", "needed", "nodes.name", "nodes.devices", "nodes.python", "nodes.workdir"),
        *("source.script_text", "source.module", "source.git", "source.path", "source.entry", "source.arguments"),
        *("source.setup", "rendezvous.timeout_s", "rendezvous.max_restarts"),
        *(["nodes.memory_gb"] if memory and "memory_gb" in has else []),
    ]
    again = come_back(spec, "akash", held=held).spec
    assert again and (again.rendezvous.id or again.name) == (spec.rendezvous.id or spec.name)
    assert len(hosts) == 1 or again.rendezvous.port == (spec.rendezvous.port or DEFAULT_PORT)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_toml_of_torchtitan_that_was_exported_comes_back(data: st.DataObject) -> None:
    def draw(strategy: st.SearchStrategy[Any]) -> Any:
        return data.draw(strategy)

    axes, steps = draw_axes(draw, 16), draw(st.integers(1, 10**6))
    replicas = 16 // axes["pp"] // axes["tp"]
    axes["precision"] = axes["precision"] or "bf16"  # torchtitan's own default
    saved = {
        "url": draw(st.sampled_from(["/data/saved", "outputs/a b"])),
        "interval": draw(st.integers(1, 1000)),
        "keep": draw(st.just("all") | st.integers(2, 1000)),
        "asynchronous": draw(st.booleans()),
    }
    training = {
        **draw_training(draw),
        "epochs": None,
        "steps": steps,
        "warmup_steps": draw(st.integers(0, steps)),
        "loss": None,
        "dev": False,
        "batch_size": 8 * axes["pp"] * replicas * draw(st.integers(1, 100)),
        "optimizer": draw(st.sampled_from(["adamw", "adam"])),
        "clip": draw(RATES),
        "scheduler": draw(st.sampled_from(["constant", "linear", "cosine", "wsd"])),
    }
    spec = PipelineSpec.from_dict(
        {
            "name": "train-1",
            "description": draw(LINES),
            "source": {"module": "torchtitan.train"},
            "nodes": [{"host": host, "devices": list(range(8))} for host in ("a", "b")],
            "parallelism": {**axes, "microbatches": 8 * axes["pp"]},
            "training": training,
            "checkpoint": draw(st.none() | st.just(saved)),
        }
    )
    held = [
        *("name", "description", "training", "checkpoint", "parallelism.activations", "parallelism.compile"),
        *("parallelism.precision", *(["parallelism.schedule"] if axes["pp"] > 1 else [])),
        *(["parallelism.microbatches"] if axes["pp"] > 1 or axes["dp_shard"] > 0 else []),  # else in the arguments
    ]
    imported = come_back(spec, "torchtitan-toml", held=held)
    mesh, again = spec.plan().mesh, imported.spec
    assert mesh and again
    assert again.parallelism.axes == {**mesh.axes, **({"dp_shard": -1} if axes["dp_shard"] == -1 else {})}
    assert imported.left_out == ()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_configuration_of_accelerate_that_was_exported_comes_back(data: st.DataObject) -> None:
    def draw(strategy: st.SearchStrategy[Any]) -> Any:
        return data.draw(strategy)

    count, ranks = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    axes = {**draw_axes(draw, count * ranks, most_stages=1), "schedule": "1F1B"}
    spec = PipelineSpec.from_dict(
        {
            "name": "train-1",
            "source": {"script": "train.py"},
            "nodes": [{"host": f"node-{index}", "ranks": ranks} for index in range(count)],
            "parallelism": axes,
            "rendezvous": {"port": 1234, "endpoint": draw(st.sampled_from([None, "10.0.0.9"]))},
        }
    )
    (mesh,) = [spec.plan(gpus=dict.fromkeys((node.name for node in spec.nodes), ranks)).mesh]
    shards = mesh.axes.get("dp_shard", 1) if mesh else 1
    left_out = {
        *(["parallelism.activations"] if axes["activations"] == "selective" else []),
        *(["parallelism.activations"] if axes["activations"] == "full" and shards == 1 else []),
        *(["parallelism.precision"] if axes["precision"] == "fp32" else []),
    }
    fields = {
        f"parallelism.{name}" for name in ("dp_replicate", "dp_shard", "tp", "precision", "compile", "activations")
    }
    held = ["name", "rendezvous.port", *(["first"] if count > 1 else []), *sorted(fields - left_out)]
    options = {"node": draw(st.sampled_from(["", str(count - 1)]))}
    imported = come_back(spec, "accelerate", held=held, gpus=ranks, options=options)
    assert imported.spec and [len(node.ranks) for node in imported.spec.plan().nodes] == [ranks] * count
    (line,) = [
        line for line in export_spec(spec, "accelerate", gpus=ranks).splitlines() if line.startswith("# Left out")
    ]
    assert left_out == fields.intersection(line.rstrip(".").partition(": ")[2].split(", "))
