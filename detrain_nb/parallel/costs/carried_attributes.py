"""Plain attributes in which a model keeps values from one call to the next: one stage must write and read each of them.

A second pass finds them: it starts with what the first one has left, and the changed attributes are watched.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..module_copies import make_subclass
from ..operator_graph import Recorder
from ..recording import Recording
from ..undo import are_same, own_attributes

Changed = Mapping[str, Mapping[str, Any]]  # by module and attribute: the value left there


@dataclass(frozen=True)
class CarriedAttribute:
    """An attribute that a pass reads as an earlier call left it.

    ``reads`` and ``writes`` give after how many module entries each happens; a write also gives the modules that it is
    inside. ``is_computed``: the kept value depends on parameters. Without ``writes``, it is unknown where the value is
    kept.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[tuple[int, tuple[str, ...]], ...]
    is_computed: bool

    def hinders(self, entry: int, around: Collection[str]) -> str:
        """Return why the model cannot be cut at the module entered after ``entry`` others, or "" if it can.

        A stage does not see what is written after its cut. What is written before a cut is computed from zeros in the
        next stage, or is not written there at all.
        """
        kept = f"{self.name}, which the model keeps for its next call,"
        if not self.writes:
            return f"{kept} is not a buffer"
        if self.reads[0] <= entry < self.writes[-1][0]:
            return f"{kept} is read before it and written after it"
        gone = (place for place, inside in self.writes if self.is_computed or not set(inside) <= set(around))
        if self.reads[-1] > entry and any(place <= entry for place in gone):
            return f"{kept} is written before it and read after it"
        return ""


def note_attributes(model: nn.Module) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Return the attributes before a pass, by module and attribute; for a container, also its contents."""
    return {
        name: {key: (each, _contents(each)) for key, each in own_attributes(part).items()}
        for name, part in model.named_modules()
    }


def changed_attributes(model: nn.Module, before: Mapping[str, Mapping[str, tuple[Any, Any]]]) -> Changed:
    found: dict[str, dict[str, Any]] = {}
    for name, part in model.named_modules():
        for key, each in own_attributes(part).items():
            was, contents = before.get(name, {}).get(key, (None, None))
            if each is not was or _is_other(_contents(each), contents):
                found.setdefault(name, {})[key] = each
    return found


def find_gathered(changed: Changed, recorder: Recorder) -> dict[int, str]:
    """Return, by tensor number, the attribute in which a pass left a tensor that it made; outermost module first."""
    found: dict[int, str] = {}
    for name, keys in changed.items():
        for key, value in keys.items():
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor) and recorder.known(leaf) >= 0:
                    found.setdefault(recorder.number(leaf), f"{name}.{key}" if name else key)
    return found


def find_carried(
    model: nn.Module, changed: Changed, left: Collection[int], run: Callable[[Callable[..., Any]], Recording]
) -> list[CarriedAttribute]:
    """Find the attributes that a second pass reads as the first one left them.

    ``run`` makes the second pass, watched by its argument. ``left``: ids of tensors that the first pass computed.
    """
    watch = _Watch()
    recording = run(lambda recorder, entries: watch.watched(model, changed, recorder, entries))
    recorder = recording.recorder
    found = []
    for name, keys in changed.items():
        for key, value in keys.items():
            full = f"{name}.{key}" if name else key
            if name in watch.unwatched:
                found.append(CarriedAttribute(full, (), (), is_computed=True))
                continue
            events = watch.events.get((name, key), [])
            if not events or events[0].is_write:
                continue
            first = next((number for number, event in enumerate(events) if event.is_write), len(events))
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            writes = tuple((event.entry, event.inside) for event in events[first:] if event.is_write)
            is_computed = any(id(leaf) in left for leaf in tensors)
            if not writes and not (is_computed and _is_read(recorder, tensors, left)):
                continue  # made once, like a table, or only extended
            reads = tuple(event.entry for event in events[:first])
            found.append(CarriedAttribute(full, reads, writes, is_computed))
    return found


@dataclass(frozen=True)
class _Event:
    is_write: bool
    entry: int
    inside: tuple[str, ...]


@dataclass
class _Watch:
    events: dict[tuple[str, str], list[_Event]] = field(default_factory=dict)
    unwatched: set[str] = field(default_factory=set)  # modules whose class cannot be replaced

    @contextlib.contextmanager
    def watched(self, model: nn.Module, changed: Changed, recorder: Any, entries: Any) -> Iterator[None]:
        was: list[tuple[nn.Module, type[nn.Module]]] = []

        def note(name: str, key: str, *, is_write: bool) -> None:
            event = _Event(is_write, len(entries.entered), recorder.inside)
            self.events.setdefault((name, key), []).append(event)

        try:
            for name, keys in changed.items():
                part = model.get_submodule(name)
                base, own = type(part), _watching(type(part), name, frozenset(keys), note)
                if not _take_class(part, make_subclass, base, own) and not _take_class(part, _make_plain, base, own):
                    self.unwatched.add(name)
                was.append((part, base))
            yield
        finally:
            for part, owner in was:
                part.__class__ = owner


def _take_class(part: nn.Module, make: Callable[..., type[nn.Module]], base: type[nn.Module], own: Any) -> bool:
    """Return whether ``part`` can take a class made of ``base``; with a base before nn.Module it may be refused."""
    try:
        part.__class__ = make(base, base.__name__, own)
    except TypeError:
        return False
    return True


def _make_plain(base: type[nn.Module], name: str, own: dict[str, Any]) -> type[nn.Module]:
    return type(name, (base,), own)


def _watching(base: type[nn.Module], name: str, keys: Collection[str], note: Callable[..., None]) -> dict[str, Any]:
    def get(self: nn.Module, key: str) -> Any:
        if key in keys:
            note(name, key, is_write=False)
        return base.__getattribute__(self, key)

    def put(self: nn.Module, key: str, value: Any) -> None:
        if key in keys:
            note(name, key, is_write=True)
        base.__setattr__(self, key, value)

    return {"__getattribute__": get, "__setattr__": put, "__module__": base.__module__}


def _is_read(recorder: Any, tensors: Collection[Tensor], left: Collection[int]) -> bool:
    kept = {recorder.number(leaf) for leaf in tensors if id(leaf) in left}
    return any(not kept.isdisjoint(op.reads) for op in recorder.ops)


def _contents(value: Any) -> list[Any] | None:
    if isinstance(value, dict):
        return list(dict.values(value))
    return list(value) if isinstance(value, (list, deque)) else None


def _is_other(now: list[Any] | None, was: list[Any] | None) -> bool:
    if now is None or was is None:
        return now is not was
    return not are_same(now, was)
