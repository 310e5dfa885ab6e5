"""The plan of a pipeline: the stages of each rank, and errors for numbers that do not fit, with the change to make."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrain_nb.errors import SpecError
from detrain_nb.plan import SCHEDULES, Batch, NodeOffer, Plan, plan_nodes, plan_pipeline

ALL_AXES = {"pp": 1, "dp_replicate": 1, "dp_shard": -1, "tp": 1}


def plan(
    *nodes: int, batch: int | None = None, microbatches: int | None = None, schedule: str = "1F1B", **axes: int
) -> Plan:
    offers = [NodeOffer(name, tuple(range(gpus)), ranks=gpus) for name, gpus in zip("abcdef", nodes)]
    return plan_pipeline(
        offers, axes={**ALL_AXES, **axes}, batch_size=batch, microbatches=microbatches, schedule=schedule
    )


def test_every_rank_has_its_node_its_device_its_place_and_its_stage() -> None:
    found = plan(2, 2, pp=2, batch=8)
    rows = found.rank_rows()
    assert [(row.rank, row.node, row.node_rank, row.local_rank, row.device) for row in rows] == [
        (0, "a", 0, 0, "cuda:0"),
        (1, "a", 0, 1, "cuda:1"),
        (2, "b", 1, 0, "cuda:0"),
        (3, "b", 1, 1, "cuda:1"),
    ]
    assert [row.coordinates for row in rows] == [
        {"pp": pp, "dp_replicate": 0, "dp_shard": dp, "tp": 0} for pp in (0, 1) for dp in (0, 1)
    ]
    assert [row.stages for row in rows] == [(0,), (0,), (1,), (1,)]
    assert found.batch == Batch(replicas=2, microbatches=4, micro_size=1)


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("gpipe", ((0,), (1,))),
        ("Interleaved1F1B", ((0, 2), (1, 3))),
        ("DualPipeV", ((0, 3), (1, 2))),
        ("of_mine.csv", ()),
    ],
)
def test_stages_are_those_of_the_schedule(schedule: str, stages: tuple[tuple[int, ...], ...]) -> None:
    assert plan(2, pp=2, schedule=schedule).stages == stages
    assert plan(2, schedule=schedule).stages == ()


def test_stages_are_those_that_torch_runs() -> None:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    for name in SCHEDULES:
        has_one_stage = issubclass(get_schedule_class(name), PipelineScheduleSingle)
        assert [len(stages) for stages in plan(4, pp=4, schedule=name).stages] == [1 if has_one_stage else 2] * 4


@pytest.mark.parametrize(
    ("nodes", "given", "complaint"),
    [
        ((2, 2), {"pp": 2, "tp": 4}, "mesh pp=2 x tp=4 needs 8 ranks but nodes a, b offer 4: add nodes or lower tp"),
        ((1,), {"pp": 2}, "mesh pp=2 needs 2 ranks but node a offers 1: add nodes or lower pp"),
        (
            (1, 1, 1, 1),
            {"tp": 8},
            "mesh tp=8 needs 8 ranks but nodes a, b, c and 1 more offer 4: add nodes",
        ),
        (
            (2, 2),
            {"pp": 3},
            "mesh pp=3 x dp_shard=-1 needs a multiple of 3 ranks but nodes a, b offer 4: change the number of ranks",
        ),
        (
            (2, 2),
            {"pp": 2, "dp_shard": 1},
            "mesh pp=2 needs 2 ranks but nodes a, b offer 4: use fewer ranks or raise pp",
        ),
        ((2, 2), {"batch": 6}, "batch size 6 is not divisible by 4 replicas: give 4 or 8"),
        ((2, 2), {"batch": 0}, "batch size 0: must be at least 1"),
        (
            (2, 2),
            {"batch": 32, "microbatches": 3},
            "batch size 32 is not divisible by 4 replicas x 3 microbatches: give 24 or 36, or a number of microbatches "
            "that divides 8",
        ),
        ((2,), {"batch": 4, "microbatches": 0}, "0 microbatches: must be at least 1"),
        (
            (4,),
            {"pp": 4, "microbatches": 2},
            "1F1B needs at least as many microbatches as stages: 2 are fewer than 4",
        ),
        (
            (2,),
            {"pp": 2, "microbatches": 5, "batch": 20, "schedule": "Interleaved1F1B"},
            "Interleaved1F1B runs 5 microbatches on 2 ranks in 2 rounds, but 5 is not divisible by 2: give 4",
        ),
        ((2,), {"schedule": "2F2B"}, "unknown schedule '2F2B': choose one of GPipe, 1F1B"),
    ],
)
def test_what_does_not_fit_is_told_with_what_to_change(
    nodes: tuple[int, ...], given: dict[str, int], complaint: str
) -> None:
    with pytest.raises(SpecError) as caught:
        plan(*nodes, **given)  # type: ignore[arg-type]
    assert str(caught.value).startswith(complaint)


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 9)),
    st.integers(1, 300),
    st.sampled_from(SCHEDULES),
)
def test_a_batch_is_dealt_out_whole(
    replicas: int, pp: int, microbatches: int | None, batch_size: int, schedule: str
) -> None:
    try:
        found = plan(replicas * pp, pp=pp, batch=batch_size, microbatches=microbatches, schedule=schedule).batch
    except SpecError as exc:
        assert batch_size % replicas or (microbatches or 2) > 1 or pp > 1, exc
        return
    assert found is not None and found.global_size == batch_size
    assert found.replicas == replicas
    assert found.microbatches == microbatches or microbatches is None


@pytest.mark.parametrize(
    ("batch", "microbatches"),
    [(16, 8), (14, 7), (12, 6), (8, 8), (4, 4), (20, 5)],
)
def test_microbatches_are_two_a_stage_or_the_most_below_that_divide(batch: int, microbatches: int) -> None:
    found = plan(4, pp=4, batch=batch).batch
    assert found and found.microbatches == microbatches


def test_of_all_ranks_there_is_a_bound() -> None:
    for ranks in (1 << 16, 10**15):
        with pytest.raises(SpecError, match="ranks up to node b: a session can have at most 65536"):
            plan_nodes([NodeOffer("a", (), ranks=1), NodeOffer("b", (), ranks=ranks)], device="cpu", backend=None)


def test_ranks_that_are_left_have_no_mesh() -> None:
    left, number = plan(2, 2, pp=2, batch=8).without({1})
    assert (left.mesh, left.batch, left.stages) == (None, None, ())
    assert number == {0: 0, 2: 1, 3: 2}
    assert len(left.rank_rows()) == 3
