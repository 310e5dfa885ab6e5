"""A spec that goes out as somebody else's document comes back with every field that the document can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from detrain_nb.formats.job_script import DEFAULT_PORT
from detrain_nb.spec import PipelineSpec

from .drawn_specs import NAMES, SOURCES, TEXTS, VARIABLES, draw_job, draw_node
from .round_trips import come_back

HOSTS = st.lists(st.from_regex(r"[a-z][a-z0-9]{0,6}", fullmatch=True), min_size=1, max_size=3, unique=True)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_sdl_that_was_exported_comes_back(data: st.DataObject) -> None:
    def draw(strategy: st.SearchStrategy[Any]) -> Any:
        return data.draw(strategy)

    ranks, hosts = draw(st.integers(1, 4)), draw(HOSTS)
    memory = draw(st.none() | st.integers(1, 1000).map(lambda size: size * (1 << 30) / 1e9))  # an SDL has whole Gi
    has = draw(st.sampled_from([{"devices": list(range(ranks))}, {"devices": "cpu", "memory_gb": memory}]))
    given = {
        **draw_job(draw, ranks=ranks * len(hosts), checkpoints=("/kept", "s3://bucket/kept")),
        "name": "train-1",
        "image": "ghcr.io/you/train:1",
        "source": {**draw(SOURCES), "arguments": draw(st.lists(TEXTS, max_size=3)), "setup": ["echo '$$ $(a)'"]},
        "nodes": [
            {"host": f"{host}.example.org", "name": host, "ranks": ranks, **has, **draw_node(draw)} for host in hosts
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


def _draw_training(draw: Callable[..., Any]) -> dict[str, Any]:
    return {
        "steps": draw(1, 1000),
        "warmup_steps": draw(0, 1),
        "batch_size": draw(128, 256),
        "log_every": draw(1, 10),
        "learning_rate": draw(3e-4, 1.0),
        "optimizer": draw("adamw", "adam"),
        "clip": draw(0.5, 1.0),
        "scheduler": draw("constant", "linear", "cosine", "wsd"),
        "seed": draw(0, 7),
        "evaluate_every": draw(None, 5),
    }


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_toml_of_torchtitan_that_was_exported_comes_back(data: st.DataObject) -> None:
    def draw(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    pp, tp, dp_shard = draw((1, 1, -1), (1, 2, 8), (4, 2, -1), (2, 1, 8))
    several = {"microbatches": 8, "schedule": draw("1F1B", "GPipe", "mine.csv")} if pp > 1 else {}
    axes = {"pp": pp, "tp": tp, "dp_shard": dp_shard, "precision": draw("bf16", "fp32"), **several}
    saved = {"url": draw("/data/saved", "outputs/saved"), "interval": draw(1, 500), "keep": draw(2, "all")}
    spec = PipelineSpec.from_dict(
        {
            "name": "train-1",
            "description": "what it is for",
            "source": {"module": "torchtitan.train"},
            "nodes": [{"host": host, "devices": list(range(8))} for host in ("a", "b")],
            "parallelism": {**axes, "activations": draw("none", "selective", "full"), "compile": draw(False, True)},
            "training": _draw_training(draw),
            "checkpoint": {**saved, "asynchronous": draw(False, True)},
        }
    )
    fields = ["schedule", "activations", "compile", "precision", *(["microbatches"] if pp > 1 else [])]
    held = ["name", "description", "training", "checkpoint", *(f"parallelism.{name}" for name in fields)]
    imported = come_back(spec, "torchtitan-toml", held=held)
    assert imported.spec and imported.spec.parallelism.axes == spec.parallelism.axes
    assert imported.left_out == ()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_configuration_of_accelerate_that_was_exported_comes_back(data: st.DataObject) -> None:
    def draw(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    axes = draw({"dp_shard": -1}, {"dp_shard": 1, "dp_replicate": -1}, {"dp_replicate": 2}, {"tp": 2}, {"tp": 4})
    spec = PipelineSpec.from_dict(
        {
            "name": "train-1",
            "source": {"script": "train.py"},
            "nodes": [{"host": host, "ranks": 4} for host in ("node-0", "node-1")[: draw(1, 2)]],
            "parallelism": {**axes, "precision": draw(None, "bf16"), "compile": draw(False, True)},
            "rendezvous": {"port": 1234},
        }
    )
    shards = spec.plan(gpus=dict.fromkeys((node.name for node in spec.nodes), 4)).mesh
    if shards and shards.axes.get("dp_shard", 1) > 1:
        spec = spec.with_overrides({"parallelism.activations": draw("none", "full")})
    fields = ("dp_replicate", "dp_shard", "tp", "precision", "compile", "activations")
    held = ["name", "rendezvous.port", *(f"parallelism.{name}" for name in fields)]
    imported = come_back(spec, "accelerate", held=held, gpus=4, options={"node": draw("", str(len(spec.nodes) - 1))})
    assert imported.spec and [len(node.ranks) for node in imported.spec.plan().nodes] == [4] * len(spec.nodes)
