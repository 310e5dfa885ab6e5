"""Models made without memory: each rank later computes the values of its own part, one tensor at a time.

What the constructor does to tensors is recorded on a tape, and every module notes the values that its tensors will
have. The model has tensors on the meta device and is laid out like any other; then ``fill`` computes the values of
the parts that a rank holds. They equal those that the model would have had on one CPU, with the same seed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedFakeTensorException
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from ..errors import SpecError
from .arguments import require_model
from .mesh import usual_device
from .module_copies import ghost_of, replace_tensors, zeros_without_memory
from .recorders import TensorMemo
from .tape import Place, Tape
from .tape_recorder import TapeRecorder
from .tensor.apply import from_saved_order
from .tensor.plan import TensorPlan
from .tensor.ranks import bounds

Model = TypeVar("Model", bound=nn.Module)

_VALUES = "_deferred_values"  # attribute of a module: values by the names of its own tensors


@dataclass(frozen=True)
class _Value:
    """The future value of a tensor: what is at ``place`` once ``tape`` has run."""

    tape: Tape
    place: Place

    def compute(self) -> Tensor:
        return self.tape.value(self.place)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Value:
        return self


def deferred(make: Callable[..., Model], *args: Any, **kwargs: Any) -> Model:
    """Return the model ``make(*args, **kwargs)`` with tensors on the meta device, which gets its values later.

    ``parallelize`` gives each rank the values of its part, ``materialize`` all of them to one process: bit for bit what
    ``make`` would have given on the CPU with the current seed, buffers included. Random numbers are drawn on memory
    that is freed at once, so the generator ends in the state it would have had. Code that sets values belongs in
    ``make``: a loop over ``init`` functions, ties, reading a checkpoint. It may read values (``item()``, ``if``), but
    not memory (``numpy()``). Uninitialised tensors become zero.

    Raises: SpecError when this is impossible for the model or one of its tensors.
    """
    if isinstance(make, nn.Module) or not callable(make):
        raise SpecError("deferred makes the model itself: pass a class, or a function that returns a model")
    with (
        warnings.catch_warnings(),
        FakeTensorMode(allow_non_fake_inputs=True) as fakes,
        TapeRecorder(fakes) as recorder,
    ):
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # copy.deepcopy does
        try:
            model = make(*args, **kwargs)
        except (RuntimeError, UnsupportedFakeTensorException) as exc:
            if isinstance(exc, UnsupportedFakeTensorException) or any(words in str(exc) for words in _OF_MEMORY):
                raise SpecError(
                    f"{_name_of(make)} needs tensors with memory, which deferred tensors lack ({exc}): make it "
                    "without numpy and lazy layers, or without deferred()"
                ) from exc
            raise
    if not isinstance(model, nn.Module):
        raise SpecError(
            f"{_name_of(make)} returned {type(model).__name__}: pass deferred() a function that returns an nn.Module"
        )
    _leave_on_meta(model, recorder)
    return model


# torch's errors when a tensor would be read from outside torch, or turned into another class.
_OF_MEMORY = ("numpy() is not supported", "already associated to a python object of type FakeTensor")


def materialize(model: Model, *, device: torch.device | str | None = None) -> Model:
    """Give all deferred tensors of ``model`` their values, in place, on ``device``, and move its other tensors there.

    ``device``: by default a GPU if there is one. Returns ``model``.
    Raises: SpecError when a tensor has no values to get, or was changed after ``deferred`` returned.
    """
    require_model(model)
    require_values(model)
    fill([model], device=torch.device(device) if device is not None else usual_device())
    return model


def is_deferred(module: nn.Module) -> bool:
    """Return whether ``module`` has tensors that wait for their values."""
    return any(_values_of(part) for part in module.modules())


def require_values(model: nn.Module) -> None:
    """Raise SpecError if a tensor will get no values, or was changed after ``deferred`` returned."""
    seen: dict[int, tuple[str, _Value]] = {}
    for name, module, key, tensor in _tensors_in(model):
        if not tensor.is_meta:
            continue
        value = _values_of(module).get(key)
        if value is None:
            raise SpecError(
                f"{name!r} is on the meta device and has no values to get: make the whole model in deferred(), or "
                "give it values first, for example with to_empty()"
            )
        other, known = seen.setdefault(id(tensor), (name, value))
        if known != value:
            raise SpecError(f"{name!r} was tied to {other!r} after deferred(): tie them in the function passed to it")
        if tensor._version or tuple(tensor.shape) != value.place.size:
            raise SpecError(
                f"{name!r} was changed after deferred(), when it had no values: change it in the function passed to it"
            )


def find_value(module: nn.Module, key: str) -> Callable[[], Tensor] | None:
    """Return a function that computes the value of a deferred tensor of ``module``, or None if it has its value."""
    value = _values_of(module).get(key)
    return None if value is None else value.compute


def tapes_of(model: nn.Module) -> list[Tape]:
    """Return the tapes that the values of deferred tensors come from, each once."""
    return list({id(each.tape): each.tape for part in model.modules() for each in _values_of(part).values()}.values())


def fill(
    modules: Sequence[nn.Module],
    *,
    device: torch.device,
    plan: TensorPlan | None = None,
    names: Collection[str] | None = None,
) -> None:
    """Put values into the deferred tensors of ``modules`` and move their other tensors to ``device``.

    ``names``: fill only these. A DTensor gets this rank's part, in the order of rows that ``plan`` gives; nothing is
    sent. Tied tensors stay tied, across all ``modules``.
    """
    made: dict[int, Tensor] = {}
    for module in modules:
        for name, part, key, tensor in _tensors_in(module):
            if names is not None and name not in names:
                continue
            value = _values_of(part).pop(key, None)
            if id(tensor) not in made:
                made[id(tensor)] = _with_value(name, tensor, value, device, plan)
    for module in modules:
        for part in module.modules():
            replace_tensors(part, lambda tensor: made.get(id(tensor), tensor))


def _with_value(
    name: str, tensor: Tensor, value: _Value | None, device: torch.device, plan: TensorPlan | None
) -> Tensor:
    if not tensor.is_meta or value is None:
        if isinstance(tensor, DTensor) or tensor.is_meta or tensor.device == device:
            return tensor
        return _like(tensor, tensor.detach().to(device))
    with torch.no_grad():
        whole = value.compute()
        if not isinstance(tensor, DTensor):
            return _like(tensor, whole.to(device, tensor.dtype))
        if plan is not None:
            whole = from_saved_order(name, whole, plan)
        made: Any = torch.empty_like(tensor, device=device)
        made.to_local().copy_(_local_part(whole, tensor))
        return _like(tensor, made)


def _like(tensor: Tensor, made: Tensor, noted: Collection[str] | None = None) -> Tensor:
    """Return ``made`` as a parameter if ``tensor`` is one, with its requires_grad, hooks and attributes.

    ``noted``: copy only these attributes, by default all.
    """
    has_gradient = tensor.requires_grad and tensor.is_leaf
    made = nn.Parameter(made, has_gradient) if isinstance(tensor, nn.Parameter) else made.requires_grad_(has_gradient)
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks") if has_gradient else ():
        if hooks := getattr(tensor, kind, None):
            setattr(made, kind, hooks)  # the same dict: handles can still remove hooks
    made.__dict__.update({key: vars(tensor)[key] for key in (vars(tensor) if noted is None else noted)})
    return made


def _local_part(whole: Tensor, like: DTensor) -> Tensor:
    """Return this rank's part of ``whole``. If two axes cut one dimension, the shards of FSDP2 are cut last."""
    mesh = like.device_mesh
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    axes = [axis for axis, place in enumerate(like.placements) if not place.is_replicate()]
    for axis in sorted(axes, key=lambda axis: not isinstance(like.placements[axis], Shard)):  # _StridedShard is none
        dim: int = like.placements[axis].dim  # type: ignore[attr-defined]
        begin, end = bounds(whole.shape[dim], rank=coordinates[axis], size=mesh.size(axis))
        whole = whole.narrow(dim, begin, end - begin)
    return whole


