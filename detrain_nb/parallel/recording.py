"""One forward pass, recorded: its operators as a graph, and the place of each module among them.

It usually runs on tensors without memory, and computes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_iter, tree_leaves, tree_map

from ..errors import DetrainError, SpecError
from .compiled import as_written
from .operator_graph import Recorder, TensorLook
from .operators import storage_of
from .recorders import TensorMemo, modules_watched

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Recording:
    """What one forward pass did.

    ``buffers``: by name, the numbers of the tensors that a buffer was at the start and at the end of the pass.
    ``read_past``: names of parameters, trained or written, whose tensor the code reads not as an attribute of its
    module, but from a list, a closure or another object. ``buffers_read_past``: buffers likewise. ``gathered``: by
    number, the attributes of modules in which the pass left tensors that it made. ``buffers_saved``: those written in
    place that autograd keeps for the backward pass. ``made``: parameters and buffers that the pass created.
    """

    recorder: Recorder
    entries: Entries
    outputs: Any
    buffers: Mapping[str, tuple[int, int]]
    read_past: frozenset[str]
    buffers_read_past: frozenset[str]
    buffers_saved: frozenset[str]
    made: frozenset[str]
    gathered: Mapping[int, str] = field(default_factory=dict)


def record(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    copy: Callable[[Tensor], Tensor],
    around: Callable[[Recorder, Entries], contextlib.AbstractContextManager[None]] = (
        lambda recorder, entries: contextlib.nullcontext()
    ),
) -> Recording:
    """Run ``model`` on copies of its tensors and inputs made by ``copy``, inside ``around`` and `state_kept`."""
    made = TensorMemo(copy)
    parameters, buffers = tensors_in(model, "_parameters", made), tensors_in(model, "_buffers", made)
    args, kwargs = tree_map(made, args), tree_map(made, kwargs)
    recorder = Recorder(parameters)
    entries = Entries(model, recorder)
    storages = {name: storage_of(tensor) for name, tensor in parameters.items()}
    with (
        entries.watched(),
        around(recorder, entries),
        without_fused_layers(),
        as_written(),
        torch.enable_grad(),
        saved_tensors_hooks(recorder.pack, _unpack),
        recorder,
    ):
        try:
            outputs = torch.func.functional_call(model, {**parameters, **buffers}, args, kwargs, tie_weights=False)
        except RuntimeError as exc:
            if "yet support saved tensor hooks" not in str(exc):
                raise
            raise SpecError(_TAKES_GRADIENTS) from exc  # by torch.func
    recorder.written_parameters.update(  # e.g. by assigning ``weight.data``, which is not an operator
        name for name, tensor in parameters.items() if storage_of(tensor) != storages[name]
    )
    after = {**buffers, **entries.buffers_left}
    numbers = {name: (recorder.number(buffers[name]), recorder.number(after[name])) for name in buffers}
    read_past = frozenset(_read_past(model, "_parameters", recorder, parameters))
    buffers_read_past = frozenset(_read_past(model, "_buffers", recorder, buffers))
    saved = frozenset(name for name, tensor in buffers.items() if recorder.saves_what_it_writes(tensor))
    there = {**tensors_in(model, "_parameters", lambda each: each), **tensors_in(model, "_buffers", lambda each: each)}
    made_now = frozenset(there.keys() - parameters.keys() - buffers.keys())
    return Recording(recorder, entries, outputs, numbers, read_past, buffers_read_past, saved, made_now)


def _read_past(model: nn.Module, kind: str, recorder: Recorder, replaced: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield names of tensors that can change, and were read from elsewhere after a replacement in their module."""
    for prefix, part in model.named_modules():
        if isinstance(part, nn.RNNBase):  # their list of parameters follows assignments
            continue
        for key, tensor in getattr(part, kind).items():
            name = f"{prefix}.{key}" if prefix else key
            if tensor is None or replaced.get(name, tensor) is tensor or recorder.known(tensor) < 0:
                continue
            if tensor.requires_grad or recorder.has_written(tensor) or recorder.has_written(replaced[name]):
                yield name


@contextlib.contextmanager
def fails_with_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Add the example inputs to errors that a model's own forward raises. Raises: SpecError."""
    try:
        yield
    except (DetrainError, torch.OutOfMemoryError, NotImplementedError):  # also raised by operators without fake tensors
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AssertionError) as exc:
        given = [*map(_look_of, args), *(f"{name}={_look_of(value)}" for name, value in kwargs.items())]
        why = str(exc).rstrip(".")
        if isinstance(exc, (LookupError, AssertionError)):  # their text may be a bare name, or empty
            why = f"{type(exc).__name__}: {why}".removesuffix(": ")
        raise SpecError(
            f"the model fails on the example inputs ({', '.join(given) or 'none'}): {why}; give inputs of one "
            "microbatch, as the model is called"
        ) from exc


def _look_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(TensorLook.of(value))
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def device_of(tree: Any, otherwise: torch.device = _CPU) -> torch.device:
    """Return the device of the first tensor, or ``otherwise``."""
    return next((leaf.device for leaf in tree_iter(tree) if isinstance(leaf, Tensor)), otherwise)


