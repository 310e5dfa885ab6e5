"""Lines of ranks: kept within bounds, and merged into a form that is the same at every run."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from detrain_nb.magics.render import LiveCell, RenderOptions
from detrain_nb.magics.screen import CapturedScreen, KernelScreen, TextScreen
from detrain_nb.magics.transcript import Rich, Text, Transcript, beginning_of, canonical, merge_lines, rich_items
from hypothesis import given
from hypothesis import strategies as st

from ..session.soon import assert_soon, interrupted


def _transcripts(said: dict[int, list[tuple[str, list[str]]]], **limits: int) -> dict[int, Transcript]:
    transcripts = {rank: Transcript(max_lines=0, max_chars=0, **limits) for rank in said}
    for rank, parts in said.items():
        for stream, lines in parts:
            transcripts[rank].add_lines(stream, lines)
    return transcripts


def _text(items: list[Text | Rich]) -> str:
    return "".join(item.text for item in items if isinstance(item, Text))


def _canonical(transcripts: dict[int, Transcript], merge: str = "same") -> list[Text | Rich]:
    return canonical(transcripts, merge=merge, how_to_read={rank: f"log {rank}" for rank in transcripts})


def test_lines_that_ranks_share_stand_once_where_they_belong() -> None:
    said = {
        0: [("stdout", ["start", "loss 0", "save", "end"])],
        1: [("stdout", ["start", "loss 1", "end"])],
        2: [("stdout", ["start", "loss 2", "end"])],
    }
    assert _text(_canonical(_transcripts(said))).splitlines() == [
        "[0-2] start", "[0] loss 0", "[0] save", "[1] loss 1", "[2] loss 2", "[0-2] end",
    ]  # fmt: skip


def test_merge_all_keeps_every_ranks_lines_and_rank0_only_the_first_ranks() -> None:
    transcripts = _transcripts({1: [("stdout", ["a"])], 3: [("stdout", ["a"])]})
    assert _text(_canonical(transcripts, "all")) == "[1] a\n[3] a\n"
    assert _text(_canonical(transcripts, "rank0")) == "[1] a\n"


def test_lines_of_both_streams_stand_in_the_order_in_which_they_were_written() -> None:
    transcripts = {rank: Transcript(max_lines=0, max_chars=0) for rank in (0, 1)}
    for transcript in transcripts.values():  # the lines of each stream arrive in order
        transcript.add_lines("stderr", ["warn", "again"], [1, 3])
        transcript.add_lines("stdout", ["a", "b", "c"], [0, 2, 4])
    transcripts[1].add_lines("stderr", ["last"], [5])
    shown = [("stdout", "a"), ("stderr", "warn"), ("stdout", "b"), ("stderr", "again"), ("stdout", "c")]
    assert _canonical(transcripts) == [
        *(Text(stream, f"[0-1] {line}\n") for stream, line in shown),
        Text("stderr", "[1] last\n"),
    ]


def test_streams_that_take_very_many_turns_stand_one_below_the_other() -> None:
    transcript = Transcript(max_lines=0, max_chars=0)
    for step in range(100):
        transcript.add_lines(("stdout", "stderr")[step % 2], [str(step)], [step])
    first, second = _canonical({0: transcript})
    assert (first, second) == (
        Text("stdout", "".join(f"[0] {step}\n" for step in range(0, 100, 2))),
        Text("stderr", "".join(f"[0] {step}\n" for step in range(1, 100, 2))),
    )


def test_bars_of_stderr_are_no_errors() -> None:
    said = {rank: [("stdout", ["a"]), ("drawn", ["100%"]), ("stderr", ["warn"]), ("drawn", ["bar"])] for rank in (0, 1)}
    assert _canonical(_transcripts(said)) == [
        Text("stdout", "[0-1] a\n[0-1] 100%\n"),
        Text("stderr", "[0-1] warn\n"),
        Text("stdout", "[0-1] bar\n"),
    ]


def test_bar_stands_where_it_ended_among_what_was_printed_and_logged() -> None:
    sent: list[dict[str, Any]] = []
    cell = LiveCell(_screen_into(sent), (0,), 1, RenderOptions(is_live=False))
    for stream, text in (
        ("stdout", "begin\n"),
        ("stderr", "\r 0%"),
        ("stdout", "step 1\n"),
        ("stderr", "\r50%"),
        ("stdout", "step 2\n"),
        ("stderr", "\r99%\n"),
        ("stderr", "warning\n"),
        ("stdout", "end\n"),
    ):
        cell.output(0, stream, text)
    cell.finish({})
    lines = ["begin", "step 1", "step 2", "99%", "warning", "end"]
    assert _standing(sent) == "".join(f"[0] {line}\n" for line in lines)
    assert [message["name"] for message in sent if message["kind"] == "stream"] == ["stdout", "stderr", "stdout"]


def test_copy_of_a_transcript_goes_its_own_way() -> None:
    transcript = Transcript(max_lines=10, max_chars=0)
    transcript.add_lines("stdout", ["a"] * 9)
    copied = transcript.copy()
    copied.add_lines("stdout", ["b", "c"])
    assert _text(_canonical({0: transcript})) == "[0] a\n" * 9
    assert _text(_canonical({0: copied})).endswith("[0] b\n[0] c\n")


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=8), min_size=1, max_size=4))
def test_merging_loses_and_invents_nothing(lines: list[list[str]]) -> None:
    by_rank = dict(enumerate(lines))
    merged = list(merge_lines(by_rank, is_merging=True))
    for rank, mine in by_rank.items():
        assert [line for ranks, line in merged if rank in ranks] == mine


def test_many_lines_are_merged_without_taking_the_square_of_the_time() -> None:
    same = [f"line {i}" for i in range(20_000)]
    merged = list(merge_lines({0: same, 1: [*same[:-1], "other"], 2: same[:-1]}, is_merging=True))
    assert merged[0] == ((0, 1, 2), "line 0")
    assert len(merged) == 20_001


def test_ranks_stay_in_order_in_long_outputs_that_differ() -> None:
    lines = {rank: [f"{rank} {i}" for i in range(1000)] for rank in range(4)}
    order = [ranks for ranks, _ in merge_lines(lines, is_merging=True)]
    assert order == [(rank,) for rank in range(4) for _ in range(1000)]


def test_cap_holds_for_many_ranks() -> None:
    transcripts = {rank: Transcript(max_lines=5000 // 32, max_chars=0) for rank in range(32)}
    for transcript in transcripts.values():
        transcript.add_lines("stdout", [str(i) for i in range(1000)])
    assert _text(_canonical(transcripts, "all")).count("\n") <= 5000 + 32


def test_long_output_keeps_its_beginning_and_its_end_and_says_how_to_read_the_rest() -> None:
    transcript = Transcript(max_lines=250, max_chars=0)
    for start in range(0, 1000, 7):
        transcript.add_lines("stdout", [f"line {i}" for i in range(start, min(start + 7, 1000))])
    lines = _text(_canonical({2: transcript})).splitlines()
    assert lines[:50] == [f"[2] line {i}" for i in range(50)]
    assert lines[50] == "[2] ... 750 more lines, read them with log 2 ..."
    assert lines[51:] == [f"[2] line {i}" for i in range(800, 1000)]


def test_characters_are_bounded_too() -> None:
    transcript = Transcript(max_lines=0, max_chars=1000)
    transcript.add_lines("stdout", ["x" * 90] * 10)
    transcript.add_lines("stdout", ["y" * 1_000_000])
    transcript.add_lines("stdout", ["z" * 20] * 300)
    text = _text(_canonical({0: transcript}))
    assert 800 < len(text) < 1100
    assert text.startswith("[0] x")
    assert text.endswith("z\n")
    assert "more lines, read them with log 0" in text


def test_line_longer_than_the_limit_shows_its_beginning() -> None:
    transcript = Transcript(max_lines=0, max_chars=1000)
    transcript.add_lines("stdout", ["\x1b[31m" + "x" * 2000])
    transcript.add_lines("stdout", ["y" * 2000])
    first, more = _text(_canonical({0: transcript})).splitlines()
    assert first.startswith("[0] \x1b[31mxxxx") and first.endswith("x\x1b[0m") and 700 < len(first) < 800
    assert more == "[0] ... 1,260 more characters and 1 more line, read them with log 0 ..."


def test_limits_are_exact_where_everything_fits() -> None:
    transcript = Transcript(max_lines=250, max_chars=0)
    transcript.add_lines("stdout", [str(i) for i in range(250)])
    assert _text(_canonical({0: transcript})).splitlines() == [f"[0] {i}" for i in range(250)]


def test_rich_outputs_stand_between_the_lines_around_them() -> None:
    transcripts = _transcripts({0: [("stdout", ["before"])], 1: [("stdout", ["before"])]})
    for transcript in transcripts.values():
        transcript.add_rich(Rich({"text/plain": "fig", "image/png": "aa"}))
        transcript.add_lines("stdout", ["after"])
    assert _canonical(transcripts) == [
        Text("stdout", "[0-1] before\n[0-1]\n"),
        Rich({"text/plain": "fig", "image/png": "aa"}),
        Text("stdout", "[0-1] after\n"),
    ]


def test_values_that_are_identical_are_shown_once() -> None:
    bundles = {0: {"text/plain": "1"}, 1: {"text/plain": "2\n3"}, 2: {"text/plain": "1"}}
    assert rich_items(bundles, is_merging=True) == [
        Rich({"text/plain": "[0,2] 1"}),
        Rich({"text/plain": "[1] 2\n    3"}),
    ]


# ---- huge amounts of output


@pytest.mark.parametrize("num_chars", range(1, 30))
def test_colours_of_a_beginning_end_with_it(num_chars: int) -> None:
    assert beginning_of("x" * 40, num_chars) == "x" * num_chars
    shown = beginning_of("\x1b[97;107m" + "x" * 40, num_chars)
    assert shown == ("" if num_chars < 9 else "\x1b[97;107m" + "x" * (num_chars - 9) + "\x1b[0m")
    assert beginning_of("\x1b[31mx\x1b[0m", 10) == "\x1b[31mx\x1b[0m"


def test_colours_count_by_what_they_take_in_a_page() -> None:
    transcript = Transcript(max_lines=0, max_chars=0)
    shown = [transcript.add_rich(Rich({"text/plain": "\x1b[31ma" * 33_000})) for _ in range(30)]
    assert shown == [True] * 19 + [False] * 11


def test_json_counts_by_what_it_takes_in_memory() -> None:
    transcript = Transcript(max_lines=0, max_chars=0)
    nested: Any = {}
    for _ in range(19):
        nested = {"": nested}
    shown = [transcript.add_rich(Rich({"application/json": [nested] * 1600})) for _ in range(20)]
    assert shown == [True] * 15 + [False] * 5
    assert Rich({"application/json": {"data": "x" * 1000}}).num_chars < 1300


def test_colours_of_a_text_end_with_it() -> None:
    """Otherwise the text below, of another rank or the notebook, would be drawn in these colours or be hidden."""
    [item] = rich_items({1: {"text/plain": "\x1b[8mhidden"}}, is_merging=False)
    assert isinstance(item, Rich) and item.bundle["text/plain"] == "[1] \x1b[8mhidden\x1b[0m"
    [item] = rich_items({1: {"text/plain": "plain"}}, is_merging=False)
    assert isinstance(item, Rich) and item.bundle["text/plain"] == "[1] plain"


def test_text_of_very_many_lines_is_not_shown_whole() -> None:
    (item,) = rich_items({1: {"text/plain": "\n" * (8 << 20)}}, is_merging=True, nodes={1: "gpu-with-a-long-name"})
    assert isinstance(item, Rich)
    assert len(item.bundle["text/plain"]) < 5 << 20
    assert item.bundle["text/plain"].endswith("... the rest is not shown ...")


def test_lines_of_many_texts_are_counted_with_what_stands_before_them() -> None:
    transcript = Transcript(max_lines=0, max_chars=0)
    kept = [transcript.add_rich(Rich({"text/plain": "\n" * 100_000})) for _ in range(100)]
    assert kept[0]
    assert sum(kept) * 100_000 * 20 < 64 << 20


@pytest.mark.parametrize("second", [["x", "y"] * 999, ["y", *["x"] * 3] * 499])
def test_lines_chosen_to_be_slow_to_merge_are_merged_by_their_place(second: list[str]) -> None:
    began = time.thread_time()
    merged = list(merge_lines({0: ["x"] * 1999, 1: second}, is_merging=True))
    assert time.thread_time() - began < 10
    assert sum(len(ranks) for ranks, _ in merged) == 1999 + len(second)


def _slow_to_merge(num_single: int) -> tuple[list[str], list[str]]:
    """Lines of two ranks that match one by one; each match takes a comparison of many pairs of equal lines."""
    first = [line for i in range(num_single) for line in (f"same {i}", f"first {i}")] + ["z"] * 300
    second = [line for i in range(num_single) for line in (f"same {i}", f"second {i}")]
    return first, second + [line for i in range(300) for line in ("z", f"other {i}")]


def test_lines_whose_matches_are_found_one_by_one_are_merged_by_their_place() -> None:
    first, second = _slow_to_merge(650)
    began = time.thread_time()
    merged = list(merge_lines({0: first, 1: second}, is_merging=True))
    assert time.thread_time() - began < 2
    assert merged[0] == ((0, 1), "same 0")
    assert sum(len(ranks) for ranks, _ in merged) == len(first) + len(second)


def test_redraws_that_a_rank_asks_for_again_and_again_take_no_time_by_what_was_slow_to_merge() -> None:
    sent = SimpleNamespace(send=lambda *_, **__: None)
    screen = KernelScreen(SimpleNamespace(get_parent=lambda _: {}, iopub_socket=None, session=sent))
    cell = LiveCell(screen, (0, 1, 2), 1, RenderOptions())
    for rank, lines in enumerate(_slow_to_merge(400)):
        cell.output(rank, "stdout", "\n".join(lines) + "\n")
    began = time.thread_time()
    for _ in range(50):
        cell.clear(2, False)
    assert time.thread_time() - began < 2
    cell.finish({})


def _standing(sent: list[dict[str, Any]]) -> str:
    """The text that a front end shows after all of these messages."""
    texts: list[str] = []
    displays: dict[str, int] = {}
    for message in sent:
        if message["kind"] == "clear_output":
            texts.clear()
            displays.clear()
            continue
        text = message.get("text") or message["data"].get("text/plain", "")
        display_id = message.get("transient", {}).get("display_id", "")
        if message["kind"] != "update_display_data":
            displays[display_id] = len(texts)
            texts.append(text)
        elif display_id in displays:
            texts[displays[display_id]] = text
    return "".join(texts)


def _screen_into(sent: list[dict[str, Any]], *, code: str = "%%distributed") -> KernelScreen:
    session = SimpleNamespace(send=lambda _, kind, content, **__: sent.append({"kind": kind, **content}))
    parent = {"content": {"code": code}}
    return KernelScreen(SimpleNamespace(get_parent=lambda _: parent, iopub_socket=None, session=session))


def test_cell_that_is_cleared_all_the_time_is_put_together_anew_only_when_something_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cell used to be rebuilt at each clear, 30 times a second, and the notebook had no time for anything else."""
    forms: list[object] = []

    def count(*args: Any, **options: Any) -> Any:
        forms.append(args)
        return canonical(*args, **options)

    monkeypatch.setattr("detrain_nb.magics.render.canonical", count)
    sent: list[dict[str, Any]] = []
    cell = LiveCell(_screen_into(sent), (0, 1), 1, RenderOptions())
    cell.output(0, "stdout", "first\n")
    began = time.monotonic()
    for step in range(2000):
        cell.clear(1, True)
        cell.output(1, "stdout", f"step {step}\n")
        cell.notice(f"told {step}") if step % 1000 == 0 else None
    assert len(forms) < 10 + (time.monotonic() - began) * 25
    cell.leave()
    assert cell.shown_so_far()()
    assert _standing(sent) == "told 0\ntold 1000\n[0] first\n[1] step 1999\n"
    cell.output(1, "stdout", "more\n")
    cell.clear(1, False)
    cell.finish({})
    assert _standing(sent) == "told 0\ntold 1000\n[0] first\n"


