"""`make test-all`: run every test, including the slow and thorough ones, room by room, within 90 minutes.

A room is a folder of tests/ that contains tests; `top` is the files next to the folders. Each room has its own pytest,
its log and its verdict in build/test-all/. The next call continues with the rooms that have not passed: a verdict is
valid as long as the commit, the working tree and PYTEST_ARGS are unchanged. No failed test is rerun.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .processes import GRACE_S, run_until

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 90 * 60.0
MIN_ROOM_S = 30.0  # a room with less time left is not started
TOP = "top"
NO_TESTS = 5  # pytest's exit status when no test was collected


@dataclass(frozen=True)
class Verdict:
    """Result of a room. ``key`` identifies the tested state of the tree; empty if the tree changed meanwhile."""

    room: str
    outcome: str  # "passed", "FAILED", "at the deadline", "not reached"
    seconds: float = 0.0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    key: str = ""

    @property
    def is_passed(self) -> bool:
        return self.outcome == "passed"


def list_rooms(root: Path) -> dict[str, list[str]]:
    """Return for each room, by name, the arguments for pytest: paths relative to the root."""
    tests = root / "tests"
    rooms = {TOP: [f"tests/{path.name}" for path in sorted(tests.glob("test_*.py"))]}
    for folder in sorted(path for path in tests.iterdir() if path.is_dir()):
        if any(folder.rglob("test_*.py")):
            rooms[folder.name] = [f"tests/{folder.name}"]
    return {name: places for name, places in rooms.items() if places}


def read_state(root: Path) -> str:
    """Return a key of the commit and of all differences in the working tree, including new files."""
    digest = hashlib.sha256()
    for question in (["rev-parse", "HEAD"], ["diff", "HEAD", "--binary", "--no-ext-diff"]):
        digest.update(_ask_git(root, *question))
    for name in _ask_git(root, "ls-files", "--others", "--exclude-standard", "-z").split(b"\0"):
        path = root / os.fsdecode(name)
        if name and path.is_file():
            digest.update(name + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def run_rooms(
    root: Path, names: Sequence[str], pytest: Sequence[str], *, is_fresh: bool = False, limit_s: float = LIMIT_S
) -> list[Verdict]:
    """Run the tests of the named rooms, or of all rooms; prints a line when each room is finished.

    ``pytest`` is the command with its options; the room's paths are appended. Raises ValueError for an unknown name.
    """
    deadline = time.monotonic() + limit_s
    rooms = list_rooms(root)
    if unknown := [name for name in names if name not in rooms]:
        raise ValueError(f"{' '.join(unknown)}: no room of tests/, which has {' '.join(rooms)}")
    folder = root / "build" / "test-all"
    if is_fresh:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)

    def read_key() -> str:
        return f"{read_state(root)} {shlex.join(pytest)}"

    verdicts = []
    for name in names or rooms:
        if (verdict := _read_verdict(folder, name)) and verdict.is_passed and verdict.key == read_key():
            print(f"{name}: passed before, {verdict.seconds:.0f} s", flush=True)
        else:
            left_s = deadline - time.monotonic() - GRACE_S
            verdict = _run_room(root, folder, name, [*pytest, *rooms[name]], left_s, read_key)
            print(f"{name}: {verdict.outcome} after {verdict.seconds:.0f} s: {folder / name}.log", flush=True)
        verdicts.append(verdict)
    return verdicts


def _run_room(
    root: Path, folder: Path, name: str, command: list[str], left_s: float, read_key: Callable[[], str]
) -> Verdict:
    verdict_file, outcomes_file = folder / f"{name}.json", folder / f"{name}.outcomes"
    for path in (verdict_file, outcomes_file):
        path.unlink(missing_ok=True)
    if left_s < MIN_ROOM_S:
        return Verdict(name, "not reached")
    key, started = read_key(), time.monotonic()
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        environment = {**os.environ, "DETRAIN_NB_OUTCOMES": str(outcomes_file)}
        status = run_until(command, timeout_s=left_s, environment=environment, output=log, folder=root)
    lines = (
        [json.loads(line) for line in outcomes_file.read_text("utf-8").splitlines()] if outcomes_file.exists() else []
    )
    ends = [line for line in lines if "finished" in line]
    counts = Counter(outcome for line in ends for outcome in line["outcomes"].values())
    # A room in which PYTEST_ARGS deselects all tests counts as passed.
    is_passed = bool(ends) and status in {0, NO_TESTS}
    outcome = "at the deadline" if status is None else "passed" if is_passed else "FAILED"
    verdict = Verdict(
        name,
        outcome,
        time.monotonic() - started,
        counts["passed"],
        counts["failed"],
        counts["skipped"],
        key if read_key() == key else "",
    )
    verdict_file.write_text(json.dumps(asdict(verdict)), encoding="utf-8")
    return verdict


def draw_table(verdicts: Sequence[Verdict]) -> str:
    """Return a line for each room and the total; then the rooms that remain."""
    total = Verdict(
        "all",
        "passed" if all(verdict.is_passed for verdict in verdicts) else "FAILED",
        sum(verdict.seconds for verdict in verdicts),
        sum(verdict.passed for verdict in verdicts),
        sum(verdict.failed for verdict in verdicts),
        sum(verdict.skipped for verdict in verdicts),
    )
    width = max(len(verdict.room) for verdict in [*verdicts, Verdict("room", "")])
    lines = [f"{'room':{width}}  seconds  passed  failed  skipped"]
    for row in [*verdicts, total]:
        numbers = f"{row.seconds:7.0f}  {row.passed:6}  {row.failed:6}  {row.skipped:7}"
        lines.append(f"{row.room:{width}}  {numbers}  {row.outcome}")
    for outcome in ("at the deadline", "not reached"):
        if names := [verdict.room for verdict in verdicts if verdict.outcome == outcome]:
            lines.append(f"{outcome}: {', '.join(names)}: `make test-all` goes on with them")
    if changed := [verdict.room for verdict in verdicts if verdict.is_passed and not verdict.key]:
        lines.append(f"files changed while they ran: {', '.join(changed)}: `make test-all` runs them again")
    return "\n".join(lines)


def _read_verdict(folder: Path, name: str) -> Verdict | None:
    path = folder / f"{name}.json"
    try:
        return Verdict(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):  # a run that was killed while writing, or an older format
        return None


def _ask_git(root: Path, *question: str) -> bytes:
    done = subprocess.run(["git", *question], cwd=root, capture_output=True, timeout=60)
    if done.returncode:
        raise ValueError(
            f"git does not know the state of {root}: {os.fsdecode(done.stderr).strip()}: run it in a clone"
        )
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-all")
    parser.add_argument("--fresh", action="store_true", help="forget which rooms have passed")
    parser.add_argument("--rooms", default="", help="only these, in this order")
    parser.add_argument("pytest_args", nargs="*")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # running commands are stopped on exit
    pytest = [str(Path(sys.executable).with_name("pytest")), *arguments.pytest_args]
    try:
        verdicts = run_rooms(ROOT, arguments.rooms.replace(",", " ").split(), pytest, is_fresh=arguments.fresh)
    except ValueError as exc:
        print(exc, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: `make test-all` goes on with the rooms that have not passed", file=sys.stderr)
        return 128 + signal.SIGINT
    print(f"\n{draw_table(verdicts)}")
    return 0 if all(verdict.is_passed for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
