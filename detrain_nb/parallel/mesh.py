"""Ranks laid out on named axes, with a process group on each; plan/mesh.py computes where a rank is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import SessionError, SpecError
from ..plan import resolve_axes
from .arguments import require_sizes


def make_mesh(
    *,
    pp: int | None = None,
    dp_replicate: int | None = None,
    dp_shard: int | None = None,
    cp: int | None = None,
    ep: int | None = None,
    tp: int | None = None,
    device_type: str | None = None,
) -> DeviceMesh:
    """Lay all ranks out on the given axes; one size may be -1, which takes the ranks that are left.

    ``pp``: pipeline stages. ``dp_replicate``: whole copies of the model (or of its shards). ``dp_shard``: shards of
    parameters, gradients and optimizer state. ``cp``: parts of a sequence. ``ep``: groups of experts. ``tp``: parts of
    a layer. The axes keep this order, whatever the order of the arguments; neighbouring ranks differ on the last
    axis. ``device_type`` defaults to "cuda" if every rank has a GPU that its group can use, to "cpu" if none has. The
    process groups of a mesh live as long as the default group: make the mesh once, in a cell of its own.

    Collective: every rank calls this, with the same numbers.
    Raises: SpecError when the sizes do not fit the ranks, when this rank has no such ``device_type``, or when none is
    given and only some ranks have a GPU; SessionError when there is no process group.
    """
    if not dist.is_initialized():
        raise SessionError(
            "a mesh needs a process group: start the session with one, or call init_process_group() first"
        )
    asked = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "ep": ep, "tp": tp}
    given = {axis: size for axis, size in asked.items() if size is not None}
    require_sizes(given)
    if device_type is not None:
        require_there(device_type, told_as=f"device_type={device_type!r}")
    sizes = resolve_axes(given, dist.get_world_size())
    return init_device_mesh(device_type or _device_type(), tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def require_there(kind: str, *, told_as: str) -> None:
    """Raise SpecError if this rank has no device of this ``kind``; torch would fail only at the first tensor."""
    there = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if kind not in there:
        why = (
            "this rank has no GPU that torch can use"
            if kind == "cuda"
            else "models cannot be laid out on such a device"
        )
        raise SpecError(f"{told_as}: {why}; available: {', '.join(there)}")


def replica_number(groups: Sequence[dist.ProcessGroup]) -> int:
    """Return this rank's number among the replicas, which have different data.

    ``groups``: this rank's group on each axis along which ranks have different data.
    """
    number = 0
    for group in groups:
        number = number * dist.get_world_size(group) + dist.get_rank(group)
    return number


def can_send_from(device_type: str, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether ``group`` (by default all ranks) can send point to point from there: gloo cannot from a GPU."""
    backends = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(",") if ":" in part)
    return device_type == "cpu" or backends.get(device_type, "gloo") != "gloo"


def _device_type() -> str:
    """Return the device type from which the default group can send tensors.

    Collective. Raises: SpecError when ranks have different types.
    """
    every = ["cuda" if torch.cuda.is_available() and can_send_from("cuda") else "cpu"] * dist.get_world_size()
    dist.all_gather_object(every, every[0])
    if len(set(every)) > 1:
        without = [str(rank) for rank, kind in enumerate(every) if kind == "cpu"]
        raise SpecError(
            f"only some ranks have a GPU that their group can use (without: {', '.join(without)}): use ranks of one "
            "kind, or, for a pipeline over both, make_mesh(pp=..., device_type='cpu') and parallelize(..., "
            "device='cuda') on ranks with a GPU"
        )
    return every[0]


def usual_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
