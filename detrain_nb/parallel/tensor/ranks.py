"""Communication between ranks that share the layers of a model: tensors are summed, cut and gathered.

Each function has the gradient that belongs to it. Ranks only sum and gather, through `TensorRanks`: those of a mesh are
here, those of a proof, which runs all ranks in one process, are in `thread_ranks`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...errors import SpecError
from ..mesh import can_send_from
from .plan import Packed


class TensorRanks(Protocol):
    """Ranks that hold the parts of a layer, seen from the one with index ``rank``."""

    rank: int
    size: int

    def add_up(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks as a new tensor. Collective."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, equal in shape, by rank. Collective."""

    def local(self, parameter: Tensor, dim: int | None) -> Tensor | None:
        """Return the part of a parameter with which this rank computes; None if these ranks did not lay it out.

        Also None if this rank does not hold it. ``dim``: the dimension in which it is cut.
        """

    def as_shard(self, tensor: Tensor, *, total: int) -> Tensor:
        """Return an output of which each rank keeps its part, of ``total`` in the last dimension."""


# Its name since torch 2.13, or the earlier one.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor


class MeshRanks:
    """Ranks of a mesh with one dimension."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self._group = mesh.get_group()
        # With GPU tensors on gloo, torch's functional collectives kill the process.
        self._is_on_gloo = not can_send_from(mesh.device_type, self._group)

    def add_up(self, tensor: Tensor) -> Tensor:
        if self._is_on_gloo:
            total: Tensor = _add_up_on_gloo(tensor, self._group)
            return total
        return _arrived(collectives.all_reduce(tensor.contiguous(), "sum", self._group))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        if self._is_on_gloo:
            parts: list[Tensor] = _gather_on_gloo(tensor, self._group)
            return parts
        gathered = _arrived(_all_gather(tensor.contiguous(), 0, self._group))
        return list(gathered.chunk(self.size))

    def local(self, parameter: Tensor, dim: int | None) -> Tensor | None:
        if not isinstance(parameter, DTensor):
            return None
        if not isinstance(parameter, nn.Parameter) and parameter.device_mesh == self.mesh:  # computed from parameters
            _require_made_of_parameters(parameter)
            parameter = parameter.redistribute(placements=[Replicate() if dim is None else Shard(dim)])
        if parameter.device_mesh != self.mesh and not all(each.is_replicate() for each in parameter.placements):
            return None  # for example, as sharded by FSDP2
        return parameter.to_local(grad_placements=parameter.placements)

    def as_shard(self, tensor: Tensor, *, total: int) -> Tensor:
        shape = torch.Size((*tensor.shape[:-1], total))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(tensor, self.mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshRanks:
        return self


def _require_made_of_parameters(made: DTensor) -> None:
    """Raise SpecError if a plain tensor without dimensions went into it: its gradient would be a DTensor."""
    found, waiting = set[Any](), [made.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        if node.name() == "_ToTorchTensorBackward":
            raise SpecError(
                "the model's code computes a parameter, as for functional_call, both from parameters() or "
                "named_parameters(), which are DTensors under tp, and from a module attribute: read all of them in "
                "one way, or keep the model whole (use dp_replicate instead of tp)"
            )
        found.add(node)
        waiting += [each for each, _ in node.next_functions]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _add_up_on_gloo(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _gather_on_gloo(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def _arrived(tensor: Tensor) -> Tensor:
    waited: Tensor = collectives.wait_tensor(tensor)
    return waited


def bounds(total: int, *, rank: int, size: int) -> tuple[int, int]:
    """Return the bounds of a rank's rows among ``total``, as torch's `Shard` cuts them."""
    each = -(-total // size)
    return min(total, each * rank), min(total, each * (rank + 1))


def cut(tensor: Tensor, dim: int, *, rank: int, size: int, packed: Packed = 1) -> Tensor:
    """Return one rank's part of a tensor with ``packed`` tensors concatenated in ``dim``: a part of each."""
    parts = []
    for whole in _unpacked(tensor, dim, packed):
        begin, end = bounds(whole.shape[dim], rank=rank, size=size)
        parts.append(whole.narrow(dim, begin, end - begin))
    return parts[0] if packed == 1 else torch.cat(parts, dim)


