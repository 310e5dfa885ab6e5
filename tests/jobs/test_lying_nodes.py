"""A node that lies about a job cannot write outside the folder, exhaust memory or pass a failure off as a success."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import stat
import threading
import time
import tracemalloc
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from detrain_nb.copying.json_lines import Talk
from detrain_nb.deploy.files import Patience, label
from detrain_nb.deploy.jobs import PATIENCE, READING, REMOVING, open_job_talk
from detrain_nb.errors import DetrainError, JobError, NodeLost, SpecError, WireError
from detrain_nb.jobs import submit
from detrain_nb.jobs.asking import ask_facts, try_on_all
from detrain_nb.jobs.ending import remove_parts
from detrain_nb.jobs.execution import execute
from detrain_nb.jobs.fetching import fetch
from detrain_nb.jobs.following import Follower, Retries, Wanted
from detrain_nb.jobs.job import Job
from detrain_nb.jobs.job_status import JobStatus
from detrain_nb.jobs.log_lines import Kept, LogLine
from detrain_nb.jobs.node_checks import check_port
from detrain_nb.jobs.noting import hear_reports
from detrain_nb.jobs.record import Record
from detrain_nb.jobs.report_checks import NodeReport
from detrain_nb.spec import Node, PipelineSpec
from detrain_nb.transport.local import LocalTransport

from ..node.git_host import commit, git
from .lying_node import Answer, LyingNode

JOB = "a-20260101-000000-beef"
DATA = b"0123456789" * 100
DIGEST = hashlib.sha256(DATA).hexdigest()


def listing(*names: str, size: int = len(DATA), digest: str = DIGEST) -> Answer:
    return lambda talk, order: talk.say("files", files=[[name, size, digest] for name in names])


def sending(data: bytes = DATA, *, at_most: int = 1 << 30) -> Answer:
    def answer(talk: Talk, order: dict[str, Any]) -> None:
        rest = data[order["offset"] :]
        talk.say("file", size=len(rest))
        talk.send(rest[:at_most])
        if len(rest) > at_most:
            raise EOFError  # the node closes the connection

    return answer


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    "name",
    [
        "../out",
        "/tmp/out",
        "a/../../out",
        "a\x1b[2J",
        "a//b",
        *(f"a{c}b" for c in "\u200b\u200f\u061c\u202e\ufeff\U000e0041"),
    ],
)
def test_name_that_leads_out_is_refused(name: str, tmp_path: Path) -> None:
    node = LyingNode({"artifacts": listing(name), "read": sending()})
    with pytest.raises(WireError):
        fetch([node], JOB, ["*", name], tmp_path / "in")
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "pattern"),
    [(".bashrc", "*.pt"), (".bashrc", "*"), (".git/config", "*"), ("a/.git/hooks/x", "a/"), ("a/.metadata/x", "a/")],
)
def test_file_that_was_not_asked_for_is_refused(name: str, pattern: str, tmp_path: Path) -> None:
    node = LyingNode({"artifacts": listing(name), "read": sending()})
    with pytest.raises(DetrainError, match=f"{re.escape(name)}, which matches no requested pattern"):
        fetch([node], JOB, [pattern], tmp_path)
    assert everything_in(tmp_path) == []


@pytest.mark.timeout(30)
def test_list_of_files_comes_to_its_end(tmp_path: Path) -> None:
    def endless(talk: Talk, order: dict[str, Any]) -> None:
        talk.say("files", files=[], more=True)

    with pytest.raises(WireError, match="more files after a message with only 0"):
        fetch([LyingNode({"artifacts": endless})], JOB, ["*"], tmp_path)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("depth", [80, 0], ids=["folders", "names"])
def test_folders_and_names_of_files_have_a_bound(depth: int, tmp_path: Path) -> None:
    def endless(talk: Talk, order: dict[str, Any]) -> None:
        for number in range(0, 1 << 20, 500):
            names = [f"{each:0{1 if depth else 200}}{'/a' * depth}.pt" for each in range(number, number + 500)]
            talk.say("files", files=[[name, 0, DIGEST] for name in names], more=True)

    with pytest.raises(DetrainError, match=r"more than 10,000 folders, or 16,777,216 characters of names"):
        fetch([LyingNode({"artifacts": endless})], JOB, ["*.pt"], tmp_path)
    assert everything_in(tmp_path) == []


@pytest.mark.timeout(30)
def test_reports_of_other_jobs_are_not_heard_without_end() -> None:
    def endless(talk: Talk, order: dict[str, Any]) -> None:
        talk.say("status", jobs=[{"id": "b", "node_rank": 0, "state": "running"}], more=True)

    node = LyingNode({"status": endless})
    with open_job_talk(node) as talk:
        assert [each.id for each in hear_reports(talk, [JOB])] == ["b"]
    assert len(node.heard) == 1


def test_what_is_no_folder_here_and_what_is_one_there_is_said(tmp_path: Path) -> None:
    node = LyingNode({"artifacts": listing(), "read": sending()})
    with pytest.raises(SpecError, match="the target is a URL"):
        fetch([node], JOB, ["*.pt"], "s3://bucket/x")
    with pytest.raises(JobError, match=r"no artifact that matches \*\.pt, deep; for a whole folder write deep/$"):
        fetch([node], JOB, ["*.pt", "deep"], tmp_path)


def test_folder_that_ones_own_link_names_is_made(tmp_path: Path) -> None:
    (tmp_path / "to").symlink_to(tmp_path / "scratch/models")
    fetch([LyingNode({"artifacts": listing("m.pt"), "read": sending()})], JOB, ["*.pt"], tmp_path / "to")
    assert (tmp_path / "scratch/models/m.pt").read_bytes() == DATA


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "in/sub").symlink_to(tmp_path / "out")
    node = LyingNode({"artifacts": listing("sub/m.pt"), "read": sending()})
    with pytest.raises(DetrainError, match="is not a folder"):
        fetch([node], JOB, ["*.pt"], tmp_path / "in")
    assert everything_in(tmp_path / "out") == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("to", ["models", "."])
def test_folder_of_another_user_among_everybodys_is_not_taken(to: str, tmp_path: Path) -> None:
    everybodys = tmp_path / "tmp"
    (everybodys / "models").mkdir(parents=True)
    everybodys.chmod(0o1777)
    os.chown(everybodys / "models", 12345, 12345)
    name = "m.pt" if to == "models" else "models/m.pt"
    node = LyingNode({"artifacts": listing(name), "read": sending()})
    with pytest.raises(DetrainError, match="made by another user"):
        fetch([node], JOB, ["*.pt"], everybodys / to)
    assert everything_in(everybodys) == ["models"]


def test_link_that_comes_after_the_look_is_not_followed(tmp_path: Path) -> None:
    """In a folder that a group can write to, another process can create such a link at any moment of the fetch."""
    (tmp_path / "out").mkdir()
    place = tmp_path / "in/sub"

    def swap_and_send(talk: Talk, order: dict[str, Any]) -> None:
        if not place.is_symlink():
            place.rename(tmp_path / "in/before")
            place.symlink_to(tmp_path / "out")
        sending()(talk, order)

    node = LyingNode({"artifacts": listing("sub/m.pt"), "read": swap_and_send})
    fetch([node], JOB, ["*.pt"], tmp_path / "in")
    assert everything_in(tmp_path / "out") == []
    assert (tmp_path / "in/before/m.pt").read_bytes() == DATA, "in the folder that was looked at"


def test_part_that_is_another_file_of_the_user_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "in").mkdir()
    os.link(precious, tmp_path / f"in/.m.pt.{DIGEST[:16]}.part")
    os.mkfifo(tmp_path / f"in/.n.pt.{DIGEST[:16]}.part")
    fetch([LyingNode({"artifacts": listing("m.pt", "n.pt"), "read": sending()})], JOB, ["*.pt"], tmp_path / "in")
    assert precious.read_text() == "precious"
    assert (tmp_path / "in/m.pt").read_bytes() == (tmp_path / "in/n.pt").read_bytes() == DATA


def test_two_fetches_into_one_folder_do_not_write_into_each_others_files(tmp_path: Path) -> None:
    """The node of the second fetch sends wrong bytes while the first fetch is still writing the same file."""
    is_begun, is_over = threading.Event(), threading.Event()

    def slow(talk: Talk, order: dict[str, Any]) -> None:
        talk.say("file", size=len(DATA))
        talk.send(DATA[:500])
        talk.flush()
        is_begun.set()
        assert is_over.wait(30)
        talk.send(DATA[500:])

    honest = LyingNode({"artifacts": listing("m.pt"), "read": slow})
    lying = LyingNode({"artifacts": listing("m.pt"), "read": sending(b"x" * len(DATA))})
    first = threading.Thread(target=fetch, args=([honest], JOB, ["*.pt"], tmp_path), daemon=True)
    first.start()
    assert is_begun.wait(30)
    with pytest.raises(WireError, match="SHA-256"):
        fetch([lying], JOB, ["*.pt"], tmp_path)
    fetch([LyingNode({"artifacts": listing("m.pt"), "read": sending()})], JOB, ["*.pt"], tmp_path)
    is_over.set()
    first.join(30)
    assert not first.is_alive()
    assert everything_in(tmp_path) == ["m.pt"]
    assert (tmp_path / "m.pt").read_bytes() == DATA


def test_file_that_nobody_else_could_read_is_the_users_alone_here(tmp_path: Path) -> None:
    def private(talk: Talk, order: dict[str, Any]) -> None:
        talk.say("file", size=len(DATA), private=order["name"] == "key.pt")
        talk.send(DATA)

    fetch([LyingNode({"artifacts": listing("key.pt", "m.pt"), "read": private})], JOB, ["*.pt"], tmp_path)
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("key.pt", "m.pt")}
    umask = os.umask(0)
    os.umask(umask)
    assert modes == {"key.pt": 0o600, "m.pt": 0o666 & ~umask}


def test_link_in_the_place_of_a_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/m.pt").symlink_to(tmp_path / "precious")
    node = LyingNode({"artifacts": listing("m.pt"), "read": sending()})
    fetch([node], JOB, ["*.pt"], tmp_path / "in", replace=True)
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "in/m.pt").read_bytes() == DATA


def test_file_here_that_differs_is_kept_and_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/best.pt").write_text("mine")
    (tmp_path / "link.pt").symlink_to("elsewhere")
    node = LyingNode({"artifacts": listing("checkpoints/best.pt", "link.pt", "new.pt"), "read": sending()})
    with pytest.raises(JobError, match=r"checkpoints/best\.pt, link\.pt in .* differ and were kept.*replace=True"):
        fetch([node], JOB, ["*.pt"], tmp_path)
    assert (tmp_path / "checkpoints/best.pt").read_text() == "mine"
    assert (tmp_path / "link.pt").is_symlink()
    assert (tmp_path / "new.pt").read_bytes() == DATA
    fetched = fetch([node], JOB, ["*.pt"], tmp_path, replace=True)
    assert (fetched.num_there, fetched.replaced) == (1, ("checkpoints/best.pt", "link.pt"))
    assert str(fetched).endswith("; replaced checkpoints/best.pt, link.pt")
    assert (tmp_path / "checkpoints/best.pt").read_bytes() == (tmp_path / "link.pt").read_bytes() == DATA


def test_what_a_fetch_has_left_is_written_over_until_somebody_changes_it(tmp_path: Path) -> None:
    node, before = LyingNode({"artifacts": listing("m.pt"), "read": sending()}), dict[str, str]()
    fetch([node], JOB, ["*.pt"], tmp_path, fetched_before=before)
    later = DATA[:-1] + b"x"
    trained = listing("m.pt", digest=hashlib.sha256(later).hexdigest())
    again = LyingNode({"artifacts": trained, "read": sending(later)})
    fetch([again], JOB, ["*.pt"], tmp_path, fetched_before=before)
    assert (tmp_path / "m.pt").read_bytes() == later
    (tmp_path / "m.pt").write_text("mine")
    with pytest.raises(JobError, match="kept"):
        fetch([node], JOB, ["*.pt"], tmp_path, fetched_before=before)
    assert (tmp_path / "m.pt").read_text() == "mine"


def test_file_that_is_written_here_during_the_fetch_is_kept(tmp_path: Path) -> None:
    def write_and_send(talk: Talk, order: dict[str, Any]) -> None:
        (tmp_path / "m.pt").write_text("mine")
        sending()(talk, order)

    with pytest.raises(DetrainError, match="changed here during the fetch"):
        fetch([LyingNode({"artifacts": listing("m.pt"), "read": write_and_send})], JOB, ["*.pt"], tmp_path)
    assert (tmp_path / "m.pt").read_text() == "mine"


def test_other_bytes_than_the_digest_says_are_not_kept(tmp_path: Path) -> None:
    node = LyingNode({"artifacts": listing("m.pt"), "read": sending(b"x" * len(DATA))})
    with pytest.raises(WireError, match="SHA-256"):
        fetch([node], JOB, ["*.pt"], tmp_path)
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize("size", [len(DATA) - 1, len(DATA) + 1, 1 << 61])
def test_other_size_than_was_said_is_refused(size: int, tmp_path: Path) -> None:
    def lie(talk: Talk, order: dict[str, Any]) -> None:
        talk.say("file", size=size)
        talk.send(DATA)

    with pytest.raises(WireError, match="changed on the node during the fetch"):
        fetch([LyingNode({"artifacts": listing("m.pt"), "read": lie})], JOB, ["*.pt"], tmp_path)


def test_what_came_before_a_link_broke_does_not_come_again(tmp_path: Path) -> None:
    node = LyingNode({"artifacts": listing("m.pt"), "read": sending(at_most=400)})
    with pytest.raises(DetrainError):
        fetch([node], JOB, ["*.pt"], tmp_path)
    (part,) = everything_in(tmp_path)
    assert part.endswith(".part")
    node.answers["read"] = sending()
    fetched = fetch([node], JOB, ["*.pt"], tmp_path)
    assert everything_in(tmp_path) == ["m.pt"] == list(fetched.files)
    assert node.heard[-1]["offset"] == 400


def test_part_with_other_bytes_does_not_pass(tmp_path: Path) -> None:
    (tmp_path / f".m.pt.{DIGEST[:16]}.part").write_bytes(b"x" * 400)
    node = LyingNode({"artifacts": listing("m.pt"), "read": sending()})
    with pytest.raises(WireError, match="fetch it again"):
        fetch([node], JOB, ["*.pt"], tmp_path)
    fetch([node], JOB, ["*.pt"], tmp_path)
    assert (tmp_path / "m.pt").read_bytes() == DATA


def test_disk_that_is_too_small_is_said_before_anything_comes(tmp_path: Path) -> None:
    node = LyingNode({"artifacts": listing("m.pt", size=1 << 60), "read": sending()})
    with pytest.raises(DetrainError, match="do not fit"):
        fetch([node], JOB, ["*.pt"], tmp_path)
    assert [order["type"] for order in node.heard] == ["artifacts"]


def follow(node: LyingNode, *, lost_after_s: float = 30.0) -> tuple[list[str], object]:
    lines: list[LogLine] = []
    waits = Retries(lost_after_s=lost_after_s, shortest_gap_s=0.01, longest_gap_s=0.05)
    said = Follower([node], JOB, wanted=Wanted(), on_line=lines.append, retries=waits).run(60)
    return [line.text for line in lines], said[0]


@pytest.mark.parametrize(
    "lie",
    [
        {"type": "data", "name": "../x", "offset": 0, "size": 1},
        {"type": "data", "name": "rank-0.log", "offset": 0, "size": 1 << 40},
        {"type": "data", "name": "rank-0.log", "offset": -1, "size": 1},
        {"type": "status", "jobs": [{"id": JOB, "node_rank": 0, "state": "happy"}]},
        {"type": "status", "jobs": 5},
        {"type": "surprise"},
    ],
    ids=str,
)
def test_lie_ends_the_following(lie: dict[str, Any]) -> None:
    node = LyingNode({"follow": lambda talk, order: talk.say(**{"kind": lie["type"], **_rest(lie)})})
    lines, outcome = follow(node)
    assert lines == []
    assert isinstance(outcome, WireError)
    assert len(node.heard) == 1  # the node is not queried again


def _rest(lie: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in lie.items() if name != "type"}


def test_tail_is_that_of_the_first_link(tmp_path: Path) -> None:
    """``tail`` applies to the first connection only: what was printed while the link was broken is shown in full."""

    def begin(talk: Talk, order: dict[str, Any]) -> None:
        talk.say("data", name="rank-0.log", offset=100, size=0)
        talk.say("status", jobs=[{"id": JOB, "node_rank": 0, "state": "running"}])
        node.answers["follow"] = go_on
        raise EOFError

    def go_on(talk: Talk, order: dict[str, Any]) -> None:
        for name, offset in (("rank-0.log", 100), ("rank-1.log", 0)):
            talk.say("data", name=name, offset=offset, size=4)
            talk.send(b"more")
        talk.say("end")

    node = LyingNode({"follow": begin})
    lines: list[str] = []
    Follower([node], JOB, wanted=Wanted(tail=3), on_line=lambda line: lines.append(str(line))).run(60)
    assert [(order["tail"], order["offsets"]) for order in node.heard] == [(3, {}), (None, {"rank-0.log": 100})]
    assert [line for line in lines if "connect" not in line] == ["[0] more", "[1] more"]


def test_node_that_hangs_up_without_end_is_lost() -> None:
    node = LyingNode({})
    lines, outcome = follow(node, lost_after_s=1.0)
    assert isinstance(outcome, NodeLost)
    assert len(node.heard) > 1
    assert "connection lost" in lines[0]


def test_link_that_breaks_loses_no_line_and_says_none_twice() -> None:
    text = "".join(f"line {number}\n" for number in range(1000)).encode()
    cuts = iter([300, 1111, 1111, 5000])

    def answer(talk: Talk, order: dict[str, Any]) -> None:
        at = order["offsets"].get("rank-0.log", 0)
        end = next(cuts, None)
        piece = text[max(0, at - 7) : end]  # the node sends up to 7 bytes again
        talk.say("data", name="rank-0.log", offset=max(0, at - 7), size=len(piece))
        talk.send(piece)
        if end is not None:
            talk.flush()
            raise EOFError
        talk.say("status", jobs=[{"id": JOB, "node_rank": 0, "state": "ended", "exit_code": 0}])
        talk.say("end")

    lines, outcome = follow(LyingNode({"follow": answer}))
    assert [line for line in lines if line.startswith("line")] == text.decode().splitlines()
    assert getattr(outcome, "exit_code", None) == 0


def test_link_of_a_quiet_job_that_breaks_after_hours_is_made_again() -> None:
    """As when a laptop has slept: the link breaks after a silence that is longer than ``lost_after_s``."""
    links = iter([0.5, None])  # the first link lasts longer than `follow` tries to reconnect

    def answer(talk: Talk, order: dict[str, Any]) -> None:
        lasts_s = next(links)
        state = {"state": "running"} if lasts_s else {"state": "ended", "exit_code": 0}
        talk.say("status", jobs=[{"id": JOB, "node_rank": 0, **state}])
        talk.flush()
        if lasts_s:
            time.sleep(lasts_s)
            raise EOFError
        talk.say("end")

    lines, outcome = follow(LyingNode({"follow": answer}), lost_after_s=0.3)
    assert getattr(outcome, "exit_code", None) == 0, outcome
    assert lines[-1] == "connected again"


def test_ranks_that_begin_anew_are_said() -> None:
    def answer(talk: Talk, order: dict[str, Any]) -> None:
        for restarts in (0, 1, 1):
            talk.say("status", jobs=[{"id": JOB, "node_rank": 0, "state": "running", "restarts": restarts}])
        talk.say("end")

    lines, _ = follow(LyingNode({"follow": answer}))
    assert lines == ["all ranks were restarted: restart 1"]


def test_status_of_a_node_that_lies_is_no_status(tmp_path: Path) -> None:
    record = Record(tmp_path / "jobs.sqlite")
    record.add(JOB, name="a", nodes="[]", spec='{"name": "a", "source": {"script_text": "1"}}', state="running")
    node = LyingNode({"status": lambda talk, order: talk.say("status", jobs=[{"id": JOB, "state": "ended"}])})
    job = Job(JOB, "a", [node], record=record)
    assert job.status().state == "unknown"
    with pytest.raises(JobError, match=r"does not answer.*: anyway=True forgets the job here"):
        job.remove()
    assert record.get(JOB).state == "running"
    with pytest.raises(JobError, match="did not succeed"):
        job.fetch(to=tmp_path)


def test_command_that_prints_control_characters_is_shown_clean() -> None:
    def answer(talk: Talk, order: dict[str, Any]) -> None:
        data = b"\x1b]0;owned\x07one\ntwo\xff\x1b[2J" + b"x" * 100_000
        talk.say("output", size=len(data))
        talk.send(data)
        talk.say("exit", status=3)

    lines: list[LogLine] = []
    done = execute([LyingNode({"exec": answer}, "a"), LyingNode({}, "b")], "ls", on_line=lines.append)
    assert lines[0].text == "one"
    assert all(line.text.isprintable() for line in lines)
    assert done.statuses["a"] == 3
    assert isinstance(done.statuses["b"], DetrainError)
    assert done.status == 255


def test_port_that_a_node_does_not_try_is_not_said_to_be_taken() -> None:
    (finding,) = check_port(LyingNode({}, "b"), "127.0.0.1", 29500)
    assert finding.severity == "warning"
    assert finding.text.startswith("could not check that port 29500 is free: b: ")


@pytest.mark.timeout(30)
def test_command_that_never_ends_is_not_waited_for() -> None:
    def answer(talk: Talk, order: dict[str, Any]) -> None:
        while True:
            talk.say("output", size=4)
            talk.send(b"yes\n")
            talk.flush()

    done = execute([LyingNode({"exec": answer})], "yes", timeout_s=0.1, slack_s=0.2)
    assert "takes too long" in str(done.statuses["this machine"])


@pytest.mark.timeout(30)
def test_node_that_is_always_still_at_it_is_not_waited_for() -> None:
    def answer(talk: Talk, order: dict[str, Any]) -> None:
        while True:
            talk.send(b'{"type": "wait"}\n')
            talk.flush()
            is_over.wait(0.01)

    is_over = threading.Event()
    node = LyingNode({"facts": answer})
    with (
        pytest.raises(DetrainError, match="takes too long"),
        open_job_talk(node, patience=Patience(answer_s=0.2)) as talk,
    ):
        ask_facts(talk)
    assert math.isfinite(PATIENCE.answer_s), "as long as a node is waited for, but for what a job prints"


@pytest.mark.timeout(60)
def test_metrics_and_removal_are_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(talk: Talk, order: dict[str, Any]) -> None:
        while True:
            talk.send(b'{"type": "wait"}\n')
            talk.flush()
            time.sleep(0.01)

    assert READING.answer_s < REMOVING.answer_s < PATIENCE.answer_s / 10
    monkeypatch.setattr("detrain_nb.jobs.following.READING", Patience(answer_s=0.2))
    monkeypatch.setattr("detrain_nb.jobs.ending.REMOVING", Patience(answer_s=0.2))
    node = LyingNode({"follow": answer, "remove": answer})
    wanted = Wanted(has_logs=False, has_metrics=True, is_once=True)
    said = Follower([node], JOB, wanted=wanted, retries=Retries(lost_after_s=0)).run(30)
    assert "takes too long" in str(said[0])
    over = JobStatus(JOB, "a", "ended", 0, reports={label(node): NodeReport(JOB, 0, "ended")})
    with pytest.raises(DetrainError, match="takes too long"):
        remove_parts([node], over, anyway=False)


@pytest.mark.timeout(30)
def test_metrics_without_end_do_not_fill_the_memory() -> None:
    piece = b'{"step": 1, "rank": 0, "nested": [[[]]], "loss": 0.5}\n' * 1000

    def answer(talk: Talk, order: dict[str, Any]) -> None:
        for number in range(1000):
            talk.say("data", name="metrics/rank-0.jsonl", offset=number * len(piece), size=len(piece))
            talk.send(piece)

    kept = Kept(JOB, 1_000_000)
    follower = Follower(
        [LyingNode({"follow": answer})], JOB, wanted=Wanted(has_metrics=True), on_metrics=kept.add_metrics
    )
    with pytest.raises(JobError, match="more than 1,000,000 bytes"):
        follower.run(60)
    assert 1000 < len(kept.metrics) < 5000
    assert kept.metrics[0].keys() == {"step", "rank", "loss"}


def test_only_ranks_of_the_job_are_heard_and_each_of_its_own_metrics(tmp_path: Path) -> None:
    lines = "".join(f'{{"step": 1, "rank": {rank}, "loss": 1.0}}\n' for rank in range(-3, 4)).encode()

    def answer(talk: Talk, order: dict[str, Any]) -> None:
        for name in ("metrics/rank-1.jsonl", "metrics/rank-2.jsonl"):
            talk.say("data", name=name, offset=0, size=len(lines))
            talk.send(lines)
        _runs(talk, order)
        talk.say("end")

    job = _job_of(LyingNode({"follow": answer, "status": _runs}), tmp_path)
    assert [line["rank"] for line in job.metrics()] == [1]


def test_logs_that_nobody_wants_take_no_memory(tmp_path: Path) -> None:
    follower = Follower([LyingNode({"follow": _sends_logs_of_many_ranks})], JOB, wanted=Wanted(has_logs=False))
    tracemalloc.start()
    try:
        follower.run(60)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000  # the node sent 60 MB
    finally:
        tracemalloc.stop()


def _sends_logs_of_many_ranks(talk: Talk, order: dict[str, Any]) -> None:
    for rank in range(1000):
        talk.say("data", name=f"rank-{rank}.log", offset=0, size=60_000)
        talk.send(b"x" * 60_000)
    talk.say("end")


def _runs(talk: Talk, order: dict[str, Any]) -> None:
    talk.say("status", jobs=[{"id": JOB, "node_rank": 0, "state": "running", "metrics": {"step": 1}}])


def _job_of(node: LyingNode, tmp_path: Path) -> Job:
    record = Record(tmp_path / "jobs.sqlite")
    record.add(JOB, name="a", nodes="[]", spec='{"name": "a", "source": {"script_text": "1"}}', state="running")
    record.update(JOB, world_size=2)
    return Job(JOB, "a", [node], record=record)


@pytest.mark.timeout(60)
def test_show_needs_no_more_than_the_last_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ever(talk: Talk, order: dict[str, Any]) -> None:
        line = b'{"step": 7, "rank": 0, "loss": 0.5}\n' * 5000
        for number in itertools.count():
            talk.say("data", name="metrics/rank-0.jsonl", offset=number * len(line), size=len(line))
            talk.send(line)

    machine = {"gpus": 0, "cpus": 2, "memory_bytes": 0, "free_bytes": 1 << 30, "torch": ""}
    node = LyingNode({"follow": ever, "status": _runs, "facts": lambda talk, order: talk.say("facts", **machine)})
    monkeypatch.setattr("detrain_nb.jobs.job._MOST_SHOWN_BYTES", 1_000_000)
    shown = _job_of(node, tmp_path).show()
    assert 0 < len(shown.metrics) < 5000
    assert next(order["tail"] for order in node.heard if order["type"] == "follow") == 10


@pytest.mark.timeout(60)
def test_stop_does_not_wait_for_a_node_that_is_always_still_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    def ever(talk: Talk, order: dict[str, Any]) -> None:
        while not is_over.wait(0.05):
            talk.send(b'{"type": "wait"}\n')
            talk.flush()

    monkeypatch.setattr("detrain_nb.jobs.ending._STOP_LIMIT_S", 0.5)
    try:
        with pytest.raises(JobError, match="takes too long"):
            _job_of(LyingNode({"stop": ever, "status": _runs}), tmp_path).stop(grace_s=0)
    finally:
        is_over.set()


def test_node_that_takes_its_time_holds_nobody() -> None:
    is_done = threading.Event()
    node = LyingNode({"facts": lambda talk, order: is_done.wait(30)})

    def ask(index: int) -> object:
        with open_job_talk(node) as talk:
            return ask_facts(talk)

    (outcome,) = try_on_all([node], ask, limit_s=0.1)
    assert "did not answer within 0.1 s" in str(outcome)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("detrain_nb job"))
    is_done.set()


def test_node_that_fails_to_launch_ends_those_that_did(tmp_path: Path) -> None:
    heard: list[str] = []

    def note(answer: str, **fields: Any) -> Answer:
        def say(talk: Talk, order: dict[str, Any]) -> None:
            heard.append(order["type"])
            talk.say(answer, **fields)

        return say

    machine = {"gpus": 0, "cpus": 2, "memory_bytes": 0, "free_bytes": 1 << 30, "torch": "2.9.1"}
    good = {
        "facts": note("facts", **machine),
        "source": _take_source,
        "prepare": note("prepared", port=1),
        "launch": note("launched", pid=1),
        "stop": note("stopped", was="running"),
        "remove": note("removed"),
    }
    bad = {**good, "launch": lambda talk, order: talk.say("failed", text="no memory")}
    removed = {**bad, "stop": bad["launch"], "status": lambda talk, order: talk.say("status", jobs=[])}
    silent = {order: answer for order, answer in bad.items() if order != "stop"}
    record = Record(tmp_path / "jobs.sqlite")
    spec = PipelineSpec.from_dict({"name": "partly", "source": {"script_text": "1"}})
    for second in (bad, removed):
        heard.clear()
        with pytest.raises(DetrainError, match=r"^b: no memory$"):
            submit(spec, nodes=[LyingNode(good, "a"), LyingNode(second, "b")], record=record)
        assert heard.count("launch") == 1
        assert heard[-4:].count("stop") >= 1
        assert heard[-4:].count("remove") >= 1
        assert record.summaries() == []
    with pytest.raises(DetrainError, match=r"^b: no memory$"):
        submit(spec, nodes=[LyingNode(good, "a"), LyingNode(silent, "b")], record=record)
    assert record.get("partly").state == "not started", "it may run there"


@pytest.mark.parametrize("ref", ["the commit", "main"])
def test_node_does_not_choose_what_the_others_run(ref: str, tmp_path: Path, home: Path) -> None:
    first = commit(work := tmp_path / "work", {"train.py": "1"})
    evil = commit(work, {"train.py": "evil"})
    git("reset", "--quiet", "--soft", first, at=work)
    machine = {"gpus": 0, "cpus": 2, "memory_bytes": 0, "free_bytes": 1 << 30, "torch": version("torch")}
    answers: dict[str, Answer] = {
        "facts": lambda talk, order: talk.say("facts", **machine),
        "source": lambda talk, order: talk.say("ready", commit=evil, source="0" * 64),
    }
    lying, git_of = LyingNode(answers, "a"), {"url": str(work), "ref": first if ref == "the commit" else ref}
    spec = PipelineSpec.from_dict({"name": "chosen", "source": {"git": git_of, "entry": "train.py"}})
    told = f"^a: it fetched commit {evil[:12]}, but {first[:12]} was"
    said = told if ref == "the commit" else "main is commit .* on this node, "
    with pytest.raises(DetrainError, match=said):
        submit(spec, nodes=[lying, LocalTransport(Node(host="localhost"))], record=Record(tmp_path / "jobs.sqlite"))
    assert "prepare" not in [order["type"] for order in lying.heard]


def _take_source(talk: Talk, order: dict[str, Any]) -> None:
    text = b"".join(talk.read(order["size"]))
    talk.say("need", indices=[])
    talk.say("ready", source=hashlib.sha256(text).hexdigest())


def test_what_other_nodes_have_comes_without_one_that_does_not_answer(tmp_path: Path) -> None:
    def reports(talk: Talk, order: dict[str, Any]) -> None:
        talk.say("status", jobs=[{"id": JOB, "node_rank": 1, "state": "ended", "exit_code": 1}])

    def prints(talk: Talk, order: dict[str, Any]) -> None:
        talk.say("data", name="rank-1.log", offset=0, size=6)
        talk.send(b"hello\n")
        reports(talk, order)
        talk.say("end")

    answers: dict[str, Answer] = {
        "status": reports,
        "follow": prints,
        "artifacts": listing("m.pt"),
        "read": sending(),
    }
    record = Record(tmp_path / "jobs.sqlite")
    record.add(JOB, name="a", nodes="[]", spec='{"name": "a", "source": {"script_text": "1"}}', state="running")
    there = LyingNode(answers, "there")
    job = Job(JOB, "a", [LyingNode({}, "gone"), there], record=record)
    said = [str(line) for line in job.logs().lines]
    assert said[0].startswith("[gone] output is incomplete: gone: ")
    assert said[1:] == ["[there:1] hello"]
    with pytest.raises(JobError, match="did not succeed"):
        job.fetch(to=tmp_path / "out")
    fetched = job.fetch(to=tmp_path / "out", anyway=True)
    assert (fetched.files, fetched.silent) == (("m.pt",), ("gone",))
    assert str(fetched).endswith("; nothing fetched from gone")
    assert {order["node_rank"] for order in there.heard if order["type"] != "status"} == {1}
    nobody = Job(JOB, "a", [LyingNode({}, "gone")], record=record)
    for act in (nobody.logs, nobody.metrics, lambda: nobody.fetch(to=tmp_path, anyway=True)):
        with pytest.raises(JobError, match="gone: "):
            act()


@pytest.mark.parametrize("act", [lambda job: job.stop(), lambda job: job.remove()], ids=["stop", "remove"])
def test_node_that_does_not_answer_is_named(act: Callable[[Job], object], tmp_path: Path) -> None:
    record = Record(tmp_path / "jobs.sqlite")
    record.add(JOB, name="a", nodes="[]", spec="{}", state="running")
    with pytest.raises(JobError, match=r"this machine|unknown"):
        act(Job(JOB, "a", [LyingNode({})], record=record))
    assert record.get(JOB).state == "running"
    os.sched_yield()
