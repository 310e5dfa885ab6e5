"""Proof of a tensor plan before its use: one process runs all ranks in float64, next to the whole module.

Ranks are threads that run the same code as ranks of a mesh; threads meet where those communicate over the network. The
proof compares every output, the gradient of every input and parameter, and what the forward writes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map

from ...text import name_some
from ..kept import State, state_kept
from ..module_copies import replace_tensors
from ..recording import without_fused_layers
from ..writes import values_kept
from .copies import copied, copied_or_shared
from .kept_values import is_close, kept_tensors
from .layout import lay_out
from .other_numbers import other_calls, other_modules, small_buffers, written_buffers
from .plan import Layout, TensorPlan
from .proof_runs import OTHER_OUTPUT, TOLERANCES, Call, Run
from .ranks import cut
from .shapes import Shapes, in_short
from .thread_ranks import Meeting, ThreadRanks

_MOST_MADE_UP = 20_000_000  # parameters of a meta block that get values, in float64, on each rank


def keep_call(args: tuple[Any, ...], kwargs: dict[str, Any], has_gradient: Callable[[Tensor], bool]) -> Call:
    """Return a call's arguments as they are now, on the CPU or the meta device.

    ``has_gradient``: tells whether the code before the call needs a tensor's gradient.
    """

    def keep(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copied_or_shared(leaf)
        kept = torch.empty_like(leaf) if leaf.is_meta else leaf.detach().to("cpu", copy=True)
        return kept.requires_grad_(leaf.is_floating_point() and has_gradient(leaf))

    kept: Call = tree_map(keep, (args, kwargs))
    return kept


def find_fault(module: nn.Module, plan: TensorPlan, call: Call, *, unread: Collection[int] = ()) -> str | None:
    """Return how ``module`` differs over ``plan.tp`` ranks, or None if it is equal for ``call`` with random weights."""
    return Proof(module, call, unread=unread).find_fault(plan)


class Proof:
    """Proof of plans for a module, which is restored; names in a plan are those in the module.

    ``unread``: numbers of outputs that nothing reads. Modules that do not run in float64 run in float32. If a module is
    too large to get values, only shapes are compared. It is also proved with numbers that differ from its arguments and
    its counters (see ``other_numbers``); ``is_varied``: this is such a proof.
    """

    def __init__(self, module: nn.Module, call: Call, *, unread: Collection[int] = (), is_varied: bool = False) -> None:
        self._module, self._call, self._unread, self._is_varied = module, call, unread, is_varied
        self._state: State | None = None
        self._whole: nn.Module | None = None
        self._references: list[Run] = []
        self._fault = ""

    @functools.cached_property
    def shapes(self) -> Shapes:
        return Shapes(self._module, self._call, self._unread)

    def find_fault(self, plan: TensorPlan) -> str | None:
        """Return how the module differs over ``plan.tp`` ranks, or None if it is equal, with random weights."""
        if is_too_large(self._module):
            return self.shapes.why_unknown or self.shapes.find_fault(plan)
        if self._state is None:
            self._state = State(self._module, self._call)
        with self._state.kept(), without_fused_layers():  # for all threads, whichever finishes first
            return self._find_fault(plan)

    def _find_fault(self, plan: TensorPlan) -> str | None:
        self._run_whole()
        faults = (self._find_fault_in_mode(plan, reference) for reference in self._references)
        found = self._fault or next((fault for fault in faults if fault is not None), None)
        return found or next(self._faults_with_other_numbers(plan), None)

    def _faults_with_other_numbers(self, plan: TensorPlan) -> Iterator[str]:
        for what, other in self._with_other_numbers:
            fault = other.find_fault(plan)
            if fault is not None and fault != _DRAWS and other.is_finite:
                yield f"{fault} with {what}"

    @property
    def is_finite(self) -> bool:
        """Whether the whole module ran and all its outputs are finite."""
        outputs = [output for reference in self._references for output in reference.outputs]
        return bool(outputs) and all(bool(output.isfinite().all()) for output in outputs)

    @functools.cached_property
    def _with_other_numbers(self) -> list[tuple[str, Proof]]:
        """Proofs for other numbers in the call and in buffers: a factor of zero hides what it multiplies."""
        if self._is_varied or not self._references:
            return []
        names = [] if is_on_meta(self._module) else self._counts()
        return [
            *(
                (f"other arguments than {name_some(replaced)}", self._varied(self._module, call))
                for call, replaced in other_calls(self._call)
            ),
            *(
                (f"other values of {name_some(written)}, which it writes", self._varied(module, self._call))
                for module, written in other_modules(self._module, names)
            ),
        ]

    def _varied(self, module: nn.Module, call: Call) -> Proof:
        return Proof(module, call, unread=self._unread, is_varied=True)

    def _counts(self) -> list[str]:
        """Return the small buffers that the module writes, in its own mode and in evaluation mode."""
        whole, names = self._whole, small_buffers(self._module)
        assert whole is not None
        if not names:
            return []
        found: set[str] = set()
        modes = [part.training for part in self._module.modules()]
        for each in (modes, [False] * len(modes)) if any(modes) else (modes,):
            _set_modes(whole, each)
            with state_kept(whole), contextlib.suppress(Exception):  # the user's code may train differently
                found |= written_buffers(whole, names, self._references[0])
        return [name for name in names if name in found]

    def _find_fault_in_mode(self, plan: TensorPlan, reference: Run) -> str | None:
        whole = self._whole
        assert whole is not None
        _set_modes(whole, reference.modes)
        meeting = Meeting(plan.tp)
        runs = [
            Run(_laid_out(whole, plan, meeting, rank), self._call, reference.dtype, self._unread, reference)
            for rank in range(plan.tp)
        ]
        with _without_cached_weights(), ThreadPoolExecutor(plan.tp) as pool:
            faults = list(pool.map(lambda rank: _fault_of_rank(runs[rank], meeting, plan, rank), range(plan.tp)))
        found = [fault for fault in faults if fault is not None]
        if not found:
            return None
        fault = next((fault for fault in found if fault != _LEFT_ALONE), found[0])
        return _DRAWS if fault.startswith(OTHER_OUTPUT) and _draws(whole, reference) else fault

    def _run_whole(self) -> None:
        if self._whole is not None or self._fault:
            return
        self._call = _with_values(self._call)
        try:
            self._whole = _copy_with_random_weights(self._module)
        except Exception as exc:  # noqa: BLE001 - an object of the user's may raise anything
            self._fault = f"it cannot be copied: {in_short(exc)}"
            return
        self._references, self._fault = self._run_in_modes(self._whole, [*TOLERANCES])
        if self._fault == _FAILS_IN_TRAINING:
            whole = copied(self._whole)
            references, fault = self._run_in_modes(whole, [torch.float32])
            if not fault:
                self._whole, self._references = whole, references
            self._fault = ""

    def _run_in_modes(self, whole: nn.Module, dtypes: Sequence[torch.dtype]) -> tuple[list[Run], str]:
        modes, state = [part.training for part in self._module.modules()], State(whole)
        with state.kept():
            reference, fault = _reference(whole, self._call, self._unread, dtypes, state)
            if reference is None:
                return [], fault
            _note_times(reference, whole, state)
            try:
                references = [reference, *_reference_in_modes(whole, modes, reference, state)]
            except Exception:  # noqa: BLE001 - the user's code may train with another call
                references, fault = [reference], _FAILS_IN_TRAINING
        whole.to(reference.dtype)  # it was restored in the dtype that was tried first
        return references, fault


def _reference(
    whole: nn.Module, call: Call, unread: Collection[int], dtypes: Sequence[torch.dtype], state: State
) -> tuple[Run | None, str]:
    """Return the whole module's outputs and gradients in the first precision that has any, or why there are none.

    Masks with the smallest float64 number become infinite in a model that computes softmax in float32.
    """
    fault = ""
    for dtype in dtypes:
        try:
            whole.to(dtype)
            with _put_back(whole, state):
                found = Run(whole, call, dtype, unread).go()
        except Exception as exc:  # noqa: BLE001 - the user's code, in another precision than it was written for
            fault = (
                f"in evaluation mode it does not run on the CPU in {str(dtype).removeprefix('torch.')}: {in_short(exc)}"
            )
            continue
        if not found.gradients:
            return None, "its outputs have no gradients"
        tensors = [*found.outputs, *(each for each in found.gradients.values() if each is not None)]
        if not any(bool(each.isnan().any()) for each in tensors):
            return found, ""
        fault = "its outputs or their gradients are NaN"
    return None, fault


def _reference_in_modes(whole: nn.Module, modes: list[bool], evaluated: Run, state: State) -> list[Run]:
    """Return a run in the user's mode, usually training, if it differs from evaluation.

    Return none if the module draws random numbers other than dropout's: no other run would equal it.
    """
    if not any(modes):
        return []
    _set_modes(whole, modes)
    with torch.no_grad(), _put_back(whole, state):
        first = evaluated.again(whole).look()
    if _are_equal(first, evaluated) and _write_alike(first, evaluated):
        return []
    with _put_back(whole, state):
        found = evaluated.again(whole).go()
    _note_times(found, whole, state)
    return [found] if _are_equal(first, found) else []


def _note_times(run: Run, whole: nn.Module, state: State) -> None:
    """Find numbers that differ each time, in two more passes: two times may be equal by chance, three hardly."""
    if any(isinstance(run.kept[name], float) for name in run.written):
        for _ in range(2):
            with torch.no_grad(), _put_back(whole, state):
                run.compare_times(run.again(whole).look())


def _draws(whole: nn.Module, reference: Run) -> bool:
    """Return whether the whole module's output differs each time, so that no part could be compared."""
    with torch.no_grad(), _put_back(whole, State(whole)):
        return not _are_equal(reference.again(whole).look(), reference)


