"""%job and %%torchrun: how lines are parsed, what is shown of a job, and real jobs of two ranks in a real kernel."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from detrain_nb.magics.job_cell import JobCell
from detrain_nb.magics.job_options import job_parser, parse_job_line, parse_torchrun_line
from detrain_nb.magics.jobs import JobMagics
from detrain_nb.magics.notebook import RunCells
from detrain_nb.magics.options import HelpShown
from detrain_nb.magics.pipeline import PipelineMagics, pipeline_parser
from detrain_nb.magics.render import RenderOptions
from detrain_nb.magics.screen import Screen
from detrain_nb.magics.transcript import Item, Rich, Text
from hypothesis import given, settings
from hypothesis import strategies as st
from IPython.core.error import UsageError
from IPython.core.events import EventManager, available_events

from detrain_nb.jobs.job_report import JobReport, describe_metrics
from detrain_nb.jobs.job_status import JobStatus
from detrain_nb.jobs.log_lines import FollowedFile, LogLine
from detrain_nb.jobs.report_checks import NodeReport
from detrain_nb.plan.fields import take_fields

from ..testbed.testbed import Testbed

pytestmark = pytest.mark.timeout(120)

# ---- lines of the magics


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("shw", "%job: unknown command 'shw': did you mean show?"),
        ("--name x", "--name must follow a subcommand: %job submit --name"),
        ("submit", "%job submit: the following arguments are required: SPEC"),
        ("submit a.json b", "unexpected argument 'b'"),
        ("show x --training.epochs 2", "unknown option --training.epochs"),
        ("logs x --rank one", "'one' is not a whole number"),
        ("logs x -f --nod a", "unknown option --nod: did you mean --node?"),
        ("stop x --grace long", "argument --grace: 'long' is not a number"),
        ("restart", "the following arguments are required: JOB ("),
        ("view x --rank 1", "unknown option --rank"),
        ("rm --older-than week", "argument --older-than: 'week' is not a number"),
        ("fetch x 'a", "No closing quotation"),
    ],
)
def test_wrong_line_is_told_in_one_line(line: str, error: str) -> None:
    with pytest.raises(UsageError, match=re.escape(error)) as caught:
        parse_job_line(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["--help", "submit -h", "view -h", "exec --help"])
def test_help_is_shown(line: str) -> None:
    with pytest.raises(HelpShown, match="usage: %job"):
        parse_job_line(line)


@settings(max_examples=20, deadline=None)
@given(command=st.text(st.characters(exclude_categories=["C", "Z"])).filter(str.strip))
def test_shell_gets_what_stands_behind_the_dashes_as_it_is(command: str) -> None:
    _, args = parse_job_line(f"exec train --timeout 5 -- {command} 'a b' | wc -l # -- x")
    assert args.shell_line == f"{command} 'a b' | wc -l # -- x"
    assert (args.job, args.timeout) == ("train", 5)


def test_fields_of_a_spec_stand_anywhere() -> None:
    _, args = parse_job_line("submit --training.epochs 2 a.yaml --name x --training.dev --training.seed=7 # note")
    assert args.fields == ["--training.epochs=2", "--training.dev", "--training.seed=7"]
    assert (args.spec, args.name, args.follow) == ("a.yaml", "x", False)


@pytest.mark.parametrize(
    ("line", "own"),
    [
        ("-n 2 --name x", []),
        ("-n 2 --name x fast --lr 0.1 -n 3", ["fast", "--lr", "0.1", "-n", "3"]),
        ("-n 2 --name x -- --lr 0.1 --a.b 'c d' -- e", ["--lr", "0.1", "--a.b", "c d", "--", "e"]),
        ("-n 2 --name x one -- two", ["one", "two"]),
    ],
)
def test_words_behind_the_options_are_the_scripts(line: str, own: list[str]) -> None:
    args = parse_torchrun_line(line)
    assert (args.arguments, args.count, args.name) == (own, 2, "x")


@pytest.mark.parametrize("line", ["--lr 0.1", "-n 0", "-n", "--out"])
def test_option_that_there_is_not_needs_dashes(line: str) -> None:
    with pytest.raises(UsageError):
        parse_torchrun_line(line)


def test_examples_of_the_help_are_lines_that_can_be_typed() -> None:
    """Those of `%job?`, `%%torchrun?` and `%pipeline?`, and of each command's --help."""
    told = "".join(str(magic.__doc__) for magic in (JobMagics.job, JobMagics.torchrun, PipelineMagics.pipeline))
    job, *_ = job_parser()._subparsers._group_actions  # type: ignore[union-attr]
    told += "".join(each.format_help().replace("Example:", "           ") for each in job.choices.values())  # type: ignore
    lines = re.findall(r"^ {12}(%.*?)(?: {2,}.*)?$", told, flags=re.MULTILINE)
    assert len(lines) > 20
    for line in lines:
        prog, _, rest = line.partition(" ")
        if prog == "%job":
            parse_job_line(rest)
        elif prog == "%%torchrun":
            parse_torchrun_line(rest)
        else:
            words = pipeline_parser().split_line(rest.partition(" -- ")[0])  # after "--": another program's words
            pipeline_parser().parse_words(take_fields(words)[1])


