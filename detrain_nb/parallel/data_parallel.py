"""Replicas and shards of a model or of one stage: torch's DDP, FSDP2 and HSDP, applied block by block.

Applied to a block in this order: activations are kept or recomputed, it is compiled, it is sharded.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import SpecError
from ..plan import DATA_AXES
from .blocks import StandIn, blocks_of
from .costs.block_use import BlockUse
from .replicated import replicate_scalars
from .second_runs import SecondRuns
from .stages.schedules import Schedule

COMM_HOOKS = ("none", "fp16", "bf16", "powersgd")
REMATERIALIZATIONS = ("none", "selective", "full")


@dataclass(frozen=True)
class Sharding:
    """How the data parallel ranks of a mesh hold a model; ``apply`` does it.

    ``kind``: "none", "ddp" or "fsdp" (over both axes of the mesh: HSDP). ``dtype``: the dtype to compute in, if it is
    not the parameters' own. ``comm_hook``: how DDP compresses gradients. ``activations``: what the backward pass
    recomputes: "none", "full" (all), or "selective" (all but the results of matrix products). ``block_use``: what the
    code around the blocks of the model does with them.
    """

    kind: str
    mesh: DeviceMesh | None = None
    dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    comm_hook: str = "none"
    activations: str = "none"
    is_compiled: bool = False
    block_use: BlockUse = field(default_factory=BlockUse)

    @property
    def replicas(self) -> tuple[dist.ProcessGroup, ...]:
        """This rank's group on each axis along which ranks have different data."""
        if self.mesh is None:
            return ()
        names = self.mesh.mesh_dim_names or ()
        return tuple(self.mesh.get_group(name) for name in names if self.mesh[name].size() > 1)

    def apply(self, module: nn.Module, *, is_last: bool) -> nn.Module:
        """Change ``module`` in place, and return the module to call instead.

        ``is_last``: it computes the model's output, which is converted back to float32 if ``dtype`` differs.
        Collective: all ranks of the mesh.
        """
        blocks = list(blocks_of(module))
        names = {id(block): name for name, block in module.named_modules()}
        told: set[str] = set()
        for block in blocks:
            if self.activations != "none":
                second_runs = SecondRuns(block, names[id(block)], told=told, is_sharded=self.kind == "fsdp")
                second_runs.prepare(is_all=self.activations == "full")
            if self.is_compiled:
                block.compile()
        if self.kind == "ddp":
            return self._replicate(module)
        if self.kind == "fsdp":
            self._shard(module, blocks, names, is_last=is_last)
        return module

    def _shard(self, module: nn.Module, blocks: list[nn.Module], names: Mapping[int, str], *, is_last: bool) -> None:
        inside = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=self.dtype and torch.float32)
        outside = inside
        if self.dtype is not None:
            outside = replace(inside, output_dtype=torch.float32 if is_last else self.dtype)
        assert self.mesh is not None
        chosen = {
            id(part): names[id(block)]
            for block in blocks
            if names[id(block)] in self.block_use.chosen
            for part in block.modules()
        }
        for block in (*blocks, module):
            own = [part for part in block.modules() if part._parameters]
            block.register_forward_hook(functools.partial(_give_no_parameter, own, names))
        for block in blocks:
            if names[id(block)] in self.block_use.written_outside:
                block.register_forward_hook(_give_no_view)
        module.register_forward_hook(_give_as_no_view)
        if self.block_use.is_seen:  # so no code writes into a view
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor) and not parameter.is_contiguous():  # FSDP2 refuses those
                parameter.data = parameter.data.contiguous()
        for part in module.modules():
            if isinstance(part, nn.RNNBase):  # cuDNN moves gathered weights, and continues with old values
                part.__dict__["flatten_parameters"] = _leave_where_they_are
        common: dict[str, Any] = {
            "mesh": self.mesh,
            "reshard_after_forward": self.reshard_after_forward,
            "ignored_params": replicate_scalars(module, self.mesh),
        }
        if self.dtype is not None:
            for part in module.modules():  # its running statistics are float32
                if isinstance(part, nn.modules.batchnorm._BatchNorm) and not isinstance(part, StandIn):
                    _require_always_run(part, chosen)
                    fully_shard(part, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **common)
        named = dict(module.named_parameters(remove_duplicate=False))
        shared = _shared_parameters(module, blocks)
        shared |= {id(named[name]) for name in self.block_use.read_outside if name in named}
        alone = [block for block in blocks if id(block) not in chosen]
        units = [block for block in alone if not shared.intersection(map(id, block.parameters()))]  # else the root's
        for unit in units:
            if names[id(unit)] in self.block_use.writing and any(each.requires_grad for each in unit.parameters()):
                raise SpecError(
                    f"{names[id(unit)]} writes into its argument in place, which FSDP2 does not allow: compute a new "
                    f"tensor (x = x + ..., inplace=False), or {_OTHERWISE}"
                )
        for unit in (*units, module):
            for part in _parts_of_other_dtypes(unit, units):
                _require_always_run(part, chosen)
                fully_shard(part, mp_policy=inside, **common)
        for unit in units:
            fully_shard(unit, mp_policy=inside, **common)
        root = fully_shard(module, mp_policy=outside, **common)
        _reduce_unused(root)

    def _replicate(self, module: nn.Module) -> nn.Module:
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module  # DDP refuses models without gradients
        (group,) = self.replicas
        with warnings.catch_warnings():  # the new option broadcasts buffers at start, which fails for sparse ones
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            replica = DistributedDataParallel(
                module,
                process_group=group,
                find_unused_parameters=True,
                broadcast_buffers=False,  # they are equal when it begins; see ParallelModel.share_statistics
            )
        if self.comm_hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=10)
            replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif self.comm_hook != "none":
            hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
            replica.register_comm_hook(group, hooks[self.comm_hook])
        return replica


