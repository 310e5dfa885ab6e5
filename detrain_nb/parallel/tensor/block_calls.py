"""Arguments and outputs of a model's blocks, for the first block of each kind, from one run of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..blocks import looks_of, pattern_of
from ..recorders import modules_watched
from ..recording import first_float_tensor
from .layer_flow import Watch, float_outputs, run_quietly
from .proof import keep_call
from .proof_runs import Call
from .proposals import Between


class BlockCalls:
    """Calls of blocks. ``of_kind``: a call for each kind of block; ``unread``: numbers of outputs that are not read."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        self._model, self._call = model, call
        self._names = dict(model.named_modules())
        self.of_kind: dict[Any, Call] = {}
        self.unread: dict[Any, set[int]] = {}
        self._outputs: dict[Any, list[torch.Size]] = {}
        self._looks: dict[str, Any] = {}
        self._given: dict[str, Any] = {}  # places of a module's tensor arguments, and its other arguments

    def kind_of(self, name: str) -> Any:
        """Return the kind: equal if names differ only in numbers, code and arguments are alike."""
        pattern = pattern_of(name)
        if name not in self._looks:
            row = {each: module for each, module in self._names.items() if pattern_of(each) == pattern}
            self._looks.update(looks_of(row))
        return pattern, self._looks[name], self._given.get(name)

    def note(self, names: Collection[str]) -> None:
        """Note the calls of modules, the first of each kind, and which outputs of each kind nothing reads."""
        watch = Watch(self._model, *self._call)
        calls: Counter[Any] = Counter()
        for name in names:
            self.kind_of(name)  # before hooks are added

        def keep(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            given = {**dict(enumerate(args)), **kwargs}
            self._given.setdefault(name, tuple((key, _look_of(each)) for key, each in given.items()))
            kind = self.kind_of(name)
            if kind not in self.of_kind:
                self.of_kind[kind] = keep_call(args, kwargs, lambda tensor: bool(watch.sources_of(tensor)))

        def give(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls[self.kind_of(name)] += 1
            self._outputs.setdefault(self.kind_of(name), [each.shape for each in float_outputs(output)])
            watch.wait_for_readers(self.kind_of(name), output)

        with modules_watched([(name, self._names[name]) for name in names], keep, give):
            result = run_quietly(self._model, *self._call, watch)
        for tensor in float_outputs(result):
            watch.unread.pop(watch.number(tensor), None)
        for (kind, index), count in Counter(each for givers in watch.unread.values() for each in givers).items():
            if count == calls[kind]:
                self.unread.setdefault(kind, set()).add(index)

    def between(self, kind: Any) -> Between:
        """Return the arguments and the read outputs of a kind, except the first of each."""
        args, kwargs = self.of_kind.get(kind, ((), {}))
        first = first_float_tensor(args, kwargs)
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        tensors = ((place, each) for place, each in given if isinstance(each, Tensor) and not _is_like(each, first))
        left_out = {0, *self.unread.get(kind, ())}
        read = (each for each in enumerate(self._outputs.get(kind, ())) if each[0] not in left_out)
        return Between(arguments=tuple((place, each.shape) for place, each in tensors), outputs=tuple(read))


def _look_of(argument: Any) -> Any:
    is_plain = isinstance(argument, (bool, int, float, str, type(None)))
    return (type(argument), argument) if is_plain else type(argument)


def _is_like(tensor: Tensor, first: Tensor | None) -> bool:
    """Return whether a tensor has the rows and the width of ``first``; heads can be as many as rows."""
    if first is None or tensor.dim() != first.dim():
        return first is None
    return (tensor.shape[0], tensor.shape[-1]) == (first.shape[0], first.shape[-1])


def where_the_model_is(model: nn.Module, call: Call) -> Call:
    """Move inputs to where the model is: without values for a meta model, with values for any other."""
    place = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.is_meta == (place.type == "meta"):
            return leaf
        if place.type == "meta":
            return leaf.to("meta")
        made = torch.zeros(leaf.shape, dtype=leaf.dtype, device=place)
        return made.normal_(generator=torch.Generator(place).manual_seed(0)) if leaf.is_floating_point() else made

    moved: Call = tree_map(move, call)
    return moved
