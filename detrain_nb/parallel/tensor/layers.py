"""Behaviour of a model's modules when each of several ranks holds a part of them.

A module gets a class that derives from its own: it runs the user's forward on this rank's part of the parameters, with
communication before and after it. While the model runs, ``module.weight`` is what this rank computes with: its part
inside the layer that was cut, the whole for all other code. At other times it is the parameter itself, and so always
are ``parameters()`` and ``state_dict()``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...errors import SpecError
from ..module_copies import make_subclass
from ..recording import without_fused_layers
from .plan import Layout
from .ranks import TensorRanks, add_up, add_up_gradients, bounds, once, put_together

Change = Callable[[Tensor], Tensor]


class Region:
    """Depth of the model's nested calls, and the random numbers of a training step, equal on all ranks."""

    def __init__(self, seed: int | None) -> None:
        self.depth = 0
        self.draws = 0  # calls with random numbers of their own
        self._seed = seed

    @contextlib.contextmanager
    def entered(self, module: nn.Module) -> Iterator[None]:
        with self._begun(module) if self.depth == 0 else contextlib.nullcontext():
            self.depth += 1
            try:
                yield
            finally:
                self.depth -= 1

    @contextlib.contextmanager
    def _begun(self, module: nn.Module) -> Iterator[None]:
        is_training = module.training and not _is_in_backward()
        with without_fused_layers(), self._seeded(module) if is_training else contextlib.nullcontext():
            try:
                yield
            except RuntimeError as exc:
                if "autograd.Function with functorch transforms" in str(exc):
                    raise SpecError(
                        "the model's code calls its layers under a torch.func transform (vmap, grad), which cannot "
                        "handle the parameters that tp lays out: keep the model whole (use dp_replicate instead of "
                        "tp), or call the layers without the transform"
                    ) from exc
                if "mixed torch.Tensor and DTensor" not in str(exc):
                    raise
                raise SpecError(
                    "the model's code computes with parameters that it did not read as module attributes but, for "
                    "example, from parameters(), where each is a DTensor: read self.weight, or return the result "
                    "computed from them separately"
                ) from exc

    @contextlib.contextmanager
    def _seeded(self, module: nn.Module) -> Iterator[None]:
        """Give each call random numbers of its own; the user's random state continues as if nothing had been drawn.

        A checkpoint itself restores the numbers for what it repeats in the backward pass.
        """
        if self._seed is None:
            yield
            return
        self.draws += 1
        device = next((p.device for p in module.parameters() if p.device.type == "cuda"), None)
        with torch.random.fork_rng([] if device is None else [device]):
            seed = (self._seed + self.draws * 0x9E3779B97F4A7C15) % 2**63
            torch.default_generator.manual_seed(seed)
            if device is not None:
                torch.cuda.manual_seed(seed)
            yield


@dataclass
class Share:
    """State of a module's part. ``before`` and ``after``: changes to its input and its output.

    ``layouts``: of the parameters that it uses in part; ``cuts``: of all cut parameters, with their whole size.
    ``arguments`` and ``outputs``: changes to these places instead. ``summed``: parameters whose gradients are summed,
    if not all are (``is_summed``). ``once``: parameters that are added before a sum.
    """

    ranks: TensorRanks
    region: Region
    layouts: dict[str, Layout] = field(default_factory=dict)
    cuts: dict[str, tuple[Layout, int]] = field(default_factory=dict)
    before: list[Change] = field(default_factory=list)
    after: list[Change] = field(default_factory=list)
    arguments: dict[int | str, Change] = field(default_factory=dict)
    outputs: dict[int, Change] = field(default_factory=dict)
    summed: set[str] = field(default_factory=set)
    once: set[str] = field(default_factory=set)
    is_every_input: bool = False  # whether ``before`` applies to all float inputs, not only the first
    is_summed: bool = False
    is_row: bool = False
    num_rows: int = 0
    running: int = 0

    def see(self, name: str, parameter: Tensor) -> Tensor:
        """Return what the model's code gets for a parameter while it runs."""
        local = self.ranks.local(parameter, self.cuts[name][0].dim if name in self.cuts else None)
        if local is None:
            return parameter
        if name in self.cuts:
            layout, total = self.cuts[name]
            if not (self.running and name in self.layouts):
                return put_together(local, self.ranks, dim=layout.dim, total=total, packed=layout.packed)
            return local
        if self.is_row and self.running and name == "bias":
            return torch.zeros_like(local)  # it is added once, after the sum
        if self.running and name in self.once:
            return once(local, self.ranks)
        return add_up_gradients(local, self.ranks) if self.is_summed or name in self.summed else local

    def change_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs)
        changed = {place: change(given[place]) for place, change in self.arguments.items() if place in given}
        if self.before:
            left = {place: value for place, value in given.items() if place not in changed}
            changed |= _change_floats(left, self.before, is_first_only=not self.is_every_input)
        given |= changed
        return tuple(given[place] for place in range(len(args))), {key: given[key] for key in kwargs}


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _Part(nn.Module):
    """Base that the class of every module of the model puts before the user's own class."""

    _share: Share

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._share.region.entered(self):
            return super().__call__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, Tensor) and name in self._parameters:  # or a replacement by functional_call
            share: Share = self.__dict__["_share"]
            if share.region.depth or _is_in_backward():  # a checkpointed function is repeated without its module
                return share.see(name, value)
        return value


