"""Redrawn output: the progress line of a copy, and one block of lines for each rank that draws."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from detrain_nb.magics.screen import TextScreen
from detrain_nb.magics.transcript import Text

from detrain_nb.text import CopyProgress

# A copy in {parts} steps that reports progress as put and get do, in the real kernel; nothing is really copied.
_COPY = """
import time
commands = get_ipython().detrain_nb_magics[0]._commands._hosts
with commands._progress("put") as progress:
    for part in range({parts} + 1):
        progress(part * 3 // {parts}, part * 30_000_000, {parts} * 30_000_000)
        if part == {fails_at}:
            raise OSError("the disk is full")
        time.sleep(0.05)
print("gpu1: 3 files")
"""
_LINE = re.compile(r"put \[(#*)(\.*)\] +(\d+) %, ([\d.]+ [MG]B) of ([\d.]+ [MG]B)(?:, ([\d.,]+ [MG]B)/s)?, (\d) files?")


class _Drawn:
    """The progress lines of a copy that reports at chosen seconds."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now = 100.0
        self._progress = CopyProgress("get", self.lines.append, now=lambda: self.now)

    def tell(self, at_s: float, files: int, done: int, total: int) -> None:
        self.now = 100.0 + at_s
        self._progress(files, done, total)


def test_line_has_bar_share_bytes_rate_and_files() -> None:
    drawn = _Drawn()
    drawn.tell(2.0, 1, 500_000_000, 2_000_000_000)
    assert drawn.lines == ["get [#######.......................]  25 %, 500 MB of 2 GB, 250 MB/s, 1 file"]


def test_rate_is_that_of_the_last_seconds() -> None:
    drawn = _Drawn()
    for second in range(1, 21):
        drawn.tell(second, 0, 10_000_000 * min(second, 10), 1_000_000_000)
    assert "10 MB/s" in drawn.lines[9]
    assert drawn.lines[-1].endswith("10 %, 100 MB of 1 GB, 0 B/s, 0 files")


def test_line_is_drawn_a_few_times_a_second_and_when_all_is_there() -> None:
    drawn = _Drawn()
    for step in range(1000):
        drawn.tell(step / 1000, 0, step, 1000)
    assert len(drawn.lines) == 5
    drawn.tell(1.0, 1, 1000, 1000)
    assert drawn.lines[-1].startswith("get [##############################] 100 %, 1 kB of 1 kB, ")


def test_hundred_per_cent_is_all_of_it() -> None:
    drawn = _Drawn()
    drawn.tell(1.0, 0, 1_999_999, 2_000_000)
    assert " 99 %" in drawn.lines[0]


def test_what_has_no_size_yet_is_at_the_beginning() -> None:
    drawn = _Drawn()
    drawn.tell(0.0, 0, 0, 0)
    assert drawn.lines == ["get [..............................]   0 %, 0 B of 0 B, 0 files"]


def test_front_end_has_one_line_that_moves_to_the_end_and_goes(kernel: Any) -> None:
    outcome = kernel.run(_COPY.format(parts=40, fails_at=-1))
    drawn = [content for kind, content in outcome.live if kind.endswith("display_data")]
    assert [kind for kind, _ in outcome.live if kind == "display_data"] == ["display_data"], "one line"
    assert len({content["transient"]["display_id"] for content in drawn}) == 1
    assert drawn.pop()["data"] == {}, "it is gone in the end: an empty text would leave a blank line"
    texts = [content["data"]["text/plain"] for content in drawn]
    found = [match.groups() for match in map(_LINE.fullmatch, texts) if match]
    assert len(found) == len(texts)
    assert len(found) >= 4
    shares = [int(groups[2]) for groups in found]
    assert shares == sorted(shares)
    assert (shares[-1], found[-1][1], found[-1][3]) == (100, "", found[-1][4])
    assert all(groups[5] for groups in found)
    assert outcome.text() == "gpu1: 3 files\n"
    assert outcome.rich() == []


def test_copy_that_fails_leaves_no_line(kernel: Any) -> None:
    outcome = kernel.run(_COPY.format(parts=40, fails_at=30))
    drawn = [content["data"] for kind, content in outcome.live if kind.endswith("display_data")]
    assert drawn[-1] == {}
    assert not any("100 %" in data.get("text/plain", "") for data in drawn)
    assert "the disk is full" in outcome.error


def test_short_copy_and_final_output_have_no_line(kernel: Any) -> None:
    assert kernel.run(_COPY.format(parts=2, fails_at=-1)).rich() == []
    kernel.run("%distributed config output=final")
    assert kernel.run(_COPY.format(parts=20, fails_at=-1)).rich() == []
    kernel.run("%distributed config output=live")


_NESTED = """%%distributed {options}
from tqdm import tqdm, trange
form = dict(bar_format="{{desc}}{{n}}/{{total}}", mininterval=0)
for epoch in trange(2, desc="epochs ", **form):
    for step in trange(30, desc="steps ", leave=False, **form):
        time.sleep(0.01)
        if step == 20:
            tqdm.write(f"epoch {{epoch}}")
print("done")
"""


def test_nested_bars_of_ranks_are_a_block_each_and_no_errors(kernel: Any) -> None:
    outcome = kernel.run(_NESTED.format(options=""))
    assert outcome.text() == "[0-1] epoch 0\n[0-1] epoch 1\n[0-1] epochs 2/2\n[0-1] done\n"
    assert outcome.text("stderr") == ""
    blocks = [content["data"].get("text/plain", "") for kind, content in outcome.live if kind.endswith("display_data")]
    both = re.compile(r"\[0\] epochs [01]/2\n\[0\] steps \d+/30\n\[1\] epochs [01]/2\n\[1\] steps \d+/30")
    assert any(map(both.fullmatch, blocks)), blocks
    assert max(block.count("\n") for block in blocks) <= 4


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("--merge rank0", "[0] epoch 0\n[0] epoch 1\n[0] epochs 2/2\n[0] done\n"),
        ("--quiet", ""),
    ],
)
def test_bars_follow_the_options_of_a_cell(kernel: Any, options: str, shown: str) -> None:
    outcome = kernel.run(_NESTED.format(options=f"{options} --out said"))
    assert (outcome.text(), outcome.text("stderr")) == (shown, "")
    assert kernel.run("%distributed log --rank 1").text() == "[1] epoch 0\n[1] epoch 1\n[1] epochs 2/2\n[1] done\n"
    assert kernel.run("print(said[1].stdout, '\\x1b' in said[1].stderr)").text() == "epoch 0\nepoch 1\ndone\n False\n"


