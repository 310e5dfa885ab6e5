"""Blocks whose forward runs again in the backward pass: their side effects happen once, in the first run.

The second run starts from the state that the first one saw, on copies, so tensors saved for gradients stay intact. This
covers attributes and buffers of the block's modules, and containers, arrays, objects and random generators in
them. Writes elsewhere, and reads from an iterator, happen twice.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .blocks import pattern_of
from .operators import storage_of
from .recorders import TensorMemo
from .search import has_locks, has_state
from .undo import MISSING, OF_MODULES, OPEN, are_same, contents_in, note_values, refill
from .writes import has_own_memory

_OF_MODULES = OF_MODULES - {"training"}
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
_MOST_INSIDE, _LONGEST = 1000, 1 << 16  # containers of a block that are searched, and their length
_MOST_OF_AN_ARRAY = 1 << 20  # bytes
_preserve_version = torch.autograd._unsafe_preserve_version_counter


class SecondRuns:
    """Reruns of a block, called ``name`` in warnings; ``told`` are the warnings of all blocks, one of each kind.

    ``is_sharded``: the block's parameters are gathered for each run.
    """

    def __init__(self, block: nn.Module, name: str, *, told: set[str], is_sharded: bool) -> None:
        self._block, self._name, self._told = block, name, told
        self._parameters = () if is_sharded else tuple(block.named_parameters())
        self._known: dict[tuple[bool, ...], _Known] = {}  # by training modes of the parts

    def prepare(self, *, is_all: bool) -> None:
        """Make the block's forward run again in the backward pass; names, hooks and class are unchanged.

        ``is_all``: results of matrix products are recomputed too.
        """
        forward: Callable[..., Any] = self._block.forward
        selective = functools.partial(create_selective_checkpoint_contexts, _policy)

        def contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
            own = self.contexts()
            if is_all:
                return own
            first, second = selective()
            return _Both(own[0], first), _Both(own[1], second)

        @functools.wraps(forward)
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if torch.compiler.is_compiling():  # compiled code does not repeat its writes when it recomputes
                of_policy: dict[str, Any] = {} if is_all else {"context_fn": selective}
                return checkpoint(forward, *args, use_reentrant=False, **of_policy, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

        self._block.forward = checkpointed

    def contexts(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """Return the contexts for the first and for each further run, as ``context_fn`` of a checkpoint does."""
        before = _State()
        return self._noting(before), _Undoing(self._block, before)

    @contextlib.contextmanager
    def _noting(self, before: _State) -> Iterator[None]:
        modes = tuple(part.training for part in self._block.modules())
        is_first = modes not in self._known
        if is_first:
            self._known[modes] = _Known(self._statistics(), _generators())
        known = self._known[modes]
        before.look(self._block, known, has_all_values=is_first)
        versions = [_version_of(each) for _, each in self._parameters] if is_first else []
        yield
        for each in before.tensors.values():
            if id(each.tensor) not in known.written and each.is_written():
                known.written[id(each.tensor)] = each.tensor
                if not is_first:
                    self._tell(f"{self._named(each.tensor)} is written by this forward, but was not by the first one")
        if is_first:
            # A new object: the first run's own is used in each of its further runs.
            self._known[modes] = _Known(known.written, before.generators_drawn_from(), before.unchanged_objects())
        before.keep_written(known.written)
        for (name, parameter), version in zip(self._parameters, versions):
            if _version_of(parameter) != version:
                self._tell(f"the parameter {name} is written by each forward")

    def _statistics(self) -> dict[int, Tensor]:
        """Return buffers of layers that are known to write them; the first run may not have used all."""
        parts = (part for part in self._block.modules() if isinstance(part, nn.modules.batchnorm._NormBase))
        return {id(buffer): buffer for part in parts if part.training for buffer in part.buffers(recurse=False)}

    def _named(self, tensor: Tensor) -> str:
        for name, part in self._block.named_modules():
            for key, value in (*part._buffers.items(), *vars(part).items()):
                if value is tensor:
                    return f"{name}.{key}" if name else key
        return "a tensor"

    def _tell(self, what: str) -> None:
        key = f"{what} of {pattern_of(self._name)}"
        if key not in self._told:
            self._told.add(key)
            warnings.warn(
                f"{self._name}: {what}; the block runs twice as activations are recomputed, so the write happens "
                "twice: leave activations= out, or write outside of the block",
                stacklevel=2,
            )


class _Both(contextlib.AbstractContextManager[None]):
    """Nested contexts that can be entered repeatedly."""

    def __init__(self, *contexts: contextlib.AbstractContextManager[Any]) -> None:
        self._contexts = contexts
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._stack = contextlib.ExitStack()
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(self, *exc_info: Any) -> None:
        self._stack.__exit__(*exc_info)


# Operators that cost more to recompute than to keep.
_KEPT = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention"),
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(torch.ops.aten, name)
)


def _policy(context: Any, operation: Any, *args: Tensor, **kwargs: Any) -> CheckpointPolicy:
    is_kept = getattr(operation, "overloadpacket", None) in _KEPT
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass
class _Known:
    """What the first forward has shown, by id.

    These are tensors that it writes in place, global generators that it draws from, and objects that it leaves
    unchanged.
    """

    written: dict[int, Tensor] = field(default_factory=dict)
    generators: list[Any] = field(default_factory=list)
    unchanged: dict[int, Any] = field(default_factory=dict)


def _generators() -> list[Any]:
    """Return the global generators of Python and numpy; a checkpoint restores torch's itself."""
    of_numpy = sys.modules.get("numpy.random.mtrand")
    return [random.seed.__self__, *(() if of_numpy is None else (of_numpy._rand,))]  # type: ignore[attr-defined]


