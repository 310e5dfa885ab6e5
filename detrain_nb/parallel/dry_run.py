"""A layout tried without ranks: what each of hundreds of GPUs would hold, on one laptop.

The model's structure is laid out, on tensors without memory, as one rank of each kind would do it; torch's fake backend
stands for all the others.
"""

from __future__ import annotations

import contextlib
import html
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import SpecError
from .blocks import names_of_blocks
from .costs.partitioner import StageNode
from .costs.profiler import ExampleInputs, ModelProfile, profile
from .data_parallel import resolve_sharding
from .mesh import make_mesh, resolve_axes
from .parallelize import dtype_of, lay_out_part, plan_for, require_axes_for, split_for
from .stages.schedules import Schedule, find_schedule
from .stages.splitter import Split
from .stages.stubs import ghost_of
from .tensor.plan import TensorPlan

__all__ = ["DryRun", "RankMemory", "dry_run"]

_ADAM_STATES = 2  # tensors of a parameter's size


@dataclass(frozen=True)
class RankMemory:
    """What the first of the ranks at one place of the pipeline holds, in bytes; no other holds more.

    ``largest`` are the shapes of the largest parameters there, by name, as one rank has them. ``activation_bytes`` is
    of all microbatches that are on their way at once.
    """

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    num_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    largest: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def total_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


