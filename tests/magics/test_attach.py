"""Notebooks that return after a restart or kill of the kernel, or in another kernel; which of them gets the ranks."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..testbed.testbed import Testbed

_LIMIT_S = 60.0
_PERHAPS = "--- possibly shown before:"
_NEW = "--- not shown before:"
_THERE = re.compile(
    r"session (\S+) of this notebook is still running \(agent pid \d+\): "
    r"%distributed attach reconnects to it and shows missed output, %distributed restart starts new ranks, "
    r"%distributed stop stops it; it ends 10 minutes after its notebook leaves\n"
)
_KEPT_BY_ATTACH = (
    "to keep its variables, attach first: "
    "the next %%distributed cell or %distributed start stops its ranks, and all their variables are lost\n"
)


class Front:
    """A front end: keeps all output of a kernel by cell, including output after a cell has ended."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._texts: dict[str, list[str]] = defaultdict(list)
        self._idle: set[str] = set()
        self._displays: dict[str, tuple[list[str], int]] = {}  # the position of each display

    def begin(self, code: str) -> str:
        """Start a cell; returns its id."""
        return str(self.kernel.client.execute(code, stop_on_error=False))

    def run(self, code: str) -> str:
        """Run a cell to its end; returns what it shows."""
        cell = self.begin(code)
        self.wait(lambda: cell in self._idle)
        return self.text(cell)

    def text(self, cell: str) -> str:
        """The current text of a cell, including both streams and its error."""
        return "".join(self._texts[cell])

    def wait(self, holds: Callable[[], Any], *, limit_s: float = _LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < deadline, f"not within {limit_s} s: {dict(self._texts)}"
            self.read(limit_s=0.1)

    def read_the_rest(self) -> None:
        """Read the remaining messages of a kernel that has exited."""
        while self.read(limit_s=1.0):
            pass

    def read(self, *, limit_s: float) -> bool:
        try:
            message = self.kernel.client.get_iopub_msg(timeout=limit_s)
        except queue.Empty:
            return False
        cell, kind, content = message["parent_header"].get("msg_id", ""), message["msg_type"], message["content"]
        if kind == "stream":
            self._texts[cell].append(content["text"])
        elif kind == "error":
            self._texts[cell].append("\n".join(content["traceback"]) + "\n")
        elif kind == "update_display_data":
            pieces, at = self._displays[content["transient"]["display_id"]]
            pieces[at] = _text_of(content)
        elif kind in ("display_data", "execute_result"):
            self._displays[content.get("transient", {}).get("display_id", "")] = (
                self._texts[cell],
                len(self._texts[cell]),
            )
            self._texts[cell].append(_text_of(content))
        elif kind == "clear_output":
            self._texts[cell] = []
        elif kind == "status" and content["execution_state"] == "idle":
            self._idle.add(cell)
        return True

    def close(self) -> None:
        if self.kernel.manager.is_alive():
            self.kernel.close()
        else:
            self.kernel.client.stop_channels()
            self.kernel.manager.cleanup_resources()

    def kill(self) -> None:
        os.kill(self.kernel.manager.provisioner.pid, signal.SIGKILL)
        self.read_the_rest()

    def restart(self, *, now: bool = False) -> str:
        """Restart the kernel as a front end does; returns what loading the extension prints."""
        self.kernel.manager.restart_kernel(now=now)
        self.read_the_rest()
        self.kernel.client.wait_for_ready(timeout=_LIMIT_S)
        return self.run("%load_ext detrain_nb")


def _text_of(content: Any) -> str:
    text = content["data"].get("text/plain", "")
    return f"{text}\n" if text else ""


def _numbers(text: str, rank: int) -> list[int]:
    """The numbers that ``rank`` printed on complete lines."""
    found = re.findall(r"^\[([0-9,-]+)\] (\d{6})$", text, re.MULTILINE)
    return [int(number) for ranks, number in found if rank in _ranks(ranks)]


def _ranks(text: str) -> set[int]:
    ends = [part.split("-") for part in text.split(",")]
    return {rank for end in ends for rank in range(int(end[0]), int(end[-1]) + 1)}


@pytest.fixture
def start_front(start_kernel: Any, runtime_folder: Path) -> Iterator[Any]:
    """A function that starts a front end with a kernel; no session of the test may be left afterwards."""
    before = set(runtime_folder.iterdir())
    fronts: list[Front] = []

    def start(notebook: str, **env: str) -> Front:
        fronts.append(Front(start_kernel(DETRAIN_NB_NOTEBOOK=notebook, **env)))
        return fronts[-1]

    yield start
    for front in fronts:
        front.close()
    for folder in set(runtime_folder.iterdir()) - before:
        if (folder / "agent.pid").exists():
            psutil.Process(int((folder / "agent.pid").read_text())).terminate()
    _eventually(lambda: not [p for p in set(runtime_folder.iterdir()) - before if not p.name.startswith(".log-")])


def _eventually(holds: Callable[[], Any], *, limit_s: float = _LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.02)


# A restart starts with an interrupt; on busy processors the stop may take longer than a notebook waits by default.
_PATIENT = "import detrain_nb\ndetrain_nb.current_session().settings.stop_gap_s = 5.0"

# every line is printed in two pieces: at most moments some rank has an unfinished line
_COUNT = """import time
x = rank * 10
for i in range({count}):
    print(f"{{i:06d}}"[:3], end="", flush=True)
    time.sleep({pause})
    print(f"{{i:06d}}"[3:])
"""


# ---- the same notebook, after its kernel was gone


@pytest.mark.slow
def test_restarted_kernel_finds_the_cell_running_and_all_it_printed(start_front: Any) -> None:
    front = start_front("/home/x/My training.ipynb")
    front.run("%distributed start -n 2")
    front.run(_PATIENT)
    counting = front.begin("%%distributed\n" + _COUNT.format(count=100_000, pause=0.01))
    front.wait(lambda: "[1] 000040\n" in front.text(counting) and "[0] 000040\n" in front.text(counting))
    there = front.restart()
    [name] = _THERE.fullmatch(there).groups()  # type: ignore[union-attr]
    assert name.startswith("My-training-")
    before = front.text(counting)
    assert f"disconnected from session '{name}', whose ranks keep running: %distributed attach" in before
    attach = front.begin("%distributed attach")
    front.wait(lambda: "is still running on ranks 0-1; its output appears here\n" in front.text(attach))
    last = _numbers(front.text(attach), 0)[-1]
    front.wait(lambda: _numbers(front.text(attach), 0)[-1] > last + 50)
    stopped = front.run("%distributed interrupt")
    assert re.fullmatch(r"cell \d+: all ranks stopped and kept their variables\n", stopped)
    front.wait(lambda: "has ended\n" in front.text(attach))
    shown = front.text(attach)
    assert shown.startswith(f"<Session '{name}': 2 ranks on cpu, running>\ncell ")
    assert "KeyboardInterrupt" in shown
    time.sleep(3)  # output sent to the front end right before a restart would be shown again
    again = front.restart()
    assert _THERE.fullmatch(again.removesuffix(_KEPT_BY_ATTACH)) and again.endswith(_KEPT_BY_ATTACH), again
    assert front.run("%distributed attach") == f"<Session '{name}': 2 ranks on cpu, running>\n"
    for rank in (0, 1):
        both = _numbers(before, rank) + _numbers(shown, rank)
        assert sorted(set(both)) == list(range(max(both) + 1)), "nothing is lost"
        assert len(both) == len(set(both)) or _NEW in shown, "what is shown twice is marked"
    after = front.run("%%distributed\nt = torch.ones(1); dist.all_reduce(t)\nprint(int(x + t.item()))")
    assert after == "[0] 2\n[1] 12\n"


def test_killed_kernel_of_no_named_notebook_finds_its_session(start_front: Any) -> None:
    """Without a notebook name from the front end, a restarted kernel is recognised by its connection file."""
    front = start_front("")
    front.run("%%distributed -n 1\nx = 5")
    front.kill()
    assert _THERE.fullmatch(front.restart(now=True))
    front.run("%distributed attach")
    assert front.run("%%distributed\nprint(x)") == "[0] 5\n"
    front.run("%distributed stop")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "pause", "seen"),
    [
        pytest.param(3000, 0.001, 1, id="at the start", marks=pytest.mark.thorough),
        pytest.param(3000, 0.001, 4400, id="in the middle"),
        pytest.param(10_000, 0.0, 4900, id="flood over the cell's limit of lines", marks=pytest.mark.thorough),
    ],
)
def test_killed_kernel_loses_no_line_and_repeats_few(start_front: Any, count: int, pause: float, seen: int) -> None:
    front = start_front("/x/killed.ipynb")
    front.run("%distributed start -n 4 --no-init")
    # If it is killed in the middle, the pause leaves time to acknowledge the first thousand lines of every rank.
    waits = "    if i == 999: time.sleep(4)\n" if pause and seen > 1 else ""
    counting = front.begin("%%distributed\n" + _COUNT.format(count=count, pause=pause) + waits + "\ntime.sleep(3600)")
    front.wait(lambda: front.text(counting).count("\n") >= seen)
    if seen > 1:
        time.sleep(1)
    front.kill()
    before = front.text(counting)
    assert _THERE.fullmatch(front.restart(now=True))
    attach = front.begin("%distributed attach")
    last = [f"[{rank}] {count - 1:06d}\n" for rank in range(4)]
    # If all output had arrived before the kernel was killed, a note after the last line says that nothing is new.
    front.wait(lambda: all(line in front.text(attach) for line in [*last, "its output appears here\n"]))
    shown = front.text(attach)
    perhaps, mark, new = shown.partition(_NEW)
    if not mark:
        perhaps, new = "", shown
    assert (_PERHAPS in perhaps) == bool(mark)
    for rank in range(4):
        seen_before, repeated, seen_after = (_numbers(text, rank) for text in (before, perhaps, new))
        both = repeated + seen_after
        assert seen_before == list(range(len(seen_before)))
        assert both == list(range(both[0], count))
        assert both[0] <= len(seen_before), "a line is missing"
        assert all(number >= len(seen_before) for number in seen_after), "a line is shown twice that is called new"
        if pause and seen > 1:
            assert both[0] >= 1000, "what was acknowledged is repeated"
    front.run("%distributed interrupt")
    assert front.run("%%distributed\nprint(x)") == "[0] 0\n[1] 10\n[2] 20\n[3] 30\n"


