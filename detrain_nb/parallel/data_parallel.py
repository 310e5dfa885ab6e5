"""Replicas and shards of a model, or of one stage: DDP, FSDP2 and HSDP as torch has them, block by block.

What is done to a block, in this order: its activations are kept or computed again, it is compiled, it is sharded.
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

    ``kind``: "none", "ddp" or "fsdp" (over both axes of the mesh: HSDP). ``dtype``: what it computes in, where that is
    not the parameters' own. ``comm_hook``: what DDP sends. ``activations``: "none" is computed again in the backward
    pass, "selective" all but what products of matrices give, or "full". ``block_use``: what the code around the blocks
    of the model does with them.
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
        """This rank's group on each axis along which ranks have other data."""
        if self.mesh is None:
            return ()
        names = self.mesh.mesh_dim_names or ()
        return tuple(self.mesh.get_group(name) for name in names if self.mesh[name].size() > 1)

    def apply(self, module: nn.Module, *, is_last: bool) -> nn.Module:
        """Change ``module`` in place, and return what is to be called in its place.

        ``is_last``: what it gives is the model's output, which is float32 again where ``dtype`` is another.
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
        if self.block_use.is_seen:  # so nobody writes into a view
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor) and not parameter.is_contiguous():  # which FSDP2 refuses
                parameter.data = parameter.data.contiguous()
        for part in module.modules():
            if isinstance(part, nn.RNNBase):  # cuDNN moves what FSDP2 puts together, and goes on with old values
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
                    f"{names[id(unit)]} writes into its argument in place, which FSDP2 does not let it: compute "
                    f"another (x = x + ..., inplace=False), or {_OTHERWISE}"
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
            return module  # nothing to exchange, which DDP refuses
        (group,) = self.replicas
        with warnings.catch_warnings():  # its new name sends buffers when it begins, which sparse ones cannot be
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
    """In the place of a recurrent layer's ``flatten_parameters``: cuDNN copies the weights for each pass instead."""


def _reduce_unused(root: FSDPModule) -> None:
    """Have gradients of what a branch has not used on one replica be 0 there: left out, others would be added up."""
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
    """Return what the data parallel axes of ``mesh`` ask for.

    ``fsdp``: True for FSDP2, False for DDP, None for DDP where there is nothing but ``dp_replicate`` and DDP is right,
    else FSDP2. ``schedule``: that of the pipeline, if there is one. Raises: SpecError, with the reason where DDP is
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
        raise SpecError(f"DDP was asked for, and {reason}: FSDP2 is right there (fsdp=True)")
    is_ddp = fsdp is False or fsdp is None and "dp_shard" not in axes and not reason
    if comm_hook != "none" and not (axes and is_ddp):
        raise SpecError(f"comm_hook={comm_hook!r} is DDP's, which is not used here: give fsdp=False and dp_replicate")
    if comm_hook == "bf16" and mesh.device_type != "cuda":
        raise SpecError("comm_hook='bf16' is NCCL's, and these ranks are on the CPU: 'fp16' and 'powersgd' work there")
    if not axes:
        return Sharding("none", dtype=dtype, **common)  # type: ignore[arg-type]
    if is_ddp:
        return Sharding("ddp", mesh["dp_replicate"], dtype=dtype, comm_hook=comm_hook, **common)  # type: ignore[arg-type]
    if "dp_shard" not in sizes:
        raise SpecError(
            f"a mesh with dp_replicate={sizes['dp_replicate']} alone is DDP's, and {reason or 'FSDP2 was asked for'}: "
            "give the mesh dp_shard too, 1 if nothing is to be sharded"
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
        return f"{schedule} goes around its gradient exchange: replicas would drift apart without a word"
    return ""


def _shared_parameters(module: nn.Module, blocks: list[nn.Module]) -> set[int]:
    """Of those that are in several blocks, or in a block and outside of all."""
    owners: dict[int, set[int]] = {}
    inside = {id(part): id(block) for block in blocks for part in block.modules()}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(inside.get(id(part), 0))
    return {parameter for parameter, users in owners.items() if len(users) > 1}


_OTHERWISE = "keep the model whole (dp_replicate in the place of dp_shard)"


def _require_always_run(part: nn.Module, chosen: Mapping[int, str]) -> None:
    """Raises: SpecError for what FSDP2 has to gather by itself, in a block that may not run on every rank."""
    if name := chosen.get(id(part)):
        raise SpecError(
            f"{name} runs or not as values say, and has a {type(part).__name__} in another dtype than the rest of the "
            f"model, which FSDP2 would wait for on all ranks: give all one dtype (precision='fp32'), or {_OTHERWISE}"
        )


def _give_no_parameter(
    own: Sequence[nn.Module], names: Mapping[int, str], module: nn.Module, args: Any, output: Any
) -> Any:
    """Copies of parameters that a module returns, whose memory FSDP2 frees behind it; ``own``: the modules with them.

    Raises: SpecError for one that is shards again.
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
    if in_shards or any(_is_freed(leaf) for leaf in given.values()):  # in a compiled block nobody has looked
        name = in_shards[0] if in_shards else "of a compiled block"
        raise SpecError(
            f"the model returns a parameter ({name}), of which each rank has a part by then: return a copy of it "
            f"(parameter.clone()), or {_OTHERWISE}"
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
    """What comes behind writes into it: of a view autograd would lose what FSDP2 has noted on it."""
    return tree_map(lambda leaf: leaf.clone() if _is_view_with_gradient(leaf) else leaf, output)


def _give_as_no_view(module: nn.Module, args: Any, output: Any) -> Any:
    """The same of the model's own outputs, which callers may write into; what was computed is not copied."""
    give: Callable[[Tensor], Tensor] = _AsNoView.apply
    return tree_map(lambda leaf: give(leaf) if _is_view_with_gradient(leaf) else leaf, output)


def _is_view_with_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and leaf._is_view()


class _AsNoView(torch.autograd.Function):
    """A tensor on the same memory, with the same count of what is written into it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _parts_of_other_dtypes(unit: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules in a unit whose parameters are not of the dtype of what is around them: FSDP2 sends each by itself.

    The inner ones first. Raises: SpecError for a module with parameters of its own of several.
    """
    others = {id(part) for other in units if other is not unit for part in other.modules()}
    inside = [(name, part, _sizes_by_dtype(part)) for name, part in unit.named_modules() if id(part) not in others]
    if not (sizes := sum((own for _, _, own in inside), Counter[torch.dtype]())):
        return []
    # the dtype of what is sent together, by its module
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
    """How many numbers a module has in parameters of its own that FSDP2 sends."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in part.parameters(recurse=False):
        if parameter.requires_grad and parameter.dim() and parameter.numel():
            sizes[parameter.dtype] += parameter.numel()
    return sizes


def _outwards(name: str) -> Iterator[str]:
    """The names of what a module is in, from itself to the whole."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
