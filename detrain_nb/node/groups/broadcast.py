"""Sending variables from one rank to others, over the default process group.

Plain values are sent as raw buffers (values.py). If any variable is not plain, all are pickled together, which keeps
references between them (such as a model and its optimizer) intact. Unpickling is safe here: the ranks of one job trust
each other. Tensors arrive on the device of the receiving rank.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ... import values
from ...errors import DetrainError, SessionError, ValueNotSupported
from .stale_variables import loaded_kinds

_PIECE_BYTES = 16 << 20
_PROBLEM, _VALUES, _PICKLE = range(3)  # what is sent: an error text, a description and its buffers, or a pickle
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_Buffer = bytes | bytearray | memoryview


def broadcast(
    look_up: Callable[[], dict[str, Any]],
    ranks: list[int],
    source: int,
    device: torch.device,
    check: Callable[[], None],
) -> dict[str, Any]:
    """Send the variables that ``look_up`` finds on ``source`` to ``ranks``; returns what arrived, by name.

    Collective: every rank of ``ranks`` calls this. ``check`` is called before each piece, and raises to stop.
    Raises: SessionError on every rank when the source cannot send; on one rank when that rank cannot read the data.
    """
    carrier = torch.device("cpu") if "gloo" in str(dist.get_backend_config()) else device
    if dist.get_rank() == source:
        _send(look_up, [rank for rank in ranks if rank != source], carrier, check)
        return {}
    return _receive(source, carrier, device, check)


@contextlib.contextmanager
def noted_orphans(namespace: Mapping[Any, object], found: Mapping[str, object]) -> Iterator[list[str]]:
    """Find optimizers that are left without a model by a block that copies ``found`` into ``namespace``.

    Yields a list that holds their names after the block. Such an optimizer arrived without its model, or its model was
    replaced: no variable in ``namespace`` holds any of its parameters.
    """
    orphans: list[str] = []
    before = _orphans_in(namespace) if any(isinstance(value, torch.nn.Module) for value in found.values()) else set()
    yield orphans
    if not any(isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) for value in found.values()):
        return
    may_hide_it = any(not _is_seen_through(value) for value in found.values())  # a user's object may hold the model
    orphans += sorted(name for name in _orphans_in(namespace) - before if name not in found or not may_hide_it)


def _orphans_in(namespace: Mapping[Any, object]) -> set[str]:
    held: set[int] = set()
    optimizers: dict[str, set[int]] = {}
    for name, value in list(namespace.items()):
        if isinstance(value, torch.nn.Module):
            held.update(map(id, value.parameters()))
        elif isinstance(value, torch.Tensor):
            held.add(id(value))
        elif isinstance(value, torch.optim.Optimizer) and not str(name).startswith("_"):
            optimizers[str(name)] = {id(part) for group in value.param_groups for part in group["params"]}
    return {name for name, parts in optimizers.items() if parts and held.isdisjoint(parts)}


def _is_seen_through(value: object) -> bool:
    return isinstance(value, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor, *_SCALARS))


def _send(
    look_up: Callable[[], dict[str, Any]], targets: list[int], carrier: torch.device, check: Callable[[], None]
) -> None:
    kind, parts = _packed(look_up)
    for target in targets:
        dist.send(torch.tensor([kind, len(parts[0])], device=carrier), target)
        for part in parts:
            for piece in _pieces(part):
                check()
                dist.send(piece.to(carrier), target)
    if kind == _PROBLEM:
        raise SessionError(bytes(parts[0]).decode())


def _receive(source: int, carrier: torch.device, device: torch.device, check: Callable[[], None]) -> dict[str, Any]:
    start = torch.zeros(2, dtype=torch.int64, device=carrier)
    dist.recv(start, source)
    kind, size = (int(number) for number in start)
    content = _receive_part(size, source, carrier, check)
    if kind == _PROBLEM:
        raise SessionError(content.decode())
    if kind == _VALUES:
        description = json.loads(content)
        buffers = [_receive_part(size, source, carrier, check) for size in values.buffer_sizes(description)]
        found: dict[str, Any] = _moved(values.unpack(description, buffers), device)
        return found
    try:
        found = torch.load(io.BytesIO(content), map_location=device, weights_only=False)  # from a rank of our own job
    except AttributeError as exc:
        raise SessionError(
            f"{exc}: first run the cell that defines it on this rank: %distributed replay -r {dist.get_rank()}"
        ) from exc
    return dict(found)


def _receive_part(size: int, source: int, carrier: torch.device, check: Callable[[], None]) -> bytearray:
    data = bytearray(size)
    for piece in _pieces(data):
        check()
        arrived = piece.to(carrier)
        dist.recv(arrived, source)
        if carrier.type != "cpu":
            piece.copy_(arrived)
    return data


def _pieces(part: _Buffer) -> Iterator[torch.Tensor]:
    """Split ``part`` into pieces of at most 16 MiB, which share its memory if that is writable."""
    if len(part):
        yield from torch.frombuffer(bytearray(part) if memoryview(part).readonly else part, dtype=torch.uint8).split(
            _PIECE_BYTES
        )


def _packed(look_up: Callable[[], dict[str, Any]]) -> tuple[int, Sequence[_Buffer]]:
    """Return what is sent, and its parts. The size of the first is sent ahead; it describes the sizes of the others."""
    try:
        variables = look_up()
        _refuse_wrapped(variables)
        try:
            if _is_plain(variables, set()):
                description, buffers = values.pack(variables, name="the variables")
                return _VALUES, [json.dumps(description, allow_nan=False).encode(), *buffers]
        except (ValueNotSupported, RecursionError):  # too large, nested too deeply, or an unusual kind of tensor
            pass
        return _PICKLE, [_pickled(variables)]
    except DetrainError as exc:
        return _PROBLEM, [str(exc).encode()]
    except Exception as exc:  # noqa: BLE001  out of memory, a user's class: the other ranks wait for an answer
        return _PROBLEM, [f"{type(exc).__name__}: {exc}".encode()]


def _refuse_wrapped(variables: Mapping[str, object]) -> None:
    """Refuse DDP modules: a copy would start with other collectives than the original. Raises: SessionError.

    The way to copy the plain module begins on this rank, as a restarted rank has no DDP module yet.
    """
    for name, value in variables.items():
        if isinstance(value, torch.nn.parallel.DistributedDataParallel):
            others, source = ",".join(other for other in variables if other != name), dist.get_rank()
            raise SessionError(
                f"{name} is a DDP model, which cannot be copied: it belongs to a process group. First run "
                f"net = {name}.module in a %%rank {source} cell, "
                f"then %broadcast net,{others or 'OPTIMIZER'}{f' --from {source}' if source else ''}, "
                f"then {name} = DDP(net) in a cell on all ranks"
            )


def _is_plain(value: Any, seen: set[int]) -> bool:
    """Return whether ``value`` arrives unchanged as raw buffers and shares no memory with a value that was ``seen``."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is torch.Tensor:
        is_data = value.layout is torch.strided and not value.requires_grad and value.grad is None
        return is_data and not vars(value) and _is_new(value.untyped_storage().data_ptr(), seen)
    items = [*value.keys(), *value.values()] if kind is dict else value
    return kind in (dict, list, tuple) and _is_new(id(value), seen) and all(_is_plain(item, seen) for item in items)


