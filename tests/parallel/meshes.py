"""Meshes for the ranks of a test, each made once: gloo polls every group a hundred times a second, used or not."""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from detrain_nb import parallel as par


def mesh_of(device_type: str = "cpu", **axes: int) -> DeviceMesh:
    """Return the mesh of these axes, made once for each default process group.

    Collective: all ranks.
    """
    return _make(dist.group.WORLD, device_type, tuple(axes.items()))


@functools.cache
def _make(world: dist.ProcessGroup, device_type: str, axes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    return par.make_mesh(**dict(axes), device_type=device_type)
