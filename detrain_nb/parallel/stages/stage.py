"""A stage of a model: the user's own forward, without what belongs to other stages.

A module of another stage is replaced by a `Stub`, which has no parameters and returns zeros of the right shape. A later
stage runs the forward on those until it reaches its first module, whose argument is replaced by what the stage
received; every stage but the last stops at the first module of the next stage. Parameters keep their names in the whole
model. The user's model is unchanged; a stage shares its tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from ...errors import SpecError
from ..compiled import compile_again, run_before
from ..deferred import find_value
from ..holders import follow_copies
from ..module_copies import ghost_of, make_subclass, shallow_copy
from ..recording import ModuleOutput, device_of, first_float_tensor, modules_around, without_fused_layers
from ..stubs import End, Reached, StageState, stop_at, stub_of
from .root_hooks import RootHooks


class StageForward(nn.Module):
    """Base that a stage's class puts before the user's own class."""

    _state: StageState

    def be_careful(self) -> None:
        """Expect the forward to write into the stand-ins for other stages."""
        self._state.be_careful()

    def be_thrown_away(self) -> None:
        """Do not save state for a second run: the stage is not used afterwards."""
        self._state.is_thrown_away = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state, received = self._state, None
        if state.cut_in is not None:
            received, *rest = args
            args = tuple(rest)
        put_back = state.keep(self)
        try:
            result = self._run(received, args, kwargs)
        except RuntimeError as exc:
            if state.is_careful or not any(words in str(exc) for words in _OF_WRITING):
                raise
            put_back()
            state.be_careful()
            result = self._run(received, args, kwargs)
        return _own(result) if isinstance(result, Tensor) else result

    def _run(self, received: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self._state
        if received is not None:
            state.received = received.clone() if state.is_careful else received
            state.move(received.device)
        else:
            state.move(device_of((args, kwargs), state.device))
        state.is_taken = received is None
        try:
            with without_fused_layers():
                result = state.hooks.run(self, super().forward, args, kwargs)
            state.require_taken()
            if state.cut_out is not None:
                raise SpecError(f"the model returned without reaching {state.cut_out!r}, where its next stage begins")
            return result
        except Reached as reached:
            state.require_taken()
            return reached.tensor
        finally:
            state.received, state.is_taken = None, False


# Parts of torch's errors about writes into zeros without memory, or into an input.
_OF_WRITING = ("single memory location", "modified inplace", "in-place operation")


def _own(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor, neither a view nor the received one: zero-bubble schedules detach it in place."""
    is_plain = tensor.is_contiguous() and not tensor._is_view() and not (tensor.is_leaf and tensor.requires_grad)
    return tensor if is_plain else tensor.clone(memory_format=torch.contiguous_format)


def build_stage(
    model: nn.Module,
    *,
    cut_in: str | None,
    cut_out: str | None,
    replaceable: frozenset[str],
    runs: set[str],
    holds: set[str],
    outputs: Mapping[str, ModuleOutput],
    written_elsewhere: Collection[str] = (),
    is_on_zeros: bool = False,
) -> nn.Module:
    """Build a stage from copies of the modules that it needs.

    ``replaceable``: modules that zeros can replace; ``runs``: modules in this stage and around it. ``holds``:
    parameters of the stage; ``outputs``: what modules returned in the example, if needed. ``written_elsewhere``:
    buffers that another stage has to write; this stage gets copies of them. ``is_on_zeros``: the stage computes only
    shapes.
    """
    holding = {outer for name in holds for outer in modules_around(name)}
    needed = runs | holding
    copies: dict[int, nn.Module] = {}
    found: dict[int, nn.Module] = {}
    state = StageState(cut_in=cut_in, cut_out=cut_out, replaceable=replaceable, outputs=outputs)
    state.is_on_zeros = is_on_zeros

    def build(name: str, module: nn.Module) -> nn.Module:
        if id(module) in copies:
            return copies[id(module)]
        is_end = bool(name) and name == cut_out and name not in holding
        if is_end or name in replaceable and name not in needed:
            ghost = state.ghosts[name] = ghost_of(module)
            _note_originals(state, ghost, module)
            made: nn.Module = End(name, ghost, state) if is_end else stub_of(name, ghost, state)
        else:
            made = shallow_copy(module)
            for key, child in module._modules.items():
                if child is not None:
                    made._modules[key] = build(f"{name}.{key}" if name else key, child)
            for key, parameter in module._parameters.items():
                if parameter is not None and (f"{name}.{key}" if name else key) not in holds:
                    state.leave_out(made, "_parameters", key)
            for key, buffer in module._buffers.items():
                if (f"{name}.{key}" if name else key) in written_elsewhere and buffer is not None:
                    made._buffers[key] = buffer.clone()
            compile_again(made)
        copies[id(module)], found[id(module)] = made, module
        return made

    stage = build("", model)
    follow_copies(copies, found)
    state.hooks = RootHooks(stage)
    stage.__class__ = make_subclass(type(model), f"{type(model).__name__}Stage", {}, StageForward)
    stage.__dict__["_state"] = state
    if cut_out is not None and cut_out in holding:  # it does not run here, but other code reads its parameters
        run_before(stage.get_submodule(cut_out), stop_at)
    if cut_in is not None:
        run_before(stage.get_submodule(cut_in), functools.partial(_inject, state))
    return stage


def _note_originals(state: StageState, ghost: nn.Module, module: nn.Module) -> None:
    """Note the originals of a replaced module's tensors: only its parameters are left out, the rest stays readable."""
    for copied, part in zip(ghost.modules(), module.modules()):
        for key, tensor in (*part._buffers.items(), *vars(part).items()):
            if isinstance(tensor, Tensor):
                own = copied._buffers.get(key, vars(copied).get(key))
                state.originals[id(own)] = find_value(part, key) or functools.partial(_itself, tensor)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _inject(state: StageState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Replace the zeros that reach a stage's first module by the received tensor, for everyone who holds them."""
    received = state.received
    if received is None:  # a checkpoint repeats it in the backward pass, with the same argument
        return
    argument = first_float_tensor(args, kwargs)
    assert argument is not None
    try:
        swap_tensors(argument, received.view_as(received))
    except RuntimeError:  # a checkpoint has saved it
        if argument._is_view() and not state.is_careful:  # a gradient has the layout of the view's base
            raise RuntimeError(f"a view of zeros of a {_OF_WRITING[0]} is saved") from None
        with torch.autograd._unsafe_preserve_version_counter(argument):
            _Become.apply(argument, received)  # type: ignore[no-untyped-call]
    state.is_taken = True
    state.on_taken(argument)


class _Become(torch.autograd.Function):
    """Function that gives a tensor in place another one's values, in that one's memory, and its place in the graph."""

    @staticmethod
    def forward(context: Any, zeros: Tensor, received: Tensor) -> Tensor:
        zeros.set_(received.detach())  # type: ignore[call-overload]
        context.mark_dirty(zeros)
        return zeros

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient
