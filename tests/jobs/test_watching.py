"""A real job of two ranks that is watched: listeners hear of each change, and without listeners no thread runs."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from detrain_nb.copying.json_lines import Talk
from detrain_nb.deploy.jobs import open_job_talk
from detrain_nb.errors import DetrainError, TransportError, WireError
from detrain_nb.jobs import Job, JobNews, LogPart, find_job, submit, watching
from detrain_nb.jobs.job_status import OVER, judge
from detrain_nb.jobs.noting import Noting
from detrain_nb.jobs.record import Record
from detrain_nb.jobs.watched_node import WatchedNode, read_metrics
from detrain_nb.jobs.watching import Watch
from detrain_nb.node.job.terms import LOOK_LOG_BYTES, LOOK_METRICS_BYTES
from detrain_nb.spec import PipelineSpec
from detrain_nb.transport.local import LocalTransport

from .lying_node import Answer, LyingNode

LIMIT_S = 120.0
STEP_BY_STEP = """
import os, pathlib, sys, time
from detrain_nb import log_metrics

rank, orders = int(os.environ["RANK"]), pathlib.Path(r"{orders}")
for number in range(1000):
    while not (orders / str(number)).exists():
        time.sleep(0.02)
    for step in range(10 * number, 10 * number + 10):
        log_metrics(step, loss=1.0 / (step + 1), total_steps=40)
        print(f"step {{step}} of rank {{rank}}")
    if (orders / str(number)).read_text() == "checkpoint" and rank == 0:
        place = pathlib.Path(f"checkpoints/step-{{10 * number:08d}}")
        place.mkdir(parents=True)
        (place / "checkpoint.json").write_text("")
    if (orders / str(number)).read_text() == "fail" and rank == 1:
        sys.exit("out of luck")
    if (orders / str(number)).read_text() == "end":
        pathlib.Path("model.pt").write_bytes(b"x" * 1000)
        pathlib.Path("artifacts").mkdir(exist_ok=True)
        for name in ("artifacts/model.bin", *(f"artifacts/a{{n:03d}}.pt" for n in range(500))):
            pathlib.Path(name).touch()
        break
"""


def give(orders: Path, number: int, order: str = "") -> None:
    """Have the ranks do the next ten steps; the rename keeps them from reading a half-written order."""
    draft = orders / "draft"
    draft.write_text(order)
    draft.rename(orders / str(number))


class Heard:
    """A listener that keeps all news of a job."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.states: list[str] = []
        self.news: JobNews | None = None
        self.points: list[tuple[int, float | None]] = []
        self.times: list[float] = []
        self._changed = threading.Condition()

    def __call__(self, news: JobNews) -> None:
        with self._changed:
            self.news = news
            self.times.append(time.monotonic())
            self.lines += [(part.source, line) for part in news.parts for line in part.lines]
            self.states.append(news.status.state)
            loss = news.curves.get("loss")
            self.points = loss.points() if loss else []
            self._changed.notify_all()

    def wait_for(self, is_so: Callable[[Heard], bool], limit_s: float = 60.0) -> JobNews:
        with self._changed:
            assert self._changed.wait_for(lambda: self.news is not None and is_so(self), limit_s), (
                self.states,
                self.lines[-5:],
                self.points,
            )
            assert self.news is not None
            return self.news


_left: set[threading.Thread] = set()  # threads that earlier, failed tests left running


def watchers() -> list[threading.Thread]:
    running = [thread for thread in threading.enumerate() if thread.name == "detrain_nb watch"]
    return [thread for thread in running if thread not in _left]


@pytest.fixture(autouse=True)
def others_threads() -> None:
    """Note the threads that a failed test left running, so that the next test does not count them as its own."""
    _left.update(watchers())


@pytest.fixture
def steps(home: Path) -> Iterator[None]:
    """Stop the jobs named "steps" after a test: the next test uses the same name."""
    yield
    for row in Record().summaries(name="steps"):
        if row.state not in OVER:
            find_job(row.id).stop(grace_s=1)


def wait_until_no_thread_is_left(limit_s: float = 20.0) -> None:
    for thread in watchers():
        thread.join(limit_s)
    assert watchers() == []


def submit_step_by_step(orders: Path, **fields: object) -> Job:
    source = {"script_text": STEP_BY_STEP.format(orders=orders)}
    return submit(PipelineSpec.from_dict({"name": "steps", "source": source, "checkpoint": None, **fields}))


