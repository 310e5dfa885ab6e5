"""One batch on its way through a model: its parts, and losses weighed so that they add up to the whole batch's."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from ..errors import SpecError
from .costs.profiler import count_rows
from .kept import random_state_kept
from .losses import name_of_torchs, require_loss, require_one_number, require_target_of, told
from .mesh import replica_number
from .operators import OperatorMode

__all__ = [
    "Loss",
    "Objective",
    "Passage",
    "cut_batch",
    "cut_call",
    "lists_in",
    "loss_on_parts",
    "require_rows_in_tensors",
    "rows_of",
]

Loss = Callable[[Any, Any], Tensor]


class Objective:
    """A loss, and how much each part of a batch counts in it: here, and on the replicas that have other data."""

    def __init__(
        self,
        loss: Loss | None,
        weight_of: Callable[[Any], Tensor | float] | None = None,
        *,
        replicas: Sequence[dist.ProcessGroup] = (),
        device: torch.device | str = "cpu",
        is_in_parts: bool = False,
    ) -> None:
        """``weight_of(target)``: how much counts there, by default rows, or targets that are not ``ignore_index``.

        ``replicas``: this rank's group on each axis of the mesh along which ranks have other data. ``is_in_parts``: of
        the model's output each rank has its part of the classes.
        """
        require_loss(loss)
        self.loss = loss
        self.compute = loss_on_parts(loss) if is_in_parts and loss is not None else told(loss)
        self._weight_of = weight_of or _usual_weight(loss)
        self._has_own_weight = weight_of is not None
        reduction = _option(loss, "reduction") or "mean"
        if reduction == "none":
            raise SpecError(
                "the loss gives a number for each target (reduction='none'): give one that adds or averages"
            )
        self._is_sum = reduction == "sum"
        self._is_known = loss is None or self._is_sum or is_in_parts or bool(name_of_torchs(loss))
        self._one_row: tuple[Any, Any] | None = None  # of the first part, where parts have no more
        self.ignore_index: int | None = _ignored_by(loss)
        self.replicas = replicas
        self.num_replicas = math.prod(dist.get_world_size(group) for group in replicas)
        self._device = device

    @property
    def replica(self) -> int:
        """This rank's number among them."""
        return replica_number(self.replicas)

    def require_target(self, target: Any) -> None:
        """Raises: SpecError where it is none for this loss: the last stage alone would fail, or the backward pass."""
        if target is None and self._has_own_weight:
            raise SpecError("loss_weight looks at the target, and there is none: give it with the batch, on every rank")
        if name := name_of_torchs(self.loss):
            require_target_of(name, target)

    def weigh(self, targets: Sequence[Any]) -> list[float]:
        """Return what the loss of each part counts. Gradients of replicas are averaged later: hence their number here.

        Collective: the replicas.
        """
        if self._is_sum:
            return [float(self.num_replicas)] * len(targets)
        if not any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves(targets[0])):
            return [1.0 / len(targets)] * len(targets)
        found = (self._weight_of(target) for target in targets)
        place = self._device if self.replicas else None  # None: where each is
        counts = torch.stack([torch.as_tensor(each, dtype=torch.double, device=place) for each in found])
        whole = float(self._sum_over_replicas(counts.sum()))
        return [each * self.num_replicas / whole if whole > 0 else 0.0 for each in counts.tolist()]

    def looker(self, num_parts: int) -> Callable[[Any, Any], None] | None:
        """Return what looks at outputs and targets; None where it is known, or does not matter, what the loss is of.

        It calls the loss again, on every replica: it may gather what they have.
        """
        return None if self._is_known or num_parts * self.num_replicas == 1 else self._look

    def _look(self, output: Any, target: Any) -> None:
        """Warn of a loss that is, of a batch, not the mean of those of its parts."""
        given = (output, target)
        if self._is_known or any(isinstance(leaf, DTensor) for leaf in tree_leaves(given)):
            return
        rows = count_rows(target) or count_rows(output)
        if rows == 1 and self._one_row is None:
            self._one_row = given
            return
        if rows == 1:
            given, rows = tree_map(_joined, self._one_row, given), 2
        self._is_known, self._one_row = True, None
        parts = [tree_map(functools.partial(_rows, rows=rows, part=part), given) for part in _halves(rows)]
        try:
            with torch.no_grad(), random_state_kept(torch.device(self._device)):
                with _Collectives() as collectives:
                    again = require_one_number(self.compute(*given))
                whole = self.sums(*given, rows=rows)
                sums, weights = (torch.stack(each) for each in zip(*(self.sums(*part, rows=rows) for part in parts)))
        except Exception:  # noqa: BLE001 - it cannot be cut there: who trains with it sees that, or does not need it
            return
        found, expected = (float(total / weight) for total, weight in (whole, (sums.sum(), weights.sum())))
        rough = (leaf.dtype in _ROUGH for leaf in tree_leaves((again, given)) if isinstance(leaf, Tensor))
        is_rough = torch.is_autocast_enabled(torch.device(self._device).type) or any(rough)
        is_close = math.isclose(found, expected, rel_tol=2e-2 if is_rough else 2e-4, abs_tol=1e-7)
        is_random = not math.isclose(found, float(again), rel_tol=1e-6)
        is_gathered = collectives.are_met  # it is of the rows of all replicas: of other ones, in parts
        if is_close or is_random or is_gathered or self.replica or not math.isfinite(found - expected):
            return
        warnings.warn(
            f"the loss of a batch is not the mean of the losses of its parts: for {rows} rows it is {found:.5g}, from "
            f"two parts of these {expected:.5g}. Each microbatch and each replica computes its own, so that something "
            "else is trained than on one rank: give loss_weight= where targets count differently; where the loss "
            "compares rows, keep them together (num_microbatches=1, and no dp axis)",
            stacklevel=2,
        )

    def sums(self, output: Any, target: Any, *, rows: int) -> tuple[Tensor, Tensor]:
        """Return the loss of one part, as a sum over what counts in it, and how much that is; without gradients.

        Of a loss that is a sum, or looks at no target, rows count.
        """
        assert self.compute is not None
        has_rows = any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves(target))
        weight = torch.as_tensor(self._weight_of(target) if has_rows else rows).detach().float()
        loss = _plain(require_one_number(self.compute(output, target)).detach()).float()
        weight = weight.to(loss.device)
        return torch.where(weight > 0, loss if self._is_sum else loss * weight, 0.0), weight

    def over_replicas(self, loss: Tensor | None) -> Tensor | None:
        """Return the loss of the whole batch from that of this rank's part, as it was weighed. Collective: replicas."""
        if loss is None or not self.replicas:
            return loss
        return (self._sum_over_replicas(loss) / self.num_replicas).to(loss.dtype)

    def common_rows(self, rows: int) -> int:
        """Return what divides the rows of every replica: in as many parts all of them are cut, or shards would wait.

        Collective: the replicas.
        """
        for group in self.replicas:
            mine = torch.tensor([rows], device=self._device)
            every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(every, mine, group=group)
            rows = math.gcd(*(int(each) for each in every))
        return rows

    def add_up(self, tensor: Tensor) -> Tensor:
        """Add a tensor up over the replicas, in place. Collective: the replicas."""
        for group in self.replicas:
            dist.all_reduce(tensor, group=group)
        return tensor

    def _sum_over_replicas(self, value: Tensor) -> Tensor:
        return self.add_up(value.detach().double().clone()) if self.replicas else value


