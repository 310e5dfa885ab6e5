"""`detrain-nb`, run as by a user: a real kernel, and two real ranks where a cell needs them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

from detrain_nb import Session, __version__
from detrain_nb.cli.commands import main
from detrain_nb.cli.terminal import Terminal

COMMAND = str(Path(sys.executable).with_name("detrain-nb"))
LIMIT_S = 180.0
pytestmark = pytest.mark.timeout(240)  # the machine may be busy
# with PYTEST_CURRENT_TEST set, ipykernel lets through what a kernel writes at its end
NO_USERS = ("DETRAIN_NB_OUTPUT", "COLUMNS", "LINES", "PYTEST_CURRENT_TEST")


@dataclass
class Place:
    """A folder for notebooks, and the processes of the commands that run in it."""

    folder: Path
    env: dict[str, str]

    def write(self, *cells: str, name: str = "story.ipynb", **tags: str) -> Path:
        """Write a notebook; each of ``tags`` adds a cell with that tag and the given source."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
        for tag, source in tags.items():
            notebook.cells.append(nbformat.v4.new_code_cell(source, metadata={"tags": [tag]}))
        nbformat.write(notebook, self.folder / name)
        return self.folder / name

    def start(self, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [COMMAND, *map(str, arguments)],
            cwd=self.folder.parent,
            env=self.env,
            stdin=subprocess.DEVNULL,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options},
        )

    def run(self, *arguments: str | Path) -> tuple[int, str, str]:
        """Run a command; returns its exit status, stdout and stderr."""
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=LIMIT_S)
        return process.returncode, out, err

    def processes(self) -> list[psutil.Process]:
        """All descendants of the commands, recognised by their environment, even if their parents have exited."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def names(self) -> set[str]:
        """The names of the processes that still run."""
        names = set()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                names.add(process.name())
        return names

    def require_empty(self) -> None:
        _, alive = psutil.wait_procs(self.processes(), timeout=30)
        assert not alive, alive

    def _is_ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            is_ours = process.environ().get("DETRAIN_NB_RUNTIME_DIR") == self.env["DETRAIN_NB_RUNTIME_DIR"]
            return is_ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
        return False


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    base = tmp_path_factory.mktemp("cli")
    runtime, folder, kernel = base / "run", base / "notebooks", base / "jupyter/kernels/python3"
    runtime.mkdir(mode=0o700)
    folder.mkdir()
    kernel.mkdir(parents=True)  # a kernel spec with that name, left by another environment
    (kernel / "kernel.json").write_text(
        json.dumps({"argv": ["false"], "display_name": "elsewhere", "language": "python"})
    )
    env = {name: value for name, value in os.environ.items() if name not in NO_USERS}
    env |= {"DETRAIN_NB_RUNTIME_DIR": str(runtime), "JUPYTER_PATH": str(base / "jupyter"), "PYTHONUNBUFFERED": ""}
    place = Place(folder, env)
    yield place
    place.require_empty()


# ---- one notebook with two ranks


RANKS = """
%%distributed -n 2
import pathlib, sys, time
print("same")
print(f"before {rank}")
print("a complaint", file=sys.stderr)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
print("after")
rank * 10
"""
WHERE = "import os, sys\nprint(sys.prefix)\nprint(os.environ['DETRAIN_NB_NOTEBOOK'])\n%distributed list"
PICTURE = 'from IPython.display import display\ndisplay({"image/png": "", "text/plain": "<a picture>"}, raw=True)'
# Two views: one changes after it was shown, the other settles while no cell runs.
VIEWS = """
import threading
from detrain_nb import widgets
from detrain_nb.spec import Node
first, second = widgets.nodes([Node(host="first")]), widgets.nodes([Node(host="second")])
display(first, second)
first.nodes = [Node(host="changed")]
is_over = threading.Event()
threading.Thread(target=lambda: (is_over.wait(30), second.settle())).start()
"""
SUMMARY = "is_over.set()\nprint('accuracy 0.9')\n6 * 7"


@dataclass
class Story:
    """What one run of the notebook printed and stored."""

    status: int
    out: str
    err: str
    stored: Any

    def cell(self, number: int) -> str:
        """The text printed to stdout for a code cell."""
        return re.split(r"^=== cell \d+ of \d+: .*\n", self.out, flags=re.MULTILINE)[number]


@pytest.fixture(scope="module")
def story(place: Place) -> Story:
    """Run the notebook; the cell of the ranks ends only once their earlier lines have been read here."""
    path = place.write("%load_ext detrain_nb", RANKS.strip(), WHERE, PICTURE, VIEWS.strip(), summary=SUMMARY)
    errors: list[str] = []
    with place.start("run", path) as process:
        assert process.stdout is not None and process.stderr is not None
        reader = threading.Thread(target=lambda err=process.stderr: errors.append(err.read()))
        reader.start()
        read = ""
        while not ("[0] before 0\n" in read and "[1] before 1\n" in read):
            line = process.stdout.readline()
            assert line, (read, errors)
            read += line
        (place.folder / "go").touch()
        read += process.stdout.read()
        reader.join(LIMIT_S)
    stored = nbformat.read(place.folder / "story.executed.ipynb", as_version=4)
    return Story(process.wait(LIMIT_S), read, errors[0], stored)


@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_executed_notebook_replaces_what_stands_in_its_place(place: Place, planted: str) -> None:
    """Another user may have put a file there if the folder is writable by a group."""
    executed, private = place.folder / "story.executed.ipynb", place.folder / "private"
    private.write_text("my only copy")
    if planted == "link":
        executed.symlink_to(private)
    else:
        os.mkfifo(executed)
    status, _, err = place.run("run", place.write("1 + 1"))
    assert status == 0, err
    assert executed.is_file() and not executed.is_symlink()
    assert json.loads(executed.read_text())["cells"][0]["outputs"][0]["data"]["text/plain"] == ["2"]
    assert private.read_text() == "my only copy"
    assert not list(place.folder.glob(".*"))
    executed.unlink()


def test_executed_notebook_is_no_more_public_than_the_notebook(place: Place) -> None:
    path = place.write("1 + 1")
    path.chmod(0o600)
    executed = place.folder / "story.executed.ipynb"
    for earlier in (None, 0o644):
        if earlier:
            executed.chmod(earlier)
        assert place.run("run", path)[0] == 0
        assert executed.stat().st_mode & 0o777 == 0o600
    executed.unlink()
    path.chmod(0o644)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_executed_notebook_has_no_mode_of_another_user_s(place: Place) -> None:
    executed = place.folder / "story.executed.ipynb"
    executed.write_text("{}")
    executed.chmod(0o666)
    os.chown(executed, 12345, 12345)
    assert place.run("run", place.write("1 + 1"))[0] == 0
    assert executed.stat().st_mode & 0o022 == 0
    executed.unlink()


def test_place_of_the_executed_notebook_that_is_another_user_s_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder like /tmp only the owner of a file can replace it."""
    nbformat.write(nbformat.v4.new_notebook(), tmp_path / "story.ipynb")
    (tmp_path / "story.executed.ipynb").write_text("theirs")
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        assert main(["run", str(tmp_path / "story.ipynb")]) == 2
    assert "story.executed.ipynb: cannot be written: give another path with --output" in told.getvalue()


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_cells_say_is_at_no_port(place: Place, monkeypatch: pytest.MonkeyPatch, is_shared: bool) -> None:
    """Other users of the machine could read output at a TCP port, or from sockets in a folder that they can replace."""
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        os.chmod(temporary, 0o777 if is_shared else 0o700)
        monkeypatch.setitem(place.env, "TMPDIR", temporary)
        code = "import os\nfrom ipykernel.kernelapp import IPKernelApp as App\napp = App.instance()\n"
        code += "app.transport, oct(os.stat(os.path.dirname(app.ip)).st_mode & 0o777), "
        code += f"app.ip.startswith({temporary!r}), os.path.dirname(app.abs_connection_file) == os.path.dirname(app.ip)"
        status, out, err = place.run("run", place.write(code))
    assert status == 0, err
    assert f"('ipc', '0o700', {not is_shared}, True)" in out


