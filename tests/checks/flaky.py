"""Read tests/flaky.toml: the tests that have failed by chance, with the dates.

`python -m tests.checks.flaky` fails if a test is listed twice.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

FLAKY = Path(__file__).resolve().parent.parent / "flaky.toml"


@dataclass(frozen=True)
class ChanceFailure:
    """One line of the file."""

    name: str
    date: date
    error: str

    def __str__(self) -> str:
        name, error = _quote(self.name), _quote(self.error)
        return f"    {{ name = {name}, date = {self.date}, error = {error} }},"


def _quote(text: str) -> str:
    """Write a TOML string: JSON escapes are the same except for DEL; lone surrogates, invalid in both, are replaced."""
    whole = text.encode("utf-8", "replace").decode("utf-8")
    return json.dumps(whole, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_flaky(path: Path = FLAKY) -> list[ChanceFailure]:
    """Read the lines; raises ValueError if the file has another form."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as exc:
        raise ValueError(f"{path}: {exc}: write lines as its first lines show them") from exc
    lines = found.get("failures")
    if set(found) != {"failures"} or not isinstance(lines, list):
        raise ValueError(f"{path}: holds {', '.join(found) or 'nothing'}, not one list `failures`")
    for line in lines:
        types = {key: type(value) for key, value in line.items()} if isinstance(line, dict) else None
        if types != {"name": str, "date": date, "error": str}:
            raise ValueError(f"{path}: {line!r} is not {{ name = text, date = 2026-01-31, error = text }}")
    return [ChanceFailure(**line) for line in lines]


def list_repeated(failures: Iterable[ChanceFailure]) -> list[str]:
    """Return a line for each test that is listed more than once."""
    by_name: dict[str, list[ChanceFailure]] = {}
    for failure in failures:
        by_name.setdefault(failure.name, []).append(failure)
    return [
        f"{name} failed by chance {len(found)} times ({', '.join(str(failure.date) for failure in found)}), "
        f"last: {found[-1].error}"
        for name, found in by_name.items()
        if len(found) > 1
    ]


def main(path: Path = FLAKY) -> int:
    try:
        faults = list_repeated(read_flaky(path))
    except FileNotFoundError:
        print(f"{path} is missing: git checkout {path} brings it back", file=sys.stderr)
        return 1
    except (OSError, ValueError) as exc:
        print(exc, file=sys.stderr)
        return 1
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        print("fix it before any other work, then take its lines out of tests/flaky.toml", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
