"""Hosts over SSH in a real kernel: what the magics for hosts and files show, and their errors for wrong lines."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..testbed.testbed import Testbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

_BAR = re.compile(r"(put|get) \[([#.]{30})\] +(\d+) %, .+, \d+ files?")


@pytest.fixture(scope="module")
def idle(start_kernel: Any, testbed_of_two: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A kernel without a session, with two hosts in ~/.ssh/config and a nodes file for them in its folder."""
    home = tmp_path_factory.mktemp("home")
    (home / ".ssh").mkdir()
    (home / ".ssh" / "config").write_text(f"Include {testbed_of_two.inventory.ssh_config}\n")
    kernel = start_kernel(HOME=str(home), DETRAIN_NB_NOTEBOOK="/x/remote.ipynb")
    nodes = [{"name": "left", "host": "h0"}, {"name": "right", "host": "h1"}]
    content = json.dumps({"defaults": {"python": sys.executable, "devices": "cpu"}, "nodes": nodes})
    files = {"nodes.json": content, "own_module.py": "def who():\n    return __file__\n"}
    assert kernel.run(f"for name, text in {files}.items(): open(name, 'w').write(text)").status == "ok"
    return kernel


@pytest.fixture(scope="module")
def kernel(idle: Any) -> Iterator[Any]:
    """The kernel of ``idle`` with a rank on each host, in a session that the tests share."""
    started = idle.run("%distributed start --nodes nodes.json")
    assert started.status == "ok", started.error
    assert re.fullmatch(r"<Session 'remote-\S+': 2 ranks on [^>]*left, right[^>]*>\n", started.text()), started.text()
    yield idle
    assert idle.run("%distributed stop").status == "ok"


def _lines(outcome: Any) -> list[str]:
    """The final lines of a cell; checks that no part of a progress bar is left."""
    assert outcome.status == "ok", outcome.error
    text = "".join(
        content if isinstance(content, str) else content.get("text/plain", "") for _, content in outcome.shown
    )
    assert "%," not in text
    assert "#" not in text
    return text.splitlines()


def _assert_one_line(outcome: Any, words: str) -> None:
    """Check that the error of a wrong line is a single line without a traceback."""
    line = outcome.error.strip()
    assert "\n" not in line, line
    assert re.search(words, line), line
    assert "Traceback" not in line
    assert not outcome.text()


# ---- before there is a session


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("start --nodes nosuch.toml", r"nosuch\.toml"),
        ("start --nodes h0,h0", "same name 'h0'"),
        ("start --nodes localhost,localhost", "both this machine: name it once"),
        ("start --nodes bob@localhost,h0", "localhost is this machine itself, without SSH: leave out user"),
        ("start --nodes 'h0;ls'", "h0;ls"),
        ("start --nodes", "--nodes"),
        ("start --nodes nosuchhost", r"nosuchhost.* does not resolve"),
        ("put own_module.py", "no session"),
        ("get own_module.py", "no session"),
        ("data check .", "no session"),
        ("shrink", "no session"),
        ("doctor", "--nodes"),
        ("doctor --nodes nosuch.toml", r"nosuch\.toml"),
    ],
)
def test_wrong_line_without_a_session_is_answered_with_one(idle: Any, line: str, words: str) -> None:
    _assert_one_line(idle.run(f"%distributed {line}"), words)


@pytest.mark.thorough
def test_this_machine_beside_a_host_in_a_notebook(idle: Any) -> None:
    nodes = [{"host": "localhost", "devices": "cpu"}, {"host": "h0", "devices": "cpu", "python": sys.executable}]
    assert idle.run(f"import json; open('here.json', 'w').write(json.dumps({nodes}))").status == "ok"
    assert idle.run("%distributed start --nodes here.json").status == "ok"
    try:
        add_up = "%%distributed\nt = torch.ones(1); dist.all_reduce(t); print(rank, int(t))"
        assert idle.run(add_up).text() == "[localhost:0] 0 2\n[h0:1] 1 2\n"
        assert any("localhost: connected; rank 0" in line for line in _lines(idle.run("%distributed status")))
        assert idle.run("%distributed restart -n 2").status == "ok"
        assert "[h0:3] 3 4" in idle.run(add_up).text()
    finally:
        assert idle.run("%distributed stop").status == "ok"


