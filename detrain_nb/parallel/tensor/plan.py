"""Plan of how a model's layers are cut over the ranks of a group; it can be read and edited."""

from __future__ import annotations

import difflib
import html
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from ...errors import SpecError
from ...text import html_cells, html_table, table_lines

Packed = int | tuple[int, ...]  # number of tensors of one length, or proportions of their lengths

LINEAR = ("linear", "conv1d")
EXPERTS = ("experts", "interleaved experts")  # gate and up are concatenated, or interleaved
KINDS = {  # by role
    "colwise": LINEAR,
    "rowwise": LINEAR,
    "embedding": ("embedding",),
    **dict.fromkeys(EXPERTS, ("experts",)),
}
ROLES = (*KINDS, "replicate")
_COLUMNS = ("module", "on each rank", "why")
_NAMED_WHOLE = 3  # modules with most of the whole parameters
OUTPUT_DIM = {"linear": 0, "conv1d": 1}  # of a weight, by the kind of its module


@dataclass(frozen=True)
class Layout:
    """Cut of a parameter in ``dim``; ``packed`` tensors are concatenated in it, and each of them is cut."""

    dim: int
    packed: Packed = 1


@dataclass(frozen=True)
class ByHead:
    """A tensor that ``module`` takes or returns, with ``heads`` third from last, or as many for each row.

    ``place``: for an argument, its number or name; for an output, its number among the float outputs.
    """

    module: str
    place: int | str
    heads: int
    is_output: bool = False


@dataclass(frozen=True)
class Pair:
    """Layers of which each rank computes a part from end to end: ``columns`` produce the part, ``row`` consumes it.

    ``packed``: tensors concatenated in a column's output. ``attributes``: numbers that are smaller on a rank, as
    (module, name, value); a name with a dot is of an object that the module has. ``origin``: what proposed the pair.

    Between them: ``summed`` modules or parameters are used on parts, so their gradients are summed; ``parts`` are
    parameters that are cut too, as (module, name, dimension); ``gathered`` modules run on the whole tensor; ``by_head``
    tensors are cut on entry and gathered on exit. ``entry``: the module at whose entry the ranks' work begins to
    differ, if not at that of the columns.
    """

    columns: tuple[str, ...]
    row: str
    packed: Packed = 1
    attributes: tuple[tuple[str, str, int], ...] = ()
    summed: tuple[str, ...] = ()
    parts: tuple[tuple[str, str, int], ...] = ()
    gathered: tuple[str, ...] = ()
    by_head: tuple[ByHead, ...] = ()
    entry: str | None = None
    origin: str = "data flow"

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.columns, self.row)

    @property
    def members(self) -> frozenset[str]:
        """All modules whose behaviour changes."""
        others = {*self.gathered, *(name for name, *_ in self.parts), *(each.module for each in self.by_head)}
        return frozenset({*self.names, *others} | ({self.entry} if self.entry is not None else set()))

    def renamed(self, rename: Callable[[str], str]) -> Pair:
        """Return the same pair for modules with other names."""
        return replace(
            self,
            columns=tuple(map(rename, self.columns)),
            row=rename(self.row),
            attributes=tuple((rename(module), key, value) for module, key, value in self.attributes),
            summed=tuple(map(rename, self.summed)),
            parts=tuple((rename(module), own, dim) for module, own, dim in self.parts),
            gathered=tuple(map(rename, self.gathered)),
            by_head=tuple(replace(each, module=rename(each.module)) for each in self.by_head),
            entry=None if self.entry is None else rename(self.entry),
        )


