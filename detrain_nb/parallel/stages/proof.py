"""Proof of a split: its stages, one after the other, compute what the model does.

The model and each stage run once, on tensors without memory. Each tensor gets the number of its expression: two tensors
have the same number if the same operators made them from the same parameters, buffers and inputs. So a value that
bypasses the arguments of modules, through a hook or an object that two parts share, is found before any training step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from ...errors import DetrainError
from ..costs.profiler import run_without_memory
from ..kept import State
from ..operator_graph import Op, Recorder
from ..operators import tensors_of
from ..recorders import modules_watched
from ..recording import Entries, ModuleOutput, Recording, first_float_tensor, record
from ..writes import writes_undone


def find_difference(
    model: nn.Module,
    make_stage: Callable[[int], nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    cuts: Sequence[str],
    written_buffers: Mapping[str, int],
) -> str:
    """Describe what the stages of a model cut at ``cuts`` would do differently from the model; "" if nothing.

    ``make_stage`` makes a stage: it must be called while the model's attributes are kept, so that an iterator restarts
    where it was. ``written_buffers``: for each buffer that the forward writes, by name, the stage that has it.
    """

    def compare(copy: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        table = _Expressions(model, args, kwargs)
        with _laid_out_as_sent(model, cuts):
            whole = table.evaluate(lambda: model, copy, args, kwargs)
        own: _Results | None = None
        pairs = []
        for index in range(len(cuts) + 1):

            def make(index: int = index) -> nn.Module:
                stage = make_stage(index)
                vars(stage)["_state"].same_call = whole.of_modules
                stage.be_careful()  # type: ignore[operator]  # else it saves its state, to run again if it writes
                return stage

            received = () if own is None else (own.given,)
            expression = own.outputs[0] if own is not None else None
            own = table.evaluate(make, copy, (*received, *args), kwargs, received=expression)
            here = [name for name, place in written_buffers.items() if place == index and name in own.buffers]
            pairs += [(whole.buffers[name], own.buffers[name]) for name in here]
        assert own is not None
        if own.look != whole.look:
            return f"the last stage would return {own.look} instead of {whole.look}: {_OTHERWISE}"
        pairs += zip(whole.outputs, own.outputs)
        told = (table.tell(expected, found) for expected, found in pairs if expected != found)
        return next((f"{each}: {_OTHERWISE}" for each in told), "")

    try:
        return run_without_memory(compare, model, args, kwargs)
    except DetrainError as exc:
        return str(exc)
    except Exception as exc:  # noqa: BLE001 - the user's code fails in a stage, and does not in the model
        return f"a stage would fail ({type(exc).__name__}: {str(exc).rstrip('.')}): {_OTHERWISE}"


_OTHERWISE = (
    "a stage sends only the argument of the next stage's module, not what a hook, a closure, a shared object or a "
    "__call__ passes on: pass it as an argument"
)


def _laid_out_as_sent(model: nn.Module, cuts: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Make what reaches a cut contiguous, as what a stage receives is: torch chooses operators by memory layout."""
    return modules_watched([(cut, model.get_submodule(cut)) for cut in cuts], _make_contiguous)