def test_doctor_names_a_host_that_is_not_there_and_examines_the_other(idle: Any) -> None:
    shown = "\n".join(_lines(idle.run("%distributed doctor --nodes h0,nosuchhost")))
    assert re.search(r"nosuchhost.*does not resolve", shown)
    assert re.search(r"\bh0\b", shown)


def test_doctor_saves_how_fast_a_host_is(idle: Any) -> None:
    content = json.dumps({"nodes": [{"host": "h0", "python": sys.executable, "devices": "cpu"}]})
    assert idle.run(f"open('measured.json', 'w').write({content!r})").status == "ok"
    shown = " ".join("\n".join(_lines(idle.run("%distributed doctor --nodes measured.json --save"))).split())
    assert "1.0 of the fastest" in shown
    assert "the measurements are in " in shown
    assert json.loads(idle.run("print(open('measured.json').read())").text())["nodes"][0]["relative_speed"] == 1.0


# ---- with a session


def test_notebook_s_folder_is_there(kernel: Any) -> None:
    outcome = kernel.run("%%distributed\nimport own_module\nprint(own_module.who())")
    assert re.fullmatch(r"\[0-1\] \S+/\.cache/detrain_nb/work/remote-\w+/own_module\.py\n", outcome.text())


def test_host_s_name_chooses_its_ranks(kernel: Any) -> None:
    assert kernel.run("%%distributed -r right\nprint('there', rank)").text() == "[right:1] there 1\n"
    assert kernel.run("%%rank left\nprint('there', rank)").text() == "[left:0] there 0\n"


def test_doctor_examines_the_hosts_of_the_session(kernel: Any) -> None:
    shown = "\n".join(_lines(kernel.run("%distributed doctor")))
    assert "left" in shown
    assert "right" in shown


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%distributed put nosuchfile", "nosuchfile"),
        ("%distributed put own_module.py --nodes nosuch", "nosuch"),
        ("%distributed put", "FILE"),
        ("%distributed get nosuchfile --nodes left", "left: .*nosuchfile: No such file"),
        ("%distributed get nosuchfile --nodes left,nosuch", r"'?nosuch\b"),
        ("%distributed data", "check"),
        ("%distributed data check", "PATH"),
        ("%distributed shrink", "no (node|rank)|nothing"),
        ("%distributed start --nodes h0", "the session with 2 ranks was started with another"),
        ("%%distributed -r nosuch\nprint(1)", "nosuch"),
        ("%%rank nosuch\nprint(1)", "nosuch"),
    ],
)
def test_wrong_line_is_answered_with_one(kernel: Any, line: str, words: str) -> None:
    _assert_one_line(kernel.run(line), words)


def test_data_that_is_on_no_node_is_an_error(kernel: Any) -> None:
    _assert_one_line(kernel.run("%distributed data check nosuchfolder"), "nosuchfolder: no node has it")


def test_file_that_no_host_has_is_said_in_a_line_for_each(kernel: Any) -> None:
    lines = kernel.run("%distributed get nosuchfile").error.splitlines()
    assert [line.rpartition("/")[2] for line in lines] == ["nosuchfile: No such file or directory"] * 2
    assert [re.search(r"\b(left|right): ", line)[1] for line in lines] == ["left", "right"]  # type: ignore[index]


def test_file_of_one_host_is_fetched_and_the_others_are_named(kernel: Any, tmp_path: Path) -> None:
    assert kernel.run("%%distributed -r left\nopen('of_one', 'w').write('1')").status == "ok"
    lines = kernel.run(f"%distributed get of_one --to {tmp_path}/got").error.splitlines()
    assert "right: " in lines[0] and lines[0].endswith("of_one: No such file or directory")
    assert lines[1:] == ["fetched from left; not from right: use --nodes left"]
    assert (tmp_path / "got/left/of_one").read_text() == "1"


