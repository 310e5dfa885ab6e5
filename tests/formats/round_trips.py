"""A spec that is exported to another tool's file and imported again: the fields that the file can hold are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from detrain_nb.formats import Imported, export_spec, import_text
from detrain_nb.formats.job_script import find_first_node
from detrain_nb.plan.targets import TARGETS
from detrain_nb.spec import PipelineSpec

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


def come_back(
    spec: PipelineSpec,
    to: str,
    *,
    held: Sequence[str],
    kind: str = "",
    options: Mapping[str, str] | None = None,
    gpus: int = 0,
) -> Imported:
    """Export a spec, import the result, and compare the fields in ``held``, such as training.epochs or nodes.ranks.

    Axes are compared after planning, which replaces -1 by the remaining ranks. Four more names are known: "job" is all
    that the script reads, "needed" the variables that every node must have, "setup" the lines that each node runs, and
    "first" the address of the first node.
    """
    text = export_spec(spec, to, gpus=gpus, options=options)
    imported = import_text(text, name=f"{spec.name}{TARGETS[to].suffix}", kind=kind)
    again = imported.spec
    assert again is not None
    for field in held:
        found, given = _look(again, field, gpus), _look(spec, field, gpus)
        assert found == given, (field, found, given, text)
    return imported


def _look(spec: PipelineSpec, field: str, gpus: int) -> Any:
    section, _, name = field.partition(".")
    counted = {node.name: gpus for node in spec.nodes if node.devices == "auto"} if gpus else None
    if field == "job":
        return spec.job_spec(spec.plan(gpus=counted))
    if field == "needed":
        return {*spec.secrets, *(name for node in spec.nodes for name in node.env)}
    if field == "setup":
        return [[*node.setup, *spec.source.setup] for node in spec.nodes]
    if field == "first":
        return find_first_node(spec)
    if section == "parallelism" and name in AXES:
        mesh = spec.plan(gpus=counted).mesh
        assert mesh is not None
        return mesh.axes.get(name, 1)
    if section == "nodes" and name:
        return [getattr(node, name) for node in spec.nodes]
    value: Any = spec
    for step in field.split("."):
        value = getattr(value, step, None)
    return value
