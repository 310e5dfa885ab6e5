"""Parameters that FSDP2 cannot shard: whole on every rank, with gradients averaged over all replicas.

These are parameters without dimensions or without elements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from .recording import modules_around
from .tensor.layers import Region, Share, change_class
from .tensor.ranks import MeshRanks

_BUCKET_BYTES = 25 * 2**20


def replicate_scalars(module: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Replicate the parameters of ``module`` that have no dimension to cut; return them, for FSDP2 to ignore.

    They become DTensors over ``mesh`` and their present mesh, as optimizers cannot mix DTensors and plain tensors. The
    model's code sees plain tensors instead.
    """
    modules = dict(module.named_modules())
    found = [
        (name, key, parameter)
        for name, part in modules.items()
        for key, parameter in part._parameters.items()
        if parameter is not None and _is_uncut(parameter)
    ]
    made: dict[int, nn.Parameter] = {}
    region = Region(None)
    for name, key, parameter in found:
        if id(parameter) not in made:
            made[id(parameter)] = _replicated(parameter, mesh)
        modules[name]._parameters[key] = made[id(parameter)]
        for outer in (*modules_around(name), name):  # a checkpoint may rerun any of them
            if "_share" not in modules[outer].__dict__:
                modules[outer].__dict__["_share"] = Share(_ScalarRanks(mesh["dp_shard"]), region)
                change_class(modules[outer], modules[outer].__dict__["_share"])
    return set(made.values())


class _ScalarRanks(MeshRanks):
    def local(self, parameter: Tensor, dim: int | None) -> Tensor | None:
        """Return None for sharded parameters: FSDP2 gathers them itself, and also queries the module for its shards."""
        return super().local(parameter, dim) if _is_uncut(parameter) else None


def _is_uncut(parameter: Tensor) -> bool:
    return not parameter.dim() or not parameter.numel()


def _replicated(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    local, whole = parameter.detach(), mesh
    if isinstance(local, DTensor):
        whole = DeviceMesh._concatenate([mesh, local.device_mesh])
        local = local.to_local()
    made: Any = DTensor.from_local(local, whole, [Replicate()] * whole.ndim, run_check=False)
    return nn.Parameter(made, requires_grad=parameter.requires_grad)


def replicated_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that `replicate_scalars` has laid out in ``modules``."""
    parameters = {id(p): p for module in modules for p in module.parameters()}.values()
    uncut = [p for p in parameters if isinstance(p, DTensor) and _is_uncut(p)]
    return [p for p in uncut if "dp_shard" in (p.device_mesh.mesh_dim_names or ())]


@contextlib.contextmanager
def averaged(parameters: Sequence[nn.Parameter], replicas: Sequence[dist.ProcessGroup]) -> Iterator[None]:
    """Average the gradients computed in the block over all replicas, and add them to earlier ones.

    Collective: all replicas.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    before = [parameter.grad for parameter in trained]
    for parameter in trained:
        parameter.grad = None
    try:
        yield
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter.detach())
            average(local_part(parameter.grad), replicas)
    except BaseException:  # a failure must not lose the earlier gradients
        for parameter, earlier in zip(trained, before):
            parameter.grad = earlier
        raise
    for parameter, earlier in zip(trained, before):
        if earlier is not None and parameter.grad is not None:
            parameter.grad = earlier.add_(parameter.grad)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, on the same memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def average(tensor: Tensor, replicas: Sequence[dist.ProcessGroup]) -> None:
    """Average ``tensor`` in place over ``replicas``. Collective: the replicas."""
    for group in replicas:
        dist.all_reduce(tensor, group=group)
        tensor.div_(dist.get_world_size(group))


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter], replicas: Sequence[dist.ProcessGroup]) -> None:
    """Average gradients that exist on any of ``replicas``. Collective: the replicas."""
    if not parameters:
        return
    kinds = torch.tensor([_kind_of_gradient(each) for each in parameters], device=parameters[0].device)
    for group in replicas:
        dist.all_reduce(kinds, op=dist.ReduceOp.MAX, group=group)
    dense: list[Tensor] = []
    for parameter, kind in zip(parameters, kinds.tolist()):
        if not kind:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if kind == 1:
            dense.append(parameter.grad)
        else:
            whole = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            average(whole, replicas)
            parameter.grad = whole.to_sparse(kind - 1)
    for bucket in _take_tensors(dense, _BUCKET_BYTES):
        together = _flatten_dense_tensors(bucket)
        average(together, replicas)
        for gradient, mean in zip(bucket, _unflatten_dense_tensors(together, bucket)):
            gradient.copy_(mean)


def _kind_of_gradient(parameter: nn.Parameter) -> int:
    """Return 0 for no gradient, 1 for a dense one, else 1 plus its number of sparse dimensions."""
    gradient = parameter.grad
    if gradient is None:
        return 0
    return 1 + gradient.sparse_dim() if gradient.is_sparse else 1