class _ChangedPart(_Part):
    """Part that communicates before or after its forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        share = self._share
        if share.before or share.arguments:
            args, kwargs = share.change_inputs(args, kwargs)
        share.running += 1
        try:
            result = super().forward(*args, **kwargs)
        finally:
            share.running -= 1
        if share.after:
            result = _change_floats(result, share.after, is_first_only=True)
        return _change_outputs(result, share.outputs) if share.outputs else result


class _RowPart(_ChangedPart):
    """Part whose outputs are summed over the ranks; then the bias is added."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)
        bias = self.bias
        return result if bias is None else result + bias.to(result.dtype)


class _VocabularyPart(_Part):
    """Part with the rows of some tokens; the others' rows come from the other ranks."""

    padding_idx: int | None

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        share = self._share
        begin, end = bounds(share.num_rows, rank=share.ranks.rank, size=share.ranks.size)
        is_here = (tokens >= begin) & (tokens < end)
        padding, share.running = self.padding_idx, share.running + 1
        if padding is not None:
            self.padding_idx = padding - begin if begin <= padding < end else None
        try:
            rows = super().forward(torch.where(is_here, tokens - begin, 0), *args, **kwargs)
        finally:
            self.padding_idx, share.running = padding, share.running - 1
        return add_up(rows.masked_fill(~is_here.unsqueeze(-1), 0), share.ranks)


class _RecurrentPart(_Part):
    """Part of a torch recurrent layer, which also keeps its parameters in a list."""

    @property
    def _flat_weights(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.__dict__["_flat_weights_names"]]

    @_flat_weights.setter
    def _flat_weights(self, _: list[Tensor]) -> None: ...


def _change_floats(tree: Any, changes: list[Change], *, is_first_only: bool) -> Any:
    """Change float tensors; the first one is the activation, unlike masks and positions."""
    leaves, spec = tree_flatten(tree)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            for change in changes:
                leaf = change(leaf)
            leaves[index] = leaf
            if is_first_only:
                break
    return tree_unflatten(leaves, spec)


def _change_outputs(tree: Any, changes: dict[int, Change]) -> Any:
    leaves, spec = tree_flatten(tree)
    floats = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    for place, change in changes.items():
        leaves[floats[place]] = change(leaves[floats[place]])
    return tree_unflatten(leaves, spec)


def change_class(module: nn.Module, share: Share) -> None:
    base = type(module)
    kind: type[nn.Module] = _Part
    if isinstance(module, nn.RNNBase):
        kind = _RecurrentPart
        module.__dict__.pop("_flat_weights", None)
    elif share.num_rows:
        kind = _VocabularyPart
    elif share.is_row:
        kind = _RowPart
    elif any((share.layouts, share.before, share.after, share.arguments, share.outputs, share.once)):
        kind = _ChangedPart
    # Reuse a class that a module already has, known to its base; classes are not kept for later modules.
    owner = next((each for each in type.__subclasses__(base) if kind in each.__bases__), None)
    owner = owner or make_subclass(base, base.__name__, {"__module__": base.__module__}, kind)
    try:
        module.__class__ = owner
    except TypeError as exc:  # the layout differs with another base, such as ABC, before nn.Module
        if kind is not _Part or module._parameters:
            raise SpecError(
                f"tp cannot cut a {base.__name__} ({exc}): make nn.Module the first base of its class"
            ) from exc
