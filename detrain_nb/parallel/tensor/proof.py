"""A tensor plan is proved before it is used: one process plays all ranks, in float64, beside the whole module.

Ranks are threads that run the very code that ranks of a mesh run; where these talk over the network, threads meet.
What is compared is every output, and the gradient of every input and of every parameter.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ..kept import state_kept
from ..stages.stubs import replace_tensors
from ..writes import values_kept
from .copies import copied, copied_or_shared
from .layer_flow import float_outputs
from .layout import lay_out
from .plan import Layout, TensorPlan
from .ranks import cut
from .shapes import Shapes, in_short

__all__ = ["Call", "Proof", "find_fault", "is_on_meta", "is_too_large", "keep_call"]

# Relative to the largest; models compute in float32 in places, whatever they are in, and are off by 1e-7 then.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
# Of the largest gradient: as that of the bias of keys is, which softmax takes away again.
_ZERO_BUT_FOR_ROUNDING = 1e-2
_MEETING_S = 60.0
_MOST_MADE_UP = 20_000_000  # parameters of a block on the meta device that get values, in float64, for each rank

Call = tuple[tuple[Any, ...], dict[str, Any]]


def keep_call(args: tuple[Any, ...], kwargs: dict[str, Any], has_gradient: Callable[[Tensor], bool]) -> Call:
    """The arguments of a call as they are now, on the CPU or on the meta device.

    ``has_gradient``: whether what is before the call wants the gradient of a tensor.
    """

    def keep(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copied_or_shared(leaf)
        kept = torch.empty_like(leaf) if leaf.is_meta else leaf.detach().to("cpu", copy=True)
        return kept.requires_grad_(leaf.is_floating_point() and has_gradient(leaf))

    kept: Call = tree_map(keep, (args, kwargs))
    return kept


def find_fault(module: nn.Module, plan: TensorPlan, call: Call, *, unread: Collection[int] = ()) -> str | None:
    """Why ``module`` is not the same over ``plan.tp`` ranks, or None: it is, for this call, with random weights."""
    return Proof(module, call, unread=unread).find_fault(plan)


class Proof:
    """Of plans for a module, which is left as it is; names in a plan are those in the module.

    ``unread``: outputs that nobody reads, by number. What cannot run in float64 is run in float32. Of what is too large
    to be given values, shapes alone are looked at.
    """

    def __init__(self, module: nn.Module, call: Call, *, unread: Collection[int] = ()) -> None:
        self._module, self._call, self._unread = module, call, unread
        self._whole: nn.Module | None = None
        self._references: list[_Run] = []
        self._fault = ""

    @functools.cached_property
    def shapes(self) -> Shapes:
        return Shapes(self._module, self._call, self._unread)

    def find_fault(self, plan: TensorPlan) -> str | None:
        """Why the module is not the same over ``plan.tp`` ranks, or None: it is, for this call, with random weights."""
        if is_too_large(self._module):
            return self.shapes.why_unknown or self.shapes.find_fault(plan)
        with state_kept(self._module, self._call):
            return self._find_fault(plan)

    def _find_fault(self, plan: TensorPlan) -> str | None:
        self._run_whole()
        faults = (self._find_fault_in_mode(plan, reference) for reference in self._references)
        return self._fault or next((fault for fault in faults if fault is not None), None)

    def _find_fault_in_mode(self, plan: TensorPlan, reference: _Run) -> str | None:
        whole = self._whole
        assert whole is not None
        _set_modes(whole, reference.modes)
        meeting = _Meeting(plan.tp)
        runs = [
            _Run(_laid_out(whole, plan, meeting, rank), self._call, reference.dtype, self._unread, reference)
            for rank in range(plan.tp)
        ]
        with ThreadPoolExecutor(plan.tp) as pool:
            faults = list(pool.map(lambda rank: _fault_of_rank(runs[rank], meeting, plan, rank), range(plan.tp)))
        found = [fault for fault in faults if fault is not None]
        return next((fault for fault in found if fault != _LEFT_ALONE), found[0]) if found else None

    def _run_whole(self) -> None:
        if self._whole is not None or self._fault:
            return
        self._call = _with_values(self._call)
        try:
            self._whole = _copy_with_random_weights(self._module)
        except Exception as exc:  # noqa: BLE001 - an object of the user's may raise anything
            self._fault = f"it cannot be copied: {in_short(exc)}"
            return
        with state_kept(self._whole):
            reference, self._fault = _reference(self._whole, self._call, self._unread)
            if reference is not None:
                modes = [part.training for part in self._module.modules()]
                self._references = [reference, *_reference_in_modes(self._whole, modes, reference)]


def _reference(whole: nn.Module, call: Call, unread: Collection[int]) -> tuple[_Run | None, str]:
    """The whole module's outputs and gradients, in the first precision in which there are any; or why there are none.

    Masks of the smallest float64 number are infinite to a model that computes softmax in float32.
    """
    fault = ""
    for dtype in TOLERANCES:
        try:
            found = _Run(whole.to(dtype), call, dtype, unread).go()
        except Exception as exc:  # noqa: BLE001 - the user's code, in another precision than it was written for
            fault = f"it does not run on the CPU in {str(dtype).removeprefix('torch.')}: {in_short(exc)}"
            continue
        if not found.gradients:
            return None, "its outputs have no gradients"
        tensors = [*found.outputs, *(each for each in found.gradients.values() if each is not None)]
        if not any(bool(each.isnan().any()) for each in tensors):
            return found, ""
        fault = "its outputs, or their gradients, are not numbers"
    return None, fault


def _reference_in_modes(whole: nn.Module, modes: list[bool], evaluated: _Run) -> list[_Run]:
    """As the user has the model, which trains as a rule: one run, where it computes something else than evaluating.

    No run where it has random numbers in it that are no dropout's: no other would be like it.
    """
    if not any(modes):
        return []
    _set_modes(whole, modes)
    with values_kept(list(whole.buffers())):
        try:
            with torch.no_grad():
                first = evaluated.again(whole).look()
            if _are_equal(first, evaluated):
                return []
            found = evaluated.again(whole).go()
        except Exception:  # noqa: BLE001 - the user's code: it trains in another way than it is called here
            return []
    return [found] if _are_equal(first, found) else []


def _are_equal(one: _Run, other: _Run) -> bool:
    return all(torch.equal(*pair) for pair in zip(one.outputs, other.outputs))


def _set_modes(module: nn.Module, modes: Sequence[bool]) -> None:
    for part, is_training in zip(module.modules(), modes):
        part.training = is_training


class _WithoutDropout(TorchFunctionMode):
    """In here nothing is dropped, in training neither."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args, kwargs = args[:4], {**kwargs, **dict(zip(("is_causal",), args[5:6])), "dropout_p": 0.0}
        return func(*args, **kwargs)


