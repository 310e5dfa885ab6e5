"""One batch on its way through a model: cutting it into parts, and joining their outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

from ..errors import SpecError
from .costs.profiler import count_rows
from .losses import Loss, require_one_number


class Passage:
    """One batch on its way: its parts, and what the last stage computes from them."""

    def __init__(
        self,
        parts: Sequence[Any],
        targets: Sequence[Any],
        weights: Sequence[float],
        loss: Loss | None,
        look: Callable[[Any, Any], None] | None = None,
    ) -> None:
        """Without ``weights``, outputs are kept and no loss is computed; ``look`` is called with inputs of the loss."""
        self.parts = parts
        self._targets = targets
        self._weights = weights
        self._loss = loss
        self._look = look
        self._noted: list[tuple[Any, Any]] = []
        self.losses: dict[int, Tensor] = {}  # weighted, by part
        self._outputs: dict[int, Any] = {}

    @property
    def loss(self) -> Tensor | None:
        """Loss over all parts, plain even if each rank has some of the classes; None without the last stage."""
        losses = [plain(loss.detach()) for loss in self.losses.values()]
        return torch.stack(losses).sum() if losses else None

    def output(self) -> Any:
        """Return the output of all parts, or None on ranks without the last stage.

        For a number without rows, such as a loss, the mean over the parts is returned.
        """
        if not self._outputs:
            return None
        outputs = [self._outputs[index] for index in range(len(self.parts))]
        if len(outputs) == 1:
            return outputs[0]
        _require_rows_first(outputs[0], count_rows(self.parts[0]))
        return tree_map(joined, *outputs)

    def take(self, index: int, output: Any) -> None:
        """Take the model's output for a part: keep it, or with weights only its loss."""
        if not self._weights:
            self._outputs[index] = output
            return
        assert self._loss is not None
        weight = self._weights[index]
        if weight > 0:
            self.losses[index] = require_one_number(self._loss(output, self._targets[index])) * weight
            self._note(output, self._targets[index])
        else:  # all targets are ignored, and a mean of nothing has NaN gradients
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            self.losses[index] = torch.stack([0.0 * leaf.nan_to_num().float().sum() for leaf in leaves]).sum()

    def _note(self, output: Any, target: Any) -> None:
        if self._look is not None and len(self._noted) < 2:
            noted = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (output, target))
            self._noted.append(noted)

    def look_at_loss(self) -> None:
        """Call ``look`` with inputs of the loss, for at most two parts, after all that can fail in this batch."""
        for noted in self._noted:
            assert self._look is not None
            self._look(*noted)


def rows_of(tree: Any) -> int:
    """Return the batch size: the first dimension of the first tensor that has one. Raises: SpecError."""
    rows = count_rows(tree)
    if not rows:
        raise SpecError(
            "a batch without rows, or without a tensor that is found: give tensors, or tuples, lists and dicts of "
            "them; tensors in a dataclass are found after torch.utils._pytree.register_dataclass(its class)"
        )
    return rows


def require_rows_in_tensors(tree: Any, *, rows: int, lengths: Mapping[str, int] | None = None) -> None:
    """Raise SpecError if a list has an entry for each row: it is not cut, so every microbatch would get all of it.

    ``lengths``: of the lists in the example.
    """
    for place, found in lists_in(tree):
        is_other = lengths is not None and len(found) != lengths.get(place, len(found))
        is_of_tensors = any(isinstance(each, Tensor) and each.dim() for each in found)
        if is_other or len(found) == rows > 1 and not is_of_tensors:
            kind = type(found).__name__
            raise SpecError(
                f"the batch has a {kind} of {len(found)} entries ({place or 'its arguments'}), one for each of its "
                f"{rows} rows, but only tensors are cut into microbatches: give a tensor (padded if rows differ), a "
                "tuple if its entries are not rows, or num_microbatches=1"
            )


def lists_in(tree: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield lists and numpy arrays with their places."""
    if isinstance(tree, Mapping):
        for key, each in tree.items():
            yield from lists_in(each, f"{place}[{key!r}]")
    elif isinstance(tree, (list, tuple)):
        if isinstance(tree, list):
            yield place, tree
        for number, each in enumerate(tree):
            yield from lists_in(each, f"{place}[{number}]")
    elif type(tree).__name__ == "ndarray" and tree.ndim:
        yield place, tree


def _require_rows_first(output: Any, rows: int) -> None:
    """Raise SpecError if the outputs of parts with ``rows`` rows cannot be concatenated."""
    for path, leaf in tree_flatten_with_path(output)[0]:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            continue
        if len(leaf) % rows or len(leaf) != rows and leaf.dim() > 2 and leaf.shape[1] == rows:
            raise SpecError(
                f"output{keystr(path)} of the model has shape {tuple(leaf.shape)} for {rows} rows: outputs of "
                "microbatches are concatenated along the first dimension, which is not the rows here; return it with "
                "the rows first, or use num_microbatches=1"
            )


def cut_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, count: int, **options: Any
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments of each part, cut as in `cut_batch`; usually without building trees, as calls are flat."""
    in_order = [cut_batch(value, count=count, place=f"[0][{number}]", **options) for number, value in enumerate(args)]
    by_name = {key: cut_batch(value, count=count, place=f"[1][{key!r}]", **options) for key, value in kwargs.items()}
    return [
        (tuple(pieces[part] for pieces in in_order), {key: pieces[part] for key, pieces in by_name.items()})
        for part in range(count)
    ]


def cut_batch(
    tree: Any,
    *,
    rows: int,
    count: int,
    device: torch.device | None = None,
    shared: Collection[str] = (),
    place: str = "",
) -> Sequence[Any]:
    """Return ``count`` equal parts on ``device``; values without the batch's first dimension go into each part.

    So do the values at places in ``shared``, in a call that has ``tree`` at ``place``: for example a mask of (T, T),
    if T equals the number of rows.
    """

    def cut(leaf: Any, where: str) -> Sequence[Any]:
        if not isinstance(leaf, Tensor):
            return [leaf] * count
        leaf = leaf.to(device)
        return _cut(leaf, count) if leaf.dim() and len(leaf) == rows and where not in shared else [leaf] * count

    if isinstance(tree, Tensor):
        return cut(tree, place)
    leaves, spec = tree_flatten(tree)
    places = [place + keystr(path) for path, _ in tree_flatten_with_path(tree)[0]] if shared else [""] * len(leaves)
    pieces = [cut(leaf, where) for leaf, where in zip(leaves, places)]
    return [tree_unflatten(each, spec) for each in zip(*pieces)] if pieces else [tree] * count


def _cut(tensor: Tensor, count: int) -> Sequence[Tensor]:
    """Cut into equal parts into which a model may write: autograd forbids writes into views from one ``chunk``.

    Each part has its own version counter: with a common one, a write would invalidate the graphs of the other parts.
    """
    if count == 1:
        return [tensor]
    pieces = tensor.chunk(count)
    return pieces if tensor.requires_grad else [piece.data for piece in pieces]


def plain(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor. Collective: the ranks that have its parts."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def joined(*leaves: Any) -> Any:
    if not isinstance(leaves[0], Tensor):
        return leaves[0]
    if leaves[0].dim():
        return torch.cat(leaves)
    return torch.stack(leaves).mean() if leaves[0].is_floating_point() else leaves[0]
