"""One forward pass, written down: its operators as a graph, and each module with its place among them.

As a rule it runs on tensors without memory, and computes nothing.
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
    """``buffers``: by name, the tensors, by number, that each was when the pass began and when it ended.

    ``read_past``: parameters that are trained, or written, by name, of which the code reads the tensor itself: not as
    an attribute of their module, but in a list, a closure or another object. ``buffers_read_past``: buffers likewise.
    ``gathered``: by number, in which attributes of modules the pass has left tensors that it made. ``buffers_saved``:
    those that it writes in place, and that autograd keeps for the backward pass. ``made``: parameters and buffers that
    were not there before the pass.
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
    """Run ``model`` on what ``copy`` makes of its tensors, and of its inputs', ``around`` it, under `state_kept`."""
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
    recorder.written_parameters.update(  # as an assignment to ``weight.data`` does, which is no operator
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
    """Where a tensor is replaced in its module, one that is read was elsewhere; it matters where it changes."""
    for prefix, part in model.named_modules():
        if isinstance(part, nn.RNNBase):  # they have a list of their own, which follows where a parameter is set
            continue
        for key, tensor in getattr(part, kind).items():
            name = f"{prefix}.{key}" if prefix else key
            if tensor is None or replaced.get(name, tensor) is tensor or recorder.known(tensor) < 0:
                continue
            if tensor.requires_grad or recorder.has_written(tensor) or recorder.has_written(replaced[name]):
                yield name


@contextlib.contextmanager
def fails_with_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """What a model's own forward raises for example inputs is told with them. Raises: SpecError."""
    try:
        yield
    except (DetrainError, torch.OutOfMemoryError, NotImplementedError):  # an operator without fake tensors says so
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AssertionError) as exc:
        given = [*map(_look_of, args), *(f"{name}={_look_of(value)}" for name, value in kwargs.items())]
        why = str(exc).rstrip(".")
        if isinstance(exc, (LookupError, AssertionError)):  # some say a name alone, or nothing
            why = f"{type(exc).__name__}: {why}".removesuffix(": ")
        raise SpecError(
            f"the model fails on the example inputs ({', '.join(given) or 'none'}): {why}: give what it is called "
            "with, of one microbatch"
        ) from exc


def _look_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(TensorLook.of(value))
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def device_of(tree: Any, otherwise: torch.device = _CPU) -> torch.device:
    """Of the first tensor, or ``otherwise`` where there is none."""
    return next((leaf.device for leaf in tree_iter(tree) if isinstance(leaf, Tensor)), otherwise)


@contextlib.contextmanager
def without_fused_layers() -> Iterator[None]:
    """In here torch's transformer layers run as they do in training.

    Where no gradient is wanted they would take the weights of all layers inside of them, past those that are cut, and
    give nested tensors, which no boundary between stages can carry. The threads of a proof enter it in one that is
    there already: whoever has turned this off turns it on again.
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
    """What ``made`` makes of a kind of tensors; each place in a module once, however many names the module has."""
    return {
        f"{name}.{key}" if name else key: made(tensor)
        for name, module in model.named_modules()
        for key, tensor in getattr(module, kind).items()
        if tensor is not None
    }


def first_float_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The argument of a module that is taken for what was computed so far, as masks and positions are not."""
    values = (*args, *kwargs.values())
    return next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)


def modules_around(name: str) -> list[str]:
    """The names of the modules that a module is part of, from the model itself on."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))]


@dataclass(frozen=True)
class ModuleOutput:
    """What a module gave for its first float argument, of ``argument_shape``: a tree of `TensorLook`."""

    argument_shape: tuple[int, ...]
    tree: Any

    def scaled_to(self, argument: Tensor) -> Any:
        """The same, on the meta device, for another argument: sizes that are the argument's follow it, as do rows."""
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
    """Whether a pass was refused because the model takes gradients in its forward; ``by_transform``: by torch.func."""
    return _TAKES_GRADIENTS in str(exc) and not (by_transform and exc.__cause__ is None)


_TAKES_GRADIENTS = (
    "the model takes gradients in its own forward (torch.autograd.grad, torch.func.grad), which a pass without a "
    "backward one cannot follow: lay it out without pp and tp (dp_replicate, dp_shard)"
)


class Entries:
    """When each module is entered and left, counted in operators."""

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self.model = model
        self._recorder = recorder
        self.entered: list[tuple[int, str, int | None]] = []  # the operator that comes next, the module, its argument
        self.inside: dict[str, tuple[str, ...]] = {}  # the modules whose code, or hook, has called it first
        self.checkpointed_with: set[str] = set()  # with what they are given: no place to go on from
        self.reentrant: set[str] = set()  # where no gradient is noted of what has one: a checkpoint does that later
        self.left: dict[str, int] = {}
        self.given: dict[str, list[int]] = {}  # tensors that it returned, by number
        self.outputs: dict[str, ModuleOutput] = {}  # of modules that give tensors alone
        self.giving_others: set[str] = set()  # modules that return more than tensors
        self.calls: dict[str, int] = {}
        self.time_first: list[tuple[str, tuple[int, ...]]] = []  # layers that want (T, B, D), and what they get
        self.buffers_left: dict[str, Tensor] = {}  # as they are when the model returns

    def watched(self) -> contextlib.AbstractContextManager[None]:
        return modules_watched(self.model.named_modules(), self._on_entry, self._on_exit, is_first=True)

    def _on_entry(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        self.inside.setdefault(name, self._recorder.inside)
        self._recorder.inside = (*self._recorder.inside, name)
        argument = first_float_tensor(args, kwargs)
        if argument is not None and is_functorch_wrapped_tensor(argument):  # in torch.vmap: one row of it
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
        if argument is not None and output is argument:  # dropout that evaluates: what reads it next reads another
            with torch.enable_grad():  # into a view made without, nobody may write
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
