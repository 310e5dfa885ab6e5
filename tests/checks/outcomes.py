"""A plugin that writes the outcome of each test as JSON lines, for ci.py and everything.py.

DETRAIN_NB_OUTCOMES names the file. Each pytest adds a line when it starts and one when it finishes; a pytest that
crashed has no second line. Under pytest-xdist only the controller writes, not the workers.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "DETRAIN_NB_OUTCOMES"
MAX_ERROR = 200  # characters, to fit one line of a log


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.pop(VARIABLE, None)  # workers, and tests that run pytest themselves, must not write
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
        has_passed = report.passed and report.when == "call"  # a test that was interrupted in its call has not passed
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
    """Return the start of a traceback's last line: the exception and the first line of its message."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = [line for line in (crash.message if crash else str(report.longrepr)).splitlines() if line.strip()]
    line = (lines[0] if crash else lines[-1]) if lines else "no error was given"
    return " ".join(line.split())[:MAX_ERROR]
