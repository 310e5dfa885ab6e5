"""A model and its optimizer as one flat dict, by the names that parameters have in the whole model.

It does not matter how the model is laid out: what is a shard is a DTensor, which says of what it is one; what a rank
does not have is in other ranks' dicts. A parameter with several names (tied) is in it under each, as another layout may
have it under another.
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

# What an optimizer may keep of a parameter in a shape of its own: tables, a history of gradients, a matrix of its rows.
_FEW_NUMBERS, _MOST_TIMES = 1 << 16, 64
_MOST_KEYS = 64  # of what an optimizer keeps of a parameter


class ModelState:
    """The modules of this rank. ``model`` is one, or has them as ``modules``, as PipelineStages has."""

    def __init__(self, model: Any) -> None:
        """Raises: SpecError."""
        modules = (model,) if isinstance(model, nn.Module) else getattr(model, "modules", None)
        if not isinstance(modules, (tuple, list)) or not all(isinstance(module, nn.Module) for module in modules):
            raise SpecError(f"a {type(model).__name__} is no model: give an nn.Module, or what has a tuple of modules")
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
        """The model's own: who writes into them changes the model."""
        return {name: value for name, value in self.values.items() if isinstance(value, Tensor)}

    def in_saved_order(self) -> dict[str, Any]:
        """``values``; of fused layers that are cut over ranks new tensors, whose rows lie as in the whole model.

        Collective: the ranks that have parts of the same layers.
        """
        return {name: _in_saved_order(name, value, self.plan) for name, value in self.values.items()}

    def put_in_order(self) -> None:
        """Have what was read into ``tensors`` in the order in which it is cut. Collective: as ``in_saved_order``."""
        for name, tensor in self.tensors.items():
            if self.plan is not None and name in self.plan.packed:
                tensor.copy_(from_saved_order(name, tensor, self.plan))

    @property
    def draws(self) -> list[int]:
        """How far the random numbers are of modules that are cut over ranks: they share them, apart from the rank's."""
        return [draws_of(module) for module in self.modules]

    @draws.setter
    def draws(self, draws: Sequence[int]) -> None:
        for module, each in zip(self.modules, draws):
            set_draws(module, int(each))

    def names_of(self) -> dict[int, list[str]]:
        """All names of each parameter, by its id."""
        found: dict[int, list[str]] = {}
        for key, parameter in self._root.named_parameters(remove_duplicate=False):
            names = found.setdefault(id(parameter), [])
            names += [name for fqn in _get_fqns(self._root, key) if (name := _without_number(fqn)) not in names]
        return found

    def tied(self) -> list[tuple[str, ...]]:
        """Names of the same parameter, on this rank or, where the model knows them (``tied_names``), on any."""
        here = [tuple(names) for names in self.names_of().values() if len(names) > 1]
        return [*self._tied, *here]

    def take(self, values: Mapping[str, Any]) -> None:
        """Have what was read, where it is no tensor, or where the rank has it twice."""
        everything = {key: values[name] for name, keys in self._keys.items() for key in keys}
        set_model_state_dict(self._root, everything)

    def check(self, index: TensorIndex, prefix: str) -> list[str]:
        """What of this rank's part is not in ``index``, or is of another shape: one text for each, by name."""
        wrong = []
        for name, value in self.values.items():
            saved = index.shape(prefix + name)
            if not isinstance(value, Tensor):
                wrong += [] if prefix + name in index.values else [f"{name} is not in it"]
            elif saved is None:
                wrong.append(f"{name} is not in it")
            elif saved != tuple(value.shape):
                wrong.append(f"{name} is {list(saved)} there and {list(value.shape)} here")
        return wrong


def _in_saved_order(name: str, value: Any, plan: TensorPlan | None) -> Any:
    return to_saved_order(name, value, plan) if plan is not None and isinstance(value, Tensor) else value


def _state_of(modules: nn.ModuleList) -> dict[str, Any]:
    """Raises: SpecError where a hook has put names into it that no layout knows."""
    try:
        found: dict[str, Any] = get_model_state_dict(modules)
    except AttributeError as exc:  # torch looks them up
        raise SpecError(f"state_dict() of the model has a name that leads nowhere ({exc}): {_HOOKED}") from exc
    if odd := [key for key in found if not key.partition(".")[0].isdigit()]:
        raise SpecError(f"state_dict() of the model has {name_some(odd)} beside its modules: {_HOOKED}")
    return found


_HOOKED = "a state_dict hook adds or renames what is kept; take it away to save the model"


def _without_number(key: str) -> str:
    """The name in the whole model, without the number of the module on this rank."""
    return key.partition(".")[2]


