"""Timelines, compared with the known bubbles of schedules, and pictures drawn from them."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from matplotlib.figure import Figure

from detrain_nb.errors import SpecError
from detrain_nb.parallel import SCHEDULES, StageNode, partition, profile
from detrain_nb.parallel.pictures import draw_mesh, draw_partition, show_mesh
from detrain_nb.parallel.stages.timeline import timeline
from detrain_nb.plan import StageLayout

from .models import GPT


@pytest.mark.parametrize("ranks, count", [(2, 4), (4, 8), (4, 16)])
def test_bubbles_are_those_of_the_papers(ranks: int, count: int) -> None:
    """The bubble of GPipe and 1F1B is (p - 1) / (m + p - 1); with v stages on a rank it is (p - 1) / (v m + p - 1)."""
    for name, works in {"GPipe": count, "1F1B": count, "Interleaved1F1B": 2 * count, "LoopedBFS": 2 * count}.items():
        known = pytest.approx((ranks - 1) / (works + ranks - 1))
        assert timeline(name, ranks, count).bubble == known
        assert StageLayout(name).least_bubble(num_ranks=ranks, num_microbatches=count) == known
    assert StageLayout("ZBVZeroBubble").least_bubble(num_ranks=ranks, num_microbatches=count) is None
    interleaved = timeline("Interleaved1F1B", ranks, count).bubble
    assert timeline("ZBVZeroBubble", ranks, count).bubble < interleaved


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_microbatch_goes_through_every_stage_in_order(name: str) -> None:
    ranks, count = 4, 8
    found = timeline(name, ranks, count)
    stages = 4 if name in ("GPipe", "1F1B") else 8
    works = [work for rank in found.ranks for work in rank]
    forward = {(work.stage, work.microbatch): work for work in works if work.kind == "F"}
    backward = {(work.stage, work.microbatch): work for work in works if work.kind in "BI"}
    everything = set(itertools.product(range(stages), range(count)))
    assert forward.keys() == backward.keys() == everything
    for stage, number in everything:
        assert forward[stage, number].end_s <= backward[stage, number].begin_s
        if stage:
            assert forward[stage - 1, number].end_s <= forward[stage, number].begin_s
            assert backward[stage, number].end_s <= backward[stage - 1, number].begin_s
    for rank in found.ranks:
        assert all(first.end_s <= second.begin_s + 1e-12 for first, second in itertools.pairwise(rank))
    busy = sum(work.end_s - work.begin_s for work in works)
    assert busy == pytest.approx(ranks * count * 3e-3)


def test_slow_stage_is_what_a_step_waits_for() -> None:
    even, uneven = timeline("1F1B", 2, 8, stage_s=[1.0, 1.0]), timeline("1F1B", 2, 8, stage_s=[0.5, 1.5])
    assert even.step_s == pytest.approx(9.0)
    assert uneven.step_s == pytest.approx(0.5 / 3 + 8 * 1.5 + 0.5 * 2 / 3)
    assert uneven.bubble > even.bubble


def test_timeline_is_shown_and_drawn() -> None:
    found = timeline("ZBVZeroBubble", 2, 4)
    text = str(found)
    assert text.count("\n") == 2 and "rank  1" in text and "% bubble" in text and "gradients of weights" in text
    assert "<pre " in found._repr_html_()
    axes = found.draw(Figure().add_subplot())
    assert len(axes.patches) == sum(map(len, found.ranks))


def test_partition_is_drawn() -> None:
    nodes = [StageNode("a", memory_bytes=1e9), StageNode("b", speed=2.0)]
    found = partition(profile(GPT(), torch.zeros(2, 16, dtype=torch.long)), nodes)
    left, right = draw_partition(found, Figure().subplots(1, 2))
    assert len(left.patches) == len(found.profile.units) and len(right.patches) == 2
    assert len(right.lines) == 1, "the limit of the node that has one"
    assert [text.get_text() for text in left.get_yticklabels()] == ["stage 0 (a)", "stage 1 (b)"]


def test_mesh_is_a_table() -> None:
    lines = show_mesh({"tp": 2, "pp": 2, "dp_shard": 2}, 8).splitlines()
    assert lines[0].split() == ["pp", "dp_shard", "ranks", "along", "tp=2"]
    assert [line.split() for line in lines[1:]] == [
        ["0", "0", "0-1"],
        ["0", "1", "2-3"],
        ["1", "0", "4-5"],
        ["1", "1", "6-7"],
    ]
    assert show_mesh({"pp": 64, "tp": 8}, 512).endswith("... 32 more")
    lines = show_mesh({"pp": 2, "dp_replicate": 4}, 8).splitlines()
    assert [line.split() for line in lines[1:]] == [["0", "0-3"], ["1", "4-7"]], "no axis of one that nobody asked for"


def test_mesh_is_drawn_with_a_cell_for_each_rank() -> None:
    axes = draw_mesh({"tp": 2, "pp": 2, "dp_shard": 2}, 8, Figure().add_subplot())
    cells = {text.get_text(): text.get_position() for text in axes.texts}
    assert cells == {str(rank): (rank % 2, rank // 2) for rank in range(8)}
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "pp 0, dp_shard 0",
        "pp 0, dp_shard 1",
        "pp 1, dp_shard 0",
        "pp 1, dp_shard 1",
    ]
    assert (axes.get_xlabel(), axes.get_title(), axes.yaxis_inverted()) == ("tp", "8 ranks", True)
    colours = [patch.get_facecolor() for patch in axes.patches]
    assert len({*colours[:4]}) == len({*colours[4:]}) == 1 and colours[0] != colours[4], "a colour for each stage"


def test_mesh_of_one_axis_and_a_large_one_are_drawn() -> None:
    row = draw_mesh({"dp_shard": -1}, 4, Figure().add_subplot())
    assert [text.get_text() for text in row.texts] == ["0", "1", "2", "3"] and row.get_xlabel() == "dp_shard"
    large = draw_mesh({"pp": 64, "tp": 64}, 4096, Figure().add_subplot())
    assert len(large.patches) == 32 * 32 and large.texts[32].get_text() == "64"
    assert large.get_title() == "4096 ranks, the first 32 of 64 rows"
    assert large.get_xlabel() == "tp, the first 32 of 64"
    with pytest.raises(SpecError, match="mesh pp=3 needs 3 ranks, but there are 4"):
        draw_mesh({"pp": 3}, 4)


@pytest.mark.slow
def test_matplotlib_is_not_needed_before_something_is_drawn() -> None:
    code = """
import sys
import detrain_nb.parallel, detrain_nb.training
from detrain_nb.parallel.pictures import draw_mesh
assert "matplotlib" not in sys.modules
sys.modules["matplotlib"] = None  # as where it is not installed
print(detrain_nb.parallel.show_mesh({"pp": 2}, 2), detrain_nb.parallel.timeline("1F1B", 2, 4))
try:
    draw_mesh({"pp": 2}, 2)
except ImportError as exc:
    print("not drawn:", exc)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "ranks along pp=2" in ended.stdout and "bubble" in ended.stdout
    assert "not drawn: " in ended.stdout and "matplotlib" in ended.stdout


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(SpecError, match="stage_s has 3 times, but 1F1B has 2 stages on 2 ranks"):
        timeline("1F1B", 2, 4, stage_s=[1, 1, 1])
    with pytest.raises(SpecError, match="num_ranks=0: give a whole number"):
        timeline("GPipe", 0, 4)
    with pytest.raises(SpecError, match="5 microbatches"):
        timeline("Interleaved1F1B", 2, 5) and timeline("Interleaved1F1B", 4, 5)
