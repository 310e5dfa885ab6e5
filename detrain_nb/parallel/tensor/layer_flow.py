"""Which linear layers of a model feed which: from one forward pass, of which every operator is watched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..kept import state_kept
from ..recording import device_of, first_float_tensor, without_fused_layers
from ..writes import writes_undone

__all__ = ["LayerFlow", "Watch", "float_outputs", "run_quietly", "watch_flow"]

_SAME_VALUES = ("aten::view", "aten::_unsafe_view", "aten::reshape", "aten::clone", "aten::detach", "aten::alias")


@dataclass
class LayerFlow:
    """``sources``: the layers whose outputs come to a layer, with no other layer on the way, in the order of calls.

    ``siblings``: those that get the same input as a layer does. ``outputs``: layers whose output is one of the
    model's. ``entered``: all modules, as they were called.
    """

    sources: dict[str, frozenset[str]] = field(default_factory=dict)
    siblings: dict[str, tuple[str, ...]] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    entered: list[str] = field(default_factory=list)

    def between(self, begin: Iterable[str], end: str) -> list[str]:
        """The modules that were entered behind the first of ``begin``, up to ``end``."""
        first = min(self.entered.index(name) for name in begin)
        last = self.entered.index(end)
        return [name for name in self.entered[first:last] if name not in begin]


class Watch(TorchDispatchMode):
    """For each tensor the layers that it comes from, and the tensor whose values it has.

    The layer "" stands for all other parameters, and for the model's first float input.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources: dict[int, frozenset[str]] = {}
        self._roots: dict[int, int] = {}
        self._kept: list[Tensor] = []  # an id belongs to one tensor as long as it lives
        self.unread: dict[int, tuple[Any, int]] = {}  # who gave it, and which of its outputs it is
        first = first_float_tensor(args, kwargs)
        for tensor in (*model.parameters(), *([] if first is None else [first])):
            self.tell(tensor, frozenset([""]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in read:
            self.unread.pop(id(tensor), None)
        sources = frozenset().union(*(self.sources_of(tensor) for tensor in read))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.tell(tensor, sources)
                if read and func._schema.name in _SAME_VALUES and tensor is not read[0]:
                    self._roots[id(tensor)] = self.root_of(read[0])
        return result

    def wait_for_readers(self, giver: Any, output: Any) -> None:
        """Remember what was given, until somebody reads it; the first output is taken to be read."""
        for index, tensor in enumerate(float_outputs(output)):
            if index:
                self.unread[id(tensor)] = giver, index

    def tell(self, tensor: Tensor, sources: frozenset[str]) -> None:
        self._sources[id(tensor)] = sources
        self._kept.append(tensor)

    def sources_of(self, tensor: Tensor) -> frozenset[str]:
        return self._sources.get(id(tensor), frozenset())

    def root_of(self, tensor: Tensor) -> int:
        return self._roots.get(id(tensor), id(tensor))


def watch_flow(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], layers: Iterable[str]) -> LayerFlow:
    """Run ``model`` once, evaluating; ``layers`` are the linear ones. Layers that are called twice are left out."""
    watch, flow = Watch(model, args, kwargs), LayerFlow()
    inputs: dict[str, int] = {}
    outputs: dict[int, str] = {}
    repeated: set[str] = set()

    def enter(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensor = next((leaf for leaf in (*given, *named.values()) if isinstance(leaf, Tensor)), None)
        if tensor is None or name in inputs:
            repeated.add(name)
            return
        inputs[name] = watch.root_of(tensor)
        flow.sources[name] = watch.sources_of(tensor) - {""}

    def leave(name: str, output: Any) -> None:
        if isinstance(output, Tensor):
            watch.tell(output, frozenset([name]))
            outputs[watch.root_of(output)] = name

    with _hooked(model, set(layers), enter, leave, flow.entered):
        result = run_quietly(model, args, kwargs, watch)
    given = float_outputs(result)
    flow.outputs = tuple(dict.fromkeys(outputs[root] for t in given if (root := watch.root_of(t)) in outputs))
    for name in repeated:
        flow.sources.pop(name, None)
        inputs.pop(name, None)
    for name, tensor_id in inputs.items():
        flow.siblings[name] = tuple(each for each, other in inputs.items() if other == tensor_id)
    return flow


@contextlib.contextmanager
def _hooked(
    model: nn.Module, layers: set[str], enter: Callable[..., None], leave: Callable[..., None], entered: list[str]
) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():

        def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            entered.append(name)
            if name in layers:
                enter(name, args, kwargs)

        def after(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
            leave(name, output)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if name in layers:
            handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_quietly(model: nn.Module, args: Any, kwargs: Any, mode: contextlib.AbstractContextManager[Any]) -> Any:
    """Run ``model`` evaluating and without gradients; it stays as it is."""
    device = device_of((*model.parameters(), *model.buffers()))
    with state_kept(model, args, kwargs, device=device) as tensors, writes_undone(tensors):
        model.eval()
        with torch.no_grad(), without_fused_layers(), mode:
            return model(*args, **kwargs)


def float_outputs(result: Any) -> list[Tensor]:
    """The float tensors in what a module gives."""
    return [leaf for leaf in tree_leaves(_as_tree(result)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _as_tree(result: Any) -> Any:
    """An output, whatever its class: an object gives what it has as attributes."""
    if isinstance(result, dict):
        return dict(result)
    if not isinstance(result, (Tensor, tuple, list)) and hasattr(result, "__dict__"):
        return vars(result)
    return result