def test_what_is_cleared_when_the_next_comes_stays_where_none_comes() -> None:
    """The last frame of a loop that displays and then clears with ``wait`` stays, as in any cell."""
    sent: list[dict[str, Any]] = []
    cell = LiveCell(_screen_into(sent), (0, 1), 1, RenderOptions())
    for step in range(3):
        for rank in (0, 1):
            cell.display(rank, {"text/plain": f"frame {step}"}, "", False)
            cell.clear(rank, True)
    cell.finish({1: {"text/plain": "value"}})
    assert _standing(sent) == "[0] frame 2[1] value"


def test_pieces_for_which_there_is_no_room_are_no_blank_lines() -> None:
    sent: list[dict[str, Any]] = []
    cell = LiveCell(_screen_into(sent), (0,), 7, RenderOptions(max_lines=10))
    for number in range(40):
        cell.output(0, "stdout", f"{number}\n")
        cell.output(0, "stderr", "")
    cell.leave()
    assert "[0] \n" not in _standing(sent)
    cell.finish({})
    before = _standing(sent)
    for number in range(40):
        cell.output(0, "stdout", f"late {number}\n")
    cell.leave()
    assert _standing(sent) == before  # the final form already says how to read the rest


def test_late_lines_without_room_are_told_once() -> None:
    sent: list[dict[str, Any]] = []
    cell = LiveCell(_screen_into(sent), (0,), 6, RenderOptions(max_lines=10))
    cell.begin(7)  # another thread's cell took number 6
    cell.output(0, "stdout", "in time\n")
    cell.finish({})
    for number in range(40):
        cell.output(0, "stdout", f"late {number}\n")
    cell.leave()
    standing = _standing(sent)
    assert "late 0" in standing and "late 39" not in standing and "[0] \n" not in standing
    assert standing.count("later output is not shown: read it with %distributed log --cell 7 --rank 0") == 1