def test_folder_that_ipython_makes_is_no_other_users_whatever_the_umask(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next kernel executes files in that folder."""
    monkeypatch.setitem(place.env, "IPYTHONDIR", str(tmp_path / "ipython"))
    with place.start("run", place.write("1"), umask=0) as process:
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert (tmp_path / "ipython").stat().st_mode & 0o777 == 0o700


def test_kernel_has_no_port_and_shows_what_its_children_print(place: Place) -> None:
    """A plain ipykernel opens a port for its children, and prints whatever any process sends to it."""
    ports = "import psutil\n[each.laddr for each in psutil.Process().net_connections() if each.status == 'LISTEN']"
    child = (  # the cell continues once the line was read
        "import multiprocessing as mp, pathlib, time\nlimit = time.monotonic() + 60\n"
        "child = mp.get_context('fork').Process(target=print, args=('a child said',))\nchild.start()\nchild.join()\n"
        "while not pathlib.Path('heard').exists() and time.monotonic() < limit: time.sleep(0.01)\nchild.exitcode"
    )
    with place.start("run", place.write(ports, child, summary="2")) as process:
        _read_until(process, "a child said\n")
        (place.folder / "heard").touch()
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    cells = json.loads((place.folder / "story.executed.ipynb").read_text())["cells"]
    assert cells[0]["outputs"][0]["data"]["text/plain"] == ["[]"]
    assert "".join(cells[1]["outputs"][0]["text"]) == "a child said\n"


def test_output_of_the_ranks_appears_while_the_cell_runs(story: Story) -> None:
    assert story.status == 0, story.err
    assert story.out.index("before 1") < story.out.index("after")


def test_every_code_cell_has_a_header_with_its_number_and_first_line(story: Story) -> None:
    headers = [line for line in story.out.splitlines() if line.startswith("===")]
    assert headers[:2] == ["=== cell 1 of 6: %load_ext detrain_nb", "=== cell 2 of 6: %%distributed -n 2"]
    assert len(headers) == 6


def test_canonical_form_is_stored_but_not_printed_again(story: Story) -> None:
    # the last lines may have been merged before they were printed
    lines = [re.fullmatch(r"\[(0|1|0-1)\] (.*)", line) for line in story.cell(2).splitlines()]
    assert None not in lines
    said = {rank: sorted(line[2] for line in lines if line and rank in line[1]) for rank in "01"}
    assert said == {"0": ["0", "after", "before 0", "same"], "1": ["10", "after", "before 1", "same"]}

    stored = story.stored.cells[1].outputs
    text = "".join(output.text for output in stored if output.output_type == "stream" and output.name == "stdout")
    assert text == "[0-1] same\n[0] before 0\n[1] before 1\n[0-1] after\n"
    assert [output.data["text/plain"] for output in stored if "data" in output] == ["[0] 0", "[1] 10"]


def test_stderr_of_the_ranks_goes_to_stderr_once(story: Story) -> None:
    # Equal lines that arrive together are shown as one.
    assert sorted(story.err.splitlines()) in (["[0-1] a complaint"], ["[0] a complaint", "[1] a complaint"])


def test_kernel_is_this_python_and_its_session_is_named_after_the_executed_notebook(story: Story, place: Place) -> None:
    python, notebook, session = story.cell(3).splitlines()
    assert python == sys.prefix
    assert notebook == str(place.folder / "story.executed.ipynb")
    assert session.startswith("story.executed-")


def test_picture_is_shown_as_its_text(story: Story) -> None:
    assert story.cell(4) == "<a picture>\n"


def test_live_views_are_stored_as_plain_html_of_how_they_were_in_the_end(story: Story) -> None:
    found = [output.data for output in story.stored.cells[4].outputs if output.data["text/plain"]]
    assert [sorted(data) for data in found] == [["text/html", "text/plain"]] * 2
    for data, host in zip(found, ("changed", "second")):
        assert host in data["text/plain"] and host in data["text/html"] and "live view" not in data["text/html"]
    assert "widget-view" not in str(story.stored.cells[4].outputs)
    assert len(story.stored.cells) == 6 and "widgets" not in story.stored.metadata


def test_end_names_the_executed_notebook_and_repeats_the_summary(story: Story, place: Place) -> None:
    end = f"executed notebook: {place.folder / 'story.executed.ipynb'}\naccuracy 0.9\n42\n"
    assert story.out.endswith(f"accuracy 0.9\n42\n{end}")


# ---- runs that end early


@pytest.mark.slow
def test_failing_cell_prints_its_error_once_and_what_was_run_is_saved(place: Place) -> None:
    path = place.write("print('fine')", "1 / 0", "print('never')", name="fails.ipynb")
    before = nbformat.read(path, as_version=4)
    before.cells[2].outputs = [nbformat.v4.new_output("stream", text="from an earlier run\n")]
    nbformat.write(before, path)
    status, out, err = place.run("run", path, "--output", place.folder / "elsewhere.ipynb")
    assert status == 1
    assert (out + err).count("division by zero") == 1
    assert "\x1b" not in err
    assert err.endswith("detrain-nb: cell 2 of 3 failed\n")
    assert out.endswith(f"executed notebook, up to where it stopped: {place.folder / 'elsewhere.ipynb'}\n")
    stored = nbformat.read(place.folder / "elsewhere.ipynb", as_version=4)
    assert [len(cell.outputs) for cell in stored.cells] == [1, 1, 0]


BLOCKED = """
%%distributed -n 2
import subprocess, time
subprocess.Popen(["sleep", "300"])
print(f"ready {rank}")
time.sleep(300)
"""
IN_A_COLLECTIVE = BLOCKED.replace("time.sleep(300)", "dist.barrier() if rank == 0 else None")


def _read_until(process: subprocess.Popen[str], *wanted: str) -> None:
    assert process.stdout is not None
    read = ""
    while not all(text in read for text in wanted):
        line = process.stdout.readline()
        assert line, read
        read += line


@pytest.mark.slow
def test_control_c_interrupts_the_cell_and_leaves_no_process(place: Place) -> None:
    path = place.write("%load_ext detrain_nb", BLOCKED.strip(), "print('never')", name="stopped.ipynb")
    with place.start("run", path) as process:
        _read_until(process, "ready 0", "ready 1")
        assert "sleep" in place.names()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert "cell 2 of 3 was interrupted" in err
    assert "never" not in out
    assert (place.folder / "stopped.executed.ipynb").exists()
    place.require_empty()


@pytest.mark.slow
def test_second_control_c_waits_for_nothing_and_leaves_no_process(place: Place) -> None:
    path = place.write("%load_ext detrain_nb", IN_A_COLLECTIVE.strip(), name="hurried.ipynb")
    with place.start("run", path) as process:
        _read_until(process, "ready 0", "ready 1")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM), "two at once come in any order"
    assert err.endswith("cell 2 of 2 was interrupted\n")
    place.require_empty()


@pytest.mark.slow
def test_who_closes_the_pipe_ends_the_run(place: Place) -> None:
    path = place.write(
        "import time\nfor i in range(3000):\n    print(i, flush=True)\n    time.sleep(0.1)", name="pipe.ipynb"
    )
    with place.start("run", path) as process:
        _read_until(process, "0\n")
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.wait(LIMIT_S) == 128 + signal.SIGPIPE
    place.require_empty()


@pytest.mark.slow
def test_cell_that_takes_too_long_is_interrupted(place: Place) -> None:
    status, out, err = place.run(
        "run", place.write("import time\ntime.sleep(300)", name="slow.ipynb"), "--timeout", "3"
    )
    assert status == 1
    assert err.count("KeyboardInterrupt") == 2  # in the first and the last line of one traceback
    assert err.endswith("detrain-nb: cell 1 of 1 did not end within 3 s\n")
    assert "slow.executed.ipynb" in out


@pytest.mark.slow
def test_cell_that_ends_the_kernel_is_named(place: Place) -> None:
    status, out, err = place.run("run", place.write("import os\nos._exit(3)", "1", name="dies.ipynb"))
    assert status == 1
    assert err == "detrain-nb: cell 1 of 2 killed the kernel\n"
    assert "dies.executed.ipynb" in out


# ---- wrong use


WRONG = {
    "missing": ("nowhere.ipynb", None, "no such file"),
    "not JSON": ("text.ipynb", "# a page", "is not a notebook: it is not JSON"),
    "not text": ("bytes.ipynb", b"\xff\xfe\x00", "is not a notebook"),
    "no notebook": ("other.ipynb", '{"argv": []}', "is not a notebook: it has no nbformat"),
    "a broken notebook": (
        "broken.ipynb",
        '{"nbformat": 4, "nbformat_minor": 5, "cells": [1]}',
        "is not a valid notebook",
    ),
    "another language": (
        "julia.ipynb",
        '{"nbformat": 4, "nbformat_minor": 4, "cells": [], "metadata": {"kernelspec": '
        '{"name": "julia-1.10", "display_name": "Julia", "language": "julia"}}}',
        "is written in julia: name its kernel with --kernel",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_notebook_is_one_line(case: str, place: Place) -> None:
    name, content, complaint = WRONG[case]
    if content is not None:
        (place.folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    status, out, err = place.run("run", place.folder / name)
    assert (status, out) == (2, "")
    assert complaint in err
    assert err.startswith(f"detrain-nb: {place.folder / name}: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("options", [["--kernel", "nothing"], ["--output", "no/such/folder.ipynb"], ["--timeout", "0"]])
def test_wrong_option_runs_nothing(options: list[str], place: Place) -> None:
    status, out, err = place.run("run", place.write("print(1)", name="fine.ipynb"), *options)
    assert (status, out) == (2, "")
    assert options[1] in err.splitlines()[-1]


# ---- the rest of the command line


def test_version_is_the_package_s(place: Place) -> None:
    assert place.run("--version") == (0, f"detrain-nb {__version__}\n", "")
    done = subprocess.run([sys.executable, "-m", "detrain_nb", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"detrain-nb {__version__}\n"


def test_sessions_names_what_runs(cold_starts: None, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.require_empty()  # sessions of earlier tests have ended
    assert place.run("sessions") == (0, "no session is running on this machine\n", "")
    monkeypatch.setenv("DETRAIN_NB_RUNTIME_DIR", place.env["DETRAIN_NB_RUNTIME_DIR"])
    with Session.start(ranks=1, device="cpu", name="mine", init=False):
        status, out, _ = place.run("sessions")
    assert status == 0
    ends = r"it ends 10 minutes after its notebook leaves; kill (\d+) stops it"
    found = re.fullmatch(rf"mine  agent pid (\d+)  {ends}\n", out)
    assert found and found[1] == found[2], out


# ---- redrawn output


HANDLE = """
from IPython.display import display
handle = display({"text/plain": "0 %"}, raw=True, display_id=True)
print("a line")
for percent in (50, 100):
    handle.update({"text/plain": f"{percent} %"}, raw=True)
"""


@pytest.mark.slow
def test_redrawn_output_appears_in_a_file_once_in_its_last_state(place: Place) -> None:
    _, out, _ = place.run("run", place.write(HANDLE.strip(), name="redrawn.ipynb"))
    assert out.splitlines()[1:3] == ["a line", "100 %"]
    assert "50 %" not in out


@pytest.mark.slow
def test_redrawn_output_keeps_its_line_on_a_terminal(place: Place) -> None:
    ours, theirs = pty.openpty()
    with place.start("run", place.write(HANDLE.strip(), name="tty.ipynb"), stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # how Linux reports that the other end is closed
            while data := os.read(ours, 4096):
                shown += data
    os.close(ours)
    assert process.wait(LIMIT_S) == 0
    drawn = shown.decode().replace("\r\n", "\n").split("display\n", 1)[1].split("executed notebook")[0]
    assert drawn == "0 %\r\x1b[Ja line\n0 %\r\x1b[J50 %\r\x1b[J100 %\r\x1b[J100 %\n"


CLEAR = ("clear_output", {"wait": True})


def _say(text: str, name: str = "stdout") -> tuple[str, dict[str, Any]]:
    return "stream", {"name": name, "text": text}


def _show(text: str) -> tuple[str, dict[str, Any]]:
    return "display_data", {"data": {"text/plain": text}, "transient": {}}


SHOWN = {
    "the same lines, merged": ([_say("[1] a\n[0] a\n"), CLEAR, _say("[0-1] a\n")], "[1] a\n[0] a\n"),
    "a line that was left out": ([_say("[1] a\n"), CLEAR, _say("[0-1] a\n[0,2] b\n")], "[1] a\n[0] a\n[0,2] b\n"),
    "as often as it was said": ([_say("[0] a\n"), CLEAR, _say("[0] a\n[0] a\n")], "[0] a\n[0] a\n"),
    "values of several lines": (
        [_show("[0] x\n    y"), _show("[1] x\n    y"), CLEAR, _show("[0-1] x\n      y"), _show("[0-1] z\n      y")],
        "[0] x\n    y\n[1] x\n    y\n[0-1] z\n      y\n",
    ),
    "cleared twice": ([_say("a\n"), CLEAR, _say("a\nb\n"), CLEAR, _say("a\nb\nc\n")], "a\nb\nc\n"),
    "lines cut anywhere": ([_say("[0] a\n[0"), _say("] b"), CLEAR, _say("[0] a"), _say("\n[0] b")], "[0] a\n[0] b\n"),
    "no line's end": ([_say("a"), _show("b"), _say("c")], "a\nb\nc\n"),
    "a label that is none": (
        [_say("[0-99999999999] a\n[x] a\n"), CLEAR, _say("[x] a\n")],
        "[0-99999999999] a\n[x] a\n",
    ),
}


@pytest.mark.parametrize("case", SHOWN)
def test_what_comes_after_a_clear_is_printed_where_it_is_new(case: str) -> None:
    messages, shown = SHOWN[case]
    out = io.StringIO()
    terminal = Terminal(out, io.StringIO(), on_gone=lambda: None)
    for kind, content in messages:
        terminal.take(kind, content)
    terminal.end_cell()
    assert out.getvalue() == shown
