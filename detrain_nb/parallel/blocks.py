"""The repeated parts of a model, such as its layers: the units of sharding, recomputation and compilation.

Also finds modules that compute in the same way, so that what holds for one holds for all of them.
"""

from __future__ import annotations

import functools
import re
import types
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .undo import own_attributes


class StandIn(nn.Module):
    """Stand-in in a stage for a module of another stage; a module that contains one is not a block."""


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the entries of the outermost lists of modules; in a stage, those that are complete there."""
    found = {id(block): block for block in _find_blocks(module)}  # one layer may be listed many times
    inside = {id(part) for block in found.values() for part in block.modules() if part is not block}
    yield from (block for block in found.values() if id(block) not in inside)


def _find_blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1:
            for block in child.children():  # a list may have None in it
                if isinstance(block, (nn.ModuleList, nn.ModuleDict)):
                    yield from _find_blocks(nn.ModuleList([block]) if len(block) == 1 else nn.Sequential(block))
                elif _is_unit(block):
                    yield block
        else:
            yield from _find_blocks(child)


def names_of_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the first name of each block."""
    blocks = {id(block) for block in blocks_of(model)}
    return tuple(name for name, module in model.named_modules() if id(module) in blocks)


def parts_of_blocks(model: nn.Module) -> set[str]:
    """Return the names of all modules inside blocks, without the blocks themselves."""
    names = {name: [part for part, _ in model.get_submodule(name).named_modules()] for name in names_of_blocks(model)}
    return {f"{name}.{part}" for name, parts in names.items() for part in parts if part}


def _is_unit(block: nn.Module) -> bool:
    return not any(isinstance(part, StandIn) for part in block.modules()) and next(block.parameters(), None) is not None


# ---- which modules compute in the same way


def looks_of(blocks: Mapping[str, nn.Module], *, with_numbers: bool = False) -> dict[str, Any]:
    """Return a look for each module, equal for modules that compute in the same way; values of tensors do not matter.

    A look has the classes, tensor shapes, hooks and attributes of all parts. Unless ``with_numbers``, it leaves out
    ints that only number the blocks: in rows of four or more, ints at a fixed distance from a number in the block's
    name or from its place in the row.
    """
    memo: dict[int, Any] = {}
    found = {name: dict(_Facts(block, memo)) for name, block in blocks.items()}
    rows = defaultdict[Any, list[str]](list)
    for name, block in blocks.items():
        rows[pattern_of(name), type(block)].append(name)
    for row in () if with_numbers else rows.values():
        _leave_out_numbers(row, found)
    return {name: frozenset(facts.items()) for name, facts in found.items()}


def pattern_of(name: str) -> str:
    """Return a name with its numbers replaced, equal for all blocks of a row."""
    return re.sub(r"\d+", "*", name)


Path = tuple[Any, ...]
Fact = tuple[Path, Any]

_FEWEST_NUMBERED = 4  # among two or three, 0, 1 and 2 may be a coincidence


def _leave_out_numbers(row: Sequence[str], found: Mapping[str, dict[Path, Any]]) -> None:
    paths = dict.fromkeys(path for name in row for path, value in found[name].items() if type(value) is int)
    places = {name: (*map(int, re.findall(r"\d+", name)), index) for index, name in enumerate(row)}
    for path in paths:
        having = [name for name in row if type(found[name].get(path)) is int]
        values = [found[name][path] for name in having]
        if len({*values}) < max(_FEWEST_NUMBERED, len(having)):
            continue
        for column in zip(*(places[name] for name in having)):
            if len({value - place for value, place in zip(values, column)}) == 1:
                for name in having:
                    found[name][path] = "its number"
                break


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (
    *(bool, float, complex, str, bytes, type(None), type, torch.dtype, torch.device),
    *(types.CodeType, types.BuiltinFunctionType),
)
_MOST_ENTRIES, _MOST_DEEP = 1000, 4  # larger or deeper objects are compared by identity


class _Facts:
    """Facts about a block, by path: module, attribute, place in it. ``memo``: facts of objects, by identity."""

    def __init__(self, block: nn.Module, memo: dict[int, Any]) -> None:
        self._block, self._memo = block, memo
        self._names = {id(part): name for name, part in block.named_modules()}

    def __iter__(self) -> Iterator[Fact]:
        for name, part in self._block.named_modules():
            yield (name,), (type(part), part.training, part.extra_repr())
            held: dict[str, Any] = {**part._parameters, **part._buffers}
            held |= own_attributes(part)
            held |= {key: list(getattr(part, key).values()) for key in _HOOKS}
            for key, value in held.items():
                yield from self._of((name, key), value, 0)

    def _of(self, path: Path, value: Any, depth: int) -> Iterator[Fact]:
        if type(value) is int:
            yield path, value
        elif isinstance(value, _PLAIN):
            yield path, (type(value), value)
        elif isinstance(value, Tensor):
            yield path, (type(value), tuple(value.shape), value.dtype, value.requires_grad)
        elif isinstance(value, nn.Module):
            yield path, (type(value), self._names.get(id(value), id(value)))
        elif (held := _parts_of(value)) is not None and len(held) <= _MOST_ENTRIES and depth < _MOST_DEEP:
            yield path, (type(value), len(held))
            for key, each in held.items():
                yield from self._of((*path, key), each, depth + 1)
        elif isinstance(getattr(value, "__dict__", None), dict) and depth < _MOST_DEEP and not _is_apart(value):
            yield path, self._of_object(value, depth)
        else:
            yield path, (type(value), id(value))

    def _of_object(self, value: Any, depth: int) -> Any:
        """Return the facts of an object, found once, as many parts may share a configuration."""
        if id(value) not in self._memo:
            self._memo[id(value)] = id(value)  # for cycles
            facts = (fact for key, each in vars(value).items() for fact in self._of((key,), each, depth + 1))
            self._memo[id(value)] = type(value), frozenset(facts)
        return self._memo[id(value)]


def _is_apart(value: Any) -> bool:
    return isinstance(value, types.ModuleType) or type(value).__module__.startswith("torch.distributed")


def _parts_of(value: Any) -> dict[Any, Any] | None:
    """Return the contents of a container, or the code and captured values of a function, by key."""
    if isinstance(value, types.FunctionType):
        cells = [cell for cell in value.__closure__ or () if cell != types.CellType()]
        contents = [cell.cell_contents for cell in cells]
        return {"code": value.__code__, "with": [value.__defaults__, value.__kwdefaults__, contents]}
    if isinstance(value, types.MethodType):
        return {"function": value.__func__, "of": value.__self__}
    if isinstance(value, functools.partial):
        return {"function": value.func, "with": [value.args, value.keywords]}
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    return dict(enumerate(value)) if isinstance(value, (list, tuple, deque)) else None