def _make_contiguous(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensor = first_float_tensor(args, kwargs)
    if tensor is not None and not tensor.is_contiguous():
        tensor.data = tensor.detach().contiguous()  # for everyone who holds it, as in a stage


@dataclass(frozen=True)
class _Results:
    """Results of a module: its first tensor; the looks and expressions of its outputs; the expressions of its buffers.

    ``of_modules``: looks of the outputs of its submodules.
    """

    given: Tensor | None
    look: str
    outputs: tuple[int, ...]
    buffers: Mapping[str, int]
    of_modules: Mapping[str, ModuleOutput]


# Equal values, at most in another shape. Which of these torch uses depends on the memory layout.
_aten = torch.ops.aten
_SAME = {
    _aten.alias.default,
    _aten.clone.default,
    _aten.lift_fresh.default,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.reshape.default,
    _aten._reshape_alias.default,
}
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
# Larger constants are compared by shape and storage only.
_MOST_COMPARED_BYTES = 1 << 20


class _Expressions:
    """Expressions of all tensors, by number: the operator and the operands that made each."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._state = State(model, args, kwargs)
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._keys: list[tuple[tuple[Any, ...], tuple[int, ...]]] = []
        self._places: list[str] = []
        self._names: dict[int, tuple[str, str]] = {}
        self._on_storage: dict[int, tuple[str, str]] = {}  # of tensors that are read from elsewhere than their module
        for name, buffer in model.named_buffers(remove_duplicate=False):
            self._names.setdefault(id(buffer), ("buffer", name))
            if buffer.layout == torch.strided:
                self._on_storage.setdefault(int(buffer.untyped_storage()._cdata), ("buffer", name))
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), ("parameter", name))
        leaves = enumerate(tree_flatten((args, kwargs))[0])
        self._names.update({id(leaf): ("input", str(place)) for place, leaf in leaves if isinstance(leaf, Tensor)})

    def evaluate(
        self,
        make: Callable[[], nn.Module],
        copy: Callable[[Tensor], Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        received: int | None = None,
    ) -> _Results:
        """Run the module that ``make`` returns; in a stage, the first argument has the expression ``received``."""
        made: dict[int, tuple[Any, Tensor]] = {}  # name and original, kept alive so that ids stay unique
        taken: list[tuple[int, int]] = []  # operator index, and the tensor received before it

        with self._state.kept(), writes_undone(self._state.tensors):
            module = make()
            names = {id(buffer): ("buffer", name) for name, buffer in module.named_buffers()} | self._names

            def noted(tensor: Tensor) -> Tensor:
                result = copy(tensor)
                made[id(result)] = names.get(id(tensor)), tensor
                return result

            @contextlib.contextmanager
            def watched(recorder: Recorder, entries: Entries) -> Iterator[None]:
                state = vars(module).get("_state")
                if received is None or state is None:
                    yield
                    return
                state.on_taken = lambda argument: taken.append((len(recorder.ops), recorder.follow(argument)))
                try:
                    yield
                finally:
                    del state.on_taken

            recording = record(module, args, kwargs, noted, watched)
        values: dict[int, int] = {}

        def value(number: int) -> int:
            if number not in values:
                tensor = recording.recorder.kept[number]
                name, original = made.get(id(tensor), (None, None))
                is_received = received is not None and original is args[0]
                values[number] = received if is_received and received is not None else self._leaf(tensor, name)
            return values[number]

        for index, op in enumerate(recording.recorder.ops):
            while taken and taken[0][0] <= index and received is not None:
                values[taken.pop(0)[1]] = received
            self._follow(op, recording, value, values)
        if taken and received is not None:
            values[taken[-1][1]] = received
        return self._results(recording, value)

    def _results(self, recording: Recording, value: Callable[[int], int]) -> _Results:
        leaves, spec = tree_flatten(recording.outputs)
        tensors = tensors_of(leaves)
        others = [
            repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf) for leaf in leaves if not isinstance(leaf, Tensor)
        ]
        outputs = tuple(value(recording.recorder.number(tensor)) for tensor in tensors)
        buffers = {name: value(after) for name, (_, after) in recording.buffers.items()}
        return _Results(next(iter(tensors), None), f"{spec} {others}", outputs, buffers, recording.entries.outputs)

    def _follow(self, op: Op, recording: Recording, value: Callable[[int], int], values: dict[int, int]) -> None:
        if not op.call:  # the code reads a value and makes nothing
            return
        func, is_noted, *given = op.call
        operands = tuple(map(value, op.reads))
        looks = recording.recorder.looks
        place = op.inside[-1] if op.inside else ""
        if func in _SAME and len(op.makes) == 1 and len(op.reads) == 1:
            (source,), (number,) = op.reads, op.makes
            if looks[source].shape != looks[number].shape:
                values[number] = self._number(("shape", looks[number].shape), operands, place)
            else:
                values[number] = operands[0]
            return
        plain = tuple(repr(each) if isinstance(each, _PLAIN) else type(each).__name__ for each in given)
        made = self._number(("operator", func, is_noted, plain), operands, place)
        was = {number: value(number) for number in op.writes}
        for position, number in enumerate(op.makes):
            if number not in was:
                values[number] = self._number(("result", position), (made,), place)
        for number, before in was.items():
            values[number] = self._number(("written",), (before, made), place)

    def _leaf(self, tensor: Tensor, name: tuple[str, str] | None) -> int:
        """Return the number of a tensor that no operator made."""
        if name is not None:
            return self._number(name, (), "")
        look = (tuple(tensor.shape), tensor.dtype)
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if not is_plain or tensor.is_meta or tensor.is_quantized:
            return self._number(("constant", *look), (), "")
        storage = tensor.untyped_storage()
        if storage._cdata in self._on_storage:
            return self._number(self._on_storage[storage._cdata], (), "")
        if tensor.numel() * tensor.element_size() > _MOST_COMPARED_BYTES:
            return self._number(("constant", *look, storage._cdata), (), "")
        with _disable_current_modes():
            values = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
            content = bytes(values.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy())
        return self._number(("constant", *look, content), (), "")

    def _number(self, head: tuple[Any, ...], operands: tuple[int, ...], place: str) -> int:
        key = (head, operands)
        if key not in self._numbers:
            self._numbers[key] = len(self._keys)
            self._keys.append(key)
            self._places.append(place)
        return self._numbers[key]

    def tell(self, expected: int, found: int) -> str:
        """Describe the first difference between two expressions, starting from what they have in common."""
        while True:
            (head, operands), (other, others) = self._keys[expected], self._keys[found]
            pairs = [pair for pair in zip(operands, others) if pair[0] != pair[1]]
            if head != other or len(operands) != len(others) or not pairs:
                return f"a stage would use {self._describe(found)} instead of {self._describe(expected)}"
            expected, found = pairs[0]

    def _describe(self, number: int) -> str:
        (kind, *more), operands = self._keys[number]
        if kind in ("result", "written", "shape"):
            return self._describe(operands[-1])
        if kind == "operator":
            gives = "" if more[1] else " without a gradient"
            return f"the result of {more[0]}{gives} in {self._places[number] or 'the code of the model'}"
        if kind == "constant":
            return f"a tensor {more[1]} {more[0]}".replace("torch.", "")
        return f"the {kind} {more[0]}"
