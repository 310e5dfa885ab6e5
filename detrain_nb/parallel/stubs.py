"""Stand-ins, in a stage, for the modules of other stages: zeros of the right shapes, which cost nothing.

No result depends on the values of a stub; only their shapes matter, for the user's code between modules.
"""

from __future__ import annotations

import contextlib
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ..errors import SpecError
from .blocks import StandIn, looks_of
from .compiled import leave_as_written
from .kept import State, state_kept
from .module_copies import shallow_copy, zeros_without_memory
from .recorders import TensorMemo
from .recording import ModuleOutput, device_of, first_float_tensor
from .stages.root_hooks import RootHooks


class Reached(BaseException):
    """The forward has reached the first module of the next stage; a BaseException passes any ``except Exception``."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor


class StageState:
    """State that the parts of a stage share while it runs.

    ``is_careful``: the forward writes into its inputs, so zeros get memory of their own and received tensors are
    copied. ``hooks``: those of the model itself. ``replaceable``: the modules that zeros can stand in for.
    ``outputs``: outputs of modules in the example, where they cannot be computed without values. ``is_on_zeros``: no
    result counts. ``is_taken``: in this run, the stage's input was consumed: from here on it computes. ``same_call``:
    outputs of modules in this very call, if known, so that no module has to be run for them. ``is_thrown_away``: the
    stage is a copy.
    """

    def __init__(
        self,
        *,
        cut_in: str | None,
        cut_out: str | None,
        replaceable: frozenset[str],
        outputs: Mapping[str, ModuleOutput],
    ) -> None:
        self.cut_in, self.cut_out = cut_in, cut_out
        self.replaceable, self.outputs = replaceable, dict(outputs)
        self.is_careful = self.is_on_zeros = self.is_thrown_away = False
        self.same_call: Mapping[str, ModuleOutput] = {}
        self.hooks = RootHooks()
        self.device = torch.device("cpu")
        self.received: Tensor | None = None
        self.is_taken = False
        self._modes_met: set[bool] = set()
        self.originals: dict[int, Callable[[], Tensor]] = {}  # buffers of the model, by id of the ghosts' buffers
        self._left_out: list[tuple[nn.Module, str]] = []  # tensors of other stages, replaced by zeros
        self.ghosts: dict[str, nn.Module] = {}  # modules of other stages, by name
        self._looks: Mapping[str, Any] | None = None
        self._answers: dict[Any, Any] = {}  # by the look of module and arguments

    @staticmethod
    def on_taken(argument: Tensor) -> None:
        """Handle that the received tensor has taken the place of ``argument``."""

    def leave_out(self, module: nn.Module, kind: str, key: str) -> None:
        """Replace a tensor by zeros, as code that runs before the cut may read it."""
        tensor = getattr(module, kind).pop(key)
        module.__dict__[key] = self.zeros(tensor, self.device)
        self._left_out.append((module, key))

    def move(self, device: torch.device) -> None:
        """Move the stand-ins to the device of the inputs."""
        if device != self.device:
            self.device = device
            self._make_zeros()

    def keep(self, stage: nn.Module) -> Callable[[], None]:
        """Note the state of a stage that may fail half-way and run again; return a function that restores it.

        A stage that has already run in its mode does not fail any more, and a copy to be thrown away needs no
        restoring.
        """
        if self.is_careful or self.is_thrown_away or stage.training in self._modes_met:
            return lambda: None
        self._modes_met.add(stage.training)
        buffers = [(buffer, buffer.clone()) for part in stage.modules() for buffer in part.buffers(recurse=False)]
        undo = State(stage).note()

        def put_back() -> None:
            undo()
            with torch.no_grad():
                for buffer, values in buffers:
                    buffer.copy_(values)

        return put_back

    def be_careful(self) -> None:
        self.is_careful = True
        self._make_zeros()

    def zeros(self, like: Tensor, device: torch.device) -> Tensor:
        """Return zeros that code may read and, if the stage is known to write, write into."""
        if self.is_careful:
            return torch.zeros(like.shape, dtype=like.dtype, device=device)
        return zeros_without_memory(like, device)

    def _make_zeros(self) -> None:
        for module, key in self._left_out:
            module.__dict__[key] = self.zeros(module.__dict__[key], self.device)

    def ask_one_alike(self, name: str, arguments: tuple[Any, ...], ask: Callable[[], Any]) -> Any:
        """Return the output of ``name``, from ``ask`` or from an earlier module that computes in the same way."""
        if self._looks is None:
            self._looks = {}
            with contextlib.suppress(Exception):  # a user's `extra_repr` may read values
                self._looks = looks_of(self.ghosts, with_numbers=True)
        if name not in self._looks or any(type(each) is tuple and len(each) == 1 for each in arguments):
            return ask()  # the look does not describe these arguments completely
        key = self._looks[name], arguments
        if key not in self._answers:
            found = ask()
            if not all(isinstance(leaf, (Tensor, bool, type(None))) for leaf in tree_leaves(found)):
                return found
            self._answers[key] = found
        return self._answers[key]

    def require_own(self, name: str) -> None:
        """Raise SpecError if a result of this stage would depend on zeros."""
        if self.is_taken and not self.is_on_zeros:
            raise SpecError(
                f"{name!r} of another stage was called in this one: this batch runs other layers, or runs them in "
                "another order, than the example inputs; split with example inputs of this kind"
            )

    def require_taken(self) -> None:
        """Raise SpecError if the stage input was not consumed."""
        if not self.is_taken:
            raise SpecError(
                f"stage input was never consumed: {self.cut_in!r} was not called through the module tree; call it by "
                "its name in the model, not through a function made earlier"
            )


_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)  # code iterates over these, but not over a stub
_SEEING = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class Stub(StandIn):
    """Stand-in for the module ``name`` of another stage.

    ``ghost`` is that module with its tensors on the meta device: it provides shapes and attributes. For ``isinstance``
    a stub is of the ghost's class, and hooks on the module see the zeros: code that collects the outputs of its layers
    gets as many as in the whole model, each in its place.
    """

    _tensors: dict[tuple[str, torch.device], Tensor]
    _readable: dict[torch.device, nn.Module]

    def __init__(self, name: str, ghost: nn.Module, state: StageState) -> None:
        super().__init__()
        self.__dict__.update(
            _name=name, _ghost=ghost, _state=state, _known={}, _tensors={}, _readable={}, _unfolded=None, _kept=None
        )
        self.__dict__.update({kind: ghost.__dict__[kind].copy() for kind in _SEEING})
        self.training = ghost.training

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        ghost = self.__dict__.get("_ghost")
        return type(self) if ghost is None or isinstance(ghost, _LISTS) else type(ghost)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._state.require_own(self._name)
        key = (self.training, *_look_of(args, kwargs))
        if key not in self._known:
            self._known[key] = self._ask(args, kwargs)
        known = self._known[key]
        if isinstance(known, Tensor):  # the usual case; tree_map is slow
            return self._fresh(known)
        return tree_map(lambda leaf: self._fresh(leaf) if isinstance(leaf, Tensor) else leaf, known)

    def _fresh(self, zeros: Tensor) -> Tensor:
        """Return a new tensor each time, as code may mark what it gets."""
        if self._state.is_careful:
            return torch.zeros(zeros.shape, dtype=zeros.dtype, device=zeros.device)
        return zeros.detach() if zeros.numel() > 1 else torch.zeros_like(zeros)  # code could write into one element

    @contextlib.contextmanager
    def _ghost_kept(self, *given: Any) -> Iterator[None]:
        """Let the ghost's code run in the block, on ``given``, and undo its writes into the user's objects."""
        if self._kept is None:
            self.__dict__["_kept"] = State(self._ghost)
        with self._kept.kept(self._state.device), state_kept(*given):
            yield

    def _ask(self, args: Any, kwargs: Any) -> Any:
        """Return the output that the module would have, as zeros without memory on the right device."""
        has_tensor = any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))
        device = device_of((args, kwargs)) if has_tensor else self._state.device
        argument, same = first_float_tensor(args, kwargs), self._state.same_call.get(self._name)
        if argument is not None and same is not None and same.argument_shape == argument.shape:
            known = same.scaled_to(argument)
        else:
            look = (self.training, *_look_of(args, kwargs))
            known = self._state.ask_one_alike(self._name, look, lambda: self._ask_ghost(args, kwargs))
        return tree_map(lambda leaf: zeros_without_memory(leaf, device) if isinstance(leaf, Tensor) else leaf, known)

    def _ask_ghost(self, args: Any, kwargs: Any) -> Any:
        on_meta, kwargs_on_meta = tree_map(TensorMemo(_on_meta), (args, kwargs))
        self._ghost.train(self.training)
        try:
            with self._ghost_kept(args, kwargs), torch.no_grad():
                self._ghost.__dict__["_forward_hooks"] = OrderedDict[int, Any]()  # they see the final zeros instead
                return self._ghost(*on_meta, **kwargs_on_meta)
        except (RuntimeError, LookupError) as exc:  # it reads values, or state that a stub did not set
            return self._answer_without_meta(args, kwargs, exc)

    def _answer_without_meta(self, args: Any, kwargs: Any, why: Exception) -> Any:
        """Return the output from the example, or from the module's code run on zeros, or else its argument."""
        argument = first_float_tensor(args, kwargs)
        example = self._state.outputs.get(self._name)
        if argument is not None and example is not None:
            return example.scaled_to(argument)
        try:
            if self._unfolded is None:
                self.__dict__["_unfolded"] = unfold(self._name, self._ghost, self._state)
                self._unfolded.__dict__["_forward_hooks"] = OrderedDict[int, Any]()
            self._unfolded.train(self.training)
            with self._ghost_kept(args, kwargs), torch.no_grad():
                return tree_map(TensorMemo(_on_meta), self._unfolded(*args, **kwargs))
        except (RuntimeError, ValueError, LookupError, ArithmeticError) as exc:
            if argument is None:
                raise SpecError(
                    f"zeros cannot stand in for {self._name!r} of another stage: its code reads values and fails on "
                    f"zeros ({exc}); cut after it, or move the code that reads values into a module of its own"
                ) from why
            return _on_meta(argument)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            ghost = self.__dict__["_ghost"]
            if isinstance(ghost._buffers.get(name, ghost.__dict__.get(name)), Tensor):
                return self._own_tensor(name)
            if isinstance(getattr(type(ghost), name, None), (property, types.FunctionType)):
                return getattr(self._with_tensors(), name)  # its code may read any attribute
            return self._stand_for(name, getattr(ghost, name))

    def _own_tensor(self, name: str) -> Tensor:
        """Return a buffer, or a tensor attribute: code of any stage may read it."""
        device = self._state.device
        if (name, device) not in self._tensors:
            found = self._ghost._buffers.get(name, self._ghost.__dict__.get(name))
            original = self._state.originals.get(id(found))
            tensor = original() if original is not None else found
            is_known = not tensor.is_meta or device.type == "meta"
            self._tensors[name, device] = tensor.to(device) if is_known else self._state.zeros(tensor, device)
        return self._tensors[name, device]

    def _with_tensors(self) -> nn.Module:
        """Return the module for code outside its forward: its tensors, zeros as parameters, stubs as children."""
        device = self._state.device
        if device not in self._readable:
            made = self._readable[device] = shallow_copy(self._ghost)
            made.__dict__.update({key: self._state.zeros(each, device) for key, each in _there(made._parameters)})
            made._parameters.clear()
            made._buffers.update({key: self._own_tensor(key) for key, _ in _there(made._buffers)})
            made._modules.update({key: self._stand_for(key, child) for key, child in _there(made._modules)})
        return self._readable[device]

    def _stand_for(self, name: Any, found: Any) -> Any:
        """Return the stand-in for a part of the module; code may compute with its tensors."""
        if isinstance(found, Tensor):
            return self._state.zeros(found, self._state.device)
        if isinstance(found, nn.Module):
            return stub_of(f"{self._name}.{name}", found, self._state)
        return found


