"""Application of a tensor plan: parameters become DTensors over the mesh, modules communicate where they must."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map

from ...errors import SpecError
from ..limits import require_fit
from .layers import Share
from .layout import lay_out
from .plan import Layout, TensorPlan
from .ranks import MeshRanks, cut, join

_PLAN = "_tensor_plan"  # attribute of a module that is cut


def apply_tensor_plan(module: nn.Module, plan: TensorPlan, mesh: DeviceMesh, *, replica: int = 0) -> nn.Module:
    """Cut ``module``, a model or a stage, over the ranks of ``mesh`` according to ``plan``, in place.

    Every parameter becomes a DTensor with the first rank's values: in parts, or whole on every rank. Outputs are
    ordinary tensors, equal on all ranks, unless the plan keeps the head's outputs in parts. In training, the model
    draws its random numbers from a seed that the ranks share; the user's random state is unaffected. Tables with
    ``sparse=True`` get dense gradients, as DTensors have no sparse ones. ``replica``: the number of this copy of the
    model; each copy draws random numbers of its own.

    Collective: all ranks of ``mesh``, with the same module and plan; so is every forward and backward pass.
    Raises: SpecError if ``mesh`` does not fit ``plan``, or ``module`` cannot be cut or is already on a mesh.
    """
    if mesh.ndim != 1 or mesh.size() != plan.tp:
        shape = " x ".join(map(str, mesh.shape))
        raise SpecError(
            f"the plan is for {plan.tp} ranks in one dimension, but the mesh is {shape}: give its tp axis, mesh['tp']"
        )
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise SpecError("the module's parameters are already on a mesh: apply tensor parallelism first, then shards")
    require_fit(module, axis="tp")
    plan.require_agreement()

    def distribute(parameter: nn.Parameter, layout: Layout | None) -> nn.Parameter:
        whole = parameter.detach()
        if layout is not None:
            whole = _in_rank_order(whole, layout, mesh.size())
        made = distribute_tensor(whole, mesh, [Replicate() if layout is None else Shard(layout.dim)])
        return nn.Parameter(made, requires_grad=parameter.requires_grad)

    lay_out(module, plan, MeshRanks(mesh), distribute, seed=_agree_on_seed(module, mesh) + replica * 0xD1B54A32D192ED03)
    if plan.shard_head is None:
        module.register_forward_hook(_give_plain)
    module.__dict__[_PLAN] = plan
    _keep_hints_out(module)
    return module


def _keep_hints_out(module: nn.Module) -> None:
    """Silence torch's hints while the module lives: with dp_shard and tp, every rank would log pages of them."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")

    def is_wanted(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or logger.level != logging.NOTSET  # the user has set a level

    logger.addFilter(is_wanted)
    weakref.finalize(module, logger.removeFilter, is_wanted).atexit = False


def _give_plain(module: nn.Module, args: Any, output: Any) -> Any:
    """Make outputs plain: what the model's code computed from ``parameters()``, such as a penalty, is a DTensor."""
    if not any(isinstance(leaf, DTensor) for leaf in tree_leaves(output)):
        return output
    return tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, output)


def plan_of(module: nn.Module) -> TensorPlan | None:
    """Return the plan by which a module was cut, if any."""
    found: TensorPlan | None = module.__dict__.get(_PLAN)
    return found


def draws_of(module: nn.Module) -> int:
    """Return how many of the module's calls had random numbers of their own; 0 if it is not cut."""
    share = module.__dict__.get("_share")
    return share.region.draws if isinstance(share, Share) else 0


def set_draws(module: nn.Module, draws: int) -> None:
    """Set the number of calls after which the module's random numbers continue."""
    share = module.__dict__.get("_share")
    if isinstance(share, Share):
        share.region.draws = draws


def _in_rank_order(whole: Tensor, layout: Layout, size: int) -> Tensor:
    """Reorder rank by rank, so that `Shard` cuts between ranks although tensors are packed into one."""
    if layout.packed == 1:
        return whole
    parts = [cut(whole, layout.dim, rank=rank, size=size, packed=layout.packed) for rank in range(size)]
    return torch.cat(parts, layout.dim)


def _agree_on_seed(module: nn.Module, mesh: DeviceMesh) -> int:
    """Return the first rank's seed. Collective: all ranks of ``mesh``."""
    device = next((p.device for p in module.parameters() if not p.is_meta), torch.device(mesh.device_type))
    seed = torch.tensor([torch.initial_seed() % 2**62], dtype=torch.int64, device=device)
    dist.broadcast(seed, group_src=0, group=mesh.get_group())
    return int(seed)


def to_saved_order(name: str, tensor: Tensor, plan: TensorPlan) -> Tensor:
    """Return a parameter, or its optimizer's state, in the whole model's order; unpacked tensors are returned as is.

    ``name`` is the parameter's name. A DTensor stays a DTensor with the same layout, so `torch.distributed.checkpoint`
    can save it. Collective for parameters in `TensorPlan.packed`: all ranks of its mesh; each briefly holds the whole
    tensor.
    """
    layout = plan.packed.get(name)
    if layout is None or not tensor.dim():
        return tensor
    return _reordered(
        tensor, lambda whole: join(list(whole.chunk(plan.tp, layout.dim)), layout.dim, packed=layout.packed)
    )


def from_saved_order(name: str, tensor: Tensor, plan: TensorPlan) -> Tensor:
    """Undo `to_saved_order` for a loaded tensor. Collective: as `to_saved_order`."""
    layout = plan.packed.get(name)
    if layout is None or not tensor.dim():
        return tensor
    return _reordered(tensor, lambda whole: _in_rank_order(whole, layout, plan.tp))


def _reordered(tensor: Tensor, reorder: Callable[[Tensor], Tensor]) -> Tensor:
    if not isinstance(tensor, DTensor):
        return reorder(tensor)
    whole = reorder(DTensor.full_tensor(tensor.detach()))  # type: ignore[arg-type]
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
