"""Jobs on this machine, in folders of the test, run through the job service that notebooks use."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from detrain_nb.copying.json_lines import Talk
from detrain_nb.deploy.jobs import open_job_talk
from detrain_nb.node.job.order import JobOrder
from detrain_nb.transport.local import LocalTransport

LIMIT_S = 60.0


@contextlib.contextmanager
def own_folders(base: Path) -> Iterator[Path]:
    """Yield the folder of this test's jobs; environment variables point the job service to it."""
    run = base / "run"
    run.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(base / "state"))
        patch.setenv("DETRAIN_NB_RUNTIME_DIR", str(run))
        yield base / "state" / "detrain_nb" / "jobs"


def make_order(code: str, **fields: Any) -> JobOrder:
    name = fields.pop("name", f"job-{uuid.uuid4().hex[:6]}")
    return JobOrder(f"{name}-20260102-030405-{uuid.uuid4().hex[:4]}", name, ("-c", code), **fields)


def talk_here() -> contextlib.AbstractContextManager[Talk]:
    return open_job_talk(LocalTransport())


def prepare(talk: Talk, order: JobOrder, **fields: Any) -> int:
    talk.say("prepare", order=order.to_dict(), source="", **fields)
    port = talk.hear("prepared")["port"]
    assert isinstance(port, int)
    return port


def launch(talk: Talk, order: JobOrder, **fields: Any) -> None:
    port = prepare(talk, order, **fields)
    talk.say("launch", store=["127.0.0.1", port], key="")
    talk.hear("launched")


def status_of(talk: Talk, order: JobOrder) -> dict[str, Any]:
    talk.say("status", ids=[order.id])
    (job,) = talk.hear("status")["jobs"]
    assert isinstance(job, dict)
    return job


class Followed:
    """The log bytes of a followed job by file name, and its last status."""

    def __init__(self, order: JobOrder, offsets: dict[str, int] | None = None) -> None:
        self.order = order
        self.offsets = dict(offsets or {})
        self.begins: dict[str, int] = {}
        self.data: dict[str, bytes] = {}
        self.job: dict[str, Any] = {}

    def begin(self, talk: Talk, **fields: Any) -> Followed:
        talk.say("follow", id=self.order.id, node_rank=self.order.node_rank, offsets=self.offsets, **fields)
        return self

    def take(self, talk: Talk) -> bool:
        """Take one message about the job; return False at the end of the stream."""
        said = talk.hear("data", "status", "end")
        if said["type"] == "status":
            (self.job,) = said["jobs"]
        elif said["type"] == "data":
            name = said["name"]
            self.begins.setdefault(name, said["offset"])
            self.data[name] = self.data.get(name, b"") + b"".join(talk.read(said["size"]))
            self.offsets[name] = said["offset"] + said["size"]
        return bool(said["type"] != "end")

    def to_end(self, talk: Talk) -> Followed:
        while self.take(talk):
            pass
        return self

    def until(self, talk: Talk, words: bytes, *, name: str) -> Followed:
        """Follow the job until ``words`` are in the log ``name``, then stop following."""
        while words not in self.data.get(name, b""):
            assert self.take(talk), f"the job ended before it printed {words!r}: {self.job} {self.data}"
        talk.say("enough")
        while self.take(talk):
            pass
        return self
