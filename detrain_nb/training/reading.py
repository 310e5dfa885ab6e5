"""One checkpoint, read into the given objects: everything is read and compared on all ranks before any of them changes.

The optimizer's state is read into new tensors, which it takes later. The model's part is read twice: once only to be
compared, then into its place. A load therefore needs memory for a second optimizer state, but not for a second model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import DetrainError, SpecError
from ..parallel.interrupts import HeldInterrupts
from ..storage import Location, shown
from ..text import name_some
from .catalog import Checkpoint
from .digests import Damaged
from .plain import from_json
from .randomness import STATES
from .ranks import Ranks
from .scheduler_state import require_state
from .state import ModelState, OptimizerState
from .tensor_index import TensorIndex
from .tensor_store import compare_tensors, read_tensors

MODEL, OPTIMIZER, RANDOM = "model/", "optimizer/", "random/"
DRAWS = "tensor_parallel"  # a key of a rank's random number states
MAY_BE_WHOLE = "; it may be intact: load again, or choose another with step="
_SHOWN = 4  # names in a message
_MOST_RANDOM_NUMBERS = 1 << 16  # of a generator's state


class Reading:
    """A load of the checkpoint ``chosen`` in ``folder``; ``random_values``: this rank's, if as many ranks saved."""

    def __init__(
        self,
        folder: Location,
        chosen: Checkpoint,
        note: Mapping[str, Any],
        index: TensorIndex,
        ranks: Ranks,
        model: Any,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Any,
    ) -> None:
        """Compare it with the given objects. Collective: all ranks. Raises: SpecError, everywhere, if they differ."""
        self._folder, self._note, self._index, self._ranks = folder, note, index, ranks
        self._scheduler = scheduler
        self.random_values: Mapping[str, Any] = {}
        self._optimizer_values: dict[str, Tensor] = {}
        told = ranks.gather(lambda: self._compare_parts(chosen.name, model, optimizer))
        wrong = list(dict.fromkeys(text for texts, _ in told for text in texts))
        here = set().union(*(names for _, names in told))
        saved = [fqn.removeprefix(MODEL) for fqn in index.metadata.state_dict_metadata if fqn.startswith(MODEL)]
        wrong += [f"{shown(name)} is not in the model" for name in saved if name not in here]
        if wrong:
            some = name_some(wrong, most=_SHOWN, separator="; ")
            raise SpecError(f"{chosen.name} does not match the model: {some}")
        self._model_tensors = {MODEL + name: tensor for name, tensor in self.model_state.tensors.items()}

    def _compare_parts(
        self, name: str, model: Any, optimizer: torch.optim.Optimizer | None
    ) -> tuple[list[str], set[str]]:
        """Take this rank's states; return what the checkpoint lacks of them, and the names of the model's values.

        Raises: SpecError.
        """
        self.model_state, note = ModelState(model), self._note
        self._optimizer_state = None if optimizer is None else OptimizerState(optimizer, self.model_state)
        wrong = self.model_state.check(self._index, MODEL)
        if self._optimizer_state is not None:
            saved = shown(str(note["optimizer"] or "no optimizer"), most=40)
            if saved != self._optimizer_state.kind:
                raise SpecError(f"{name} was saved with {saved}; the given optimizer is {self._optimizer_state.kind}")
            wrong += self._optimizer_state.check(self._index, OPTIMIZER)
        if self._scheduler is not None and note["scheduler"] is None:
            raise SpecError(f"{name} was saved without a scheduler, but one was given")
        if self._scheduler is not None:
            require_state(self._scheduler, note.get("scheduler_kind"), from_json(note["scheduler"]), name)
        return wrong, set(self.model_state.values)

    def find_damage(self, *, is_random_state_wanted: bool) -> str:
        """Read and compare everything that any rank needs; return the first damage, or an empty text.

        Collective: all ranks. Raises: SpecError when the optimizer cannot take the saved state, DetrainError when the
        storage cannot be read now, which is not damage.
        """

        def read() -> str:
            try:
                self._read_beside_model(is_random_state_wanted=is_random_state_wanted)
                compare_tensors(self._folder, self._index, self._model_tensors)
            except Damaged as exc:
                return str(exc)
            except SpecError:
                raise
            except DetrainError as exc:
                raise DetrainError(f"{exc}{MAY_BE_WHOLE}") from exc
            return ""

        told = self._ranks.gather(read)
        rank, wrong = next(((rank, text) for rank, text in enumerate(told) if text), (0, ""))
        return f"rank {rank}: {wrong}" if wrong and self._ranks.size > 1 else wrong

    def take(self) -> None:
        """Put what was read into the model, the optimizer and the scheduler. Collective: all ranks.

        Raises: DetrainError when the checkpoint has changed since it was compared, or when the optimizer or the
        scheduler rejects its state, before anything is changed. Interrupted before the model is read, nothing changes.
        """
        is_begun = False

        def read() -> None:
            nonlocal is_begun
            with torch.no_grad(), HeldInterrupts():
                is_begun = True
                read_tensors(self._folder, self._index, self._model_tensors)

        put_back = self._keep_beside_model()
        try:
            self._take_beside_model()
            self._read_model(read)
        except BaseException:
            if not is_begun:
                with HeldInterrupts():
                    put_back()
            raise
        self._ranks.gather(self._take_model)

    def _read_model(self, read: Callable[[], None]) -> None:
        try:
            self._ranks.gather(read)
        except DetrainError as exc:
            raise DetrainError(f"{exc}; it was intact just now, and the model has parts of it: load again") from exc

    def _keep_beside_model(self) -> Callable[[], None]:
        """Return a function that restores the present states of the optimizer and the scheduler."""
        scheduler = self._scheduler
        earlier = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
        put_optimizer_back = None if self._optimizer_state is None else self._optimizer_state.keep()

        def put_back() -> None:
            if put_optimizer_back is not None:
                put_optimizer_back()
            if scheduler is not None:
                scheduler.load_state_dict(earlier)

        return put_back

    def _take_beside_model(self) -> None:
        """Load the states of the optimizer and the scheduler; a rejection on any rank counts for all."""
        optimizer, scheduler = self._optimizer_state, self._scheduler

        def take() -> None:
            if optimizer is not None:
                with torch.no_grad():
                    optimizer.take(self._index, self._optimizer_values, OPTIMIZER)
            if scheduler is not None:
                scheduler.load_state_dict(from_json(self._note["scheduler"]))

        try:
            self._ranks.gather(take)
        except DetrainError as exc:
            raise DetrainError(f"the optimizer or the scheduler rejected its saved state: {exc}") from exc

    def _read_beside_model(self, *, is_random_state_wanted: bool) -> None:
        if is_random_state_wanted and self._note["world_size"] == self._ranks.size:
            self.random_values = self._read_random()
        if self._optimizer_state is not None:
            self._optimizer_values = self._optimizer_state.targets(self._index, OPTIMIZER)
            with torch.no_grad():
                read_tensors(self._folder, self._index, self._optimizer_values)
            self._optimizer_state.saved_groups(self._index, self._optimizer_values, OPTIMIZER)

    def _read_random(self) -> dict[str, Any]:
        """Read this rank's random number states; values larger than a generator's state are left out."""
        prefix, index = f"{RANDOM}{self._ranks.rank}/", self._index
        names = [name for key in (*STATES, DRAWS) if (name := prefix + key) in index.metadata.state_dict_metadata]
        shapes = {name: shape for name in names if (shape := index.shape(name)) is not None}
        large = {name for name, shape in shapes.items() if math.prod(shape) > _MOST_RANDOM_NUMBERS}
        names = [name for name in names if name not in large]
        tensors = {name: torch.empty(shapes[name], dtype=index.dtype(name)) for name in names if name in shapes}
        read_tensors(self._folder, index, tensors)
        every = {**index.values, **tensors}
        return {fqn.removeprefix(prefix): every[fqn] for fqn in names}

    def _take_model(self) -> None:
        """Set the model's values. Collective: the ranks that have parts of the same layers."""
        with torch.no_grad():
            self.model_state.put_in_order()
            every = {**self._index.values, **self._model_tensors}
            self.model_state.take({name: every[MODEL + name] for name in self.model_state.values})