# ---- what is shown of a job


class _Shown(Screen):
    """A screen that keeps the items on it."""

    can_clear = True

    def __init__(self) -> None:
        self.items: list[Item] = []

    def show(self, item: Item, *, display_id: str = "") -> None:
        self.items.append(item)

    def update(self, rich: Rich, display_id: str) -> None: ...

    def settle(self, items: list[Item], rest: list[Item] | None) -> bool:
        self.items = items if rest is None else [*self.items, *rest]
        return rest is None

    def close(self) -> None: ...

    @property
    def text(self) -> str:
        return "".join(item.text for item in self.items if isinstance(item, Text))


def _view(*, num_ranks: int = 2, max_lines: int = 0) -> tuple[JobCell, _Shown]:
    screen: Any = _Shown()
    job: Any = SimpleNamespace(id="demo-1", world_size=num_ranks)
    return JobCell(screen, job, RenderOptions(max_lines=max_lines, max_chars=0)), screen


_OVER = JobStatus("demo-1", "demo", "ended", exit_code=0)


@settings(max_examples=50, deadline=None)
@given(order=st.permutations(range(8)))
def test_last_form_is_the_same_in_whatever_order_nodes_answer(order: list[int]) -> None:
    """The sources take turns in any order; the lines of one source keep their order."""
    view, screen = _view()
    sources = [("b", "1"), ("a", "0"), ("b", "setup"), ("a", "setup")]
    said: dict[tuple[str, str], int] = dict.fromkeys(sources, 0)
    for number in order:
        node, source = sources[number % 4]
        text = ["begin", f"only {source} on {node}"][said[node, source]]
        said[node, source] += 1
        view.take(LogLine(node, source, text))
        if number == 3:
            view.take(LogLine("a", "", "connection lost, reconnecting"))
    view.finish(_OVER)
    assert screen.text == (
        "[a:setup] begin\n[a:setup] only setup on a\n[b:setup] begin\n[b:setup] only setup on b\n"
        "[0-1] begin\n[a:0] only 0 on a\n[b:1] only 1 on b\n"
    )


def test_lines_that_do_not_fit_are_counted_with_how_to_read_them() -> None:
    view, screen = _view(num_ranks=1, max_lines=20)
    for number in range(100):
        view.take(LogLine("", "0", str(number)))
    view.take(LogLine("", "9", "a rank that there is not"))
    view.finish(_OVER)
    assert "... 80 more lines, read them with %job logs demo-1 --rank 0 ..." in screen.text
    assert "[9] a rank that there is not\n" in screen.text


def test_node_that_says_it_has_the_rank_of_another_speaks_for_itself_alone() -> None:
    """Ranks of an elastic job move between nodes, and a node may send anything, including another's label."""
    view, screen = _view()
    view.take_piece("a", 0, b"from a\n")
    view.take_piece("b", 0, b"from b\n")
    view.take_piece("a", 0, b"more of ")
    view.take_piece("b", 0, b"\rlies\n")
    view.take_piece("a", 0, b"a\n")
    view.take(LogLine("b", "0", "[a:0] not a"))
    view.take(LogLine("c", "0", "from c"))
    view.finish(_OVER)
    assert screen.text == ("[a:0] from a\n[a:0] more of a\n[b:0] from b\n[b:0] lies\n[b:0] [a:0] not a\n[c:0] from c\n")


