"""A block whose forward runs again in the backward pass: what it writes is written once, by the first of the two runs.

The second one begins as the first did, on copies: what it saves for the gradients stays as it saw it. That is what lies
in the block's own modules, buffers and attributes; who writes elsewhere writes twice.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .blocks import pattern_of
from .writes import has_own_memory

__all__ = ["SecondRuns"]

_MISSING: Any = object()
_OF_MODULES = frozenset(vars(nn.Module()))
_preserve_version = torch.autograd._unsafe_preserve_version_counter


class SecondRuns:
    """Of a block, which ``name`` tells in warnings; ``told`` are those of all blocks, as one of a kind is enough.

    ``is_sharded``: its parameters are put together for each run.
    """

    def __init__(self, block: nn.Module, name: str, *, told: set[str], is_sharded: bool) -> None:
        self._block, self._name, self._told = block, name, told
        self._parameters = () if is_sharded else tuple(block.named_parameters())
        self._written: dict[tuple[bool, ...], set[tuple[int, str]]] = {}  # places of tensors, by the parts' modes

    def contexts(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """Return those for the first and for each further run of one call, as ``context_fn`` of a checkpoint does."""
        changes: list[_Place] = []
        return self._noting(changes), _Undoing(changes)

    @contextlib.contextmanager
    def _noting(self, changes: list[_Place]) -> Iterator[None]:
        modes = tuple(part.training for part in self._block.modules())
        is_first = modes not in self._written
        written = self._written.setdefault(modes, set())
        known = set(written)
        before = {place.where: place for place in self._places(written, is_first=is_first)}
        versions = [_version_of(each) for _, each in self._parameters] if is_first else []
        yield
        for place in self._places(set(), is_first=False):
            was = before.setdefault(place.where, place.without_value())
            if place.where in known or not was.is_left_by(place):  # what is known is not compared: a GPU would wait
                changes.append(was)
        changes.extend(was for was in before.values() if was.key not in was.holder)
        for was in changes:
            if isinstance(was.value, Tensor) and was.where not in written and was.value is was.holder.get(was.key):
                written.add(was.where)
                if not is_first:
                    self._tell(f"{self._named(was)} is written by this forward, and was not by the first one")
        for (name, each), version in zip(self._parameters, versions):
            if _version_of(each) != version:
                self._tell(f"the parameter {name} is written by each forward")

    def _places(self, written: set[tuple[int, str]], *, is_first: bool) -> Iterator[_Place]:
        for part in self._block.modules():
            for holder, keys in ((part._buffers, list(part._buffers)), (vars(part), vars(part).keys() - _OF_MODULES)):
                for key in keys:
                    place = _Place(holder, key, holder[key])
                    place.note(with_values=is_first or place.where in written)
                    yield place

    def _named(self, place: _Place) -> str:
        for name, part in self._block.named_modules():
            if place.holder is part._buffers or place.holder is vars(part):
                return f"{name}.{place.key}" if name else place.key
        return place.key

    def _tell(self, what: str) -> None:
        key = f"{what} of {pattern_of(self._name)}"
        if key not in self._told:
            self._told.add(key)
            warnings.warn(
                f"{what} of {self._name}, which runs twice where activations are computed again: it is written twice; "
                "leave activations= out, or write it outside of the block",
                stacklevel=2,
            )


@dataclass
class _Place:
    """A key of a module's attributes, or of its buffers, and what is there before a run."""

    holder: dict[str, Any]
    key: str
    value: Any
    contents: list[Any] | None = None  # of a list, dict, set
    values: Tensor | None = None  # of a tensor
    version: int = 0

    @property
    def where(self) -> tuple[int, str]:
        return id(self.holder), self.key

    def note(self, *, with_values: bool) -> None:
        if isinstance(self.value, (list, dict, set, deque)):
            self.contents = _contents_of(self.value)
        elif _is_kept(self.value):
            self.version = _version_of(self.value)
            self.values = self.value.detach().clone() if with_values else None

    def without_value(self) -> _Place:
        return _Place(self.holder, self.key, _MISSING)

    def is_left_by(self, now: _Place) -> bool:
        """Whether a run has written nothing here. Statistics of a BatchNorm do not tell it by their version."""
        if now.value is not self.value:
            return False
        if self.contents is not None and now.contents is not None:
            return len(self.contents) == len(now.contents) and all(map(operator.is_, self.contents, now.contents))
        if not _is_kept(self.value):
            return True
        return now.version == self.version and (self.values is None or torch.equal(self.values, self.value))

    def begin_again(self) -> Callable[[], None]:
        """Put back what was here; return what puts back what is here now."""
        now, undos = self.holder.get(self.key, _MISSING), contextlib.ExitStack()
        if self.contents is not None:
            undos.callback(_fill, self.value, _contents_of(self.value))
            _fill(self.value, self.contents)
        if self.values is not None:
            undos.enter_context(_preserve_version(self.value))
            undos.callback(setattr, self.value, "data", self.value.data)
            self.value.data = self.values.clone()
        if not (isinstance(self.value, Tensor) and self.value.requires_grad):  # a graph that nobody runs any more
            self._put(self.value)
        undos.callback(self._put, now)
        return undos.close

    def _put(self, value: Any) -> None:
        if value is _MISSING:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value


class _Undoing(contextlib.AbstractContextManager[None]):
    """Around each further run, of which there may be several."""

    def __init__(self, changes: list[_Place]) -> None:
        self._changes = changes
        self._undos: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        with torch.no_grad():
            self._undos = [place.begin_again() for place in self._changes]

    def __exit__(self, *exc_info: Any) -> None:
        for undo in reversed(self._undos):
            undo()


def _is_kept(value: Any) -> bool:
    is_tensor = isinstance(value, Tensor) and not isinstance(value, FakeTensor) and not value.requires_grad
    return is_tensor and has_own_memory(value) and not value.is_inference()


def _version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _contents_of(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _fill(container: Any, contents: Iterable[Any]) -> None:
    kept = list(contents)
    container.clear()
    if isinstance(container, dict):
        half = len(kept) // 2
        container.update(zip(kept[:half], kept[half:]))
    elif isinstance(container, set):
        container.update(kept)
    else:
        container.extend(kept)