def _require_plain(name: str, value: Any) -> None:
    if isinstance(value, Tensor) and value.layout != torch.strided:
        raise SpecError(f"{name} is a tensor of layout {value.layout}: only dense ones can be kept")


# ---- the optimizer


class OptimizerState:
    """One optimizer over parameters of the model, with the keys of torch's flattened optimizer state dict.

    torch's own get_optimizer_state_dict makes a step with an optimizer that has no state yet, and gives state to
    parameters that never had any; and it takes one name of those that a tied parameter has.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: ModelState) -> None:
        """Raises: SpecError for a parameter that is not of the model."""
        self._optimizer, self.kind = optimizer, type(optimizer).__name__
        self._names, self._plan = model.names_of(), model.plan
        strange = sum(id(parameter) not in self._names for _, parameter in self._parameters())
        if strange:
            raise SpecError(
                f"the optimizer has {strange} parameters that are not of the model: make it after the model is "
                "wrapped, sharded or split, over the parameters that it has then"
            )

    def _parameters(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                yield group, parameter

    def values(self) -> dict[str, Any]:
        """Raises: SpecError for state that cannot be told to be whole or a part."""
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
        """The parameters of this rank's optimizer that were in no saved one."""
        known = {fqn.rpartition(".")[0] for fqn in index.metadata.state_dict_metadata}
        return [
            f"{self._names[id(parameter)][0]} was not in the saved optimizer"
            for _, parameter in self._parameters()
            if f"{prefix}param_groups.{self._names[id(parameter)][0]}" not in known
        ]

    def targets(self, index: TensorIndex, prefix: str) -> dict[str, Tensor]:
        """New tensors, laid out as the parameters are, for what was saved of them; their keys begin with ``prefix``."""
        found: dict[str, Tensor] = {}
        by_name, options = _keys_by_name(index, f"{prefix}state."), _keys_by_name(index, f"{prefix}param_groups.")
        for _, parameter in self._parameters():
            name = self._names[id(parameter)][0]
            if max(len(by_name.get(name, ())), len(options.get(name, ()))) > _MOST_KEYS:
                raise Damaged(f"of {name} it has more than {_MOST_KEYS} values, and no optimizer keeps as many")
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
                            f"the option {key!r} of {name} is {list(shape)}, and no optimizer has as large ones"
                        )
                    found[fqn] = torch.empty(shape, dtype=index.dtype(fqn))
        return found

    def saved_groups(self, index: TensorIndex, tensors: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
        """The options of each group, as they were saved.

        Raises: SpecError where parameters of one group had other options each.
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
                        f"{names[0]} and {name} are in one group of the optimizer, and were saved with other options "
                        "each: make the groups as they were"
                    )
                made.update(saved)
            groups.append(made)
        return groups

    def keep(self) -> Callable[[], None]:
        """Return what puts the present state back, which `take` replaces and does not write into."""
        kept = {"state": self._optimizer.state, "param_groups": self._optimizer.param_groups}
        return lambda: self._optimizer.__dict__.update(kept)

    def take(self, index: TensorIndex, tensors: Mapping[str, Any], prefix: str) -> None:
        """Have the state that was read. Collective: the ranks that have parts of the same layers.

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
        """In the order in which the parameter is cut."""
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
            f"{name} is sharded, and its optimizer state {key!r} is a plain tensor: nobody can say of which part; only "
            "optimizers whose state is a DTensor, as the parameter is, can be saved"
        )


def _is_sharded(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(not place.is_replicate() for place in parameter.placements)


def _target(what: str, shape: tuple[int, ...], dtype: torch.dtype, parameter: Tensor, present: Any) -> Tensor:
    """A tensor for state of this shape, laid out as what is there, or as the parameter. Raises: SpecError."""
    if isinstance(present, Tensor) and tuple(present.shape) == shape:
        return torch.empty_like(present, dtype=dtype)
    if shape == tuple(parameter.shape):
        return torch.empty_like(parameter.detach(), dtype=dtype)
    if _is_sharded(parameter) and max(shape, default=1) > 1:
        raise SpecError(
            f"{what} has a shape of its own, {list(shape)}, and how it is sharded is not known before the optimizer's "
            "first step: make one, on any batch, and load then"
        )
    most = max(_FEW_NUMBERS, _MOST_TIMES * parameter.numel(), max(parameter.shape, default=1) ** 2)
    if math.prod(shape) > most:  # before it has memory
        raise Damaged(
            f"{what} is {list(shape)}, and no optimizer keeps as much of a parameter of {list(parameter.shape)}"
        )
    return torch.empty(shape, dtype=dtype)


def _is_same(first: Any, second: Any) -> bool:
    """Whether they are one option: nan, which equals nothing, is the same as nan."""
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
