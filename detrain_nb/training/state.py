"""A model and its optimizer as one flat dict, keyed by the names that parameters have in the whole model.

The layout does not matter: a shard is a DTensor, which knows its place in the whole tensor; what a rank does not have
is in other ranks' dicts. A parameter with several names (tied) is in the dict under each of them, as another layout may
use another one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _get_fqns, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from ..errors import SpecError
from ..parallel import TensorPlan, from_saved_order, to_saved_order
from ..parallel.tensor.apply import draws_of, plan_of, set_draws
from ..text import name_some
from .digests import Damaged
from .tensor_index import TensorIndex

# Limits of optimizer state in another shape than its parameter: tables, a history of gradients, a matrix of its rows.
_FEW_NUMBERS, _MOST_TIMES = 1 << 16, 64
_MOST_KEYS = 64  # of an optimizer, for one parameter


class ModelState:
    """The modules of this rank. ``model`` is a module, or has several as ``modules``, as PipelineStages does."""

    def __init__(self, model: Any) -> None:
        """Read the state of ``model``. Raises: SpecError when it is not a model, or cannot be saved."""
        modules = (model,) if isinstance(model, nn.Module) else getattr(model, "modules", None)
        if not isinstance(modules, (tuple, list)) or not all(isinstance(module, nn.Module) for module in modules):
            raise SpecError(
                f"a {type(model).__name__} is not a model: give an nn.Module, or an object with a tuple of modules"
            )
        self.modules = tuple(modules)
        self._root = nn.ModuleList(modules)
        self._tied = [tuple(names) for names in getattr(model, "tied_names", ())]
        self.plan: TensorPlan | None = next(filter(None, map(plan_of, modules)), None)
        self.values: dict[str, Any] = {}
        self._keys: dict[str, list[str]] = defaultdict(list)
        for key, value in _state_of(self._root).items():
            name = _without_number(key)
            self._keys[name].append(key)
            self.values.setdefault(name, value)
            _require_plain(name, value)
        if meta := [name for name, value in self.values.items() if isinstance(value, Tensor) and value.is_meta]:
            raise SpecError(f"{name_some(meta)}: on the meta device, without values: call to_empty() first")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The model's own tensors: writing into them changes the model."""
        return {name: value for name, value in self.values.items() if isinstance(value, Tensor)}

    def in_saved_order(self) -> dict[str, Any]:
        """Return ``values``, with new tensors for fused layers that are cut over ranks: in the whole model's row order.

        Collective: the ranks that have parts of the same layers.
        """
        return {name: _in_saved_order(name, value, self.plan) for name, value in self.values.items()}

    def put_in_order(self) -> None:
        """Reorder what was read into ``tensors`` to the order in which it is cut. Collective: as ``in_saved_order``."""
        for name, tensor in self.tensors.items():
            if self.plan is not None and name in self.plan.packed:
                tensor.copy_(from_saved_order(name, tensor, self.plan))

    @property
    def draws(self) -> list[int]:
        """How many draws each module cut over ranks has made of their shared random numbers, not the rank's own."""
        return [draws_of(module) for module in self.modules]

    @draws.setter
    def draws(self, draws: Sequence[int]) -> None:
        for module, each in zip(self.modules, draws):
            set_draws(module, int(each))

    def names_of(self) -> dict[int, list[str]]:
        """Return all names of each parameter, by its id."""
        found: dict[int, list[str]] = {}
        for key, parameter in self._root.named_parameters(remove_duplicate=False):
            names = found.setdefault(id(parameter), [])
            names += [name for fqn in _get_fqns(self._root, key) if (name := _without_number(fqn)) not in names]
        return found

    def tied(self) -> list[tuple[str, ...]]:
        """Return names of the same parameter, on this rank or, if the model knows them (``tied_names``), on any."""
        here = [tuple(names) for names in self.names_of().values() if len(names) > 1]
        return [*self._tied, *here]

    def take(self, values: Mapping[str, Any]) -> None:
        """Set what was read, for values that are not tensors, and for those that the rank has twice."""
        everything = {key: values[name] for name, keys in self._keys.items() for key in keys}
        set_model_state_dict(self._root, everything)

    def check(self, index: TensorIndex, prefix: str) -> list[str]:
        """Return a text for each value of this rank that ``index`` lacks or has in another shape."""
        wrong = []
        for name, value in self.values.items():
            saved = index.shape(prefix + name)
            if not isinstance(value, Tensor):
                wrong += [] if prefix + name in index.values else [f"{name} is only in the model"]
            elif saved is None:
                wrong.append(f"{name} is only in the model")
            elif saved != tuple(value.shape):
                wrong.append(f"{name} was saved with shape {list(saved)} but has {list(value.shape)} in the model")
        return wrong


