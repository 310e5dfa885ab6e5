"""Which part of a cell a rank can run without the others."""

from __future__ import annotations

import pytest

from detrain_nb.session.definitions import definitions_of


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
