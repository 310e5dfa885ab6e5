"""The form of a pipeline as plain JSON for a page: the parts of every form, its steps and its mesh."""

from __future__ import annotations

import re
from typing import Any

from ..pipelines import SpecForm
from ..pipelines.draft import find_kind
from ..pipelines.form_fields import FIELDS, STEPS, FieldInfo
from ..session.output.safe_output import one_line
from ..spec import Parallelism, PipelineSpec
from ..text import HERE, count_of, told_node
from .draft_facts import describe_draft

__all__ = ["describe_form"]

_TITLES = {"general": "General", "nodes": "Nodes", "source": "Source"}


def describe_form(form: SpecForm) -> dict[str, Any]:
    """Return the present state of a form for a page."""
    with form.lock:
        told = describe_draft(form)
        steps = [_describe_step(form, step, told["errors"]) for step in STEPS]
        return {**told, "is_right": form.is_right, "steps": steps, "mesh": _mesh(form)}


def _describe_step(form: SpecForm, step: str, errors: dict[str, str]) -> dict[str, Any]:
    faults = sum(_step_of(path) == step for path in errors)
    return {"id": step, "title": _TITLES[step], "faults": faults, "told": _told(form, step, faults)}


def _step_of(path: str) -> str:
    first = re.split(r"[.\[]", path, maxsplit=1)[0]
    known: FieldInfo | None = next((each for name, each in FIELDS.items() if name.split(".")[0] == first), None)
    return "nodes" if first == "nodes" else known.step if known else "general"


def _told(form: SpecForm, step: str, faults: int) -> str:
    """Summarize a step by its typed values, so that errors elsewhere do not matter."""
    if faults:
        return f"{count_of(faults, 'field')} to correct"
    draft = form.draft
    if step == "general":
        axes = draft.get("parallelism")
        given = axes if isinstance(axes, dict) else {}
        typed = [name for name in Parallelism().axes if given.get(name, "") not in ("", "1", "-1")]
        return f"{len(typed)} {'axis' if len(typed) == 1 else 'axes'}" if typed else "one axis takes all ranks"
    if step == "nodes":
        count = len(form.rows)
        return count_of(count, "node") if count else HERE
    return find_kind(draft).replace("_", " ") or "not filled in"


def _mesh(form: SpecForm) -> dict[str, Any] | None:
    """Return the mesh of the plan, or the error; the source is not needed. None: other fields have errors."""
    names = ("parallelism", "nodes", "training")
    document: dict[str, Any] = {name: part for name, part in form.document.items() if name in names}
    if "training" in document and any(path.startswith("training") for path in form.errors):
        del document["training"]  # the batch is not known
    try:
        spec = PipelineSpec.from_dict({"name": "any", "source": {"module": "any"}, **document})
    except ValueError:
        return None
    try:
        plan = spec.plan()
    except ValueError as exc:
        return {"error": one_line(str(exc))}
    axes = [[name, size] for name, size in plan.mesh.axes.items()] if plan.mesh else []
    return {"ranks": plan.world_size, "axes": axes, "nodes": [told_node(node.name) for node in plan.nodes[:100]]}