@contextlib.contextmanager
def without_fused_layers() -> Iterator[None]:
    """Run torch's transformer layers in the block as they run in training.

    Without gradients they would take the weights of all inner layers, past those that are cut, and return nested
    tensors, which no stage boundary can carry. Threads of a proof enter this while it is active: only the one that
    turned the fast path off turns it on again.
    """
    if not torch.backends.mha.get_fastpath_enabled():
        yield
        return
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def tensors_in(model: nn.Module, kind: str, made: Callable[[Any], Any]) -> dict[str, Tensor]:
    """Apply ``made`` to tensors of a kind; each place in a module counts once, even if the module has several names."""
    return {
        f"{name}.{key}" if name else key: made(tensor)
        for name, module in model.named_modules()
        for key, tensor in getattr(module, kind).items()
        if tensor is not None
    }


def first_float_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the argument of a module that is taken as the computed value, unlike masks and positions."""
    values = (*args, *kwargs.values())
    return next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)


def modules_around(name: str) -> list[str]:
    """Return the names of all modules around a module, starting with the model ("")."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))]


@dataclass(frozen=True)
class ModuleOutput:
    """Output of a module for a first float argument of ``argument_shape``, as a tree of `TensorLook`."""

    argument_shape: tuple[int, ...]
    tree: Any

    def scaled_to(self, argument: Tensor) -> Any:
        """Return the output on the meta device for another argument: sizes equal to the argument's, and rows, scale."""
        return tree_map(lambda leaf: self._scale(leaf, argument) if isinstance(leaf, TensorLook) else leaf, self.tree)

    def _scale(self, look: TensorLook, argument: Tensor) -> Tensor:
        shape = list(look.shape)
        for place, (was, now) in enumerate(zip(self.argument_shape, argument.shape)):
            if place < len(shape) and shape[place] == was:
                shape[place] = now
            elif place == 0 and shape and was and shape[0] * now % was == 0:
                shape[0] = shape[0] * now // was
        return torch.empty(shape, dtype=look.dtype, device="meta")


def _unpack(packed: None) -> Tensor:
    raise SpecError(_TAKES_GRADIENTS)


def takes_gradients(exc: SpecError, *, by_transform: bool = False) -> bool:
    """Return whether a pass failed because the model's forward takes gradients; ``by_transform``: by torch.func."""
    return _TAKES_GRADIENTS in str(exc) and not (by_transform and exc.__cause__ is None)


_TAKES_GRADIENTS = (
    "the model takes gradients in its own forward (torch.autograd.grad, torch.func.grad), which a forward pass alone "
    "cannot follow: lay it out without pp and tp (dp_replicate, dp_shard)"
)


class Entries:
    """Record of when each module is entered and left, counted in operators."""

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self.model = model
        self._recorder = recorder
        self.entered: list[tuple[int, str, int | None]] = []  # next operator, module, its argument
        self.inside: dict[str, tuple[str, ...]] = {}  # modules whose code, or hook, was first to call it
        self.checkpointed_with: set[str] = set()  # with their argument: no place to resume at
        self.reentrant: set[str] = set()  # run without grad on an argument that requires it, by a checkpoint
        self.left: dict[str, int] = {}
        self.given: dict[str, list[int]] = {}  # tensors that it returned, by number
        self.outputs: dict[str, ModuleOutput] = {}  # of modules that return only tensors
        self.giving_others: set[str] = set()  # modules that return more than tensors
        self.calls: dict[str, int] = {}
        self.time_first: list[tuple[str, tuple[int, ...]]] = []  # layers that expect (T, B, D), and their inputs
        self.buffers_left: dict[str, Tensor] = {}  # as they are when the model returns

    def watched(self) -> contextlib.AbstractContextManager[None]:
        return modules_watched(self.model.named_modules(), self._on_entry, self._on_exit, is_first=True)

    def _on_entry(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        self.inside.setdefault(name, self._recorder.inside)
        self._recorder.inside = (*self._recorder.inside, name)
        argument = first_float_tensor(args, kwargs)
        if argument is not None and is_functorch_wrapped_tensor(argument):  # in torch.vmap: one row
            argument = None
        number = None if argument is None else self._recorder.number(argument)
        if argument is not None and _takes_time_first(module) and argument.dim() == 3:
            self.time_first.append((name, tuple(argument.shape)))
        self.entered.append((len(self._recorder.ops), name, number))
        if argument is not None and argument.requires_grad and not torch.is_grad_enabled():
            self.reentrant.add(name)
        around = self._recorder.checkpoint()
        if around and number is not None and self._recorder.made_in.get(number) == around:
            self.checkpointed_with.add(name)

    def _on_exit(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        argument = first_float_tensor(args, kwargs)
        if argument is not None and output is argument:  # dropout in evaluation: give readers a new tensor
            with torch.enable_grad():  # a view made without grad could not be written into
                output = argument.view_as(argument)
        self._recorder.inside = self._recorder.inside[:-1]
        self.left[name] = len(self._recorder.ops)
        if not name:
            self.buffers_left = tensors_in(module, "_buffers", lambda buffer: buffer)
        leaves = tree_leaves(output)
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        given = (self._recorder.number(leaf) for leaf in tensors if not is_functorch_wrapped_tensor(leaf))
        self.given.setdefault(name, []).extend(given)
        if not all(isinstance(leaf, (Tensor, type(None))) for leaf in leaves):
            self.giving_others.add(name)
        elif argument is not None:
            self.outputs[name] = ModuleOutput(tuple(argument.shape), tree_map(TensorLook.of, output))
        return output


def _takes_time_first(module: nn.Module) -> bool:
    return isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and not module.batch_first
