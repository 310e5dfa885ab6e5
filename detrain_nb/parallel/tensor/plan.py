"""How the layers of a model are cut over the ranks of a group: a plan that can be read, and edited."""

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

Packed = int | tuple[int, ...]  # so many tensors of one length, or tensors whose lengths are in these proportions

LINEAR = ("linear", "conv1d")
EXPERTS = ("experts", "interleaved experts")  # gate and up lie one behind the other, or by turns
KINDS = {  # by role
    "colwise": LINEAR,
    "rowwise": LINEAR,
    "embedding": ("embedding",),
    **dict.fromkeys(EXPERTS, ("experts",)),
}
ROLES = (*KINDS, "replicate")
_COLUMNS = ("module", "on each rank", "why")
_NAMED_WHOLE = 3  # modules that have most of what is whole
OUTPUT_DIM = {"linear": 0, "conv1d": 1}  # of a weight, by the kind of its module


@dataclass(frozen=True)
class Layout:
    """A parameter is cut in ``dim``; ``packed`` tensors lie in it one behind the other, each of which is cut."""

    dim: int
    packed: Packed = 1


@dataclass(frozen=True)
class ByHead:
    """A tensor that ``module`` gets or gives, with ``heads``, or these for each row, third from last.

    ``place``: of an argument, its number or its name; of an output, its number among the float ones.
    """

    module: str
    place: int | str
    heads: int
    is_output: bool = False


