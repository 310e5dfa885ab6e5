"""What `.ci/run` does: run every part, even after one has failed; then rerun tests that may have failed by chance.

At most two failed tests of the whole run are rerun. The whole module of each runs in a fresh pytest and must pass
there; the tests are then printed as lines for tests/flaky.toml. These make the run red at once: a third failed test, a
test that is marked `never_rerun` (see tests/conftest.py), an error in a teardown, and every failure outside a test:
lint, collection, a crash, a timeout. Any Python 3.11 runs this before there is a virtual environment: it uses the
standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from .flaky import FLAKY, ChanceFailure, read_flaky
from .processes import run_until

MAX_RERUN = 2
PART_LIMIT_S = 2 * 3600.0
RERUN_LIMIT_S = 1200.0
NO_CHANCE = {"teardown": "an error in a teardown", "collect": "could not be collected"}
TESTS_FAILED = 1  # pytest's exit status when tests failed and nothing else went wrong


@dataclass(frozen=True)
class Failure:
    """One test that failed, in any phase; ``why_red`` is empty if it may be rerun."""

    part: str
    name: str
    error: str
    why_red: str

    @property
    def module(self) -> str:
        return self.name.split("::")[0]


@dataclass
class Part:
    """One make target that was run."""

    target: str
    seconds: float
    is_passed: bool
    failures: list[Failure] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    why_red: str = ""  # the reason for a failure outside the tests


def main(targets: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # running commands are stopped on exit
    parts = [_run_part(target) for target in targets]
    failures = [failure for part in parts for failure in part.failures]
    red = _list_red(parts, failures)
    reruns: list[str] = []
    chance: list[Failure] = []
    if failures and not red:
        reruns, chance = _rerun(failures)
        red = [f"{failure.name}: failed again" for failure in failures if failure not in chance]
    _report(parts, failures, reruns, chance, red)
    return 1 if red else 0


def _run_part(target: str, *, module: str = "", timeout_s: float = PART_LIMIT_S) -> Part:
    """Run a make target, or only the tests of one module."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="detrain-ci-") as folder:
        path = Path(folder) / "outcomes"
        command = ["make", target, *([f"PYTEST_ARGS={module}"] if module else [])]
        status = run_until(command, timeout_s=timeout_s, environment={**os.environ, "DETRAIN_NB_OUTCOMES": str(path)})
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    part = Part(target, time.monotonic() - started, status == 0)
    finished = [line for line in lines if "finished" in line]
    for line in finished:
        part.outcomes |= line["outcomes"]
        part.failures += [_read_failure(target, failure) for failure in line["failures"]]
    if status is None:
        part.why_red = f"was ended at its deadline, after {timeout_s:g} s"
    elif status:
        part.why_red = _explain(status, len(lines) - len(finished) > len(finished), finished)
    return part


def _read_failure(target: str, line: dict[str, Any]) -> Failure:
    if line["when"] not in {"setup", "call"}:  # "teardown" or "collect"; "???" is a crashed worker
        why_red = NO_CHANCE.get(line["when"], "a crash")
    else:
        why_red = "marked never_rerun" if line["never_rerun"] else ""
    return Failure(target, line["name"], line["error"], why_red)


def _explain(status: int, is_unfinished: bool, finished: list[dict[str, Any]]) -> str:
    """Return why a part failed; empty if failed tests are the only reason."""
    if is_unfinished:
        return "pytest crashed, or was ended"
    odd = [line["exitstatus"] for line in finished if line["exitstatus"] not in {0, TESTS_FAILED}]
    if odd:
        return f"pytest ended with status {odd[0]}: interrupted, internal error, usage, or no tests"
    if not any(line["failures"] for line in finished):
        return f"make ended with status {status}, and no test failed"
    return ""


def _list_red(parts: list[Part], failures: list[Failure]) -> list[str]:
    red = [f"make {part.target}: {part.why_red}" for part in parts if part.why_red]
    red += [f"{failure.name}: {failure.why_red}: {failure.error}" for failure in failures if failure.why_red]
    names = {(failure.part, failure.name) for failure in failures}
    if len(names) > MAX_RERUN:
        red.append(f"{len(names)} tests failed: at most {MAX_RERUN} are run again")
    return red


def _rerun(failures: list[Failure]) -> tuple[list[str], list[Failure]]:
    """Rerun the modules of the failed tests; returns lines with the results, and the tests that passed."""
    lines, chance = [], []
    for target, module in dict.fromkeys((failure.part, failure.module) for failure in failures):
        print(f"\n.ci/run: once more, {module} of make {target}", flush=True)
        part = _run_part(target, module=module, timeout_s=RERUN_LIMIT_S)
        for failure in failures:
            if (failure.part, failure.module) == (target, module):
                is_passed = part.is_passed and part.outcomes.get(failure.name) == "passed"
                chance += [failure] if is_passed else []
                outcome = "passed with its module" if is_passed else _say_rerun(part, failure)
                lines.append(f"{failure.name}: {failure.error}: {outcome} after {part.seconds:.0f} s")
    return lines, chance


def _say_rerun(part: Part, failure: Failure) -> str:
    if part.why_red:
        return f"FAILED: {part.why_red}"
    outcome = part.outcomes.get(failure.name, "not run")
    return "FAILED: another test of its module failed" if outcome == "passed" else f"FAILED: it was {outcome}"


def _report(
    parts: list[Part], failures: list[Failure], reruns: list[str], chance: list[Failure], red: list[str]
) -> None:
    print("\n.ci/run")
    for part in parts:
        is_mended = bool(part.failures) and not part.why_red and all(failure in chance for failure in part.failures)
        outcome = "passed" if part.is_passed else "passed, but for failures by chance" if is_mended else "FAILED"
        print(f"  make {part.target}: {outcome} after {part.seconds:.0f} s")
    if reruns:
        print("  run again:")
    for line in reruns:
        print(f"    {line}")
    if red:
        print("  red:")
    for line in red:
        print(f"    {line}")
    others = [failure for failure in failures if red and not reruns and not failure.why_red]
    if others:
        print("  not run again, since the run is red:")
    for failure in others:
        print(f"    {failure.name}: {failure.error}")
    if chance:
        _report_chance(chance)
    sys.stdout.flush()


def _report_chance(chance: list[Failure]) -> None:
    print("  failed by chance: commit these lines, in the list of tests/flaky.toml:")
    for failure in chance:
        print(ChanceFailure(failure.name, date.today(), failure.error))
    try:
        known = {failure.name for failure in read_flaky(FLAKY)}
    except (OSError, ValueError) as exc:
        print(f"  {exc}")
        return
    for name in dict.fromkeys(failure.name for failure in chance if failure.name in known):
        print(f"  {name} stands there already: with this line `make test` stops until it is mended")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