@dataclass(frozen=True)
class DryRun:
    """A layout, and what its ranks would hold; it is shown as a table."""

    mesh: Mapping[str, int]
    schedule: str
    rows: tuple[RankMemory, ...]
    split: Split | None = None
    plan: TensorPlan | None = None

    @property
    def peak(self) -> RankMemory:
        """The ranks that hold most."""
        return max(self.rows, key=lambda row: row.total_bytes)

    def __str__(self) -> str:
        sizes = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        table: list[tuple[str, ...]] = [
            ("ranks", "stages", "parameters", "in all", "weights", "gradients", "optimizer", "activations")
        ]
        for row in self.rows:
            parts = (row.parameter_bytes, row.gradient_bytes, row.optimizer_bytes, row.activation_bytes)
            ranks = f"{row.ranks[0]}-{row.ranks[-1]}" if len(row.ranks) > 1 else str(row.ranks[0])
            stages = ",".join(map(str, row.stages))
            table.append((ranks, stages, f"{row.num_parameters:,}", _size(row.total_bytes), *map(_size, parts)))
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in table]
        head = f"{sizes}: {len(self.rows) and sum(len(row.ranks) for row in self.rows)} ranks, {self.schedule}"
        return "\n".join([head, *lines])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def dry_run(
    model: nn.Module,
    mesh_sizes: Mapping[str, int],
    *,
    example_inputs: ExampleInputs,
    pp: Literal["auto"] | Sequence[str] | Split = "auto",
    nodes: Sequence[StageNode] | None = None,
    schedule: str | Schedule = "1F1B",
    num_microbatches: int | None = None,
    tp: Literal["auto"] | TensorPlan = "auto",
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    fsdp: bool | None = None,
    precision: str | None = None,
    activations: str = "none",
    optimizer_states: int = _ADAM_STATES,
) -> DryRun:
    """Say what each rank of a mesh would hold of ``model``, which is left as it is and may be on the meta device.

    ``mesh_sizes``: by axis, as ``make_mesh`` has them, none of them -1. ``example_inputs``: of one microbatch. The
    other arguments are those of ``parallelize``. ``optimizer_states``: tensors that the optimizer keeps for each
    parameter. Activations are what autograd keeps of the example, the inputs of the model left out, and of blocks that
    are computed again ("full") what comes into them; "selective" counts as "none". They are not divided by ``tp``. It
    needs that no process group is there: call it in the notebook itself, or before there is one.
    Raises: SpecError, as ``parallelize`` does.
    """
    if dist.is_initialized():
        raise SpecError("there is a process group already: call dry_run in the notebook itself, or before making one")
    world_size = 1
    for axis, size in mesh_sizes.items():
        if size < 1:
            raise SpecError(f"{axis}={size}: a dry run needs every size")
        world_size *= size
    sizes = resolve_axes(mesh_sizes, world_size)
    require_axes_for(sizes, pp, nodes, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    order, num_ranks = find_schedule(schedule), sizes.get("pp", 1)
    is_pipeline = num_ranks > 1
    found, costs = None, profile(model, example_inputs)
    if is_pipeline:
        num_stages = order.num_stages(num_ranks)
        found = split_for(ghost_of(model), example_inputs, pp, nodes, num_stages=num_stages, known=costs)
    plan = plan_for(model, example_inputs, tp, sizes, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    count = 1  # without stages one after the other
    if found is not None:
        count = num_microbatches or order.num_microbatches(found.num_stages)
        order.require_microbatches(count, num_stages=found.num_stages)
    again = names_of_blocks(model) if activations == "full" else ()
    frozen = frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    rows = []
    for place in range(num_ranks):
        ranks = tuple(range(place * world_size // num_ranks, (place + 1) * world_size // num_ranks))
        with _standing_for(ranks[0], world_size):
            mesh = make_mesh(**sizes, device_type="cpu")
            sharding = resolve_sharding(
                mesh,
                fsdp=fsdp,
                schedule=order if is_pipeline else None,
                dtype=dtype_of(precision),
                activations=activations,
            )
            stages: tuple[int, ...] = (0,)
            modules = [ghost_of(model)]
            if found is not None:
                stages = order.stages_of_rank(place, num_ranks=num_ranks, num_stages=found.num_stages)
                modules = [found.stage(index) for index in stages]
            for module in modules:
                lay_out_part(module, plan, sharding, mesh, is_last=True)
            kept = 0
            for stage in stages:
                most = count if found is None else order.most_kept(stage, count, num_stages=found.num_stages)
                kept += most * _activation_bytes(costs, found, stage, computed_again=again)
            rows.append(_memory(ranks, stages, modules, kept, optimizer_states, frozen=frozen))
    return DryRun(sizes, order.name if is_pipeline else "no pipeline", tuple(rows), found, plan)


@contextlib.contextmanager
def _standing_for(rank: int, world_size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    excepthook = sys.excepthook  # torch puts a rank before every line of a traceback, and leaves it so
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


def _memory(
    ranks: tuple[int, ...],
    stages: tuple[int, ...],
    modules: Sequence[nn.Module],
    activation_bytes: int,
    optimizer_states: int,
    *,
    frozen: frozenset[str],
) -> RankMemory:
    named = {id(p): (name, p) for module in modules for name, p in module.named_parameters()}
    local = {name: (_here(parameter), name not in frozen) for name, parameter in named.values()}
    whole = sum(tensor.nbytes for tensor, _ in local.values())
    trained = sum(tensor.nbytes for tensor, is_trained in local.values() if is_trained)
    largest = sorted(local.items(), key=lambda item: -item[1][0].nbytes)[:3]
    return RankMemory(
        ranks,
        stages,
        sum(tensor.numel() for tensor, _ in local.values()),
        whole,
        trained,
        optimizer_states * trained,
        activation_bytes,
        tuple((name, tuple(tensor.shape)) for name, (tensor, _) in largest),
    )


def _here(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _activation_bytes(costs: ModelProfile, found: Split | None, stage: int, *, computed_again: Sequence[str]) -> int:
    """Of one microbatch; of blocks that are computed again only what comes into them is kept."""
    begin, end = (0, len(costs.units)) if found is None else found.bounds[stage : stage + 2]
    kept, last = 0, ""
    for unit in costs.units[begin:end]:
        entered = [name for name in (unit.cut, *unit.modules) if name]
        inside = (block for name in entered for block in computed_again if f"{name}.".startswith(f"{block}."))
        block = next(inside, "")
        if not block:
            kept += unit.saved_bytes
        elif block != last:
            kept += unit.input_bytes
        last = block
    return kept


def _size(size_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"
