"""The tables of jobs and of one job, as text and as HTML."""

from __future__ import annotations

import json
import re

import pytest

from detrain_nb.jobs.job_report import JobReport
from detrain_nb.jobs.job_status import JobStatus
from detrain_nb.jobs.record import JobSummary
from detrain_nb.jobs.report import JobList
from detrain_nb.jobs.report_checks import NodeReport
from detrain_nb.plan import NodePlan, Plan


def summary(id: str, state: str = "ended", **more: object) -> JobSummary:
    given = {"exit_code": 0, "started_at": 1010.0, "ended_at": 1070.0, "world_size": 4, "metrics": "", **more}
    return JobSummary(id=id, name="run", state=state, submitted_at=1000.0, updated_at=1080.0, release="1", **given)  # type: ignore[arg-type]


def test_table_has_the_last_known_state_and_its_age() -> None:
    shown = JobList(
        [
            summary(
                "run-c", "running", exit_code=None, ended_at=None, metrics='{"loss": 0.0312345, "step": 120, "n": 3}'
            ),
            summary("run-b", exit_code=3),
            summary("run-a"),
        ],
        at=1100.0,
    )
    assert repr(shown).splitlines() == [
        "3 jobs, 1 not over, 1 failed",
        "job    state      exit  ranks  submitted       took        last metrics                 known",
        "run-c  running          4      1 min 40 s ago  1 min 30 s  step 120, loss 0.03123, n 3  20 s ago",
        "run-b  failed     3     4      1 min 40 s ago  1 min",
        "run-a  succeeded  0     4      1 min 40 s ago  1 min",
    ]
    assert repr(JobList([])) == "no jobs were submitted from here"


def test_what_failed_has_a_colour_in_html() -> None:
    rows = [summary("run-a"), summary("run-b", "lost", exit_code=None), summary("run-c", "running")]
    shown = JobList([*rows, summary("run-d", "stopped", exit_code=143)])
    assert ["error" in row for row in shown._repr_html_().split("<tr>")[2:]] == [False, True, False, False]
    assert repr(shown).startswith("4 jobs, 1 not over, 1 failed\n")


def test_what_a_node_has_logged_stays_text() -> None:
    for metrics in (
        json.dumps({"<b>\x1b[2J": 1.5, "large": 10**4000}),
        "[1, 2]",
        "not JSON",
        "[" * 60_000,
        json.dumps({"x" * 70_000: 1}),
        json.dumps({"flag": True, "text": "<i>"}),
    ):
        shown = JobList([summary("run-a", metrics=metrics)])
        assert "<b>" not in shown._repr_html_() and "<i>" not in shown._repr_html_()
        assert "\x1b" not in repr(shown) and "xxx" not in repr(shown)


def test_of_many_jobs_the_newest_are_shown() -> None:
    shown = JobList([summary(f"run-{number}") for number in range(10_000)])
    assert repr(shown).splitlines()[-1] == "... 9800 older ones" and len(repr(shown).splitlines()) == 203
    assert "... 9800 older ones" in shown._repr_html_() and shown._repr_html_().count("<tr>") == 201
    assert len(shown) == 10_000 and next(iter(shown)).id == "run-0"


@pytest.mark.parametrize(
    ("state", "ranks", "shown"), [("running", (), "2-3"), ("running", (3,), "3"), ("ended", (), "")]
)
def test_node_whose_ranks_have_not_begun_has_those_of_the_plan(state: str, ranks: tuple[int, ...], shown: str) -> None:
    plan = Plan((NodePlan((0, 1), "cpu", "a"), NodePlan((2, 3), "cpu", "b")), "gloo")
    status = JobStatus("demo-1", "demo", "running", reports={"b": NodeReport("demo-1", 1, state, ranks=ranks)})
    nodes = JobReport(status, plan)._repr_html_().partition("</table>")[0]
    assert re.findall(r"<td[^>]*>([^<]*)</td>", nodes)[3] == shown
