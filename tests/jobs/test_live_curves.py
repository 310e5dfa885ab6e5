"""Curves of a job that is watched: their memory is bounded, and a short series keeps every value that was logged."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from detrain_nb.jobs.live_curves import MOST_POINTS, Curve, LiveCurves


def test_few_points_are_as_they_were_logged() -> None:
    curve = Curve(0)
    for step in range(100):
        curve.add(step, float(step))
    assert curve.points() == [(step, float(step)) for step in range(100)]
    assert len(curve.points(30)) <= 30
    assert curve.points(50)[0] == (1, 0.5)


@given(st.integers(1, 20_000))
def test_many_points_are_means_that_keep_the_last_step_and_the_mean(number: int) -> None:
    curve = Curve(0)
    for step in range(number):
        curve.add(step, 1.0 if step % 2 else 3.0)
    points = curve.points()
    assert len(points) <= MOST_POINTS
    assert points[-1][0] == number - 1
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    if number > MOST_POINTS and number % 2 == 0:
        assert points[0][1] == 2.0


def test_steps_that_come_again_take_the_place_of_those_before() -> None:
    curve = Curve(0)
    for step, value in [(0, 1.0), (1, 2.0), (2, 3.0), (1, 9.0)]:
        curve.add(step, value)
    assert curve.points() == [(0, 1.0), (1, 9.0)]


def test_what_is_no_finite_number_is_counted_and_hides_no_other_value() -> None:
    curve = Curve(0)
    for step in range(7000):
        curve.add(step, math.nan if step % 7 == 3 else 0.5)
    assert {value for _, value in curve.points(400)} == {0.5}, "also where a point is a mean"
    assert (curve.num_bad, curve.first_bad, curve.bad_since) == (1000, 3, None)
    for step in range(10, 13):  # after a restart
        curve.add(step, math.inf)
    assert (curve.first_bad, curve.bad_since, curve.last) == (3, 10, math.inf)
    curve.add(0, 1.0)
    assert (curve.points(), curve.num_bad, curve.first_bad, curve.bad_since) == ([(0, 1.0)], 0, None, None)
    for step in range(2):
        curve.add(step, 1.5e308)
    assert curve.points(1) == [(1, 1.5e308)], "their sum is infinite, and their mean is not"


def test_curve_is_that_of_the_first_rank_that_logs_the_name() -> None:
    curves = LiveCurves()
    for rank in (3, 1, 2):
        for step in range(2):
            curves.add({"step": step, "rank": rank, "time": 100.0 + step, "loss": float(rank), "run": "x"})
    loss = curves.get("loss")
    assert loss is not None and loss.rank == 1
    assert loss.points() == [(0, 1.0), (1, 1.0)]
    assert [*curves.names] == ["loss"]
    assert curves.pace == 1.0
    assert curves.last_step == 1


def test_what_is_logged_by_epochs_leaves_progress_and_pace_alone() -> None:
    curves, seconds = LiveCurves(), 0.0
    for epoch in range(3):
        for number in range(100):
            seconds += 0.1
            curves.add({"step": 100 * epoch + number, "rank": 0, "time": 1e9 + seconds, "loss": 1.0})
        curves.add({"step": epoch, "rank": 0, "time": 1e9 + seconds, "val_loss": 1.0, "total_steps": 300})
    assert (curves.last_step, curves.num_steps) == (299, 300)
    assert curves.pace is not None and math.isclose(curves.pace, 10, rel_tol=1e-3)
    assert curves.mean_pace is not None and math.isclose(curves.mean_pace, 10, rel_tol=1e-3)
    assert all(rate is not None and math.isclose(rate, 10, rel_tol=1e-3) for _, rate in curves.steps_per_s.points())
    found = curves.get("val_loss")
    assert found is not None and [step for step, _ in found.points()] == [0, 1, 2]
    curves.add({"step": 200, "rank": 0, "time": 1e9 + seconds + 60, "loss": 1.0})
    assert curves.last_step == 200, "after a restart from a checkpoint"


def test_what_is_looked_at_first_has_a_place_behind_many_names() -> None:
    curves = LiveCurves()
    norms = {f"grad_norm/{'encoder.' * 10}{number}": 1.0 for number in range(70)}
    curves.add({"step": 0, "rank": 0, "time": 1.0, **norms, "loss": 2.0, "lr": 0.1, "tokens_per_s": 5.0})
    curves.add({"step": 1, "rank": 0, "time": 2.0, "val/loss": 3.0})
    assert {"loss", "lr", "tokens_per_s", "val/loss"} < {*curves.names}
    assert len([*curves.names]) == 64 + 4, "names that are alike in the beginning are apart"


def test_hostile_lines_take_little_memory() -> None:
    curves = LiveCurves()
    for number in range(1000):
        curves.add({"step": number, "rank": 0, "time": -1, f"n\x1b{number}" + "x" * 1000: 10**400, "total_steps": -3})
    assert len([*curves.names]) == 64
    assert all(name.isprintable() and len(name) <= 200 for name in curves.names)
    for number in range(1000):
        curves.add({"step": number, "rank": 0, "time": -1, f"loss{number}": 1.0})
    assert len([*curves.names]) == 128
    assert curves.num_steps is None and curves.pace is None
    curves.add({"step": 1, "rank": 0, "time": 5.0, "total_steps": 80})
    assert curves.num_steps == 80
