"""The training data, epoch after epoch, from any position, which a checkpoint saves."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from ..errors import SpecError
from ..parallel import ParallelModel
from .batches import ReplicaSampler, for_replica

_MOST = 1 << 48  # epochs, batches, samples


class Epochs:
    """The batches of ``loader`` for this replica of ``model``; a loader with a custom sampler is used as it is.

    ``done_with`` counts a batch when its step is done: ``position`` is just after the last counted batch.
    """

    def __init__(self, loader: Iterable[Any], model: ParallelModel, *, seed: int) -> None:
        self.loader = for_replica(loader, replica=model.replica, num_replicas=model.num_replicas, seed=seed)
        sampler = getattr(self.loader, "batch_sampler", None)
        self._sampler = sampler if isinstance(sampler, ReplicaSampler) else None
        self.epoch = self.batch = 0  # within the current epoch, or its rest if it was entered in the middle
        self._first_sample = 0

    def steps_of_one(self) -> int:
        """Return how many batches an epoch has. Raises: SpecError when the loader has no length."""
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            raise SpecError("the training data have no length: give steps=, not epochs=") from None

    def __iter__(self) -> Iterator[Any]:
        """Yield batches without end. Raises: SpecError when the loader yields none, or none in a later epoch."""
        while True:
            is_empty = True
            for given in self._rest_of_epoch():
                is_empty = False
                yield given
            if is_empty and self.batch == 0 and self._first_sample == 0:
                if self.epoch:
                    raise SpecError(
                        f"the training data were exhausted after epoch {self.epoch}: give a loader that can be "
                        "iterated again"
                    )
                raise SpecError("the training data have no batches")
            self.epoch, self.batch, self._first_sample = self.epoch + 1, 0, 0

    def done_with(self) -> None:
        """Count the last batch as trained on."""
        self.batch += 1

    def _rest_of_epoch(self) -> Iterator[Any]:
        if self._sampler is not None:
            self._first_sample, self.batch = self._sampler.samples_before(self.batch, self._first_sample), 0
            self._sampler.go_to(self.epoch, self._first_sample)
            if isinstance(self.loader, DataLoader) and self.loader.generator is not None:
                self.loader.generator.manual_seed(self._sampler.seed_of_workers(self.epoch))
            yield from self.loader
            return
        for of_order in ("batch_sampler", "sampler", "dataset"):
            set_epoch = getattr(getattr(self.loader, of_order, None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
        skipped = self.batch
        for number, given in enumerate(self.loader):
            if number >= skipped:
                yield given

    @property
    def position(self) -> dict[str, int]:
        """The position after the last counted batch, as plain numbers that are the same on every rank."""
        if self._sampler is None:
            return {"epoch": self.epoch, "batch": self.batch}
        samples = self._sampler.samples_before(self.batch, self._first_sample)
        return {
            "epoch": self.epoch,
            "samples": samples,
            "seed": self._sampler.seed,
            "length": self._sampler.num_samples,
        }

    def go_to(self, position: Any) -> None:
        """Continue after ``position``, with any batch size and number of replicas; warn when that is impossible."""
        if not _is_position(position):
            warnings.warn("the checkpoint has no data position: the data start at their beginning", stacklevel=4)
            return
        self.epoch, self.batch = position["epoch"], position.get("batch", 0)
        self._first_sample = position.get("samples", 0)
        if self._sampler is None:
            if self._first_sample:
                warnings.warn(
                    "the data position counts samples but this loader counts batches: the epoch is restarted",
                    stacklevel=4,
                )
            return
        if self.batch:
            warnings.warn(
                "the data position counts batches but this loader counts samples: the epoch is restarted", stacklevel=4
            )
            self.batch = 0
        for name, here in (("seed", self._sampler.seed), ("length", self._sampler.num_samples)):
            if position.get(name, here) != here:
                warnings.warn(
                    f"the {name} of the data was {position[name]} and is {here}: in this epoch some samples are "
                    "repeated, and some are skipped",
                    stacklevel=4,
                )


def _is_position(given: Any) -> bool:
    """Return whether ``given`` is a position of `Epochs`: a user's own loop may have saved anything."""
    if not isinstance(given, dict) or "epoch" not in given:
        return False
    return all(
        type(given.get(name, 0)) is int and 0 <= given.get(name, 0) < _MOST for name in ("epoch", "batch", "samples")
    )
