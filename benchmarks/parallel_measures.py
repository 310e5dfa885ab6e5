"""The measurements of models over ranks, their sizes, and the goals."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from report import Goal, Measure, median, worst

# Floors and comparisons.
TORCH, DETRAIN = "torch by hand", "DeTrain 0.2.6"
LEGAL_CUTS, BEST_CUT, LOOP, WAITING = "legal cuts", "the best cut", "the loop by hand", "a save that waits"
IDEAL, UNCHECKED = "1F1B's bound", "without digests"
# Parts that are measured by ranks of their own, and the number of ranks.
PARTS = {
    "pipeline": 2,
    "tensor": 2,
    "shards": 2,
    "mlp": 2,
    "efficiency": 2,
    "gpt": 2,
    "resnet": 2,
    "plan": 1,
    "trainer": 2,
    "save": 1,
    "digests": 1,
}


@dataclass(frozen=True)
class Sizes:
    """How much is measured; a cycle is two steps of each variant."""

    rounds: int = 3  # each with new processes
    cycles: int = 20
    warm_up: int = 2  # cycles that do not count
    layers: int = 8
    width: int = 256
    rows: int = 512
    microbatches: int = 8
    wide: int = 512  # of the model for efficiency
    wide_rows: int = 2048
    wide_cycles: int = 3
    mlp_widths: tuple[int, ...] = (512, 2048)
    mlp_rows: int = 40
    mlp_microbatches: tuple[int, ...] = (4, 20)
    mlp_steps: int = 40
    cut_cycles: int = 3
    duel_cycles: int = 10
    gpt_width: int = 192
    gpt_layers: int = 8
    gpt_vocabulary: int = 8192
    gpt_length: int = 128
    picture: int = 32
    channels: int = 16
    picture_rows: int = 32
    large_gpt: tuple[int, int, int, int] = (8192, 84, 128_256, 2048)  # width, layers, vocabulary, length
    plan_layers: int = 1000
    plan_stages: int = 64
    saves: int = 3
    saved_width: int = 1024
    saved_layers: int = 6


QUICK = Sizes(
    rounds=1,
    cycles=1,
    warm_up=1,
    layers=2,
    width=32,
    rows=64,
    wide=64,
    wide_rows=64,
    wide_cycles=1,
    mlp_widths=(32,),
    mlp_microbatches=(4,),
    mlp_steps=4,
    cut_cycles=1,
    duel_cycles=1,
    gpt_width=32,
    gpt_layers=2,
    gpt_vocabulary=256,
    gpt_length=16,
    picture=16,
    channels=4,
    picture_rows=16,
    large_gpt=(64, 4, 97, 16),
    plan_layers=20,
    plan_stages=4,
    saves=1,
    saved_width=64,
    saved_layers=2,
)


def write_sizes(sizes: Sizes) -> str:
    """Write the sizes as an argument of a command line."""
    return json.dumps(asdict(sizes))


def read_sizes(text: str) -> Sizes:
    values = json.loads(text)
    return Sizes(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def list_measures(sizes: Sizes) -> list[Measure]:
    """Return the rows of the table; small sizes have no goals."""
    close, fast = Goal(1.03, is_of_comparison=True), Goal(5.0, is_of_comparison=True, is_more_better=True)
    near, thin, brief = (Goal(limit, is_of_comparison=True) for limit in (1.05, 1.02, 0.1))
    measures = []
    for key, title in (("pipeline", "1F1B, 2 stages"), ("tensor", "tensor parallel"), ("shards", "fully sharded")):
        measures.append(Measure(key, f"{title}, a step, ms", f"{key}_ms", median, (TORCH, f"{key}_ms"), "ratio", close))
        measures.append(Measure(f"{key}_apart", "  losses differ by", f"{key}_apart", worst, goal=Goal(1e-4)))
    for width in sizes.mlp_widths:
        for count in sizes.mlp_microbatches:
            key = f"mlp_{width}_{count}"
            title = f"MLP {width}, {sizes.mlp_rows} rows in {count}, steps/s"
            same = f"{key}_same"
            measures.append(Measure(key, title, f"{key}_auto", median, (DETRAIN, same), "ratio", fast))
            measures.append(Measure(same, "  cut where DeTrain cuts it", same, median, (DETRAIN, same), "ratio"))
            measures.append(Measure(f"{key}_torch", "  and torch by hand", same, median, (TORCH, same), "ratio"))
    efficiency = f"efficiency, 1F1B in {sizes.microbatches}, width {sizes.wide}"
    measures += [
        Measure("efficiency", efficiency, "efficiency", median, (TORCH, "efficiency"), "ratio"),
        Measure("efficiency_bound", "  beside its bound", "efficiency", median, (IDEAL, "efficiency"), "ratio"),
    ]
    for key, title in (("gpt", "GPT, automatic cut"), ("resnet", "ResNet, measured cut")):
        cuts = f"{key}_cuts"
        measures.append(
            Measure(key, f"{title}, a step, ms", f"{key}_ms", median, (BEST_CUT, f"{key}_ms"), "ratio", near)
        )
        measures.append(Measure(cuts, "  cuts that were run", cuts, median, (LEGAL_CUTS, cuts)))
    large, planned = f"GPT of {sizes.large_gpt[1]} layers", f"{sizes.plan_layers} layers on {sizes.plan_stages} nodes"
    measures += [
        Measure("profile", f"{large} profiled, s", "profile_s", median, goal=Goal(10)),
        Measure("profile_memory", "  memory, MB", "profile_mb", worst, goal=Goal(100)),
        Measure("profile_parameters", "  billions of parameters", "profile_parameters", median),
        Measure("partition", f"{planned}, s", "partition_s", median, goal=Goal(3)),
        Measure("trainer", "Trainer with clip, a step, ms", "trainer_ms", median, (LOOP, "trainer_ms"), "ratio", thin),
        Measure("trainer_plain", "  without", "plain_ms", median, (LOOP, "plain_ms"), "ratio", thin),
        Measure(
            "trainer_blind", "  beside one that checks no norm", "blind_ms", median, (LOOP, "blind_ms"), "ratio", thin
        ),
        Measure("save", "asynchronous save blocks, s", "save_s", median, (WAITING, "save_s"), "ratio", brief),
        Measure("save_done", "  until all is there, s", "save_done_s", median, (WAITING, "save_s"), "ratio"),
        Measure("digests_save", "save with digests, s", "saved_s", median, (UNCHECKED, "saved_s"), "ratio"),
        Measure("digests_load", "load with digests, s", "loaded_s", median, (UNCHECKED, "loaded_s"), "ratio"),
    ]
    return measures if sizes == Sizes() else [replace(measure, goal=None) for measure in measures]
