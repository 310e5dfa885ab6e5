"""A model laid out over a mesh in one call: stages, then tensor parallel parts, then shards, then a schedule."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..at_exit import wait_for_gloo_at_exit
from ..errors import SpecError
from ..plan import AXES
from .arguments import require_mesh, require_model, require_names, require_whole
from .blocks import names_of_blocks
from .costs.block_use import BlockUse, block_use_unseen
from .costs.partitioner import StageNode
from .costs.profiler import ExampleInputs, ModelProfile, as_call, profile, shared_inputs
from .data_parallel import Sharding, resolve_sharding
from .deferred import fill, is_deferred, require_values, stand_in
from .kinds import KnownKinds
from .limits import (
    find_parameter_use,
    require_fit,
    require_own_memory,
    require_read_as_attributes,
    require_unasked,
    require_untransformed,
    require_unwritten,
)
from .losses import Loss, require_apart, require_no_parameters
from .mesh import replica_number, require_there, usual_device
from .microbatches import lists_in
from .model import Arrangement, ParallelModel
from .recording import takes_gradients
from .sameness import note_stages, plan_of_all, require_not_laid_out, require_same_model, require_same_options
from .stages.boundaries import Boundaries
from .stages.pipeline import PipelineStages
from .stages.schedules import Schedule, find_schedule
from .stages.splitter import Split, split
from .tensor.apply import apply_tensor_plan
from .tensor.plan import TensorPlan
from .tensor.planner import SHAPES_ALONE, tp_plan
from .whole import WholeModel


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    example_inputs: ExampleInputs,
    loss: Loss | None = None,
    loss_weight: Callable[[Any], Tensor | float] | None = None,
    pp: Literal["auto"] | Sequence[str] | Split = "auto",
    nodes: Sequence[StageNode] | None = None,
    schedule: str | Schedule = "1F1B",
    num_microbatches: int | None = None,
    tp: Literal["auto"] | TensorPlan = "auto",
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    fsdp: bool | None = None,
    reshard_after_forward: bool | None = None,
    comm_hook: str = "none",
    precision: str | None = None,
    activations: str = "none",
    compile: bool = False,
    device: torch.device | str | None = None,
) -> ParallelModel:
    """Lay ``model`` out over ``mesh`` by the sizes of its axes; without a ``pp`` axis the model is changed in place.

    ``example_inputs``: of one microbatch, as the model is called. ``loss(output, target)``, ``loss_weight``,
    ``schedule``, ``num_microbatches``: as in ``PipelineStages``; without a pipeline, ``num_microbatches`` is 1 by
    default. ``pp``: where to cut: "auto", module names, or a split. ``nodes``: what runs each stage, as in
    ``partition``. ``tp``: "auto", which warns if most of the model stays whole, or a plan from ``tp_plan``.
    ``sequence_parallel``: as in ``tp_plan``.
    ``loss_parallel``: each rank keeps its part of the classes, which only cross entropy supports. ``fsdp``: True for
    FSDP2, False for DDP; None for DDP if the mesh has only ``dp_replicate`` and DDP is correct there, else FSDP2.
    ``reshard_after_forward``: of FSDP2; None for True without a pipeline, False with one.
    ``comm_hook``: how DDP compresses gradients ("fp16", "bf16", "powersgd").
    ``precision``: "bf16" computes in bfloat16 and keeps parameters, gradients and optimizer state in float32; FSDP2
    also rounds float inputs. ``activations``: "full" or "selective" recomputes them in the backward pass. ``compile``:
    runs torch.compile on each block. ``device``: where this rank computes, by default the mesh's device type.

    A model made by ``deferred`` gets its values here: for each tensor, a rank computes the whole, keeps its own part
    and frees the rest. Buffers are whole on every rank that has them.

    Collective: every rank of ``mesh`` calls this with the same model; if only the values differ, those of the mesh's
    first rank are used.
    Raises: SpecError, on all ranks alike, when the model, the loss or an option does not fit the mesh.
    """
    wait_for_gloo_at_exit()
    require_model(model)
    require_not_laid_out(model)
    require_mesh(mesh)
    require_whole(num_microbatches=num_microbatches)
    if not isinstance(pp, Split) and pp != "auto":
        require_names(pp=pp)
    if not isinstance(tp, TensorPlan) and tp != "auto":
        raise SpecError(f"tp={tp!r} is invalid: give 'auto' or a plan from tp_plan; the mesh sets the number of ranks")
    place = _device_for(mesh, device)
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape))
    if mesh.mesh_dim_names is None or (unknown := [axis for axis in sizes if axis not in AXES]):
        named = (
            f"the mesh has an unknown axis {unknown[0]!r}"
            if mesh.mesh_dim_names
            else "the axes of the mesh have no names"
        )
        raise SpecError(f"{named}: name the axes {', '.join(AXES)}, as make_mesh does")
    require_axes_for(sizes, pp, nodes, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    require_same_options(
        mesh,
        fsdp=fsdp,
        reshard_after_forward=reshard_after_forward,
        precision=precision,
        activations=activations,
        compile=compile,
        comm_hook=comm_hook,
        sequence_parallel=sequence_parallel,
        loss_parallel=loss_parallel,
    )
    is_pipeline = sizes.get("pp", 1) > 1
    order = find_schedule(schedule)
    require_loss_fits(loss, model, sizes)
    sharding = resolve_sharding(
        mesh,
        fsdp=fsdp,
        schedule=order if is_pipeline else None,
        dtype=dtype_of(precision),
        reshard_after_forward=reshard_after_forward,
        comm_hook=comm_hook,
        activations=activations,
        is_compiled=compile,
    )
    if is_deferred(model):
        require_values(model)
    require_cut_fits(model, sizes, sharding)
    require_same_model(model, mesh, device=place if place.type == mesh.device_type else torch.device(mesh.device_type))
    wanted = {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel}
    plan = plan_of_all(mesh, lambda: _proved_plan(model, example_inputs, tp, sizes, **wanted))
    if tp == "auto" and plan is not None and plan.what_is_whole and mesh.get_rank() == int(mesh.mesh.min()):
        warnings.warn(f"{plan.headline()}; print par.tp_plan(...) to see all", stacklevel=2)
    found = None
    if is_pipeline:
        found = split_for(model, example_inputs, pp, nodes, num_stages=order.num_stages(sizes["pp"]))
    if sharding.kind == "fsdp" or isinstance(tp, TensorPlan):  # "auto" leaves written parameters whole
        use = find_parameter_use(model, as_call(example_inputs))
        if plan is not None:
            require_untransformed(use)
        require_unwritten(use.written, model, axis="tp", cut=plan.layouts if plan is not None else ())
        axis = "tp" if plan is not None else "dp_shard"
        require_read_as_attributes(use.read_past, axis=axis)
        require_unasked(use.versions_asked, axis=axis)
    if sharding.kind == "fsdp":
        require_unwritten(use.written, model, axis="dp_shard")
        sharding = dataclasses.replace(sharding, block_use=_block_use(model, example_inputs, found))
    laid_out = lay_out_all(
        model,
        mesh,
        plan=plan,
        sharding=sharding,
        found=found,
        schedule=order,
        num_microbatches=num_microbatches,
        loss=loss,
        loss_weight=loss_weight,
        loss_parallel=loss_parallel,
        example_inputs=example_inputs,
        device=place,
    )
    if is_pipeline:
        note_stages(model)
    return laid_out


def lay_out_all(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: TensorPlan | None,
    sharding: Sharding,
    found: Split | None,
    schedule: Schedule,
    num_microbatches: int | None,
    loss: Loss | None,
    loss_weight: Callable[[Any], Tensor | float] | None = None,
    loss_parallel: bool,
    example_inputs: ExampleInputs,
    device: torch.device,
    before: Callable[[nn.Module], None] = lambda module: None,
    boundaries: Boundaries | None = None,
) -> ParallelModel:
    """Lay the resolved parts out: ``found`` is the split into pipeline stages, if there is a pipeline.

    ``before``: called with the module that a rank lays out. ``boundaries``: as in ``PipelineStages``.
    Collective: every rank of ``mesh``. Raises: SpecError.
    """

    is_fsdp = sharding.kind == "fsdp"

    def prepare(module: nn.Module, is_last: bool) -> nn.Module:
        """Cut the layers of the model or stage, then shard it; return the module to call."""
        before(module)
        if plan is not None:
            apply_tensor_plan(module, plan, mesh["tp"], replica=replica_number(sharding.replicas))
        is_waiting = is_deferred(module)  # for values: set once each rank has its part
        if is_waiting and not is_fsdp:  # DDP broadcasts values when constructed
            fill([module], device=device, plan=plan)
        called = sharding.apply(module, is_last=is_last)
        if is_waiting and is_fsdp:
            fill([module], device=device, plan=plan)
        return called

    common: dict[str, Any] = {
        "loss": loss,
        "loss_weight": loss_weight,
        "device": device,
        "arrangement": Arrangement(
            replicas=sharding.replicas,
            tensor_group=mesh.get_group("tp") if plan is not None else None,
            prepare=prepare,
            autocast=None if is_fsdp else sharding.dtype,
            boundary_dtype=sharding.dtype if is_fsdp else None,
            is_loss_parallel=loss_parallel and plan is not None,
        ),
    }
    laid_out: ParallelModel
    if found is not None:
        laid_out = PipelineStages(
            found, mesh["pp"], schedule=schedule, num_microbatches=num_microbatches, boundaries=boundaries, **common
        )
    else:
        inputs = shared_inputs(example_inputs)
        laid_out = WholeModel(model, num_microbatches=num_microbatches or 1, shared_inputs=inputs, **common)
    laid_out.list_lengths = {place: len(found) for place, found in lists_in(as_call(example_inputs))}
    laid_out.known_kinds = KnownKinds(model, *as_call(example_inputs)) if plan is not None else None
    laid_out.called_with = frozenset(as_call(example_inputs)[1])
    return laid_out


def _block_use(model: nn.Module, example_inputs: ExampleInputs, found: Split | None) -> BlockUse:
    try:
        return (found.profile if found is not None else profile(model, example_inputs)).block_use
    except SpecError as exc:
        if takes_gradients(exc):  # FSDP2 would free the parameters they need
            return BlockUse(chosen=frozenset(names_of_blocks(model)))
        # the forward cannot be profiled
        return block_use_unseen(model, exc.__cause__)


def require_cut_fits(model: nn.Module, sizes: Mapping[str, int], sharding: Sharding) -> None:
    """Raise SpecError if ``model`` cannot be cut along the axes in ``sizes``."""
    for axis, is_cut in (("dp_shard", sharding.kind == "fsdp"), ("tp", sizes.get("tp", 1) > 1)):
        if is_cut:
            require_fit(model, axis=axis)
    if cutting := [axis for axis in ("pp", "tp", "dp_shard") if sizes.get(axis, 1) > 1]:
        require_own_memory(model, axis=cutting[0])


def require_loss_fits(loss: Loss | None, model: nn.Module, sizes: Mapping[str, int]) -> None:
    """Raise SpecError if ``loss`` cannot be computed on ranks with different data, or on the last stage only."""
    if sizes.get("pp", 1) > 1:
        require_apart(loss, model)
    if any(size > 1 for axis, size in sizes.items() if axis != "tp"):
        require_no_parameters(loss, model)


def require_axes_for(
    sizes: Mapping[str, int],
    pp: Literal["auto"] | Sequence[str] | Split,
    nodes: Sequence[StageNode] | None,
    *,
    sequence_parallel: bool,
    loss_parallel: bool,
) -> None:
    """Raise SpecError if an option needs an axis that the mesh lacks, or if an axis is not supported."""
    for axis in ("cp", "ep"):
        if sizes.get(axis, 1) > 1:
            raise SpecError(f"{axis}={sizes[axis]}: {_NOT_YET[axis]}; put these ranks on dp_shard or tp")
    if sizes.get("pp", 1) == 1 and (pp != "auto" or nodes is not None):
        raise SpecError("pp or nodes was given, but the mesh has no pp axis of 2 or more ranks")
    if sizes.get("tp", 1) == 1 and (loss_parallel or sequence_parallel):
        raise SpecError("loss_parallel and sequence_parallel need a mesh with a tp axis of 2 or more ranks")


_NOT_YET = {
    "cp": "context parallelism is not supported yet (torch has its attention for CUDA only)",
    "ep": "expert parallelism is not supported yet",
}


def _proved_plan(
    model: nn.Module,
    example_inputs: ExampleInputs,
    tp: Literal["auto"] | TensorPlan,
    sizes: Mapping[str, int],
    **wanted: bool,
) -> TensorPlan | None:
    plan = plan_for(model, example_inputs, tp, sizes, **wanted)
    if plan is not None and plan.checked == SHAPES_ALONE:
        raise SpecError(f"the tensor plan is unproved ({plan.checked}): make it from a model with real values")
    return plan


def plan_for(
    model: nn.Module,
    example_inputs: ExampleInputs,
    tp: Literal["auto"] | TensorPlan,
    sizes: Mapping[str, int],
    *,
    sequence_parallel: bool,
    loss_parallel: bool,
) -> TensorPlan | None:
    """Return the tensor plan that ``tp`` asks for, or None if the mesh has no tp axis. Raises: SpecError."""
    size = sizes.get("tp", 1)
    if isinstance(tp, TensorPlan):
        if size == 1:
            raise SpecError("a tensor plan was given, but the mesh has no tp axis of 2 or more ranks")
        if tp.tp != size:
            raise SpecError(
                f"the tensor plan is for tp={tp.tp}, but the mesh has tp={size}: make one with tp_plan(..., tp={size})"
            )
        return tp
    if size == 1:
        return None
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel}
    if not is_deferred(model):
        return tp_plan(model, example_inputs, tp=size, **options)
    try:
        return tp_plan(stand_in(model), example_inputs, tp=size, **options)
    except SpecError as exc:
        if exc.__cause__ is None:  # refused by the planner itself
            raise
        raise SpecError(
            "cannot make a tensor plan for the deferred model: its code fails with zeros as parameters "
            f"({exc.__cause__}); make a plan from a model with real values, par.tp_plan(model, inputs, tp={size}), "
            "and pass it as tp="
        ) from exc


def split_for(
    model: nn.Module,
    example_inputs: ExampleInputs,
    pp: Literal["auto"] | Sequence[str] | Split,
    nodes: Sequence[StageNode] | None,
    *,
    num_stages: int,
    known: ModelProfile | None = None,
) -> Split:
    """Return the split that ``pp`` asks for; ``known`` is a profile of the model. Raises: SpecError."""
    if isinstance(pp, Split):
        found = pp
    elif pp == "auto":
        found = split(model, example_inputs, num_stages, nodes=nodes, profile_of_model=known)
    else:
        found = split(model, example_inputs, at=list(pp), profile_of_model=known)
    if found.num_stages != num_stages:
        raise SpecError(
            f"{found.num_stages - 1} cuts make {found.num_stages} stages, but the schedule needs {num_stages} on this "
            f"mesh: give {num_stages - 1} cuts"
        )
    return found


def _device_for(mesh: DeviceMesh, device: torch.device | str | None) -> torch.device:
    """Return the device to compute on. Raises: SpecError if the mesh's groups cannot send from it."""
    if device is None:
        return usual_device() if mesh.device_type == "cuda" else torch.device(mesh.device_type)
    try:
        place = torch.device(device)
    except RuntimeError:  # torch's message lists every device type it knows
        require_there(str(device).partition(":")[0], told_as=f"device={device!r}")
        raise
    require_there(place.type, told_as=f"device={str(device)!r}")
    is_pipeline = {axis for axis, size in zip(mesh.mesh_dim_names or (), mesh.shape) if size > 1} == {"pp"}
    if place.type != mesh.device_type and not (is_pipeline and mesh.device_type == "cpu"):
        raise SpecError(
            f"device={device!s} differs from the mesh's device type {mesh.device_type}: use one type for both (only a "
            "pure pipeline over a cpu mesh may mix devices)"
        )
    if place.type == "cuda" and place.index not in (None, torch.cuda.current_device()):
        raise SpecError(
            f"device={device!s}, but this rank's current GPU is cuda:{torch.cuda.current_device()}, which its process "
            f"groups and FSDP2 use: call torch.cuda.set_device({place.index}) first"
        )
    return place


def dtype_of(precision: str | None) -> torch.dtype | None:
    """Return the dtype to compute in, or None for float32. Raises: SpecError."""
    known = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp32": None, "float32": None, None: None}
    if precision not in known:
        raise SpecError(
            f"precision={precision!r} is not supported: give 'bf16' or 'fp32'; fp16 would need loss scaling, which is "
            "missing"
        )
    return known[precision]
