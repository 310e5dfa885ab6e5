"""A plan laid over the modules of a model or stage: which part each holds, and what it communicates."""

from __future__ import annotations

import copy
import functools
import sys
import zlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...errors import SpecError
from ..module_copies import shallow_copy
from ..stubs import Stub
from .layers import Region, Share, change_class
from .plan import EXPERTS, OUTPUT_DIM, Layout, Pair, SequenceParts, TensorPlan, is_inside
from .ranks import TensorRanks, add_up, add_up_gradients, bounds, cut_own, put_together

Distribute = Callable[[nn.Parameter, "Layout | None"], nn.Parameter]


def lay_out(
    model: nn.Module, plan: TensorPlan, ranks: TensorRanks, distribute: Distribute, *, seed: int | None = None
) -> None:
    """Give every module of ``model`` that exists here its part, in place; ``distribute`` makes the parameters.

    ``model`` may be a stage: names are those of the whole model, and modules of other stages are missing.

    Raises: SpecError if a module cannot be cut, or a stage has only a part of a block with a cut sequence.
    """
    _take_copies_of_shared(model)
    # The model itself is always present: everything runs in its forward, which may read other modules' parameters.
    present = {
        name: module
        for name, module in model.named_modules()
        if not isinstance(module, Stub)
        and (not name or name not in plan.modules or _has_parameters(module, plan, name))
    }
    region = Region(None if seed is None else seed + zlib.crc32(repr(sorted(present)).encode()))
    shares = {name: Share(ranks, region) for name in present}
    for name, role in plan.roles.items():
        if name in present:
            _prepare(present[name], shares[name], name, role, plan, present)
    for name in _summed(plan, present):
        if name in shares:
            shares[name].is_summed = True
        elif name.rpartition(".")[0] in shares:
            shares[name.rpartition(".")[0]].summed.add(name.rpartition(".")[2])
    for pair in _pairs_here(plan, present):
        _prepare_between(pair, shares)
        for module, key, value in pair.attributes:
            _make_smaller(present[module], key, value)
    if plan.sequence is not None:
        _prepare_sequence(plan, shares)
    _distribute(present, shares, plan, distribute)
    for name, module in present.items():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False  # DTensors have no sparse gradients
        module.__dict__["_share"] = shares[name]
        change_class(module, shares[name])


def _take_copies_of_shared(model: nn.Module) -> None:
    """Copy modules that are globals in the file of their class, as activations may be: other models use them too."""
    copies: dict[int, nn.Module] = {}
    for parent in model.modules():
        for key, child in parent._modules.items():
            file = sys.modules.get(type(child).__module__)
            if child is not None and file is not None and any(value is child for value in vars(file).values()):
                parent._modules[key] = copies.setdefault(id(child), shallow_copy(child))


def _has_parameters(module: nn.Module, plan: TensorPlan, name: str) -> bool:
    return any(module._parameters.get(own) is not None for own, *_ in plan.modules[name].parameters)


def _pairs_here(plan: TensorPlan, present: dict[str, nn.Module]) -> list[Pair]:
    return [pair for pair in plan.pairs if pair.members <= present.keys()]


def _summed(plan: TensorPlan, present: dict[str, nn.Module]) -> set[str]:
    found = {name for pair in _pairs_here(plan, present) for name in pair.summed}
    return found | set(plan.sequence.summed) if plan.sequence is not None else found


def _prepare(
    module: nn.Module, share: Share, name: str, role: str, plan: TensorPlan, present: dict[str, nn.Module]
) -> None:
    """Prepare a module for its role; a pair split over stages becomes two modules with whole inputs and outputs."""
    ranks, planned = share.ranks, plan.modules[name]
    pair = next((pair for pair in _pairs_here(plan, present) if name in pair.names), None)
    owner = next((pair for pair in plan.pairs if name in pair.columns), None)
    packed = owner.packed if owner is not None else 1
    share.layouts = planned.layouts(role, packed=packed)
    if role in EXPERTS:
        share.is_every_input = True
        share.once = {own for own, *_ in planned.parameters if own not in share.layouts}
        share.before.append(lambda tensor: add_up_gradients(tensor, ranks))
        share.after.append(lambda tensor: add_up(tensor, ranks))
        return
    shape = next(shape for own, _, shape in planned.parameters if own == "weight")
    if role == "embedding":
        share.num_rows = shape[0]
        return
    output_dim = OUTPUT_DIM[planned.kind]
    outputs, inputs = shape[output_dim], shape[1 - output_dim]
    if role == "rowwise":
        share.is_row = True
        if pair is None:
            share.before.append(lambda tensor: cut_own(tensor, ranks, dim=-1))
        share.after.append(lambda tensor: add_up(tensor, ranks))
        own_inputs = _own_size(inputs, ranks)
        _resize(module, ("in_features", "nx"), own_inputs)
        return
    if pair is None or pair.entry is None:
        share.before.append(lambda tensor: add_up_gradients(tensor, ranks))
    _resize(module, ("out_features", "nf"), _own_size(outputs, ranks))
    if name == plan.shard_head:
        share.after.append(lambda tensor: ranks.as_shard(tensor, total=outputs))
    elif pair is None:
        share.after.append(lambda tensor: put_together(tensor, ranks, dim=-1, total=outputs, packed=packed))


