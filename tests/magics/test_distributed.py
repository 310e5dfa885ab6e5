"""The magics in a real kernel: what a front end receives, and what it then shows."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

# ---- output


def test_identical_lines_and_values_stand_once_with_their_ranks(kernel: Any) -> None:
    outcome = kernel.run("%%distributed\nprint('hello')\nprint('rank', rank)\n'same'")
    assert outcome.text() == "[0-1] hello\n[0] rank 0\n[1] rank 1\n"
    assert outcome.rich() == ["[0-1] 'same'"]


def wait_for(path: Path) -> str:
    """A line of code with which a cell waits for a file."""
    return f"while not __import__('os').path.exists({str(path)!r}): time.sleep(.05)\n"


def test_lines_arrive_while_the_cell_runs_with_the_rank_before_them(kernel: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    code = f"%%rank 1\nprint('early')\n{wait_for(first)}print('late')\n{wait_for(second)}"
    outcome = kernel.run(code, touch_when={"early": first, "late": second})
    streams = [content["text"] for kind, content in outcome.live if kind == "stream"]
    assert streams == ["[1] early\n", "[1] late\n", "[1] early\n[1] late\n"]


def test_canonical_form_is_not_sent_again_where_it_stands_already(kernel: Any) -> None:
    outcome = kernel.run("%%rank 1\nprint('one')\n7")
    assert [kind for kind, _ in outcome.live] == ["stream", "display_data"]


def test_merge_all_and_rank0(kernel: Any) -> None:
    assert kernel.run("%%distributed --merge all\nprint('a')").text() == "[0] a\n[1] a\n"
    assert kernel.run("%%distributed --merge rank0\nprint('a')\n7").text() == "[0] a\n"


def test_quiet_shows_nothing_and_out_has_it_all(kernel: Any) -> None:
    assert kernel.run("%%distributed --quiet --out got\nprint('a')\nrank * 10").live == []
    assert kernel.run("got.values, got.stdout, got[1].value, sorted(got.seconds)").rich() == [
        "({0: 0, 1: 10}, {0: 'a\\n', 1: 'a\\n'}, 10, [0, 1])"
    ]
    [table] = kernel.run("got").rich("text/html")
    assert "<table>" in table


def test_redrawn_lines_move_in_place_a_line_a_rank(kernel: Any, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    steps = "for i in itertools.cycle(range(1, 7)):\n    print(f'\\r{i * 10}%', end='')\n    time.sleep(.15)\n"
    code = f"import itertools, os\n{steps}    if os.path.exists({str(seen)!r}): break\nprint('\\r70%')"
    moving = r"^\[0\] [1-6]0%\n\[1\] [1-6]0%$"
    outcome = kernel.run(f"%%distributed\n{code}", touch_when={moving: seen})
    assert seen.exists()
    assert outcome.shown == [("stdout", "[0-1] 70%\n")]


def test_colours_stay_and_other_controls_go(kernel: Any) -> None:
    outcome = kernel.run("%%rank 0\nprint('\\x1b[31mred\\x1b[0m\\x1b]0;title\\x07\\x1b[2J')")
    assert outcome.text() == "[0] \x1b[31mred\x1b[0m\n"


def test_logging_and_warnings_of_ranks_appear(kernel: Any) -> None:
    outcome = kernel.run("%%distributed\nimport logging, warnings\nlogging.warning('careful')\nwarnings.warn('old')")
    assert "[0-1] WARNING:root:careful\n" in outcome.text("stderr")
    assert "UserWarning: old" in outcome.text("stderr")


def test_figures_arrive_as_images_and_tables_as_html(kernel: Any) -> None:
    outcome = kernel.run("%%distributed\nimport matplotlib.pyplot as plt\nplt.plot([1, rank])\nprint('drawn')")
    assert outcome.text() == "[0-1] drawn\n[0]\n[1]\n"
    assert [image[:8] for image in outcome.rich("image/png")] == ["iVBORw0K"] * 2
    outcome = kernel.run("%%rank 0\nimport pandas as pd\npd.DataFrame({'a': [1]})")
    assert "<table" in outcome.rich("text/html")[0]


def test_javascript_of_a_rank_does_not_reach_the_notebook(kernel: Any) -> None:
    outcome = kernel.run("%%rank 0\nfrom IPython.display import Javascript, display\ndisplay(Javascript('alert(1)'))")
    assert outcome.rich("application/javascript") == []
    assert "alert" not in str(outcome.live)


def test_display_is_updated_and_cleared_as_in_any_cell(kernel: Any, tmp_path: Path) -> None:
    shown, updated = tmp_path / "shown", tmp_path / "updated"
    code = "%%rank 0\nfrom IPython.display import display, clear_output\n"
    update = f"h = display('a', display_id=True)\n{wait_for(shown)}h.update('b')\n{wait_for(updated)}"
    outcome = kernel.run(code + update, touch_when={r"\[0\] 'a'": shown, r"\[0\] 'b'": updated})
    assert outcome.rich() == ["[0] 'b'"]
    updates = [content["data"]["text/plain"] for kind, content in outcome.live if kind == "update_display_data"]
    assert updates == ["[0] 'b'"], "also while it runs"
    outcome = kernel.run(code + "print('old')\ntime.sleep(.3)\nclear_output(wait=True)\nprint('new')")
    assert outcome.text() == "[0] new\n"


def test_images_have_the_size_that_they_were_displayed_in(kernel: Any) -> None:
    """A figure for a high-resolution screen used to be shown twice as large."""
    png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    code = f"%%rank 0\nimport base64\nfrom IPython.display import Image, display\npng = base64.b64decode('{png}')\n"
    outcome = kernel.run(f"{code}display(Image(png, width=80))\nprint('between')\nImage(png, width=40, height=20)")
    shown = [content for kind, content in outcome.live if kind == "display_data"]
    sizes = [content["metadata"] for content in shown if "image/png" in content["data"]]
    assert sizes[-2:] == [{"image/png": {"width": 80}}, {"image/png": {"width": 40, "height": 20}}]
    assert all(not mime.startswith("application/vnd") for content in shown for mime in content["data"])


def test_late_output_goes_to_the_cell_that_caused_it(kernel: Any) -> None:
    code = "import threading\nthreading.Timer(.6, lambda: print('late')).start()"
    message_id = kernel.client.execute(f"%%rank 0\n{code}")
    after = kernel.client.execute("import time; time.sleep(1.2); print('local')")
    owners = {}
    while len(owners) < 2:
        message = kernel.client.get_iopub_msg(timeout=60)
        if message["msg_type"] == "stream":
            owners[message["content"]["text"]] = message["parent_header"]["msg_id"]
    assert owners == {"[0] late\n": message_id, "local\n": after}


@pytest.mark.parametrize("mode", ["live", "final"])
def test_what_is_stored_is_the_same_at_every_run(kernel: Any, mode: str) -> None:
    kernel.run(f"%distributed config output={mode}")
    code = "%%distributed\nfor i in range(40):\n    print('step', i)\n    print(i * rank, file=sys.stderr)\nrank"
    outcomes = [kernel.run(code) for _ in range(5)]
    kernel.run("%distributed config output=live")
    assert all(outcome.shown == outcomes[0].shown for outcome in outcomes)
    if mode == "final":
        assert all(not kind.startswith(("clear", "update")) for outcome in outcomes for kind, _ in outcome.live)


def test_cap_says_how_many_more_and_how_to_read_them(kernel: Any) -> None:
    outcome = kernel.run("%%distributed --max-lines 600\nfor i in range(5000): print(i)")
    lines = outcome.text().splitlines()
    assert len(lines) < 700
    [more] = [line for line in lines if line.startswith("[0] ...")]
    command = re.search(r"%distributed log --cell \d+ --rank 0", more)
    assert command
    assert re.search(r"4,700 more lines", more)
    assert kernel.run(command[0]).text() == "".join(f"[0] {i}\n" for i in range(5000))


def test_log_shows_figures_values_and_errors_of_a_cell_again(kernel: Any) -> None:
    code = "import matplotlib.pyplot as plt\nprint('drawn')\nplt.plot([0, rank])\nrank"
    first = kernel.run(f"%%distributed\n{code}")
    assert kernel.run("%distributed log").shown == first.shown
    kernel.run("%%distributed\nprint('before')\n1 / 0")
    again = kernel.run("%distributed log --rank 1")
    assert again.text() == "[1] before\n"
    assert "ZeroDivisionError: division by zero" in again.text("stderr")


def test_log_says_what_it_could_not_keep(kernel: Any) -> None:
    kernel.run("from pathlib import Path\nfrom detrain_nb import current_session\nlog = current_session().log._output")
    kernel.run("in_the_way = [log._path(len(In) + i) for i in range(3)]\nfor path in in_the_way: path.mkdir()")
    assert "new output is shown, but missing in %distributed log" in (
        kernel.run("%%distributed\nprint('shown')").text("stderr")
    )
    assert re.search(r"the log has nothing of cell \d+: Is a directory", kernel.run("%distributed log").error)
    assert "print('shown') (output is incomplete: Is a directory)" in kernel.run("%distributed log --list").text()
    kernel.run("for path in in_the_way: path.rmdir()")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("%%distributed\n1 / 0", "no debugger can be opened: inspect their variables with %%distributed, or"),
        ("%%distributed\n1 +", "the error comes from the magic, not from code that ran in the notebook"),
        ("%pull nothing", "the error comes from the magic"),
        ("%pull", "the error comes from the magic"),
    ],
)
def test_debugger_after_an_error_of_a_magic_is_refused_in_a_line_and_asks_nothing(
    kernel: Any, code: str, said: str
) -> None:
    error = kernel.run(code).error
    assert said in kernel.run("%debug", timeout_s=10).text("stderr")
    assert kernel.run("%tb").error == error
    kernel.run("%pdb on")
    shown = kernel.run(code, timeout_s=10)
    kernel.run("%pdb off")
    assert (said in shown.text("stderr")) == ("UsageError" not in error)


def test_debugger_in_a_terminal_is_refused_after_an_error_of_a_magic_and_opens_after_one_of_the_user() -> None:
    lines = "%load_ext detrain_nb\n%pull x\n%debug\n1 / 0\n%debug\nq\nprint('goes on')\n"
    command = [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--colors=nocolor"]
    shown = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60, check=True)
    assert shown.stderr.count("there is nothing to debug") == 1
    assert shown.stdout.count("ipdb>") == 1
    assert "goes on" in shown.stdout


def test_log_is_of_the_last_cell_and_lists_all(kernel: Any) -> None:
    kernel.run("%%distributed\nprint('said')")
    kernel.run("%%distributed -r 1\n\nquiet = 1\nother = 2")
    silent = kernel.run("%distributed log")
    number, printed = re.findall(
        r"cell (\d+), the last one, printed nothing; cells that did: .*?(\d+) \(--list", silent.error
    )[0]
    listed = kernel.run("%distributed log --list").text().splitlines()
    assert listed[-2:] == [f"cell {printed}: print('said')", f"cell {number}: [1] quiet = 1 (printed nothing)"]
    assert kernel.run(f"%distributed log --cell {printed}").text() == "[0-1] said\n"


def test_errors_name_the_cell_by_its_prompt(kernel: Any) -> None:
    message_id = kernel.client.execute("%%rank 0\n1 / 0", stop_on_error=False)  # otherwise it may abort the next cell
    reply = kernel.reply_to(message_id)
    assert f"cell {reply['execution_count']}, line 2" in "\n".join(reply["traceback"])


def test_nothing_is_lost_without_a_cap(kernel: Any) -> None:
    outcome = kernel.run("%%rank 0 --max-lines 0\nfor i in range(30_000): print(i)")
    assert (outcome.status, outcome.error) == ("ok", "")
    assert outcome.text() == "".join(f"[0] {i}\n" for i in range(30_000))


# ---- errors and stops


def test_error_shows_the_users_lines_and_fails_the_cell(kernel: Any) -> None:
    outcome = kernel.run("%%distributed\nprint('before')\nif rank == 1:\n    raise ValueError('bad batch')")
    assert outcome.status == "error"
    assert outcome.text() == "[0-1] before\n"
    assert "rank 1 on" in outcome.error
    assert "line 4, in <module>\n  |     raise ValueError('bad batch')\n  | ValueError: bad batch" in outcome.error
    assert "magics" not in outcome.error


def test_syntax_error_is_found_before_anything_is_sent(kernel: Any) -> None:
    outcome = kernel.run("%%distributed\nx = 99\nx +")
    assert outcome.error == "  line 3\n    x +\n       ^\nSyntaxError: invalid syntax"
    assert kernel.run("%%rank 0\nx").rich() == ["[0] 1"]


def test_collectives_are_compared_where_the_settings_say_so(kernel: Any) -> None:
    kernel.run("%%distributed\ndist.barrier()")
    assert kernel.run("%distributed config check=on").text().startswith("the process groups are recreated before the ")
    assert kernel.run("%distributed config check=on").text() == "", "nothing changes"
    shown = kernel.run("%%distributed\ndist.all_reduce(torch.ones(3 + rank))").error
    assert "different collectives; this rank called all_reduce (SUM) of Float [3]; nothing was sent" in shown
    assert "different collectives; this rank called all_reduce (SUM) of Float [4]; nothing was sent" in shown
    kernel.run("%distributed config check=off")
    cell = "%%distributed\nt = torch.ones(1).int() if rank else torch.ones(1)\ndist.all_reduce(t)\nlen(t)"
    assert kernel.run(cell).rich() == ["[0-1] 1"], "gloo adds what it takes for numbers"


def test_stop_button_interrupts_the_ranks_and_variables_stay(kernel: Any) -> None:
    outcome = kernel.run("%%distributed\nprint('going')\nwhile True: time.sleep(.01)", interrupt_when="[1] going")
    assert outcome.status == "error"
    assert "KeyboardInterrupt\nall ranks stopped and kept their variables" in outcome.error
    assert kernel.run("%%distributed\nx").rich() == ["[0] 1", "[1] 2"]


def test_cell_says_who_is_waited_for_and_where(kernel: Any, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    waits = f"%%distributed\nif rank == 1:\n    {wait_for(seen)}"
    outcome = kernel.run(waits, touch_when={r"^waiting for rank 1 \(line 3\)$": seen})
    assert seen.exists()
    assert outcome.shown == []


def test_timeout_stops_the_cell(kernel: Any) -> None:
    outcome = kernel.run("%%distributed --timeout 0.5\nwhile True: pass")
    assert outcome.status == "error"
    assert "did not end within 0.5 s on ranks 0-1 (line 2): all ranks stopped" in outcome.error


# ---- the other magics


def test_pull_and_push(kernel: Any) -> None:
    kernel.run("%pull x")
    assert kernel.run("x").rich() == ["{0: 1, 1: 2}"]
    kernel.run("%pull x -r 1 --as one")
    assert kernel.run("one").rich() == ["2"]
    kernel.run("word, words = 'a', {'b': [1.5]}\n%push word,words")
    assert kernel.run("%%distributed\nword, words").rich() == ["[0-1] ('a', {'b': [1.5]})"]


def test_status_is_a_table(kernel: Any) -> None:
    outcome = kernel.run("%distributed status")
    [table], [text] = outcome.rich("text/html"), outcome.rich()
    assert table.count("<tr>") == 3
    assert re.search(r"0 +this machine +\d+ +cpu +idle +\d+ MB +\d\.\d{3} s", text)


def test_vars_is_a_view_that_leaves_a_table(kernel: Any) -> None:
    kernel.run("%%distributed\nlesson_1, lesson_2 = rank, torch.ones(2)")
    outcome = kernel.run("%distributed vars lesson_*")
    assert (outcome.status, outcome.error) == ("ok", "")
    [table], [text] = outcome.rich("text/html"), outcome.rich()
    assert table.count("<tr>") == 3 and len(outcome.rich("application/vnd.jupyter.widget-view+json")) == 1
    assert re.search(r"lesson_1 +int +0 … 1 +≠ differs on every rank\nlesson_2 +Tensor +\[2\] .* = same on 2", text)
    assert "1 name on 1 rank" in kernel.run("%distributed vars lesson_1,unheard_of -r 1").rich()[0]
    assert "no variable matches 'nothing'" in kernel.run("%distributed vars nothing").rich()[0]
    assert "rank 7 does not exist" in kernel.run("%distributed vars -r 7").error


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("%%distributed -n 0\nx", "0 ranks: give 1 or more"),
        ("%%distributed -n x\nx", "argument -n: 'x' is not a whole number"),
        (
            "%%distributed -n 4\nx",
            "the session has 2 ranks; to have 4, %distributed restart -n 4 (all variables are lost)",
        ),
        ("%%distributed -r 7\nx", "rank 7 does not exist: the session has 2 ranks, 0-1"),
        ("%%rank\nx", "the following arguments are required: RANKS"),
        ("%%distributed --nosuch\nx", "unknown option --nosuch"),
        ("%%distributed --merge some\nx", "--merge 'some': give one of same, all, rank0"),
        ("%%distributed --timeout -1\nx", "-1 seconds: give more than 0"),
        ("%%distributed --out 1a\nx", "--out '1a' is not a valid variable name"),
        ("%%distributed --out class\nx", "--out 'class' is not a valid variable name"),
        ("%%distributed 'x\nx", "No closing quotation"),
        ("%%distributed\n   ", "the cell is empty"),
        ("%%distributed", "the cell body is empty"),
        (
            "%distributed start -n 3",
            "was started with another -n; to change that, %distributed restart -n 3 (all variables are lost)",
        ),
        (
            "%distributed start -n 3 --seed 5",
            "the session with 2 ranks was started with another -n, --seed; to change that, %distributed",
        ),
        ("%distributed nosuch", "unknown command 'nosuch': choose from start, status"),
        ("%distributed status now", "unexpected argument 'now': leave it out"),
        ("%distributed doctor", "no session is running on other machines: name hosts with --nodes"),
        ("%distributed put x --nodes gpu1", "'gpu1' is not a node of this session; its nodes: only this machine"),
        ("%%distributed -r gpu1\nx", "no rank or host is called 'gpu1': give ranks like 0,2 or 0-3 or -1 or all"),
        ("%distributed config output=loud", "output must be one of live, final, not 'loud'"),
        ("%distributed config nosuch=1", "give KEY=VALUE with KEY one of"),
        ("%distributed config max_lines=-1", "max_lines must be a number, 0 or more"),
        ("%distributed log --cell 9999", "cell 9999 printed nothing"),
        ("%push nosuch", "the notebook has no variable 'nosuch'"),
        ("%pull a,b --as c", "--as renames a single variable"),
    ],
)
def test_wrong_line_is_one_line_and_changes_nothing(kernel: Any, code: str, line: str) -> None:
    outcome = kernel.run(code)
    assert outcome.status == "error"
    assert line in outcome.error
    assert outcome.error.strip().count("\n") == 0
    assert outcome.error.startswith("UsageError: ")


def test_same_start_again_goes_on_with_the_session_that_runs(kernel: Any) -> None:
    kernel.run("%%distributed\nkept = 5")
    outcome = kernel.run("%distributed start -n 2")
    assert outcome.status == "ok", outcome.error
    assert "is already running with 2 ranks" in outcome.text()
    assert kernel.run("%%distributed\nkept").rich() == ["[0-1] 5"]


def test_folder_that_the_ranks_use_themselves_is_not_put(kernel: Any) -> None:
    for line in ("%distributed put .", "%distributed put ./ ././"):
        outcome = kernel.run(line)
        assert outcome.status == "ok", outcome.error
        assert outcome.text() == "nothing to copy: the ranks run on this machine and use the folder itself\n"
    assert "would be copied into itself" in kernel.run("%distributed put . --to deep").error


def test_data_check_here_fails_for_what_is_not_there(kernel: Any, tmp_path: Path) -> None:
    outcome = kernel.run(f"%distributed data check {tmp_path}/nosuch")
    assert (outcome.status, outcome.error.strip().count("\n")) == ("error", 0)
    assert "nosuch: no node has it" in outcome.error
    assert f"{tmp_path}: the same on 1 node" in kernel.run(f"%distributed data check {tmp_path}").rich()[0].splitlines()


def test_unknown_variable_is_refused_with_the_nearest_name(kernel: Any) -> None:
    kernel.run("%%distributed\nlosses = []")
    assert "no variable 'losess': did you mean 'losses'?" in kernel.run("%pull losess").error
    kernel.run("losses = []")
    assert "the notebook has no variable 'losess': did you mean 'losses'?" in kernel.run("%push losess").error
    assert kernel.run("%push oepn").error.strip().endswith("the notebook has no variable 'oepn'")


@pytest.mark.parametrize(
    "code",
    [
        "%distributed --help", "%distributed", "%distributed start --help", "%pull -h", "%pull --help", "%push --help",
        "%broadcast --help", "%%distributed --help", "%%distributed -h", "%%distributed -n 2 --help\n", "%%rank --help",
        "%%distributed --help\nx = 1", "%distributed config --help", "%distributed data --help",
    ],
)  # fmt: skip
def test_help_is_printed(kernel: Any, code: str) -> None:
    outcome = kernel.run(code)
    assert outcome.status == "ok"
    assert outcome.text().startswith("usage: %")


def test_question_mark_shows_the_options(kernel: Any) -> None:
    payload = kernel.reply_to(kernel.client.execute("%distributed?"))["payload"]
    assert "%distributed start [--nodes NODES] [-n N]" in payload[0]["data"]["text/plain"]


# ---- completion


def _complete(kernel: Any, code: str) -> list[str]:
    reply = kernel.client.complete(code, len(code), reply=True, timeout=20)["content"]
    start = reply["cursor_start"]
    assert all(match.startswith(code[start:]) for match in reply["matches"])
    matches: list[str] = reply["matches"]
    return matches


def test_names_of_the_ranks_complete_in_the_body(kernel: Any) -> None:
    kernel.run("%%distributed\nonly_on_ranks = {'a': 1}\nonly_here = 1")
    kernel.run("only_in_notebook = 1")
    assert _complete(kernel, "%%distributed\nonly_") == ["only_here", "only_on_ranks"]
    assert _complete(kernel, "%%distributed\nonly_in") == []
    assert "world_size" in _complete(kernel, "%%rank 0\nworld_")


def test_variables_complete_where_they_are_taken_from(kernel: Any) -> None:
    kernel.run("%%distributed\nonly_there, only_too = 1, 2")
    kernel.run("%pull only_too --as only_in_notebook")
    for magic in ("%pull", "%broadcast"):
        assert {"only_there", "only_too"} <= set(_complete(kernel, f"{magic} only_t"))
        assert "only_there,only_too" in _complete(kernel, f"{magic} only_there,only_to")
        found = _complete(kernel, f"{magic} ")
        assert {"only_there", "--ranks"} <= set(found)
        assert not {"print", "import", "only_in_notebook"} & set(found)
    assert "only_in_notebook" in _complete(kernel, "%push only_in")


def test_options_complete_on_the_first_line(kernel: Any) -> None:
    assert _complete(kernel, "%%distributed --m") == ["--max-lines", "--merge"]
    assert _complete(kernel, "%distributed sta") == ["start", "status"]
    assert _complete(kernel, "%distributed start --no-i") == ["--no-init"]


def test_help_on_a_name_comes_from_the_ranks(kernel: Any) -> None:
    kernel.run("%%distributed\ndef on_ranks():\n    'Do it on ranks.'")
    code = "%%distributed\non_ranks"
    found = kernel.client.inspect(code, len(code), reply=True, timeout=20)["content"]
    assert "Do it on ranks." in found["data"]["text/plain"]


# ---- sessions and kernels


def test_choice_of_ranks_that_there_will_not_be_starts_none(start_kernel: Any) -> None:
    kernel = start_kernel()
    assert "5" in kernel.run("%%distributed -n 2 -r 5\n1").error
    for line in ("%%distributed -r alice@gpu1,gpu2", "%%rank alice@gpu1,gpu2"):
        refused = kernel.run(f"{line}\n1").error
        assert "no rank or host is called 'alice@gpu1': start a session on hosts with " in refused
        assert refused.rstrip().endswith("%distributed start --nodes alice@gpu1,gpu2")
    assert "no session is running" in kernel.run("%distributed status").error


@pytest.mark.slow
def test_session_is_named_after_its_notebook(start_kernel: Any, runtime_folder: Path) -> None:
    kernel = start_kernel(JPY_SESSION_NAME="/home/x/My notebook (1).ipynb")
    other = start_kernel(JPY_SESSION_NAME="/elsewhere/My notebook (1).ipynb")
    for started in (kernel, other):
        assert started.run("%distributed start -n 1 --no-init").status == "ok"
    names = re.findall(r"^(\S+)  agent pid \d+", kernel.run("%distributed list").text(), re.MULTILINE)
    mine = [name for name in names if name.startswith("My-notebook-1-")]
    assert len(set(mine)) == 2
    assert kernel.run("%distributed stop").status == "ok"


@pytest.mark.slow
def test_restart_keeps_the_options_and_loses_the_variables(start_kernel: Any) -> None:
    kernel = start_kernel()
    kernel.run("%distributed start -n 1 --no-init --env MINE=1")
    kernel.run("%%distributed\ny = 1")
    assert kernel.run("%distributed restart -n 2").status == "ok"
    assert kernel.run("%%distributed\nimport os\nos.environ['MINE'], world_size, 'y' in globals()").rich() == [
        "[0-1] ('1', 2, False)"
    ]
    assert kernel.run("%distributed stop").status == "ok"
    assert "no session is running" in kernel.run("%pull x").error


@pytest.mark.slow
@pytest.mark.parametrize("how", ["shutdown", "kill"])
def test_end_of_the_kernel_ends_everything(start_kernel: Any, how: str) -> None:
    kernel = start_kernel(MARK_OF_THIS_TEST=how, DETRAIN_NB_LINGER="1")
    code = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n!sleep 600 &"
    assert kernel.run(f"%%distributed -n 2\n{code}").status == "ok"
    assert len(_marked(how)) >= 1 + 1 + 1 + 2 + 2 + 2
    kernel.close(now=how == "kill")
    deadline = time.monotonic() + 60
    while left := _marked(how):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


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
def test_extension_unloads_and_loads_again(start_kernel: Any) -> None:
    kernel = start_kernel()
    kernel.run("%%distributed -n 1\n1")
    assert kernel.run("%load_ext detrain_nb").status == "ok"
    assert kernel.run("%unload_ext detrain_nb").status == "ok"
    assert "not found" in kernel.run("%distributed status").error
    assert kernel.run("%load_ext detrain_nb\n%distributed list").status == "ok"
    kernel.run("%%distributed\nkept = 5")
    assert "the session keeps running" in kernel.run("%reload_ext detrain_nb").text()
    assert kernel.run("%%distributed\nkept").status == "ok"


# ---- what other tools of IPython do with a cell


def test_capture_takes_text_and_outputs_and_nothing_is_shown(kernel: Any) -> None:
    code = "%%distributed\nprint('said')\nprint('warned', file=sys.stderr)\nrank"
    assert kernel.run(f"%%capture cap\n{code}").shown == []
    captured = kernel.run("print((cap.stdout, cap.stderr, [o.data['text/plain'] for o in cap.outputs]))").text()
    assert captured == "('[0-1] said\\n', '[0-1] warned\\n', ['[0] 0', '[1] 1'])\n"
    assert kernel.run(f"%%capture --no-stderr\n{code}").shown == [("stderr", "[0-1] warned\n")]
    redirected = (
        "import contextlib, io\ntext = io.StringIO()\nwith contextlib.redirect_stdout(text):\n"
        "    get_ipython().run_cell_magic('distributed', '', \"print('said')\")\ntext.getvalue()"
    )
    assert kernel.run(redirected).shown == [("rich", {"text/plain": "'[0-1] said\\n'"})]


def test_lines_of_magics_take_the_notebooks_variables_as_ipython_does(kernel: Any) -> None:
    kernel.run("first, who = 0, {'last': 1}")
    assert kernel.run("%%rank $first\nprint('here')").text() == "[0] here\n"
    assert kernel.run("%%distributed -r {who['last']} --merge all\nprint('here')").text() == "[1] here\n"
    kernel.run("%pull x -r {first + 1}")
    assert kernel.run("x").rich() == ["2"]
    unknown = kernel.run("%distributed put $NOBODY/{a,b}.txt")
    assert "$NOBODY/{a,b}.txt" in unknown.error


def test_comment_behind_a_line_is_none_of_its_words(kernel: Any) -> None:
    assert kernel.run("%%distributed -r 0  # don't ask\nprint('a')").text() == "[0] a\n"
    assert kernel.run("%distributed start # bare: how many run already is not asked").text().endswith(" ranks\n")
    assert "with another --name;" in kernel.run("%distributed start --name a#b").error


def test_push_of_what_the_ranks_begin_with_is_said_and_of_nothing_refused(kernel: Any) -> None:
    assert "'%push: ',' names no variable" in kernel.run("%push ,").error.replace("UsageError: ", "'")
    words = kernel.run("rank = 7\n%push rank -r 1").text("stderr")
    assert words.startswith("push has overwritten rank on rank 1, which the session had set")
    assert kernel.run("%%distributed\n1").text("stderr") == "", "it has been said"
    set_back = "%%rank 1\nimport os; rank = int(os.environ['RANK'])"
    kernel.run(set_back)
    words = kernel.run("%broadcast rank").text("stderr")
    assert words.startswith("broadcast has overwritten rank on rank 1, which the session had set")
    assert words.count("\n") == 1
    kernel.run(set_back)
