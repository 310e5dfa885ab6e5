"""The norm of all gradients of a model that is spread over many ranks, and clipping by it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import SpecError
from .model import ParallelModel


def clip_grad_norm(
    model: ParallelModel | nn.Module | Iterable[nn.Parameter], max_norm: float, *, norm_type: float = 2.0
) -> Tensor:
    """Scale all gradients so that their norm over all ranks is at most ``max_norm``; return the norm before scaling.

    Equals ``torch.nn.utils.clip_grad_norm_`` of the whole model on one rank: shards, tensor parallel parts and pipeline
    stages count together, and a parameter that several ranks have counts once. Collective: all ranks of the model.
    Raises: SpecError when ``max_norm`` is not above 0, which would reverse gradients.
    """
    if not isinstance(max_norm, (numbers.Real, Tensor)) or not max_norm > 0:
        raise SpecError(f"max_norm={max_norm!r} must be above 0; to read the norm without clipping, call grad_norm")
    total = grad_norm(model, norm_type=norm_type)
    for parameters in _by_mesh(_parameters_of(model)):
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def grad_norm(model: ParallelModel | nn.Module | Iterable[nn.Parameter], *, norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients over all ranks, as a scalar tensor. Collective: all ranks of the model."""
    own = list(model.own_parameters()) if isinstance(model, ParallelModel) else _parameters_of(model)
    norms = []
    for parameters in _by_mesh(own):
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    device = model.device if isinstance(model, ParallelModel) else None
    total = torch.stack(norms) if norms else torch.zeros(1, device=device)
    total = torch.as_tensor(torch.linalg.vector_norm(total.float(), norm_type))
    if not isinstance(model, ParallelModel) or model.pipeline_group is None:
        return total
    total = total.to(model.link_device)
    if math.isinf(norm_type):
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=model.pipeline_group)
        return total.to(device)
    total = total**norm_type
    dist.all_reduce(total, group=model.pipeline_group)
    return torch.as_tensor(total ** (1.0 / norm_type)).to(device)


def _parameters_of(model: ParallelModel | nn.Module | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list(model.parameters() if isinstance(model, (ParallelModel, nn.Module)) else model)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters with gradients by their mesh: torch cannot mix meshes, or DTensors with plain tensors."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())
