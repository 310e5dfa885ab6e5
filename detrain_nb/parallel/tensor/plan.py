"""How the layers of a model are cut over the ranks of a group: a plan that can be read, and edited."""

from __future__ import annotations

import difflib
import html
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from ...errors import SpecError

__all__ = ["Layout", "Pair", "PlannedModule", "SequenceParts", "TensorPlan"]

LINEAR = ("linear", "conv1d")
KINDS = {"colwise": LINEAR, "rowwise": LINEAR, "embedding": ("embedding",), "experts": ("experts",)}  # by role
ROLES = (*KINDS, "replicate")
OUTPUT_DIM = {"linear": 0, "conv1d": 1}  # of a weight, by the kind of its module


@dataclass(frozen=True)
class Layout:
    """A parameter is cut in ``dim``; ``packed`` tensors lie in it one behind the other, each of which is cut."""

    dim: int
    packed: int = 1


@dataclass(frozen=True)
class Pair:
    """Layers of which each rank computes a part from end to end: ``columns`` give it, ``row`` takes it.

    ``packed`` tensors are in the output of a column. ``attributes``: what is smaller on a rank, as (module, name,
    value). ``summed``: modules between them, used on parts, whose gradients are added up. ``origin``: who proposed it.
    """

    columns: tuple[str, ...]
    row: str
    packed: int = 1
    attributes: tuple[tuple[str, str, int], ...] = ()
    summed: tuple[str, ...] = ()
    origin: str = "data flow"

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.columns, self.row)


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
    stacked in two parameters) or "other".
    """

    name: str
    kind: str
    parameters: tuple[tuple[str, str, torch.Size], ...]

    def layouts(self, role: str, *, packed: int = 1) -> dict[str, Layout]:
        """How its parameters are cut in a role, by name."""
        if role == "embedding":
            return {"weight": Layout(0)}
        if role == "experts":
            return {"gate_up_proj": Layout(1, 2), "down_proj": Layout(2)}
        if role not in ("colwise", "rowwise"):
            return {}
        output_dim = OUTPUT_DIM[self.kind]
        if role == "rowwise":
            return {"weight": Layout(1 - output_dim)}
        return {"weight": Layout(output_dim, packed), "bias": Layout(0, packed)}


@dataclass
class TensorPlan:
    """What each of ``tp`` ranks holds of a model; all else is on every rank.

    ``alone``: "colwise", "rowwise", "embedding" or "experts", by name, of modules that begin and end with whole
    tensors.
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
        """What modules are, by name, that are cut: "colwise", "rowwise", "embedding" or "experts"."""
        found = dict(self.alone)
        for pair in self.pairs:
            found |= dict.fromkeys(pair.columns, "colwise") | {pair.row: "rowwise"}
        return found

    @property
    def layouts(self) -> dict[str, Layout]:
        """How parameters are cut, by their first name in the model; the others are on every rank."""
        return {first: layout for first, layout, _ in self._cuts()}

    @property
    def packed(self) -> dict[str, Layout]:
        """Of these, by every name, what lies in another order than in the whole model (`to_saved_order`)."""
        layouts = self.layouts
        return {
            f"{name}.{own}" if name else own: layouts[first]
            for name, module in self.modules.items()
            for own, first, _ in module.parameters
            if first in layouts and layouts[first].packed > 1
        }

    def _cuts(self) -> Iterator[tuple[str, Layout, str]]:
        packed = {name: pair.packed for pair in self.pairs for name in pair.columns}
        for name, role in self.roles.items():
            layouts = self.modules[name].layouts(role, packed=packed.get(name, 1))
            for own, first, _ in self.modules[name].parameters:
                if own in layouts:
                    yield first, layouts[own], name

    # ---- edits

    def replicate(self, name: str) -> TensorPlan:
        """Keep a module, and all in it, on every rank; the layers that it was cut with too. Raises: SpecError."""
        inside = self.inside(name)
        if self.sequence is not None and any(inside & {*pair.names} for pair in self.pairs):
            self.sequence = None
        for pair in [pair for pair in self.pairs if inside & {*pair.names}]:
            self.pairs.remove(pair)
            self.reasons.update(dict.fromkeys(pair.names, f"{name!r} was asked to be on every rank"))
        for each in inside & {*self.alone}:
            del self.alone[each]
            self.reasons[each] = "asked for"
        if self.shard_head in inside:
            self.shard_head = None
        return self

    def set(self, name: str, role: str) -> TensorPlan:
        """Cut one module by itself, which is right wherever it stands: "colwise", "rowwise", "embedding", or not.

        Its input and its output are whole on every rank; what was cut with it is replicated. Raises: SpecError.
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
        self.replicate(name)
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
            if layout.packed > 1 and size % (layout.packed * self.tp):
                raise SpecError(
                    f"{module.name!r} cannot be {role!r}: {layout.packed} of {size // layout.packed} rows, "
                    f"packed into one, do not divide by {self.tp}"
                )
            if own in layouts and size - (self.tp - 1) * -(-size // self.tp) <= 0:
                raise SpecError(
                    f"{module.name!r} cannot be {role!r}: {size} rows do not give each of {self.tp} ranks some"
                )

    # ---- how it looks

    def __str__(self) -> str:
        rows = [("module", "on each rank", "why"), *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = (f"{name:{widths[0]}}  {how:{widths[1]}}  {why}".rstrip() for name, how, why in rows)
        return "\n".join([self._headline(), *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cells = (
            "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row) for row in self._rows()
        )
        head = "<tr><th>module</th><th>on each rank</th><th>why</th></tr>"
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        return f"<p>{html.escape(self._headline())}</p><table><thead>{head}</thead><tbody>{body}</tbody></table>"

    def _headline(self) -> str:
        sizes = {first: shape.numel() for module in self.modules.values() for _, first, shape in module.parameters}
        in_parts = sum(sizes[first] for first in self.layouts)
        share = in_parts / max(1, sum(sizes.values()))
        sequence = (
            f", sequence parallel from {self.sequence.blocks[0]} to {self.sequence.blocks[-1]}" if self.sequence else ""
        )
        return f"tensor parallel over {self.tp} ranks: {share:.0%} of the parameters in parts{sequence}; {self.checked}"

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
                packed = f", {pair.packed} in one" if pair.packed > 1 else ""
                smaller = "".join(f", {key}={value}" for _, key, value in pair.attributes)
                return f"colwise{packed}", f"proved with {pair.row}{smaller} ({pair.origin})"
            if name == pair.row:
                return "rowwise", f"proved with {', '.join(pair.columns)} ({pair.origin})"
        if name in self.alone:
            kept = "its part of the output" if name == self.shard_head else "output put together"
            why = {"colwise": kept, "rowwise": "input cut", "embedding": "rows by token", "experts": "a part of each"}
            return self.alone[name], why[self.alone[name]]
        if any(name in pair.summed for pair in self.pairs):
            return "whole", "used on parts: gradients are added up"
        if self.sequence is not None and name in self.sequence.summed:
            return "whole", "used on parts of the sequence: gradients are added up"
        return "whole", self.reasons.get(name, "")


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a module is one of ``modules``, or in one of them."""
    return any(name == each or name.startswith(f"{each}.") for each in modules)


def _pattern(text: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|\b)", "*", text)


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""