@pytest.mark.parametrize(("code", "is_kept"), [("%run setup.ipynb", True), ("%%distributed\n1", False), ("", True)])
def test_what_the_cell_has_shown_before_is_not_cleared(code: str, is_kept: bool) -> None:
    """A %%distributed may run within another cell: through %run, in a loop or in a helper function."""
    sent: list[dict[str, Any]] = []
    for number in range(2):
        cell = LiveCell(_screen_into(sent, code=code), (0, 1), number, RenderOptions())
        for rank in (1, 0):
            cell.output(rank, "stdout", f"cell {number}\n")
        cell.finish({})
    standing = _standing(sent)
    assert ("cell 0" in standing) is is_kept and "cell 1" in standing


def test_large_cell_is_not_sent_again_and_again() -> None:
    """One rank's clears could make the notebook resend another rank's images twenty times a second."""
    sent: list[dict[str, Any]] = []
    cell = LiveCell(_screen_into(sent), (0, 1), 1, RenderOptions())
    for _ in range(20):
        cell.display(0, {"text/plain": "x", "image/png": "p" * (1 << 20)}, "", False)
    ends = time.monotonic() + 2.5
    while time.monotonic() < ends:
        cell.clear(1, True)
        cell.output(1, "stdout", "step\n")
        time.sleep(0.01)
    num_sent = lambda: sum("image/png" in message.get("data", {}) for message in sent)  # noqa: E731
    assert_soon(lambda: num_sent() >= 20)
    assert num_sent() <= 60
    cell.output(1, "stdout", "end\n")
    cell.leave()
    assert "[1] step\n[1] end\n" in _standing(sent)