def test_what_a_node_logs_stands_in_quotes_among_our_words() -> None:
    values = {"step": 3, "rank": 0, "loss": 0.5, "val loss": 1, "x; job ended": "exit 0\n", "\x1b[2Jy": "z" * 100}
    said = describe_metrics(values)
    assert said.startswith("step 3, loss 0.5, 'val loss' 1, 'x; job ended' 'exit 0\\\\n', ")
    assert said.isprintable()
    assert len(said) < 200


def test_lines_aside_are_counted_where_they_are_too_many() -> None:
    view, screen = _view()
    for number in range(1500):
        view.take(LogLine("", "setup", f"pip {number}"))
    view.finish(_OVER)
    assert "[setup] pip 999\n... 500 more lines, read them with %job logs demo-1 ...\n" in screen.text


def test_bar_is_drawn_while_it_moves_and_colours_stay() -> None:
    view, screen = _view(num_ranks=1)
    drawn: list[str] = []
    screen.set_transient = drawn.append  # type: ignore[method-assign]
    for piece in (b"\x1b[31mr", b"ed\x1b[0m\n", b"\r 10%|#", b"\r 50%|##", b"\n\x1b[A\r100%|\xe2\x96", b"\x88|\nend\n"):
        view.take_piece("", 0, piece)
    assert any("50%" in text for text in drawn)
    view.finish(_OVER)
    assert screen.text == "[0] \x1b[31mred\x1b[0m\n[0] 100%|█|\n[0] end\n"


def test_print_takes_the_place_of_a_bar_which_is_drawn_again_below() -> None:
    view, screen = _view(num_ranks=1)
    file, at = FollowedFile(), 0
    for step in range(300):
        printed = b"step\n" if step == 100 else b""
        piece = f"\r{step}/300 [00:00<00:02,  9.94it/s]".encode() + printed
        view.take_piece("", 0, file.take_piece(at, piece))
        at += len(piece)
    view.finish(_OVER)
    assert screen.text == "[0] step\n[0] 299/300 [00:00<00:02,  9.94it/s]\n"


def test_report_is_tables_of_plain_text() -> None:
    evil = "<script>alert(1)</script>\x1b[31m"
    failed = NodeReport("demo-1", 0, "ended", exit_code=3, reason=evil, ranks=(0, 1), last_lines=(evil,), failed_rank=1)
    status = JobStatus(
        "demo-1", "demo", "ended", 3, failed_rank=1, last_lines=(evil,), reports={evil: failed}, silent={"b": evil}
    )
    metrics = [{"step": step, "rank": 0, evil: evil, "loss": 1 / (step + 1)} for step in range(30)]
    report = JobReport(status, None, metrics)
    shown = report._repr_html_()
    assert "<script" not in shown
    assert "\x1b" not in shown
    assert "0.03333" in shown
    assert "0.1<" not in shown, "the last steps alone"
    assert "exit 3" in str(report)


def test_notebook_is_newer_than_a_file_that_lacks_what_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other = tmp_path / "open.ipynb", tmp_path / "other.ipynb"
    monkeypatch.delenv("DETRAIN_NB_NOTEBOOK", raising=False)
    monkeypatch.setenv("JPY_SESSION_NAME", str(file))
    shell = SimpleNamespace(user_ns={}, events=EventManager(None, available_events))
    cells = RunCells(shell)

    def save(text: str) -> None:
        listed = [{"id": "a", "source": [text, "\n", "y"]}, {"id": "b", "source": "%job submit spec"}]
        for path in (file, other):
            path.write_text(json.dumps({"cells": listed}))

    def run(cell: str, text: str) -> bool:
        shell.events.trigger("pre_run_cell", SimpleNamespace(cell_id=cell, raw_cell=text))
        return cells.are_newer_than(str(file))

    assert not run("a", "x = 1\ny"), "there is no file"
    save("x = 1")
    assert not run("b", "%job submit spec")
    assert run("a", "x = 2\ny"), "it has another text there"
    assert not cells.are_newer_than(str(other))
    save("x = 2")
    assert not run("b", "%job submit spec")
    assert run("c", "%job submit spec"), "it is not there"
    cells.close()
    assert not RunCells(shell).are_newer_than(str(file)), "a front end that says no ids of the file"
    file.write_text("[")
    assert not cells.are_newer_than(str(file))


