"""What a start of a pipeline would do, as plain JSON for a page: its ranks, commands and files per node."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from ..documents import format_document
from ..errors import DetrainError
from ..plan import Plan, StageLayout
from ..spec import Parallelism, PipelineSpec
from ..text import name_some, printable, told_node
from .spec_file import leaves

__all__ = ["find_hidden", "review_spec"]

_MOST_RANKS = 256  # listed one by one
_MOST_FILES, _MOST_HIDDEN = 20, 20


def review_spec(spec: PipelineSpec) -> dict[str, Any]:
    """Return the plan as nodes with their ranks and stages, the commands and the documents.

    No node is queried. A plan, or commands, that cannot be made have an ``error`` instead.
    """
    return {
        "plan": _told(lambda: _plan(spec.plan(), spec.parallelism)),
        "commands": _told(lambda: _commands(spec)),
        "documents": {suffix: format_document(spec.to_dict(), f".{suffix}") for suffix in ("toml", "json", "yaml")},
    }


def _told(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return make()
    except DetrainError as exc:
        return {"error": str(exc)}


def _plan(plan: Plan, parallelism: Parallelism) -> dict[str, Any]:
    rows = plan.rank_rows()[:_MOST_RANKS]
    nodes = []
    for number, node in enumerate(plan.nodes):
        ranks = [
            {"rank": row.rank, "device": row.device, "places": dict(row.coordinates), "stages": list(row.stages)}
            for row in rows
            if row.node_rank == number
        ]
        nodes.append({"name": told_node(node.name), "ranks": ranks, "more": len(node.ranks) - len(ranks)})
    mesh = dict(plan.mesh.axes) if plan.mesh else {}
    batch = plan.batch
    return {
        "ranks": plan.world_size,
        "mesh": mesh,
        "stages": sum(map(len, plan.stages)) or 1,
        "schedule": parallelism.schedule if len(plan.stages) > 1 else "",
        "bubble": _bubble(plan, parallelism),
        "batch": {"size": batch.global_size, "replica": batch.replica_size, "micro": batch.micro_size}
        if batch
        else None,
        "nodes": nodes,
    }


def _bubble(plan: Plan, parallelism: Parallelism) -> float | None:
    """Return the least share of a step that ranks wait, if it is known without the model."""
    count = plan.batch.microbatches if plan.batch else parallelism.microbatches
    if count is None or len(plan.stages) < 2:
        return None
    layout = StageLayout(parallelism.schedule)
    return layout.least_bubble(num_ranks=len(plan.stages), num_microbatches=count)


def _commands(spec: PipelineSpec) -> dict[str, Any]:
    from ..jobs import submit

    made = submit(spec, dry_run=True)
    files = [{"name": printable(name), "bytes": size} for name, size in made.files[:_MOST_FILES]]
    return {
        "nodes": [
            {"name": told_node(name), "command": printable(shlex.join(argv))} for name, argv in made.commands.items()
        ],
        "files": files,
        "more_files": len(made.files) - len(files),
        "bytes": made.size_bytes,
        "setup": [printable(line) for line in made.setup],
        "warnings": [*map(printable, made.warnings), *map(" ".join, find_hidden(spec.to_dict()))],
        "repository": [printable(line) for line in made.repository],
    }


def find_hidden(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Find fields that look different from what they hold, as the user must see what is started."""
    told = []
    for path, value in leaves(document):
        text = "".join(map(str, value)) if isinstance(value, list) else str(value)
        hidden = sorted({f"U+{ord(char):04X}" for char in text if not char.isprintable() and char not in "\t\r\n"})
        if hidden:
            where = printable("".join(path).removeprefix("."))[:120]
            told.append(
                (where, f"has characters that are invisible, or change the direction of text: {name_some(hidden)}")
            )
    return told[:_MOST_HIDDEN]