def _in_saved_order(name: str, value: Any, plan: TensorPlan | None) -> Any:
    return to_saved_order(name, value, plan) if plan is not None and isinstance(value, Tensor) else value


def _state_of(modules: nn.ModuleList) -> dict[str, Any]:
    """Return the state dict of ``modules``. Raises: SpecError when a hook has added names that no layout knows."""
    try:
        found: dict[str, Any] = get_model_state_dict(modules)
    except AttributeError as exc:  # torch looks them up
        raise SpecError(f"state_dict() of the model has a name without a module ({exc}): {_HOOKED}") from exc
    if odd := [key for key in found if not key.partition(".")[0].isdigit()]:
        raise SpecError(f"state_dict() of the model has {name_some(odd)} outside of its modules: {_HOOKED}")
    return found


_HOOKED = "a state_dict hook adds or renames entries; remove it to save the model"


def _without_number(key: str) -> str:
    """Return the name in the whole model, without the number of the module on this rank."""
    return key.partition(".")[2]


def _require_plain(name: str, value: Any) -> None:
    if isinstance(value, Tensor) and value.layout != torch.strided:
        raise SpecError(f"{name} is a tensor of layout {value.layout}: only dense ones can be saved")


# ---- the optimizer


class OptimizerState:
    """One optimizer over parameters of the model, with the keys of torch's flattened optimizer state dict.

    torch's own get_optimizer_state_dict makes a step with an optimizer that has no state yet, gives state to parameters
    that never had any, and uses only one of the names of a tied parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: ModelState) -> None:
        """Take the optimizer of ``model``. Raises: SpecError for a parameter that is not the model's."""
        self._optimizer, self.kind = optimizer, type(optimizer).__name__
        self._names, self._plan = model.names_of(), model.plan
        strange = sum(id(parameter) not in self._names for _, parameter in self._parameters())
        if strange:
            raise SpecError(
                f"the optimizer has {strange} parameters that are not the model's: create it after the model is "
                "wrapped, sharded or split, from the parameters that it has then"
            )

    def _parameters(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                yield group, parameter

    def values(self) -> dict[str, Any]:
        """Return state and options by key. Raises: SpecError for state whose layout is unknown."""
        found: dict[str, Any] = {}
        for group, parameter in self._parameters():
            state = self._optimizer.state.get(parameter, {})
            for name in self._names[id(parameter)]:
                for key, value in state.items():
                    _require_layout(name, key, value, parameter)
                    found[f"state.{name}.{key}"] = _in_saved_order(name, value, self._plan)
                for key, value in group.items():
                    if key != "params":
                        found[f"param_groups.{name}.{key}"] = value
        return found

    def check(self, index: TensorIndex, prefix: str) -> list[str]:
        """Return a text for each parameter of this rank's optimizer that the saved one did not have."""
        known = {fqn.rpartition(".")[0] for fqn in index.metadata.state_dict_metadata}
        return [
            f"{self._names[id(parameter)][0]} was not in the saved optimizer"
            for _, parameter in self._parameters()
            if f"{prefix}param_groups.{self._names[id(parameter)][0]}" not in known
        ]

    def targets(self, index: TensorIndex, prefix: str) -> dict[str, Tensor]:
        """Return new tensors for the saved state, laid out like the parameters; their keys begin with ``prefix``."""
        found: dict[str, Tensor] = {}
        by_name, options = _keys_by_name(index, f"{prefix}state."), _keys_by_name(index, f"{prefix}param_groups.")
        for _, parameter in self._parameters():
            name = self._names[id(parameter)][0]
            if max(len(by_name.get(name, ())), len(options.get(name, ()))) > _MOST_KEYS:
                raise Damaged(f"{name} has more than {_MOST_KEYS} optimizer values, and no optimizer keeps that many")
            for key in by_name.get(name, ()):
                fqn = f"{prefix}state.{name}.{key}"
                if (shape := index.shape(fqn)) is not None:
                    present = self._optimizer.state.get(parameter, {}).get(key)
                    found[fqn] = _target(f"{key!r} of {name}", shape, index.dtype(fqn), parameter, present)
            for key in options.get(name, ()):
                fqn = f"{prefix}param_groups.{name}.{key}"
                if (shape := index.shape(fqn)) is not None:  # a rate that is a tensor
                    if math.prod(shape) > _FEW_NUMBERS:
                        raise Damaged(
                            f"the option {key!r} of {name} has shape {list(shape)}, too large for any optimizer"
                        )
                    found[fqn] = torch.empty(shape, dtype=index.dtype(fqn))
        return found

    def saved_groups(self, index: TensorIndex, tensors: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
        """Return the options of each group as they were saved.

        Raises: SpecError when parameters of one group were saved with different options.
        """
        options = _keys_by_name(index, f"{prefix}param_groups.")
        every = {**index.values, **tensors}
        groups = []
        for group in self._optimizer.param_groups:
            made = {key: value for key, value in group.items() if key != "params"}
            names = [self._names[id(parameter)][0] for parameter in group["params"]]
            first: dict[str, Any] = {}
            for place, name in enumerate(names):
                saved = {key: every[f"{prefix}param_groups.{name}.{key}"] for key in options[name]}
                first = saved if place == 0 else first
                if first.keys() != saved.keys() or any(not _is_same(first[key], saved[key]) for key in saved):
                    raise SpecError(
                        f"{names[0]} and {name} are in one group of the optimizer but were saved with different "
                        "options: make the groups as they were"
                    )
                made.update(saved)
            groups.append(made)
        return groups

    def keep(self) -> Callable[[], None]:
        """Return a function that restores the present state, which `take` replaces and does not write into."""
        kept = {"state": self._optimizer.state, "param_groups": self._optimizer.param_groups}
        return lambda: self._optimizer.__dict__.update(kept)

    def take(self, index: TensorIndex, tensors: Mapping[str, Any], prefix: str) -> None:
        """Load the state that was read. Collective: the ranks that have parts of the same layers.

        Raises: as ``saved_groups``.
        """
        state: dict[int, dict[str, Any]] = {}
        states = _keys_by_name(index, f"{prefix}state.")
        every = {**index.values, **tensors}
        groups, number = self.saved_groups(index, tensors, prefix), 0
        for group, made in zip(self._optimizer.param_groups, groups):
            made["params"] = list(range(number, number + len(group["params"])))
            for place, parameter in zip(made["params"], group["params"]):
                name = self._names[id(parameter)][0]
                if name in states:
                    read = {key: every[f"{prefix}state.{name}.{key}"] for key in states[name]}
                    state[place] = {key: self._cut(name, value) for key, value in read.items()}
            number += len(group["params"])
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _cut(self, name: str, value: Any) -> Any:
        """Reorder a value to the order in which its parameter is cut."""
        if self._plan is None or not isinstance(value, Tensor):
            return value
        return from_saved_order(name, value, self._plan)


def _keys_by_name(index: TensorIndex, prefix: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for fqn in index.metadata.state_dict_metadata:
        if fqn.startswith(prefix):
            name, _, key = fqn.removeprefix(prefix).rpartition(".")
            found[name].append(key)
    return found


def _require_layout(name: str, key: str, value: Any, parameter: Tensor) -> None:
    _require_plain(f"{key} of {name}", value)
    if _is_sharded(parameter) and isinstance(value, Tensor) and not isinstance(value, DTensor) and value.numel() > 1:
        raise SpecError(
            f"{name} is sharded but its optimizer state {key!r} is a plain tensor, whose part is unknown: use an "
            "optimizer that keeps its state as DTensors, like the parameter"
        )


def _is_sharded(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(not place.is_replicate() for place in parameter.placements)


def _target(what: str, shape: tuple[int, ...], dtype: torch.dtype, parameter: Tensor, present: Any) -> Tensor:
    """Return a tensor for saved state, laid out like the present state or the parameter. Raises: SpecError, Damaged."""
    if isinstance(present, Tensor) and tuple(present.shape) == shape:
        return torch.empty_like(present, dtype=dtype)
    if shape == tuple(parameter.shape):
        return torch.empty_like(parameter.detach(), dtype=dtype)
    if _is_sharded(parameter) and max(shape, default=1) > 1:
        raise SpecError(
            f"{what} has shape {list(shape)}, unlike its parameter, and its sharding is unknown before the optimizer's "
            "first step: make one, on any batch, then load"
        )
    most = max(_FEW_NUMBERS, _MOST_TIMES * parameter.numel(), max(parameter.shape, default=1) ** 2)
    if math.prod(shape) > most:  # before memory is allocated
        raise Damaged(f"{what} has shape {list(shape)}, too large for a parameter of shape {list(parameter.shape)}")
    return torch.empty(shape, dtype=dtype)


def _is_same(first: Any, second: Any) -> bool:
    """Return whether two option values are the same; nan is the same as nan."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return isinstance(first, Tensor) and isinstance(second, Tensor) and _is_same_tensor(first, second)
    if isinstance(first, float) and isinstance(second, float):
        return first == second or (math.isnan(first) and math.isnan(second))
    if isinstance(first, (list, tuple)):
        is_alike = type(first) is type(second) and len(first) == len(second)
        return is_alike and all(map(_is_same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_is_same(first[key], second[key]) for key in first)
    if isinstance(first, set) and isinstance(second, set):
        return first == second or sorted(map(repr, first)) == sorted(map(repr, second))
    return bool(first == second)


def _is_same_tensor(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    raw = [each.contiguous().reshape(-1).view(torch.uint8) for each in (first, second)]
    return torch.equal(first, second) or torch.equal(*raw)
