"""A plan in words and numbers for people: the same on the page and in the saved notebook."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..plan import MeshMemory, PlanDescription, StageCosts, StepTimeline
from ..text import count_of, format_size

_EVEN, _NOTABLE = 1.05, 1.1  # up to which no stage counts as the slowest; up to which only a better cut gets a warning
_QUICKER = 0.99  # a better cut must be below this share of the slowest stage's time
_MOST_NAME = 40  # characters, in a table
_FULL = 0.9  # share of a node's memory above which there is a warning
_NUMBERED = re.compile(r"(.*?)(?<![^.])(\d+(?:\..*)?)")
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def time_text(seconds: float) -> str:
    """Format a time with three digits and a unit."""
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= 0.9995 * size), _UNITS[-1])
    number = seconds / size
    return f"{number:,.0f} {unit}" if number >= 99.95 else f"{number:.3g} {unit}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def short_names(names: Sequence[str]) -> list[str]:
    """Remove the most common prefix before the number: ``layers.3`` becomes ``3``."""
    parts = [_NUMBERED.fullmatch(name) for name in names]
    prefixes = Counter(match[1] for match in parts if match)
    usual = prefixes.most_common(1)[0][0] if prefixes else None
    return [match[2] if match and match[1] == usual else name.removeprefix("the ") for name, match in zip(names, parts)]


def layers_text(costs: StageCosts, stage: int) -> str:
    """Name the first and the last layer of a stage; of a long name, only the end."""
    first, last = costs.bounds[stage], costs.bounds[stage + 1] - 1
    names = [
        name if len(name) <= _MOST_NAME else f"...{name[3 - _MOST_NAME :]}"
        for name in (costs.layers[first].name, costs.layers[last].name)
    ]
    return names[0] if first == last else f"{names[0]} to {names[1]}"


def memory_text(memory_bytes: float, limit_bytes: float | None) -> str:
    return format_size(memory_bytes) + ("" if limit_bytes is None else f" of {format_size(limit_bytes)}")


def ranks_text(ranks: Sequence[int]) -> str:
    return f"ranks {min(ranks)} to {max(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]}"


def stages_text(stages: Sequence[int]) -> str:
    return f"{'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}"


def facts(found: PlanDescription) -> list[str]:
    """Return the facts of a plan in a few words each: model, mesh, schedule, microbatches, dry run."""
    told = [found.name] if found.name else []
    if found.memory is not None:
        told.append(", ".join(f"{axis} {size}" for axis, size in found.memory.mesh.items()))
    elif found.costs is not None:
        told.append(count_of(len(found.costs.stages), "stage"))
    if found.timelines:
        told.append(found.timelines[0].schedule)
    if found.costs is not None:
        told.append(count_of(found.costs.num_microbatches, "microbatch"))
    return [*told, "dry run"] if found.memory is not None else told


def numbers(found: PlanDescription) -> list[dict[str, str]]:
    """Return the four numbers of a plan; ``state`` and ``word`` warn, ``beside`` is a value to compare with."""
    return [_imbalance(found.costs), _bubble(found), _step(found), _fullest(found)]


def _number(
    label: str, value: str = "-", unit: str = "", *, state: str = "", word: str = "", beside: str = ""
) -> dict[str, str]:
    return {"label": label, "value": value, "unit": unit, "state": state, "word": word, "beside": beside}


def _imbalance(costs: StageCosts | None) -> dict[str, str]:
    label = "Imbalance, slowest / mean"
    if costs is None:
        return _number(label, unit="needs a partition")
    even = costs.even_imbalance
    beside = "" if even is None or len(costs.stages) == 1 else f"cut evenly {even:.2f}"
    slowest = slowest_stages(costs)
    if not slowest or costs.imbalance <= _NOTABLE and costs.best_slowest_s > _QUICKER * max(costs.stage_s):
        return _number(label, f"{costs.imbalance:.2f}", beside=beside)
    word = f"stage {slowest[0]} slowest" if len(slowest) == 1 else f"{len(slowest)} stages slowest"
    return _number(label, f"{costs.imbalance:.2f}", state="warn", word=word, beside=beside)


def slowest_stages(costs: StageCosts) -> list[int]:
    """Return the stages within 0.1 % of the slowest; none when all take about the same time."""
    most = max(costs.stage_s)
    return [stage for stage, time_s in enumerate(costs.stage_s) if time_s >= 0.999 * most and costs.imbalance > _EVEN]


def _bubble(found: PlanDescription) -> dict[str, str]:
    if found.timelines:
        return _number("Bubble", percent(found.timelines[0].bubble), "of all ranks' time")
    if found.costs is not None and len(found.costs.stages) > 1:
        return _number("Bubble", percent(found.costs.bubble), "of the slowest stage's time")
    return _number("Bubble", unit="needs a timeline" if found.costs is None else "no bubble with one stage")


def _step(found: PlanDescription) -> dict[str, str]:
    if found.timelines:
        return _number("Step, estimated", time_text(found.timelines[0].step_s))
    if found.costs is not None:
        return _number("Step, estimated", time_text(found.costs.step_s))
    return _number("Step, estimated", unit="needs a partition or a timeline")


def _fullest(found: PlanDescription) -> dict[str, str]:
    if found.memory is not None:
        peak = found.memory.peak
        limits = [] if found.costs is None else [stage.node_memory_bytes for stage in found.costs.stages]
        limit = next((limits[stage] for stage in peak.stages if stage < len(limits)), None)
        return _of_limit("Memory, fullest rank", peak.total_bytes, limit, ranks_text(peak.ranks))
    if found.costs is None:
        return _number("Memory, fullest stage", unit="needs a partition or a dry run")
    stages = found.costs.stages
    fullest = max(range(len(stages)), key=lambda stage: _share(found.costs, stage))
    limit = stages[fullest].node_memory_bytes
    return _of_limit("Memory, fullest stage", stages[fullest].memory_bytes, limit, f"stage {fullest}")


def _share(costs: StageCosts | None, stage: int) -> tuple[float, float]:
    """Return how full a stage's node is, and the stage's bytes; without a limit the bytes alone count."""
    assert costs is not None
    each = costs.stages[stage]
    limit = each.node_memory_bytes
    return (each.memory_bytes / limit if limit else 0.0), each.memory_bytes


def _of_limit(label: str, size_bytes: float, limit: float | None, whose: str) -> dict[str, str]:
    unit = "" if limit is None else f"of {format_size(limit)}"
    if limit is None or size_bytes <= _FULL * limit:
        return _number(label, format_size(size_bytes), unit, beside=whose)
    word = "does not fit" if size_bytes > limit else f"{percent(size_bytes / limit)} full"
    state = "bad" if size_bytes > limit else "warn"
    return _number(label, format_size(size_bytes), unit, state=state, word=word, beside=whose)


def stage_rows(costs: StageCosts) -> list[dict[str, Any]]:
    """Return a row for each stage, with shares of the largest value for its bars."""
    slowest, most_s = slowest_stages(costs), max(costs.stage_s)
    most = max(max(stage.memory_bytes, stage.node_memory_bytes or 0.0) for stage in costs.stages)
    rows = []
    for index, stage in enumerate(costs.stages):
        end = costs.bounds[index + 1]
        layer_s = sum(layer.time_s for layer in costs.layers[costs.bounds[index] : end])
        is_link = stage.time_s > 1.001 * layer_s
        limit = stage.node_memory_bytes
        rows.append(
            {
                "stage": index,
                "num_layers": stage.num_layers,
                "node": stage.node,
                "layers": layers_text(costs, index),
                "time": time_text(stage.time_s),
                "time_share": stage.time_s / most_s if most_s else 0.0,
                "word": "slowest" if index in slowest else "",
                "link": f"link-bound; layers {time_text(layer_s)}" if is_link else "",
                "memory": memory_text(stage.memory_bytes, limit),
                "memory_share": stage.memory_bytes / (limit or most) if limit or most else 0.0,
                "is_too_full": limit is not None and stage.memory_bytes > limit,
                "sends": format_size(costs.layers[end].input_bytes) if end < len(costs.layers) else "-",
            }
        )
    return rows


def rank_rows(memory: MeshMemory) -> list[dict[str, Any]]:
    """Return a row for the ranks at each place in the pipeline, from a dry run."""
    most = memory.peak.total_bytes
    names = ("weights", "gradients", "optimizer", "activations", "working")
    return [
        {
            "ranks": ranks_text(row.ranks),
            "stages": stages_text(row.stages),
            "first_stage": min(row.stages),
            "is_one_stage": len(row.stages) == 1,
            "total": format_size(row.total_bytes),
            "share": row.total_bytes / most if most else 0.0,
            "parts": ", ".join(f"{name} {format_size(size)}" for name, size in zip(names, row.parts_bytes) if size),
            "phase": row.phase,
        }
        for row in memory.rows
    ]


def lane_names(line: StepTimeline) -> list[str]:
    """Name the ranks of a pipeline: by stage, if each has exactly one, else by rank."""
    stages = [sorted({work.stage for work in works}) for works in line.ranks]
    if all(own == [rank] for rank, own in enumerate(stages)):
        return [f"stage {rank}" for rank in range(len(stages))]
    return [f"rank {rank}" for rank in range(len(stages))]


def timeline_title(line: StepTimeline) -> str:
    return f"{line.schedule}, {count_of(line.num_microbatches, 'microbatch')}"
