"""A model left as it was: all side effects of its code in a trial run are undone afterwards."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import SpecError
from .interrupts import HeldInterrupts
from .search import Search
from .undo import NO_STAND_INS, IteratorCopies, StandIns, Undo, note_dicts

_CPU = torch.device("cpu")


@contextlib.contextmanager
def state_kept(*roots: Any, device: torch.device = _CPU) -> Iterator[list[Tensor]]:
    """Undo what the code of ``roots``, models and their arguments, writes in the block.

    Yields the tensors that were found; `writes_undone` restores their values. Caches of `functools` are empty in
    the block and are restored afterwards, so that none keeps a tensor without values. The states of random generators,
    on the CPU and on ``device``, are restored. Objects of the standard library are left as the code leaves them.
    So are globals, and objects with locks, which other code uses too, unless a tensor was put into them.

    Warns of a generator that has advanced, which cannot be undone. Raises: SpecError, after all else is restored, when
    something could not be.
    """
    state = State(*roots)
    with state.kept(device):
        yield state.tensors


@contextlib.contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the random generators after the block: the CPU's, ``device``'s, Python's and numpy's."""
    numpy = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy and numpy.random.get_state()
    is_other = device.type not in ("cpu", "meta")
    try:
        with torch.random.fork_rng([device] if is_other else [], device_type=device.type if is_other else "cuda"):
            yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


class State:
    """All state that can be reached from some roots, found once; ``kept`` notes its values at that moment."""

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._found = Search()
        self.tensors: list[Tensor] = self._found.tensors
        for root in roots:
            self._found.find(root)

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        return State(*copy.deepcopy(self._roots, memo))

    @contextlib.contextmanager
    def kept(self, device: torch.device = _CPU) -> Iterator[None]:
        stand_ins, undos = StandIns(), list[Undo]()
        with HeldInterrupts() as interrupts, random_state_kept(device):
            try:
                with _disable_current_modes():  # modes would change what is seen, and slow it down
                    undos.append(note_dicts(self._found.dicts, stand_ins))
                    for note in self._found.notes:
                        undos.append(note(stand_ins))
                try:
                    interrupts.let_through()
                    yield
                finally:
                    interrupts.hold()
            finally:
                with _disable_current_modes():
                    _undo_all(undos)
        stand_ins.warn_of_moved()

    def note(self) -> Undo:
        """Return a function that restores the current state, for code that may have to run again from its start.

        Afterwards attributes and dicts hold unused copies of their iterators; other iterators are not rewound.
        """
        undos = [note_dicts(self._found.dicts, NO_STAND_INS), *(note(NO_STAND_INS) for note in self._found.notes)]
        iterators = IteratorCopies()
        copies = [(base, value, iterators.of_all(dict(base.items(value)))) for base, value, _ in self._found.dicts]

        def undo() -> None:
            _undo_all(undos)
            for base, value, made in copies:
                for key, each in made.items():
                    base.__setitem__(value, key, each)

        return undo


def _undo_all(undos: Sequence[Undo]) -> None:
    failed: Exception | None = None
    for undo in reversed(undos):
        try:
            undo()
        except Exception as exc:  # noqa: BLE001 - whatever fails, the rest is undone too
            failed = failed or exc
    if failed is not None:
        why = f"{type(failed).__name__}: {failed}".rstrip(".")
        raise SpecError(
            f"side effects of running the model's code could not be undone ({why}): recreate the model, and change "
            "what its forward writes"
        ) from failed
