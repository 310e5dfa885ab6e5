"""Checks that all ranks of a mesh have the same model and plan: otherwise they would hang."""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import SpecError
from .deferred import tapes_of
from .tensor.plan import TensorPlan

_PIECE = 1 << 22  # elements
# Models of which each rank trains a part. Not a mark on the model, as that would change the user's object.
_in_stages: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def require_same_model(model: nn.Module, mesh: DeviceMesh, *, device: torch.device) -> None:
    """Compare classes, code, names and shapes over a mesh; if only values differ, broadcast those of its first rank.

    ``device``: on which values are sent. Collective: all ranks of ``mesh``. Raises: SpecError, which names the
    ranks and the first difference.
    """
    tapes = tapes_of(model)
    more = [f"values of {len(tape)} operations ({tape.fingerprint()[:8]})" for tape in tapes]
    lines, lines_without_code = ([*_describe(model, has_code=has_code), *more] for has_code in (True, False))
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    figures = [
        *(_figures(part) for tensor in tensors for part in dense_parts(tensor)),
        *(tape.drawn_from() for tape in tapes),
    ]
    kinds = tuple(_digest("\n".join(each)) for each in (lines, lines_without_code))
    every = _gather(mesh, (sys.version_info[:2], *kinds, _digest(" ".join(figures)), model in _in_stages))
    pythons, with_code, without_code, values, are_in_stages = (set(each) for each in zip(*every.values()))
    if len(pythons) > 1:  # each version has its own bytecode
        with_code, lines = without_code, lines_without_code
    if len(with_code) > 1:
        _raise_difference(mesh, lines, "the model", "run the same code with the same data on all")
    if len(values) > 1:
        if True in are_in_stages:
            raise SpecError(
                f"the model was laid out in stages before, and each rank has trained only its own stage: {_MAKE_ANEW}"
            )
        if any(tensor.layout != torch.strided for tensor in tensors):
            raise SpecError(
                "values differ between ranks, and those of sparse tensors cannot be sent: use the same seed on all "
                "ranks"
            )
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(_of_first(mesh, tensor.detach(), device))
        for tape in tapes:
            tape.states = _of_first(mesh, tape.states, device).cpu()


def require_not_laid_out(model: nn.Module) -> None:
    """Raise SpecError if the parameters of ``model`` are already cut into parts."""
    if name := next((name for name, each in model.named_parameters() if isinstance(each, DTensor)), ""):
        raise SpecError(f"the model is already laid out ({name} is a DTensor): {_MAKE_ANEW}")


_MAKE_ANEW = (
    "save what parallelize returned (training.save), recreate the model, lay the new one out and load; to start "
    "over, make the model in the cell that lays it out"
)


def note_stages(model: nn.Module) -> None:
    """Note that each rank trains a different part of ``model`` from now on."""
    _in_stages.add(model)


def require_same_options(mesh: DeviceMesh, **options: Any) -> None:
    """Compare the options of a layout. Collective: all ranks of ``mesh``. Raises: SpecError when they differ."""
    lines = [f"{name}={value!r}" for name, value in options.items()]
    if len(set(map(tuple, _gather(mesh, lines).values()))) > 1:
        _raise_difference(mesh, lines, "the call of parallelize", "give the same on all ranks")


def plan_of_all(mesh: DeviceMesh, make: Callable[[], TensorPlan | None]) -> TensorPlan | None:
    """Return the tensor plan from ``make``, if any, and check that all ranks have the same, as each cuts by its own.

    Collective: all ranks of ``mesh``. Raises: SpecError on all ranks, even if only one cannot make the plan.
    """
    plan: TensorPlan | None = None
    failure: SpecError | None = None
    try:
        plan = make()
    except SpecError as exc:
        failure = exc
    lines = [*_describe_plan(plan)] if plan is not None else []
    every = _gather(mesh, (str(failure or ""), _digest("\n".join(lines))))
    refused = {rank: each for rank, (each, _) in every.items() if each}
    if refused:
        rank, why = next(iter(refused.items()))
        is_of_all = len(refused) == len(every) and len({*refused.values()}) == 1
        raise SpecError(why if is_of_all else f"rank {rank}: {why}") from failure
    if len({digest for _, digest in every.values()}) > 1:
        _raise_difference(mesh, lines, "the tensor plan", "give all ranks the same plan, edited in the same way")
    return plan


