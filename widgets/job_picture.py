"""A job as plain JSON for its view: the reports of its nodes in words and numbers."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..jobs.advice import advise, describe_cause
from ..jobs.job_status import JobStatus, sign_and_word
from ..jobs.live_curves import Curve, LiveCurves
from ..jobs.report_checks import NodeReport
from ..jobs.watched_node import Checkpoint
from ..jobs.watching import Unreached
from ..node.job.terms import ENDED, STOPPED
from ..session.output.safe_output import one_line
from ..text import count_of, describe_seconds, short_number, told_node
from .job_log import Levels, clean_line

_SHOWN_POINTS = 400  # of a curve: more than its plot can resolve
_MOST_RANKS, _MOST_CHECKPOINTS, _MOST_LAST_LINES = 64, 50, 20
_LOSS = ("loss", "train_loss", "train/loss", "training_loss")
_VALIDATION = re.compile(r"^(?:evaluation|eval|val|valid|validation|test)[_/ .-]?loss$")
_LEARNING_RATE = ("lr", "learning_rate", "train/lr")
_RATES = {"tokens_per_s": "tokens/s", "samples_per_s": "samples/s", "steps_per_s": "steps/s"}

Json = dict[str, Any]


def phase_of(status: JobStatus) -> str:
    """Return the phase that decides the layout of the view."""
    if not status.is_over:
        return "running"
    if status.state == STOPPED:
        return "stopped"
    return "succeeded" if status.exit_code == 0 else "failed"


def head_of(status: JobStatus, unreached: Mapping[str, Unreached], nodes: Sequence[str]) -> Json:
    """Return name, state and running time; pages keep counting the seconds."""
    is_silent = bool(unreached) and len(unreached) == len(nodes) and not status.is_over
    sign, word = ("lost", "unknown") if is_silent else sign_and_word(status.state, status.exit_code)
    lasts = None if status.started_at is None else (status.ended_at or time.time()) - status.started_at
    facts = ""
    if status.is_over and lasts is not None and status.ended_at is not None:
        facts = f"after {describe_seconds(lasts)}, at {clock(status.ended_at)}"
    elif is_silent:
        facts = f"not reached since {clock(max(each.since for each in unreached.values()))}"
    return {
        "id": one_line(status.id),
        "name": one_line(status.name),
        "sign": sign,
        "word": word,
        "phase": phase_of(status),
        "facts": facts,
        "seconds": None if lasts is None or status.is_over or is_silent else round(max(0.0, lasts), 1),
    }


def nodes_of(status: JobStatus, unreached: Mapping[str, Unreached]) -> list[Json]:
    """Return the nodes with their ranks."""
    found = [_node_of(name, report, status, unreached.get(name)) for name, report in status.reports.items()]
    silent = [
        {
            "name": one_line(told_node(name)),
            "sign": "lost",
            "word": "unknown",
            "ranks": [],
            "more": _silence(name, why, unreached),
        }
        for name, why in status.silent.items()
    ]
    return [*found, *silent]


def _silence(name: str, why: str, unreached: Mapping[str, Unreached]) -> str:
    gone = unreached.get(name)
    return one_line(f"{gone}: {gone.why}" if gone else why)


def _node_of(name: str, report: NodeReport, status: JobStatus, gone: Unreached | None) -> Json:
    sign, word = sign_and_word(report.state, report.exit_code)
    is_cause = status.failed_node == name
    if sign == "bad" and not is_cause and status.failed_node and report.state == ENDED:
        sign, word = "stopped", "stopped"
    if is_cause and report.failed_rank is not None and report.state == ENDED:
        word = f"rank {report.failed_rank} failed"
    more = [count_of(report.restarts, "restart")] if report.restarts else []
    if report.reason and report.exit_code != 0:
        more.append(report.reason)
    if gone:
        sign, word = "lost", "unknown"
        more = [f"{gone}: {gone.why}"]
    ranks = [[rank, _rank_sign(rank, report, sign)] for rank in report.ranks[:_MOST_RANKS]]
    hidden = len(report.ranks) - len(ranks)
    return {
        "name": one_line(told_node(name)),
        "sign": sign,
        "word": word,
        "ranks": ranks,
        "hidden": hidden,
        "more": one_line("; ".join(more)) if more else "",
    }


def _rank_sign(rank: int, report: NodeReport, sign: str) -> str:
    if report.failed_rank == rank:
        return "bad"
    return "stopped" if sign == "bad" else sign


def no_lines_of(status: JobStatus, unreached: Mapping[str, Unreached]) -> str:
    """Return the text to show when the log has no lines."""
    if not status.is_over:
        return "No output yet"
    if status.silent or unreached:
        return "No output received: some nodes cannot be reached"
    return "The job printed nothing" if status.reports else "Looking for its logs"


def progress_of(
    status: JobStatus, curves: LiveCurves, checkpoints: Sequence[Checkpoint], num_steps: int | None
) -> Json | None:
    """Return the progress and the estimated rest; None when the job has logged no step."""
    step = curves.last_step
    if step is None:
        return None
    total = curves.num_steps or num_steps
    pace = curves.pace
    left_s = None
    if total and pace and pace > 0 and not status.is_over and step < total:
        left_s = (total - step) / pace
    kept = checkpoints[-_MOST_CHECKPOINTS:]
    ago = f" ({describe_seconds(max(0.0, time.time() - kept[-1][1]))} ago)" if kept and not status.is_over else ""
    return {
        "step": step,
        "total": total,
        "pace": _rounded(pace) if pace and pace > 0 else None,
        "left": "" if left_s is None or left_s > 1e8 else f"about {describe_roughly(left_s)} left",
        "ends": "" if left_s is None or left_s > 1e6 else f"ends about {clock(time.time() + left_s)}",
        "started": "" if status.started_at is None else f"started {clock(status.started_at)}",
        "checkpoints": [each for each, _ in kept],
        "ago": ago,
    }


def curves_of(curves: LiveCurves) -> Json:
    """Return the curves of a job, each with at most a few hundred points."""
    names = [*curves.names]
    loss = next((name for name in _LOSS if name in names), None)
    if loss is None:
        loss = next((name for name in names if "loss" in name.lower() and not _VALIDATION.match(name)), None)
    validation = next((name for name in names if _VALIDATION.match(name)), None)
    rate = next((name for name in _RATES if name in names), None)
    pace = curves.get(rate) if rate else curves.steps_per_s
    learning = next((name for name in _LEARNING_RATE if name in names), None)
    return {
        "loss": _curve(loss, curves.get(loss)) if loss else None,
        "validation": _curve(validation, curves.get(validation)) if validation else None,
        "learning_rate": _curve(learning, curves.get(learning)) if learning else None,
        "rate": _curve(_RATES[rate or "steps_per_s"], pace),
    }


def _curve(name: str, curve: Curve | None) -> Json | None:
    if curve is None or curve.last is None:
        return None
    points = [[step, _rounded(value)] for step, value in curve.points(_SHOWN_POINTS)]
    return {
        "name": one_line(name),
        "points": points,
        "last": short_number(curve.last),
        "is_bad": curve.bad_since is not None,
        "warning": _warning(curve),
    }


def _warning(curve: Curve) -> str:
    """Describe nan or inf values and the steps they were logged at."""
    if curve.bad_since is not None:
        return f"{short_number(curve.last or 0)} since step {curve.bad_since:,}"
    if curve.first_bad is None:
        return ""
    return f"nan or inf at {count_of(curve.num_bad, 'step')}, first at step {curve.first_bad:,}"


def failure_of(status: JobStatus, curves: LiveCurves, checkpoints: Sequence[Checkpoint]) -> Json | None:
    """Return the cause, what to do, and the last lines; None for a job that has not failed."""
    if phase_of(status) != "failed":
        return None
    at = "" if curves.last_step is None else f" at step {curves.last_step:,}"
    reason = "" if status.failed_rank is not None or not status.reason else f": {status.reason}"
    levels = Levels()
    lines = [clean_line(line) for line in status.last_lines[-_MOST_LAST_LINES:]]
    todo = advise(status)
    if checkpoints:
        todo = f"{todo}. A restart continues from checkpoint {checkpoints[-1][0]:,}"
    return {
        "cause": one_line(describe_cause(status)),
        "at": one_line(f"{at}{reason}", most_chars=1000),
        "todo": f"{todo[0].upper()}{todo[1:]}." if todo else "",
        "whose": "" if not lines else f"{status.whose_lines[0].upper()}{status.whose_lines[1:]}",
        "lines": [[levels.of(line), line] for line in lines],
    }


def facts_of(status: JobStatus, curves: LiveCurves) -> list[Json]:
    """Return the main numbers of a job that succeeded."""
    shown = curves_of(curves)
    found: list[Json] = []
    for title, what in (("Loss", "loss"), ("Validation", "validation")):
        if shown[what]:
            last, is_bad = shown[what]["last"], shown[what]["is_bad"]
            found.append(
                {"title": title, "value": shown[what]["warning"], "sign": "warn"}
                if is_bad
                else {"title": title, "value": last}
            )
    if (mean := curves.mean_pace) is not None:
        found.append({"title": "Steps/s, mean", "value": short_number(mean)})
    memory = curves.get("memory_bytes")
    if memory is not None and memory.last is not None and math.isfinite(memory.last):
        found.append({"title": "Peak memory", "bytes": max(0, round(memory.last))})
    ranks = sum(len(report.ranks) for report in status.reports.values())
    done = sum(len(report.ranks) for report in status.reports.values() if report.exit_code == 0)
    if ranks:
        found.append({"title": "Ranks", "value": f"{done} of {ranks} done", "sign": "ok" if done == ranks else "warn"})
    return found


def _rounded(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.5g}")
    return short if math.isfinite(short) else value  # the largest numbers would round to infinity, which JSON lacks


def clock(at: float) -> str:
    return time.strftime("%H:%M", time.localtime(at))


def describe_roughly(seconds: float) -> str:
    """Format a time rounded, as it is only an estimate."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    if seconds < 3600:
        return f"{round(seconds / 60)} min"
    return describe_seconds(round(seconds / 60) * 60.0)