class _State:
    """State of a block's modules at one moment."""

    def __init__(self) -> None:
        self.tensors: dict[int, _Values] = {}
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []  # attributes or buffers, and old ones
        self._objects: dict[int, tuple[Any, dict[str, Any]]] = {}  # with their attributes
        self._contents: dict[int, tuple[Any, list[Any]]] = {}
        self._others: dict[int, tuple[Any, functools.partial[Any]]] = {}  # with functions that restore them
        self.known = _Known()

    def look(self, block: nn.Module, known: _Known, *, has_all_values: bool = False) -> None:
        """Note the state; the values of all tensors, or of those ``known`` to be written."""
        self.known, has_graphs, waiting = known, False, list(known.generators)
        for part in block.modules():
            own = {key: value for key, value in vars(part).items() if key not in _OF_MODULES}
            for holder, held in ((part._buffers, dict(part._buffers)), (vars(part), own)):
                self._held.append((holder, held))
                waiting += [value for value in held.values() if type(value) not in _PLAIN]
        while waiting:
            value = waiting.pop()
            if isinstance(value, Tensor):
                has_graphs |= value.grad_fn is not None
                if id(value) not in self.tensors and _is_kept(value):
                    self.tensors[id(value)] = _Values(value, is_kept=has_all_values or id(value) in known.written)
            elif isinstance(value, OPEN):
                if id(value) not in self._contents and len(self._contents) < _MOST_INSIDE and len(value) < _LONGEST:
                    self._contents[id(value)] = value, contents_in(value)
                    waiting += [each for each in self._contents[id(value)][1] if type(each) not in _PLAIN]
            elif type(value) is tuple:
                waiting += value
            elif id(value) in known.unchanged or id(value) in self._others or id(value) in self._objects:
                continue
            elif (put_back := note_values(value, most_bytes=_MOST_OF_AN_ARRAY)) is not None:
                self._others[id(value)] = value, put_back
            elif _is_open(value) and len(self._objects) < _MOST_INSIDE:
                self._objects[id(value)] = value, dict(vars(value))
                self._held.append((vars(value), self._objects[id(value)][1]))
                waiting += [each for each in vars(value).values() if type(each) not in _PLAIN]
        if has_graphs:
            self._forget_graphs()

    def generators_drawn_from(self) -> list[Any]:
        """Return the global generators that were drawn from."""
        noted = [(each, self._others[id(each)][1], note_values(each, most_bytes=0)) for each in self.known.generators]
        return [each for each, was, now in noted if now and repr(was.args) != repr(now.args)]

    def unchanged_objects(self) -> dict[int, Any]:
        """Return all objects if nothing that attributes lead to was written; else none, as objects are linked."""
        for each, held in self._objects.values():
            if not are_same([*vars(each), *vars(each).values()], [*held, *held.values()]):
                return {}
        for container, contents in self._contents.values():
            if not are_same(contents_in(container), contents):
                return {}
        return {key: each for key, (each, _) in self._objects.items()}

    def keep_written(self, written: Iterable[int]) -> None:
        """Keep only tensors that the forward writes in place."""
        known = set(written)
        self.tensors = {key: each for key, each in self.tensors.items() if key in known}

    def put_back(self) -> None:
        """Restore everything except the values of tensors, for which see `_Values.begin_again`."""
        for holder, held in self._held:
            for key in [key for key in holder if key not in _OF_MODULES and key not in held]:
                del holder[key]
            holder.update({key: value for key, value in held.items() if holder.get(key, MISSING) is not value})
        for container, contents in self._contents.values():
            if not are_same(contents_in(container), contents):
                refill(container, contents)
        for _, put_back in self._others.values():
            put_back()

    def _forget_graphs(self) -> None:
        """Replace tensors that have an autograd history by detached ones, as a rerun needs only their values."""
        plain = TensorMemo(lambda tensor: tensor if tensor.grad_fn is None else tensor.detach().requires_grad_())
        for _, held in self._held:
            held.update({key: plain(value) for key, value in held.items()})
        for _, contents in self._contents.values():
            contents[:] = map(plain, contents)