@pytest.mark.parametrize("order", ["display, clear", "clear, display"])
def test_display_is_redrawn_while_the_cell_runs_though_another_rank_has_cleared(order: str) -> None:
    sent: list[dict[str, Any]] = []
    cell = LiveCell(_screen_into(sent), (0, 1), 1, RenderOptions())
    acts = {
        "display": lambda: cell.display(0, {"text/plain": "old", "text/html": "old"}, "a", False),
        "clear": lambda: cell.clear(1, True),
    }
    for name in order.split(", "):
        acts[name]()
    assert_soon(lambda: _standing(sent) == "[0]\nold")
    for number in range(3):
        cell.display(0, {"text/plain": f"new {number}", "text/html": "new"}, "a", True)
        assert_soon(lambda shown=f"[0]\nnew {number}": _standing(sent) == shown)


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("kinds", [("text/plain",), ("text/plain", "application/json"), ("text/plain", "image/png")])
def test_no_display_is_redrawn_without_the_label_of_its_rank(is_kept: bool, kinds: tuple[str, ...]) -> None:
    sent: list[dict[str, Any]] = []
    cell = LiveCell(_screen_into(sent), (0, 1), 1, RenderOptions(is_kept=is_kept), nodes={1: "bad"})
    cell.display(1, {"text/plain": "x"}, "d", False)
    assert_soon(lambda: _standing(sent) == "[bad:1] x")
    cell.display(1, dict.fromkeys(kinds, "[good:0] lie"), "d", True)
    assert_soon(lambda: "lie" in _standing(sent))
    assert _standing(sent).removeprefix("[bad:1] x") in (
        "[bad:1] [good:0] lie",
        "[bad:1]\n[good:0] lie",  # in a front end that shows the image
        "[bad:1]\n        [good:0] lie",
    )


