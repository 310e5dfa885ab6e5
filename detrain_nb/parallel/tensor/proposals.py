"""Proposals for a tensor plan to try: pairs of linear layers, and numbers in modules that depend on their widths."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..recording import modules_around
from .layer_flow import LayerFlow
from .plan import LINEAR, OUTPUT_DIM, ByHead, Packed, Pair, PlannedModule


def known_modules(model: nn.Module) -> dict[str, PlannedModule]:
    """Return the modules of a model that have parameters of their own, by name."""
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for name, module in model.named_modules():
        own = [(key, first_names[id(p)], p.shape) for key, p in module._parameters.items() if p is not None]
        if own:
            found[name] = PlannedModule(name, _kind_of(module), tuple(own))
    return found


def _kind_of(module: nn.Module) -> str:
    keys = {key for key, parameter in module._parameters.items() if parameter is not None}
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.Linear) and {"weight"} <= keys <= {"weight", "bias"}:
        return "linear"
    if {"gate_up_proj", "down_proj"} <= keys <= {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}:
        gate_up, down = module._parameters["gate_up_proj"], module._parameters["down_proj"]
        assert gate_up is not None and down is not None
        experts, first, last = down.shape if down.dim() == 3 else (0, 0, 0)
        return "experts" if gate_up.shape in ((experts, 2 * last, first), (experts, last, 2 * first)) else "other"
    is_conv1d = type(module).__name__ == "Conv1D" and keys == {"weight", "bias"} and hasattr(module, "nf")
    return "conv1d" if is_conv1d else "other"


def flow_pairs(flow: LayerFlow, modules: Mapping[str, PlannedModule]) -> Iterator[Pair]:
    """Yield a layer and the layers that feed only it, such as q, k, v and the output of attention.

    A layer may be in several pairs: only the proof shows which one is right. A layer that turns a small input into a
    model output, such as one of a vocabulary, is a head: summing its output over the ranks would be slow.
    """
    for name, sources in flow.sources.items():
        is_wider = size_to_cut(modules[name], is_column=True) > size_to_cut(modules[name], is_column=False)
        if name in flow.heads and is_wider:
            continue
        columns = tuple(each for each in sources if flow.readers[each] == {name} and each != name)
        if columns:
            yield Pair(columns, name)


def own_pairs(model: nn.Module, modules: Mapping[str, PlannedModule]) -> Iterator[Pair]:
    """Yield pairs from the plan that a transformers model brings: what it cuts in one module belongs together."""
    styles = {
        name: style
        for name, module in modules.items()
        if module.kind in LINEAR and (style := _own_style(model, name)) is not None
    }
    for name, style in styles.items():
        parent = name.rpartition(".")[0]
        columns = tuple(each for each, its in styles.items() if its == "colwise" and each.rpartition(".")[0] == parent)
        if style == "rowwise" and columns:
            yield Pair(columns, name, origin="the model's own plan")


def _own_style(model: nn.Module, name: str) -> str | None:
    """Return what ``_tp_plan`` gives for a module; a module inside may have one, with names relative to itself."""
    for outer in modules_around(name):
        inner = name[len(outer) + 1 :] if outer else name
        owner = model.get_submodule(outer)
        for attribute in ("_tp_plan", "base_model_tp_plan"):
            own = vars(owner).get(attribute) or vars(type(owner)).get(attribute)
            if isinstance(own, dict):
                for pattern, style in own.items():
                    if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), inner):
                        return str(style)
    return None


def why_not_embedding(module: nn.Module) -> str:
    if not isinstance(module, nn.Embedding):
        return "not an embedding"
    if module.max_norm is not None or module.scale_grad_by_freq:
        return "max_norm and scale_grad_by_freq need the whole table"
    return ""


def size_to_cut(module: PlannedModule, *, is_column: bool) -> int:
    shape = next(shape for own, _, shape in module.parameters if own == "weight")
    output_dim = OUTPUT_DIM[module.kind]
    return shape[output_dim if is_column else 1 - output_dim]


@dataclass(frozen=True)
class Between:
    """Modules, parameters and tensors between the columns and the row of a pair, in the module around it.

    ``modules``: with parameters of their own, that run there; ``parameters``: others that are used there too;
    ``arguments`` that the module gets after the first, by place, and ``outputs`` that it returns after the first, by
    number among the float outputs, with their shapes.
    """

    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    arguments: tuple[tuple[int | str, torch.Size], ...] = ()
    outputs: tuple[tuple[int, torch.Size], ...] = ()


def candidates_of(parent: nn.Module, pair: Pair, modules: dict[str, PlannedModule]) -> list[tuple[str, str, int]]:
    """Return integer attributes that may count heads or be widths of cut tensors; of configurations, heads only."""
    widths = {size_to_cut(modules[pair.row], is_column=False)}
    for name in pair.columns:
        packings = (1, 2, 3) if len(pair.columns) == 1 else (1,)
        widths |= {size_to_cut(modules[name], is_column=True) // packed for packed in packings}
    return [
        (name, key, value)
        for name, module in parent.named_modules()
        if name not in pair.names
        for key, value in _numbers_of(module)
        if _counts_heads(key) or (value in widths and "." not in key)
    ]


def _numbers_of(module: nn.Module) -> Iterator[tuple[str, int]]:
    config = vars(module).get("config")
    for prefix, owner in (("", module), ("config.", config)):
        for key, value in sorted(getattr(owner, "__dict__", {}).items()):
            if type(value) is int and value > 0 and not key.startswith("_"):
                yield f"{prefix}{key}", value


def _counts_heads(key: str) -> bool:
    key = key.rpartition(".")[2]
    return ("head" in key and "dim" not in key and "size" not in key) or key in ("h", "nh")


def trials_of(
    parent: nn.Module, pair: Pair, modules: dict[str, PlannedModule], tp: int, between: Between
) -> Iterator[Pair]:
    """Yield ways to cut a pair: fewer heads, smaller widths, what is between them cut or not, packed or not."""
    candidates = candidates_of(parent, pair, modules)
    outputs = size_to_cut(modules[pair.columns[0]], is_column=True)
    counts = {value for _, key, value in candidates if _counts_heads(key)}
    numbers = (1, 3, 2) if len(pair.columns) == 1 else (1,)
    packings: list[Packed] = [each for each in numbers if outputs % (each * tp) == 0]
    if len(pair.columns) == 1:
        packings += _unequal_packings(outputs, counts, tp)
    ways = itertools.product(
        _ways_with_heads(between, counts, tp),
        _ways_between(pair, modules, between, candidates, tp),
        _smaller_numbers(candidates, tp),
        packings,
    )
    for by_head, (parts, gathered), attributes, packed in ways:
        yield replace(pair, packed=packed, attributes=attributes, parts=parts, gathered=gathered, by_head=by_head)
    yield from _with_whole_keys(parent, pair, modules, candidates, tp)


def _with_whole_keys(
    parent: nn.Module, pair: Pair, modules: dict[str, PlannedModule], candidates: list[tuple[str, str, int]], tp: int
) -> Iterator[Pair]:
    """Yield ways for one head of keys for all queries: each rank has it, with a smaller group of queries."""
    sizes = {name: size_to_cut(modules[name], is_column=True) for name in pair.columns}
    widest = tuple(name for name in pair.columns if sizes[name] == max(sizes.values()))
    if widest == pair.columns:
        return
    groups = [
        (name, key, value // tp)
        for name, module in parent.named_modules()
        for key, value in _numbers_of(module)
        if "groups" in key and "." not in key and value % tp == 0
    ]
    for numbers in _smaller_numbers(candidates, tp):
        yield replace(pair, columns=widest, attributes=(*numbers, *groups))


def _unequal_packings(outputs: int, counts: Collection[int], tp: int) -> list[Packed]:
    """Return packings of queries with fewer keys and values, proportional to their numbers of heads."""
    return [
        (heads, fewer, fewer)
        for heads, fewer in itertools.permutations(sorted(counts), 2)
        if fewer < heads and heads % tp == 0 == fewer % tp and outputs % (heads + 2 * fewer) == 0
    ]


def _smaller_numbers(candidates: list[tuple[str, str, int]], tp: int) -> list[tuple[tuple[str, str, int], ...]]:
    """Return the sets of numbers to reduce: none, heads, widths, both, and heads in configurations too."""
    smaller = [(name, key, value // tp) for name, key, value in candidates if value % tp == 0 and value >= tp]
    heads = [each for each in smaller if _counts_heads(each[1]) and "." not in each[1]]
    widths = [each for each in smaller if not _counts_heads(each[1])]
    configured = [each for each in smaller if "." in each[1]]
    ways = [[], heads, [*heads, *widths], widths, [*heads, *configured], [*heads, *widths, *configured]]
    return list(dict.fromkeys(map(tuple, ways)))


def with_sums(trial: Pair, modules: dict[str, PlannedModule], between: Between) -> list[Pair]:
    """Return where gradients are partial and summed: in everything between, nowhere, or from the module's entry."""
    cut = {*trial.names, *trial.gathered}
    parts = {(name, own) for name, own, _ in trial.parts}
    names = {
        (name, own): f"{name}.{own}" if name else own
        for name, module in modules.items()
        for own, *_ in module.parameters
    }
    inside = tuple(name for name in between.modules if name not in cut)
    beside = tuple(
        named
        for (name, own), named in names.items()
        if named in between.parameters and name not in {*between.modules, *cut} and (name, own) not in parts
    )
    everywhere = tuple(name for name in modules if name not in cut)
    ways = [
        replace(trial, summed=(*inside, *beside)),
        replace(trial, summed=()),
        replace(trial, summed=everywhere, entry=""),
    ]
    return list(dict.fromkeys(ways))


