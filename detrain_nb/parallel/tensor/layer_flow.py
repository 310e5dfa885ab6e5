"""Data flow between the linear layers of a model, from one forward pass in which every operator is observed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..kept import state_kept
from ..operators import tensors_of
from ..recorders import OperatorRecorder, modules_watched
from ..recording import device_of, first_float_tensor, without_fused_layers
from ..writes import writes_undone

_SAME_VALUES = ("aten::view", "aten::_unsafe_view", "aten::reshape", "aten::clone", "aten::detach", "aten::alias")


@dataclass
class LayerFlow:
    """Connections between linear layers in one pass.

    ``sources``: for each layer, the layers whose outputs reach it without another layer between, in the order of calls.
    ``parameters``: the other parameters that reach it that way. ``readers``: the layers that a layer's output reaches
    that way, "" for the model's output. ``outputs``: layers whose output is one of the model's; ``heads``: layers from
    which alone a model output is computed. ``entered``: all modules in the order of calls; ``around``: modules that
    were running at every call of a layer. ``others``: for a module, a parameter that it read but neither contains nor
    was given.
    """

    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    parameters: dict[str, frozenset[str]] = field(default_factory=dict)
    readers: dict[str, set[str]] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    entered: list[str] = field(default_factory=list)
    around: dict[str, frozenset[str]] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)

    def between(self, begin: Iterable[str], end: str) -> list[str]:
        """Return the modules entered after the first of ``begin``, up to ``end``."""
        first = min(self.entered.index(name) for name in begin)
        last = self.entered.index(end)
        return [name for name in self.entered[first:last] if name not in begin]


class Watch(OperatorRecorder[Tensor]):
    """Recorder of the layers and parameters that each tensor comes from, and of the tensor whose values it has.

    "" stands for the model's first float input.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on_read: Callable[[Tensor], None] = lambda tensor: None,
    ) -> None:
        """Start with the parameters and inputs; ``on_read`` is called with each tensor that an operator gets."""
        super().__init__()
        self._on_read = on_read
        self._sources: dict[int, frozenset[str]] = {}  # by number, like the others
        self._roots: dict[int, int] = {}
        self.unread: dict[int, set[tuple[Any, int]]] = {}  # the module that returned it, and the number of the output
        for name, parameter in model.named_parameters():
            self.tell(parameter, frozenset([name]))
        if (first := first_float_tensor(args, kwargs)) is not None:
            self.tell(first, frozenset([""]))

    def on_question(self, tensor: Tensor) -> None:
        self.unread.pop(self.known(tensor), None)
        self._on_read(tensor)

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        read = tensors_of(args, kwargs)
        for tensor in read:
            self.on_question(tensor)
        sources = frozenset().union(*map(self.sources_of, read))
        for tensor in tensors_of((result,)):
            self.tell(tensor, sources)
            if read and func._schema.name in _SAME_VALUES and tensor is not read[0]:
                self._roots[self.number(tensor)] = self.root_of(read[0])

    def wait_for_readers(self, giver: Any, output: Any) -> None:
        """Remember outputs until something reads them; the first output counts as read.

        A module may return what a module inside it returned.
        """
        for index, tensor in enumerate(float_outputs(output)):
            if index:
                self.unread.setdefault(self.number(tensor), set()).add((giver, index))

    def tell(self, tensor: Tensor, sources: frozenset[str]) -> None:
        self._sources[self.number(tensor)] = sources

    def sources_of(self, tensor: Tensor) -> frozenset[str]:
        return self._sources.get(self.known(tensor), frozenset())

    def root_of(self, tensor: Tensor) -> int:
        number = self.number(tensor)
        return self._roots.get(number, number)


def watch_flow(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], layers: Iterable[str]) -> LayerFlow:
    """Run ``model`` once in evaluation mode and observe its linear ``layers``."""
    flow = LayerFlow()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    known = {name: set(map(id, module.parameters())) for name, module in model.named_modules()}
    order = {name: index for index, name in enumerate(layers)}
    outputs: dict[int, str] = {}
    sources: dict[str, frozenset[str]] = {}
    stack: list[str] = []

    def read(tensor: Tensor) -> None:
        if (name := names.get(id(tensor))) is not None:
            flow.others.update((outer, name) for outer in stack if id(tensor) not in known[outer])

    watch = Watch(model, args, kwargs, read)

    def enter(name: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        flow.entered.append(name)
        stack.append(name)
        known[name].update(id(leaf) for leaf in tree_leaves((given, named)) if isinstance(leaf, Tensor))
        if name not in order:
            return
        flow.around[name] = flow.around.get(name, frozenset(stack)).intersection(stack)
        tensor = next((leaf for leaf in (*given, *named.values()) if isinstance(leaf, Tensor)), None)
        if tensor is not None:
            sources[name] = sources.get(name, frozenset()) | watch.sources_of(tensor)

    def leave(name: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        stack.remove(name)
        if name in order and isinstance(output, Tensor):
            watch.tell(output, frozenset([name]))
            outputs[watch.root_of(output)] = name

    with modules_watched(model.named_modules(), enter, leave):
        result = run_quietly(model, args, kwargs, watch)
    given = float_outputs(result)
    flow.outputs = tuple(dict.fromkeys(outputs[root] for t in given if (root := watch.root_of(t)) in outputs))
    behind = [watch.sources_of(tensor) & order.keys() for tensor in given]
    flow.heads = tuple(dict.fromkeys(name for each in behind if len(each) == 1 for name in each))
    called = {name: index for index, name in reversed([*enumerate(flow.entered)])}
    for name, found in sources.items():
        flow.sources[name] = tuple(sorted(found & order.keys(), key=called.__getitem__))
        flow.parameters[name] = found - order.keys() - {""}
    for name, found in [*sources.items(), *(("", each) for each in behind)]:
        for source in found & order.keys():
            flow.readers.setdefault(source, set()).add(name)
    return flow


def run_quietly(model: nn.Module, args: Any, kwargs: Any, mode: contextlib.AbstractContextManager[Any]) -> Any:
    """Run ``model`` in evaluation mode without gradients, and restore it."""
    device = device_of((*model.parameters(), *model.buffers()))
    with state_kept(model, args, kwargs, device=device) as tensors, writes_undone(tensors):
        model.eval()
        with torch.no_grad(), without_fused_layers(), mode:
            return model(*args, **kwargs)


def float_outputs(result: Any) -> list[Tensor]:
    """Return the float tensors in a module's output."""
    return [leaf for leaf in tree_leaves(_as_tree(result)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _as_tree(result: Any) -> Any:
    """Return an output as a tree whatever its class; an object becomes a dict of its attributes."""
    if isinstance(result, dict):
        return dict(result)
    if not isinstance(result, (Tensor, tuple, list)) and hasattr(result, "__dict__"):
        return vars(result)
    return result
