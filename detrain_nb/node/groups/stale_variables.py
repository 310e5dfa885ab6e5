"""Variables that hold communicators of ended process groups, and explanations of the errors that they cause.

Process groups, device meshes, DDP and FSDP modules, distributed tensors and objects that contain them work in one
generation only. Using one later raises an error deep inside torch; the text added here explains it.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import traceback
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...text import create_again

_KINDS = (
    ("torch.distributed.distributed_c10d", "ProcessGroup"),
    ("torch.distributed.device_mesh", "DeviceMesh"),
    ("torch.distributed.tensor", "DTensor"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.distributed.fsdp", "FSDPModule"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.pipelining.stage", "_PipelineStageBase"),
)
_HUNG_UP = re.compile(
    r"[Cc]onnection (closed|reset|was aborted)|Broken pipe|[Ss]ocket closed|NCCL communicator (was|is) aborted"
)
_NO_GROUP = "Default process group has not been initialized"
_PLACE = re.compile(r"\s*(?:\[[^\]]*\](?::\d+)?:?|<[^<>]* at 0x[0-9a-f]+>)")
_TORCH = torch.__path__[0]
_CLEAR_PLANNERS = "clear_redistribute_planner_cache"

_Known = dict[int, tuple[set[str], weakref.ref[Any]]]  # by object id: the object's names and a reference to it


class StaleVariables:
    """The variables that cells made with groups that no longer exist."""

    def __init__(self) -> None:
        self._known: _Known = {}

    def note(self, namespace: Mapping[Any, object]) -> list[str]:
        """Remember the variables that hold a communicator, after all groups have ended; returns their names.

        Call from one thread only.
        """
        kinds = loaded_kinds()
        names = []
        self._known = _alive(self._known)
        for name, value in list(namespace.items()):
            if isinstance(name, str) and not name.startswith("_") and _may_hold_communicator(value, kinds):
                names.append(name)
                if id(value) in self._known and self._known[id(value)][1]() is value:
                    self._known[id(value)][0].add(name)
                    continue
                with contextlib.suppress(TypeError):
                    self._known[id(value)] = ({name}, weakref.ref(value))
        return sorted(names)

    def explain(self, error: BaseException, text: str) -> str:
        """Explain an error that a stale variable caused, better than ``text`` does; else return an empty string.

        May be called from any thread.
        """
        known = _alive(self._known)
        if not known:
            return ""
        locals_of_torch = list(_torch_locals(error))
        names = _sorted([known[id(value)][0] for value in locals_of_torch if id(value) in known])
        everything = _sorted([names for names, _ in known.values()])
        if _NO_GROUP in text:
            return (
                "the process groups were ended: call dist.init_process_group() again, "
                f"then {create_again(names or everything)} ({_short(text)})"
            )
        is_certain = any(map(_is_of_ended_group, locals_of_torch))
        is_near = bool(locals_of_torch) and bool(_HUNG_UP.search(text))
        if not names and (is_certain or is_near):  # torch used a part of the variable, and the cell its name
            names = sorted(_names_used(error) & set(everything))
        if not names and is_certain:  # inside an object of the user's
            return (
                "an object used here holds a process group that no longer exists: run the cell that creates it again "
                f"({_short(text)})"
            )
        if not names:
            words = "a variable may use a process group that no longer exists"
            return f"{words}: {create_again(everything)} if this cell needs it ({text})" if is_near else ""
        use = "uses" if len(names) == 1 else "use"
        return f"{', '.join(names)} {use} a process group that no longer exists: {create_again(names)} ({_short(text)})"


def forget_meshes() -> None:
    """Clear DTensor's caches, keyed by mesh: a new mesh would match an equal mesh of ended groups."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("torch.distributed.tensor")]
    for module in modules:
        for owner in (module, *(each for each in vars(module).values() if isinstance(each, type))):
            for kept in list(vars(owner).values()):
                if isinstance(kept, functools._lru_cache_wrapper):
                    kept.cache_clear()
    kind = _class_of("torch.distributed.tensor._api", "DTensor")
    if not kind:  # a stop during the import leaves only some of the modules
        return
    kind._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    planners: Any = sys.modules.get("torch.distributed.tensor._redistribute")
    for owner, name in ((torch._C, "_clear_DTensor_sharding_propagator_cache"), (planners, _CLEAR_PLANNERS)):
        if hasattr(owner, name):  # not in every torch
            getattr(owner, name)()


def _alive(known: _Known) -> _Known:
    """Return the entries whose object still exists; copies first, as another thread may add some."""
    return {key: each for key, each in known.copy().items() if each[1]() is not None}


def _sorted(names: list[set[str]]) -> list[str]:
    return sorted(set().union(*names))


def _names_used(error: BaseException) -> set[str]:
    """Return the names used by the code in the traceback, without torch's own code."""
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return {name for code in codes if not code.co_filename.startswith(_TORCH) for name in code.co_names}


def _is_of_ended_group(value: object) -> bool:
    """Return whether ``value`` is a group that torch no longer knows, or DDP over one."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    with contextlib.suppress(Exception):  # a user's class may raise anything
        group = getattr(value, "process_group", None) if isinstance(value, torch.nn.Module) else value
        return isinstance(group, distributed.ProcessGroup) and group not in distributed._world.pg_map
    return False


def _short(text: str) -> str:
    """Strip source locations and addresses, which differ from rank to rank, from a message of torch."""
    return _PLACE.sub("", text).strip().partition(". ")[0].partition("\n")[0]


def loaded_kinds() -> tuple[type, ...]:
    """Return the kinds that a cell can have made: those whose module has been imported."""
    found = (_class_of(module, name) for module, name in _KINDS)
    return tuple(kind for kind in found if isinstance(kind, type))


def _class_of(module: str, name: str) -> Any:
    """Return a class if its module has been imported; else an empty tuple."""
    return getattr(sys.modules.get(module), name, ())


def _may_hold_communicator(value: object, kinds: tuple[type, ...]) -> bool:
    try:
        return _holds_communicator(value, kinds)
    except Exception:  # noqa: BLE001  an unfinished module; a user's class may raise anything
        return False


def _holds_communicator(value: object, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, kinds):
        return True
    if isinstance(value, torch.nn.Module):
        return any(isinstance(part, kinds) for part in (*value.modules(), *value.parameters()))
    if isinstance(value, _class_of("detrain_nb.parallel.model", "ParallelModel")):
        groups = (value.pipeline_group, value.arrangement.tensor_group, *value.arrangement.replicas)
        return any(group is not None for group in groups)
    if isinstance(value, _class_of("detrain_nb.training.trainer", "Trainer")):
        return _holds_communicator(value.model, kinds)
    if isinstance(value, torch.optim.Optimizer):
        return any(isinstance(p, kinds) for group in value.param_groups for p in group["params"])
    return False


def _torch_locals(error: BaseException) -> Iterator[object]:
    """Yield the local variables of torch's own frames in the traceback, including those of its causes."""
    seen = 0
    cause: BaseException | None = error
    while cause is not None and seen < 10:
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            if frame.f_code.co_filename.startswith(_TORCH):
                yield from list(frame.f_locals.values())
        cause, seen = cause.__cause__ or cause.__context__, seen + 1
