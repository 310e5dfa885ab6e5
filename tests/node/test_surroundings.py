"""The state that two starts must share: the environment after the imports, and the traits that a process inherits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from detrain_nb.node.system.surroundings import ImportedEnvironment, find_difference, read_starter

_CHANGES = {
    "affinity": "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
    "limits": "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)), resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))",
    "oom_score_adj": "open('/proc/self/oom_score_adj', 'w').write('1000')",
    "priority": "os.nice(1)",
    "python": "setattr(sys, 'executable', 'another')",
    "rights": "ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)",  # PR_SET_NO_NEW_PRIVS, one of the rights that are compared
    "umask": "os.umask(0o123)",
}

_SET = """
import os
os.environ |= {"SET": "1", "CHANGED": "2"}
del os.environ["GONE"]
from detrain_nb.node.system.surroundings import ImportedEnvironment
imported = ImportedEnvironment()
for env in ({"CHANGED": "1", "GONE": "1", "OTHER": "3"}, {"SET": "0", "CHANGED": "0", "GONE": "0"}):
    made = imported.applied_to(env)
    print({name: made[name] for name in ("SET", "CHANGED", "GONE", "OTHER") if name in made})
"""


def test_what_imports_change_in_the_environment_is_changed_in_another_but_where_that_is_not_as_it_was() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _SET],
        env={**os.environ, "CHANGED": "1", "GONE": "1"}, capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    assert ran.stdout.splitlines() == [
        "{'SET': '1', 'CHANGED': '2', 'OTHER': '3'}",
        "{'SET': '0', 'CHANGED': '0', 'GONE': '0'}",
    ]


def test_variable_without_a_name_is_left_out() -> None:
    """A system may pass on a variable with an empty name; Python cannot set it."""
    assert ImportedEnvironment().applied_to({"": "C:", "OTHER": "1"})["OTHER"] == "1"
    assert "" not in ImportedEnvironment().applied_to({"": "C:"})


@pytest.mark.parametrize("trait", _CHANGES)
def test_trait_that_changes_is_named_and_no_other(trait: str) -> None:
    if trait == "affinity" and len(os.sched_getaffinity(0)) == 1:
        return  # no other affinity is possible
    code = (
        "import ctypes, os, resource, sys\n"
        "from detrain_nb.node.system.surroundings import find_difference, read_starter\n"
        f"before = read_starter()\n{_CHANGES[trait]}\nprint(find_difference(before, read_starter()))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert found.stdout == f"{trait}\n"


def test_traits_that_are_compared() -> None:
    assert read_starter().keys() == {*_CHANGES, "cgroup"}
    assert all(read_starter().values())


def test_a_few_of_many_names_are_named() -> None:
    assert find_difference({"A": "1", "B": "2"}, {"A": "1", "B": "2"}) == ""
    assert find_difference({"A": "1", "B": "2"}, {"B": "3", "C": "4"}) == "A, B, C"
    assert find_difference({}, dict.fromkeys("EDCBA", "")) == "A, B, C and 2 more"