def _leave_where_they_are() -> None:
    """Replace a recurrent layer's ``flatten_parameters``: cuDNN copies the weights for each pass instead."""


def _reduce_unused(root: FSDPModule) -> None:
    """Set the gradients of parameters that one replica does not use to 0 there: left out, others would be summed."""
    if hasattr(root, "set_reduce_scatter_unused_params"):
        root.set_reduce_scatter_unused_params(True)
        return
    modules = root.modules()  # type: ignore[attr-defined]
    states = [module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule)]
    for group in [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]:
        with_zeros: Any = functools.partial(_reduce_with_zeros, group, group.post_backward)
        group.post_backward = with_zeros  # type: ignore[method-assign]  # torch before 2.13 has no other way


def _reduce_with_zeros(group: Any, reduce: Callable[..., None], *unused: Any) -> None:
    for each in group.fsdp_params if group.reduce_grads else ():
        is_known = hasattr(each, "_unsharded_param") and each.unsharded_param.requires_grad
        if is_known and each.unsharded_accumulated_grad is None and each.unsharded_param.grad is None:
            each.unsharded_param.grad = torch.zeros_like(each.unsharded_param)
    reduce(*unused)


def resolve_sharding(
    mesh: DeviceMesh,
    *,
    fsdp: bool | None,
    schedule: Schedule | None = None,
    dtype: torch.dtype | None = None,
    reshard_after_forward: bool | None = None,
    comm_hook: str = "none",
    activations: str = "none",
    is_compiled: bool = False,
) -> Sharding:
    """Return how the data parallel axes of ``mesh`` hold the model.

    ``fsdp``: True for FSDP2, False for DDP; None for DDP if only ``dp_replicate`` is used and DDP is correct, else
    FSDP2. ``schedule``: the pipeline's, if there is one. Raises: SpecError, for example with the reason why DDP is
    wrong.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape))
    for given, known, what in ((comm_hook, COMM_HOOKS, "comm_hook"), (activations, REMATERIALIZATIONS, "activations")):
        if given not in known:
            raise SpecError(f"{what}={given!r}: choose one of {', '.join(known)}")
    common = {"activations": activations, "is_compiled": is_compiled}
    axes = [axis for axis in DATA_AXES if sizes.get(axis, 1) > 1]
    reason = _why_not_ddp(sizes, schedule)
    if fsdp is False and axes and reason:
        raise SpecError(f"DDP was asked for, but {reason}: use FSDP2 (fsdp=True)")
    is_ddp = fsdp is False or fsdp is None and "dp_shard" not in axes and not reason
    if comm_hook != "none" and not (axes and is_ddp):
        raise SpecError(
            f"comm_hook={comm_hook!r} needs DDP, which is not used here: give fsdp=False and a dp_replicate axis"
        )
    if comm_hook == "bf16" and mesh.device_type != "cuda":
        raise SpecError("comm_hook='bf16' needs NCCL, but these ranks are on the CPU: use 'fp16' or 'powersgd'")
    if not axes:
        return Sharding("none", dtype=dtype, **common)  # type: ignore[arg-type]
    if is_ddp:
        return Sharding("ddp", mesh["dp_replicate"], dtype=dtype, comm_hook=comm_hook, **common)  # type: ignore[arg-type]
    if "dp_shard" not in sizes:
        raise SpecError(
            f"a mesh with only dp_replicate={sizes['dp_replicate']} needs DDP, but {reason or 'FSDP2 was asked for'}: "
            "give the mesh a dp_shard axis too (1 to shard nothing)"
        )
    reshard = schedule is None if reshard_after_forward is None else reshard_after_forward
    part = mesh["dp_replicate", "dp_shard"] if "dp_replicate" in sizes else mesh["dp_shard"]
    return Sharding("fsdp", part, dtype=dtype, reshard_after_forward=reshard, **common)  # type: ignore[arg-type]


def _why_not_ddp(sizes: Mapping[str, int], schedule: Schedule | None) -> str:
    if sizes.get("dp_shard", 1) > 1:
        return f"dp_shard={sizes['dp_shard']} shards the model, which DDP does not"
    if sizes.get("tp", 1) > 1:
        return f"DDP fails on tensor parallel parameters (tp={sizes['tp']}): it cannot broadcast a DTensor"
    if schedule is not None and schedule.is_zero_bubble:
        return f"{schedule} bypasses the gradient exchange of DDP: replicas would drift apart silently"
    return ""


def _shared_parameters(module: nn.Module, blocks: list[nn.Module]) -> set[int]:
    """Return ids of parameters that are in several blocks, or both in a block and outside of all."""
    owners: dict[int, set[int]] = {}
    inside = {id(part): id(block) for block in blocks for part in block.modules()}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(inside.get(id(part), 0))
    return {parameter for parameter, users in owners.items() if len(users) > 1}


_OTHERWISE = "keep the model whole (dp_replicate instead of dp_shard)"


def _require_always_run(part: nn.Module, chosen: Mapping[int, str]) -> None:
    """Raise SpecError if ``part``, which FSDP2 gathers on its own, is in a block that may not run on every rank."""
    if name := chosen.get(id(part)):
        raise SpecError(
            f"{name} may not run on every rank, depending on values, and has a {type(part).__name__} in another dtype "
            "than the rest of the model, which FSDP2 gathers on all ranks: give all one dtype (precision='fp32'), or "
            f"{_OTHERWISE}"
        )


def _give_no_parameter(
    own: Sequence[nn.Module], names: Mapping[int, str], module: nn.Module, args: Any, output: Any
) -> Any:
    """Copy parameters that a module returns, as FSDP2 frees their memory afterwards.

    ``own``: the modules with parameters. Raises: SpecError when a returned parameter is already resharded.
    """
    if torch.compiler.is_compiling():
        return output
    given = {_memory_of(leaf): leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)}
    found = {
        memory: f"{names[id(part)]}.{key}".removeprefix(".")
        for part in own
        for key, parameter in part._parameters.items()
        if parameter is not None and (memory := _memory_of(parameter)) in given and memory is not None
    }
    in_shards = [found[memory] for memory in found if isinstance(given[memory], DTensor)]
    if in_shards or any(_is_freed(leaf) for leaf in given.values()):  # compiled blocks skip this check
        name = in_shards[0] if in_shards else "of a compiled block"
        raise SpecError(
            f"the model returns a parameter ({name}), of which each rank holds only a part by then: return a copy of "
            f"it (parameter.clone()), or {_OTHERWISE}"
        )
    return tree_map(lambda leaf: leaf.clone() if _memory_of(leaf) in found else leaf, output) if found else output


def _memory_of(value: Any) -> int | None:
    if isinstance(value, DTensor):
        return id(value)
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except NotImplementedError:  # under a transform of torch.func
        return None


def _is_freed(tensor: Tensor) -> bool:
    is_known = not isinstance(tensor, DTensor) and _memory_of(tensor) is not None
    return is_known and bool(tensor.numel()) and not tensor.untyped_storage().size()


def _give_no_view(module: nn.Module, args: Any, output: Any) -> Any:
    """Copy views that later code writes into: on a view, autograd would lose FSDP2's backward hooks."""
    return tree_map(lambda leaf: leaf.clone() if _is_view_with_gradient(leaf) else leaf, output)


