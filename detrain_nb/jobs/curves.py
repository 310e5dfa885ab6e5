"""Metrics that a job has logged, drawn as curves or written for TensorBoard."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..guarded import make_users_folder
from ..metrics import NO_VALUES
from ..text import name_some, printable

__all__ = ["plot", "write_tensorboard"]

Curve = list[tuple[int, float, float]]  # step, time, value

_MOST_PICTURES = 12
_MOST_RANKS = 8  # drawn, one curve each
_MOST_LABEL_CHARS = 80  # of a name: each takes a millisecond to lay out
_OUR_SUFFIX = ".detrain_nb"


def plot(metrics: Iterable[Mapping[str, Any]], *names: str, axes: Sequence[Any] | None = None) -> Sequence[Any]:
    """Draw a chart for each of ``names``, by default the first 12 that were logged, with one curve per rank.

    ``axes``: the matplotlib axes to draw in, one per name; None creates them. Returns the axes.
    Raises: SpecError when one of ``names`` or any number at all was never logged, or matplotlib is not installed.
    """
    curves = _curves_of(metrics)
    shown = _choose(curves, names)
    places = _new_axes(len(shown)) if axes is None else axes
    for name, place in zip(shown, places):
        ranks = sorted(curves[name])
        for rank in ranks[:_MOST_RANKS]:
            steps, _, values = zip(*curves[name][rank])
            place.plot(steps, values, label=f"rank {rank}", marker="." if len(steps) == 1 else "")
        label = name if len(name) <= _MOST_LABEL_CHARS else f"{name[: _MOST_LABEL_CHARS - 3]}..."
        place.set_ylabel(label.replace("$", r"\$"))  # else matplotlib reads it as a formula
        if len(ranks) > 1:
            more = f"{len(ranks) - _MOST_RANKS} more ranks" if len(ranks) > _MOST_RANKS else None
            place.legend(title=more, fontsize="small")
    places[-1].set_xlabel("step")
    return places


def write_tensorboard(folder: str | Path, metrics: Iterable[Mapping[str, Any]]) -> list[Path]:
    """Write one folder per rank into ``folder``, replacing event files of an earlier call; return the files.

    Raises: SpecError when nothing was logged, or torch or tensorboard is not installed; OSError.
    """
    curves = _curves_of(metrics)
    _choose(curves, ())
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as exc:
        missing = "torch" if (exc.name or "").partition(".")[0] == "torch" else "tensorboard"
        raise SpecError(f"{missing} is not installed: pip install {missing}, or read job.metrics()") from exc
    written: list[Path] = []
    for rank in sorted({rank for of_name in curves.values() for rank in of_name}):
        place = Path(os.path.expanduser(folder)).absolute() / f"rank-{rank}"
        make_users_folder(place)
        for old in place.glob(f"events.out.tfevents.*{_OUR_SUFFIX}"):
            old.unlink()
        with SummaryWriter(str(place), filename_suffix=_OUR_SUFFIX) as writer:
            for name, of_name in curves.items():
                for step, at, value in of_name.get(rank, ()):
                    writer.add_scalar(name, value, step, walltime=at)
        written += place.glob(f"events.out.tfevents.*{_OUR_SUFFIX}")
    return written


def _new_axes(number: int) -> list[Any]:
    try:
        from matplotlib import pyplot
    except ImportError as exc:
        raise SpecError("matplotlib is not installed: pip install matplotlib, or read job.metrics()") from exc
    size = (7, 0.6 + 2.2 * number)
    return list(pyplot.subplots(number, 1, sharex=True, squeeze=False, figsize=size, layout="constrained")[1].flat)


def _curves_of(metrics: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, Curve]]:
    """Group the numbers by name and rank, sorted by step. Of a step repeated after a restart, keep the latest value."""
    found: dict[str, dict[int, dict[int, tuple[float, float]]]] = {}
    for line in metrics:
        for name, value in line.items():
            if name not in NO_VALUES and isinstance(value, (int, float)) and not isinstance(value, bool):
                at = _as_float(line.get("time"))
                steps = found.setdefault(printable(name), {}).setdefault(line["rank"], {})
                if line["step"] not in steps or steps[line["step"]][0] <= at:
                    steps[line["step"]] = at, _as_float(value)
    return {
        name: {rank: [(step, *steps[step]) for step in sorted(steps)] for rank, steps in ranks.items()}
        for name, ranks in found.items()
    }


def _as_float(value: object) -> float:
    if not isinstance(value, (int, float)):  # a node may log anything as its time
        return 0.0
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf if value > 0 else -math.inf


def _choose(curves: Mapping[str, Mapping[int, Curve]], names: Sequence[str]) -> list[str]:
    """Return the names to draw. Raises: SpecError when one of ``names``, or any number at all, was never logged."""
    if not curves:
        raise SpecError("no numbers were logged: call detrain_nb.log_metrics(step, loss=...) in the script")
    for name in names:
        if name not in curves:
            raise SpecError(f"{printable(name)!r} was never logged: choose from {name_some(list(curves), most=20)}")
    return list(dict.fromkeys(names)) or list(curves)[:_MOST_PICTURES]
