"""What a tensor plan may try: pairs of linear layers, and the numbers in modules that go with their widths."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from ..recording import modules_around
from .layer_flow import LayerFlow
from .plan import LINEAR, OUTPUT_DIM, Pair, PlannedModule

__all__ = [
    "candidates_of",
    "flow_pairs",
    "heads_that_do_not_divide",
    "known_modules",
    "own_pairs",
    "size_to_cut",
    "trials_of",
    "why_not_embedding",
]


def known_modules(model: nn.Module) -> dict[str, PlannedModule]:
    """The modules of a model that have parameters of their own, by name."""
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
    if keys == {"gate_up_proj", "down_proj"}:
        gate_up, down = module._parameters["gate_up_proj"], module._parameters["down_proj"]
        assert gate_up is not None and down is not None
        experts, width, hidden = down.shape if down.dim() == 3 else (0, 0, 0)
        return "experts" if gate_up.shape == (experts, 2 * hidden, width) else "other"
    is_conv1d = type(module).__name__ == "Conv1D" and keys == {"weight", "bias"} and hasattr(module, "nf")
    return "conv1d" if is_conv1d else "other"


def flow_pairs(flow: LayerFlow) -> Iterator[Pair]:
    """A layer, and those that alone feed it, and that get one input: as q, k, v and the output of attention.

    A layer may stand in several: which pair is right only the proof knows.
    """
    for name, sources in flow.sources.items():
        groups = {flow.siblings[source] for source in sources if source in flow.siblings}
        if len(groups) != 1:
            continue
        columns = next(iter(groups))
        if {*columns} <= sources and name not in columns:
            yield Pair(columns, name)


def own_pairs(model: nn.Module, modules: Mapping[str, PlannedModule]) -> Iterator[Pair]:
    """Of the plan that a model of transformers brings: what it cuts in one module belongs together."""
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
    """What a model's ``_tp_plan`` says of a module; it may be said by a module inside, in names from there on."""
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
    if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        return "max_norm, sparse and scale_grad_by_freq are of a whole table"
    return ""


def size_to_cut(module: PlannedModule, *, is_column: bool) -> int:
    shape = next(shape for own, _, shape in module.parameters if own == "weight")
    output_dim = OUTPUT_DIM[module.kind]
    return shape[output_dim if is_column else 1 - output_dim]


def candidates_of(parent: nn.Module, pair: Pair, modules: dict[str, PlannedModule]) -> list[tuple[str, str, int]]:
    """Whole numbers of modules that may count heads, or be widths of what is cut."""
    widths = {size_to_cut(modules[pair.row], is_column=False)}
    for name in pair.columns:
        packings = (1, 2, 3) if len(pair.columns) == 1 else (1,)
        widths |= {size_to_cut(modules[name], is_column=True) // packed for packed in packings}
    return [
        (name, key, value)
        for name, module in parent.named_modules()
        if name not in pair.names
        for key, value in sorted(vars(module).items())
        if type(value) is int and not key.startswith("_") and (_counts_heads(key) or value in widths)
    ]


def _counts_heads(key: str) -> bool:
    return ("head" in key and "dim" not in key and "size" not in key) or key in ("h", "nh")


def trials_of(parent: nn.Module, pair: Pair, modules: dict[str, PlannedModule], tp: int) -> Iterator[Pair]:
    """Ways to cut a pair: with nothing else changed, with fewer heads, with smaller widths; packed or not."""
    candidates = candidates_of(parent, pair, modules)
    smaller = [(name, key, value // tp) for name, key, value in candidates if value % tp == 0 and value >= tp]
    heads = [each for each in smaller if _counts_heads(each[1])]
    widths = [each for each in smaller if not _counts_heads(each[1])]
    outputs = size_to_cut(modules[pair.columns[0]], is_column=True)
    for attributes in dict.fromkeys(tuple(each) for each in ([], heads, [*heads, *widths], widths)):
        for packed in (1, 3, 2) if len(pair.columns) == 1 else (1,):
            if outputs % (packed * tp) == 0:
                yield replace(pair, packed=packed, attributes=attributes)


def heads_that_do_not_divide(parent: nn.Module, pair: Pair, modules: dict[str, PlannedModule], tp: int) -> str:
    for _, key, value in candidates_of(parent, pair, modules):
        if _counts_heads(key) and value % tp:
            return f"{value} heads ({key}) do not divide by {tp}"
    head_dims = {getattr(module, "head_dim", None) for module in parent.modules()}
    widths = [each for each in head_dims if type(each) is int and each > 0]
    for name in pair.columns:
        outputs = size_to_cut(modules[name], is_column=True)
        for head_dim in widths:
            if outputs % head_dim == 0 and (outputs // head_dim) % tp:
                return f"{outputs // head_dim} heads of {name.rpartition('.')[2]} do not divide by {tp}"
    return ""
