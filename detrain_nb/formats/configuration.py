"""What the configurations for other trainers share: they describe a training, and run nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..plan import Plan
from ..spec import PipelineSpec


def axis(plan: Plan, name: str) -> int:
    """Return the size of an axis of the mesh, 1 if the mesh has no such axis."""
    return plan.mesh.axes.get(name, 1) if plan.mesh else 1


def write_head(spec: PipelineSpec, what: str, *, used: Collection[str], by: str) -> list[str]:
    """Return comments: ``what`` the file is, and which fields of the spec it leaves out, those not ``used``."""
    unused = [name for name in dict.fromkeys(_list_given(spec.to_dict())) if name not in ("name", *used)]
    return [
        f"# {what}",
        *([f"# Left out, because {by} has no setting for it: {', '.join(unused)}."] if unused else []),
    ]


def _list_given(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields that a spec gives, such as training.steps; nodes share one name per field."""
    for name, value in document.items():
        for table in value if name == "nodes" else [value]:
            is_section = isinstance(table, Mapping) and name != "env"
            yield from (f"{name}.{inner}" for inner in table) if is_section else (name,)
