"""The file through which ranks rendezvous: any rank can end it, which releases waiting ranks even on a full disk."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from detrain_nb.node.groups import meeting as meetings
from detrain_nb.node.groups.meeting import Meeting


def test_end_frees_who_waits(tmp_path: Path) -> None:
    meeting = Meeting.next(tmp_path, 1)
    meeting.open()
    assert stat.filemode(meeting.path.stat().st_mode) == "-rw-------", "whatever the user's umask"
    store = dist.FileStore(str(meeting.path))
    store.set("mine", "here")
    timer = threading.Timer(0.1, meeting.end)
    timer.start()
    with pytest.raises(dist.DistStoreError, match="symbolic links"):
        store.get("of a rank that never comes")  # the store's own timeout is five minutes
    timer.join()
    assert not list(tmp_path.glob("*.end"))


def test_end_needs_no_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting.next(tmp_path, 1)
    meeting.open()
    monkeypatch.setattr(meetings.os, "symlink", lambda *_: pytest.fail("there is no room for it"))
    monkeypatch.setattr(Meeting, "_make_end", lambda self: None)
    meeting.end()
    assert meeting.has_ended


def test_each_rank_may_end_it_and_all_find_the_next(tmp_path: Path) -> None:
    ranks = [Meeting.next(tmp_path, 3) for _ in range(3)]
    ranks[0].open()
    for meeting in ranks:
        meeting.end()
        assert meeting.has_ended
    assert [Meeting.next(tmp_path, 3).path.name for _ in range(2)] == ["groups.3.1"] * 2
    assert Meeting.next(tmp_path, 4).path.name == "groups.4.0"


def test_one_that_nobody_has_begun_is_ended_too(tmp_path: Path) -> None:
    Meeting(tmp_path, 5).end()
    with pytest.raises(dist.DistStoreError, match="symbolic links"):
        dist.FileStore(str(tmp_path / "groups.5.0")).set("mine", "here")


def test_earlier_files_are_removed_and_no_others(tmp_path: Path) -> None:
    for name in ("groups.1.0", "groups.2.0", "groups.2.1.end", "groups.10.0", "spool.000001"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "groups.1.1").symlink_to("groups.1.1")
    Meeting(tmp_path, 2).remove_earlier()
    assert {path.name for path in tmp_path.iterdir()} == {"groups.2.0", "groups.2.1.end", "groups.10.0", "spool.000001"}