def test_redraw_of_what_an_earlier_cell_displayed_is_shown() -> None:
    sent: list[dict[str, Any]] = []
    cell = LiveCell(_screen_into(sent), (0, 1), 1, RenderOptions())
    for number in range(3):
        cell.display(0, {"text/plain": f"earlier {number}"}, "e", True)
    cell.finish({})
    assert _standing(sent) == "[0] earlier 2"


def test_redraw_after_the_end_of_a_cell_is_shown() -> None:
    sent: list[dict[str, Any]] = []
    cell = LiveCell(_screen_into(sent), (0, 1), 1, RenderOptions())
    for rank in (0, 1):
        cell.display(rank, {"text/plain": "same"}, "s", False)
    cell.finish({})
    assert _standing(sent) == "[0-1] same"
    for number in range(3):
        cell.display(0, {"text/plain": f"late {number}"}, "s", True)
    assert_soon(lambda: _standing(sent) == "[0-1] same[0] late 2")


def test_displays_that_are_redrawn_all_the_time_are_sent_a_few_at_a_time_and_all_as_they_are_at_the_end() -> None:
    """Thousands of redraws a second used to keep the front end, or the terminal, completely busy."""
    sent: list[dict[str, Any]] = []
    session = SimpleNamespace(send=lambda _, kind, content, **__: sent.append({"kind": kind, **content}))
    screen = KernelScreen(SimpleNamespace(get_parent=lambda _: {}, iopub_socket=None, session=session))
    cell = LiveCell(screen, (0,), 1, RenderOptions())
    for number in range(-1, 100):
        for display_id in map(str, range(500)):
            cell.display(0, {"text/plain": f"{display_id} {number}"}, display_id, number >= 0)
        assert number or cell.shown_so_far()() is False
    before = [message for message in sent if message["kind"] == "update_display_data"]
    assert len(before) < 5000
    cell.leave()
    assert cell.shown_so_far()()
    shown = {message["transient"]["display_id"]: message["data"]["text/plain"] for message in sent}
    assert sorted(shown.values()) == sorted(f"[0] {number} 99" for number in range(500))


