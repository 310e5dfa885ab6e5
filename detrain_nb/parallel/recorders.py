"""What all have in common that watch a model run: which tensor is which, and when its modules are entered and left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from .operators import OperatorMode, run_operator

Met = TypeVar("Met")


class OperatorRecorder(OperatorMode, Generic[Met]):
    """Notes operators, when they have run; what it meets, as a rule tensors, gets numbers from 0 on, and is ``kept``.

    So no other gets the ``identity`` of one that has gone: of a tensor its id.
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
        """The number of one that was met, else -1."""
        return self._numbers.get(self._identity(met), -1)

    def on_new(self, met: Met) -> None:
        """It has just got its number, which is the last."""

    def on_operator(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        result = run_operator(func, args, kwargs)
        self.note(func, args, kwargs, result)
        return result

    def note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """An operator has given ``result``."""
        raise NotImplementedError


class TensorMemo:
    """A function of tensors that gives the same one for the same one, and leaves everything else as it is."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        self._make = make
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # the original too, so that its id stays its own

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = value, self._make(value)
        return self._made[id(value)][1]

    def has(self, value: Tensor) -> bool:
        """Whether it was given before."""
        return id(value) in self._made

    @property
    def given(self) -> list[Tensor]:
        """All that were."""
        return [tensor for tensor, _ in self._made.values()]


@contextlib.contextmanager
def modules_watched(
    modules: Iterable[tuple[str, nn.Module]],
    on_entry: Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], None],
    on_exit: Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any], Any], Any] | None = None,
    *,
    is_first: bool = False,
) -> Iterator[None]:
    """In here ``on_entry(name, module, args, kwargs)`` is called where a module is, and ``on_exit``, with the output.

    What that returns, if anything, is given in the place of the output. ``is_first``: enter before all other hooks.
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