Cut = tuple[tuple[tuple[str, str, int], ...], tuple[str, ...]]


def _ways_between(
    pair: Pair, modules: dict[str, PlannedModule], between: Between, candidates: list[tuple[str, str, int]], tp: int
) -> list[Cut]:
    """Return how what is between is used: whole; cut by heads or channels; or on the gathered tensor."""
    counts = {value for _, key, value in candidates if _counts_heads(key)}
    widths = {size_to_cut(modules[name], is_column=name != pair.row) for name in pair.names}
    shapes = {
        (name, own): shape
        for name, module in modules.items()
        if name not in pair.names
        for own, _, shape in module.parameters
        if (f"{name}.{own}" if name else own) in between.parameters
    }

    def parts(sizes: Collection[int], *, without: Collection[str] = ()) -> tuple[tuple[str, str, int], ...]:
        return tuple(
            (name, own, dim)
            for (name, own), shape in shapes.items()
            for dim in [dim for dim, size in enumerate(shape) if size in sizes and size % tp == 0][:1]
            if name not in without
        )

    wide = tuple(dict.fromkeys(name for (name, _), shape in shapes.items() if shape[-1:] and shape[-1] in widths))
    gathered = tuple(name for name in wide if name in between.modules)
    ways = [
        ((), ()),
        (parts(counts), ()),
        (parts(widths), ()),
        (parts({*counts, *widths}), ()),
        (parts(counts, without=gathered), gathered),
    ]
    return list(dict.fromkeys(ways))