@dataclass(frozen=True)
class SequenceParts:
    """Cut of the sequence in ``dim``: from the first of ``blocks`` to the end of the last, each rank has its part.

    It is whole inside ``gathering``, and in columns outside of these. Gradients of ``summed`` modules are summed.
    """

    blocks: tuple[str, ...]
    dim: int
    gathering: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedModule:
    """A module with parameters of its own, each as (name, first name in the model, shape).

    ``kind``: "linear", "conv1d" (a linear layer with transposed weight), "embedding", "experts" (gated layers stacked
    in two parameters, and their biases in two more) or "other".
    """

    name: str
    kind: str
    parameters: tuple[tuple[str, str, torch.Size], ...]

    def layouts(self, role: str, *, packed: Packed = 1) -> dict[str, Layout]:
        """Return how its parameters are cut in a role, by name."""
        if role == "embedding":
            return {"weight": Layout(0)}
        if role in EXPERTS:
            return self._layouts_of_experts(packed=2 if role == "experts" else 1)
        if role not in ("colwise", "rowwise"):
            return {}
        output_dim = OUTPUT_DIM[self.kind]
        if role == "rowwise":
            return {"weight": Layout(1 - output_dim)}
        return {"weight": Layout(output_dim, packed), "bias": Layout(0, packed)}

    def _layouts_of_experts(self, *, packed: int) -> dict[str, Layout]:
        """Return the layouts; each expert's weights are (outputs, inputs), as in linear layers, or the reverse."""
        shapes = {own: shape for own, _, shape in self.parameters}
        _, outputs, inputs = shapes["gate_up_proj"]
        is_linear = shapes["down_proj"][1:] == (inputs, outputs // 2)
        found = {"gate_up_proj": Layout(1 if is_linear else 2, packed), "down_proj": Layout(2 if is_linear else 1)}
        return found | ({"gate_up_proj_bias": Layout(1, packed)} if "gate_up_proj_bias" in shapes else {})


@dataclass
class TensorPlan:
    """The parts of a model that each of ``tp`` ranks holds; everything else is on every rank.

    ``alone``: roles, by name, of modules with whole inputs and outputs: "colwise", "rowwise", "embedding", "experts" or
    "interleaved experts". ``shard_head``: the module whose output stays in parts, for vocabulary-parallel cross
    entropy. ``reasons``: why modules are replicated that could be cut. ``checked``: how far the whole plan was proved.
    """

    tp: int
    modules: Mapping[str, PlannedModule] = field(repr=False)
    pairs: list[Pair] = field(default_factory=list)
    alone: dict[str, str] = field(default_factory=dict)
    shard_head: str | None = None
    sequence: SequenceParts | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    checked: str = ""

    # ---- contents

    @property
    def roles(self) -> dict[str, str]:
        """Roles, as `set` takes them, of modules that are cut by themselves or in pairs, by name."""
        found = dict(self.alone)
        for pair in self.pairs:
            found |= dict.fromkeys(pair.columns, "colwise") | {pair.row: "rowwise"}
        return found

    @property
    def layouts(self) -> dict[str, Layout]:
        """How parameters are cut, by their first name in the model; all others are on every rank."""
        return {first: layout for first, layout, _ in self._cuts()}

    @property
    def layouts_by_name(self) -> dict[str, Layout]:
        """The layouts by every name that parameters have."""
        layouts = self.layouts
        return {
            f"{name}.{own}" if name else own: layouts[first]
            for name, module in self.modules.items()
            for own, first, _ in module.parameters
            if first in layouts
        }

    @property
    def packed(self) -> dict[str, Layout]:
        """Layouts, by every name, of tensors in another order than in the whole model (`to_saved_order`)."""
        return {name: layout for name, layout in self.layouts_by_name.items() if layout.packed != 1}

    def _cuts(self) -> Iterator[tuple[str, Layout, str]]:
        packed = {name: pair.packed for pair in self.pairs for name in pair.columns}
        for name, role in self.roles.items():
            layouts = self.modules[name].layouts(role, packed=packed.get(name, 1))
            for own, first, _ in self.modules[name].parameters:
                if own in layouts:
                    yield first, layouts[own], name
        for name, own, dim in (part for pair in self.pairs for part in pair.parts):
            yield next(first for each, first, _ in self.modules[name].parameters if each == own), Layout(dim), name

    # ---- edits

    def replicate(self, name: str) -> TensorPlan:
        """Keep a module, all in it and the layers cut with it on every rank. Raises: SpecError for an unknown name."""
        return self._take_out(name, f"{name!r} is replicated on request")

    def _take_out(self, name: str, reason: str) -> TensorPlan:
        """Take a module out of the plan; ``reason`` is for the layers that were cut with it."""
        inside = self.inside(name)
        if self.sequence is not None and any(inside & pair.members for pair in self.pairs):
            self.sequence = None
        for pair in [pair for pair in self.pairs if inside & pair.members]:
            self.pairs.remove(pair)
            self.reasons.update(dict.fromkeys(pair.names, reason))
        for each in inside & {*self.alone}:
            del self.alone[each]
            self.reasons[each] = "replicated on request"
        if self.shard_head in inside:
            self.shard_head = None
        return self

    def set(self, name: str, role: str) -> TensorPlan:
        """Cut one module by itself, correct anywhere, as "colwise", "rowwise" or "embedding"; or "replicate" it.

        Its input and output are whole on every rank; layers that were cut with it are replicated. Which of the two
        roles for experts is correct depends on their code, and the proof in `tp_plan` finds out.

        Raises: SpecError if the module cannot have that role.
        """
        if role not in ROLES:
            raise SpecError(f"{name!r} cannot be {role!r}: {_nearest(role, ROLES)}choose one of {', '.join(ROLES)}")
        if role == "replicate":
            return self.replicate(name)
        module = self._require(name)
        if module.kind not in KINDS[role]:
            fits = " and ".join(KINDS[role])
            raise SpecError(f"{name!r} cannot be {role!r}: that role is for {fits} layers, not {module.kind!r}")
        self._require_large_enough(module, role)
        before = [*self.pairs], dict(self.alone), self.shard_head, self.sequence, dict(self.reasons)
        self._take_out(name, f"it was cut with {name!r}, which is {role!r} by itself on request")
        self.alone[name] = role
        self.reasons.pop(name, None)
        try:
            self.require_agreement()
        except SpecError:
            self.pairs, self.alone, self.shard_head, self.sequence, self.reasons = before
            raise
        return self

    def require_agreement(self) -> None:
        """Raise SpecError if modules that share a parameter would cut it in different ways."""
        seen: dict[str, tuple[Layout, str]] = {}
        for first, layout, name in self._cuts():
            other = seen.setdefault(first, (layout, name))
            if other[0] != layout:
                raise SpecError(
                    f"{name!r} and {other[1]!r} share {first!r}, which would be cut in dimensions {layout.dim} and "
                    f"{other[0].dim}: replicate one of them"
                )

    def _require(self, name: str) -> PlannedModule:
        if name not in self.modules:
            self.inside(name)
            raise SpecError(f"{name!r} has no parameters of its own: name one of the modules in it")
        return self.modules[name]

    def inside(self, name: str) -> frozenset[str]:
        """Return the modules of the plan that are ``name`` or in it. Raises: SpecError if there are none."""
        inside = frozenset(each for each in self.modules if not name or is_inside(each, [name]))
        if not inside:
            names = {".".join(each.split(".")[:count]) for each in self.modules for count in range(1, 99)}
            raise SpecError(
                f"the plan has no module {name!r}: {_nearest(name, names) or 'print the plan to see the names'}"
            )
        return inside

    def _require_large_enough(self, module: PlannedModule, role: str) -> None:
        """Raise SpecError unless packed tensors are cut evenly and every rank gets at least one row of the others."""
        layouts = module.layouts(role)
        for own, _, shape in module.parameters:
            layout = layouts.get(own, Layout(0))
            size = shape[layout.dim]
            if role in EXPERTS and own == "gate_up_proj" and size % (2 * self.tp):
                raise SpecError(
                    f"{module.name!r} cannot be {role!r}: its gate_up_proj packs 2 tensors of {size // 2} rows, which "
                    f"are not divisible by tp={self.tp}"
                )
            if own in layouts and size - (self.tp - 1) * -(-size // self.tp) <= 0:
                raise SpecError(
                    f"{module.name!r} cannot be {role!r}: {size} rows leave some of {self.tp} ranks without any"
                )

    # ---- display

    def __str__(self) -> str:
        return "\n".join([self.headline(), *table_lines([_COLUMNS, *self._rows()])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        body = "".join(f"<tr>{html_cells(row, style='text-align:left')}</tr>" for row in self._rows())
        return f"<p>{html.escape(self.headline())}</p>{html_table(html_cells(_COLUMNS, tag='th'), body)}"

    def headline(self) -> str:
        """Return the share of parameters in parts and, if that is small, what is whole and why."""
        sequence = (
            f", sequence parallel from {self.sequence.blocks[0]} to {self.sequence.blocks[-1]}" if self.sequence else ""
        )
        how = f"tensor parallel over {self.tp} ranks: {self._share():.0%} of the parameters in parts{sequence}"
        return ". ".join(filter(None, [f"{how}; {self.checked}", self.what_is_whole]))

    @property
    def what_is_whole(self) -> str:
        """Modules with most of the whole parameters, and why they are whole, if these are more than half of all."""
        if self._share() >= 0.5 or not self.modules:
            return ""
        numels, roles, in_parts = self._numels(), self.roles, self.layouts
        found: Counter[str] = Counter()
        why: dict[str, str] = {}
        for name, module in self.modules.items():
            if name in roles:
                continue
            pattern = _pattern(name)
            found[pattern] += sum(numels.pop(first, 0) for _, first, _ in module.parameters if first not in in_parts)
            why.setdefault(pattern, self._describe(name)[1])
        shares = {pattern: numel / sum(self._numels().values()) for pattern, numel in found.most_common(_NAMED_WHOLE)}
        named = [
            f"{pattern or 'the model'} ({', '.join(filter(None, [f'{share:.0%}', why[pattern]]))})"
            for pattern, share in shares.items()
            if share >= 0.01
        ]
        return f"Most parameters are whole on every rank: {'; '.join(named)}"

    def _share(self) -> float:
        """Return the share of parameters that are cut, from 0 to 1."""
        numels = self._numels()
        return sum(numels[first] for first in self.layouts) / max(1, sum(numels.values()))

    def _numels(self) -> dict[str, int]:
        return {first: shape.numel() for module in self.modules.values() for _, first, shape in module.parameters}

    def _rows(self) -> list[tuple[str, str, str]]:
        """Return a row for all modules whose names differ only in numbers and that are cut alike."""
        found: dict[tuple[str, str, str], list[str]] = {}
        for name in self.modules:
            how, why = self._describe(name)
            found.setdefault((_pattern(name), how, _pattern(why)), []).append(name)
        return [
            (f"{pattern} ({len(names)}x)", how, why)
            if len(names) > 1
            else (names[0] or "(the model)", *self._describe(names[0]))
            for (pattern, how, why), names in found.items()
        ]

    def _describe(self, name: str) -> tuple[str, str]:
        for pair in self.pairs:
            if name in pair.columns:
                packed = "" if pair.packed == 1 else f", packed {_words_for(pair.packed)}"
                smaller = "".join(f", {key}={value}" for _, key, value in pair.attributes)
                return f"colwise{packed}", f"proved with {pair.row}{smaller} ({pair.origin})"
            if name == pair.row:
                return "rowwise", f"proved with {', '.join(pair.columns)} ({pair.origin})"
        if name in self.alone:
            kept = "output stays in parts" if name == self.shard_head else "output gathered"
            why = {"colwise": kept, "rowwise": "input cut", "embedding": "rows cut by token"}
            return self.alone[name], why.get(self.alone[name], "a part of each expert")
        for pair in self.pairs:
            if any(name == module for module, *_ in pair.parts):
                return "cut", f"proved with {pair.row} ({pair.origin})"
            if name in pair.gathered:
                return "whole", "its input is gathered, its output cut"
        if any(name in pair.summed for pair in self.pairs):
            return "whole", "used on parts: gradients are summed"
        if self.sequence is not None and name in self.sequence.summed:
            return "whole", "used on parts of the sequence: gradients are summed"
        return "whole", self.reasons.get(name, "")


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Return whether a module is one of ``modules`` or inside one of them."""
    return any(name == each or name.startswith(f"{each}.") for each in modules)


def _words_for(packed: Packed) -> str:
    return str(packed) if isinstance(packed, int) else ":".join(map(str, packed))


def _pattern(text: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|\b)", "*", text)


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""
