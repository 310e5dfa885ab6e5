"""A tensor plan put into effect: every parameter becomes a DTensor over the mesh, modules talk where they have to."""

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

_PLAN = "_tensor_plan"  # of a module that is cut


def apply_tensor_plan(module: nn.Module, plan: TensorPlan, mesh: DeviceMesh, *, replica: int = 0) -> nn.Module:
    """Cut ``module``, a model or a stage of one, over the ranks of ``mesh`` as ``plan`` says, in place.

    Every parameter becomes a DTensor with the values of the first rank: in parts, or whole on every rank. Outputs are
    ordinary tensors, the same on all ranks, unless the plan keeps those of the head in parts. While it trains, the
    model draws its random numbers from a seed that the ranks share; those of the user go on as if it had drawn none.
    Tables with ``sparse=True`` get dense gradients, as DTensors have no others.
    ``replica``: which copy of the model this is, of several that draw numbers of their own.

    Collective: all ranks of ``mesh``, with the same module and plan; so is every forward and backward pass.
    Raises: SpecError.
    """
    if mesh.ndim != 1 or mesh.size() != plan.tp:
        shape = " x ".join(map(str, mesh.shape))
        raise SpecError(
            f"the plan is for {plan.tp} ranks in one row, the mesh is {shape}: give its tp axis, mesh['tp']"
        )
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise SpecError("the module has parameters over a mesh already: tensor parallel comes first, then the shards")
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
    """As long as it lives: with dp_shard beside tp every rank would write pages of how two collectives could be one."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")

    def is_wanted(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or logger.level != logging.NOTSET  # the user has said what is

    logger.addFilter(is_wanted)
    weakref.finalize(module, logger.removeFilter, is_wanted).atexit = False


def _give_plain(module: nn.Module, args: Any, output: Any) -> Any:
    """What the model's code has made of ``parameters()``, such as a penalty, is a DTensor until here."""
    if not any(isinstance(leaf, DTensor) for leaf in tree_leaves(output)):
        return output
    return tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, output)


def plan_of(module: nn.Module) -> TensorPlan | None:
    """How its layers were cut, if they were."""
    found: TensorPlan | None = module.__dict__.get(_PLAN)
    return found


def draws_of(module: nn.Module) -> int:
    """How many of its calls had random numbers of their own; 0 for one that is not cut."""
    share = module.__dict__.get("_share")
    return share.region.draws if isinstance(share, Share) else 0


def set_draws(module: nn.Module, draws: int) -> None:
    """Have its random numbers go on behind so many calls."""
    share = module.__dict__.get("_share")
    if isinstance(share, Share):
        share.region.draws = draws


def _in_rank_order(whole: Tensor, layout: Layout, size: int) -> Tensor:
    """Rank by rank, so that `Shard` cuts between ranks where tensors are packed into one."""
    if layout.packed == 1:
        return whole
    parts = [cut(whole, layout.dim, rank=rank, size=size, packed=layout.packed) for rank in range(size)]
    return torch.cat(parts, layout.dim)


def _agree_on_seed(module: nn.Module, mesh: DeviceMesh) -> int:
    """The first rank's seed. Collective: all ranks of ``mesh``."""
    device = next((p.device for p in module.parameters() if not p.is_meta), torch.device(mesh.device_type))
    seed = torch.tensor([torch.initial_seed() % 2**62], dtype=torch.int64, device=device)
    dist.broadcast(seed, group_src=0, group=mesh.get_group())
    return int(seed)


def to_saved_order(name: str, tensor: Tensor, plan: TensorPlan) -> Tensor:
    """What a parameter, or its optimizer's state, is in the order of the whole model; others are returned as they are.

    ``name`` is the parameter's. A DTensor stays one, laid out as it was: so `torch.distributed.checkpoint` can save
    it. Collective for what `TensorPlan.packed` has: all ranks of its mesh; each of them holds it whole for a moment.
    """
    layout = plan.packed.get(name)
    if layout is None or not tensor.dim():
        return tensor
    return _reordered(
        tensor, lambda whole: join(list(whole.chunk(plan.tp, layout.dim)), layout.dim, packed=layout.packed)
    )


def from_saved_order(name: str, tensor: Tensor, plan: TensorPlan) -> Tensor:
    """The other way round, of what was loaded. Collective: as `to_saved_order`."""
    layout = plan.packed.get(name)
    if layout is None or not tensor.dim():
        return tensor
    return _reordered(tensor, lambda whole: _in_rank_order(whole, layout, plan.tp))


def _reordered(tensor: Tensor, reorder: Callable[[Tensor], Tensor]) -> Tensor:
    if not isinstance(tensor, DTensor):
        return reorder(tensor)
    whole = reorder(DTensor.full_tensor(tensor.detach()))  # type: ignore[arg-type]
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
