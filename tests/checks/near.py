"""`make test-near`: run the quick tests near a change, for the person who makes it. The result decides nothing.

The order is: the tests that changed themselves; the tests of the rooms of changed files; the tests of the rooms one
arrow above, which import such a room without another room in between (docs/design.md has the arrows). Rooms further up
and slow tests are left to `make test`, `make test-slow` and CI.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NoReturn

from ..test_layout import MAPPED, PACKAGE, Rules, read_rules

ROOT = Path(__file__).resolve().parents[2]
QUICK = "not slow and not thorough"

# Files outside the rooms, and the tests that check them. A folder ends with a slash.
BESIDE_THE_ROOMS = {
    ".ci/": ["tests/test_ci.py", "tests/test_setup.py"],
    ".pre-commit-config.yaml": ["tests/test_ci.py"],
    "Makefile": ["tests/test_ci.py", "tests/test_setup.py"],
    "benchmarks/": ["tests/benchmarks/"],
    "constraints.txt": ["tests/test_environment.py"],
    "docs/design.md": ["tests/test_layout.py"],
    "environment.yml": ["tests/test_environment.py"],
    "examples/": ["tests/examples/"],
    "notebooks/": ["tests/notebooks/"],
    "pyproject.toml": ["tests/test_environment.py", "tests/test_types.py", "tests/test_ci.py"],
    "SECURITY.md": ["tests/test_ci.py"],
    "tests/checks/": ["tests/test_ci.py", "tests/test_near.py", "tests/test_everything.py"],
    "tests/conftest.py": ["tests/test_skips.py", "tests/test_ci.py"],
    "tests/flaky.toml": ["tests/test_ci.py"],
}
BESIDE_ROOMS_OF_THE_PACKAGE = {"__init__": ["tests/test_environment.py"], "__main__": ["tests/cli/"]}


def list_changed(root: Path, base: str) -> list[str]:
    """Return the files that differ from ``base``, including untracked and deleted ones."""
    asked = (
        ["diff", "--name-only", "--no-renames", "--relative", "-z", "--end-of-options", base, "--"],
        ["ls-files", "--others", "--exclude-standard", "-z"],
    )
    found = []
    for question in asked:
        done = subprocess.run(["git", *question], cwd=root, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise ValueError(f"git knows no change since {base}: {done.stderr.strip()}: give a commit: BASE=rev")
        found += done.stdout.split("\0")
    return sorted({name for name in found if name})


def list_near(changed: Iterable[str], tree: Iterable[str], rules: Rules) -> list[str]:
    """Return the test modules of ``tree`` that are near the changed files, nearest first, without repetition.

    ``changed`` and ``tree`` are paths relative to the root, as git writes them.
    """
    changed = list(changed)
    tests = sorted(name for name in tree if is_test(name))
    rooms = list(dict.fromkeys(room for name in changed if (room := room_of(name))))
    above = [over for room in rooms for over in list_importers(room, rules, _rooms_of(tree))]
    wanted = [name for name in changed if is_test(name)]
    wanted += [place for name in changed for place in _list_beside(name)]
    wanted += [place for room in [*rooms, *above] for place in _list_places(room)]
    if any(name.endswith(".py") for name in changed):
        wanted.append("tests/test_layout.py")
    return list(dict.fromkeys(test for place in wanted for test in tests if test == place or _is_below(test, place)))


def room_of(name: str) -> str:
    """Return the room of a file of the package or of a mapped folder; "" for any other file."""
    first, *rest = PurePosixPath(name).parts
    if first in MAPPED and rest:
        return first
    return rest[0].removesuffix(".py") if first == PACKAGE and rest and name.endswith(".py") else ""


def list_importers(room: str, rules: Rules, present: set[str]) -> list[str]:
    """Return the rooms one arrow above: they may import ``room``, and no room in between may."""
    may = rules.may_import
    over = [other for other in may if other != room and room in may[other] and other in present]

    def is_between(middle: str, other: str) -> bool:
        return middle in may[other] and other not in may[middle]  # rooms of one line may import each other

    return [other for other in over if not any(is_between(middle, other) for middle in over)]


def is_test(name: str) -> bool:
    path = PurePosixPath(name)
    return path.parts[0] == "tests" and path.name.startswith("test_") and path.suffix == ".py"


def _rooms_of(tree: Iterable[str]) -> set[str]:
    return {room for name in tree if (room := room_of(name))}


def _list_places(room: str) -> list[str]:
    return [*BESIDE_ROOMS_OF_THE_PACKAGE.get(room, []), f"tests/test_{room}.py", f"tests/{room}/"]


def _list_beside(name: str) -> Iterator[str]:
    """Yield the tests of a file that is in no room; a file that the tests of a room share is near all of them."""
    for place, tests in BESIDE_THE_ROOMS.items():
        if name == place or _is_below(name, place):
            yield from tests
    path = PurePosixPath(name)
    if path.parts[0] == "tests" and len(path.parts) > 2 and not is_test(name):
        yield f"tests/{path.parts[1]}/"


def _is_below(name: str, place: str) -> bool:
    return place.endswith("/") and name.startswith(place)


def main(base: str, *pytest_args: str) -> int:
    try:
        changed = list_changed(ROOT, base)
        tree = _list_tree()
    except ValueError as exc:
        print(exc, file=sys.stderr)
        return 2
    count = "1 file" if len(changed) == 1 else f"{len(changed)} files"
    near = list_near(changed, tree, read_rules((ROOT / "docs/design.md").read_text(encoding="utf-8")))
    if not near:
        print(f"{count} changed since {base}, and no test is near them: BASE=rev compares with another")
        return 0
    print(f"{count} changed since {base}; near them:", *near, sep="\n  ", flush=True)
    return _become_pytest(["-m", QUICK, *near, *pytest_args])


def _become_pytest(arguments: list[str]) -> NoReturn:
    """Replace this process by pytest, so that Ctrl-C reaches only pytest, which stops what its tests have started."""
    pytest = Path(sys.executable).with_name("pytest")  # `python -m pytest` would import bare `magics`
    os.chdir(ROOT)
    os.execv(pytest, [str(pytest), *arguments])


def _list_tree() -> list[str]:
    return [path.relative_to(ROOT).as_posix() for top in (PACKAGE, *MAPPED, "tests") for path in _walk(ROOT / top)]


def _walk(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*.py")) if path.is_file())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