def join(parts: list[Tensor], dim: int, *, packed: Packed = 1) -> Tensor:
    """Join the parts that `cut` made for each rank."""
    if packed == 1:
        return torch.cat(parts, dim)
    pieces = zip(*(_unpacked(part, dim, packed) for part in parts))
    return torch.cat([piece for pieces_of_one in pieces for piece in pieces_of_one], dim)


def _unpacked(tensor: Tensor, dim: int, packed: Packed) -> tuple[Tensor, ...]:
    shares = (1,) * packed if isinstance(packed, int) else packed
    parts: tuple[Tensor, ...] = tensor.split([tensor.shape[dim] // sum(shares) * share for share in shares], dim)
    return parts


def add_up(tensor: Tensor, ranks: TensorRanks) -> Tensor:
    """Return the sum over the ranks; each of them gets the same gradient. Collective."""
    result: Tensor = _AddUp.apply(tensor, ranks)  # type: ignore[no-untyped-call]
    return result


def add_up_gradients(tensor: Tensor, ranks: TensorRanks) -> Tensor:
    """Return ``tensor``, equal on all ranks but used differently by each. Collective in the backward pass."""
    result: Tensor = _AddUpGradients.apply(tensor, ranks)  # type: ignore[no-untyped-call]
    return result


def put_together(part: Tensor, ranks: TensorRanks, *, dim: int, total: int, packed: Packed = 1) -> Tensor:
    """Return the whole, of ``total`` in ``dim``; all ranks use it in the same way. Collective."""
    result: Tensor = _PutTogether.apply(part, ranks, dim, total, packed)  # type: ignore[no-untyped-call]
    return result


def cut_own(tensor: Tensor, ranks: TensorRanks, *, dim: int, packed: Packed = 1) -> Tensor:
    """Return this rank's part of a tensor that all ranks have. Collective in the backward pass."""
    result: Tensor = _CutOwn.apply(tensor, ranks, dim, packed)  # type: ignore[no-untyped-call]
    return result


def once(tensor: Tensor, ranks: TensorRanks) -> Tensor:
    """Return the tensor on the first rank and zeros on the others: for what is added before a sum over ranks."""
    result: Tensor = _Once.apply(tensor, ranks)  # type: ignore[no-untyped-call]
    return result


# The backward of each is another of these, so that second derivatives, as in a gradient penalty, are right too.


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.add_up(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return add_up_gradients(gradient, ctx.ranks), None


class _AddUpGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return add_up(gradient, ctx.ranks), None


class _PutTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorRanks, dim: int, total: int, packed: Packed) -> Tensor:
        ctx.ranks, ctx.dim, ctx.packed = ranks, dim, packed
        return _gather(part, ranks, dim, total, packed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return cut_own(gradient, ctx.ranks, dim=ctx.dim, packed=ctx.packed), None, None, None, None


class _CutOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: TensorRanks, dim: int, packed: Packed) -> Tensor:
        ctx.ranks, ctx.dim, ctx.total, ctx.packed = ranks, dim, tensor.shape[dim], packed
        return cut(tensor, dim, rank=ranks.rank, size=ranks.size, packed=packed).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        whole = put_together(gradient, ctx.ranks, dim=ctx.dim, total=ctx.total, packed=ctx.packed)
        return whole, None, None, None


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor) if ranks.rank == 0 else torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        given: Tensor = _GradientOnce.apply(gradient, ctx.ranks)  # type: ignore[no-untyped-call]
        return given, None


class _GradientOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return once(gradient, ctx.ranks), None


def _gather(part: Tensor, ranks: TensorRanks, dim: int, total: int, packed: Packed) -> Tensor:
    """Gather parts that may differ in size: the last ranks' parts are padded to send equal sizes, then cut again."""
    dim %= part.dim()
    sizes = [end - begin for begin, end in (bounds(total, rank=rank, size=ranks.size) for rank in range(ranks.size))]
    missing = sizes[0] - part.shape[dim]
    if packed == 1 and missing:
        part = F.pad(part, [0, 0] * (part.dim() - 1 - dim) + [0, missing])
    parts = ranks.gather(part)
    if packed == 1:
        parts = [each.narrow(dim, 0, size) for each, size in zip(parts, sizes)]
    return join(parts, dim, packed=packed)
