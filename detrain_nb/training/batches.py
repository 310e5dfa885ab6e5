"""The samples that each rank sees: every sample once per epoch, and the same ones on all ranks of a replica."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from ..errors import SpecError
from ..parallel import ParallelModel

_LOOKED_AT = 1 << 16  # elements of a tensor that a fingerprint is made of


class ReplicaSampler(Sampler[list[int]]):
    """Batches of indices for one of ``num_replicas`` replicas: in an epoch each sample is seen once, by one replica.

    A step takes ``batch_size`` samples on every replica. All replicas take the same number of steps: the samples left
    over at the end are spread as evenly as possible, and fewer than one per replica are added to the step before;
    ``drop_last`` drops them. Each iteration is a new epoch, with ``shuffle`` in a new order; ``go_to`` sets where the
    next one starts.
    """

    def __init__(
        self,
        data: Sized,
        batch_size: int,
        *,
        replica: int = 0,
        num_replicas: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """Share out ``data``. Raises: SpecError when there are too few samples for one step."""
        if batch_size < 1:
            raise SpecError(f"batch_size={batch_size}: give 1 or more")
        self.num_samples, self.batch_size = len(data), batch_size
        self.replica, self.num_replicas = replica, num_replicas
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self._epoch = self._first = 0
        if not len(self):
            raise SpecError(
                f"{self.num_samples} samples are too few for a batch of {batch_size} on each of {num_replicas} replicas"
            )

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return self._count_steps(self.num_samples)

    def _count_steps(self, samples: int) -> int:
        whole, rest = divmod(samples, self.batch_size * self.num_replicas)
        if self.drop_last or rest == 0 or (whole and rest < self.num_replicas):
            return whole
        return whole + 1 if rest >= self.num_replicas else 0

    def samples_before(self, batch: int, first: int = 0) -> int:
        """Return how many samples of an epoch replicas have seen after ``batch`` batches from sample ``first`` on."""
        left = self.num_samples - first
        if batch >= self._count_steps(left):
            return self.num_samples
        return first + batch * self.batch_size * self.num_replicas

    def go_to(self, epoch: int, first: int = 0) -> None:
        """Start the next iteration at sample ``first`` of ``epoch``, without loading the samples before it."""
        self._epoch, self._first = epoch, first

    def seed_of_workers(self, epoch: int) -> int:
        """Return a seed that differs between replicas and epochs, as random augmentations in the workers must."""
        return (self.seed * 1_000_003 + epoch) * 1_000_003 + self.replica

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first = self._epoch, self._first
        self._epoch, self._first = epoch + 1, 0
        order = self._order(epoch)[first:]
        steps, size = self._count_steps(len(order)), self.batch_size * self.num_replicas
        for batch in range(steps):
            is_last = batch == steps - 1 and not self.drop_last
            yield self._share(order[batch * size :] if is_last else order[batch * size : (batch + 1) * size])

    def _share(self, dealt: list[int]) -> list[int]:
        """Return this replica's contiguous run of the samples; the first ones have one more if there is a remainder."""
        each, more = divmod(len(dealt), self.num_replicas)
        begin = self.replica * each + min(self.replica, more)
        return dealt[begin : begin + each + (self.replica < more)]

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_samples))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.num_samples, generator=generator).tolist()


def make_loader(
    data: Any,
    batch_size: int = 1,
    *,
    replica: int = 0,
    num_replicas: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    **options: Any,
) -> DataLoader[Any]:
    """Return a DataLoader with a ``ReplicaSampler``; ``options`` are torch's; ``batch_size`` is per replica.

    The other arguments are those of ``ReplicaSampler``. Raises: SpecError when there are too few samples for one step.
    """
    sampler = ReplicaSampler(
        data, batch_size, replica=replica, num_replicas=num_replicas, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    # A generator of its own: otherwise each epoch would consume random numbers that dropout draws from.
    options.setdefault("generator", torch.Generator().manual_seed(sampler.seed_of_workers(0)))
    return DataLoader(data, batch_sampler=sampler, **options)


def for_replica(loader: Iterable[Any], *, replica: int, num_replicas: int, seed: int) -> Iterable[Any]:
    """Return a loader like ``loader`` with this replica's batches; one with a custom sampler is returned as it is."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return loader
    sampler: Any = loader.sampler
    is_usual = type(loader.batch_sampler) is BatchSampler and type(sampler) in (RandomSampler, SequentialSampler)
    if not is_usual or getattr(sampler, "data_source", None) is not loader.dataset:
        return loader
    is_random = isinstance(sampler, RandomSampler)
    if is_random and (sampler.replacement or sampler.num_samples != len(loader.dataset)):
        return loader
    return make_loader(
        loader.dataset,
        int(loader.batch_size or 1),
        replica=replica,
        num_replicas=num_replicas,
        shuffle=is_random,
        seed=seed,
        drop_last=loader.drop_last,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def require_same_batch(batch: Any, model: ParallelModel, *, step: int) -> None:
    """Check that all ranks of a replica, which hold stages or parts of one model, have the same batch.

    Collective: the ranks of the replica. Raises: SpecError that names two ranks whose batches differ.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    (first, known), *others = model.gather((rank, _fingerprint(batch)), of_one_copy=True)
    for other, seen in others:
        if seen != known:
            raise SpecError(
                f"step {step}: ranks {first} and {other} share one copy of the model but see different samples: use "
                "the same seed and no shuffling of their own, or a DataLoader with torch's default sampler"
            )


def _fingerprint(batch: Any) -> str:
    digest = hashlib.sha256()
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            flat = leaf.detach().flatten()
            values = flat[:: max(1, flat.numel() // _LOOKED_AT)].cpu().contiguous()
            digest.update(str((leaf.dtype, leaf.shape)).encode() + values.view(torch.uint8).numpy().tobytes())
        else:
            is_plain = isinstance(leaf, (str, bytes, bool, int, float, type(None)))
            digest.update((repr(leaf) if is_plain else type(leaf).__name__).encode())
    return digest.hexdigest()
