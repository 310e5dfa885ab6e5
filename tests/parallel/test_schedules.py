"""Schedules that the user has written: what is read, what is refused, and how ranks run them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from detrain_nb import Session
from detrain_nb import parallel as par
from detrain_nb.errors import RankError, SpecError
from detrain_nb.parallel import SCHEDULES
from detrain_nb.parallel.stages.schedules import Schedule, find_schedule

CLOSE = 2e-6  # relative
COUNT = 4


def _one_forward_one_backward() -> list[str]:
    first = "0F0, 0F1, 0B0, 0F2, 0B1, 0F3, 0B2, , 0B3"
    return [first, ",".join(f"1F{number},1B{number}" for number in range(COUNT))]


def _neighbours() -> list[str]:
    """Return a schedule that torch has no name for: three stages, two of them neighbours on a rank.

    That rank splits its backward passes into input and weight gradients, the other one does not.
    """
    first = [f"{stage}F{number}" for number in range(COUNT) for stage in (0, 1)]
    first += [f"{stage}{kind}{number}" for number in range(COUNT) for stage in (1, 0) for kind in "IW"]
    return [",".join(first), ",".join([f"2F{n}" for n in range(COUNT)] + [f"2B{n}" for n in range(COUNT)])]


def _torchs(name: str) -> list[str]:
    orders = get_schedule_ops(name, 2, COUNT, 2)
    return [",".join("" if action is None else str(action) for action in order) for order in orders]


WRITTEN = {
    "1F1B": (_one_forward_one_backward(), 2),
    "neighbours": (_neighbours(), 3),
    "ZBVZeroBubble": (_torchs("ZBVZeroBubble"), 4),
    "DualPipeV": (_torchs("DualPipeV"), 4),  # passes that overlap
}


@pytest.fixture(scope="module")
def session(two_ranks: Session) -> Session:
    two_ranks.run_cell("import on_ranks", timeout_s=60)
    return two_ranks


def _write(folder: Path, lines: list[str], name: str = "own.csv") -> str:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(
    "name", [name if name == "neighbours" else pytest.param(name, marks=pytest.mark.slow) for name in WRITTEN]
)
def test_written_schedule_gives_the_whole_models_losses_gradients_and_outputs(
    session: Session, name: str, tmp_path: Path
) -> None:
    """This includes batches of 6 and of 7 rows, which are cut into fewer microbatches than the schedule has."""
    lines, num_stages = WRITTEN[name]
    path = _write(tmp_path, lines)
    result = session.run_cell(f"on_ranks.train_gpt({path!r}, {num_stages}, is_tied=True)")
    assert sorted(stage for found in result.values.values() for stage in found["stages"]) == list(range(num_stages))
    for found in result.values.values():
        assert found["gradients"] < CLOSE and found["added up"] < CLOSE
        assert found["evaluation left gradients"] is True
        if num_stages - 1 in found["stages"]:
            assert max(found["losses"]) < 1e-6 and found["prediction"] < 1e-6


def test_other_file_on_a_rank_is_told(session: Session, tmp_path: Path) -> None:
    """Each could run by itself, but the ranks would wait for each other."""
    other = _one_forward_one_backward()
    other[0] = "0F0, 0F1, 0F2, 0F3, 0B0, 0B1, 0B2, 0B3"
    paths = _write(tmp_path, other, "first.csv"), _write(tmp_path, _one_forward_one_backward(), "second.csv")
    with pytest.raises(RankError, match="the schedule of rank 1 differs from that of rank 0: give all ranks the same"):
        session.run_cell(f"on_ranks.train_gpt({paths}[rank], 2, is_tied=False)")


def test_layout_is_that_of_the_file(tmp_path: Path) -> None:
    written = find_schedule(_write(tmp_path, _neighbours()))
    assert written.name == "own.csv" and written.is_zero_bubble and not written.has_one_stage
    assert written.num_microbatches(3) == COUNT
    assert [written.stages_of_rank(rank, num_ranks=2, num_stages=3) for rank in range(2)] == [(0, 1), (2,)]
    assert [written.most_kept(stage, COUNT, num_stages=3) for stage in range(3)] == [4, 4, 4]
    plain = find_schedule(_write(tmp_path, _one_forward_one_backward()))
    assert not plain.is_zero_bubble and plain.has_one_stage
    assert [plain.most_kept(stage, COUNT, num_stages=2) for stage in range(2)] == [2, 1]


def test_timeline_and_dry_run_take_it(tmp_path: Path) -> None:
    path = _write(tmp_path, _one_forward_one_backward())
    assert par.timeline(path, 2, COUNT).ranks == par.timeline("1F1B", 2, COUNT).ranks
    sizes, model = {"pp": 2, "dp_shard": 2}, nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    found = [
        par.dry_run(model, sizes, example_inputs=torch.zeros(2, 16), schedule=schedule, num_microbatches=COUNT)
        for schedule in (path, "1F1B")
    ]
    assert "own.csv" in str(found[0])
    for mine, theirs in zip(found[0].rows, found[1].rows, strict=True):  # torch keeps sent tensors longer
        assert (mine.ranks, mine.num_parameters, mine.largest) == (theirs.ranks, theirs.num_parameters, theirs.largest)
        assert mine.total_bytes == pytest.approx(theirs.total_bytes, rel=0.05)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if not Schedule(name).has_one_stage])
def test_what_torch_writes_is_read_as_the_same(name: str, tmp_path: Path) -> None:
    written, known = find_schedule(_write(tmp_path, _torchs(name))), find_schedule(name.upper())
    num_stages = known.num_stages(2)
    assert written.num_stages(2) == num_stages and written.is_zero_bubble == known.is_zero_bubble
    for rank in range(2):
        places = [each.stages_of_rank(rank, num_ranks=2, num_stages=num_stages) for each in (written, known)]
        assert sorted(places[0]) == sorted(places[1])


@pytest.mark.parametrize(
    "lines, message",
    [
        (["0F0,0X0", "1F0,1B0"], "own.csv, line 1: .*write an action as 0F3 or 1B0"),
        ([], "own.csv has no pass, such as 0F0"),
        (["0F0,0B0", "2F0,2B0"], "has 3 stages, but no rank runs stage 1"),
        (["0F0,0SEND_F0,0B0", "1F0,1B0"], "contains 0SEND_F0: write only passes"),
        (["0F0,0B0", "1F0"], "own.csv: Invalid backward microbatches for stage 1"),
        (["0F0,0B0", "1B0,1F0"], "without first running Forward"),
        (["0F0,0B0,0F1,0B1", "1F1,1F0,1B0,1B1"], "own.csv deadlocks"),
        (["0F0,0B0,1F0,1B0", "1F0,1B0"], "own.csv contains 1F0 more than once"),
        (["0F0,0F1,0B0,0B1,1F0,1B0", "1F1,1B1"], "Stage 1 is assigned to both"),
        (["0F0,1F0,1B0,0B0", ","], "own.csv has no pass for rank 1"),
        (["0F0,0F0,0B0", "1F0,1B0"], "own.csv contains 0F0 more than once"),
    ],
)
def test_what_no_pipeline_could_run_is_told(lines: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        find_schedule(_write(tmp_path, lines))


def test_what_does_not_fit_it_is_told(tmp_path: Path) -> None:
    written = find_schedule(_write(tmp_path, _one_forward_one_backward()))
    with pytest.raises(SpecError, match="has lines for 2 ranks, but there are 4"):
        written.num_stages(4)
    with pytest.raises(SpecError, match="has 2 stages, but the model is cut into 4"):
        written.stages_of_rank(0, num_ranks=2, num_stages=4)
    with pytest.raises(SpecError, match=r"num_microbatches=8, but own\.csv has only 4"):
        written.require_microbatches(8, num_stages=2, num_ranks=2)
    with pytest.raises(SpecError, match=r"unknown schedule '2F2B': choose one of GPipe, .*, or a file"):
        find_schedule("2F2B")
    with pytest.raises(SpecError, match="cannot be read"):
        find_schedule(str(tmp_path / "none.csv"))
