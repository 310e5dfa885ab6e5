"""The metrics that a job has logged, as curves and as TensorBoard files."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from detrain_nb.errors import SpecError
from detrain_nb.jobs.curves import plot, write_tensorboard
from detrain_nb.metrics import read_metrics_line

METRICS: list[dict[str, Any]] = [
    {
        "step": step,
        "time": 100.0 + step,
        "rank": rank,
        "loss": 1.0 / (1 + step + rank),
        "lr": 1,
        "phase": "a",
        "ok": True,
    }
    for step in range(3)
    for rank in range(2)
]


def figure() -> Any:
    from matplotlib.figure import Figure

    return Figure()


def test_every_value_has_a_picture_with_a_curve_for_each_rank() -> None:
    axes = plot(METRICS, axes=figure().subplots(2, 1))
    assert [place.get_ylabel() for place in axes] == ["loss", "lr"]
    assert [[list(line.get_ydata()) for line in place.get_lines()] for place in axes] == [
        [[1.0, 1 / 2, 1 / 3], [1 / 2, 1 / 3, 1 / 4]],
        [[1.0] * 3] * 2,
    ]
    (chosen,) = plot(METRICS, "lr", axes=[figure().subplots()])
    assert chosen.get_ylabel() == "lr"


def test_name_of_thousands_of_characters_is_cut() -> None:
    (place,) = plot([{"step": 0, "rank": 0, "time": 0.0, "x" * 60_000: 1.0}], axes=[figure().subplots()])
    assert place.get_ylabel() == "x" * 77 + "..."


def test_of_a_step_that_was_trained_again_the_last_value_counts() -> None:
    again = [
        *METRICS,
        {"step": 1, "time": 300.0, "rank": 0, "loss": 7.0},
        {"step": 1, "time": 1.0, "rank": 0, "loss": 9.0},
    ]
    (place,) = plot(again, "loss", axes=[figure().subplots()])
    assert list(place.get_lines()[0].get_ydata()) == [1.0, 7.0, 1 / 3]


def test_numbers_and_names_that_are_strange_are_drawn() -> None:
    strange = [{"step": 0, "time": 0, "rank": 0, "$x^": 10**400, "\x1b": float("nan")}]
    axes = plot(strange, axes=figure().subplots(2, 1))
    axes[0].figure.canvas.draw()
    assert axes[1].get_ylabel() == "\\x1b"


@pytest.mark.parametrize("time", ['"x"', "[1]", "1" + "0" * 400, "null"])
def test_time_that_is_none_is_no_time(time: str) -> None:
    line = read_metrics_line(f'{{"step": 1, "rank": 0, "time": {time}, "loss": 1}}')
    assert line is not None
    assert len(plot([line], axes=[figure().subplots()])) == 1
    assert read_metrics_line(f'{{"step": {10**70}, "rank": 0}}') is None


def test_what_cannot_be_drawn_is_told() -> None:
    with pytest.raises(SpecError, match=r"no numbers were logged: call detrain_nb.log_metrics"):
        plot([{"step": 1, "rank": 0, "time": 1.0, "phase": "a"}])
    with pytest.raises(SpecError, match="'los' was never logged: choose from loss, lr"):
        plot(METRICS, "los")


@pytest.mark.parametrize("call, library", [("plot(lines)", "matplotlib"), ("write_tensorboard('x', lines)", "torch")])
def test_library_that_is_not_there_is_named(call: str, library: str, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.modules[{library!r}] = None\nfrom detrain_nb.jobs.curves import plot, write_tensorboard\n"
        f"lines = [dict(step=1, time=1.0, rank=0, loss=1.0)]\ntry: {call}\nexcept ValueError as exc: print(exc)"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert said.stdout.startswith(f"{library} is not installed: pip install {library}, or read"), said.stderr
    assert not list(tmp_path.iterdir())


def test_tensorboard_reads_what_is_written_for_it(tmp_path: Path) -> None:
    """TensorBoard is optional; without it, the error names the command that installs it."""
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(SpecError, match="tensorboard is not installed: pip install tensorboard"):
            write_tensorboard(tmp_path, METRICS)
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):  # the second call replaces the files of the first
        files = write_tensorboard(tmp_path, METRICS)
        assert [file.parent.name for file in files] == ["rank-0", "rank-1"]
    events = EventAccumulator(str(tmp_path / "rank-1")).Reload()
    assert [(event.step, event.wall_time) for event in events.Scalars("loss")] == [(0, 100.0), (1, 101.0), (2, 102.0)]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([1 / 2, 1 / 3, 1 / 4])