def _are_equal(one: Run, other: Run) -> bool:
    return all(torch.equal(*pair) for pair in zip(one.outputs, other.outputs))


def _write_alike(one: Run, other: Run) -> bool:
    names = {*one.written, *other.written}
    return all(is_close(one.kept.get(name), other.kept.get(name), tolerance=0) for name in names)


@contextlib.contextmanager
def _put_back(whole: nn.Module, state: State) -> Iterator[None]:
    """Restore what a pass writes, so that the next one starts equally. Random numbers continue."""
    undo = state.note()
    with values_kept(kept_tensors(whole)):
        try:
            yield
        finally:
            undo()


def _set_modes(module: nn.Module, modes: Sequence[bool]) -> None:
    for part, is_training in zip(module.modules(), modes):
        part.training = is_training


class _KeepsNothing(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None: ...


@contextlib.contextmanager
def _without_cached_weights() -> Iterator[None]:
    """Give each rank its own weights: under ``parametrize.cached()`` a module shares one with all its copies."""
    before = parametrize._cache
    parametrize._cache = _KeepsNothing()
    parametrize._cache_enabled += 1  # so leaving ``cached()`` does not replace it
    try:
        yield
    finally:
        parametrize._cache_enabled -= 1
        parametrize._cache = before


_DRAWS = "it draws random numbers other than dropout's, so its output differs each time"
_FAILS_IN_TRAINING = "it runs in evaluation mode only"
_LEFT_ALONE = "another rank stopped"


def _fault_of_rank(run: Run, meeting: Meeting, plan: TensorPlan, rank: int) -> str | None:
    try:
        with torch.enable_grad():
            run.go()
        meeting.exchange(rank, "end", torch.zeros(()))
        return run.compare(plan, rank)
    except threading.BrokenBarrierError:
        return _LEFT_ALONE
    except Exception as exc:  # noqa: BLE001 - whatever the user's code raises on parts is why they cannot be
        meeting.leave()
        return in_short(exc, run.module)


def _copy_with_random_weights(module: nn.Module) -> nn.Module:
    """Copy to the CPU, in float64, in evaluation mode; zeros, from which training may start, would prove nothing."""
    made = copied(module)
    generator = torch.Generator().manual_seed(2)
    made = made.to_empty(device="cpu") if is_on_meta(module) else made.to("cpu")
    for part in made.modules():  # and plain attributes
        replace_tensors(part, lambda tensor: _drawn_like(tensor, generator) if tensor.is_meta else tensor)
    made = made.double()
    made.eval()  # a model's own eval() may not return the model
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
    """Fill in values if there are none or all are equal, which would prove little."""
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


def without_hooks(module: nn.Module) -> nn.Module:
    """Copy a module without hooks."""
    made = copied(module)
    for hooks in hooks_in(made).values():
        for each in hooks:
            each.clear()
    return made


def hooks_in(module: nn.Module) -> dict[str, list[dict[int, Any]]]:
    """Return the hooks of modules that have some, by name."""
    found = {name: [getattr(part, key) for key in _HOOKS] for name, part in module.named_modules()}
    return {name: hooks for name, hooks in found.items() if any(hooks)}


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def is_on_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def is_too_large(module: nn.Module) -> bool:
    """Return whether it is without values and has more parameters than can be filled."""
    return is_on_meta(module) and sum(parameter.numel() for parameter in module.parameters()) > _MOST_MADE_UP


def _laid_out(whole: nn.Module, plan: TensorPlan, meeting: Meeting, rank: int) -> nn.Module:
    def distribute(parameter: nn.Parameter, layout: Layout | None) -> nn.Parameter:
        if layout is None:
            return parameter
        mine = cut(parameter.detach(), layout.dim, rank=rank, size=plan.tp, packed=layout.packed)
        return nn.Parameter(mine.clone())

    module = copied(whole, shared=whole.parameters())  # nothing writes into them
    lay_out(module, plan, ThreadRanks(meeting, rank, plan.tp), distribute)
    return module