class _Values:
    """Version of a tensor before a run and, if ``is_kept``, a copy of its values."""

    def __init__(self, tensor: Tensor, *, is_kept: bool) -> None:
        self.tensor, self._version = tensor, _version_of(tensor)
        self._was = tensor.detach().clone() if is_kept else None

    def is_written(self) -> bool:
        """Return whether the tensor has changed; the statistics of a BatchNorm change without a new version."""
        if _version_of(self.tensor) != self._version:
            return True
        return self._was is not None and not torch.equal(self._was, self.tensor)

    def begin_again(self, common: dict[int, Tensor]) -> Callable[[], None]:
        """Give the tensor new memory with its old values; return a function that gives it back its own.

        ``common``: copies of memory that several tensors share, which they continue to share.
        """
        own, was, memory = self.tensor.data, self._was, storage_of(self.tensor)
        if memory not in common:
            self.tensor.data = own.clone() if was is None else was.clone()
        else:
            made = torch.empty(0, dtype=own.dtype, device=own.device)
            made.set_(common[memory].untyped_storage(), own.storage_offset(), own.shape, own.stride())
            self.tensor.data = made if was is None else made.copy_(was)
        return functools.partial(setattr, self.tensor, "data", own)


class _Undoing(contextlib.AbstractContextManager[None]):
    """Context around each further run, of which there may be several."""

    def __init__(self, block: nn.Module, before: _State) -> None:
        self._block, self._before = block, before
        self._undos = contextlib.ExitStack()

    def __enter__(self) -> None:
        now, tensors = _State(), self._before.tensors.values()
        now.look(self._block, self._before.known)
        counts = Counter(storage_of(each.tensor) for each in tensors)
        self._undos = contextlib.ExitStack()
        with torch.no_grad():
            places = {storage_of(each.tensor): each.tensor for each in tensors}
            common = {place: _bytes_of(tensor) for place, tensor in places.items() if counts[place] > 1}
            for each in tensors:
                self._undos.enter_context(_preserve_version(each.tensor))
                self._undos.callback(each.begin_again(common))
        self._undos.callback(now.put_back)
        self._before.put_back()

    def __exit__(self, *exc_info: Any) -> None:
        with torch.no_grad():
            self._undos.close()


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's memory."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).clone()


def _is_kept(value: Tensor) -> bool:
    return not (isinstance(value, FakeTensor) or value.requires_grad or value.is_inference()) and has_own_memory(value)


def _version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _is_open(value: Any) -> bool:
    """Return whether ``value`` is an object whose attributes the block's code may write."""
    is_other = isinstance(value, (nn.Module, type, types.FunctionType, types.ModuleType))
    return hasattr(value, "__dict__") and not is_other and has_state(value) and not has_locks(value)