def _prepare_between(pair: Pair, shares: dict[str, Share]) -> None:
    ranks = shares[pair.row].ranks
    for name, own, dim in pair.parts:
        shares[name].layouts[own] = Layout(dim)
    for name in pair.gathered:
        shares[name].before.append(
            lambda tensor: put_together(tensor, ranks, dim=-1, total=tensor.shape[-1] * ranks.size)
        )
        shares[name].after.append(lambda tensor: cut_own(tensor, ranks, dim=-1))
    for each in pair.by_head:
        share = shares[each.module]
        if isinstance(each.place, int) and each.is_output:
            share.outputs[each.place] = functools.partial(_with_all_heads, heads=each.heads, ranks=ranks)
        else:
            share.arguments[each.place] = functools.partial(_with_own_heads, heads=each.heads, ranks=ranks)
    if pair.entry is not None:
        shares[pair.entry].before.append(lambda tensor: add_up_gradients(tensor, ranks))
        shares[pair.entry].is_every_input = True


def _with_own_heads(value: Any, *, heads: int, ranks: TensorRanks) -> Any:
    """Cut a tensor to this rank's heads; in some calls it is missing, or is one tensor for all heads."""
    if not isinstance(value, Tensor) or value.shape[-3] % heads:
        return value
    return cut_own(value, ranks, dim=-3, packed=value.shape[-3] // heads)


def _with_all_heads(tensor: Tensor, *, heads: int, ranks: TensorRanks) -> Tensor:
    total = tensor.shape[-3] * ranks.size
    if total % heads:
        return tensor
    return put_together(tensor, ranks, dim=-3, total=total, packed=total // heads)


def _make_smaller(module: nn.Module, key: str, value: int) -> None:
    """Set a module's number, or a number of an object that it shares with others, on a copy of that object."""
    owner, _, key = key.rpartition(".")
    if not owner:
        setattr(module, key, value)
        return
    copied = copy.copy(getattr(module, owner))
    setattr(copied, key, value)
    setattr(module, owner, copied)


def _own_size(total: int, ranks: TensorRanks) -> int:
    begin, end = bounds(total, rank=ranks.rank, size=ranks.size)
    return end - begin


def _resize(module: nn.Module, names: tuple[str, ...], value: int) -> None:
    for name in names:
        if name in module.__dict__:
            module.__dict__[name] = value


def _prepare_sequence(plan: TensorPlan, shares: dict[str, Share]) -> None:
    sequence = plan.sequence
    assert sequence is not None
    dim = sequence.dim
    ranks = next(iter(shares.values())).ranks

    def take_part(tensor: Tensor) -> Tensor:
        if tensor.shape[dim] % ranks.size:
            raise SpecError(
                f"the sequence length {tensor.shape[dim]} is not divisible by tp={ranks.size}: pad it, or leave out "
                "sequence_parallel"
            )
        return cut_own(tensor, ranks, dim=dim)

    def give_whole(tensor: Tensor) -> Tensor:
        return put_together(tensor, ranks, dim=dim, total=tensor.shape[dim] * ranks.size)

    for name in sequence.gathering:
        if name in shares:
            shares[name].before = [give_whole, lambda tensor: add_up_gradients(tensor, ranks)]
    for pair in plan.pairs:
        if not is_inside(pair.row, sequence.blocks) or not all(name in shares for name in pair.names):
            continue
        for name in pair.columns:
            share = shares[name]
            share.before = [] if is_inside(name, sequence.gathering) else [give_whole, *share.before]
        shares[pair.row].after.append(lambda tensor: cut_own(tensor, ranks, dim=dim))
        shares[pair.row].is_summed = True  # its bias is added to a part of the sequence
    here = _blocks_here(plan, sequence, shares)
    if here:
        shares[here[0]].before.insert(0, take_part)
        shares[here[-1]].after.append(give_whole)


def _blocks_here(plan: TensorPlan, sequence: SequenceParts, shares: dict[str, Share]) -> list[str]:
    """Return the blocks of this stage, between whose ends the sequence is cut. Raises: SpecError."""
    here = []
    for block in sequence.blocks:
        inner = [name for name in plan.modules if is_inside(name, [block])]
        missing = [name for name in inner if name not in shares]
        if missing and len(missing) < len(inner):
            raise SpecError(
                f"the stage has only a part of {block!r}, in which the sequence is cut: cut the model between blocks"
            )
        if not missing:
            here.append(block)
    return here


def _distribute(
    present: dict[str, nn.Module], shares: dict[str, Share], plan: TensorPlan, distribute: Distribute
) -> None:
    """Distribute every parameter once: tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    layouts = plan.layouts
    for name, module in present.items():
        first_names = {own: first for own, first, _ in plan.modules[name].parameters} if name in plan.modules else {}
        for own, parameter in module._parameters.items():
            if parameter is None:
                continue
            layout = layouts.get(first_names.get(own, ""))
            if layout is not None:
                shares[name].cuts[own] = layout, parameter.shape[layout.dim]
            if id(parameter) not in made:
                made[id(parameter)] = distribute(parameter, layout)
            module._parameters[own] = made[id(parameter)]
