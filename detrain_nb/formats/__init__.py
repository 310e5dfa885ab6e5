"""Specs as other people's files: an exporter for each format, text in and text out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..errors import SpecError
from ..plan.choices import SLURM_OPTIONS
from ..spec import PipelineSpec
from ..storage import locate
from . import slurm, torchrun

__all__ = ["EXPORTERS", "Exporter", "export_spec", "write_export"]


@dataclass(frozen=True)
class Exporter:
    """One format: ``export(spec, plan)`` writes the text of a file; ``options`` are more keywords, and what to give."""

    export: Callable[..., str]
    suffix: str  # of the file
    about: str
    options: Mapping[str, str] = field(default_factory=dict)


EXPORTERS: Mapping[str, Exporter] = {
    "torchrun": Exporter(torchrun.export, ".sh", "a shell script that is run on every node"),
    "slurm": Exporter(slurm.export, ".sbatch", "a batch script for sbatch", SLURM_OPTIONS),
}


def export_spec(spec: PipelineSpec, to: str, *, gpus: int = 0, options: Mapping[str, str | None] | None = None) -> str:
    """Write a spec as a file of the format ``to``. A node that names no devices has ``gpus`` GPUs.

    ``options`` are those of the exporter; one that is None or empty was not given. Raises: SpecError.
    """
    if to not in EXPORTERS:
        raise SpecError(f"{to!r} is no format to export to: give one of {', '.join(EXPORTERS)}")
    exporter = EXPORTERS[to]
    given = {name: value for name, value in (options or {}).items() if value}
    if unknown := [name for name in given if name not in exporter.options]:
        known = f"it has {', '.join(exporter.options)}" if exporter.options else "it has no options"
        raise SpecError(f"{to} has no option {unknown[0]}: {known}")
    if gpus < 0:
        raise SpecError(f"gpus {gpus}: give 0 or more")
    names = [node.name for node in spec.nodes if node.devices == "auto"] if spec.nodes else [""]
    plan = spec.plan(gpus=dict.fromkeys(names, gpus) if gpus else None)
    return exporter.export(spec, plan, **given)


def write_export(text: str, target: str) -> str:
    """Write what was exported to a path or URL; returns what was done, for people. Raises as `storage.locate`."""
    place = locate(target)
    before = ", in place of what was there" if place.exists() else ""
    place.write(text.encode("utf-8"))
    return f"wrote {target}{before}"
