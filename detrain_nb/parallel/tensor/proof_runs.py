"""One pass of a module, forward and backward, and how it differs from that of the whole module."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..operators import tensors_of
from ..recorders import OperatorRecorder
from .copies import copied_or_shared
from .kept_values import Kept, changed, copies_of_kept, is_close
from .layer_flow import float_outputs
from .plan import TensorPlan
from .ranks import cut

OTHER_OUTPUT = "its output differs"

# Relative to the largest value; models compute in float32 in places whatever their dtype, with errors of 1e-7.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
# Relative to the largest gradient: softmax cancels the bias of keys, so its gradient is only rounding.
_ZERO_BUT_FOR_ROUNDING = 1e-2
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Run:
    """One forward and backward pass of a module, with its outputs and gradients."""

    def __init__(
        self, module: nn.Module, call: Call, dtype: torch.dtype, unread: Collection[int], reference: Run | None = None
    ) -> None:
        self.module, self.dtype, self.reference = module, dtype, reference
        self.modes = [part.training for part in module.modules()]
        self._unread = unread
        self._looks = _Looks()
        self._given = call
        self.outputs: list[Tensor] = []
        self.gradients: dict[str, Tensor | None] = {}
        self.kept: dict[str, Kept] = {}
        self.written: list[str] = []
        self.other_each_time: set[str] = set()  # numbers such as times
        leaves, spec = tree_flatten(call)
        self._inputs = {}
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                leaves[index] = copied_or_shared(leaf)
                continue
            mine = leaf.detach().to(dtype if leaf.is_floating_point() else leaf.dtype, copy=True)
            if leaf.requires_grad:
                self._inputs[f"input {index}"] = mine.requires_grad_(True)
                mine = mine.view_as(mine)  # so that it can be written into
            leaves[index] = mine
        self._call: Call = tree_unflatten(leaves, spec)

    def again(self, module: nn.Module) -> Run:
        """Return a new run of ``module`` with this one's call."""
        return Run(module, self._given, self.dtype, self._unread)

    def look(self) -> Run:
        """Run the forward without gradients, and note the results."""
        args, kwargs = self._call
        before = copies_of_kept(self.module)
        with _WithoutDropout(), self._looks:
            result = self.module(*args, **kwargs)
        self.kept = copies_of_kept(self.module)
        self.written = changed(before, self.kept)
        self.outputs = [each for index, each in enumerate(float_outputs(result)) if index not in self._unread]
        if self.reference is not None:
            shapes, expected = ([tuple(each.shape) for each in run.outputs] for run in (self, self.reference))
            if shapes != expected:
                raise ValueError(f"it returns {shapes} instead of {expected}")
        return self

    def go(self) -> Run:
        self.look()
        self._backward()
        return self

    def _backward(self) -> None:
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in self.outputs]
        parameters = dict(self.module.named_parameters())
        wanted = {**self._inputs, **parameters}
        total = sum(((w * each).sum() for w, each in zip(weights, self.outputs) if each.requires_grad), torch.zeros(()))
        if total.requires_grad:
            found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
            self.gradients = {
                name: gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
                for name, gradient in zip(wanted, found)
            }

    def compare_times(self, other: Run) -> None:
        """Leave out numbers that differ in ``other``, a run of the same module."""
        numbers = {name: each for name in self.written if isinstance(each := self.kept[name], float)}
        self.other_each_time |= {name for name, each in numbers.items() if other.kept.get(name) != each}

    def compare(self, plan: TensorPlan, rank: int) -> str | None:
        """Return the first difference from the whole module, or None."""
        assert self.reference is not None
        if not self._looks.are_like(self.reference._looks):
            return "its code reads a value that differs in a part"
        for output, expected in zip(self.outputs, self.reference.outputs):
            if not _is_close(output, expected, self.dtype):
                error, tolerance = _error_of(output, expected), TOLERANCES[self.dtype]
                return f"{OTHER_OUTPUT} from the unsplit module (error {error:.0e}, tolerance {tolerance:.0e})"
        layouts = plan.layouts_by_name
        gradients = [each for each in self.reference.gradients.values() if each is not None and each.numel()]
        least = _ZERO_BUT_FOR_ROUNDING * max((float(each.abs().max()) for each in gradients), default=0.0)
        for name, gradient in self.reference.gradients.items():
            layout, mine = layouts.get(name), gradient
            if gradient is not None and layout is not None:
                mine = cut(gradient, layout.dim, rank=rank, size=plan.tp, packed=layout.packed)
            if not _is_close(self.gradients.get(name), mine, self.dtype, least=least):
                return f"the gradient of {name} differs"
        names = dict.fromkeys((*self.reference.written, *self.written))
        for name in [name for name in names if name not in self.reference.other_each_time]:
            if not is_close(self.kept.get(name), self.reference.kept.get(name), tolerance=TOLERANCES[self.dtype]):
                return f"the values that its forward writes into {name} differ"
        return None


def _is_close(found: Tensor | None, expected: Tensor | None, dtype: torch.dtype, *, least: float = 0.0) -> bool:
    """Compare relative to the largest of ``expected``, which counts as at least ``least``."""
    if found is None or expected is None:
        some = found if found is not None else expected
        return some is None or not bool(some.any())
    if found.shape != expected.shape:
        return False
    if not expected.numel():
        return True
    found, expected = found.detach().double(), expected.detach().double()
    scale = max(float(expected.abs().max()), least)
    return bool((found - expected).abs().max() <= TOLERANCES[dtype] * scale + 1e-12)


def _error_of(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest of ``expected``, unless that is zero. Shapes are equal."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max()) / (float(expected.abs().max()) or 1.0)


class _WithoutDropout(TorchFunctionMode):
    """Mode without dropout, also in training."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args, kwargs = args[:4], {**kwargs, **dict(zip(("is_causal",), args[5:6])), "dropout_p": 0.0}
        return func(*args, **kwargs)


_DROPOUTS: set[Any] = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
_DROPOUTS |= {torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout}


class _Looks(OperatorRecorder[Tensor]):
    """Record of the values that the code reads, and the sums of what they were compared from."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self._behind: dict[int, float] = {}  # by number: large tensors of floats get none

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        tensors = tensors_of(args, kwargs)
        if torch.Tag.data_dependent_output in func.tags and isinstance(result, (bool, int, float)):
            self.seen.extend((float(result), *(self._sum_behind(tensor) for tensor in tensors)))
        for made in tensors_of((result,)):  # comparisons and argmax may agree for other values
            if not made.is_floating_point() and not made.is_complex():
                self._behind[self.number(made)] = sum(map(self._sum_behind, tensors))

    def _sum_behind(self, tensor: Tensor) -> float:
        if tensor.is_floating_point() and not tensor.is_meta:
            return float(tensor.detach().double().nan_to_num().abs().sum())
        return self._behind.get(self.known(tensor), 0.0)

    def are_like(self, others: _Looks) -> bool:
        """Return whether as many values were seen, equal except for rounding."""
        pairs = itertools.zip_longest(self.seen, others.seen, fillvalue=math.inf)
        return all(math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-9) for one, other in pairs)