def _there(entries: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(key, each) for key, each in entries.items() if each is not None]


class _ListStub(Stub):
    """Stand-in for a container that is indexed by position, such as ``nn.Sequential``."""

    def __getitem__(self, key: Any) -> Any:
        return self._stand_for(key, self._ghost[key])

    def __len__(self) -> int:
        return len(self._ghost)

    def __iter__(self) -> Iterator[Any]:
        yield from (self._stand_for(index, found) for index, found in enumerate(self._ghost))


class _DictStub(_ListStub):
    """Stand-in for a container that is indexed by name."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ghost)

    def __contains__(self, key: Any) -> bool:
        return key in self._ghost

    def values(self) -> list[Any]:
        return [self[key] for key in self._ghost]

    def items(self) -> list[tuple[Any, Any]]:
        return [(key, self[key]) for key in self._ghost]


def stub_of(name: str, ghost: nn.Module, state: StageState) -> Stub:
    """Return a stand-in for the module ``name`` of another stage."""
    if isinstance(ghost, (nn.ModuleDict, nn.ParameterDict)):
        return _DictStub(name, ghost, state)
    if isinstance(ghost, (nn.Sequential, nn.ModuleList, nn.ParameterList)):
        return _ListStub(name, ghost, state)
    return Stub(name, ghost, state)


class End(Stub):
    """Stub at the place where the next stage begins."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stop_at(self, args, kwargs)