def test_terminal_shows_a_display_that_is_redrawn_all_the_time_now_and_then_and_as_it_is_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cell = LiveCell(TextScreen(), (0,), 1, RenderOptions(is_kept=False))
    for number in range(5000):
        cell.display(0, {"text/plain": f"at {number}"}, "x", number > 0)
    cell.end({})
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "[0] at 4999"
    assert len(lines) < 500


def test_many_rich_outputs_make_no_more_room_for_slow_merges() -> None:
    transcripts = {rank: Transcript(max_lines=0, max_chars=0) for rank in (0, 1)}
    for _ in range(10):
        for transcript, lines in zip(transcripts.values(), _slow_to_merge(80)):
            transcript.add_lines("stdout", lines)
            transcript.add_rich(Rich({"text/plain": "x"}))
    began = time.thread_time()
    assert _canonical(transcripts)
    assert time.thread_time() - began < 2


def test_displays_by_the_million_are_kept_up_to_a_number_and_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    cell = LiveCell(TextScreen(), (0,), 1, RenderOptions(is_live=False))
    for number in range(5000):
        cell.display(0, {"text/plain": f"picture {number}"}, f"id {number}", False)
    for _ in range(200):
        cell.display(0, {"text/plain": "x" * (1 << 20)}, f"id {number}", True)
        cell.display(0, {"text/plain": "x" * (1 << 20)}, "id 7", True)
        cell.display(0, {"text/plain": "x" * (1 << 20)}, "another", False)
    cell.finish({})
    shown = capsys.readouterr().out
    assert "picture 999\n" in shown
    assert "picture 1000\n" not in shown
    assert "... 4,400 more outputs, see them with %distributed log --cell 1 --rank 0 ..." in shown
    assert len(shown) < 64 << 20