# ---- in a kernel

_SCRIPT = """
import os, pathlib, sys, time
from detrain_nb import job_spec, log_metrics
rank = int(os.environ["RANK"])
print("rank", rank, sys.argv[1:], "epochs", job_spec().training.epochs)
print("all say this")
log_metrics(step=1, loss=0.5)
pathlib.Path("artifacts").mkdir(exist_ok=True)
pathlib.Path(f"artifacts/{rank}").write_text("made")
if rank == 1 and "fail" in sys.argv:
    while not pathlib.Path("artifacts/0").exists():  # rank 0 is ended with us: it has said all by then
        time.sleep(0.01)
    sys.exit(3)
"""


@pytest.fixture(scope="module")
def kernel(start_kernel: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A kernel without a session, whose jobs have their own state folders."""
    return start_kernel(**_folders_in(tmp_path_factory.mktemp("jobs")))


def _folders_in(base: Path) -> dict[str, str]:
    """Make folders for jobs and their records below ``base``; returns the variables that name them."""
    names = {"XDG_STATE_HOME": "state", "XDG_CACHE_HOME": "cache", "DETRAIN_NB_RUNTIME_DIR": "run"}
    for name in names.values():
        (base / name).mkdir(mode=0o700)
    return {variable: str(base / name) for variable, name in names.items()}


def _without_id(text: str) -> str:
    return re.sub(r"-\d{8}-\d{6}-[0-9a-f]{4}", "-ID", text)


def test_cell_runs_as_a_job_from_its_start_to_what_it_made(kernel: Any, tmp_path: Path) -> None:
    begun = kernel.run(f"%%torchrun -n 2 --name demo --training.epochs 4 --out job -- a 'b c'\n{_SCRIPT}")
    assert begun.status == "ok", begun.error
    assert kernel.run("from detrain_nb.jobs.record import Record; Record().get('demo').file").rich() == ["b''"]
    assert _without_id(begun.text()) == "job demo-ID is running: %job logs -f demo-ID follows it\n"
    assert [kind for kind, _ in begun.shown] == ["stdout"], "nothing is left of what was drawn meanwhile"
    followed = kernel.run("%job attach demo")
    drawn = [content["data"].get("text/plain", "") for kind, content in followed.live if "display" in kind]
    assert any(re.match(r"job demo-\S+ running for \d+ s", text) for text in drawn), drawn
    assert _without_id(followed.text()) == (
        "[0] rank 0 ['a', 'b c'] epochs 4\n[1] rank 1 ['a', 'b c'] epochs 4\n[0-1] all say this\n"
        "job demo-ID: succeeded\n"
    )
    assert kernel.run("%job logs demo --rank 1").text().startswith("[1] rank 1")
    assert kernel.run("%job logs demo --tail 1").text() == "[0-1] all say this\n"
    tail = kernel.run("%job logs demo -f --tail 1 --rank 1").text()
    assert _without_id(tail) == "[1] all say this\njob demo-ID: succeeded\n"
    shown = kernel.run("%job show demo")
    assert "this machine: succeeded, ranks 0-1" in shown.rich()[0]
    assert shown.rich("text/html")[0].count("<table>") == 3, "nodes, plan, metrics"
    viewed = kernel.run("%job view demo")
    assert _without_id(viewed.rich()[0]).startswith("✓ job demo-ID: succeeded, after "), viewed.error
    assert "as it was when this cell ran; run it again" in viewed.rich("text/html")[0]
    fetched = kernel.run(f"%job fetch demo --to {tmp_path}/out")
    assert (tmp_path / "out/artifacts/1").read_text() == "made", fetched.error
    assert kernel.run("%job exec demo -- cat artifacts/* | wc -c; echo '$HOME' # -- as it is").text() == "8\n$HOME\n"
    assert kernel.run("job.id.startswith('demo-')").rich() == ["True"]
    assert "removed demo-" in kernel.run("%job rm demo").text()
    assert kernel.run("%job show demo").error.startswith("JobError: no job 'demo' was submitted from here")


def test_large_folder_shows_how_far_it_is(kernel: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    for number in range(3000):  # many files take longer than a large one
        (tmp_path / f"part{number}").write_bytes(os.urandom(5000))
    source = {"path": str(tmp_path), "entry": "train.py"}
    (tmp_path / "large.json").write_text(json.dumps({"name": "large", "source": source}))
    begun = kernel.run(f"%job submit {tmp_path}/large.json")
    assert begun.status == "ok", begun.error
    file = kernel.run("from detrain_nb.jobs.record import Record; Record().get('large').file")
    assert file.rich() == [repr(os.fsencode(tmp_path / "large.json"))]
    drawn = [content["data"].get("text/plain", "") for kind, content in begun.live if "display" in kind]
    assert any(re.match(r"send \[#*\.*\] +\d+ %, [\d.]+ [kM]?B of 15 MB", text) for text in drawn), drawn
    assert [kind for kind, _ in begun.shown if kind == "stdout"] == ["stdout"]
    assert kernel.run("%job attach large").status == "ok"
    assert "removed large-" in kernel.run("%job rm large").text()


def test_wrong_use_is_one_line_and_starts_nothing(kernel: Any, tmp_path: Path) -> None:
    spec = tmp_path / "train.json"
    spec.write_text(json.dumps({"name": "train", "source": {"module": "train"}, "training": {"epochs": 1}}))
    wrong = (
        ("%%torchrun --lr 1\n1", "UsageError: %%torchrun: unknown option --lr"),
        ("%%torchrun\n ", "UsageError: %%torchrun: the cell is empty"),
        ("%%torchrun --out 1\n1", "UsageError: %%torchrun: --out '1' is not a valid variable name"),
        ("%%torchrun --training.epoch 1\n1", "training.epoch"),
        ("%%torchrun\nx = = 1", "  line 2\n    x = = 1"),
        ("%job submit nowhere.json", "nowhere.json"),
        (f"%job submit {spec} --parallelism.pp x", "UsageError: --parallelism.pp"),
        (f"%job check {spec} --training.epochs 0", "training.epochs"),
        ("%job exec", "UsageError: %job exec: give either a job or --nodes"),
        ("%job exec x", "UsageError: %job exec: no command was given"),
        ("%job rm", "UsageError: %job rm: give jobs, or --older-than DAYS"),
        ("%job exec --nodes localhost --timeout 0 -- ls", "UsageError: timeout 0 s: give more than 0"),
        ("%job list --limit 0", "UsageError: limit 0: give 1 to "),
        ("%job rm --older-than -1", "UsageError: older than -1 days: give 0 to 100000"),
        (f"%pipeline export slurm {spec} --gpus -1", "UsageError: --gpus -1: give 0 or more"),
        ("%job attach nothing", "JobError: no job 'nothing' was submitted from here: %job list shows those that were"),
    )
    for code, error in wrong:
        outcome = kernel.run(code)
        assert outcome.status == "error", code
        assert error in outcome.error, code
    assert "1 rank" in kernel.run(f"%job check {spec} --nodes localhost --on-nodes").rich()[0]
    assert "torch.distributed.run" in kernel.run(f"%job submit {spec} --dry-run").rich()[0]
    misfit = kernel.run(f"%job check {spec} --parallelism.tp 8")
    assert (misfit.status, misfit.text().partition(":")[0]) == ("ok", "warning"), "it may fit on GPUs"
    assert "usage: %job" in kernel.run("%job").text()
    assert kernel.run("%job list").rich() == ["no jobs were submitted from here"]
    assert kernel.run("%reload_ext detrain_nb\n%job list").status == "ok"
    assert "not found" in kernel.run("%unload_ext detrain_nb\n%job list").error
    assert kernel.run("%load_ext detrain_nb\n%job list").status == "ok"


@pytest.mark.slow
def test_job_that_fails_fails_its_cell_and_stores_the_same_again(kernel: Any) -> None:
    code = f"%%torchrun -n 2 --name fails --follow -- fail\n{_SCRIPT}"
    first, again = kernel.run(code), kernel.run(code)
    assert _without_id(first.text()) == _without_id(again.text())
    assert _without_id(first.text()).startswith(
        "job fails-ID is running: %job stop fails-ID stops it, an interrupt of this cell does not\n[0] rank 0"
    )
    failed = r"JobFailed: job \S+ failed, exit 3 after .* \(rank 1 on this machine\): rank 1 exited with code 3"
    assert re.fullmatch(rf"{failed}\n  \| all say this", first.error), "what it printed stands above"
    of_whom_waits = kernel.run("from detrain_nb.jobs import find_job\nfind_job('fails').wait().check()").error
    assert "  | rank 1 ['fail'] epochs None\n  | all say this" in of_whom_waits, "who has seen nothing gets more lines"
    assert kernel.run("%job fetch fails").error.startswith("JobError: job fails-")


@pytest.mark.slow
def test_stop_of_who_follows_leaves_the_job_which_is_stopped_by_name(kernel: Any, tmp_path: Path) -> None:
    spec = tmp_path / "waits.json"
    source = {"script_text": "import time\nprint('begun', flush=True)\ntime.sleep(600)"}
    spec.write_text(json.dumps({"name": "waits", "source": source}))
    followed = kernel.run(f"%job submit {spec} --follow", interrupt_when="begun")
    assert re.match(r"SessionError: .* was interrupted: job \S+ keeps running: %job attach", followed.error), (
        followed.error
    )
    assert "begun" in followed.text()
    taken = kernel.run(f"%job submit {spec}")
    goes_on = r"JobError: job (waits-\S+) is already running: %job stop \1 stops it; or give this one another name"
    assert re.fullmatch(goes_on, taken.error), taken.error
    assert re.fullmatch(
        r"JobError: job (\S+) is running: stop it first with %job stop \1", kernel.run("%job rm waits").error
    )
    not_over = r"JobError: job \S+ is running: --anyway fetches what exists"
    assert re.fullmatch(not_over, kernel.run("%job fetch waits").error)
    in_python = kernel.run("from detrain_nb.jobs import find_job\nfind_job('waits').remove()").error
    assert re.fullmatch(r"JobError: job (\S+) is running: stop it first with find_job\('\1'\)\.stop\(\)", in_python), (
        in_python
    )
    assert "running" in kernel.run("%job list").rich()[0]
    assert "stopped" in kernel.run("%job stop waits").rich()[0]
    assert kernel.run("%job attach waits").error.startswith("JobFailed: ")
    again = kernel.run("%job restart waits")
    assert _without_id(again.text()) == "job waits-ID is running: %job logs -f waits-ID follows it\n", again.error
    assert "removed waits-" in kernel.run("%job rm --older-than 0").text()
    assert "JobError: job waits-" in kernel.run("%job rm waits").error
    assert kernel.run("%job stop waits --grace 0").status == "ok"
    assert "no job 'nosuch'" in kernel.run("%job rm waits nosuch").error
    assert "removed waits-" in kernel.run("%job rm waits").text()


@pytest.mark.thorough
def test_lines_of_hosts_begin_with_their_names(start_kernel: Any, testbed: Testbed, tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(f"Include {testbed.inventory.ssh_config}\n")
    kernel = start_kernel(HOME=str(tmp_path), **_folders_in(tmp_path))
    spec = tmp_path / "hosts.json"
    hosts = [{"host": name, "python": sys.executable, "devices": "cpu"} for name in ("h0", "h1")]
    source = {"script_text": "1", "setup": ["echo set up"]}
    spec.write_text(json.dumps({"name": "hosts", "nodes": hosts, "source": source}))
    followed = kernel.run(f"%%torchrun --spec {spec} -n 1 --follow\n{_SCRIPT}")
    assert followed.status == "ok", followed.error
    assert "[h0:setup] set up\n[h1:setup] set up\n[h0:0] rank 0" in followed.text()
    assert "[0-1] all say this\n" in followed.text()
    assert kernel.run("%job logs hosts --node h1").text().startswith("[h1:setup] set up\n[h1:1] rank 1 []")
    shown = kernel.run("%job show hosts").rich()[0]
    assert "h0: succeeded" in shown
    assert "h1: succeeded" in shown
    assert kernel.run("%job exec hosts -- echo there").text().count("] there") == 2
    assert kernel.run("%job rm hosts").status == "ok"