def _ways_with_heads(between: Between, counts: Collection[int], tp: int) -> list[tuple[ByHead, ...]]:
    """Return which arguments and outputs are cut by head: none; all that may, such as score biases; or one."""

    def heads_of(shape: torch.Size) -> int | None:
        heads = sorted((each for each in counts if each % tp == 0), reverse=True)
        return next((each for each in heads if len(shape) > 2 and shape[-3] % each == 0), None)

    found = [
        *(ByHead("", place, heads) for place, shape in between.arguments if (heads := heads_of(shape))),
        *(ByHead("", place, heads, True) for place, shape in between.outputs if (heads := heads_of(shape))),
    ]
    return list(dict.fromkeys(((), tuple(found), *((each,) for each in found))))


def heads_that_do_not_divide(parent: nn.Module, pair: Pair, modules: dict[str, PlannedModule], tp: int) -> str:
    for _, key, value in sorted(candidates_of(parent, pair, modules), key=lambda each: "." in each[1]):
        if _counts_heads(key) and value % tp:
            return f"{value} heads ({key}) are not divisible by tp={tp}"
    for name in pair.columns:
        outputs = size_to_cut(modules[name], is_column=True)
        head_dims = {getattr(module, "head_dim", None) for module in _around(parent, name)}
        for head_dim in (each for each in head_dims if type(each) is int and each > 0):
            if outputs % head_dim == 0 and (outputs // head_dim) % tp:
                return f"{outputs // head_dim} heads of {name.rpartition('.')[2]} are not divisible by tp={tp}"
    return ""


def _around(parent: nn.Module, name: str) -> Iterator[nn.Module]:
    """Yield ``parent`` and the modules in it that lead to ``name``."""
    yield parent
    for part in name.split("."):
        parent = parent.get_submodule(part)
        yield parent
