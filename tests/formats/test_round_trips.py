"""A spec that goes out as somebody else's document comes back with every field that the document can hold."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from detrain_nb.spec import PipelineSpec

from .round_trips import come_back

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
HOSTS = st.lists(st.from_regex(r"[a-z][a-z0-9]{0,6}", fullmatch=True), min_size=1, max_size=3, unique=True)
SOURCES = st.one_of(
    st.builds(lambda text: {"script_text": f"print()\n{text}"}, TEXTS),
    st.just({"module": "a.b"}),
    st.just({"git": {"url": "https://example.org/a.git", "ref": "v1", "folder": "c/d"}, "entry": "train.py"}),
)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_sdl_that_was_exported_comes_back(data: st.DataObject) -> None:
    def draw(strategy: st.SearchStrategy[Any]) -> Any:
        return data.draw(strategy)

    ranks = draw(st.integers(1, 4))
    has = draw(st.sampled_from([{"devices": list(range(ranks))}, {"devices": "cpu", "ranks": ranks}]))
    given = {
        "name": "train-1",
        "description": "what it is for",
        "image": "ghcr.io/you/train:1",
        "source": {**draw(SOURCES), "arguments": draw(st.lists(TEXTS, max_size=3)), "setup": ["echo '$$ $(a)'"]},
        "nodes": [
            {"host": f"{host}.example.org", "name": host, "python": "/opt/my env/python3", **has}
            for host in draw(HOSTS)
        ],
        "env": draw(st.dictionaries(st.from_regex(r"X[A-Z0-9]{0,8}", fullmatch=True), TEXTS, max_size=2)),
        "secrets": ["HF_TOKEN"],
        "training": {"steps": draw(st.integers(1, 100)), "learning_rate": 0.5, "scheduler": "cosine"},
        "data": {"url": "s3://bucket/data", "chunks": ["0", "1"]},
        "checkpoint": {"url": draw(st.sampled_from(["/kept", "s3://bucket/kept"])), "keep": "all"},
        "rendezvous": {"port": 1234, "timeout_s": 77, "max_restarts": draw(st.integers(0, 2))},
    }
    come_back(
        PipelineSpec.from_dict(given),
        "akash",
        held=[
            *("name", "description", "image", "env", "secrets", "training", "data", "checkpoint", "artifacts"),
            *("source.script_text", "source.module", "source.git", "source.entry", "source.arguments", "source.setup"),
            *("nodes.name", "nodes.devices", "nodes.ranks", "nodes.python", "parallelism.dp_shard"),
            *(["rendezvous.port"] if len(given["nodes"]) > 1 else []),
            *("rendezvous.timeout_s", "rendezvous.max_restarts"),
        ],
    )
