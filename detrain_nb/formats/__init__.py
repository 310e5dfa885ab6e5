"""Specs as other people's files: an exporter for each format, text in and text out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from . import slurm, torchrun

__all__ = ["EXPORTERS", "Exporter"]


@dataclass(frozen=True)
class Exporter:
    """One format: ``export(spec, plan)`` writes the text of a file; ``options`` are more keywords, and what to give."""

    export: Callable[..., str]
    suffix: str  # of the file
    about: str
    options: Mapping[str, str] = field(default_factory=dict)


EXPORTERS: Mapping[str, Exporter] = {
    "torchrun": Exporter(torchrun.export, ".sh", "a shell script that is run on every node"),
    "slurm": Exporter(
        slurm.export,
        ".sbatch",
        "a batch script for sbatch",
        {
            "time": "the longest time, as sbatch takes it: 02:00:00",
            "partition": "the name of a partition",
            "account": "the name of an account",
        },
    ),
}