def stop_at(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Leave the forward: the next stage begins with the argument of ``module``."""
    tensor = first_float_tensor(args, kwargs)
    assert tensor is not None  # the profile found one
    raise Reached(tensor)


def unfold(name: str, ghost: nn.Module, state: StageState) -> nn.Module:
    """Return a module whose own code runs, with zeros for all of its tensors and stubs for the modules inside."""
    made = shallow_copy(ghost)
    for kind in ("_parameters", "_buffers"):
        for key, tensor in list(getattr(made, kind).items()):
            if tensor is not None:
                state.leave_out(made, kind, key)
    for key, child in ghost._modules.items():
        path = f"{name}.{key}" if name else key
        if child is not None:
            inner = stub_of(path, child, state) if path in state.replaceable else unfold(path, child, state)
            made._modules[key] = inner
    leave_as_written(made)
    return made


def _look_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what determines shapes in a call's arguments, as a key."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # the usual case, and faster
        return _look_of_leaf(args[0])
    leaves, spec = tree_flatten((args, kwargs))
    return repr(spec), *(_look_of_leaf(leaf) for leaf in leaves)


def _look_of_leaf(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    is_plain = isinstance(leaf, (int, float, str, type(None), torch.dtype, torch.device))
    return (type(leaf), leaf) if is_plain else (type(leaf),)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")