@pytest.mark.slow
def test_killed_kernel_loses_no_line_of_hosts_over_ssh(start_front: Any, testbed: Testbed, tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(f"Include {testbed.inventory.ssh_config}\n")
    nodes = [{"host": host.name} for host in testbed.hosts]
    (tmp_path / "nodes.json").write_text(json.dumps({"defaults": {"python": sys.executable}, "nodes": nodes}))
    front, count = start_front("/x/hosts.ipynb", HOME=str(tmp_path)), 4000
    front.run(f"%distributed start --nodes {tmp_path}/nodes.json --device cpu --no-sync")
    try:
        waits = "    if i == 999: time.sleep(4)\n"  # leaves time to acknowledge the earlier lines
        counting = front.begin("%%distributed\n" + _COUNT.format(count=count, pause=0.001) + waits + "time.sleep(3600)")
        front.wait(lambda: all(f"[h{rank}:{rank}] 001100\n" in front.text(counting) for rank in (0, 1)))
        front.kill()
        before = _of_hosts(front.text(counting))
        assert "was left running (on h0, h1)" in front.restart(now=True)
        attach = front.begin("%distributed attach")
        last = [f"[h{rank}:{rank}] {count - 1:06d}\n" for rank in (0, 1)]
        front.wait(lambda: all(line in front.text(attach) for line in last))
        perhaps, mark, new = _of_hosts(front.text(attach)).partition(_NEW)
        if not mark:
            perhaps, new = "", perhaps
        for rank in (0, 1):
            seen_before, repeated, seen_after = (_numbers(text, rank) for text in (before, perhaps, new))
            assert seen_before == list(range(len(seen_before)))
            both = repeated + seen_after
            assert both == list(range(both[0], count))
            assert both[0] <= len(seen_before), "a line is missing"
            assert both[0] >= 1000, "what was acknowledged is repeated"
            assert seen_after[0] >= len(seen_before), "a line is shown twice that is called new"
        assert "all ranks stopped and kept their variables" in front.run("%distributed interrupt")
        after = front.run("%%distributed\nt = torch.ones(1); dist.all_reduce(t)\nprint(int(x + t.item()))")
        assert _of_hosts(after) == "[0] 2\n[1] 12\n"
    finally:
        front.run("%distributed stop")


def _of_hosts(text: str) -> str:
    """The text without host names in the labels, as on one machine."""
    return re.sub(r"^\[h\d:(\d)\]", r"[\1]", text, flags=re.MULTILINE)


@pytest.mark.slow
def test_what_came_while_nobody_was_there_is_shown_with_values_errors_and_deaths(
    start_front: Any, tmp_path: Path
) -> None:
    front = start_front("/x/errors.ipynb")
    front.run("%distributed start -n 3 --no-init")
    pids = re.findall(r"\d+", front.run("%%distributed\nimport os, time\nprint(os.getpid())").replace("[", "\n["))
    wait = f"while not os.path.exists('{tmp_path}/go'): time.sleep(.01)\n"
    begun, ended = f"open('{tmp_path}/' + str(rank), 'w')\n", f"open('{tmp_path}/end', 'w')\n"
    front.begin(f"%%distributed\nprint('begun')\n{begun}{wait}print('on')\nif rank == 1: 1 / 0\n{ended}[rank]")
    _eventually(lambda: all((tmp_path / str(rank)).exists() for rank in range(3)))
    front.kill()
    os.kill(int(pids[5]), signal.SIGKILL)
    (tmp_path / "go").touch()
    _eventually((tmp_path / "end").exists)
    time.sleep(1)  # the agent learns that the cell has ended and that a rank was killed
    front.restart(now=True)
    shown = front.run("%distributed attach")
    assert re.search(r"\[0\] on\n(.*\n)*\[0\] \[0\]\n", shown)
    assert "line 6, in <module>\n  |     if rank == 1: 1 / 0\n  | ZeroDivisionError: division by zero" in shown
    assert "ended with signal 9 (SIGKILL)\n" in shown
    assert "rank 2 was restarted, its variables are lost:\n  %distributed replay -r 2  runs" in shown
    assert "has ended" not in shown, "it had ended before"
    assert front.run("%%distributed\nprint(rank)") == "[0] 0\n[1] 1\n[2] 2\n", "it is told once"


@pytest.mark.slow
def test_error_and_value_that_come_after_the_attach_are_shown_below_it(start_front: Any, tmp_path: Path) -> None:
    front = start_front("/x/later.ipynb")
    front.run("%distributed start -n 3 --no-init")
    wait = f"\nimport os, time\nopen('{tmp_path}/' + str(rank), 'w')\nwhile not os.path.exists(f'{tmp_path}/go'): "
    code = f"if rank == 0: raise ValueError('early'){wait}time.sleep(.01)\nif rank == 1: raise ValueError('late')\n"
    front.begin(f"%%distributed\n{code}print('no newline', end='')\n'a value'")
    _eventually(lambda: (tmp_path / "1").exists() and (tmp_path / "2").exists())
    front.kill()
    front.restart(now=True)
    attach = front.begin("%distributed attach")
    front.wait(lambda: "is still running on ranks 1-2; its output appears here\n" in front.text(attach))
    assert front.text(attach).count("ValueError: early") == 1
    assert _PERHAPS not in front.text(attach), "there is nothing to show between marks"
    (tmp_path / "go").touch()
    front.wait(lambda: "has ended\n" in front.text(attach))
    shown = front.text(attach)
    assert shown.count("ValueError: early") == shown.count("ValueError: late") == 1
    assert shown.index("[2] no newline\n") < shown.index("[2] 'a value'\n") < shown.index("ValueError: late")


@pytest.mark.slow
def test_blocked_cell_of_before_is_freed_by_interrupt(start_front: Any, tmp_path: Path) -> None:
    front = start_front("/x/blocked.ipynb")
    front.run("%distributed start -n 2")
    front.begin(f"%%distributed\nx = rank\nopen('{tmp_path}/0', 'w')\nif rank == 0: dist.all_reduce(torch.ones(1))")
    _eventually((tmp_path / "0").exists)
    front.kill()
    front.restart(now=True)
    assert "is still running on rank 0; its output" in front.run("%distributed attach")
    _eventually(lambda: "all_reduce" in front.run("%distributed where"))
    assert "freed" in front.run("%distributed interrupt")
    assert front.run("%%distributed\nt = torch.ones(1); dist.all_reduce(t)\nprint(x)") == "[0] 0\n[1] 1\n"
    assert front.run("%distributed interrupt") == "no cell is running\n"


@pytest.mark.slow
def test_shutdown_for_good_ends_the_session_at_once(start_front: Any, runtime_folder: Path) -> None:
    front = start_front("/x/ended.ipynb", MARK_OF_THIS_TEST="ended")
    front.run("%distributed start -n 2")
    front.begin("%%distributed\nprint('on')\nimport time\ntime.sleep(600)")
    front.wait(lambda: any("[1] on" in text for text in map(front.text, list(front._texts))))
    assert [path.name for path in runtime_folder.iterdir() if path.name.startswith("ended-")]
    front.kernel.manager.shutdown_kernel()
    _eventually(lambda: not _marked("ended"))
    assert not [path.name for path in runtime_folder.iterdir() if path.name.startswith("ended-")]


@pytest.mark.slow
def test_ranks_that_nobody_comes_back_to_end_when_they_have_lingered(start_front: Any, runtime_folder: Path) -> None:
    front = start_front("/x/lingers.ipynb", MARK_OF_THIS_TEST="lingers", DETRAIN_NB_LINGER="600")
    front.run("%distributed start -n 2 --linger 5")
    front.begin("%%distributed\nimport subprocess\nsubprocess.run(['sleep', '600'], start_new_session=True)")
    _eventually(lambda: len([p for p in _marked("lingers") if p.name() == "sleep"]) == 2)
    os.kill(front.kernel.manager.provisioner.pid, signal.SIGKILL)
    time.sleep(0.5)
    assert _marked("lingers"), "the ranks wait"
    _eventually(lambda: not _marked("lingers"))
    assert not [path.name for path in runtime_folder.iterdir() if "lingers" in path.name]


def _marked(value: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK_OF_THIS_TEST") == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("linger", ["-1", "inf", "x"])
def test_linger_that_is_no_time_is_one_line(start_front: Any, linger: str) -> None:
    said = start_front("/x/bad.ipynb").run(f"%distributed start -n 1 --linger {linger}")
    assert said.startswith("UsageError: ")
    assert said.strip().count("\n") == 0


# ---- other kernels


@pytest.mark.slow
def test_detached_session_is_attached_to_by_the_same_kernel_and_by_another(start_front: Any) -> None:
    front, other = start_front("/x/first.ipynb"), start_front("/x/second.ipynb")
    front.run("%distributed start -n 2 --name shared --no-init")
    front.run("%%distributed\nx = rank + 5\nprint('shown')")
    detached = "detached: the ranks keep running; %distributed attach shared reconnects to them\n"
    for _ in range(2):
        assert front.run("%distributed detach") == detached
        assert "this notebook holds no session" in front.run("%distributed status")
        assert front.run("%distributed attach shared") == "<Session 'shared': 2 ranks on cpu, running>\n"
    assert front.run("%distributed detach") == detached
    ends = "it ends 10 minutes after its notebook leaves; %distributed stop shared stops it"
    assert re.search(rf"^shared  agent pid \d+  {ends}$", other.run("%distributed list"), re.MULTILINE)
    assert other.run("%distributed attach shared") == "<Session 'shared': 2 ranks on cpu, running>\n"
    assert re.search(r"^shared  agent pid \d+  \(this notebook\)$", other.run("%distributed list"), re.MULTILINE)
    assert "this notebook already holds session 'shared'" in other.run("%distributed attach shared")
    assert other.run("%%distributed\nprint(x)") == "[0] 5\n[1] 6\n"
    held = "SessionError: session 'shared' is held by second-"
    assert front.run("%distributed attach shared").startswith(held)
    assert front.run("%distributed stop shared").startswith(held)
    assert other.run("%%distributed\nprint(x)") == "[0] 5\n[1] 6\n"
    assert other.run("%distributed detach") == detached
    assert front.run("%distributed stop shared") == ""
    assert "shared" not in front.run("%distributed list")
    assert "no session 'shared' is running on this machine" in other.run("%distributed attach shared")


@pytest.mark.slow
def test_session_of_another_name_is_found_by_its_notebook_again(start_front: Any) -> None:
    front = start_front("/x/named.ipynb")
    front.run("%distributed start -n 2 --no-init --name tuesday")
    front.run("%%distributed\nx = rank")
    said = front.restart()
    assert re.search(
        r"session tuesday of this notebook is still running .*: %distributed attach tuesday .* stop tuesday stops", said
    )
    assert start_front("/x/stranger.ipynb").run("%distributed list").count("tuesday  agent pid") == 1
    assert "<Session 'tuesday'" in front.run("%distributed attach")
    code = "from detrain_nb import current_session\ncurrent_session().pull('x')"
    assert front.run(code) == "{0: 0, 1: 1}\n"
    front.run("%distributed stop")
    assert "SessionError: this notebook holds no session" in front.run(code)


@pytest.mark.slow
def test_stolen_session_is_told_in_one_line_and_can_be_taken_back(start_front: Any) -> None:
    front, thief = start_front("/x/owner.ipynb"), start_front("/x/thief.ipynb")
    front.run("%distributed start -n 2 --name wanted --no-init")
    front.run("%%distributed\nx = rank")
    assert "held by owner-" in thief.run("%distributed attach wanted")
    assert thief.run("%distributed attach wanted --steal").startswith("<Session 'wanted': 2 ranks on cpu, running>\n")
    for code in ("%%distributed\nx", "%pull x"):
        said = front.run(code)
        assert re.fullmatch(
            r"SessionError: session 'wanted' was taken over by thief-\w+: %distributed attach --steal takes it back\n",
            said,
        )
    assert thief.run("%%distributed\nprint(x)") == "[0] 0\n[1] 1\n"
    assert front.run("%distributed attach wanted --steal").startswith("<Session 'wanted': 2 ranks on cpu, running>\n")
    assert front.run("%%distributed\nprint(x)") == "[0] 0\n[1] 1\n"
    assert "was taken over by owner-" in thief.run("%%distributed\nx")
    thief.close()
    assert front.run("%%distributed\nprint(x)") == "[0] 0\n[1] 1\n", "the end of one that lost it ends nothing"


@pytest.mark.slow
def test_notebook_of_the_same_name_wins_at_once_over_a_kernel_that_hangs(start_front: Any) -> None:
    front, again = start_front("/x/same.ipynb"), start_front("/x/same.ipynb")
    front.run("%%distributed -n 2\nx = rank")
    hanging = psutil.Process(front.kernel.manager.provisioner.pid)
    hanging.suspend()
    try:
        assert re.fullmatch(r"<Session 'same-\w+': 2 ranks on cpu, running>\n", again.run("%distributed attach"))
        assert again.run("%%distributed\nprint(x)") == "[0] 0\n[1] 1\n"
    finally:
        hanging.resume()
    assert "was taken over by same-" in front.run("%%distributed\nx")
    front.close()
    assert again.run("%%distributed\nprint(x)") == "[0] 0\n[1] 1\n"


# ---- following


@pytest.mark.slow
def test_log_follows_a_cell_from_a_second_shell_until_it_ends(start_front: Any, tmp_path: Path) -> None:
    front = start_front("/x/subshell.ipynb")
    front.run("%distributed start -n 2 --no-init")
    code = f"import os, time\nprint(1)\nwhile not os.path.exists('{tmp_path}/go'): time.sleep(.01)\nprint(2)\nrank"
    running = front.begin(f"%%distributed\n{code}")
    front.wait(lambda: "[0] 1\n" in front.text(running) and "[1] 1\n" in front.text(running))
    subshell = _make_subshell(front.kernel)
    followed = _execute_in(front.kernel, subshell, "%distributed log --cell -1 --follow --rank 1")
    front.wait(lambda: "[1] 1\n" in front.text(followed))
    (tmp_path / "go").touch()
    front.wait(lambda: {followed, running} <= front._idle)
    assert front.text(followed) == "[1] 1\n[1] 2\n[1] 1\n"
    assert front.text(running) == "[0-1] 1\n[0-1] 2\n[0] 0\n[1] 1\n"
    front.run("%%distributed\nprint('quick')")
    assert front.run("%distributed log --follow") == "[0-1] quick\n", "one that has ended is shown, no more"


def _make_subshell(kernel: Any) -> str:
    client = kernel.client
    message = client.session.msg("create_subshell_request", {})
    client.control_channel.send(message)
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        reply = client.get_control_msg(timeout=_LIMIT_S)
        if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
            return str(reply["content"]["subshell_id"])
    raise AssertionError("no subshell")


def _execute_in(kernel: Any, subshell: str, code: str) -> str:
    content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
    message = kernel.client.session.msg("execute_request", content)
    message["header"]["subshell_id"] = subshell
    kernel.client.shell_channel.send(message)
    return str(message["header"]["msg_id"])


@pytest.mark.slow
def test_stop_of_a_follower_only_stops_following(start_front: Any) -> None:
    front = start_front("/x/follower.ipynb")
    front.run("%distributed start -n 2 --no-init")
    front.run(_PATIENT)
    counting = front.begin("%%distributed\n" + _COUNT.format(count=100_000, pause=0.01))
    front.wait(lambda: "[0] 000010\n" in front.text(counting))
    front.restart()
    front.run("%distributed attach")
    log = front.begin("%distributed log --cell -1 --follow")
    front.wait(lambda: len(_numbers(front.text(log), 1)) > 100)
    front.kernel.manager.interrupt_kernel()
    front.wait(lambda: log in front._idle)
    said = front.text(log)
    assert re.search(r"no longer following cell \d+, which keeps running: %distributed interrupt stops it\n$", said)
    numbers = _numbers(said, 0)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    time.sleep(0.5)
    front.run("1")
    assert front.text(log) == said
    assert "all ranks stopped" in front.run("%distributed interrupt")


# ---- large amounts of output


@pytest.mark.thorough
def test_much_that_was_missed_is_shown_whole_and_does_not_fill_the_kernel(start_front: Any, tmp_path: Path) -> None:
    front = start_front("/x/much.ipynb")
    front.run("%distributed start -n 2 --no-init")
    line = "print(i, 'x' * 300)"
    begun = f"import os, time\nopen('{tmp_path}/' + str(rank), 'w')\n"
    wait = f"while not os.path.exists('{tmp_path}/go'): time.sleep(.01)\n"
    front.begin(f"%%distributed\n{begun}{wait}for i in range(100_000): {line}\nopen(f'{tmp_path}/done{{rank}}', 'w')")
    _eventually(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    front.kill()
    (tmp_path / "go").touch()
    _eventually(lambda: (tmp_path / "done0").exists() and (tmp_path / "done1").exists())
    front.restart(now=True)
    pid = front.kernel.manager.provisioner.pid
    front.run("import detrain_nb.session.session")
    before = _peak_bytes(pid)
    attach = front.begin("%distributed attach")
    front.wait(lambda: attach in front._idle, limit_s=100)
    after = _peak_bytes(pid)
    shown = front.text(attach)
    for rank in (0, 1):
        numbers = [int(number) for number in re.findall(rf"^\[{rank}\] (\d+) x{{300}}$", shown, re.MULTILINE)]
        assert numbers == list(range(100_000))
    assert after - before < 30 << 20, "60 MB were missed"


def _peak_bytes(pid: int) -> int:
    """The peak memory of a process."""
    [kilobytes] = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kilobytes) << 10
