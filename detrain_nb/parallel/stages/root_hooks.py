"""Forward hooks of the model itself: a stage has more arguments than the model and may return something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_KINDS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


class RootHooks:
    """Hooks taken off a stage: pre-hooks run in every stage on the model's arguments, the others in the last stage."""

    def __init__(self, stage: nn.Module | None = None) -> None:
        self._hooks: dict[str, Any] = {kind: {} for kind in _KINDS}
        if stage is not None:
            self._hooks = {kind: getattr(stage, kind).copy() for kind in _KINDS}
            for kind in _KINDS:  # later hooks, as of FSDP2, get the stage's own arguments
                getattr(stage, kind).clear()

    def run(self, stage: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model's ``forward`` as its ``__call__`` would; if the next stage is reached, there is no output."""
        for number, hook in self._hooks["_forward_pre_hooks"].items():
            if number in self._hooks["_forward_pre_hooks_with_kwargs"]:
                args, kwargs = hook(stage, args, kwargs) or (args, kwargs)
            elif (given := hook(stage, args)) is not None:
                args = given if isinstance(given, tuple) else (given,)
        try:
            output = forward(*args, **kwargs)
        except Exception:
            for number in self._hooks["_forward_hooks_always_called"]:
                self._call(number, stage, args, kwargs, None)
            raise
        for number in self._hooks["_forward_hooks"]:
            given = self._call(number, stage, args, kwargs, output)
            output = output if given is None else given
        return output

    def _call(self, number: int, stage: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        hook = self._hooks["_forward_hooks"][number]
        if number in self._hooks["_forward_hooks_with_kwargs"]:
            return hook(stage, args, kwargs, output)
        return hook(stage, args, output)
