"""The repeated parts of a model, such as its layers: the units of sharding, of computing again, of compiling."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

__all__ = ["StandIn", "blocks_of", "names_of_blocks", "parts_of_blocks"]


class StandIn(nn.Module):
    """Stands in a stage for a module of another one; what has such a part is no block."""


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """What stands in the outermost lists of modules; of a stage what belongs to it as a whole."""
    found = {id(block): block for block in _find_blocks(module)}  # one layer may be run many times
    inside = {id(part) for block in found.values() for part in block.modules() if part is not block}
    yield from (block for block in found.values() if id(block) not in inside)


def _find_blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1:
            for block in child:
                if isinstance(block, (nn.ModuleList, nn.ModuleDict)):
                    yield from _find_blocks(nn.ModuleList([block]) if len(block) == 1 else nn.Sequential(block))
                elif _is_unit(block):
                    yield block
        else:
            yield from _find_blocks(child)


def names_of_blocks(model: nn.Module) -> tuple[str, ...]:
    """The first name of each."""
    blocks = {id(block) for block in blocks_of(model)}
    return tuple(name for name, module in model.named_modules() if id(module) in blocks)


def parts_of_blocks(model: nn.Module) -> set[str]:
    """The names of all modules inside of blocks; a block itself is none."""
    names = {name: [part for part, _ in model.get_submodule(name).named_modules()] for name in names_of_blocks(model)}
    return {f"{name}.{part}" for name, parts in names.items() for part in parts if part}


def _is_unit(block: nn.Module) -> bool:
    return not any(isinstance(part, StandIn) for part in block.modules()) and next(block.parameters(), None) is not None
