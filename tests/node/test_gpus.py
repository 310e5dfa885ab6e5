"""The GPUs that CUDA_VISIBLE_DEVICES leaves visible; these tests need no GPU."""

from __future__ import annotations

import pytest

from detrain_nb.node.system.gpus import name_gpus, read_visible


@pytest.mark.parametrize(
    ("variable", "there", "left"),
    [
        (None, 3, ("0", "1", "2")),
        ("", 3, ()),
        ("-1", 3, ()),
        ("2,0", 3, ("2", "0")),
        (" 1 , 2", 3, ("1", "2")),
        ("0,-1,1", 3, ("0",)),
        ("0,5,1", 3, ("0",)),
        ("GPU-8932f937,GPU-1ab3", 3, ("GPU-8932f937", "GPU-1ab3")),
        ("MIG-41d2,MIG-77ab", 1, ("MIG-41d2",)),
        ("0", 0, ()),
    ],
)
def test_variable_is_read_as_cuda_reads_it(variable: str | None, there: int, left: tuple[str, ...]) -> None:
    assert read_visible(variable, there) == left


def test_choice_of_a_node_is_one_of_those_that_are_left() -> None:
    assert name_gpus("0,1", ("2", "3")) == "2,3"
    assert name_gpus("1", ("GPU-8932f937", "GPU-1ab3")) == "GPU-1ab3"
    assert name_gpus("2,0", ("0", "1", "2")) == "2,0"
