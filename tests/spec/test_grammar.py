"""Text that is not a valid script crashes no process that checks it, and does not exhaust its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from detrain_nb.errors import SpecError
from detrain_nb.spec import PipelineSpec
from detrain_nb.spec.grammar import check_python

CHECK = """
from detrain_nb.spec import PipelineSpec
for text in "[x " + "for x in y " * 80_000 + "]", "-" * 1_900_000 + "1":
    print(*PipelineSpec.from_dict({"name": "deep", "source": {"script_text": text}}).check())
"""
TOO_DEEP = "source.script_text: the text: is not Python"  # such text crashes Python's own parser


@pytest.mark.timeout(120)
def test_text_on_which_python_crashes_ends_no_process_of_ours() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.startswith(TOO_DEEP) for line in done.stdout.splitlines()] == [True, True], done.stdout


@pytest.mark.timeout(120)
def test_text_that_takes_gigabytes_to_compile_is_refused() -> None:
    with pytest.raises(SpecError, match="the text: is not Python"):
        check_python(("import a" + ".b" * 50_000, "the text"))


def test_large_text_is_refused_before_it_is_read() -> None:
    with pytest.raises(SpecError, match="the text: larger than 2 MB: move data from it into files"):
        check_python(("a = 1\n" * 400_000, "the text"))


def test_folder_that_is_the_current_one_is_not_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("open('ran', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert PipelineSpec.from_dict({"name": "a", "source": {"script_text": "b = 1"}}).check() == []
    assert not Path("ran").exists()