def _give_as_no_view(module: nn.Module, args: Any, output: Any) -> Any:
    """Return the model's outputs as no views, since callers may write into them; their memory is not copied."""
    give: Callable[[Tensor], Tensor] = _AsNoView.apply
    return tree_map(lambda leaf: give(leaf) if _is_view_with_gradient(leaf) else leaf, output)


def _is_view_with_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and leaf._is_view()


class _AsNoView(torch.autograd.Function):
    """A tensor on the same memory, with the same version counter, that is not a view."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _parts_of_other_dtypes(unit: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """Return modules in a unit whose parameters differ in dtype from those around them; FSDP2 sends each on its own.

    Inner modules come first. Raises: SpecError when one module has parameters of several dtypes.
    """
    others = {id(part) for other in units if other is not unit for part in other.modules()}
    inside = [(name, part, _sizes_by_dtype(part)) for name, part in unit.named_modules() if id(part) not in others]
    if not (sizes := sum((own for _, _, own in inside), Counter[torch.dtype]())):
        return []
    # the dtype of parameters that are sent together, by module
    around = {"": max(inside[0][2] or sizes, key=sizes.__getitem__)}
    found = []
    for name, part, own in inside:
        sent_with = next(outer for outer in _outwards(name) if outer in around)
        if len(own) > 1:
            dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in own))
            raise SpecError(
                f"{name or type(part).__name__} has parameters of several dtypes ({dtypes}), which FSDP2 cannot send "
                f"together: give them one dtype, or {_OTHERWISE}"
            )
        if own and around[sent_with] not in own:
            (around[name],) = own
            found.append(part)
    return found[::-1]


def _sizes_by_dtype(part: nn.Module) -> Counter[torch.dtype]:
    """Count, by dtype, the elements of a module's own parameters that FSDP2 sends."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in part.parameters(recurse=False):
        if parameter.requires_grad and parameter.dim() and parameter.numel():
            sizes[parameter.dtype] += parameter.numel()
    return sizes


def _outwards(name: str) -> Iterator[str]:
    """Yield the name of a module and of all modules around it, up to the model ("")."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