def stand_in(model: nn.Module) -> nn.Module:
    """Return a runnable copy on the CPU: with values for buffers, and zeros without memory as parameters."""
    made = ghost_of(model)
    cpu = torch.device("cpu")
    names = {name for name, module, key, _ in _tensors_in(made) if key not in module._parameters}
    fill([made], device=cpu, names=names)
    zeros = TensorMemo(lambda ghost: nn.Parameter(zeros_without_memory(ghost, cpu), requires_grad=False))
    for part in made.modules():
        replace_tensors(part, lambda tensor: zeros(tensor) if tensor.is_meta else tensor)
    return made


# ---- the tensors of a model


def _values_of(module: nn.Module) -> dict[str, _Value]:
    found: dict[str, _Value] = module.__dict__.get(_VALUES, {})
    return found


def _tensors_in(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield parameters, buffers and tensor attributes: name in the model, module, name in the module, tensor."""
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers, module.__dict__):
            for key, tensor in tuple(tensors.items()):  # the last of these dicts contains the first
                if isinstance(tensor, Tensor):
                    yield f"{prefix}.{key}" if prefix else key, module, key, tensor


def _leave_on_meta(model: nn.Module, recorder: TapeRecorder) -> None:
    places = []
    of_fakes = {*vars(FakeTensorMode().from_tensor(torch.empty(0))), "_is_param"}
    made = TensorMemo(lambda tensor: _on_meta(tensor, vars(tensor).keys() - of_fakes))
    for _, module, key, tensor in _tensors_in(model):
        if not isinstance(tensor, FakeTensor) and not recorder.is_changed(tensor):
            continue
        place = recorder.place_of(recorder.fake(tensor))
        places.append(place)
        module.__dict__.setdefault(_VALUES, {})[key] = _Value(recorder.tape, place)
        made(tensor)
    recorder.finish(places)
    for name, module in model.named_modules():
        replace_tensors(module, lambda tensor: made(tensor) if made.has(tensor) else tensor)
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(list(module.__dict__.values()))):
            raise SpecError(
                f"{name or 'the model'} has tensors in a list or a dict, where they are not found: register them as "
                "buffers"
            )


def _on_meta(tensor: Tensor, noted: Collection[str]) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return _like(tensor, made, noted)


def _name_of(make: Callable[..., Any]) -> str:
    return str(getattr(make, "__qualname__", make))
