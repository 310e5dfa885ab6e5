"""Shared parts of the recorders that watch a model run: numbers of tensors, hooks on modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detrain_nb.parallel.operators import tensors_of
from detrain_nb.parallel.recorders import OperatorRecorder, TensorMemo, modules_watched


class Noting(OperatorRecorder[Tensor]):
    """Records which operator made which tensors, and from which."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[Tensor] = []
        self.noted: list[tuple[str, list[int], list[int]]] = []

    def on_new(self, met: Tensor) -> None:
        self.new.append(met)

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        read, made = tensors_of(args, kwargs), tensors_of((result,))
        self.noted.append((func._overloadpacket.__name__, [*map(self.number, read)], [*map(self.number, made)]))


def test_tensor_that_is_gone_for_the_code_keeps_its_number() -> None:
    first = torch.ones(3)
    with Noting() as noting:
        for _ in range(50):  # unless kept, each would reuse the id of the one before
            first + 1
    assert [made for _, _, made in noting.noted] == [[number] for number in range(1, 51)]
    assert {tuple(read) for _, read, _ in noting.noted} == {(0,)} and noting.kept == noting.new
    assert noting.kept[0] is first and noting.known(first) == 0 and noting.known(torch.ones(3)) == -1


def test_tensors_in_a_list_are_read_too() -> None:
    both = [torch.ones(1), torch.zeros(1)]
    with Noting() as noting:
        torch.cat(both)
    assert noting.noted[-1] == ("cat", [0, 1], [2])


def test_memo_makes_each_once_and_leaves_what_is_no_tensor() -> None:
    memo, one = TensorMemo(torch.clone), torch.ones(2)
    assert memo(one) is memo(one) is not one and memo("word") == "word"
    assert memo.has(one) and not memo.has(torch.ones(2)) and memo.given == [one]


@pytest.mark.parametrize("fails", [False, True])
def test_modules_are_watched_no_longer_than_asked_for(fails: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    told: list[str] = []

    def leave(name: str, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        told.append(f"-{name}")
        if fails:
            raise ValueError("from a hook")
        return output + 1 if name == "1" else None

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        told.append(name)

    given = torch.ones(1, 2)
    plain = model(given)
    try:
        with modules_watched(model.named_modules(), enter, leave):
            assert torch.equal(model(given), plain + 1)
    except ValueError:
        assert fails
    assert told == (["", "0", "-0"] if fails else ["", "0", "-0", "1", "-1", "-"])
    assert torch.equal(model(given), plain) and not any(part._forward_hooks for part in model.modules())
