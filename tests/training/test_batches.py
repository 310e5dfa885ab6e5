"""Each sample is used once per epoch, or left out by drop_last, for any samples, replicas and batch size."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from detrain_nb.errors import SpecError
from detrain_nb.training.batches import ReplicaSampler, for_replica, make_loader


def samplers(samples: int, batch_size: int, num_replicas: int, **options: Any) -> list[ReplicaSampler]:
    return [
        ReplicaSampler(range(samples), batch_size, replica=replica, num_replicas=num_replicas, **options)
        for replica in range(num_replicas)
    ]


@settings(max_examples=300, deadline=None)
@given(
    samples=st.integers(1, 200),
    batch_size=st.integers(1, 9),
    num_replicas=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_each_sample_is_in_one_batch_of_one_replica(
    samples: int, batch_size: int, num_replicas: int, shuffle: bool, drop_last: bool
) -> None:
    try:
        made = samplers(samples, batch_size, num_replicas, shuffle=shuffle, drop_last=drop_last, seed=3)
    except SpecError:
        assert samples < num_replicas * (batch_size if drop_last else 1)
        return
    epochs = [[list(sampler) for sampler in made] for _ in range(2)]
    for batches in epochs:
        assert {len(of_one) for of_one in batches} == {len(made[0])}, "all replicas take as many steps"
        assert all(batch for of_one in batches for batch in of_one), "nobody has an empty batch"
        seen = Counter(index for of_one in batches for batch in of_one for index in batch)
        assert set(seen.values()) <= {1}
        if drop_last:
            assert len(seen) == len(made[0]) * batch_size * num_replicas
        else:
            assert len(seen) == samples
    assert shuffle or epochs[0] == epochs[1]


def test_epochs_differ_and_seeds_repeat_them() -> None:
    (one,), (other,) = samplers(50, 5, 1, seed=1), samplers(50, 5, 1, seed=1)
    first, second = list(one), list(one)
    assert first != second
    assert [list(other), list(other)] == [first, second]
    other.go_to(0, 20)
    assert list(other) == first[4:] and list(other) == second


def test_usual_loaders_are_dealt_out_and_others_are_left() -> None:
    data = TensorDataset(torch.arange(20))
    dealt = [for_replica(DataLoader(data, 4, shuffle=True), replica=r, num_replicas=2, seed=0) for r in range(2)]
    seen = [int(value) for loader in dealt for (batch,) in loader for value in batch]
    assert sorted(seen) == list(range(20)) and seen != list(range(20))
    in_order = for_replica(DataLoader(data, 4), replica=0, num_replicas=1, seed=0)
    assert torch.cat([batch for (batch,) in in_order]).tolist() == list(range(20))
    own = DataLoader(data, sampler=WeightedRandomSampler([1.0] * 20, 20))
    assert for_replica(own, replica=0, num_replicas=2, seed=0) is own
    assert for_replica(DataLoader(data, 4, num_workers=2), replica=0, num_replicas=2, seed=0).num_workers == 2


def test_too_few_samples_and_empty_batches_are_told() -> None:
    with pytest.raises(SpecError, match="3 samples are too few for a batch of 2 on each of 4 replicas"):
        make_loader(range(3), 2, num_replicas=4)
    with pytest.raises(SpecError, match="batch_size=0"):
        ReplicaSampler(range(3), 0)
