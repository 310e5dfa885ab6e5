"""A generation that is ended before its group exists never gets one, and its rank stops waiting for its peers."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from detrain_nb.errors import SessionError
from detrain_nb.node.groups import process_groups
from detrain_nb.node.groups.process_groups import Generation


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.TCPStore]:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    yield store
    assert not dist.is_initialized()


@pytest.fixture
def one_of_two(store: dist.TCPStore) -> Generation:
    """Return the generation of rank 0 of two; rank 1 never joins, and torch would wait 20 s for it."""
    return Generation(rank=0, world_size=2, backend="gloo", device=torch.device("cpu"), timeout_s=20.0)


def _before_it_begins(generation: Generation, monkeypatch: pytest.MonkeyPatch) -> None:
    generation.end(7)


def _before_it_connects(generation: Generation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "forget_meshes", lambda: generation.end(7))


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


class StoppedPeer(dist.Store):
    """The store of a rank that publishes its address and is stopped before it reads those of its peers."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.is_known, self.may_go = threading.Event(), threading.Event()
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)
        self.is_known.set()

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        self.may_go.wait()
        raise dist.DistStoreError("stopped")

    def has_extended_api(self) -> bool:
        return False


def test_rank_that_waits_for_a_stopped_peer_to_connect_comes_free(
    store: dist.TCPStore, one_of_two: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ports decide which of two ranks connects: the test creates groups until this rank has waited three times."""

    def make(backend: str, *, store: dist.Store, rank: int, world_size: int, timeout: datetime.timedelta) -> None:
        dist.ProcessGroupGloo(store, rank, world_size, timeout)

    def be_peer(peer: StoppedPeer) -> None:
        with pytest.raises(dist.DistStoreError, match="stopped"):
            dist.ProcessGroupGloo(peer, 1, 2, datetime.timedelta(seconds=20))

    monkeypatch.setattr(one_of_two, "_torch_init", make)
    times_it_waited = number = 0
    while times_it_waited < 3:
        number += 1
        peer = StoppedPeer(dist.PrefixStore(f"detrain_nb/generation{number}/group1", store))
        thread = threading.Thread(target=be_peer, args=(peer,))
        thread.start()
        peer.is_known.wait()
        end = threading.Timer(0.2, one_of_two.end, (number,))
        end.start()
        try:
            one_of_two.start(number)
        except (SessionError, dist.DistNetworkError):
            pass
        except RuntimeError as exc:
            assert "closed by peer" in str(exc), "it has not come free, its time was up"
            times_it_waited += 1
        finally:
            end.join()
            peer.may_go.set()
            thread.join()


def test_group_that_came_to_be_after_its_end_does_not_stay(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``end`` runs when torch has created the group but the generation does not know it yet."""
    alone = Generation(rank=0, world_size=1, backend="gloo", device=torch.device("cpu"), timeout_s=20.0)
    make = dist.distributed_c10d._new_process_group_helper

    def end_behind(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        alone.end(1)
        return made

    with monkeypatch.context() as patched, pytest.raises((SessionError, dist.DistNetworkError)):
        patched.setattr(dist.distributed_c10d, "_new_process_group_helper", end_behind)
        alone.start(1)
    assert dist.is_initialized() and not alone.has_group and alone.ended == 1
    alone.start(2)
    assert alone.has_group
    alone.end(2)


def test_next_one_is_made(store: dist.TCPStore) -> None:
    alone = Generation(rank=0, world_size=1, backend="gloo", device=torch.device("cpu"), timeout_s=20.0)
    alone.start(1)
    assert alone.has_group
    alone.end(2)
    assert not alone.has_group, "what there was went with it"
    with pytest.raises(SessionError, match="generation 2 of process groups was ended"):
        alone.start(2)
    alone.start(3)
    assert alone.has_group
    assert alone.end(2) == 0, "an old one"
    assert alone.has_group
    alone.end(3)
