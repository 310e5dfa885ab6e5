"""A plugin: writes how each test went as JSON lines, for what runs pytest and decides by it (ci.py, everything.py).

The file is named by DETRAIN_NB_OUTCOMES. Each pytest adds a line when it starts and one when it ends: one that crashed
has no second line. Under pytest-xdist the process that hands out the tests writes; its workers do not.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "DETRAIN_NB_OUTCOMES"
MAX_ERROR = 200  # characters: one line of a log


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.pop(VARIABLE, None)  # workers, and tests that run pytest themselves, write nothing
    if path:
        config.pluginmanager.register(_Recorder(Path(path)), "outcomes")


class _Recorder:
    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        self._outcomes: dict[str, str] = {}
        self._failures: list[dict[str, Any]] = []
        self._add({"started": os.getpid()})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._fail(report, report.when or "", is_never_rerun="never_rerun" in report.keywords)
        has_passed = report.passed and report.when == "call"  # one that was ended in its call is no pass
        if report.failed or (self._outcomes.get(report.nodeid) != "failed" and (has_passed or report.skipped)):
            self._outcomes[report.nodeid] = report.outcome

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._fail(report, "collect", is_never_rerun=True)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        finished = {"exitstatus": int(exitstatus), "failures": self._failures, "outcomes": self._outcomes}
        self._add({"finished": os.getpid(), **finished})

    def _fail(self, report: pytest.TestReport | pytest.CollectReport, when: str, *, is_never_rerun: bool) -> None:
        failure = {"name": report.nodeid, "when": when, "error": _say_error(report), "never_rerun": is_never_rerun}
        self._failures.append(failure)

    def _add(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _say_error(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return what the last line of a traceback begins with: the exception, and the first line of what it says."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = [line for line in (crash.message if crash else str(report.longrepr)).splitlines() if line.strip()]
    line = (lines[0] if crash else lines[-1]) if lines else "no error was given"
    return " ".join(line.split())[:MAX_ERROR]