def _gather(mesh: DeviceMesh, value: Any) -> dict[int, Any]:
    """Return the value of every rank, by rank. Collective: all ranks of ``mesh``."""
    values = {dist.get_rank(): value}
    for axis in range(mesh.ndim):
        every = [values] * mesh.size(axis)
        dist.all_gather_object(every, values, group=mesh.get_group(axis))
        values = {rank: each for part in every for rank, each in part.items()}
    return dict(sorted(values.items()))


def _of_first(mesh: DeviceMesh, tensor: Tensor, device: torch.device) -> Tensor:
    """Return the first rank's tensor. Collective: all ranks of ``mesh``."""
    sent = tensor.to(device)
    for axis in reversed(range(mesh.ndim)):  # ranks that are first on all later axes already have it
        dist.broadcast(sent, group=mesh.get_group(axis), group_src=0)
    return sent


def _raise_difference(mesh: DeviceMesh, lines: list[str], what: str, instead: str) -> None:
    """Raise SpecError with the first difference. Collective: all ranks of ``mesh``."""
    every: dict[int, list[str]] = _gather(mesh, lines)
    usual = Counter(map(tuple, every.values())).most_common(1)[0][0]
    others = [rank for rank, own in every.items() if tuple(own) != usual]
    one, first = every[others[0]], next(rank for rank, own in every.items() if tuple(own) == usual)
    at = next((i for i, (ours, theirs) in enumerate(zip(one, usual)) if ours != theirs), None)
    if at is None:
        difference = f"it has {len(one)} parts, but {len(usual)} on rank {first}"
    else:
        difference = f"it has {one[at]}, but {usual[at]} on rank {first}"
    named = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
    raise SpecError(f"{what} on {named} differs: {difference}; {instead}")


def _describe(model: nn.Module, *, has_code: bool) -> Iterator[str]:
    for name, module in model.named_modules():
        forward = getattr(type(module).forward, "__code__", None) if has_code else None
        code = _digest(forward.co_code.hex() + repr(forward.co_names))[:8] if forward is not None else "-"
        yield f"{name or 'the model'}: {type(module).__qualname__} (forward {code}) {module.extra_repr()}".strip()
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for key, tensor in tensors.items():
                yield f"{kind} {f'{name}.{key}' if name else key}: {_look_of(tensor)}"


def _describe_plan(plan: TensorPlan) -> Iterator[str]:
    """Yield the lines of a plan, sorted, as the order of a set may differ between ranks."""
    roles = plan.roles
    yield f"tp={plan.tp}"
    yield from (f"{name or 'the model'}: {roles.get(name, 'whole')}" for name in plan.modules)
    yield from sorted(f"{name} cut in {layout.dim}, packed {layout.packed}" for name, layout in plan.layouts.items())
    for part in (*sorted(plan.pairs, key=lambda pair: pair.row), plan.sequence):
        for key, value in vars(part).items() if part is not None else ():
            yield f"{key} {sorted(map(repr, value)) if isinstance(value, tuple) else repr(value)}"
    yield f"head in parts: {plan.shard_head}"


def _look_of(tensor: Any) -> str:
    if not isinstance(tensor, Tensor):
        return "none"
    frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", frozen"
    return f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}{frozen}"


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors of a sparse tensor, its indices and values; else the tensor itself."""
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def _figures(tensor: Tensor) -> str:
    """Return sums over a tensor, computed in pieces, as it may fill half of the memory."""
    flat = (torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()).flatten()
    # Weights by place, so that a different order counts as a difference.
    places = torch.arange(min(_PIECE, len(flat)), device=flat.device) % 1021 + 1
    pieces = (piece.double() for piece in flat.split(_PIECE))
    sums = [torch.stack([p.sum(), p.abs().sum(), (p * places[: len(p)]).sum()]) for p in pieces]
    return ",".join(repr(each) for each in torch.stack(sums).flatten().tolist()) if sums else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