def test_files_go_there_and_come_back(kernel: Any, tmp_path: Path) -> None:
    (tmp_path / "data/inner").mkdir(parents=True)
    block = os.urandom(1 << 20)
    for index in range(24):
        (tmp_path / f"data/inner/{index}.bin").write_bytes(block)
    (tmp_path / "data/one.txt").write_text("1")
    quick = "from detrain_nb.magics import progress, screen\nprogress._PATIENCE_S, screen._REDRAW_S = 0.0, 0.001"
    assert kernel.run(quick).status == "ok"  # a fast machine copies everything before the bar is redrawn
    there = kernel.run(f"%distributed put {tmp_path}/data --to copies")
    assert _lines(there) == ["left: 25 files, 25.2 MB", "right: 25 files, 25.2 MB"]
    _assert_bar("put", there)
    assert _lines(kernel.run("%distributed data check copies"))[0] == "copies: the same on 2 nodes"
    assert kernel.run("%%distributed -r right\nopen('copies/data/one.txt', 'w').write('2')").status == "ok"
    checked = _lines(kernel.run("%distributed data check copies"))
    assert checked[0] == "copies: not the same on 2 nodes"
    assert re.search(r"^right .*contents differ: \S*one\.txt", "\n".join(checked), re.MULTILINE)
    back = kernel.run(f"%distributed get copies/data --to {tmp_path}/back")
    where = f"in {tmp_path}/back, each node's in a folder of its name"
    assert _lines(back) == ["left: 25 files, 25.2 MB", "right: 25 files, 25.2 MB", where]
    _assert_bar("get", back)
    for node, text in (("left", "1"), ("right", "2")):
        folder = tmp_path / "back" / node / "data"
        assert (folder / "one.txt").read_text() == text
        assert all((folder / f"inner/{index}.bin").read_bytes() == block for index in range(24))


def _assert_bar(what: str, outcome: Any) -> None:
    """Check that the bar is a single redrawn line that never goes back, reaches 100 % and is removed at the end."""
    drawn = [content for kind, content in outcome.live if kind.endswith("display_data")]
    texts = [content["data"].get("text/plain", "") for content in drawn]
    shares = [int(found[3]) for text in texts if (found := _BAR.fullmatch(text)) and found[1] == what]
    assert len(shares) > 1, texts
    assert shares == sorted(shares)
    assert shares[-1] == 100
    assert len({content["transient"]["display_id"] for content in drawn}) == 1
    assert texts[-1] == ""
    assert len(texts) == len(shares) + 1, "something else was drawn"


def test_shrink_leaves_the_ranks_of_the_hosts_that_are_left(kernel: Any, testbed_of_two: Testbed) -> None:
    """The last test of the module, as it takes a host away."""
    assert kernel.run("%%distributed\nkept = rank\nprint('of', rank)").status == "ok"
    cell = int(_lines(kernel.run("%distributed log --list"))[-1].split()[1].rstrip(":"))
    for pid, argv in testbed_of_two.processes("h1").items():
        if "detrain_nb.node.agent.agent" in " ".join(argv):
            testbed_of_two.exec("h1", "kill", "-9", str(pid))
    lost = kernel.run("%%distributed\nprint(rank)")
    assert lost.status == "error"
    assert "node right is lost" in lost.error
    _assert_one_line(kernel.run("%%distributed -r right\nprint(rank)"), "right")
    shrunk = _lines(kernel.run("%distributed shrink"))
    assert len(shrunk) == 1
    assert "keep" in shrunk[0]
    assert kernel.run("%%distributed\ndist.barrier()\nprint(kept, dist.get_world_size())").text() == "[left:0] 0 1\n"
    earlier = kernel.run(f"%distributed log --cell {cell}")
    assert earlier.text("stderr").startswith(
        f"cell {cell} ran before the session shrank; its output has the rank numbers"
    )
    assert earlier.text() == "[left:0] of 0\n[right:1] of 1\n"
