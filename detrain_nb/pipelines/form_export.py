"""The export of a pipeline to other tools, as plain JSON for a page: the formats, and the text of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import DetrainError, SpecError
from ..formats import export_spec
from ..plan.targets import GPUS, TARGETS
from ..spec import PipelineSpec
from .form_fields import FIELDS

__all__ = ["describe_targets", "export_typed", "review_export"]

_GPUS = "gpus"
_MOST_GPUS = 1_000_000
_MOST_SHOWN = 300_000  # characters: a script may appear once per node


def describe_targets() -> list[dict[str, Any]]:
    """Return the formats, each with its options and their descriptions; all have the option ``gpus``."""
    gpus = {_GPUS: GPUS}
    return [
        {"name": name, "about": target.about, "suffix": target.suffix, "options": {**gpus, **target.options}}
        for name, target in TARGETS.items()
    ]


def export_typed(spec: PipelineSpec, to: str, options: Mapping[str, str]) -> str:
    """Write a spec in the format ``to``, with the options as they are typed. Raises: SpecError."""
    given = {name: value.strip() for name, value in options.items()}
    return export_spec(spec, to, gpus=_read_gpus(given.pop(_GPUS, "")), options=given)


def review_export(spec: PipelineSpec, to: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Return the ``text``, with the number of characters cut off as ``more``; or the ``error``.

    With an error comes the ``option`` or the ``field`` of the form that it begins with; empty: none.
    """
    try:
        text = export_typed(spec, to, options)
        return {"text": text[:_MOST_SHOWN], "more": max(0, len(text) - _MOST_SHOWN)}
    except DetrainError as exc:
        error = str(exc)
    about = re.split("[ :,]", error, maxsplit=1)[0]
    option = about.lstrip("-").replace("-", "_")
    if option in (_GPUS, *(TARGETS[to].options if to in TARGETS else ())):
        return {"error": error, "option": option, "field": ""}
    path = re.split(r"\[", about, maxsplit=1)[0]
    return {"error": error, "option": "", "field": path if path == "nodes" or path in FIELDS else ""}


def _read_gpus(typed: str) -> int:
    if not typed:
        return 0
    if not re.fullmatch("[0-9]{1,7}", typed) or int(typed) > _MOST_GPUS:
        raise SpecError(f"--{_GPUS} {typed!r:.60}: give a whole number, 0 to {_MOST_GPUS:,}")
    return int(typed)
