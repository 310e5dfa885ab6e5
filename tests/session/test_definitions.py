"""The part of a cell that a rank can run without the others: its imports and definitions."""

from __future__ import annotations

import time

import pytest

from detrain_nb.session.state.definitions import definitions_of


def test_imports_and_definitions_stay_on_their_lines() -> None:
    code = '''%load_ext autoreload
import os, sys; t = torch.ones(1); from math import pi
!ls
@torch.no_grad()
def f(x,
      y=2):
    """Of
%s
"""
    return x
dist.all_reduce(t)
try:
    import tqdm
except ImportError:
    tqdm = None
for i in range(3):
    import zlib
class Net(torch.nn.Module): pass
async def g(): await f()
here = %pwd
"ü"; import json
'''
    gone = (3, 11, 16, 17, 20)
    expected = code.split("\n")
    expected[1], expected[20] = "import os, sys; from math import pi", "import json"
    assert definitions_of(code).split("\n") == ["" if n in gone else line for n, line in enumerate(expected, start=1)]


@pytest.mark.parametrize(
    "code", ["x = 1", "dist.barrier()", "", "x = (", "%%bash\nimport x", "%%writefile f.py\nimport os", "!import x"]
)
def test_there_may_be_none(code: str) -> None:
    assert definitions_of(code) == ""


def test_cell_magic_around_python_is_looked_into() -> None:
    assert definitions_of("%%time\nimport os\nx = 1\n").split() == ["import", "os"]


@pytest.mark.parametrize("end", ["\r", "\r\n"])
def test_lines_may_end_as_python_lets_them(end: str) -> None:
    assert definitions_of(f"import os{end}x = 1{end}import json").split("\n") == ["import os", "", "import json"]


def test_lines_of_ipython_may_hold_what_is_no_text() -> None:
    assert definitions_of("!echo \ud800\nimport os") == "\nimport os"


def test_what_is_parsed_of_a_cell_is_bounded() -> None:
    """The syntax tree of a few megabytes of code, made up by a node, takes gigabytes."""
    assert definitions_of("import os\n" + "0," * (1 << 16)) == "import os\n"
    assert definitions_of("import os\n" + "0," * (1 << 17)) == ""


@pytest.mark.parametrize("prefix", ["f", "F", "rf", "fR"])
def test_f_strings_are_not_parsed_at_any_length(prefix: str) -> None:
    """Python's parser takes time quadratic in the length of an f-string: 5 s for 256 K characters."""
    assert definitions_of("import os\n" + f"{prefix}'" + "{a}" * 20 + "'") == "import os\n"
    assert definitions_of("import os\n" + f"{prefix}'" + "{a}" * 20_000 + "'") == ""


@pytest.mark.timeout(5)  # Python's parser would need minutes
@pytest.mark.parametrize("code", ["import " + "a." * 100_000 + "a", "from " + "a.\\\n" * 60_000 + "a import b"])
def test_names_of_modules_are_not_parsed_at_any_length(code: str) -> None:
    assert definitions_of(code) == ""


def test_definitions_that_share_a_line_take_time_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detrain_nb.session.state.definitions._MOST_CHARS", 1 << 20)
    count = (1 << 20) // len("import a;")
    began = time.process_time()
    assert definitions_of("import a;" * count) == "; ".join(["import a"] * count)
    assert time.process_time() - began < 5  # takes 0.6 s; 10 to 40 s if each definition read the whole line


def test_what_python_thinks_of_a_cell_is_not_told_by_nobody(recwarn: pytest.WarningsRecorder) -> None:
    """The rank has already shown Python's warnings; a cell made up by a node could cause thousands of them."""
    assert definitions_of("import os\nx = 0if 0else 1") == "import os\n"
    assert definitions_of("%env A=1\nimport os\nx = '\\d', 0if 0else 1") == "%env A=1\nimport os\n"
    assert not recwarn.list
