"""Printed output of a cell: colours if the terminal shows them, and lines that fit its width."""

from __future__ import annotations

import io

import pytest

from detrain_nb.cli.terminal import Terminal


class _Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def _shown(stream: io.StringIO, kind: str, text: str) -> str:
    terminal = Terminal(stream, stream, on_gone=lambda: None)
    terminal.begin_cell("")
    if kind == "stream":
        terminal.take("stream", {"name": "stdout", "text": text})
    else:
        terminal.take("display_data", {"data": {"text/plain": text}, "transient": {"display_id": "1"}})
    return stream.getvalue()


def test_colours_are_for_terminals() -> None:
    assert _shown(io.StringIO(), "stream", "\x1b[1;31mred\x1b[0m\n") == "red\n"
    assert _shown(_Tty(), "stream", "\x1b[1;31mred\x1b[0m\n") == "\x1b[1;31mred\x1b[0m\n"


def test_bar_that_is_too_long_keeps_its_colours_whole_and_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "11")
    bar = "\x1b[31m12345\x1b[0m\x1b[32m67890ABC\x1b[0m"
    assert _shown(_Tty(), "display", bar) == "\x1b[31m12345\x1b[0m\x1b[32m67890\x1b[0m"


def test_figure_of_a_rank_that_is_new_comes_with_its_label() -> None:
    """Its text equals that of another rank's figure shown earlier; the label used to be printed alone."""
    out = io.StringIO()
    terminal = Terminal(out, io.StringIO(), on_gone=lambda: None)
    figure = {"data": {"text/plain": "<Figure>", "image/png": ""}}
    terminal.begin_cell("cell")
    terminal.take("stream", {"name": "stdout", "text": "[0]\n"})
    terminal.take("display_data", figure)
    terminal.take("clear_output", {"wait": True})
    terminal.take("stream", {"name": "stdout", "text": "[0-1]\n"})
    terminal.take("display_data", figure)
    terminal.take("stream", {"name": "stdout", "text": "[0] \nend\n"})
    terminal.end_cell()
    assert out.getvalue() == "cell\n[0]\n<Figure>\n[1]\n<Figure>\n[0] \nend\n"
