"""A picture of how a model is split: layers by time and memory, stages, and the timeline of a step with its bubble.

It reads plain JSON: the model may be on ranks, and this process may not have torch.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from functools import reduce
from typing import Any

from ..documents import parse_document, read_document
from ..errors import SpecError
from ..plan import PASSES, Layer, PlanDescription, StepTimeline
from ..text import format_size, html_cells, html_table, show, table_lines
from .displays import Settled
from .live_view import LiveView
from .plan_facts import (
    facts,
    lane_names,
    numbers,
    percent,
    rank_rows,
    short_names,
    stage_rows,
    time_text,
    timeline_title,
)

_MOST_ROWS = 64  # of a table that is saved
_LEFT = "text-align:left"  # front ends align to the right by default; most cells are text
_HOW = "give the result of par.describe_plan, its JSON, the path of a *.json file with it, or an object with to_dict()"


def read_plan(*parts: object) -> PlanDescription:
    """Join the parts given to ``widgets.plan`` into one plan. Raises: SpecError when a part is not a plan."""
    if not parts:
        raise SpecError(f"no plan was given: {_HOW}")
    return reduce(PlanDescription.joined, map(_read_part, parts))


def _read_part(part: object) -> PlanDescription:
    if isinstance(part, str) and part.lstrip().startswith(("{", "[")):
        return PlanDescription.from_dict(parse_document(part, ".json", where="the plan"))
    if isinstance(part, (str, os.PathLike)):
        return PlanDescription.from_dict(read_document(part))
    if isinstance(part, Mapping):
        if part and all(isinstance(rank, int) for rank in part):
            raise SpecError(f"this is a dict of plans by rank: give one of them, such as plans[{min(part)}]")
        return PlanDescription.from_dict(part)
    if isinstance(part, (list, tuple)) and part:
        raise SpecError(
            "this is a list of plans, as pull returns one for each rank: give one of them, such as plans[0]"
        )
    if not isinstance(part, type) and callable(to_dict := getattr(part, "to_dict", None)):
        return PlanDescription.from_dict(to_dict())
    raise SpecError(f"{show(part)} is not a plan: {_HOW}")


class PlanView(LiveView):
    """A plan, drawn. It does not change, and asks nothing of the kernel."""

    name = "plan_view"

    def __init__(self, found: PlanDescription) -> None:
        self.plan = found
        super().__init__()

    def state(self) -> dict[str, Any]:
        costs, memory = self.plan.costs, self.plan.memory
        layers = [] if costs is None else costs.layers
        stages = [] if costs is None else stage_rows(costs)
        stage_of = [row["stage"] for row in stages for _ in range(row["num_layers"])]
        shorts = short_names([layer.name for layer in layers])
        return {
            "facts": facts(self.plan),
            "numbers": numbers(self.plan),
            "layers": [_layer(*each) for each in zip(layers, shorts, stage_of)],
            "stages": stages,
            "ranks": [] if memory is None else rank_rows(memory),
            "timelines": list(map(_timeline, self.plan.timelines)),
            "kinds": PASSES,
            "notes": list(self.plan.notes),
        }

    def settled(self) -> Settled:
        """Return the numbers with the tables by stage and by rank."""
        told = [f"Plan: {', '.join(facts(self.plan))}" if facts(self.plan) else "Plan"]
        told += [_line(number) for number in numbers(self.plan) if number["value"] != "-"]
        told += [
            f"Timeline: {timeline_title(line)}, {time_text(line.step_s)}, {percent(line.bubble)} bubble"
            for line in self.plan.timelines
        ]
        tables = [table for table in (self._stage_table(), self._rank_table()) if table]
        notes = [f"Note: {note}" for note in self.plan.notes]
        text = "\n".join([*told, *(line for rows in tables for line in table_lines(rows)), *notes])
        pages = [
            html_table(
                html_cells(rows[0], tag="th", style=_LEFT),
                "".join(f"<tr>{html_cells(row, style=_LEFT)}</tr>" for row in rows[1:]),
            )
            for rows in tables
        ]
        return Settled(text, "".join([_html_lines(told), *pages, _html_lines(notes)]))

    def _stage_table(self) -> list[tuple[str, ...]]:
        if self.plan.costs is None:
            return []
        stages = stage_rows(self.plan.costs)
        has_nodes = any(row["node"] for row in stages)
        rows = [
            (
                str(row["stage"]),
                *([row["node"] or "-"] if has_nodes else []),
                row["layers"],
                " ".join(filter(None, (row["time"], row["word"], row["link"] and f"({row['link']})"))),
                row["memory"] + (", does not fit" if row["is_too_full"] else ""),
                row["sends"],
            )
            for row in stages
        ]
        return _cut([("stage", *(["node"] if has_nodes else []), "layers", "time", "memory", "sends"), *rows])

    def _rank_table(self) -> list[tuple[str, ...]]:
        if self.plan.memory is None:
            return []
        keys = ("ranks", "stages", "total", "parts", "phase")
        rows = [tuple(row[key] for key in keys) for row in rank_rows(self.plan.memory)]
        return _cut([("ranks", "stages", "peak", "made up of", "peak in"), *rows])


def _line(number: Mapping[str, str]) -> str:
    told = " ".join(filter(None, (number["value"], number["unit"])))
    return f"{number['label']}: {', '.join(filter(None, (told, number['word'], number['beside'])))}"


def _cut(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    more = len(rows) - 1 - _MOST_ROWS
    return rows if more <= 0 else [*rows[: _MOST_ROWS + 1], (f"... {more} more", *[""] * (len(rows[0]) - 1))]


def _html_lines(lines: list[str]) -> str:
    return f"<div>{'<br>'.join(map(html.escape, lines))}</div>" if lines else ""


def _layer(layer: Layer, short: str, stage: int) -> dict[str, Any]:
    return {
        "name": layer.name,
        "short": short,
        "stage": stage,
        "time_s": layer.time_s,
        "memory_bytes": layer.memory_bytes,
        "state_bytes": layer.state_bytes,
        "time": time_text(layer.time_s),
        "memory": format_size(layer.memory_bytes),
        "parts": f"parameters with their state {format_size(layer.state_bytes)}, "
        f"activations {format_size(layer.activation_bytes)}",
    }


def _timeline(line: StepTimeline) -> dict[str, Any]:
    lanes = [
        {
            "name": name,
            "idle": percent(line.idle(rank)),
            "passes": [[work.kind, work.stage, work.microbatch, work.begin_s, work.end_s] for work in works],
        }
        for rank, (name, works) in enumerate(zip(lane_names(line), line.ranks))
    ]
    return {
        "title": timeline_title(line),
        "step_s": line.step_s,
        "step": time_text(line.step_s),
        "bubble": percent(line.bubble),
        "lanes": lanes,
    }