def _is_new(identity: int, seen: set[int]) -> bool:
    if identity in seen:
        return False
    seen.add(identity)
    return True


def _moved(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors moved to ``device``."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return type(value)(_moved(item, device) for item in value) if isinstance(value, (list, tuple)) else value


class _OfOneRank(Exception):
    """An object that differs on each rank: a part of a tensor, a sharded model, a mesh, a process group."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        if isinstance(value, loaded_kinds()):
            raise _OfOneRank(type(value).__name__)
        return NotImplemented


_PICKLING = types.SimpleNamespace(__name__="pickle", Pickler=_Pickler)  # torch.save uses it as the pickle module


def _pickled(variables: dict[str, Any]) -> bytes:
    """Pickle all variables. Raises: SessionError naming the one that cannot be pickled or differs on each rank."""
    buffer = io.BytesIO()
    try:
        torch.save(variables, buffer, pickle_module=_PICKLING)
    except Exception as exc:
        name = next((name for name, value in variables.items() if not _can_pickle(value)), ", ".join(variables))
        if isinstance(exc, _OfOneRank):
            what = "is" if type(variables.get(name)).__name__ == str(exc) else "holds"
            raise SessionError(
                f"{name} {what} a {exc}, which differs on each rank: a copy would overwrite the other ranks' "
                f"part. Run the cell that creates {name} on all ranks; to copy its values, use tensor.full_tensor() or "
                "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), "
                "or save on all ranks and load there (detrain_nb.training.save, load)"
            ) from None
        deep = " (nested too deeply)" if isinstance(exc, RecursionError) else ""
        raise SessionError(f"{name} cannot be pickled{deep}: {exc}") from exc
    return buffer.getvalue()


def _can_pickle(value: object) -> bool:
    try:
        torch.save(value, io.BytesIO(), pickle_module=_PICKLING)
    except Exception:  # noqa: BLE001  whatever a user's __reduce__ raises
        return False
    return True
