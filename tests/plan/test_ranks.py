"""Ranks as users write them, and checks of their number."""

from __future__ import annotations

import pytest

from detrain_nb.errors import SpecError, format_ranks, short_ranks
from detrain_nb.plan import parse_ranks, plan_one_node


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        (None, (0, 1, 2, 3)),
        ("all", (0, 1, 2, 3)),
        ("0,2", (0, 2)),
        ("2, 0", (0, 2)),
        ("0-3", (0, 1, 2, 3)),
        ("1-2,2,0", (0, 1, 2)),
        ("-1", (3,)),
        ("0,-1", (0, 3)),
        (2, (2,)),
        (-2, (2,)),
        ([3, 1, 3], (1, 3)),
    ],
)
def test_ranks_are_read_as_users_write_them(text: object, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text, world_size=4) == ranks


def test_ranks_win_over_a_machine_that_is_called_like_them() -> None:
    hosts = dict.fromkeys(("1", "0-1", "-1", "all", "1-x"), (2, 3))
    chosen = {name: parse_ranks(name, world_size=4, hosts=hosts) for name in hosts}
    assert chosen == {"1": (1,), "0-1": (0, 1), "-1": (3,), "all": (0, 1, 2, 3), "1-x": (2, 3)}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("7", "rank 7 does not exist: the session has 4 ranks, 0-3"),
        ("0-9", "rank 4 does not exist"),
        ("0-999999999999", "rank 4 does not exist"),
        ("-5", "rank -5 does not exist"),
        ("3-1", "invalid ranks '3-1': give the smaller number first, 1-3"),
        ("x", "invalid ranks 'x'"),
        ("1-x", "invalid ranks '1-x'"),
        ("", "invalid ranks ''"),
        ("0,,1", "invalid ranks '0,,1': nothing before or after a comma"),
        ([], "no rank is selected"),
    ],
)
def test_wrong_ranks_are_refused_with_what_to_write(text: object, complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        parse_ranks(text, world_size=4)


@pytest.mark.parametrize(
    ("wanted", "gpus", "world_size", "device"),
    [
        ({}, 0, 2, "cpu"),
        ({}, 8, 8, "cuda"),
        ({"ranks": 3}, 0, 3, "cpu"),
        ({"ranks": 3}, 4, 3, "cuda"),
        ({"device": "cpu"}, 4, 2, "cpu"),
        ({"ranks": 6, "device": "cpu"}, 4, 6, "cpu"),
    ],
)
def test_ranks_default_to_the_gpus_else_two(wanted: dict[str, object], gpus: int, world_size: int, device: str) -> None:
    plan = plan_one_node(**{"ranks": None, "device": "auto", "backend": None, **wanted}, gpus=gpus)
    assert (plan.world_size, plan.device) == (world_size, device)
    assert plan.backend == ("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")


@pytest.mark.parametrize(
    ("wanted", "gpus", "complaint"),
    [
        ({"ranks": 0}, 0, "0 ranks: a session needs at least 1"),
        ({"ranks": 2, "device": "cuda"}, 0, "no GPU was found"),
        ({"ranks": 4, "device": "cuda"}, 2, "4 ranks on cuda need 4 GPUs but this machine has 2: use -n 2"),
        ({"ranks": 4}, 2, "4 ranks but 2 GPUs: use --device cpu"),
        ({"device": "tpu"}, 0, "unknown device 'tpu': choose from"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(wanted: dict[str, object], gpus: int, complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        plan_one_node(**{"ranks": None, "device": "auto", "backend": None, **wanted}, gpus=gpus)


def test_ranks_are_written_in_runs() -> None:
    assert format_ranks([1]) == "rank 1"
    assert format_ranks([3, 0, 1, 2]) == "ranks 0-3"
    assert format_ranks([0, 2, 5, 6, 7]) == "ranks 0, 2, 5-7"
    assert short_ranks([0, 2, 3]) == "0,2-3"