@pytest.mark.timeout(LIMIT_S)
def test_curves_grow_and_logs_follow_to_the_end_beside_a_listener_that_fails(
    steps: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submit_step_by_step(tmp_path, checkpoint={"url": "checkpoints"})
    heard, late, calls = Heard(), Heard(), list[JobNews]()

    def fail(news: JobNews) -> None:
        calls.append(news)
        raise RuntimeError("of the listener")

    give(tmp_path, 0)
    job.on_change(fail)
    stop = job.on_change(heard)
    heard.wait_for(lambda it: len(it.points) == 10 and len(it.lines) == 20)
    assert heard.news and not heard.news.checkpoints
    give(tmp_path, 1, "checkpoint")
    news = heard.wait_for(lambda it: len(it.points) == 20 and len(it.lines) == 40 and bool(it.news.checkpoints))
    assert [step for step, _ in news.checkpoints] == [10]
    assert (news.status.state, news.curves.num_steps, news.curves.last_step) == ("running", 40, 19)
    assert job.list_made("model.pt") == []
    stop_late = job.on_change(late)
    late.wait_for(lambda it: len(it.points) == 20 and len(it.lines) == 40)
    give(tmp_path, 2, "end")
    heard.wait_for(lambda it: it.states[-1] == "ended" and len(it.lines) == 60)
    late.wait_for(lambda it: it.states[-1] == "ended" and len(it.lines) == 60)
    for each in (heard, late):
        assert [line for source, line in each.lines if source == "1"] == [f"step {n} of rank 1" for n in range(30)]
    wait_until_no_thread_is_left()
    assert len(calls) == 1 and "RuntimeError: of the listener" in capsys.readouterr().err
    stop(), stop_late()
    made = job.list_made("model.pt")
    assert [(file.node, file.name, file.size_bytes) for file in made] == [("this machine", "model.pt", 1000)]
    made = job.list_made()
    assert len(made) == 500 and "artifacts/model.bin" not in [file.name for file in made]
    made = job.list_made(first=["*.bin", "model.*"])
    assert [file.name for file in made[:3]] == ["artifacts/model.bin", "model.pt", "artifacts/a000.pt"]
    again = Heard()
    job.on_change(again)
    news = again.wait_for(lambda it: len(it.points) == 30 and len(it.lines) == 60)
    assert (news.status.state, news.status.exit_code) == ("ended", 0)
    unheard = Noting(job.id, job.name, ["this machine"], Record())([TransportError("it has not answered yet")])
    assert (unheard.state, unheard.exit_code) == ("ended", 0)  # a slow node does not make it unknown


@pytest.mark.timeout(LIMIT_S)
def test_failure_and_a_stop_are_told_at_once(steps: None, tmp_path: Path) -> None:
    job = submit_step_by_step(tmp_path)
    heard = Heard()
    job.on_change(heard)
    give(tmp_path, 0, "fail")
    news = heard.wait_for(lambda it: it.states[-1] == "ended")
    assert (news.status.failed_rank, news.status.exit_code) == (1, 1)
    assert "out of luck" in news.status.last_lines[-1]
    heard = Heard()
    give(tmp_path, 0)
    again = job.restart()
    again.on_change(heard)
    heard.wait_for(lambda it: it.states[-1] == "running" and len(it.points) == 10)
    again.stop(grace_s=1)
    heard.wait_for(lambda it: it.states[-1] == "stopped")
    wait_until_no_thread_is_left()


@pytest.mark.timeout(LIMIT_S)
def test_nothing_runs_when_nobody_listens(steps: None, tmp_path: Path) -> None:
    job = submit_step_by_step(tmp_path)
    first, second = Heard(), Heard()
    stop_first, stop_second = job.on_change(first), job.on_change(second)
    first.wait_for(lambda it: it.states[-1:] == ["running"])
    stop_first()
    stop_first()
    assert watchers()
    second.wait_for(lambda it: bool(it.states))
    stop_second()
    wait_until_no_thread_is_left()
    third = Heard()
    stop = job.on_change(third)
    give(tmp_path, 0)
    third.wait_for(lambda it: len(it.points) == 10)
    assert len(first.points) == 0
    stop()
    wait_until_no_thread_is_left()


LONG = """
import sys
for number in range(20_000):
    print(f"line {number} " + "x" * 20)
sys.stdout.write("no end")
"""


@pytest.mark.timeout(LIMIT_S)
def test_of_a_long_log_the_last_lines_come_and_more_is_asked_for(home: Path) -> None:
    job = submit(PipelineSpec.from_dict({"name": "long", "source": {"script_text": LONG}}).with_ranks(1))
    job.wait(60)
    heard = Heard()
    job.on_change(heard)
    heard.wait_for(lambda it: it.states[-1:] == ["ended"])
    wait_until_no_thread_is_left()
    texts = [line for _, line in heard.lines]
    assert texts[-1] == "no end" and len(texts) == 400
    assert heard.news
    part = heard.news.parts[0]
    assert part.lines[0] == texts[0] and part.begin > 0
    found, looks = [*texts], 0
    while part.begin:
        part = job.log_before(part)
        found[:0] = part.lines
        looks += 1
        assert sum(map(len, part.lines)) <= LOOK_LOG_BYTES
    assert found == [f"line {number} " + "x" * 20 for number in range(20_000)] + ["no end"]
    assert looks < 20


# ---- nodes that do not answer, or report what no node should


def answers(state: str, **more: object) -> dict[str, Answer]:
    """Return the answers of a node whose part of the job is in ``state``, with no logs, metrics or files."""

    def look(talk: Talk, order: dict[str, object]) -> None:
        job = {"id": order["id"], "node_rank": order["node_rank"], "state": state, "ranks": [order["node_rank"]]}
        talk.say("status", jobs=[job], **more)
        talk.say("end", more=False)

    return {"look": look}


def watch(*nodes: LocalTransport) -> Watch:
    names = [node.name for node in nodes]
    return Watch(nodes, "lies", num_ranks=2, judge=lambda said: judge("lies", "lies", dict(zip(names, said))))


@pytest.mark.timeout(LIMIT_S)
def test_node_out_of_reach_is_told_with_its_time_and_the_others_go_on() -> None:
    there, gone = LyingNode(answers("running"), name="gpu1"), LyingNode(answers("running"), name="gpu2")
    heard, watched = Heard(), watch(there, gone)
    stop = watched.add(heard)
    assert stop
    news = heard.wait_for(lambda it: it.states[-1:] == ["running"] and len(it.news.status.reports) == 2)
    assert not news.unreached
    gone.answers = {}
    watched.look_now()
    news = heard.wait_for(lambda it: "gpu2" in it.news.unreached)
    assert str(news.unreached["gpu2"]).startswith("not reached since ") and news.unreached["gpu2"].why
    assert abs(news.unreached["gpu2"].since - time.time()) < 60
    assert news.status.state == "running" and news.status.reports["gpu2"].state == "running"
    gone.answers = answers("running")
    heard.wait_for(lambda it: not it.news.unreached)
    stop()
    wait_until_no_thread_is_left()


def test_who_comes_while_the_last_one_goes_is_told_that_the_watch_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of the watch are about to exit, so a listener that is added now would never be called."""
    watched = watch(LyingNode(answers("running"), name="gpu1"))
    stop, end, late = watched.add(Heard()), watched._end, list[object]()

    def come_and_end() -> None:
        late.append(watched.add(Heard()))
        end()

    monkeypatch.setattr(watched, "_end", come_and_end)
    assert stop
    stop()
    assert late == [None]
    wait_until_no_thread_is_left()


@pytest.mark.timeout(LIMIT_S)
def test_who_comes_with_the_last_news_is_told_that_the_watch_is_over() -> None:
    watched, late = watch(LyingNode(answers("ended"), name="gpu1")), list[object]()
    watched.add(lambda news: late.append(watched.add(Heard())) if news.is_last else None)
    wait_until_no_thread_is_left()
    assert late == [None]


@pytest.mark.timeout(LIMIT_S)
def test_node_is_asked_once_a_second_and_less_where_nothing_changes() -> None:
    node = LyingNode(answers("running"), name="gpu1")
    watched = watch(node)
    begun = time.monotonic()
    stop = watched.add(Heard())
    assert stop
    while len(node.heard) < 4:
        assert time.monotonic() - begun < 30
        time.sleep(0.05)
    assert time.monotonic() - begun > 1.0 + 1.5 + 2.25 - 0.5
    stop()
    wait_until_no_thread_is_left()


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    "said",
    [
        {"checkpoints": [[1, 2, 3]]},
        {"checkpoints": [["1", 2]]},
        {"checkpoints": [[n, 1.0] for n in range(60)]},
        {"checkpoints": {"1": 2}},
    ],
    ids=str,
)
def test_what_no_node_should_say_is_not_believed(said: dict[str, object]) -> None:
    heard, watched = Heard(), watch(LyingNode(answers("running", **said), name="gpu1"))
    stop = watched.add(heard)
    assert stop
    news = heard.wait_for(lambda it: bool(it.news.unreached))
    assert news.status.state == "unknown"
    assert "expected" in news.unreached["gpu1"].why
    stop()
    wait_until_no_thread_is_left()


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("name", "size", "times", "why"),
    [
        ("rank-0.log", 1 << 20, [], "more than was requested"),
        ("../passwd", 10, [], "is not a log of a job"),
        ("metrics/rank-0.jsonl", 1 << 30, [], "more than was requested"),
        ("rank-0.log", 1, [[0, 1.0]] * 257, "a list of at most 256 was expected"),
        ("rank-0.log", 1, [[0, 1e300]], "is not a time"),
        ("rank-0.log", 1, [[0, 4e10]], "is not a time"),
    ],
)
def test_piece_that_was_not_asked_for_is_not_taken(name: str, size: int, times: list[object], why: str) -> None:
    def look(talk: Talk, order: dict[str, object]) -> None:
        talk.say("status", jobs=[])
        talk.say("data", name=name, offset=0, size=size, times=times)
        talk.send(b"x")

    heard, watched = Heard(), watch(LyingNode({"look": look}, name="gpu1"))
    stop = watched.add(heard)
    assert stop
    news = heard.wait_for(lambda it: bool(it.news.unreached))
    assert why in news.unreached["gpu1"].why
    assert heard.lines == []
    stop()
    wait_until_no_thread_is_left()


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["rank-0.log"] * 2, "rank-0.log appears twice in one answer"),
        (["metrics/rank-0.jsonl"] * 2, "metrics/rank-0.jsonl appears twice in one answer"),
        ([f"metrics/rank-{rank}.jsonl" for rank in range(9)], "or 8 of metrics"),
        ([f"rank-{rank}.log" for rank in range(81)], "more than 80 files"),
    ],
    ids=["log twice", "metrics twice", "many metrics", "many files"],
)
def test_one_answer_has_few_files_and_each_once(names: list[str], why: str) -> None:
    def look(talk: Talk, order: dict[str, object]) -> None:
        talk.say("status", jobs=[])
        for name in names:
            talk.say("data", name=name, offset=0, size=2)
            talk.send(b"a\n")
        talk.say("end", more=False)

    heard, watched = Heard(), watch(LyingNode({"look": look}, name="gpu1"))
    stop = watched.add(heard)
    assert stop
    news = heard.wait_for(lambda it: bool(it.news.unreached))
    assert why in news.unreached["gpu1"].why
    stop()
    wait_until_no_thread_is_left()


def test_node_of_a_job_with_any_number_of_ranks_sends_no_logs_without_end() -> None:
    asked = 0

    def look(talk: Talk, order: dict[str, object]) -> None:
        nonlocal asked
        talk.say("status", jobs=[])
        for rank in range(80 * asked, 80 * (asked + 1)):
            talk.say("data", name=f"rank-{rank}.log", offset=0, size=2)
            talk.send(b"a\n")
        asked += 1
        talk.say("end", more=False)

    node, watched = LyingNode({"look": look}), WatchedNode("lies", 0, name="", num_ranks=None, lock=threading.Lock())
    with open_job_talk(node) as talk:
        for _ in range(5):
            watched.look(talk)
    assert {part.source for part in watched.kept_parts()} == {str(rank) for rank in range(256)}


def test_line_that_has_not_ended_is_told_as_it_is_drawn_last() -> None:
    pieces = [b"begin\n 1%|#", b" \r 2%|##", b" 3%|###\r", b"\n"]
    offset = 0

    def look(talk: Talk, order: dict[str, object]) -> None:
        nonlocal offset
        talk.say("status", jobs=[])
        data = pieces.pop(0)
        talk.say("data", name="rank-0.log", offset=offset, size=len(data))
        talk.send(data)
        offset += len(data)
        talk.say("end", more=False)

    node, watched = LyingNode({"look": look}), WatchedNode("lies", 0, name="", num_ranks=1, lock=threading.Lock())
    told = []
    with open_job_talk(node) as talk:
        while pieces:
            has_news, _ = watched.look(talk)
            told.append((has_news, *watched.begun_lines().items()))
    whose = ("", "0")
    assert told == [(True, (whose, " 1%|#")), (True, (whose, " 2%|##")), (True, (whose, " 2%|## 3%|###")), (True,)]


def test_of_many_short_lines_the_last_come_and_of_what_is_logged_the_bytes() -> None:
    """Split into lines or parsed, both would take a hundred times as much memory as on the wire."""
    line = b'{"step":1,"rank":0}\n'
    number = LOOK_METRICS_BYTES // len(line)

    def look(talk: Talk, order: dict[str, object]) -> None:
        talk.say("status", jobs=[])
        for name, data in (("metrics/rank-0.jsonl", line * number), ("rank-0.log", b"\n" * LOOK_LOG_BYTES)):
            talk.say("data", name=name, offset=0, size=len(data))
            talk.send(data)
        talk.say("end", more=False)

    watched = WatchedNode("lies", 0, name="", num_ranks=1, lock=threading.Lock())
    with open_job_talk(LyingNode({"look": look})) as talk:
        tracemalloc.start()
        watched.look(talk)
        _, most_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most_bytes < 6 * LOOK_METRICS_BYTES
    [part], pieces = watched.take_new()
    assert len(part.lines) == 2000 and part.begin == part.skipped == LOOK_LOG_BYTES - 2000
    assert sum(1 for _ in read_metrics(pieces)) == number


@pytest.mark.timeout(LIMIT_S)
def test_node_is_not_asked_again_before_those_who_listen_have_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the node's answers would pile up in memory."""
    monkeypatch.setattr(watching, "_SHORTEST_GAP_S", 0.01)
    is_asked_much, early, num_looks = threading.Event(), list[bool](), 0

    def look(talk: Talk, order: dict[str, object]) -> None:
        nonlocal num_looks
        talk.say("status", jobs=[{"id": "lies", "node_rank": 0, "state": "running"}])
        talk.say("data", name="rank-0.log", offset=2 * num_looks, size=2)
        talk.send(b"a\n")
        talk.say("end", more=True)
        num_looks += 1
        if num_looks >= 20:
            is_asked_much.set()

    def listen(news: JobNews) -> None:
        if not early:
            early.append(is_asked_much.wait(2.0))

    watched = watch(LyingNode({"look": look}, name="gpu1"))
    stop = watched.add(listen)
    assert stop and is_asked_much.wait(60), "it is asked again once they have"
    assert early == [False]
    stop()
    wait_until_no_thread_is_left()


def test_lines_of_ranks_that_the_job_has_not_are_not_taken() -> None:
    def look(talk: Talk, order: dict[str, object]) -> None:
        job = {"id": order["id"], "node_rank": 0, "state": "ended", "exit_code": 0}
        talk.say("status", jobs=[job])
        for name in ("rank-0.log", "rank-2.log", "torchrun.log", "setup.log"):
            talk.say("data", name=name, offset=0, size=6)
            talk.send(b"\x1b[2Ja\n")
        talk.say("end", more=False)

    heard = Heard()
    assert watch(LyingNode({"look": look}, name="gpu1")).add(heard)
    heard.wait_for(lambda it: it.states[-1:] == ["ended"])
    assert heard.lines == [("0", "a"), ("setup", "a")]
    wait_until_no_thread_is_left()


def job_on(node: LyingNode) -> Job:
    """Return a job that is in no record, which is enough to query its node."""
    job = object.__new__(Job)
    job.__dict__.update(id="lies", name="lies", _reached=[node], _nodes=())
    return job


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ([["../../.bashrc", 1, 1.0]], "leads out of the folder"),
        ([["a.pt", -1, 1.0]], "not a number of bytes"),
        ([["a.pt", 1, "now"]], "is not a time"),
        ([["a.pt", 1, 1.0]] * 501, "a list of at most 500"),
    ],
)
def test_what_a_node_says_it_has_made_is_checked(files: list[list[object]], why: str) -> None:
    def made(talk: Talk, order: dict[str, object]) -> None:
        talk.say("made", files=files)

    with pytest.raises(DetrainError, match=why):
        job_on(LyingNode({"artifacts": made}, name="gpu1")).list_made("*.pt")


def test_files_that_were_not_asked_for_are_not_listed() -> None:
    def made(talk: Talk, order: dict[str, object]) -> None:
        talk.say("made", files=[["a.pt", 1, 1.0], ["key.pem", 1, 1.0]])

    found = job_on(LyingNode({"artifacts": made}, name="gpu1")).list_made("*.pt")
    assert [file.name for file in found] == ["a.pt"]


def test_part_before_another_one_is_checked() -> None:
    def look_back(talk: Talk, order: dict[str, object]) -> None:
        talk.say("data", name=order["name"], offset=90, size=50)
        talk.send(b"x" * 50)

    with pytest.raises(WireError, match="not what was requested"):
        job_on(LyingNode({"look back": look_back}, name="gpu1")).log_before(LogPart("", "0", 100, ()))
