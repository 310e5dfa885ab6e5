"""Common parts of recorders of a model's run: numbers for tensors, and hooks on entering and leaving modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from .operators import OperatorMode, run_operator

Met = TypeVar("Met")


class OperatorRecorder(OperatorMode, Generic[Met]):
    """A mode that notes operators after they have run, and numbers the objects it meets, usually tensors, from 0.

    Objects are ``kept``, so that no other one can get the ``identity`` (for tensors, the id) of a deleted one.
    """

    def __init__(self, identity: Callable[[Met], int] = id) -> None:
        super().__init__()
        self.kept: list[Met] = []  # by number
        self._numbers: dict[int, int] = {}
        self._identity = identity

    def number(self, met: Met) -> int:
        key = self._identity(met)
        if key not in self._numbers:
            self._numbers[key] = len(self.kept)
            self.kept.append(met)
            self.on_new(met)
        return self._numbers[key]

    def known(self, met: Met) -> int:
        """Return the number of an object that was met before, else -1."""
        return self._numbers.get(self._identity(met), -1)

    def on_new(self, met: Met) -> None:
        """Handle a new object, which has just got the last number."""

    def on_operator(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        result = run_operator(func, args, kwargs)
        self.note(func, args, kwargs, result)
        return result

    def note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Note an operator and its ``result``."""
        raise NotImplementedError


class TensorMemo:
    """A memoized function of tensors that returns everything else unchanged."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        self._make = make
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, to keep its id valid

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = value, self._make(value)
        return self._made[id(value)][1]

    def has(self, value: Tensor) -> bool:
        """Return whether the memo was called with ``value`` before."""
        return id(value) in self._made

    @property
    def given(self) -> list[Tensor]:
        """All tensors that the memo was called with."""
        return [tensor for tensor, _ in self._made.values()]


@contextlib.contextmanager
def modules_watched(
    modules: Iterable[tuple[str, nn.Module]],
    on_entry: Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], None],
    on_exit: Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any], Any], Any] | None = None,
    *,
    is_first: bool = False,
) -> Iterator[None]:
    """Call ``on_entry(name, module, args, kwargs)`` before each module in the block, and ``on_exit``, with the output.

    If ``on_exit`` returns a value, it replaces the output. ``is_first``: enter before all other hooks.
    """
    handles = []
    try:
        for name, module in modules:

            def enter(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                on_entry(name, module, args, kwargs)

            handles.append(module.register_forward_pre_hook(enter, prepend=is_first, with_kwargs=True))
            if on_exit is not None:

                def leave(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> Any:
                    return on_exit(name, module, args, kwargs, output)

                handles.append(module.register_forward_hook(leave, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
