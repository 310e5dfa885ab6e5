"""Hypothesis strategies for specs: the sections that a script reads, axes that fit the ranks, fields of nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from detrain_nb.plan.choices import SCHEDULES

Draw = Callable[[st.SearchStrategy[Any]], Any]
LINES = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=20)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9._-]{0,10}", fullmatch=True)
VARIABLES = st.from_regex(r"X[A-Z0-9]{0,8}", fullmatch=True)
PYTHONS = ("python3", "python3.12", "/opt/my env/bin/python", "~/env/bin/python3", "/opt/$x y/pypy")
SOURCES = st.one_of(
    st.builds(lambda text: {"script_text": f"print()\n{text}"}, TEXTS),
    st.just({"module": "a.b"}),
    st.builds(lambda folder: {"path": f"/data/{folder}x", "entry": "a/b c.py"}, NAMES),
    st.just({"git": {"url": "https://example.org/a.git", "ref": "v1", "folder": "c/d"}, "entry": "train.py"}),
    st.just({"git": {"url": "https://example.org/a.git", "token": "GIT_TOKEN"}, "entry": "e/$x $$.py"}),
)
_SIZES = st.integers(1, 10**12)
RATES = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


def draw_job(draw: Draw, *, ranks: int, checkpoints: tuple[str, ...] = ("s3://bucket/a", "kept/b c")) -> dict[str, Any]:
    """Draw the sections that a script reads, for a world size of ``ranks``."""

    def maybe(strategy: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | strategy)

    parallelism, training = draw_axes(draw, ranks), draw_training(draw)
    replicas = ranks // parallelism["pp"] // parallelism["tp"]
    microbatches = draw(st.sampled_from([4, 8])) * parallelism["pp"]
    if draw(st.booleans()):
        parallelism["microbatches"] = microbatches
    if draw(st.booleans()):
        training["batch_size"] = replicas * microbatches * draw(st.integers(1, 1000))
    stored = {"url": "s3://bucket/é", "format": maybe(st.just("parquet")), "chunks": draw(st.lists(LINES, unique=True))}
    saved = {
        "url": draw(st.sampled_from(checkpoints)),
        "interval": maybe(_SIZES),
        "keep": draw(st.just("all") | st.integers(1, 10**12)),
        "resume": draw(st.booleans()),
        "asynchronous": draw(st.booleans()),
    }
    return {
        "description": draw(LINES | st.just("two\nlines\tof it")),
        "parallelism": parallelism,
        "training": training,
        "data": maybe(st.just(stored)),
        "model": maybe(st.just({**stored, "url": "models/a b"})),
        "checkpoint": maybe(st.just(saved)),
        "artifacts": draw(st.lists(st.sampled_from(["*.pt", "a b/", "é/**/*.json"]), unique=True)),
    }


def draw_axes(draw: Draw, ranks: int, *, most_stages: int = 4) -> dict[str, Any]:
    """Draw the section parallelism, for a world size of ``ranks``."""
    pp = draw(st.sampled_from([size for size in range(1, most_stages + 1) if ranks % size == 0]))
    tp = draw(st.sampled_from([size for size in (1, 2, 4) if ranks // pp % size == 0]))
    left = ranks // pp // tp
    replicas = draw(st.sampled_from([size for size in range(1, left + 1) if left % size == 0]))
    shards = left // replicas
    return {
        "pp": pp,
        "tp": tp,
        **draw(
            st.sampled_from(
                [
                    {"dp_replicate": replicas, "dp_shard": shards},
                    {"dp_replicate": replicas, "dp_shard": -1},
                    {"dp_replicate": -1, "dp_shard": shards},
                ]
            )
        ),
        "schedule": draw(st.sampled_from([*SCHEDULES, "a b/mine.csv"])),
        "activations": draw(st.sampled_from(["none", "selective", "full"])),
        "compile": draw(st.booleans()),
        "precision": draw(st.sampled_from([None, "bf16", "fp32"])),
    }


def draw_training(draw: Draw) -> dict[str, Any]:
    """Draw the section training, without a batch size."""
    steps = draw(_SIZES)
    return {
        **draw(st.sampled_from([{}, {"epochs": steps}, {"steps": steps}])),
        "learning_rate": draw(RATES),
        "optimizer": draw(st.sampled_from(["adamw", "sgd", "a.b.C"])),
        "loss": draw(st.none() | LINES),
        "scheduler": draw(st.sampled_from([None, "constant", "linear", "cosine", "wsd"])),
        "warmup_steps": draw(st.integers(0, steps)),
        "clip": draw(st.none() | RATES),
        "seed": draw(st.integers(0, (1 << 32) - 1)),
        "log_every": draw(_SIZES),
        "evaluate_every": draw(st.none() | _SIZES),
        "dev": draw(st.booleans()),
    }


def draw_node(draw: Draw) -> dict[str, Any]:
    """Draw a node's Python, folder, setup lines and variables."""
    return {
        "python": draw(st.sampled_from(PYTHONS)),
        "workdir": draw(st.sampled_from([None, "/data/a b", "/data", "~", "~/x y", "~bob/z"])),
        "setup": draw(st.sampled_from([[], ["ulimit -n 9", "x='a b'"]])),
        "env": draw(st.lists(VARIABLES.map("N{}".format), max_size=2, unique=True)),
    }
