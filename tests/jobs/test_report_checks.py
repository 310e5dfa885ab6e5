"""A node's report on jobs is accepted only if it can be true."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrain_nb.copying.json_lines import Untrue
from detrain_nb.jobs.report_checks import (
    NodeFile,
    add_different,
    check_log_name,
    clean_line,
    read_facts,
    read_files,
    read_pointers,
    read_port,
    read_report,
    read_reports,
)

GOOD = {"id": "a-20260101-000000-beef", "node_rank": 0, "state": "ended", "exit_code": 3, "ranks": [{"rank": 4}]}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


def test_report_of_an_honest_node() -> None:
    report = read_report({**GOOD, "last_lines": ["\x1b[31mred\x1b[0m\tend"], "reason": "a\nb", "started_at": 1.5})
    assert (report.exit_code, report.ranks, report.last_lines, report.started_at) == (3, (4,), ("red\tend",), 1.5)
    assert report.reason == "a?b"


@pytest.mark.parametrize(
    "wrong",
    [
        {"state": "fine"},
        {"state": ["ended"]},
        {"exit_code": True},
        {"exit_code": 1 << 40},
        {"node_rank": -1},
        {"node_rank": 1 << 20},
        {"id": 7},
        {"ranks": [0] * (1 << 17)},
        {"last_lines": ["x"] * 1000},
        {"last_lines": [1]},
        {"started_at": float("nan")},
        {"started_at": "now"},
    ],
    ids=str,
)
def test_report_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Untrue):
        read_report({**GOOD, **wrong})


@given(st.dictionaries(st.sampled_from([*GOOD, "jobs", "files", "gpus", "port"]), JSON))
def test_whatever_is_said_is_read_or_refused(said: dict[str, Any]) -> None:
    for read in (read_report, read_reports, read_files, read_facts):
        try:
            read(said)
        except Untrue:
            pass


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a//b", "a/../../b", "", ".", "x\n", "a/" * 200 + "b", 3, None]
)
def test_name_of_an_artifact_stays_below_the_folder(name: object) -> None:
    with pytest.raises(Untrue):
        read_files({"files": [[name, 1, "0" * 64]]})


@pytest.mark.parametrize("entry", [["a", -1, "0" * 64], ["a", 1, "0" * 63], ["a", 1], "a", ["a", 1, "G" * 64]])
def test_size_and_digest_of_an_artifact_are_checked(entry: object) -> None:
    with pytest.raises(Untrue):
        read_files({"files": [entry]})


def test_same_artifact_twice_is_refused() -> None:
    with pytest.raises(Untrue, match="twice"):
        read_files({"files": [["a", 1, "0" * 64], ["a", 2, "1" * 64]]})


@pytest.mark.timeout(30)
def test_list_of_artifacts_takes_time_by_its_length() -> None:
    """Even when the list arrives one file at a time, the checks take linear, not quadratic, time."""
    files: dict[str, NodeFile] = {}
    for number in range(100_000):
        add_different(files, [NodeFile(f"{number}.pt", 0, "0" * 64)])
    with pytest.raises(Untrue, match="more than 100,000 files"):
        add_different(files, [NodeFile("more.pt", 0, "0" * 64)])
    del files["0.pt"]
    with pytest.raises(Untrue, match="twice"):
        add_different(files, [NodeFile("1.pt", 0, "0" * 64)])


@pytest.mark.parametrize("name", ["rank-0.log", "setup.log", "torchrun.log", "metrics/rank-12.jsonl"])
def test_log_that_can_be_followed(name: str) -> None:
    assert check_log_name(name) == name


@pytest.mark.parametrize("name", ["rank-.log", "../rank-0.log", "status.json", "rank-0.log\n", "metrics/x", 5])
def test_any_other_file_cannot_be_followed(name: object) -> None:
    with pytest.raises(Untrue):
        check_log_name(name)


@pytest.mark.parametrize("said", [5, ["a"] * 5, [5], [None], "abc", {"a": 1}])
def test_pointers_that_cannot_be_are_refused(said: object) -> None:
    assert read_pointers(["a\x1b[31m"]) == ["a?[31m"] and read_pointers(None) == []
    with pytest.raises(Untrue):
        read_pointers(said)


@pytest.mark.parametrize("port", [-1, 65536, "80", True, None])
def test_port_is_one(port: object) -> None:
    with pytest.raises(Untrue):
        read_port(port)


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("plain", "plain"),
        ("10%\r 20%\r", " 20%"),
        ("\x1b[2J\x1b[1;31mred", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("a\tb", "a\tb"),
        ("\x9bbad", "?bad"),
        ("\u202eturned", "?turned"),
    ],
)
def test_line_cannot_control_a_terminal(printed: str, shown: str) -> None:
    assert clean_line(printed) == shown


@given(st.text())
def test_no_line_controls_a_terminal(printed: str) -> None:
    assert clean_line(printed).replace("\t", "").isprintable()