@dataclass(frozen=True)
class Pair:
    """Layers of which each rank computes a part from end to end: ``columns`` give it, ``row`` takes it.

    ``packed`` tensors are in the output of a column. ``attributes``: what is smaller on a rank, as (module, name,
    value); a name with a dot is of an object that a module has. ``origin``: who proposed it.

    Between them: ``summed`` modules, or parameters, are used on parts, and their gradients are added up; ``parts`` are
    parameters that are cut too, as (module, name, dimension); ``gathered`` modules run on the whole; ``by_head`` are
    cut where they come in, and put together where they go out. ``entry``: the module at whose entry the work of the
    ranks begins to differ, where that is not that of the columns.
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
        """All modules that do not do what they did."""
        others = {*self.gathered, *(name for name, *_ in self.parts), *(each.module for each in self.by_head)}
        return frozenset({*self.names, *others} | ({self.entry} if self.entry is not None else set()))

    def renamed(self, rename: Callable[[str], str]) -> Pair:
        """The same of modules with other names."""
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
    """From the entry of the first of ``blocks`` to the end of the last each rank has its part of the sequence, ``dim``.

    It is whole inside of ``gathering``, and in columns outside of these. Gradients of ``summed`` are added up.
    """

    blocks: tuple[str, ...]
    dim: int
    gathering: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedModule:
    """A module with parameters of its own, each as (name, first name in the model, shape).

    ``kind``: "linear", "conv1d" (a linear layer whose weight is transposed), "embedding", "experts" (gated layers,
    stacked in two parameters, and their biases in two) or "other".
    """

    name: str
    kind: str
    parameters: tuple[tuple[str, str, torch.Size], ...]

    def layouts(self, role: str, *, packed: Packed = 1) -> dict[str, Layout]:
        """How its parameters are cut in a role, by name."""
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
        """By expert, weights are (outputs, inputs), as those of linear layers are, or (inputs, outputs)."""
        shapes = {own: shape for own, _, shape in self.parameters}
        _, outputs, inputs = shapes["gate_up_proj"]
        is_linear = shapes["down_proj"][1:] == (inputs, outputs // 2)
        found = {"gate_up_proj": Layout(1 if is_linear else 2, packed), "down_proj": Layout(2 if is_linear else 1)}
        return found | ({"gate_up_proj_bias": Layout(1, packed)} if "gate_up_proj_bias" in shapes else {})


@dataclass
class TensorPlan:
    """What each of ``tp`` ranks holds of a model; all else is on every rank.

    ``alone``: "colwise", "rowwise", "embedding", "experts" or "interleaved experts", by name, of modules that begin and
    end with whole tensors.
    ``shard_head``: the module whose output stays in parts, for vocabulary-parallel cross entropy. ``reasons``: why
    modules are replicated that might not be. ``checked``: how far the plan was proved as a whole.
    """

    tp: int
    modules: Mapping[str, PlannedModule] = field(repr=False)
    pairs: list[Pair] = field(default_factory=list)
    alone: dict[str, str] = field(default_factory=dict)
    shard_head: str | None = None
    sequence: SequenceParts | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    checked: str = ""

    # ---- what it says

    @property
    def roles(self) -> dict[str, str]:
        """What modules are, by name, that are cut by themselves or in pairs: a role that `set` takes."""
        found = dict(self.alone)
        for pair in self.pairs:
            found |= dict.fromkeys(pair.columns, "colwise") | {pair.row: "rowwise"}
        return found

    @property
    def layouts(self) -> dict[str, Layout]:
        """How parameters are cut, by their first name in the model; the others are on every rank."""
        return {first: layout for first, layout, _ in self._cuts()}

    @property
    def layouts_by_name(self) -> dict[str, Layout]:
        """The same by every name that parameters have."""
        layouts = self.layouts
        return {
            f"{name}.{own}" if name else own: layouts[first]
            for name, module in self.modules.items()
            for own, first, _ in module.parameters
            if first in layouts
        }

    @property
    def packed(self) -> dict[str, Layout]:
        """By every name, what lies in another order than in the whole model (`to_saved_order`)."""
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
        """Keep a module, and all in it, on every rank; the layers that it was cut with too. Raises: SpecError."""
        return self._take_out(name, f"{name!r} was asked to be on every rank")

    def _take_out(self, name: str, reason: str) -> TensorPlan:
        """``reason``: of layers that it was cut with."""
        inside = self.inside(name)
        if self.sequence is not None and any(inside & pair.members for pair in self.pairs):
            self.sequence = None
        for pair in [pair for pair in self.pairs if inside & pair.members]:
            self.pairs.remove(pair)
            self.reasons.update(dict.fromkeys(pair.names, reason))
        for each in inside & {*self.alone}:
            del self.alone[each]
            self.reasons[each] = "asked for"
        if self.shard_head in inside:
            self.shard_head = None
        return self

    def set(self, name: str, role: str) -> TensorPlan:
        """Cut one module by itself, which is right wherever it stands: "colwise", "rowwise", "embedding", or not.

        Its input and its output are whole on every rank; what was cut with it is replicated. Which of the two roles of
        experts is right only their own code says, and the proof of `tp_plan`. Raises: SpecError.
        """
        if role not in ROLES:
            raise SpecError(f"{name!r} cannot be {role!r}: {_nearest(role, ROLES)}choose one of {', '.join(ROLES)}")
        if role == "replicate":
            return self.replicate(name)
        module = self._require(name)
        if module.kind not in KINDS[role]:
            fits = " and ".join(KINDS[role])
            raise SpecError(f"{name!r} cannot be {role!r}: that is for {fits} layers, not {module.kind!r}")
        self._require_large_enough(module, role)
        before = [*self.pairs], dict(self.alone), self.shard_head, self.sequence, dict(self.reasons)
        self._take_out(name, f"it was cut with {name!r}, which was asked to be {role!r} by itself")
        self.alone[name] = role
        self.reasons.pop(name, None)
        try:
            self.require_agreement()
        except SpecError:
            self.pairs, self.alone, self.shard_head, self.sequence, self.reasons = before
            raise
        return self

    def require_agreement(self) -> None:
        """Raises: SpecError where modules that share a parameter would cut it in different ways."""
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
        """The modules of the plan that are ``name``, or in it. Raises: SpecError where there are none."""
        inside = frozenset(each for each in self.modules if not name or is_inside(each, [name]))
        if not inside:
            names = {".".join(each.split(".")[:count]) for each in self.modules for count in range(1, 99)}
            raise SpecError(f"the plan has no module {name!r}: {_nearest(name, names) or 'print it to see the names'}")
        return inside

    def _require_large_enough(self, module: PlannedModule, role: str) -> None:
        """Tensors that are packed into one have to be cut evenly; others leave nobody without a row."""
        layouts = module.layouts(role)
        for own, _, shape in module.parameters:
            layout = layouts.get(own, Layout(0))
            size = shape[layout.dim]
            if role in EXPERTS and own == "gate_up_proj" and size % (2 * self.tp):
                raise SpecError(
                    f"{module.name!r} cannot be {role!r}: 2 of {size // 2} rows, packed into one, do not divide by "
                    f"{self.tp}"
                )
            if own in layouts and size - (self.tp - 1) * -(-size // self.tp) <= 0:
                raise SpecError(
                    f"{module.name!r} cannot be {role!r}: {size} rows do not give each of {self.tp} ranks some"
                )

    # ---- how it looks

    def __str__(self) -> str:
        return "\n".join([self.headline(), *table_lines([_COLUMNS, *self._rows()])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        body = "".join(f"<tr>{html_cells(row, style='text-align:left')}</tr>" for row in self._rows())
        return f"<p>{html.escape(self.headline())}</p>{html_table(html_cells(_COLUMNS, tag='th'), body)}"

    def headline(self) -> str:
        """How much is in parts, and, where that is little, what is whole and why."""
        sequence = (
            f", sequence parallel from {self.sequence.blocks[0]} to {self.sequence.blocks[-1]}" if self.sequence else ""
        )
        how = f"tensor parallel over {self.tp} ranks: {self._share():.0%} of the parameters in parts{sequence}"
        return ". ".join(filter(None, [f"{how}; {self.checked}", self.what_is_whole]))

    @property
    def what_is_whole(self) -> str:
        """Which modules have most of the parameters that are whole, and why, where these are more than half of all."""
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
        return f"Most of it is whole on every rank: {'; '.join(named)}"

    def _share(self) -> float:
        """How many of the parameters are cut, of 1."""
        numels = self._numels()
        return sum(numels[first] for first in self.layouts) / max(1, sum(numels.values()))

    def _numels(self) -> dict[str, int]:
        return {first: shape.numel() for module in self.modules.values() for _, first, shape in module.parameters}

    def _rows(self) -> list[tuple[str, str, str]]:
        """One for the modules whose names differ in numbers alone, and that are cut in the same way."""
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
                packed = "" if pair.packed == 1 else f", {_words_for(pair.packed)} in one"
                smaller = "".join(f", {key}={value}" for _, key, value in pair.attributes)
                return f"colwise{packed}", f"proved with {pair.row}{smaller} ({pair.origin})"
            if name == pair.row:
                return "rowwise", f"proved with {', '.join(pair.columns)} ({pair.origin})"
        if name in self.alone:
            kept = "its part of the output" if name == self.shard_head else "output put together"
            why = {"colwise": kept, "rowwise": "input cut", "embedding": "rows by token"}
            return self.alone[name], why.get(self.alone[name], "a part of each")
        for pair in self.pairs:
            if any(name == module for module, *_ in pair.parts):
                return "cut", f"proved with {pair.row} ({pair.origin})"
            if name in pair.gathered:
                return "whole", "its input is put together, its output cut"
        if any(name in pair.summed for pair in self.pairs):
            return "whole", "used on parts: gradients are added up"
        if self.sequence is not None and name in self.sequence.summed:
            return "whole", "used on parts of the sequence: gradients are added up"
        return "whole", self.reasons.get(name, "")


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a module is one of ``modules``, or in one of them."""
    return any(name == each or name.startswith(f"{each}.") for each in modules)


def _words_for(packed: Packed) -> str:
    return str(packed) if isinstance(packed, int) else ":".join(map(str, packed))


def _pattern(text: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|\b)", "*", text)


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""
