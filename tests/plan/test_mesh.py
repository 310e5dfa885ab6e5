"""Axes of a mesh: sizes that fit the world size, sizes that do not, and each rank's place, as torch has it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from detrain_nb.errors import SpecError
from detrain_nb.plan import AXES, DATA_AXES, Mesh, resolve_axes


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
        ({"pp": 2, "tp": 4}, 4, "mesh pp=2 x tp=4 needs 8 ranks, but there are 4: add ranks or lower tp"),
        ({"tp": 2}, 4, "mesh tp=2 needs 2 ranks, but there are 4: use fewer ranks or raise tp"),
        (
            {"pp": -1, "tp": 3},
            4,
            "mesh pp=-1 x tp=3 needs a multiple of 3 ranks, but there are 4: change the",
        ),
        ({"pp": -1, "tp": 8}, 4, "mesh tp=8 needs 8 ranks, but there are 4: add ranks or lower tp"),
        ({"pp": -1, "tp": -1}, 4, "mesh pp=-1 x tp=-1: only one axis can be -1, not both pp and tp"),
        ({"tp": 0}, 4, "mesh tp=0: tp must be 1 or more ranks, or -1 for all remaining ranks"),
        ({"tp": -2}, 4, "mesh tp=-2: tp must be 1 or more ranks"),
        ({"dp": 4}, 4, "unknown mesh axis 'dp': choose from pp, dp_replicate, dp_shard, cp, ep, tp"),
    ],
)
def test_sizes_that_do_not_fit_are_told(sizes: dict[str, int], world_size: int, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_axes(sizes, world_size)
    assert str(caught.value).startswith(message)


@st.composite
def meshes(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, int], int]:
    """Draw requested sizes, the resolved sizes, and the world size."""
    names = draw(st.lists(st.sampled_from(AXES), unique=True, min_size=1))
    sizes = {name: draw(st.integers(1, 5)) for name in names}
    open_axis = draw(st.sampled_from([None, *names]))
    asked = {name: -1 if name == open_axis else size for name, size in sizes.items()}
    return asked, sizes, math.prod(sizes.values())


@given(meshes())
def test_every_rank_is_where_device_mesh_has_it(drawn: tuple[dict[str, int], dict[str, int], int]) -> None:
    """DeviceMesh arranges the ranks as `arange(world).view(sizes)`; tests/parallel compares with a real one."""
    asked, sizes, world_size = drawn
    mesh = Mesh(resolve_axes(asked, world_size))
    assert {axis: size for axis, size in mesh.axes.items() if axis in sizes} == sizes
    assert list(mesh.axes) == [axis for axis in AXES if axis in mesh.axes]
    assert mesh.world_size == world_size
    assert mesh.replicas == math.prod(sizes.get(axis, 1) for axis in DATA_AXES)
    laid_out = torch.arange(world_size).view(*mesh.axes.values())
    for rank in range(world_size):
        places = mesh.coordinates(rank)
        assert list(places) == list(mesh.axes)
        assert laid_out[tuple(places.values())] == rank


@given(
    st.dictionaries(st.sampled_from(AXES), st.integers(-2, 9), max_size=4),
    st.integers(1, 70),
    st.sampled_from([(), ("",), ("a",), ("a", "b")]),
)
def test_sizes_fit_or_are_refused(asked: dict[str, int], world_size: int, nodes: tuple[str, ...]) -> None:
    try:
        resolved = resolve_axes(asked, world_size, nodes=nodes)
    except SpecError as exc:
        assert "mesh " in str(exc)
    else:
        assert math.prod(resolved.values()) == world_size
        assert all(resolved[axis] == size for axis, size in asked.items() if size != -1)


def test_rank_outside_of_a_mesh_is_refused() -> None:
    for rank in (-1, 4):
        with pytest.raises(SpecError, match=f"rank {rank} does not exist: mesh pp=2 x tp=2 has ranks 0-3"):
            Mesh({"pp": 2, "dp_shard": 1, "tp": 2}).coordinates(rank)
