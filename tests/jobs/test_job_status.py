"""The state of a job, as derived from the reports of its nodes."""

from __future__ import annotations

from typing import Any

import pytest

from detrain_nb.errors import DetrainError, JobFailed, TransportError
from detrain_nb.jobs.job_status import JobStatus, judge
from detrain_nb.jobs.report_checks import NodeReport

SILENT = TransportError("b: it does not answer")


def report(state: str, exit_code: int | None = None, node_rank: int = 0, **fields: Any) -> NodeReport:
    return NodeReport("job", node_rank, state, exit_code=exit_code, **fields)


def status(*said: NodeReport | DetrainError | None) -> JobStatus:
    return judge("job", "name", dict(zip("abcd", said)))


@pytest.mark.parametrize(
    ("said", "state", "exit_code"),
    [
        ([report("ended", 0)], "ended", 0),
        ([report("ended", 3)], "ended", 3),
        ([report("running"), report("running")], "running", None),
        ([report("preparing"), report("running")], "running", None),
        ([report("running"), report("stopping")], "stopping", None),
        ([report("running"), report("ended", 1)], "stopping", None),
        ([report("running"), SILENT], "running", None),
        ([report("ended", 0), SILENT], "unknown", None),
        ([SILENT], "unknown", None),
        ([None], "not started", None),
        ([report("ended", 0), None], "lost", None),
        ([report("ended", 0), report("lost")], "lost", None),
        ([report("lost"), report("node restarted")], "node restarted", None),
        ([report("unreadable")], "unreadable", None),
        ([report("stopped", 143)], "stopped", 143),
        ([report("stopped", 143), report("running")], "stopping", None),
        ([report("ended", 1, failed_rank=2, ended_at=1.0), report("stopped", 143, ended_at=2.0)], "stopped", 143),
        ([report("stopped", 143), report("lost")], "lost", None),
    ],
)
def test_state(said: list[NodeReport | DetrainError | None], state: str, exit_code: int | None) -> None:
    found = status(*said)
    assert (found.state, found.exit_code) == (state, exit_code)


def test_clocks_that_are_days_apart_do_not_lengthen_a_job() -> None:
    now, day = 1_700_000_000.0, 86_400.0
    right = report("ended", 0, started_at=now, ended_at=now + 14)
    behind = report("ended", 0, 1, started_at=now - day, ended_at=now - day + 13)
    for said in ((right, behind), (behind, right)):
        assert str(status(*said)).startswith("job job: succeeded after 14 s\n")
    assert status(right, SILENT).ended_at is None
    assert status(report("running", started_at=now)).started_at == now


def test_node_whose_own_rank_failed_says_why() -> None:
    followed = report("ended", 1, reason="node b failed", ended_at=1.0)
    failed = report(
        "ended", 3, failed_rank=2, last_lines=("ValueError: x",), reason="rank 2 exited with code 3", ended_at=2.0
    )
    found = status(followed, failed)
    assert (found.exit_code, found.failed_node, found.failed_rank) == (3, "b", 2)
    with pytest.raises(JobFailed, match=r"exit 3.*rank 2 on b.*\n  \| ValueError: x"):
        found.check()


@pytest.mark.parametrize("lost", [report("lost", node_rank=1), report("ended", 1, node_rank=1), SILENT, None], ids=str)
def test_elastic_job_succeeds_without_nodes_that_it_can_spare(lost: NodeReport | DetrainError | None) -> None:
    said = {"a": report("ended", 0), "b": lost}
    assert judge("job", "name", said, least_nodes=1).exit_code == 0
    assert judge("job", "name", said, least_nodes=2).exit_code != 0
    assert judge("job", "name", said).exit_code != 0


@pytest.mark.parametrize(
    ("first", "other", "state", "exit_code"),
    [
        (report("running"), report("node restarted", node_rank=1), "running", None),
        (report("running"), report("ended", 1, node_rank=1), "running", None),
        (report("stopping"), report("ended", 1, node_rank=1), "stopping", None),
        (report("ended", 0), report("running", node_rank=1), "stopping", None),
        (report("stopped", 143), report("node restarted", node_rank=1), "stopped", 143),
        (report("stopped", 143), SILENT, "stopped", 143),
        (report("ended", 3, failed_rank=0), report("lost", node_rank=1), "ended", 3),
        (report("lost"), report("ended", 1, node_rank=1), "lost", None),
    ],
)
def test_state_of_an_elastic_job_is_that_of_its_first_node(
    first: NodeReport, other: NodeReport | DetrainError, state: str, exit_code: int | None
) -> None:
    found = judge("job", "name", {"a": first, "b": other}, least_nodes=1)
    assert (found.state, found.exit_code) == (state, exit_code)


def test_elastic_job_that_has_too_few_nodes_left_ends() -> None:
    said = {"a": report("running"), "b": report("lost", node_rank=1)}
    assert judge("job", "name", said, least_nodes=2).state == "stopping"


def test_elastic_job_does_not_succeed_without_its_first_node() -> None:
    said = {"a": report("lost"), "b": report("ended", 0, node_rank=1)}
    assert judge("job", "name", said, least_nodes=1).state == "lost"


def test_success_is_no_failure() -> None:
    found = status(report("ended", 0))
    assert found.check() is found
    assert found.exit_status == 0


def test_silent_node_is_named() -> None:
    assert "b: no report: b: it does not answer" in str(status(report("running"), SILENT))


def test_last_lines_of_no_rank_are_said_to_be_none_of_a_rank() -> None:
    said = str(status(report("ended", 1, reason="torchrun exited with code 1", last_lines=("no torch",))))
    assert "the last line:\n  | no torch" in said