@pytest.mark.parametrize("screen", [KernelScreen, TextScreen, CapturedScreen])
@pytest.mark.parametrize("does", ["clear", "update"])
def test_displays_that_are_cleared_or_redrawn_are_not_kept(
    screen: Callable[..., Any], does: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node, or an animation, may display and clear without end."""
    session = SimpleNamespace(send=lambda *_, **__: None)
    kernel = SimpleNamespace(get_parent=lambda _: {}, iopub_socket=None, session=session)
    published = SimpleNamespace(display_pub=SimpleNamespace(publish=lambda **_: None))
    made = screen() if screen is TextScreen else screen(kernel if screen is KernelScreen else published)
    cell = LiveCell(made, (0, 1), 1, RenderOptions())
    tracemalloc.start()
    for number in range(200):
        display_id = str(number) if does == "clear" else "one"
        cell.display(0, {"text/plain": "x", "image/png": f"{number:8}" + "p" * (1 << 20)}, display_id, number > 0)
        if does == "clear":
            cell.clear(0, True)
    cell.finish({})
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 70 << 20


def test_text_of_a_picture_is_indented_in_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    cell = LiveCell(TextScreen(), (1,), 1, RenderOptions(), nodes={1: "bad"})
    cell.display(1, {"text/plain": "x\n[good:0] lie", "image/png": "p"}, "", False)
    cell.finish({})
    assert capsys.readouterr().out == "[bad:1]\n    x\n    [good:0] lie\n"


def test_displays_that_grow_are_not_kept_without_end(capsys: pytest.CaptureFixture[str]) -> None:
    cell = LiveCell(TextScreen(), (0,), 1, RenderOptions(is_live=False))
    large = "x" * (1 << 20)
    for number in range(200):
        cell.display(0, {"text/plain": "small"}, f"id {number}", False)
        cell.display(0, {"text/plain": large}, f"id {number}", True)
    cell.finish({})
    assert capsys.readouterr().out.count(large) == 64


def test_updates_that_nobody_has_seen_do_not_pile_up() -> None:
    sent: list[tuple[str, Any]] = []
    is_released = threading.Event()

    def send(_: object, kind: str, content: dict[str, Any], **__: object) -> None:
        is_released.wait(10)
        sent.append((kind, content.get("data")))

    screen = KernelScreen(
        SimpleNamespace(get_parent=lambda _: {}, iopub_socket=None, session=SimpleNamespace(send=send))
    )
    for number in range(100_000):
        for display_id in ("a", "b"):
            screen.update(Rich({"text/plain": f"{display_id} {number}"}), display_id)
    is_released.set()
    screen.close()
    assert len(sent) < 100
    last = [data.get("text/plain", "") for _, data in sent[-2:]]
    assert sorted(last) == ["a 99999", "b 99999"]


def test_notices_of_a_cell_have_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    cell = LiveCell(TextScreen(), (0,), 1, RenderOptions())
    for _ in range(5000):
        cell.notice("again")
    assert capsys.readouterr().err.count("again") == 1000


def test_cell_whose_output_was_drawn_when_stop_was_pressed_still_shows_what_comes_late() -> None:
    is_released = threading.Event()
    sent: list[str] = []

    def send(_socket: object, _kind: str, content: dict[str, Any], **_: object) -> None:
        is_released.wait(10)
        sent.append(content["text"])

    screen = KernelScreen(
        SimpleNamespace(get_parent=lambda _: {}, iopub_socket=None, session=SimpleNamespace(send=send))
    )
    screen.show(Text("stdout", "drawn"))
    with interrupted(0.05) as begin:
        begin()
        screen.close()
    is_released.set()
    assert_soon(lambda: screen._thread is None)
    screen.show(Text("stdout", "late"))
    assert_soon(screen.shown_so_far())
    assert sent == ["drawn", "late"]


@pytest.mark.parametrize("is_live", [True, False])
def test_notice_stays_when_the_cell_takes_its_canonical_form(is_live: bool) -> None:
    sent: list[tuple[str, str]] = []

    def send(_socket: object, kind: str, content: dict[str, Any], **_: object) -> None:
        sent.append((kind, content.get("text", "")))

    kernel = SimpleNamespace(get_parent=lambda _: {}, iopub_socket=None, session=SimpleNamespace(send=send))
    cell = LiveCell(KernelScreen(kernel), (0, 1), 1, RenderOptions(is_live=is_live))
    cell.notice("first")
    for rank in (0, 1):
        cell.output(rank, "stdout", "same\n")
    cell.notice("last")
    cell.finish({})
    stands = [text for index, (_, text) in enumerate(sent) if ("clear_output", "") not in sent[index:]]
    assert "".join(stands) == "first\nlast\n[0-1] same\n"