def test_bars_of_notebooks_are_text_on_a_rank(kernel: Any) -> None:
    code = "%%distributed\nimport tqdm.auto, tqdm.notebook\nfrom tqdm.notebook import tqdm as bar, trange\n"
    form = 'bar_format="{n}/{total}"'
    code += f"for _ in trange(2, {form}): pass\nfor _ in bar([1] * 3, {form}, display=True): pass\n"
    code += f"for _ in tqdm.auto.tqdm([1] * 4, {form}): pass"
    outcome = kernel.run(code)
    assert (outcome.text(), outcome.text("stderr"), outcome.rich()) == ("[0-1] 2/2\n[0-1] 3/3\n[0-1] 4/4\n", "", [])


def test_widgets_of_a_rank_say_once_that_they_are_not_carried(kernel: Any) -> None:
    code = "%%distributed\nimport ipywidgets\nfor _ in range(3): display(ipywidgets.IntSlider())\nipywidgets.Label('x')"
    outcome = kernel.run(code)
    line = "[0-1] widgets on ranks cannot reach the notebook: create them in a cell without %%distributed\n"
    assert outcome.text("stderr") == line
    assert outcome.rich() == [*["[0-1] IntSlider(value=0)"] * 3, "[0-1] Label(value='x')"]


def test_frames_that_go_up_again_leave_the_last_one(kernel: Any) -> None:
    """The output is that of rich, which reads from the environment whether it may redraw, and the size."""
    code = r"""%%distributed
print(os.environ["TTY_COMPATIBLE"], os.environ["COLUMNS"], os.environ["LINES"])
up, frame = "\r\x1b[2K\x1b[1A\x1b[2K", "loading {0}\n\x1b[32mtraining\x1b[0m {0}"
print("\x1b[?25l" + frame.format(0), end="", flush=True)
for i in range(1, 20):
    time.sleep(0.02)
    print(up + ("said at ten\n" if i == 10 else "") + frame.format(i), end="", flush=True)
print("\n\x1b[?25h", end="")
print("\r\x1b[2Kwaiting", end="", flush=True)
time.sleep(0.2)
print("\r\x1b[2K\x1b[?25h", end="")
print("no newline", rank, end="")
"""
    outcome = kernel.run(code)
    shown = ["[0-1] 1 80 24", "[0-1] said at ten", "[0-1] loading 19", "[0-1] \x1b[32mtraining\x1b[0m 19"]
    assert outcome.text().splitlines() == [*shown, "[0] no newline 0", "[1] no newline 1"]


def test_start_says_how_far_it_is_until_the_ranks_are_up(kernel: Any) -> None:
    kernel.run("%distributed stop --cold")
    started = kernel.run("%distributed start -n 2")
    drawn = [content["data"].get("text/plain", "") for kind, content in started.live if kind.endswith("display_data")]
    assert any(re.fullmatch(r"importing torch: [01] of 2 ranks are up", line) for line in drawn), drawn
    assert drawn[-1] == ""
    assert started.rich() == []
    assert re.fullmatch(r"<Session '\S+': 2 ranks on cpu, running>\n", started.text())


def test_far_more_ranks_than_there_is_room_for_are_asked_about(kernel: Any) -> None:
    kernel.run("%distributed stop")
    for line in ("%%distributed -n 1000\n1", "%distributed start -n 1000"):
        refused = kernel.run(line)
        assert re.match(
            r"UsageError: 1,000 ranks on this machine, which has \d+ processors? and [\d.]+ GB", refused.error
        )
        assert "start at most" in refused.error and "--force" in refused.error
        assert len(refused.error.strip().splitlines()) == 1
    assert "no session is running" in kernel.run("%distributed status").error
    assert kernel.run("%%distributed -n 2\nimport time\nx = rank + 1").status == "ok"


class _Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_has_the_line_at_its_foot(monkeypatch: pytest.MonkeyPatch) -> None:
    out = _Tty()
    monkeypatch.setattr("sys.stdout", out)
    screen = TextScreen()
    screen.set_transient("[0] half a line\nwaiting for rank 0")
    screen.set_transient("waiting for rank 0")
    screen.show(Text("stdout", "done\n"))
    screen.close()
    assert out.getvalue() == "\r\x1b[Kwaiting for rank 0\r\x1b[Kdone\n"