_DROPOUTS: set[Any] = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
_DROPOUTS |= {torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout}


class _Looks(TorchDispatchMode):
    """Notes the values at which the code looks, and the sums of what they were compared from."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[float] = []
        self._behind: dict[int, tuple[Tensor, float]] = {}  # the tensor too, so that its id stays its own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if torch.Tag.data_dependent_output in func.tags and isinstance(result, (bool, int, float)):
            self.seen.extend((float(result), *(self._sum_behind(tensor) for tensor in tensors)))
        for made in tree_leaves(result):  # whether it is more, or where it is most, may be the same of another value
            if isinstance(made, Tensor) and not made.is_floating_point() and not made.is_complex():
                self._behind[id(made)] = made, sum(map(self._sum_behind, tensors))
        return result

    def _sum_behind(self, tensor: Tensor) -> float:
        if tensor.is_floating_point() and not tensor.is_meta:
            return float(tensor.detach().double().nan_to_num().abs().sum())
        return self._behind.get(id(tensor), (tensor, 0.0))[1]

    def are_like(self, others: _Looks) -> bool:
        """Whether as many values were seen, and the same, but for rounding."""
        pairs = itertools.zip_longest(self.seen, others.seen, fillvalue=math.inf)
        return all(math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-9) for one, other in pairs)


_LEFT_ALONE = "another rank stopped"


def _fault_of_rank(run: _Run, meeting: _Meeting, plan: TensorPlan, rank: int) -> str | None:
    try:
        with torch.enable_grad():
            run.go()
        meeting.exchange(rank, "end", torch.zeros(()))
        return run.compare(plan, rank)
    except threading.BrokenBarrierError:
        return _LEFT_ALONE
    except Exception as exc:  # noqa: BLE001 - whatever the user's code raises on parts is why they cannot be
        meeting.barrier.abort()
        return in_short(exc)


class _Run:
    """One forward and backward pass of a module, of which outputs and gradients are kept."""

    def __init__(
        self,
        module: nn.Module,
        call: Call,
        dtype: torch.dtype,
        unread: Collection[int],
        reference: _Run | None = None,
    ) -> None:
        self.module, self.dtype, self.reference = module, dtype, reference
        self.modes = [part.training for part in module.modules()]
        self._unread = unread
        self._looks = _Looks()
        self._given = call
        self.outputs: list[Tensor] = []
        self.gradients: dict[str, Tensor | None] = {}
        leaves, spec = tree_flatten(call)
        self._inputs = {}
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                leaves[index] = copied_or_shared(leaf)
                continue
            mine = leaf.detach().to(dtype if leaf.is_floating_point() else leaf.dtype, copy=True)
            if leaf.requires_grad:
                self._inputs[f"input {index}"] = mine.requires_grad_(True)
                mine = mine.view_as(mine)  # may be written into
            leaves[index] = mine
        self._call: Call = torch.utils._pytree.tree_unflatten(leaves, spec)

    def again(self, module: nn.Module) -> _Run:
        """A run of ``module`` like this one, that has not gone so far."""
        return _Run(module, self._given, self.dtype, self._unread)

    def look(self) -> _Run:
        """See what is given, without gradients."""
        args, kwargs = self._call
        with _WithoutDropout(), self._looks:
            result = self.module(*args, **kwargs)
        self.outputs = [each for index, each in enumerate(float_outputs(result)) if index not in self._unread]
        if self.reference is not None:
            shapes, expected = ([tuple(each.shape) for each in run.outputs] for run in (self, self.reference))
            if shapes != expected:
                raise ValueError(f"it gives {shapes} in the place of {expected}")
        return self

    def go(self) -> _Run:
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

    def compare(self, plan: TensorPlan, rank: int) -> str | None:
        """What is not as in the whole module."""
        assert self.reference is not None
        if not self._looks.are_like(self.reference._looks):
            return "its code looks at a value, which is another of a part"
        for output, expected in zip(self.outputs, self.reference.outputs):
            if not _is_close(output, expected, self.dtype):
                return "its output is another"
        layouts = _layouts_by_name(plan)
        gradients = [each for each in self.reference.gradients.values() if each is not None and each.numel()]
        least = _ZERO_BUT_FOR_ROUNDING * max((float(each.abs().max()) for each in gradients), default=0.0)
        for name, gradient in self.reference.gradients.items():
            layout, mine = layouts.get(name), gradient
            if gradient is not None and layout is not None:
                mine = cut(gradient, layout.dim, rank=rank, size=plan.tp, packed=layout.packed)
            if not _is_close(self.gradients.get(name), mine, self.dtype, least=least):
                return f"the gradient of {name} is another"
        return None


def _layouts_by_name(plan: TensorPlan) -> dict[str, Layout]:
    layouts = plan.layouts
    return {
        f"{name}.{own}" if name else own: layouts[first]
        for name, module in plan.modules.items()
        for own, first, _ in module.parameters
        if first in layouts
    }


def _is_close(found: Tensor | None, expected: Tensor | None, dtype: torch.dtype, *, least: float = 0.0) -> bool:
    """Relative to the largest of ``expected``, which counts as ``least`` where it is less."""
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


def _copy_with_random_weights(module: nn.Module) -> nn.Module:
    """On the CPU, in float64, evaluating; zeros, where training may begin, would prove nothing."""
    made = copied(module)
    generator = torch.Generator().manual_seed(2)
    made = made.to_empty(device="cpu") if is_on_meta(module) else made.to("cpu")
    for part in made.modules():  # and what it keeps as plain attributes
        replace_tensors(part, lambda tensor: _drawn_like(tensor, generator) if tensor.is_meta else tensor)
    made = made.double()
    made.eval()  # a model's own need not give itself back
    with torch.no_grad():
        for parameter in made.parameters():
            if not parameter.is_floating_point():
                continue
            parameter.requires_grad_(True)
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(1 + 0.3 * noise)
        if is_on_meta(module):
            for buffer in made.buffers():
                buffer.zero_() if not buffer.is_floating_point() else buffer.normal_(generator=generator)
    return made


def _with_values(call: Call) -> Call:
    """Made up, where there are none, and where all are the same, which would prove little."""
    generator = torch.Generator().manual_seed(0)

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        filled = torch.zeros(leaf.shape, dtype=leaf.dtype) if leaf.is_meta else leaf.detach()
        is_one_value = filled.is_floating_point() and filled.numel() > 1 and bool(filled.max() == filled.min())
        if is_one_value and bool(filled.isfinite().all()):
            filled = filled + torch.randn(filled.shape, generator=generator).to(filled.dtype)
        return filled.requires_grad_(leaf.requires_grad)

    filled: Call = tree_map(fill, call)
    return filled


def _drawn_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    made = torch.zeros(tensor.shape, dtype=tensor.dtype)
    is_drawn = tensor.is_floating_point() or tensor.is_complex()
    return made.normal_(generator=generator) if is_drawn else made


def is_on_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def is_too_large(module: nn.Module) -> bool:
    """Whether it has no values, and more parameters than can be given some."""
    return is_on_meta(module) and sum(parameter.numel() for parameter in module.parameters()) > _MOST_MADE_UP


def _laid_out(whole: nn.Module, plan: TensorPlan, meeting: _Meeting, rank: int) -> nn.Module:
    def distribute(parameter: nn.Parameter, layout: Layout | None) -> nn.Parameter:
        if layout is None:
            return parameter
        mine = cut(parameter.detach(), layout.dim, rank=rank, size=plan.tp, packed=layout.packed)
        return nn.Parameter(mine.clone())

    module = copied(whole, shared=whole.parameters())  # into which nobody writes
    lay_out(module, plan, _ThreadRanks(meeting, rank, plan.tp), distribute)
    return module


class _Meeting:
    """Where threads bring one tensor each, and take away those of all."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_MEETING_S)
        self._brought: list[tuple[str, Tensor]] = [("", torch.zeros(()))] * size

    def exchange(self, rank: int, what: str, tensor: Tensor) -> list[Tensor]:
        """Raises: ValueError where the others came for something else."""
        self._brought[rank] = what, tensor.detach()
        self.barrier.wait()
        brought = list(self._brought)
        self.barrier.wait()
        if len({(each, tuple(tensor.shape)) for each, tensor in brought}) > 1:
            raise ValueError("its ranks do different things")
        return [tensor for _, tensor in brought]


class _ThreadRanks:
    """One of the ranks of a proof."""

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, size

    def add_up(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._meeting.exchange(self.rank, "sum", tensor)).sum(0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return self._meeting.exchange(self.rank, "gather", tensor)

    def local(self, parameter: nn.Parameter) -> Tensor | None:
        return parameter

    def as_shard(self, tensor: Tensor, *, total: int) -> Tensor:
        raise AssertionError("proofs are of whole outputs")
