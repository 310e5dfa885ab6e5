"""Blocks of a model that are alike: some of them are left out, and what they would hold is extrapolated."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .blocks import looks_of, names_of_blocks
from .recording import first_float_tensor
from .stubs import StageState, Stub

_FEWEST = 3  # blocks that run: the first, the last, and one between them


class UnlikeBlocks(Exception):
    """A block's output differs in form from its input, so no other block can be left out."""


class Skipping:
    """Callable that leaves out, in each row of equal blocks, all but the fewest plus ``extra`` of them.

    ``left_out``: the number of blocks left out, by row.
    """

    def __init__(self, extra: Sequence[int] = ()) -> None:
        self._extra = extra
        self.left_out: list[int] = []

    def __call__(self, module: nn.Module) -> None:
        for parent, keys in list(_rows(module)):
            extra = self._extra[len(self.left_out)] if len(self.left_out) < len(self._extra) else 0
            kept, skipped = keys[: _FEWEST + extra], keys[_FEWEST + extra :]
            self.left_out.append(len(skipped))
            if skipped:
                row = _Row()
                for key in kept:
                    parent._modules[key].register_forward_hook(row.note, with_kwargs=True)  # type: ignore[union-attr]
                for key in skipped:
                    parent._modules[key] = _Skipped(key, parent._modules[key], row)


class _Row:
    """The output of the last block of a row that ran, as a tree with one float tensor in it."""

    given: Any = None

    def note(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        argument = first_float_tensor(args, kwargs)
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if argument is None or len(tensors) != 1 or tensors[0].shape != argument.shape:
            raise UnlikeBlocks
        self.given = tree_map(lambda leaf: _HOLE if isinstance(leaf, Tensor) else leaf, output)


_HOLE = object()


class _Skipped(Stub):
    """Stand-in for a block that returns its input; its attributes are those of the block."""

    def __init__(self, name: str, block: Any, row: _Row) -> None:
        super().__init__(name, block, StageState(cut_in=None, cut_out=None, replaceable=frozenset(), outputs={}))
        self.__dict__["_row"] = row

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        argument = first_float_tensor(args, kwargs)
        return tree_map(lambda leaf: argument if leaf is _HOLE else leaf, self.__dict__["_row"].given)


def _rows(module: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """Yield rows of equal, consecutive blocks: their parent module and their names in it."""
    blocks = {name: module.get_submodule(name) for name in names_of_blocks(module)}
    looks = {id(blocks[name]): look for name, look in looks_of(blocks).items()}
    uses = Counter(id(parameter) for part in module.modules() for parameter in part.parameters(recurse=False))

    def look_of(entry: tuple[str, nn.Module | None]) -> Any:
        """Return the look of a block, or None if it must run: it is not a block, or it shares parameters."""
        _, child = entry
        is_alone = child is not None and all(uses[id(parameter)] == 1 for parameter in child.parameters())
        return looks.get(id(child)) if is_alone else None

    for parent in list(module.modules()):
        for look, entries in itertools.groupby(parent._modules.items(), look_of):
            row = [key for key, _ in entries]
            if look is not None and len(row) > 2 * _FEWEST + 1:  # it must hold the fewest blocks, plus one more
                yield parent, row