class _Collectives(OperatorMode):
    """Notes whether ranks are asked for something."""

    are_met = False

    def on_operator(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self.are_met |= "c10d" in func.namespace
        return func(*args, **kwargs)


_ROUGH = (torch.bfloat16, torch.float16)


def _detached(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def _halves(rows: int) -> tuple[slice, slice]:
    return slice(0, rows // 2), slice(rows // 2, rows)


def _rows(leaf: Any, *, rows: int, part: slice) -> Any:
    return leaf[part] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows else leaf


def _option(loss: Loss | None, name: str) -> Any:
    """What a loss was made with: a module, or a function with some of its arguments."""
    return loss.keywords.get(name) if isinstance(loss, functools.partial) else getattr(loss, name, None)


def _ignored_by(loss: Loss | None) -> int | None:
    """The target that does not count in it, if there is one."""
    ignored: int | None = _option(loss, "ignore_index")
    inner = loss.func if isinstance(loss, functools.partial) else loss
    return -100 if ignored is None and inner in (F.cross_entropy, F.nll_loss) else ignored


def _usual_weight(loss: Loss | None) -> Callable[[Any], Tensor | float]:
    """How much counts in a target, for losses that leave some of it out, or weigh its classes; else its rows."""
    ignored, class_weights = _ignored_by(loss), _option(loss, "weight")
    if ignored is None:
        return lambda target: float(rows_of(target))

    def count(target: Any) -> Tensor:
        targets = next(leaf for leaf in tree_leaves(target) if isinstance(leaf, Tensor) and leaf.dim())
        if targets.is_floating_point():  # a share for each class
            return torch.tensor(float(rows_of(target)))
        if class_weights is None:
            return torch.count_nonzero(targets != ignored)
        counts: Tensor = class_weights[targets[targets != ignored]]
        return counts.sum()

    return count


class Passage:
    """One batch on its way: its parts, and what the last stage makes of them."""

    def __init__(
        self,
        parts: Sequence[Any],
        targets: Sequence[Any],
        weights: Sequence[float],
        loss: Loss | None,
        look: Callable[[Any, Any], None] | None = None,
    ) -> None:
        """Without ``weights`` outputs are kept, and no loss is made of them. ``look`` sees what a loss is made of."""
        self.parts = parts
        self._targets = targets
        self._weights = weights
        self._loss = loss
        self._look = look
        self._noted: list[tuple[Any, Any]] = []
        self._losses: dict[int, Tensor] = {}
        self._outputs: dict[int, Any] = {}

    @property
    def loss(self) -> Tensor | None:
        """Over all parts, plain also where each rank has its part of the classes; None where no last stage is."""
        losses = [_plain(loss.detach()) for loss in self._losses.values()]
        return torch.stack(losses).sum() if losses else None

    def output(self) -> Any:
        """Of all parts; None where no last stage is. Of a number without rows, as a loss, the mean over the parts."""
        if not self._outputs:
            return None
        outputs = [self._outputs[index] for index in range(len(self.parts))]
        if len(outputs) == 1:
            return outputs[0]
        _require_rows_first(outputs[0], count_rows(self.parts[0]))
        return tree_map(_joined, *outputs)

    def take(self, index: int, output: Any) -> None:
        """What the model gave for a part; with a target the loss is what stays of it."""
        if not self._weights:
            self._outputs[index] = output
            return
        assert self._loss is not None
        weight = self._weights[index]
        if weight > 0:
            self._losses[index] = require_one_number(self._loss(output, self._targets[index])) * weight
            self._note(output, self._targets[index])
        else:  # a mean of nothing, where all is ignored: its gradient would be no number
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            self._losses[index] = torch.stack([0.0 * leaf.nan_to_num().float().sum() for leaf in leaves]).sum()

    def _note(self, output: Any, target: Any) -> None:
        if self._look is not None and len(self._noted) < 2:
            self._noted.append(_detached((output, target)))

    def look_at_loss(self) -> None:
        """Have what a loss was made of seen, of two parts at most, when nothing of this batch can fail any more."""
        for noted in self._noted:
            assert self._look is not None
            self._look(*noted)

    def weighted_loss(self, index: int) -> Tensor:
        return self._losses[index]


def rows_of(tree: Any) -> int:
    """The batch's size: the first dimension of the first tensor that has one. Raises: SpecError."""
    rows = count_rows(tree)
    if not rows:
        raise SpecError(
            "a batch without rows, or without a tensor that is found: give tensors, or tuples, lists and dicts of "
            "them; what is in a dataclass is known once torch.utils._pytree.register_dataclass has its class"
        )
    return rows


def require_rows_in_tensors(tree: Any, *, rows: int, lengths: Mapping[str, int] | None = None) -> None:
    """``lengths``: of the lists in the example. Raises: SpecError for a list that has an entry for each row.

    Only tensors are cut: every microbatch would get all of it.
    """
    for place, found in lists_in(tree):
        is_other = lengths is not None and len(found) != lengths.get(place, len(found))
        is_of_tensors = any(isinstance(each, Tensor) and each.dim() for each in found)
        if is_other or len(found) == rows > 1 and not is_of_tensors:
            kind = type(found).__name__
            raise SpecError(
                f"the batch has a {kind} of {len(found)} entries ({place or 'its arguments'}), one for each of "
                f"its {rows} rows, and only tensors are cut into microbatches: give a tensor (padded where rows "
                "differ), a tuple where it is not of the rows, or num_microbatches=1"
            )


def lists_in(tree: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Lists and numpy arrays, by where they are."""
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
    """Raises: SpecError for what cannot be put together from what the parts of ``rows`` gave."""
    for path, leaf in tree_flatten_with_path(output)[0]:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            continue
        if len(leaf) % rows or len(leaf) != rows and leaf.dim() > 2 and leaf.shape[1] == rows:
            raise SpecError(
                f"output{keystr(path)} of the model is {tuple(leaf.shape)} for {rows} rows: outputs of microbatches "
                "are put together along the first dimension, which is not that of the rows: return it with the rows "
                "first, or use num_microbatches=1"
            )


def cut_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, count: int, **options: Any
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each part, cut as by `cut_batch`; of a flat call, as a rule, no tree is made."""
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
    """``count`` equal parts, on ``device``; what does not have the batch's first dimension is in each.

    And so is what stands where ``shared`` says, in a call that has ``tree`` at ``place``: a mask of (T, T), where T may
    be the number of rows too.
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
    """Equal parts, into which a model may write: into views that are made together autograd lets nobody.

    Each counts by itself how often it was written into: with one count for all a graph of another part would be void.
    """
    if count == 1:
        return [tensor]
    pieces = tensor.chunk(count)
    return pieces if tensor.requires_grad else [piece.data for piece in pieces]


def _plain(tensor: Tensor) -> Tensor:
    """Of a DTensor the whole. Collective: the ranks that have its parts."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _joined(*leaves: Any) -> Any:
    if not isinstance(leaves[0], Tensor):
        return leaves[0]
    if leaves[0].dim():
        return torch.cat(leaves)
    return torch.stack(leaves).mean() if leaves[0].is_floating_point() else leaves[0]


def loss_on_parts(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``loss``, which says what it lacks where the output of the model stays in parts (``loss_parallel``).

    It, and the backward pass, run under `torch.distributed.tensor.parallel.loss_parallel`. Raises: SpecError.
    """

    def run(output: Any, *target: Any) -> Tensor:
        if not isinstance(output, DTensor):
            return loss(output, *target)
        try:
            return loss(output, *target)
        except (RuntimeError, NotImplementedError) as exc:
            parts = f"{output.shape[-1]} classes over {output.device_mesh.size()} ranks"
            said = str(exc).strip().splitlines()[0]
            raise SpecError(
                f"the loss needs the whole output, of which each rank has its part ({parts}): use cross entropy, under "
                f"torch's loss_parallel(), or plan without loss_parallel; torch says: {said}"
            ) from exc

    return run
