"""A generation that is ended at any moment before its group is made will not be made: nobody waits for the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from detrain_nb.errors import SessionError
from detrain_nb.node import generation as generations
from detrain_nb.node.generation import Generation


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.TCPStore]:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    yield store
    assert not dist.is_initialized()


@pytest.fixture
def one_of_two(store: dist.TCPStore) -> Generation:
    """Rank 0; the other one never comes, and torch would wait for it for 20 s."""
    return Generation(rank=0, world_size=2, backend="gloo", device=torch.device("cpu"), timeout_s=20.0)


def _before_it_begins(generation: Generation, monkeypatch: pytest.MonkeyPatch) -> None:
    generation.end(7)


def _before_it_connects(generation: Generation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "forget_meshes", lambda: generation.end(7))


def _while_it_connects(generation: Generation, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore

    def connect(*args: Any, **options: Any) -> dist.TCPStore:
        generation.end(7)
        return store(*args, **options)

    monkeypatch.setattr(dist, "TCPStore", connect)


def _while_it_waits(generation: Generation, monkeypatch: pytest.MonkeyPatch) -> None:
    init = generation._torch_init

    def wait(*args: Any, **options: Any) -> None:
        timer = threading.Timer(0.3, generation.end, (7,))
        timer.start()
        try:
            init(*args, **options)
        finally:
            timer.join()

    monkeypatch.setattr(generation, "_torch_init", wait)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (_before_it_begins, SessionError),
        (_before_it_connects, SessionError),
        (_while_it_connects, SessionError),
        (_while_it_waits, dist.DistNetworkError),  # its connection to the store was shut
    ],
)
def test_what_was_ended_is_not_made(
    end: Callable[[Generation, pytest.MonkeyPatch], None],
    error: type[Exception],
    one_of_two: Generation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end(one_of_two, monkeypatch)
    with pytest.raises(error):
        one_of_two.start(7)
    assert one_of_two.ended == 7


def test_group_that_came_to_be_after_its_end_does_not_stay(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end finds no group yet, and torch has one when it comes back."""
    alone = Generation(rank=0, world_size=1, backend="gloo", device=torch.device("cpu"), timeout_s=20.0)
    make = dist.distributed_c10d._new_process_group_helper

    def end_behind(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        alone.end(1)
        return made

    with monkeypatch.context() as patched, pytest.raises((SessionError, dist.DistNetworkError)):
        patched.setattr(dist.distributed_c10d, "_new_process_group_helper", end_behind)
        alone.start(1)
    assert alone.has_group and alone.ended == 1
    alone.start(2)
    assert alone.has_group
    alone.end(2)


def test_next_one_is_made(store: dist.TCPStore) -> None:
    alone = Generation(rank=0, world_size=1, backend="gloo", device=torch.device("cpu"), timeout_s=20.0)
    alone.start(1)
    assert alone.has_group
    alone.end(2)
    assert not alone.has_group, "what there was went with it"
    with pytest.raises(SessionError, match="generation 2 was ended"):
        alone.start(2)
    alone.start(3)
    assert alone.has_group
    assert alone.end(2) == 0, "an old one"
    assert alone.has_group
    alone.end(3)
