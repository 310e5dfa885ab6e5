"""Warnings about arguments of another kind than the example's."""

from __future__ import annotations

import dataclasses
import enum
import functools
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from detrain_nb.parallel.kinds import KnownKinds

X = torch.zeros(2, 3)


@dataclasses.dataclass
class Options:
    mode: str = "a"
    mask: Tensor | None = None


class Pair(NamedTuple):
    mode: str
    mask: Tensor | None = None


class Way(enum.Enum):
    FIRST = 1
    SECOND = 2


class Text(enum.StrEnum):
    FIRST = "a"


class Model(nn.Module):
    def forward(self, x: Tensor, given: Any = None, *more: Any, **others: Any) -> Tensor:
        return x


def told(example: tuple[Any, ...], batch: tuple[Any, ...], **others: Any) -> list[str]:
    """Return what the batch has according to the warnings; ``others``: keyword arguments of the batch."""
    known = KnownKinds(Model(), (X, *example), {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            known.warn_of_others((X, *batch), others)
    return [str(each.message).partition("this batch has ")[2].partition(":")[0] for each in caught]


@pytest.mark.parametrize(
    "example, batch, expected",
    [
        ([None, X], [X, X], "given[0]=a tensor"),
        ((X, True), (X, False), "given[1]=False"),
        ([X], (X,), "given=a tuple"),
        (X, [X], "given=a list"),
        ({}, None, "given=None"),
        (None, {"a": X}, "given=a dict"),
        ({"a": X}, {"a": X, "b": X}, "given['b']=a tensor"),
        ([{"mode": "a"}], [{"mode": "b"}], "given[0]['mode']='b'"),
        (Options(), Options("b"), "given.mode='b'"),
        (Options(), Options(mask=X), "given.mask=a tensor"),
        (Pair("a"), Pair("b"), "given.mode='b'"),
        (Way.FIRST, Way.SECOND, "given=Way.SECOND"),
        (np.bool_(True), np.bool_(False), "given=False"),
        (torch.float32, torch.float64, "given=torch.float64"),
        (X.bool(), X, "given=a tensor"),
        (X, X.long(), "given=a tensor of whole numbers"),
        (b"a", b"b", "given=b'b'"),
        ({"a"}, {"b"}, "given=a set of 'b'"),
        (nn.functional.relu, nn.functional.gelu, "given=gelu"),
        (functools.partial(nn.functional.softmax, dim=0), nn.functional.silu, "given=silu"),
    ],
)
def test_argument_of_another_kind_is_told_once(example: Any, batch: Any, expected: str) -> None:
    assert told((example,), (batch,)) == [expected]


def test_further_arguments_are_told_by_place() -> None:
    assert told((X, None, "a"), (X, X, "b")) == ["more[0]=a tensor", "more[1]='b'"]


@pytest.mark.parametrize(
    "example, batch",
    [
        ([X], [X, X]),
        ([X] * 400, [X] * 399 + [None]),
        (Options(), Options()),
        ({"a": X}, {"a": X, "b": None}),
        (Text.FIRST, "a"),
        (1, np.float32(2)),
        ((2, 3), X.shape),
        (X, X[0]),
        ({1, 2}, {3}),
        (slice(0, 2), slice(1, 2)),
    ],
)
def test_other_numbers_and_lengths_are_no_other_kind(example: Any, batch: Any) -> None:
    assert told((example,), (batch,)) == []


def test_none_for_what_was_not_given_is_no_other_kind() -> None:
    assert told((), (), extra=None) == [] and told((), (), extra=X) == ["extra=a tensor"]


def test_list_that_holds_itself_has_an_end() -> None:
    itself: list[Any] = [X]
    itself.append(itself)
    assert told((itself,), (itself,)) == []
