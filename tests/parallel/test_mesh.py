"""Axes of a mesh: sizes that fit, and those that do not; ranks where they should be."""

from __future__ import annotations

import pytest

from detrain_nb import Session
from detrain_nb.errors import RankError, SessionError, SpecError
from detrain_nb.parallel import make_mesh
from detrain_nb.parallel.mesh import resolve_axes


@pytest.mark.parametrize(
    "sizes, world_size, expected",
    [
        ({"tp": 2, "pp": 2}, 4, {"pp": 2, "tp": 2}),
        ({"tp": 2, "dp_shard": -1}, 8, {"dp_shard": 4, "tp": 2}),
        ({"pp": 1, "dp_replicate": 2, "dp_shard": 2, "cp": 1, "ep": 1, "tp": -1}, 4, None),
        ({}, 3, {"dp_shard": 3}),
        ({"pp": -1}, 1, {"pp": 1}),
        ({"tp": 2, "dp_replicate": -1}, 4, {"dp_replicate": 2, "dp_shard": 1, "tp": 2}),
    ],
)
def test_axes_have_their_order_and_the_rest_is_left_for_one(
    sizes: dict[str, int], world_size: int, expected: dict[str, int] | None
) -> None:
    expected = {**sizes, "tp": 1} if expected is None else expected
    assert list(resolve_axes(sizes, world_size).items()) == list(expected.items())


@pytest.mark.parametrize(
    "sizes, world_size, message",
    [
        ({"pp": 2, "tp": 4}, 4, "mesh pp=2 x tp=4 needs 8 ranks, and there are 4: add ranks, or lower tp"),
        ({"tp": 2}, 4, "mesh tp=2 needs 2 ranks, and there are 4: use fewer ranks, or raise tp"),
        ({"pp": -1, "tp": 3}, 4, "mesh pp=-1 x tp=3: 4 ranks do not divide by 3"),
        ({"pp": -1, "tp": 8}, 4, "mesh pp=-1 x tp=8: 4 ranks do not divide by 8"),
        ({"pp": -1, "tp": -1}, 4, "mesh pp=-1 x tp=-1: only one axis can be -1, not both pp and tp"),
        ({"tp": 0}, 4, "mesh tp=0: tp is a number of ranks, 1 or more, or -1 for what is left"),
        ({"tp": -2}, 4, "mesh tp=-2: tp is a number of ranks"),
        ({"dp": 4}, 4, "'dp' is no axis of a mesh: there are pp, dp_replicate, dp_shard, cp, ep, tp"),
    ],
)
def test_sizes_that_do_not_fit_are_told(sizes: dict[str, int], world_size: int, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_axes(sizes, world_size)
    assert str(caught.value).startswith(message)


def test_mesh_without_ranks_is_told() -> None:
    with pytest.raises(SessionError, match="a mesh needs a process group: start the session with one"):
        make_mesh(tp=1)


@pytest.mark.slow
def test_neighbouring_ranks_are_on_the_last_axis() -> None:
    with Session.start(4, device="cpu") as session:
        made = session.run_cell(
            "from detrain_nb import parallel as par\nmesh = par.make_mesh(tp=2, pp=-1)\n"
            "mesh.mesh_dim_names, mesh['pp'].get_local_rank(), mesh['tp'].get_local_rank(), mesh.device_type"
        )
        assert made.values == {rank: (("pp", "tp"), rank // 2, rank % 2, "cpu") for rank in range(4)}
        summed = session.run_cell(
            "t = torch.tensor([rank]); dist.all_reduce(t, group=mesh['tp'].get_group()); t.item()"
        )
        assert summed.values == {0: 1, 1: 1, 2: 5, 3: 5}
        with pytest.raises(RankError, match="mesh tp=3 needs 3 ranks, and there are 4: use fewer ranks, or raise tp"):
            session.run_cell("par.make_mesh(tp=3)")
